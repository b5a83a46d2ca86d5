"""understudy.js writes the same bytes as docs/protocol.md and Python."""

import re
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.nodes import needs_node, run_script
from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.names import new_session
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from understudy.games import rally

pytestmark = needs_node
PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
F32, F64, U8, I64 = (DTYPES[name] for name in ("F32", "F64", "U8", "I64"))

SPECS: list[dict[str, Any]] = [
    {"game": "cart", "obs": 2, "actions": ["left", "right"]},
    {"game": "guess-js", "obs": ["low", "high"], "actions": 16},
    {
        "game": "rally",
        "obs": list(rally.OBS_NAMES),
        "actions": list(rally.ACTION_NAMES),
        "max_episode_steps": 600,
    },
    {"game": "Bild.7_x", "obs": [84, 84], "actions": 3, "has_action_mask": True},
    {
        "game": "names",
        "obs": ["größe", "速度", "\U0001f3d3", "\uff5e", 'q"\\'],
        "actions": ["a", "é"],
    },
    {"game": "box", "obs": Box((3,), F32, -0.1, 1e-5), "actions": Box((2,), F32, (-1, -2.5), 1)},
    {
        "game": "odd",
        "obs": Box((2,), F64, (-1e300, 1e-5), (1e22, 1234.125)),
        "actions": Box((1,), F64, -0.0, 5e-324),
    },
    {
        "game": "image",
        "obs": Box((8, 8, 3), U8, 0, 255),
        "actions": Box((2, 2), U8, (0, 1, 2, 3), 9),
    },
    {
        "game": "parts",
        "obs": {"b": Discrete(5, 2, I64), "a.x": MultiBinary((4,)), "a.c": Box((2,), F32)},
        "actions": {"go": Discrete(3), "aim": MultiDiscrete((3, 4), (2,))},
    },
]


def plain(shape: Any) -> Any:
    """A shape as JSON, as a program in another language writes it."""
    if isinstance(shape, dict):
        return {path: space.to_json() for path, space in shape.items()}
    return shape.to_json() if hasattr(shape, "to_json") else shape


def spec_request(spec: dict[str, Any]) -> dict[str, Any]:
    fields = {"has_action_mask": False, "max_episode_steps": None} | spec
    return fields | {"obs": plain(spec["obs"]), "actions": plain(spec["actions"])}


def test_the_example_batch_is_reproduced_byte_for_byte():
    examples = re.findall(r"^```text\n((?:[0-9a-f]{1,64}\n)+)```", PAGE, re.MULTILINE)
    (expected,) = [text for text in examples if text.startswith("554e5041")]
    assert run_script("bytes.mjs", {})["frameBatch"] == expected.replace("\n", "")


def test_specs_and_schemas_equal_those_of_python():
    expected = [game_spec(**spec) for spec in SPECS]
    texts = [spec.to_json().decode() for spec in expected]
    output = run_script(
        "bytes.mjs", {"specs": [spec_request(spec) for spec in SPECS], "texts": texts}
    )
    assert output["specs"] == [
        [text, spec.schema] for text, spec in zip(texts, expected, strict=True)
    ]
    assert output["again"] == texts


def test_bounds_equal_to_the_range_of_the_dtype_are_omitted_as_in_python():
    box = {"space": "box", "dtype": "F32", "shape": [2], "low": [0.1, 0.1], "high": [2, 2]}
    request = {"game": "g", "obs": box, "actions": 2}
    spec = game_spec("g", obs=Box((2,), F32, (0.1, 0.1), (2, 2)), actions=2)
    assert run_script("bytes.mjs", {"specs": [request]})["specs"] == [
        [spec.to_json().decode(), spec.schema]
    ]


def test_an_invalid_spec_is_rejected_before_it_is_sent():
    bad = [
        {"game": "no/name", "obs": 2, "actions": 2},
        {"game": "g", "obs": 0, "actions": 2},
        {"game": "g", "obs": 2, "actions": []},
        {"game": "g", "obs": ["a", "a"], "actions": 2},
        {"game": "g", "obs": {}, "actions": 2},
        {"game": "g", "obs": 2, "actions": [1, 2]},
        {"game": "g", "obs": ["a\n"], "actions": 2},
        {"game": "g", "obs": 2, "actions": ["up", "\u202edown"]},
        {"game": "g", "obs": 2, "actions": [""]},
        {"game": "g", "obs": ["a", " "], "actions": 2},
        {"game": "g", "obs": 2, "actions": 10**9},
        {"game": "g", "obs": 2, "actions": 2, "has_action_mask": "x"},
    ]
    assert run_script("bytes.mjs", {"refused": bad})["refused"] == ["bad_name", *["bad_spec"] * 11]


def test_canonical_json_equals_that_of_python():
    values: list[Any] = [
        None,
        True,
        0,
        -7,
        2**53 - 1,
        0.1,
        -0.25,
        1.5e-7,
        123456.789,
        'é\n"\\\u2028\x01',
        [],
        {},
        [1, [2, {"b": 1}]],
        {"\U0001f3d3": 1, "\uff5e": 2, "a": 3, "Z": 4, "_": 5},
    ]
    assert run_script("bytes.mjs", {"values": values})["json"] == [
        canonical_json(value).decode() for value in values
    ]


def test_checksums_and_session_ids_equal_those_of_python():
    rng = np.random.default_rng(0)
    raw = [rng.bytes(size) for size in (0, 1, 3, 55, 56, 57, 63, 64, 65, 119, 120, 5000)]
    sessions = [(1_763_000_000_000 + at, rng.bytes(10)) for at in range(20)]
    output = run_script(
        "bytes.mjs",
        {
            "raw": [data.hex() for data in raw],
            "sessions": [(ms, random.hex()) for ms, random in sessions],
        },
    )
    assert output["sums"] == [[zlib.crc32(data), sha256(data).hexdigest()] for data in raw]
    assert output["sessions"] == [str(new_session(ms / 1000, random)) for ms, random in sessions]


def test_tensors_are_read_and_written_exactly_and_damaged_ones_are_rejected():
    rng = np.random.default_rng(1)
    columns = {
        f"c{name}": (
            rng.integers(0, 2, (3, 2)) if name == "BOOL" else rng.normal(0, 9, (3, 2))
        ).astype(dtype)
        for name, dtype in DTYPES.items()
        if name != "F16"
    }
    whole = tensors.encode(columns, {"a": "b", "ü": "\n"})
    bad = [
        whole[:-1],
        whole + b"\0",
        whole[:7],
        b"",
        whole.replace(b'"F32"', b'"F33"'),
        b"\xff" * 8 + whole[8:],
    ]
    bad.append(whole.replace(b'"data_offsets":[0', b'"data_offsets":[1'))
    output = run_script("bytes.mjs", {"tensors": [raw.hex() for raw in (whole, *bad)]})["tensors"]
    assert output == [whole.hex(), *["bad_tensors"] * len(bad)]
