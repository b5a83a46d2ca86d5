"""Sample files of every format version are read exactly as when they were written."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.experience.chunk import chunk_of
from understudy.experience.frame import VERSION, FrameKind, decode_frame, read_close, read_drop
from understudy.experience.game import spec_from_json

SAMPLES = Path(__file__).parent / "samples"
FORMATS = sorted(SAMPLES.iterdir())
EXPECTED: dict[str, dict[str, Any]] = {
    folder.name: json.loads((folder / "expected.json").read_text()) for folder in FORMATS
}
FRAMES = [(folder, name) for folder in FORMATS for name in EXPECTED[folder.name]["frames"]]


def test_the_current_format_has_samples() -> None:
    assert f"format-{VERSION}" in EXPECTED
    for folder in FORMATS:
        known = {f"{name}.bin" for name in EXPECTED[folder.name]["frames"]}
        known |= {f"spec-{game}.json" for game in EXPECTED[folder.name]["schemas"]} | {
            "expected.json"
        }
        assert {file.name for file in folder.iterdir()} == known
        assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000


@pytest.mark.parametrize(
    ("folder", "name"), FRAMES, ids=[f"{folder.name}-{name}" for folder, name in FRAMES]
)
def test_a_sample_frame_is_decoded_as_expected(folder: Path, name: str) -> None:
    raw = (folder / f"{name}.bin").read_bytes()
    want = EXPECTED[folder.name]["frames"][name]
    assert hashlib.sha256(raw).hexdigest() == want["sha256"]
    frame = decode_frame(raw)
    assert frame.encode() == raw
    assert frame.kind.name == want["kind"]
    assert (str(frame.session), frame.chunk_no) == (want["session"], want["chunk_no"])
    assert (frame.player.hex(), frame.received_s, frame.body_crc) == (
        want["player"],
        want["received_s"],
        want["body_crc"],
    )
    if frame.kind is FrameKind.DROP:
        dropped = read_drop(frame)
        assert ([list(pair) for pair in dropped.ranges], dropped.n_steps) == (
            want["ranges"],
            want["n_steps"],
        )
    elif frame.kind is FrameKind.CLOSE:
        closed = read_close(frame)
        assert (closed.n_chunks, closed.n_steps) == (want["n_chunks"], want["n_steps"])
    else:
        check_chunk(frame, want, folder)


def check_chunk(frame: Any, want: dict[str, Any], folder: Path) -> None:
    chunk = chunk_of(frame)
    assert chunk.meta.to_metadata() == want["metadata"]
    columns = {
        name: [str(column.dtype), list(column.shape), hashlib.sha256(column.tobytes()).hexdigest()]
        for name, column in chunk.columns.items()
    }
    assert columns == want["columns"]
    # Compressed bytes may differ between builds of zlib; everything else is encoded identically.
    if b'"codec"' not in frame.body:
        assert chunk.encode() == frame.body
    spec = spec_from_json((folder / f"spec-{chunk.meta.game}.json").read_bytes())
    assert spec.schema == chunk.meta.schema
    is_step = chunk.columns["row"] == 0
    for name, space in {**spec.obs_columns, **spec.action_columns}.items():
        column = chunk.columns[name]
        assert (column.dtype, column.shape[1:]) == (space.dtype, space.shape)
        assert space.contains(np.asarray(column[is_step])).all()


@pytest.mark.parametrize("folder", FORMATS, ids=[folder.name for folder in FORMATS])
def test_a_sample_spec_keeps_its_schema_id(folder: Path) -> None:
    for game, schema in EXPECTED[folder.name]["schemas"].items():
        raw = (folder / f"spec-{game}.json").read_bytes()
        spec = spec_from_json(raw)
        assert (spec.game, spec.schema) == (game, schema)
        assert spec.to_json() == raw
