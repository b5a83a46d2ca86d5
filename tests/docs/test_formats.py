"""docs/formats.md names what files really hold."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy
from tests.clients.test_policies_js import CASES, policy_of
from tests.platform.switches import GAME, QUICK
from understudy.core import tensors
from understudy.core.canonical import strict_json
from understudy.experience import spaces
from understudy.models.manifest import Lineage, make_manifest
from understudy.nn import network
from understudy.nn.policy import InitialPriority
from understudy.training.folder import CURVE, GUARDED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = QUICK | {"steps": 1_024, "min_inserts": 256}
    return understudy.train(
        GAME, algorithm="dqn", settings=settings, out=tmp_path_factory.mktemp("run") / "R"
    ).folder


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_file_of_a_run_is_in_the_table(folder: Path):
    told = section("Run")
    names = [f"`{path.name}{'/' * path.is_dir()}`" for path in folder.iterdir()]
    assert "`store/`" in names
    assert [name for name in names if name not in told] == []
    assert [name for name in (*CURVE, *GUARDED) if f"`{name}`" not in told] == []


def test_metadata_of_policies_and_checkpoints_are_named(folder: Path):
    told = section("Policy")
    (_, facts) = tensors.decode((folder / "last.safetensors").read_bytes())
    of_priority = (one.name for one in dataclasses.fields(InitialPriority))
    wanted = [*facts, facts["format"], *strict_json(facts["head"]), *of_priority]
    assert [key for key in wanted if f"`{key}`" not in told] == []
    raw = next((folder / "checkpoints").iterdir()).read_bytes()
    told = section("Checkpoint")
    (arrays, facts) = tensors.decode(raw)
    wanted = [*facts, facts["format"], *(f"{name.partition('.')[0]}." for name in arrays)]
    assert [key for key in wanted if f"`{key}`" not in told] == []


def test_every_kind_of_layer_and_part_of_a_network_is_named(folder: Path):
    told = section("Network")
    _, facts = tensors.decode((folder / "last.safetensors").read_bytes())
    assert [
        kind
        for kind in (*network._KINDS, *strict_json(facts["network"]))
        if f"`{kind}`" not in told
    ] == []


def test_the_fields_of_every_layer_and_space_are_those_of_the_page():
    for title, column, kinds in (
        ("Network", "layer", network._KINDS),
        ("Game spec", "space", spaces._KINDS),
    ):
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*)\|", section(title), re.MULTILINE))
        for name, kind in kinds.items():
            fields = {field.name for field in dataclasses.fields(kind)} - {"dtype"}
            assert set(re.findall(r"`(\w+)`", rows[name])) == fields, f"{column} {name}"


# --- A reader of policies written from the page alone ---------------------------------------------


def read_safetensors(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    facts = header.pop("__metadata__")
    data = raw[8 + length :]
    weights = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for name, entry in header.items()
    }
    return facts, weights


def through(
    x: np.ndarray,
    layers: list[dict[str, Any]],
    weights: dict[str, np.ndarray],
    place: str,
    *,
    others: Any = ({}, {}),
) -> Any:
    """The layers of the page for one row, in float64; `others`: columns and rows of the inputs."""
    for index, layer in enumerate(layers):
        prefix = f"{place}.{index}."
        own = {
            name.removeprefix(prefix): array
            for name, array in weights.items()
            if name.startswith(prefix)
        }
        x = centre(layer, x, *others) if layer["layer"] == "centre" else run_layer(layer, x, own)
    return x


def centre(
    layer: dict[str, Any],
    x: np.ndarray,
    columns: dict[str, np.ndarray],
    rows: dict[str, np.ndarray],
) -> np.ndarray:
    high, wide, channels = x.shape
    if layer["channel"] >= 0:
        row, column = divmod(int(x[..., layer["channel"]].argmax()), wide)
    else:
        row, column = (
            int(min(max(columns[name].ravel()[index], 0), side - 1))
            for (name, index), side in ((layer["row"], high), (layer["column"], wide))
        )
    extra = np.concatenate([np.zeros(0), *(rows[name].ravel() for name in layer["others"])])
    tall, broad = (min(2 * side, 2 * layer["radius"] + 2) - 1 for side in (high, wide))
    out = np.zeros((tall, broad, channels + 1 + len(extra)))
    for down in range(tall):
        for across in range(broad):
            at = (row + down - tall // 2, column + across - broad // 2)
            if 0 <= at[0] < high and 0 <= at[1] < wide:
                out[down, across, : channels + 1] = [*x[at], 1]
            out[down, across, channels + 1 :] = extra
    return out


def run_layer(layer: dict[str, Any], x: np.ndarray, own: dict[str, np.ndarray]) -> Any:
    def linear(name: str, x: np.ndarray) -> Any:
        return x @ own[f"{name}kernel"] + own[f"{name}bias"]

    match layer["layer"]:
        case "dense":
            return linear("", x)
        case "conv":
            side = layer["kernel"]
            step = layer["stride"]
            lines = range(0, x.shape[0] - side + 1, step)
            columns = range(0, x.shape[1] - side + 1, step)
            patches = [[x[i : i + side, j : j + side] for j in columns] for i in lines]
            return np.einsum("ijabc,abcd->ijd", np.array(patches), own["kernel"]) + own["bias"]
        case "layer_norm":
            centred = x - x.mean(-1, keepdims=True)
            scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
            return scaled * own["scale"] + own["bias"]
        case "observation_norm":
            return np.clip((x - own["mean"]) / np.sqrt(own["var"] + 1e-8), -10, 10)
        case "flatten":
            return x.reshape(-1)
        case "activation":
            return {
                "relu": lambda: np.maximum(x, 0),
                "tanh": lambda: np.tanh(x),
                "sigmoid": lambda: 1 / (1 + np.exp(-x)),
                "silu": lambda: x / (1 + np.exp(-x)),
                "elu": lambda: np.where(x < 0, np.exp(np.minimum(x, 0)) - 1, x),
                "gelu": lambda: x / 2 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
            }[layer["name"]]()
        case "dueling":
            value = x
            advantage = x
            if layer["hidden"]:
                value = np.maximum(linear("value_hidden.", x), 0)
                advantage = np.maximum(linear("advantage_hidden.", x), 0)
            advantage = linear("advantage.", advantage)
            return linear("value.", value) + advantage - advantage.mean()
        case "scale_image":
            return x / 255
        case "channels":
            others = [axis for axis in range(x.ndim) if axis not in layer["axes"]]
            moved = x.transpose([*others, *layer["axes"]])
            return moved.reshape(*moved.shape[: len(others)], -1)
        case "one_hot":
            return (x[..., None] == layer["start"] + np.arange(layer["n"])).astype(float)
        case "constant":
            return own["constant"]


def golden_outputs(raw: bytes) -> dict[str, np.ndarray]:
    """Each head's outputs for the two observations of the page."""
    facts, weights = read_safetensors(raw)
    spec = json.loads(facts["network"])
    inputs = dict(sorted(spec["inputs"].items()))
    observations: dict[str, np.ndarray] = {}
    k = 0
    for name, column in inputs.items():
        numbers = []
        for _ in range(2 * math.prod(column["shape"])):
            k += 1
            h = k * 2654435761 % 2**32
            numbers.append(h / 2**31 - 1 if column["dtype"].startswith("F") else h >> 31)
        observations[name] = np.array(numbers, float).reshape(2, *column["shape"])
    outputs: dict[str, list[Any]] = {name: [] for name in spec["heads"]}
    for row in range(2):
        parts: dict[str, np.ndarray] = {}
        columns = {name: column[row] for name, column in observations.items()}
        for name in sorted(inputs, key=lambda name: "centre" in str(inputs[name]["layers"])):
            layers = inputs[name]["layers"]
            others = (columns, parts)
            out = through(columns[name], layers, weights, f"inputs.{name}", others=others)
            parts[name] = np.atleast_1d(out)
        row_of_all = np.concatenate([parts[name] for name in inputs])
        features = through(row_of_all, spec["trunk"], weights, "trunk")
        for head, layers in spec["heads"].items():
            outputs[head].append(through(features, layers, weights, f"heads.{head}"))
    return {name: np.array(rows) for name, rows in outputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_written_from_the_page_reproduces_the_golden_outputs(name: str):
    policy = policy_of(CASES[name], 3)
    raw = policy.encode()
    golden = make_manifest(policy, raw, model_no=1, lineage=Lineage(algorithm="bc")).golden
    outputs = golden_outputs(raw)
    assert outputs.keys() == golden.keys()
    for head, rows in golden.items():
        expected = np.array(rows)
        assert outputs[head].shape == expected.shape
        assert (np.abs(outputs[head] - expected) <= 1e-4 + 1e-4 * np.abs(expected)).all()
