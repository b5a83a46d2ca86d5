"""Frames that must not be stored: invalid in every known way, by accident or on purpose."""

import json
import random
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk, RowKind
from understudy.experience.frame import (
    MAX_BODY_BYTES,
    NO_PLAYER,
    CloseReport,
    DropReport,
    Frame,
    FrameKind,
    close_frame,
    data_frame,
    drop_frame,
)
from understudy.experience.game import GameSpec, game_spec
from understudy.testing.samples import random_chunk


@dataclass(frozen=True, slots=True, eq=False)
class RawFrame:
    """Any bytes at all in the shape that a stream appends."""

    raw: bytes
    session: uuid.UUID
    player: bytes = NO_PLAYER

    @property
    def size_bytes(self) -> int:
        return len(self.raw)

    @property
    def body(self) -> bytes:
        return self.raw[64:]

    def header(self) -> bytes:
        return self.raw[:64]

    def encode(self) -> bytes:
        return self.raw


Poison = Callable[["Poisoner"], bytes]


class Poisoner:
    """Makes bad frames; those with a sound header belong to sessions and players of their own."""

    def __init__(self, spec: GameSpec, rng: random.Random, *, now_s: float) -> None:
        self.spec = spec
        self.rng = rng
        self.now_s = now_s
        self.arrays = np.random.default_rng(rng.randrange(1 << 30))
        self.stored: list[Frame] = []
        """Healthy frames that are in the store already."""
        self.open: Frame | None = None
        """The first frame of a session that never gets another good one."""
        self.kinds = {
            name.removeprefix("_p_"): value
            for name, value in globals().items()
            if name.startswith("_p_")
        }
        self._untried = sorted(self.kinds)

    def make(self) -> tuple[str, bytes]:
        """One bad frame and what is wrong with it; each kind once, then kinds at random."""
        if self._untried:
            name = self._untried.pop()
            return name, self.kinds[name](self)
        name = self.rng.choice(sorted(self.kinds))
        if name == "too_large" and self.rng.random() < 0.95:
            name = "nan_observation"  # half a megabyte each: a few will do
        return name, self.kinds[name](self)

    # --- parts of bad frames ----------------------------------------------------------------------

    def chunk(self, **wanted: Any) -> Chunk:
        return random_chunk(
            self.spec,
            self.arrays,
            session=new_session(self.now_s, self.rng.randbytes(10)),
            **wanted,
        )

    def raw(self, chunk: Chunk) -> bytes:
        """A chunk's frame as the intake accepts it, with any columns."""
        return self.stamp(data_frame(chunk.meta.session, chunk.meta.chunk_no, chunk.encode()))

    def stamp(self, frame: Frame, player: bytes | None = None) -> bytes:
        return frame.stamped(player or self.rng.randbytes(16), int(self.now_s)).encode()

    def with_column(self, name: str, change: Callable[[Any], Any]) -> bytes:
        chunk = self.chunk()
        return self.raw(
            replace(chunk, columns={**chunk.columns, name: change(chunk.columns[name].copy())})
        )

    def with_body(self, body: bytes, kind: FrameKind = FrameKind.DATA) -> bytes:
        session = new_session(self.now_s, self.rng.randbytes(10))
        return self.stamp(
            Frame(kind=kind, session=session, chunk_no=0, body=body, body_crc=crc32(body))
        )

    def with_header(self, **fields: Any) -> bytes:
        chunk = self.chunk()
        return self.stamp(replace(data_frame(chunk.meta.session, 0, chunk.encode()), **fields))

    def with_metadata(self, change: Callable[[dict[str, str]], Mapping[str, Any]]) -> bytes:
        chunk = self.chunk()
        body = tensors.encode(chunk.columns, dict(change(chunk.meta.to_metadata())))
        return self.stamp(data_frame(chunk.meta.session, chunk.meta.chunk_no, body))

    def with_json(self, change: Callable[[str], str]) -> bytes:
        """The safetensors header as text, changed."""
        chunk = self.chunk()
        body = chunk.encode()
        length = int.from_bytes(body[:8], "little")
        text = change(body[8 : 8 + length].decode().rstrip()).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return self.stamp(
            data_frame(
                chunk.meta.session, 0, len(text).to_bytes(8, "little") + text + body[8 + length :]
            )
        )


def _set(value: Any) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column[0] = value
        return column

    return change


# --- Bytes that are no frame ----------------------------------------------------------------------


def _p_truncated(p: Poisoner) -> bytes:
    raw = p.raw(p.chunk())
    return raw[: p.rng.randrange(1, len(raw))]


def _p_noise(p: Poisoner) -> bytes:
    return p.rng.randbytes(p.rng.randrange(1, 300))


def _p_bit_flip(p: Poisoner) -> bytes:
    raw = bytearray(p.raw(p.chunk()))
    raw[p.rng.randrange(len(raw))] ^= 1 << p.rng.randrange(8)
    return bytes(raw)


def _p_too_large(p: Poisoner) -> bytes:
    return p.with_body(bytes(MAX_BODY_BYTES + 1 + p.rng.randrange(100)))


def _p_body_shorter_than_announced(p: Poisoner) -> bytes:
    return p.raw(p.chunk())[: -p.rng.randrange(1, 60)]


def _p_unknown_kind(p: Poisoner) -> bytes:
    raw = bytearray(p.raw(p.chunk()))
    raw[5] = p.rng.choice([3, 4, 200])
    raw[60:64] = crc32(raw[:60]).to_bytes(4, "little")
    return bytes(raw)


def _p_flags(p: Poisoner) -> bytes:
    return p.with_header(flags=p.rng.randrange(1, 1 << 16))


def _p_other_version(p: Poisoner) -> bytes:
    raw = bytearray(p.raw(p.chunk()))
    raw[4] = 2
    raw[60:64] = crc32(raw[:60]).to_bytes(4, "little")
    return bytes(raw)


# --- Sessions and numbers -------------------------------------------------------------------------


def _p_no_uuid7(p: Poisoner) -> bytes:
    session = uuid.UUID(bytes=p.rng.randbytes(16), version=4)
    return p.raw(random_chunk(p.spec, p.arrays, session=session))


def _p_session_of_another_time(p: Poisoner) -> bytes:
    began_s = p.now_s + p.rng.choice([-40, 30]) * 86_400
    return p.raw(random_chunk(p.spec, p.arrays, session=new_session(began_s, p.rng.randbytes(10))))


def _p_number_2_to_the_40(p: Poisoner) -> bytes:
    return p.raw(p.chunk(chunk_no=1 << 40, first_step=7))


def _p_number_beyond_counting(p: Poisoner) -> bytes:
    return p.with_header(chunk_no=p.rng.choice([1 << 48, (1 << 64) - 1]))


def _p_number_far_ahead(p: Poisoner) -> bytes:
    return p.raw(p.chunk(chunk_no=p.rng.randrange(1100, 1 << 30), first_step=5))


def _p_header_and_metadata_differ(p: Poisoner) -> bytes:
    return p.with_header(chunk_no=3)


def _p_another_players_session(p: Poisoner) -> bytes:
    victim = p.rng.choice(p.stored)
    chunk = random_chunk(
        p.spec, p.arrays, session=victim.session, chunk_no=victim.chunk_no + 1, first_step=10_000
    )
    return p.raw(chunk)


def _p_another_players_close(p: Poisoner) -> bytes:
    victim = p.rng.choice(p.stored)
    return p.stamp(
        close_frame(victim.session, victim.chunk_no + 1, CloseReport(victim.chunk_no + 1, 9))
    )


def _p_same_number_other_bytes(p: Poisoner) -> bytes:
    victim = p.rng.choice(p.stored)
    first_step = 0 if victim.chunk_no == 0 else 1
    chunk = random_chunk(
        p.spec, p.arrays, session=victim.session, chunk_no=victim.chunk_no, first_step=first_step
    )
    return p.stamp(chunk.frame(), victim.player)


def _p_steps_that_contradict_a_neighbour(p: Poisoner) -> bytes:
    assert p.open is not None
    number = p.rng.randrange(1, 1000)
    chunk = random_chunk(p.spec, p.arrays, session=p.open.session, chunk_no=number, first_step=0)
    return p.stamp(chunk.frame(), p.open.player)


def _p_drop_of_what_comes_later(p: Poisoner) -> bytes:
    session = new_session(p.now_s, p.rng.randbytes(10))
    return p.stamp(drop_frame(session, 2, DropReport(((1, p.rng.randrange(2, 90)),), 5)))


def _p_close_that_counts_wrong(p: Poisoner) -> bytes:
    return p.stamp(
        close_frame(
            new_session(p.now_s, p.rng.randbytes(10)), 4, CloseReport(p.rng.randrange(5, 99), 5)
        )
    )


def _p_report_that_is_no_json(p: Poisoner) -> bytes:
    body = p.rng.choice(
        [
            b"",
            b"{",
            b"[1]",
            b"null",
            b'{"n_chunks": NaN, "n_steps": 0}',
            b"[" * 5000,
            b'{"a":1,"a":1}',
        ]
    )
    return p.with_body(body, p.rng.choice([FrameKind.CLOSE, FrameKind.DROP]))


# --- Columns --------------------------------------------------------------------------------------


def _p_nan_observation(p: Poisoner) -> bytes:
    return p.with_column("obs", _set(p.rng.choice([float("nan"), float("inf"), float("-inf")])))


def _p_nan_reward(p: Poisoner) -> bytes:
    return p.with_column("reward", _set(p.rng.choice([float("nan"), float("inf"), float("-inf")])))


def _p_wrong_dtype(p: Poisoner) -> bytes:
    name = p.rng.choice(["obs", "action", "reward", "row"])
    return p.with_column(name, lambda column: column.astype(np.float64))


def _p_wrong_shape(p: Poisoner) -> bytes:
    return p.with_column(
        "obs", lambda column: np.zeros((len(column), p.rng.choice([1, 3, 5, 64])), np.float32)
    )


def _p_rows_of_other_length(p: Poisoner) -> bytes:
    return p.with_column("action", lambda column: column[:-1])


def _p_action_outside_its_space(p: Poisoner) -> bytes:
    return p.with_column("action", _set(p.rng.choice([-1, 2, 2**31 - 1])))


def _p_unknown_column(p: Poisoner) -> bytes:
    chunk = p.chunk()
    return p.raw(replace(chunk, columns={**chunk.columns, "secret": chunk.columns["reward"]}))


def _p_missing_column(p: Poisoner) -> bytes:
    chunk = p.chunk()
    gone = p.rng.choice(["obs", "action", "reward", "terminated", "truncated", "is_first", "row"])
    columns = {name: column for name, column in chunk.columns.items() if name != gone}
    metadata = chunk.meta.to_metadata()
    return p.stamp(data_frame(chunk.meta.session, 0, tensors.encode(columns, metadata)))


def _p_chunk_that_ends_in_a_step(p: Poisoner) -> bytes:
    def change(column: Any) -> Any:
        column[-1] = RowKind.STEP
        return column

    return p.with_column("row", change)


def _p_flags_in_the_wrong_place(p: Poisoner) -> bytes:
    def change(column: Any) -> Any:
        column[-1] = True
        return column

    return p.with_column(p.rng.choice(["terminated", "truncated", "is_first"]), change)


# --- Metadata and header JSON ---------------------------------------------------------------------


def _p_unknown_game(p: Poisoner) -> bytes:
    spec = game_spec("another-game", obs=4, actions=2)
    return p.raw(random_chunk(spec, p.arrays, session=new_session(p.now_s, p.rng.randbytes(10))))


def _p_unknown_schema(p: Poisoner) -> bytes:
    spec = game_spec(p.spec.game, obs=p.rng.choice([5, 6, 7]), actions=2)
    return p.raw(random_chunk(spec, p.arrays, session=new_session(p.now_s, p.rng.randbytes(10))))


def _p_wrong_step_count(p: Poisoner) -> bytes:
    return p.with_metadata(lambda meta: {**meta, "n_steps": str(p.rng.choice([0, 5, 7, 10**14]))})


def _p_odd_numbers(p: Poisoner) -> bytes:
    text = p.rng.choice(["-1", "1e3", "", "007", "9" * 400, "٣", "0x1", "1.0", "NaN"])
    return p.with_metadata(
        lambda meta: {**meta, p.rng.choice(["chunk_no", "first_step", "n_steps"]): text}
    )


def _p_bad_metadata(p: Poisoner) -> bytes:
    key = p.rng.choice(["game", "schema", "session", "kind", "consent", "format", "episodes"])
    return p.with_metadata(
        lambda meta: {**meta, key: p.rng.choice(["../../etc/passwd", "", "x" * 5000, "\0", "[]"])}
    )


def _p_missing_metadata(p: Poisoner) -> bytes:
    gone = p.rng.choice(["game", "schema", "session", "consent", "episodes"])
    return p.with_metadata(lambda meta: {key: value for key, value in meta.items() if key != gone})


def _p_duplicate_names(p: Poisoner) -> bytes:
    def change(text: str) -> str:
        fields = json.loads(text)
        name = p.rng.choice(sorted(fields))
        return text[:-1] + f",{json.dumps(name)}:{json.dumps(fields[name])}}}"

    return p.with_json(change)


def _p_offsets_that_lie(p: Poisoner) -> bytes:
    def change(text: str) -> str:
        fields = json.loads(text)
        name = p.rng.choice(sorted(set(fields) - {"__metadata__"}))
        start, end = fields[name]["data_offsets"]
        fields[name]["data_offsets"] = p.rng.choice(
            [[end, start], [start, 1 << 60], [-8, end], [0, 0], [start + 1, end]]
        )
        return canonical_json(fields).decode()

    return p.with_json(change)


def _p_shape_that_lies(p: Poisoner) -> bytes:
    def change(text: str) -> str:
        fields = json.loads(text)
        name = p.rng.choice(sorted(set(fields) - {"__metadata__"}))
        fields[name]["shape"] = p.rng.choice(
            [[1 << 40], [1 << 32, 1 << 32], [-1], [], [1] * 40, ["4"], [0], None]
        )
        return canonical_json(fields).decode()

    return p.with_json(change)


def _p_header_length_that_lies(p: Poisoner) -> bytes:
    body = bytearray(p.chunk().encode())
    body[:8] = p.rng.choice([0, 1, 1 << 20, 1 << 63, len(body) * 2]).to_bytes(8, "little")
    return p.with_body(bytes(body))


def _p_zlib_bomb(p: Poisoner) -> bytes:
    """A column of a few kilobytes that inflates to very much, declared or not."""
    chunk = p.chunk()
    says = p.rng.choice([4 * chunk.n_rows, 1 << 20, 1 << 28, 1 << 33])
    bomb = np.frombuffer(_BOMB, np.uint8)
    metadata = {
        **chunk.meta.to_metadata(),
        "codec": json.dumps({"obs": ["zlib", "F32", [says // 4, 4]]}),
    }
    body = tensors.encode({**chunk.columns, "obs": bomb}, metadata)
    return p.stamp(data_frame(chunk.meta.session, 0, body))


_BOMB = zlib.compress(bytes(1 << 24), 9)


def _p_codec_that_is_none(p: Poisoner) -> bytes:
    codec = p.rng.choice(
        ['{"obs": ["lzma", "F32", [1]]}', "[]", "1", '{"nope": ["zlib", "F32", [1]]}', "{" * 3000]
    )
    return p.with_metadata(lambda meta: {**meta, "codec": codec})
