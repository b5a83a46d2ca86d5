"""docs/formats.md names what files really hold."""

import dataclasses
from pathlib import Path

import pytest

import understudy
from tests.platform.switches import GAME, QUICK
from understudy.core import tensors
from understudy.core.canonical import strict_json
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
