"""Every way a frame can be wrong has a reason code, and no frame raises anything."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.names import new_session
from understudy.core.tensors import DTYPES, Array
from understudy.experience.chunk import Chunk
from understudy.experience.frame import (
    MAX_BODY_BYTES,
    CloseReport,
    DropReport,
    Frame,
    FrameKind,
    close_frame,
    drop_frame,
)
from understudy.experience.game import game_spec
from understudy.experience.session import DAY_S
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from understudy.ingest.check import UNREADABLE, Checked, check
from understudy.testing.clock import START_S
from understudy.testing.samples import PLAYER, random_chunk, random_session, random_spec, stamped

SESSION = new_session(START_S, bytes(range(10)))
SPEC = game_spec(
    "rally",
    obs={
        "cam": Box((24, 24), DTYPES["U8"]),
        "pos": Box((3,), DTYPES["F32"]),
        "card": Discrete(5, 1),
    },
    actions=Discrete(4),
    has_action_mask=True,
)
ARM = game_spec(
    "arm",
    obs=MultiBinary((2,)),
    actions={
        "grip": MultiDiscrete((2, 3), (2,), DTYPES["I64"]),
        "turn": Box((2,), DTYPES["F32"], -1.0, 1.0),
    },
)
SPECS = KnownSpecs(SPEC, ARM)


def sample(spec=SPEC, *, chunk_no: int = 1) -> Chunk:
    rng = np.random.default_rng(3)
    return random_chunk(
        spec,
        rng,
        session=SESSION,
        chunk_no=chunk_no,
        first_step=6 * chunk_no,
        n_steps=6,
        optional=("logp", "by", "raw_action"),
    )


def judge(raw: bytes, *, received_s: float = START_S, specs: KnownSpecs = SPECS) -> Checked:
    return check(raw, specs=specs, received_s=received_s)


def framed(body: bytes, **more: Any) -> bytes:
    frame = Frame(
        kind=FrameKind.DATA,
        session=SESSION,
        chunk_no=1,
        body=body,
        body_crc=crc32(body),
        player=PLAYER,
    )
    return replace(frame, **more).encode()


def with_columns(change: Callable[[dict[str, Array]], object], spec=SPEC) -> bytes:
    chunk = sample(spec)
    columns = {name: column.copy() for name, column in chunk.columns.items()}
    change(columns)
    return framed(Chunk(chunk.meta, columns).encode())


def with_meta(**fields: str) -> bytes:
    chunk = sample()
    columns, metadata = tensors.decode(chunk.encode())
    return framed(tensors.encode(columns, {**metadata, **fields}))


def with_header(change: Callable[[bytes], bytes]) -> bytes:
    body = sample().encode()
    length = int.from_bytes(body[:8], "little")
    text = change(body[8 : 8 + length].rstrip(b" "))
    return framed(len(text).to_bytes(8, "little") + text + body[8 + length :])


def patched(raw: bytes, at: int, new: bytes) -> bytes:
    """A frame with some header bytes replaced and a valid header checksum."""
    head = bytearray(raw[:64])
    head[at : at + len(new)] = new
    head[60:64] = crc32(bytes(head[:60])).to_bytes(4, "little")
    return bytes(head) + raw[64:]


def put(column: str, value: Any, *, row: int = 0) -> Callable[[dict[str, Array]], None]:
    def change(columns: dict[str, Array]) -> None:
        columns[column][row] = value

    return change


def swap(column: str, dtype: Any) -> Callable[[dict[str, Array]], None]:
    return lambda columns: columns.update({column: columns[column].astype(dtype)})


def bomb() -> bytes:
    chunk = sample()
    packed = np.frombuffer(zlib.compress(bytes(32 << 20), 9), np.uint8)
    columns, metadata = tensors.decode(chunk.encode())
    metadata["codec"] = canonical_json({"obs.cam": ["zlib", "U8", [32 << 10, 1 << 10]]}).decode()
    return framed(tensors.encode({**columns, "obs.cam": packed}, metadata))


@dataclass(frozen=True)
class Bad:
    reason: str
    make: Callable[[], bytes]


GOOD = sample().frame().stamped(PLAYER, int(START_S)).encode()
REPORT = drop_frame(SESSION, 5, DropReport(((1, 3),), 12))
CLOSE = close_frame(SESSION, 5, CloseReport(5, 12))

TABLE = {
    "nothing": Bad("truncated", lambda: b""),
    "half a header": Bad("truncated", lambda: GOOD[:40]),
    "half a body": Bad("truncated", lambda: GOOD[:-9]),
    "more than a frame": Bad("trailing_bytes", lambda: GOOD + b"x"),
    "other magic": Bad("bad_magic", lambda: b"PK\x03\x04" + GOOD[4:]),
    "a later version": Bad("bad_version", lambda: patched(GOOD, 4, b"\x02")),
    "a flipped header bit": Bad(
        "bad_header_checksum", lambda: GOOD[:20] + bytes([GOOD[20] ^ 1]) + GOOD[21:]
    ),
    "a flipped body bit": Bad(
        "bad_body_checksum", lambda: GOOD[:-5] + bytes([GOOD[-5] ^ 1]) + GOOD[-4:]
    ),
    "an unknown kind": Bad("bad_kind", lambda: patched(GOOD, 5, b"\x09")),
    "a late reward": Bad("reserved_kind", lambda: patched(GOOD, 5, b"\x03")),
    "unknown flags": Bad("bad_kind", lambda: patched(GOOD, 6, b"\x01\x00")),
    "an oversized body": Bad("too_large", lambda: framed(bytes(MAX_BODY_BYTES + 1))),
    "a number of 2^48": Bad(
        "bad_number", lambda: patched(GOOD, 32, (1 << 48).to_bytes(8, "little"))
    ),
    "a session of no time": Bad(
        "bad_session", lambda: framed(b"", session=SESSION.__class__(int=SESSION.int ^ 3 << 76))
    ),
    "a session of last year": Bad(
        "bad_session_time", lambda: framed(b"", session=new_session(START_S - 3e7))
    ),
    "a session of next year": Bad(
        "bad_session_time", lambda: framed(b"", session=new_session(START_S + 3e7))
    ),
    "an empty body": Bad("bad_tensors", lambda: framed(b"")),
    "a body that is text": Bad("bad_tensors", lambda: framed(b"not tensors at all")),
    "a header longer than the body": Bad(
        "bad_tensors", lambda: framed((1 << 40).to_bytes(8, "little") + b"{}")
    ),
    "duplicate names": Bad(
        "bad_json", lambda: with_header(lambda text: text[:-1] + b',"reward":1}')
    ),
    "NaN in the header": Bad(
        "bad_json",
        lambda: with_header(lambda text: text.replace(b'"shape":[', b'"shape":[NaN,', 1)),
    ),
    "deep nesting": Bad(
        "bad_json", lambda: with_header(lambda text: b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}")
    ),
    "an unknown dtype": Bad(
        "bad_tensors", lambda: with_header(lambda text: text.replace(b'"F32"', b'"C64"', 1))
    ),
    "overlapping tensors": Bad(
        "bad_tensors",
        lambda: with_header(
            lambda text: text.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1)
        ),
    ),
    "an extra key": Bad(
        "bad_tensors",
        lambda: with_header(lambda text: text.replace(b'"dtype"', b'"x":1,"dtype"', 1)),
    ),
    "a bool of 7": Bad(
        "bad_tensors",
        lambda: with_columns(
            lambda columns: columns["terminated"].view(np.uint8).__setitem__(0, 7)
        ),
    ),
    "a decompression bomb": Bad("too_large", bomb),
    "an unknown codec": Bad("bad_codec", lambda: with_meta(codec='{"obs.cam":["lzma","U8",[1]]}')),
    "a codec that lies": Bad("bad_codec", lambda: with_meta(codec='{"obs.cam":["zlib","U8",[1]]}')),
    "metadata that is unknown": Bad("bad_metadata", lambda: with_meta(mood="good")),
    "another format": Bad("bad_version", lambda: with_meta(format="understudy-chunk/9")),
    "a schema that is none": Bad("bad_metadata", lambda: with_meta(schema="../../etc")),
    "a game that is none": Bad("bad_metadata", lambda: with_meta(game="../../etc")),
    "a step count that lies": Bad("bad_metadata", lambda: with_meta(n_steps="7")),
    "a step beyond counting": Bad("bad_metadata", lambda: with_meta(first_step=str(1 << 60))),
    "episodes that are none": Bad("bad_metadata", lambda: with_meta(episodes="[1]")),
    "a consent that is none": Bad("bad_metadata", lambda: with_meta(consent="maybe")),
    "another session in the body": Bad(
        "identity_mismatch", lambda: with_meta(session=str(new_session(START_S)))
    ),
    "another number in the body": Bad("identity_mismatch", lambda: with_meta(chunk_no="2")),
    "chunk 0 at step 6": Bad(
        "bad_metadata",
        lambda: framed(sample().encode().replace(b'"chunk_no":"1"', b'"chunk_no":"0"'), chunk_no=0),
    ),
    "a missing column": Bad(
        "bad_columns", lambda: with_columns(lambda columns: columns.pop("reward"))
    ),
    "an unknown column": Bad(
        "bad_columns", lambda: with_columns(lambda columns: columns.update(mood=columns["reward"]))
    ),
    "a column of another length": Bad(
        "bad_columns",
        lambda: with_columns(lambda columns: columns.update({"obs.pos": columns["obs.pos"][:-1]})),
    ),
    "a missing observation part": Bad(
        "bad_columns", lambda: with_columns(lambda columns: columns.pop("obs.pos"))
    ),
    "an unknown observation part": Bad(
        "bad_columns",
        lambda: with_columns(lambda columns: columns.update({"obs.x": columns["reward"]})),
    ),
    "an observation of another dtype": Bad(
        "bad_columns", lambda: with_columns(swap("obs.pos", np.float64))
    ),
    "an observation of another shape": Bad(
        "bad_columns",
        lambda: with_columns(
            lambda columns: columns.update({"obs.pos": columns["obs.pos"][:, :2]})
        ),
    ),
    "an action of another dtype": Bad(
        "bad_columns", lambda: with_columns(swap("action", np.int64))
    ),
    "a reward of another dtype": Bad(
        "bad_columns", lambda: with_columns(swap("reward", np.float64))
    ),
    "a raw action of another shape": Bad(
        "bad_columns",
        lambda: with_columns(
            lambda columns: columns.update(
                raw_action=np.zeros((len(columns["row"]), 9), np.float32)
            )
        ),
    ),
    "a raw action of whole numbers": Bad(
        "bad_columns", lambda: with_columns(swap("raw_action", np.int32))
    ),
    "no mask": Bad("bad_columns", lambda: with_columns(lambda columns: columns.pop("action_mask"))),
    "a mask of another width": Bad(
        "bad_columns",
        lambda: with_columns(
            lambda columns: columns.update(action_mask=columns["action_mask"][:, :3])
        ),
    ),
    "NaN in an observation": Bad("not_finite", lambda: with_columns(put("obs.pos", np.nan))),
    "infinity in an observation": Bad(
        "not_finite", lambda: with_columns(put("obs.pos", np.inf, row=-1))
    ),
    "NaN in a reward": Bad("not_finite", lambda: with_columns(put("reward", np.nan))),
    "infinity in a logp": Bad("not_finite", lambda: with_columns(put("logp", -np.inf))),
    "NaN in a raw action": Bad("not_finite", lambda: with_columns(put("raw_action", np.nan))),
    "an observation out of its space": Bad("bad_obs", lambda: with_columns(put("obs.card", 0))),
    "an action out of its space": Bad("bad_action", lambda: with_columns(put("action", 4))),
    "a negative action": Bad("bad_action", lambda: with_columns(put("action", -1))),
    "an invalid action": Bad("invalid_action", lambda: with_columns(put("action_mask", False))),
    "a part of an action out of its space": Bad(
        "bad_action", lambda: with_columns(put("action.grip", (0, 3)), ARM)
    ),
    "a float action out of bounds": Bad(
        "bad_action", lambda: with_columns(put("action.turn", 1.5), ARM)
    ),
    "a switch of 2": Bad("bad_obs", lambda: with_columns(put("obs", 2), ARM)),
    "a step at the end": Bad("bad_rows", lambda: with_columns(put("row", 0, row=-1))),
    "an unknown row kind": Bad("bad_rows", lambda: with_columns(put("row", 3, row=-1))),
    "terminated where nothing ends": Bad(
        "bad_rows", lambda: with_columns(put("terminated", True, row=-1))
    ),
    "an episode that starts nowhere": Bad(
        "bad_rows", lambda: with_columns(put("is_first", True, row=-1))
    ),
    "somebody unknown": Bad("bad_rows", lambda: with_columns(put("by", 9))),
    "a drop report of nothing": Bad(
        "bad_report", lambda: drop_frame(SESSION, 5, DropReport((), 0)).encode()
    ),
    "a drop report of the future": Bad(
        "bad_report", lambda: drop_frame(SESSION, 5, DropReport(((4, 5),), 0)).encode()
    ),
    "a drop report out of order": Bad(
        "bad_report", lambda: drop_frame(SESSION, 9, DropReport(((4, 5), (1, 2)), 0)).encode()
    ),
    "a drop report that is a list": Bad("bad_report", lambda: framed(b"[]", kind=FrameKind.DROP)),
    "a drop report with a key twice": Bad(
        "bad_json",
        lambda: framed(b'{"n_steps":1,"n_steps":2,"ranges":[[0,0]]}', kind=FrameKind.DROP),
    ),
    "a close that miscounts": Bad(
        "bad_report", lambda: close_frame(SESSION, 5, CloseReport(4, 12)).encode()
    ),
    "a close with a fraction": Bad(
        "bad_report", lambda: framed(b'{"n_chunks":1,"n_steps":0.5}', kind=FrameKind.CLOSE)
    ),
    "an unknown game": Bad("unknown_game", lambda: with_meta(game="elsewhere")),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_invalid_frame_is_refused_with_its_reason(name: str):
    raw = TABLE[name].make()
    checked = judge(raw)
    assert checked.outcome == "refused", name
    assert checked.refusal is not None
    assert (checked.refusal.reason, checked.refusal.raw) == (TABLE[name].reason, raw)
    assert checked.refusal.detail


def test_a_valid_frame_passes():
    checked = judge(GOOD)
    assert checked.outcome == "candidate"
    assert checked.candidate is not None
    assert checked.candidate.chunk == sample()
    for frame in (REPORT, CLOSE):
        report = judge(frame.encode())
        assert report.candidate is not None
        assert report.candidate.chunk is None


@pytest.mark.parametrize(
    ("days", "outcome"),
    [(-0.9, "candidate"), (14.9, "candidate"), (-1.1, "refused"), (15.1, "refused")],
)
def test_a_session_is_checked_by_its_age_when_the_frame_entered(days: float, outcome: str):
    assert judge(GOOD, received_s=START_S + days * DAY_S).outcome == outcome


def test_every_sample_of_every_game_passes():
    rng = np.random.default_rng(1)
    for _ in range(60):
        spec = random_spec(rng)
        chunks = random_session(
            spec, rng, optional=("logp", "value", "by", "frames", "raw_action", "action_mask")
        )
        for frame in stamped(chunks):
            checked = judge(frame.encode(), specs=KnownSpecs(spec))
            assert checked.outcome == "candidate", checked.refusal


def test_an_unknown_schema_of_a_known_game_is_parked():
    other = game_spec("rally", obs=3, actions=2)
    raw = random_chunk(other, np.random.default_rng(0), session=SESSION).frame().encode()
    checked = judge(raw)
    assert checked.outcome == "parked"
    assert checked.refusal is not None
    assert (checked.refusal.reason, checked.refusal.game) == ("unknown_schema", "rally")


def test_padding_after_a_terminated_step_is_not_checked():
    rng = np.random.default_rng(0)
    chunk = next(
        found
        for _ in range(99)
        if (found := random_chunk(SPEC, rng, session=SESSION, n_steps=6))
        .columns["terminated"]
        .any()
    )
    columns = {name: column.copy() for name, column in chunk.columns.items()}
    behind = int(np.flatnonzero(columns["terminated"])[0]) + 1
    columns["obs.card"][behind] = 0
    assert judge(Chunk(chunk.meta, columns).frame().encode()).outcome == "candidate"


def test_a_bug_in_a_check_refuses_only_that_frame(monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("understudy.ingest.check.check_against_spec", broken)
    checked = judge(GOOD)
    assert checked.refusal is not None
    assert checked.refusal.reason == UNREADABLE
