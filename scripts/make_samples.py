"""Writes the sample files of the current chunk and frame format, which must stay readable forever.

    python scripts/make_samples.py            # fails if the folder of this format exists

A new format gets a new number, for which this script creates a new folder; old folders are never
changed.
"""

import hashlib
import json
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core.tensors import DTYPES
from understudy.experience.chunk import OPTIONAL, Chunk, ChunkMeta, EpisodeNote, chunk_of
from understudy.experience.frame import (
    VERSION,
    CloseReport,
    DropReport,
    Frame,
    FrameKind,
    close_frame,
    drop_frame,
    read_close,
    read_drop,
)
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete

FOLDER = Path(__file__).parent.parent / "tests" / "experience" / "samples" / f"format-{VERSION}"
SESSION = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")
PLAYER = bytes.fromhex("00112233445566778899aabbccddeeff")

POLE = game_spec(
    "pole",
    obs=Box((4,), DTYPES["F32"], (-4.8, -3.0e38, -0.42, -3.0e38), (4.8, 3.0e38, 0.42, 3.0e38)),
    actions=["left", "right"],
    max_episode_steps=500,
)
ROBOT = game_spec(
    "robot",
    obs={
        "self.pos": Box((3,), DTYPES["F64"]),
        "self.on": MultiBinary((2,)),
        "hp": Box((), DTYPES["I16"], 0, 999),
        "0": Discrete(5, 1, DTYPES["U8"]),
    },
    actions={"arm": Box((2,), DTYPES["F32"], -1, 1), "grip": MultiDiscrete((2, 3), (2,))},
)
SCREEN = game_spec("screen", obs=Box((40, 40), DTYPES["U8"]), actions=4)
CARDS = game_spec(
    "cards", obs=["mine", "theirs"], actions=["draw", "play", "pass"], has_action_mask=True
)


def chunk(
    spec: GameSpec,
    ends: str,
    *,
    chunk_no: int = 0,
    first_step: int = 0,
    notes: Any = (),
    **more: Any,
) -> Chunk:
    """A chunk from letters, one per step or end of an episode.

    s: a step; T: a step that terminates; U: a step that is truncated; c: the episode is cut;
    `.`: the episode continues in the next chunk. A leading f: the first episode began earlier.
    """
    rows = _rows(ends)
    n = len(rows["row"])
    rng = np.random.default_rng(n)
    columns: dict[str, Any] = dict(rows)
    for name, space in {**spec.obs_columns, **spec.action_columns}.items():
        column = rng.integers(1, 2 if space.dtype.kind == "i" else 4, (n, *space.shape)).astype(
            space.dtype
        )
        columns[name] = (column / 16).astype(space.dtype) if space.dtype.kind == "f" else column
        if name.startswith("action"):
            columns[name][rows["row"] != 0] = 0
    columns |= more.pop("columns", {})
    starts = sorted({0, *np.flatnonzero(rows["is_first"]).tolist()})
    meta = ChunkMeta(
        game=spec.game,
        schema=spec.schema,
        session=SESSION,
        chunk_no=chunk_no,
        first_step=first_step,
        n_steps=int((rows["row"] == 0).sum()),
        episodes=tuple(notes) or tuple(EpisodeNote(row=row) for row in starts),
        **more,
    )
    return Chunk(meta, columns).validate()


def _rows(ends: str) -> dict[str, Any]:
    row = []
    first = []
    terminated = []
    truncated = []
    opens = not ends.startswith("f")
    for letter in ends.removeprefix("f"):
        if letter in "sTU":
            row.append(0)
            first.append(opens)
            terminated.append(letter == "T")
            truncated.append(letter == "U")
        if letter != "s":
            row.append(1 if letter in "TU" else 2)
            first.append(False)
            terminated.append(False)
            truncated.append(False)
        opens = letter != "s"
    reward = np.where(np.array(row) == 0, np.arange(len(row)) / 2, 0)
    return {
        "row": np.array(row, np.uint8),
        "is_first": np.array(first),
        "terminated": np.array(terminated),
        "truncated": np.array(truncated),
        "reward": reward.astype(np.float32),
    }


def samples() -> dict[str, Frame]:
    """Every sample frame, by file name."""
    n = len(_rows("ssTss.")["row"])
    optional: dict[str, Any] = {
        name: (np.arange(n) % 4).astype(dtype) for name, dtype in OPTIONAL.items()
    }
    optional |= {
        "action_mask": np.arange(3 * n).reshape(n, 3) % 4 != 0,
        "raw_action": np.full((n, 3), -0.5, np.float32),
    }
    full = EpisodeNote(
        row=0,
        seat=1,
        match="m-7",
        opponents=("person", "cards/6"),
        result=-1.5,
        seed=2**64 - 1,
        model="cards/7",
    )
    cut = (EpisodeNote(row=0, cut=True), EpisodeNote(row=3, result="won"))
    frames = {
        "plain": chunk(POLE, "sssTsss.", client="pole 1.0", consent="granted").frame(),
        "dict": chunk(ROBOT, "fss.", chunk_no=3, first_step=40, kind="actor").frame(),
        "image": chunk(SCREEN, "ssU", consent="denied").frame(),
        "action_mask": chunk(
            CARDS, "ssTss.", columns=optional, notes=(full, EpisodeNote(row=4))
        ).frame(),
        "truncated": chunk(POLE, "fssUT", chunk_no=1, first_step=6).frame(),
        "cut": chunk(POLE, "sscssT", notes=cut, client="spiel 2 — ü").frame(),
        "drop": drop_frame(SESSION, 9, DropReport(((2, 2), (4, 7)), 311)),
        "close": close_frame(SESSION, 10, CloseReport(10, 1024)),
    }
    stamped = frames["plain"].stamped(PLAYER, 1_700_000_000)
    return {**frames, "stamped": stamped}


def described(frame: Frame) -> dict[str, Any]:
    """What the test expects to read from a frame."""
    header = {
        "kind": frame.kind.name,
        "session": str(frame.session),
        "chunk_no": frame.chunk_no,
        "player": frame.player.hex(),
        "received_s": frame.received_s,
        "body_crc": frame.body_crc,
        "sha256": hashlib.sha256(frame.encode()).hexdigest(),
    }
    if frame.kind is FrameKind.DROP:
        report = read_drop(frame)
        return {
            **header,
            "ranges": [list(pair) for pair in report.ranges],
            "n_steps": report.n_steps,
        }
    if frame.kind is FrameKind.CLOSE:
        closed = read_close(frame)
        return {**header, "n_chunks": closed.n_chunks, "n_steps": closed.n_steps}
    decoded = chunk_of(frame)
    return {**header, "metadata": decoded.meta.to_metadata(), "columns": _columns(decoded.columns)}


def _columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [str(column.dtype), list(column.shape), hashlib.sha256(column.tobytes()).hexdigest()]
        for name, column in sorted(columns.items())
    }


def main() -> None:
    if FOLDER.exists():
        sys.exit(
            f"{FOLDER} exists; samples are created once and never changed. A new format needs a "
            "new number."
        )
    FOLDER.mkdir(parents=True)
    frames = samples()
    for name, frame in frames.items():
        (FOLDER / f"{name}.bin").write_bytes(frame.encode())
    for spec in (POLE, ROBOT, SCREEN, CARDS):
        (FOLDER / f"spec-{spec.game}.json").write_bytes(spec.to_json())
    expected = {
        "frames": {name: described(frame) for name, frame in frames.items()},
        "schemas": {spec.game: spec.schema for spec in (POLE, ROBOT, SCREEN, CARDS)},
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    print(f"wrote {len(frames)} frames to {FOLDER}")


if __name__ == "__main__":
    main()
