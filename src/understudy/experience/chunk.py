"""A chunk: consecutive steps of one session, in columns.

A row is a step. Rows of kind 1 (final observation) and 2 (bootstrap) carry an observation and a
legal mask only; their other columns are padding. A chunk's last row is never a step, so the next
observation of row i is always row i + 1.
"""

import math
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import InvalidName, Refused
from understudy.core.names import GameName, game_name
from understudy.core.tensors import DTYPE_NAMES, DTYPES, Array
from understudy.experience.frame import MAX_COUNT, Frame, FrameKind, data_frame

CHUNK_FORMAT = "understudy-chunk/1"
KINDS = ("player", "actor")
CONSENTS = ("granted", "denied", "unknown")

ChunkId = tuple[uuid.UUID, int]
"""(session, chunk_no): what a chunk is known by, everywhere."""

_SCHEMA = re.compile(r"[0-9a-f]{64}")

MAX_STEPS = 512
MAX_DECODED_BYTES = 16 * 1024 * 1024
CUT_BYTES = 448 * 1024
COMPRESS_FROM_BYTES = 512
"""Byte columns whose rows are at least this long (images) travel compressed."""


class RowKind(IntEnum):
    """What a row is."""

    STEP = 0
    FINAL = 1
    BOOTSTRAP = 2


class By(IntEnum):
    """Who decided a step."""

    UNKNOWN = 0
    PERSON = 1
    BOT = 2
    SCRIPT = 3


REQUIRED = {
    "reward": DTYPES["F32"],
    "terminated": DTYPES["BOOL"],
    "truncated": DTYPES["BOOL"],
    "is_first": DTYPES["BOOL"],
    "row": DTYPES["U8"],
}
OPTIONAL = {
    "logp": DTYPES["F32"],
    "value": DTYPES["F32"],
    "priority": DTYPES["F32"],
    "version": DTYPES["U32"],
    "by": DTYPES["U8"],
    "frames": DTYPES["U16"],
    "t_ms": DTYPES["U32"],
    "event": DTYPES["U32"],
}
"""Optional columns with one number per row; `legal` and `raw_action` are optional as well, with
shapes of their own."""


# --- What a chunk says about itself ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeNote:
    """What is known about one episode that touches the chunk, from row `row` on."""

    row: int
    seat: int = 0
    match: str | None = None
    opponents: tuple[str, ...] = ()
    """What the others were (`person`, `script`, a model's name), never a player's name."""
    result: str | float | None = None
    seed: int | None = None
    model: str | None = None
    cut: bool = False
    """Nobody saw how it ended: the last decision was dropped, and the episode stops at a
    bootstrap row."""

    def to_json(self) -> dict[str, Any]:
        note: dict[str, Any] = {"row": self.row, "seat": self.seat}
        note |= {name: value for name in _NOTE_TEXTS if (value := getattr(self, name)) is not None}
        if self.opponents:
            note["opponents"] = list(self.opponents)
        return note | ({"cut": True} if self.cut else {})


_NOTE_TEXTS = ("match", "result", "seed", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMeta:
    """What a chunk says about itself."""

    game: GameName
    schema: str
    session: uuid.UUID
    chunk_no: int
    first_step: int
    n_steps: int
    kind: str = "player"
    consent: str = "unknown"
    client: str = ""
    episodes: tuple[EpisodeNote, ...]

    @property
    def id(self) -> ChunkId:
        return self.session, self.chunk_no

    def to_metadata(self) -> dict[str, str]:
        return {
            "format": CHUNK_FORMAT,
            "game": self.game,
            "schema": self.schema,
            "session": str(self.session),
            "chunk_no": str(self.chunk_no),
            "first_step": str(self.first_step),
            "n_steps": str(self.n_steps),
            "kind": self.kind,
            "consent": self.consent,
            "client": self.client,
            "episodes": canonical_json([note.to_json() for note in self.episodes]).decode(),
        }


def chunk_name(chunk: ChunkId) -> str:
    """An id as people read it."""
    return f"{chunk[0]}/{chunk[1]}"


_META_KEYS = {"format", *(field.name for field in fields(ChunkMeta))}


def read_meta(metadata: Mapping[str, str]) -> ChunkMeta:
    """Typed metadata; Refused when a key is missing, unknown or ill-formed."""
    if metadata.keys() != _META_KEYS:
        raise Refused(
            "bad_metadata", f"metadata keys differ: {sorted(metadata.keys() ^ _META_KEYS)[:6]}"
        )
    if metadata["format"] != CHUNK_FORMAT:
        raise Refused(
            "bad_version",
            f"chunk format {metadata['format'][:40]!r}; this build reads {CHUNK_FORMAT}",
        )
    if metadata["kind"] not in KINDS or metadata["consent"] not in CONSENTS:
        raise Refused("bad_metadata", f"kind must be one of {KINDS} and consent one of {CONSENTS}")
    if len(metadata["client"]) > 128 or not _SCHEMA.fullmatch(metadata["schema"]):
        raise Refused("bad_metadata", "client is at most 128 characters, schema 64 of 0-9 a-f")
    try:
        game = game_name(metadata["game"])
        session = uuid.UUID(metadata["session"])
    except (InvalidName, ValueError) as error:
        raise Refused("bad_metadata", str(error)[:200]) from None
    if str(session) != metadata["session"]:
        raise Refused("bad_metadata", "session must be a UUID in lower case with dashes")
    notes = strict_json(metadata["episodes"])
    if not isinstance(notes, list):
        raise Refused("bad_metadata", "episodes must be a list")
    return ChunkMeta(
        game=game,
        schema=metadata["schema"],
        session=session,
        kind=metadata["kind"],
        consent=metadata["consent"],
        client=metadata["client"],
        chunk_no=_whole(metadata, "chunk_no"),
        first_step=_whole(metadata, "first_step"),
        n_steps=_whole(metadata, "n_steps"),
        episodes=tuple(_read_note(note) for note in notes),
    )


def _whole(metadata: Mapping[str, str], name: str) -> int:
    text = metadata[name]
    if not (
        text.isascii()
        and text.isdigit()
        and len(text) <= 15
        and str(int(text)) == text
        and int(text) < MAX_COUNT
    ):
        raise Refused(
            "bad_metadata", f"{name} is {text[:30]!r}; wanted a whole number from 0 below 2^48"
        )
    return int(text)


def _read_note(given: Any) -> EpisodeNote:
    if not isinstance(given, dict) or not {"row", "seat"} <= given.keys() <= {
        "row",
        "seat",
        "opponents",
        "cut",
        *_NOTE_TEXTS,
    }:
        raise Refused(
            "bad_metadata", f"an episode has row, seat and known keys only, got {str(given)[:80]}"
        )
    opponents = given.get("opponents", [])
    result = given.get("result")
    is_text = isinstance(result, str) and len(result) <= 64
    checks = (
        all(type(given[name]) is int and 0 <= given[name] < 1 << 32 for name in ("row", "seat")),
        all(
            isinstance(given.get(name, ""), str) and len(given.get(name, "")) <= 128
            for name in ("match", "model")
        ),
        isinstance(opponents, list)
        and len(opponents) <= 64
        and all(isinstance(one, str) and len(one) <= 128 for one in opponents),
        result is None or is_text or (type(result) in (int, float) and abs(result) < 1e300),
        given.get("seed") is None or (type(given["seed"]) is int and 0 <= given["seed"] < 1 << 64),
        type(given.get("cut", False)) is bool,
    )
    if not all(checks):
        raise Refused(
            "bad_metadata", f"an episode has a field of the wrong type or size: {str(given)[:120]}"
        )
    return EpisodeNote(**{**given, "opponents": tuple(opponents)})


# --- The chunk ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Checked columns and their metadata; what `decode_chunk` returns has passed every rule that
    needs no spec."""

    meta: ChunkMeta
    columns: Mapping[str, Array]

    def __eq__(self, other: object) -> bool:
        """Bit-equal: metadata, names, dtypes, shapes and bytes."""
        if not isinstance(other, Chunk):
            return NotImplemented
        return self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.meta.session, self.meta.chunk_no))

    @property
    def n_rows(self) -> int:
        return len(self.columns["row"])

    @property
    def size_bytes(self) -> int:
        """Decoded size of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    def encode(self) -> bytes:
        """Canonical bytes: columns and metadata sorted by name, compact JSON, data aligned to
        64."""
        metadata = self.meta.to_metadata()
        columns = dict(self.columns)
        codecs = {}
        for name, column in self.columns.items():
            if (
                column.dtype.itemsize == 1
                and column.dtype.kind in "ui"
                and column[0].nbytes >= COMPRESS_FROM_BYTES
            ):
                codecs[name] = ["zlib", DTYPE_NAMES[column.dtype], list(column.shape)]
                columns[name] = np.frombuffer(zlib.compress(column.tobytes(), 1), np.uint8)
        if codecs:
            metadata["codec"] = canonical_json(codecs).decode()
        return tensors.encode(columns, metadata)

    def frame(self) -> Frame:
        """The frame this chunk travels in."""
        return data_frame(self.meta.session, self.meta.chunk_no, self.encode())

    def validate(self) -> "Chunk":
        """Itself when every rule of rows and metadata holds; Refused otherwise."""
        _check_columns(self.columns)
        _check_rows(self.columns)
        _check_meta(self.meta, self.columns)
        return self


def decode_chunk(body: bytes | memoryview) -> Chunk:
    """The chunk in a data frame's body, checked; Refused says which rule it breaks."""
    columns, metadata = tensors.decode(body)
    columns = _inflate(columns, metadata.pop("codec", None))
    return Chunk(read_meta(metadata), columns).validate()


def chunk_of(frame: Frame) -> Chunk:
    """The chunk a data frame carries, whose identity must be the header's."""
    if frame.kind is not FrameKind.DATA:
        raise Refused("bad_kind", f"a {frame.kind.name.lower()} frame carries no chunk")
    chunk = decode_chunk(frame.body)
    if (chunk.meta.session, chunk.meta.chunk_no) != (frame.session, frame.chunk_no):
        raise Refused(
            "identity_mismatch", "session or chunk_no differs between header and metadata"
        )
    return chunk


def _inflate(columns: dict[str, Array], codecs: str | None) -> dict[str, Array]:
    if codecs is None:
        return columns
    table = strict_json(codecs)
    if not isinstance(table, dict) or not table.keys() <= columns.keys():
        raise Refused("bad_codec", "codec must map column names to [codec, dtype, shape]")
    budget = MAX_DECODED_BYTES - sum(
        column.nbytes for name, column in columns.items() if name not in table
    )
    for name, entry in table.items():
        match entry:
            case ["zlib", str(dtype_name), [*shape]] if dtype_name in DTYPES:
                dtype = DTYPES[dtype_name]
            case _:
                raise Refused(
                    "bad_codec",
                    f"{name!r} has codec {str(entry)[:60]}; known is ['zlib', dtype, shape]",
                )
        is_shape = len(shape) <= tensors.MAX_DIMENSIONS and all(
            type(n) is int and 0 <= n < 1 << 32 for n in shape
        )
        if not is_shape or columns[name].dtype != np.uint8:
            raise Refused("bad_codec", f"{name!r} has a bad shape, or its bytes are not U8")
        size = dtype.itemsize * math.prod(shape)
        budget -= size
        if budget < 0:
            raise Refused("too_large", f"more than {MAX_DECODED_BYTES} bytes when decompressed")
        inflater = zlib.decompressobj()
        try:
            # One byte more than announced, so that a longer stream is seen without being unpacked.
            raw = inflater.decompress(columns[name].tobytes(), size + 1)
        except zlib.error as error:
            raise Refused("bad_codec", f"{name!r} does not decompress: {error}") from None
        if len(raw) != size or not inflater.eof or inflater.unused_data:
            raise Refused("bad_codec", f"{name!r} is not exactly the {size} bytes it announces")
        columns[name] = np.frombuffer(raw, dtype).reshape(shape)
        tensors.check_bool(name, columns[name])
    return columns


def _check_columns(columns: Mapping[str, Array]) -> None:
    for name, dtype in REQUIRED.items():
        if name not in columns or columns[name].dtype != dtype or columns[name].ndim != 1:
            raise Refused(
                "bad_columns", f"column {name!r} is missing or not one {DTYPE_NAMES[dtype]} per row"
            )
    n_rows = len(columns["row"])
    found = {"obs": 0, "action": 0}
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != n_rows:
            raise Refused(
                "bad_columns", f"{name!r} has shape {column.shape}; every column has {n_rows} rows"
            )
        head = name.split(".", 1)[0]
        if head in found:
            found[head] += 1
        elif name in OPTIONAL:
            if column.dtype != OPTIONAL[name] or column.ndim != 1:
                raise Refused(
                    "bad_columns", f"{name!r} is not one {DTYPE_NAMES[OPTIONAL[name]]} per row"
                )
        elif name == "action_mask":
            if column.dtype != np.bool_ or column.ndim != 2:
                raise Refused("bad_columns", "'legal' is not BOOL with one flag per action")
        elif name not in REQUIRED and head != "raw_action":
            raise Refused("bad_columns", f"column {name[:40]!r} is not known")
    for head, count in found.items():
        if count == 0 or (count > 1 and head in columns):
            raise Refused(
                "bad_columns", f"wanted either {head!r} or {head + '.<key>'!r} columns, got {count}"
            )


def _check_rows(columns: Mapping[str, Array]) -> None:
    row = columns["row"]
    if len(row) < 2:
        raise Refused("bad_rows", "a chunk has at least one step and the row after it")
    is_step = row == RowKind.STEP
    if int(row.max()) > RowKind.BOOTSTRAP or not is_step[0] or is_step[-1]:
        raise Refused(
            "bad_rows",
            "rows start with a step, end with a final or bootstrap row, and are 0, 1 or 2",
        )
    is_first = columns["is_first"]
    ends = columns["terminated"] | columns["truncated"]
    after_end = ~is_step[:-1]
    if (after_end != is_first[1:]).any():
        raise Refused(
            "bad_rows", "inside a chunk is_first stands exactly where the row before is no step"
        )
    if (ends[:-1] != (row[1:] == RowKind.FINAL)).any() or ends[-1]:
        raise Refused("bad_rows", "terminated or truncated stands exactly before a final row")
    if (is_first & ~is_step).any() or (ends & ~is_step).any():
        raise Refused("bad_rows", "final and bootstrap rows carry no flags")
    if not np.isfinite(columns["reward"]).all():
        raise Refused("not_finite", "a reward is NaN or infinite")
    for name, column in columns.items():
        is_number = name in ("logp", "value", "priority") or name.split(".", 1)[0] == "raw_action"
        if is_number and column.dtype.kind == "f" and not np.isfinite(column).all():
            raise Refused("not_finite", f"{name!r} holds NaN or infinity")
    if "by" in columns and int(columns["by"].max()) > By.SCRIPT:
        raise Refused("bad_rows", "'by' is 0 unknown, 1 person, 2 bot or 3 script")


def _check_meta(meta: ChunkMeta, columns: Mapping[str, Array]) -> None:
    n_steps = int((columns["row"] == RowKind.STEP).sum())
    if meta.n_steps != n_steps or n_steps > MAX_STEPS:
        raise Refused(
            "bad_metadata",
            f"n_steps is {meta.n_steps} for {n_steps} steps; at most {MAX_STEPS} are taken",
        )
    starts = np.flatnonzero(columns["is_first"]).tolist()
    if starts[:1] != [0]:
        starts = [0, *starts]  # the first rows go on with an episode of the chunk before
    if [note.row for note in meta.episodes] != starts:
        raise Refused("bad_metadata", f"episodes must start at rows {starts[:8]}")
    # Where an episode ends inside the chunk, the row before the next one's first says how.
    lasts = columns["row"][[*(start - 1 for start in starts[1:]), -1]]
    if any(
        note.cut and last != RowKind.BOOTSTRAP
        for note, last in zip(meta.episodes, lasts, strict=True)
    ):
        raise Refused("bad_metadata", "an episode that was cut ends at a bootstrap row")
    if meta.chunk_no == 0 and (meta.first_step != 0 or not columns["is_first"][0]):
        raise Refused("bad_metadata", "chunk 0 starts an episode at step 0")


def split_chunk(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """Two chunks with the same steps, for one that is too large to travel; the second takes the
    next chunk_no."""
    meta = chunk.meta
    steps = np.flatnonzero(chunk.columns["row"] == RowKind.STEP)
    if len(steps) < 2:
        raise Refused("too_large", "a single step does not fit into a frame")
    n_left = len(steps) // 2
    at = int(steps[n_left])
    before = [note for note in meta.episodes if note.row < at]
    if chunk.columns["is_first"][at]:
        left = {name: column[:at] for name, column in chunk.columns.items()}
    else:
        left = bootstrap_last_row(
            {name: column[: at + 1] for name, column in chunk.columns.items()}
        )
        before[-1] = replace(before[-1], cut=False)
    right = {name: column[at:] for name, column in chunk.columns.items()}
    running = [note for note in meta.episodes if note.row <= at][-1:]
    later = [note for note in meta.episodes if note.row > at]
    after = [replace(note, row=max(0, note.row - at)) for note in (*running, *later)]
    return (
        Chunk(replace(meta, n_steps=n_left, episodes=tuple(before)), left),
        Chunk(
            replace(
                meta,
                chunk_no=meta.chunk_no + 1,
                first_step=meta.first_step + n_left,
                n_steps=len(steps) - n_left,
                episodes=tuple(after),
            ),
            right,
        ),
    )


def bootstrap_last_row(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Copies in which the last row is a bootstrap row: observation and mask kept, the rest
    padding."""
    copies = {}
    for name, column in columns.items():
        copies[name] = column = column.copy()
        if name == "row":
            column[-1] = RowKind.BOOTSTRAP
        elif not keeps_value_when_padded(name):
            column[-1] = 0
    return copies


def keeps_value_when_padded(name: str) -> bool:
    """Whether a final or bootstrap row keeps this column: observations and masks do, decisions
    do not."""
    return name == "action_mask" or name == "obs" or name.startswith("obs.")
