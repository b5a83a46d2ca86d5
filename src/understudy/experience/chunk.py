"""A chunk: consecutive steps of one session, in columns.

A row is a step, a final observation or a bootstrap observation (`RowKind`). The latter two have
only an observation and an action mask; their other columns are padding. A chunk's last row is never
a step, so the next observation of a step in row i is always in row i + 1.
"""

import math
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import InvalidName, Refused
from understudy.core.names import GameName, game_name
from understudy.core.tensors import DTYPE_NAMES, DTYPES, Array
from understudy.core.wording import joined, shortened
from understudy.experience.frame import MAX_COUNT, Frame, FrameKind, data_frame
from understudy.experience.skill import DEFAULT_NOISE, MAX_TEMPERATURE, is_noise
from understudy.experience.spaces import check_recordable
from understudy.experience.ticket import MAX_TICKET_CHARS

CHUNK_FORMAT = "understudy-chunk/1"
KINDS = ("player", "actor")
CONSENTS = ("granted", "denied", "unknown")

ChunkId = tuple[uuid.UUID, int]
"""(session, chunk_no): the identity of a chunk everywhere."""

_SCHEMA = re.compile(r"[0-9a-f]{64}")

MAX_STEPS = 512
MAX_DECODED_BYTES = 16 * 1024 * 1024
CUT_BYTES = 448 * 1024
COMPRESS_FROM_BYTES = 512
"""Byte columns whose rows are at least this long (images) are sent compressed."""


class RowKind:
    """The kinds of a row.

    Numbers, not an enum: to compare an array with a member of an enum, NumPy runs Python code, in
    which it loses Ctrl-C.
    """

    STEP: Final = 0
    FINAL: Final = 1
    BOOTSTRAP: Final = 2


class By(IntEnum):
    """What decided a step."""

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
"""Optional columns with one number per row; `action_mask` and `raw_action` are also optional and
have other shapes."""

_NUMBERS = ("reward", "logp", "value", "priority")


# --- Metadata -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeNote:
    """Facts about one episode of the chunk, which starts or continues at row `row`."""

    row: int
    seat: int = 0
    match: str | None = None
    opponents: tuple[str, ...] = ()
    """The kinds of the opponents (`person`, `script`, a model's name), never a player's name."""
    result: str | float | None = None
    seed: int | None = None
    model: str | None = None
    propensity: float | None = None
    """The probability with which `model` was drawn, as clients of earlier versions state it."""
    ticket: str | None = None
    """The gateway's draw of `model` for this episode, if there were several."""
    skill: str | None = None
    """The skill at which the bot plays, `easy` or `even`; None: as released, or a temperature."""
    noise: float | None = None
    """The noise of that skill, once a bot has decided."""
    temperature: float | None = None
    """The temperature at which the game lets the bot play; None: as released, or a skill."""
    cut: bool = False
    """The end was not recorded: the last decision was dropped, and the episode stops at a
    bootstrap row."""

    def to_json(self) -> dict[str, Any]:
        note: dict[str, Any] = {"row": self.row, "seat": self.seat}
        note |= {name: value for name in _NOTE_TEXTS if (value := getattr(self, name)) is not None}
        if self.opponents:
            note["opponents"] = list(self.opponents)
        return note | ({"cut": True} if self.cut else {})

    @property
    def is_released_play(self) -> bool:
        """Whether a bot in this episode plays as released."""
        return self.skill is None and self.noise is None and self.temperature is None


_NOTE_TEXTS = (
    "match",
    "result",
    "seed",
    "model",
    "propensity",
    "ticket",
    "skill",
    "noise",
    "temperature",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMeta:
    """The metadata of a chunk."""

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
    """A chunk's id as text for people."""
    return f"{chunk[0]}/{chunk[1]}"


_META_KEYS = {"format", *(field.name for field in fields(ChunkMeta))}


def read_meta(metadata: Mapping[str, str]) -> ChunkMeta:
    """Parse metadata; Refused if a key is missing, unknown or malformed."""
    if metadata.keys() != _META_KEYS:
        raise Refused(
            "bad_metadata",
            f"wrong metadata: missing {joined(_META_KEYS - metadata.keys())}, unknown "
            f"{joined(metadata.keys() - _META_KEYS)}",
        )
    if metadata["format"] != CHUNK_FORMAT:
        raise Refused(
            "bad_version",
            f"chunk format {metadata['format'][:40]!r}; this build reads {CHUNK_FORMAT}",
        )
    if metadata["kind"] not in KINDS or metadata["consent"] not in CONSENTS:
        raise Refused(
            "bad_metadata",
            f"kind is {metadata['kind'][:40]!r} and consent is {metadata['consent'][:40]!r}; "
            f"expected one of {joined(KINDS)}, and one of {joined(CONSENTS)}",
        )
    if len(metadata["client"]) > 128 or not _SCHEMA.fullmatch(metadata["schema"]):
        raise Refused(
            "bad_metadata", "client must have at most 128 characters, and schema 64 of 0-9 a-f"
        )
    try:
        game = game_name(metadata["game"])
        session = uuid.UUID(metadata["session"])
    except (InvalidName, ValueError) as error:
        raise Refused("bad_metadata", shortened(str(error), 200)) from None
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
        chunk_no=_integer(metadata, "chunk_no"),
        first_step=_integer(metadata, "first_step"),
        n_steps=_integer(metadata, "n_steps"),
        episodes=tuple(read_note(note) for note in notes),
    )


def _integer(metadata: Mapping[str, str], name: str) -> int:
    text = metadata[name]
    if not (
        text.isascii()
        and text.isdigit()
        and len(text) <= 15
        and str(int(text)) == text
        and int(text) < MAX_COUNT
    ):
        raise Refused(
            "bad_metadata", f"{name} is {text[:30]!r}; expected a whole number from 0 below 2^48"
        )
    return int(text)


_ALLOWED = {
    **dict.fromkeys(("row", "seat"), "a whole number from 0 below 2**32"),
    **dict.fromkeys(("match", "model"), "text of at most 128 characters"),
    "opponents": "at most 64 texts of at most 128 characters",
    "result": "a number, or text of at most 64 characters",
    "seed": "a whole number from 0 below 2**64",
    "propensity": "a number above 0, at most 1",
    "ticket": f"text of at most {MAX_TICKET_CHARS} characters",
    "skill": " or ".join(DEFAULT_NOISE),
    "noise": "a number from 0 to 1",
    "temperature": f"a number above 0, at most {MAX_TEMPERATURE:g}",
    "cut": "true or false",
}
"""What each field of a note may be, for messages."""


def read_note(note: Any) -> EpisodeNote:
    """Parse the JSON of a note; Refused if a field is unknown or malformed."""
    if not isinstance(note, dict) or not {"row", "seat"} <= note.keys() <= {
        "row",
        "seat",
        "opponents",
        "cut",
        *_NOTE_TEXTS,
    }:
        raise Refused(
            "bad_metadata",
            f"an episode must have row, seat and only known keys, got {str(note)[:80]}",
        )
    opponents = note.get("opponents", [])
    result = note.get("result")
    propensity = note.get("propensity")
    temperature = note.get("temperature")
    checks = {
        **{name: type(note[name]) is int and 0 <= note[name] < 1 << 32 for name in ("row", "seat")},
        **{name: _is_text(note.get(name, ""), 128) for name in ("match", "model")},
        "opponents": isinstance(opponents, list)
        and len(opponents) <= 64
        and all(_is_text(opponent, 128) for opponent in opponents),
        "result": result is None
        or _is_text(result, 64)
        or (type(result) in (int, float) and abs(result) < 1e300),
        "seed": note.get("seed") is None
        or (type(note["seed"]) is int and 0 <= note["seed"] < 1 << 64),
        "propensity": propensity is None
        or (type(propensity) in (int, float) and 0 < propensity <= 1),
        "ticket": _is_text(note.get("ticket", ""), MAX_TICKET_CHARS),
        "skill": note.get("skill") in (None, *DEFAULT_NOISE),
        "noise": note.get("noise") is None or is_noise(note["noise"]),
        "temperature": temperature is None
        or (type(temperature) in (int, float) and 0 < temperature <= MAX_TEMPERATURE),
        "cut": type(note.get("cut", False)) is bool,
    }
    if not all(checks.values()):
        name = next(name for name, is_allowed in checks.items() if not is_allowed)
        raise Refused(
            "bad_metadata",
            f"{name} of an episode must be {_ALLOWED[name]}, got {repr(note[name])[:80]}",
        )
    return EpisodeNote(**{**note, "opponents": tuple(opponents)})


def _is_text(value: Any, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit


# --- The chunk ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Columns and their metadata; `decode_chunk` returns only chunks that pass `validate`."""

    meta: ChunkMeta
    columns: Mapping[str, Array]

    def __eq__(self, other: object) -> bool:
        """Bitwise equality of metadata, names, dtypes, shapes and bytes."""
        if not isinstance(other, Chunk):
            return NotImplemented
        return self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.meta.session, self.meta.chunk_no))

    @property
    def n_rows(self) -> int:
        return len(self.columns["row"])

    @property
    def ends_open(self) -> bool:
        """Whether its last episode may continue in the next chunk."""
        is_open = self.columns["row"][-1] == RowKind.BOOTSTRAP
        return bool(is_open and not self.meta.episodes[-1].cut)

    @property
    def size_bytes(self) -> int:
        """Decoded size of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    def encode(self) -> bytes:
        """Canonical bytes: names sorted, compact JSON, data aligned to 64 bytes."""
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
        """The frame that carries this chunk."""
        return data_frame(self.meta.session, self.meta.chunk_no, self.encode())

    def validate(self) -> "Chunk":
        """Return the chunk itself, or raise Refused if its rows or metadata break a rule."""
        _check_columns(self.columns)
        _check_rows(self.columns)
        _check_meta(self.meta, self.columns)
        return self


def decode_chunk(body: bytes | memoryview) -> Chunk:
    """Decode and validate the body of a data frame; Refused states the broken rule."""
    columns, metadata = tensors.decode(body)
    columns = _inflate(columns, metadata.pop("codec", None))
    return Chunk(read_meta(metadata), columns).validate()


def chunk_of(frame: Frame) -> Chunk:
    """The chunk of a data frame; Refused if its identity differs from the header's."""
    if frame.kind is not FrameKind.DATA:
        raise Refused("bad_kind", f"a {frame.kind.name.lower()} frame has no chunk")
    chunk = decode_chunk(frame.body)
    if (chunk.meta.session, chunk.meta.chunk_no) != (frame.session, frame.chunk_no):
        raise Refused(
            "identity_mismatch", "session or chunk_no differs between header and metadata"
        )
    return chunk


def people_rows(chunk: Chunk) -> Array:
    """bool[rows]: the rows of episodes in which no decision is known to be by a bot or actor."""
    by_people = np.zeros(chunk.n_rows, np.bool_)
    if chunk.meta.kind == "actor":
        return by_people
    by = chunk.columns.get("by")
    ends = [*(note.row for note in chunk.meta.episodes[1:]), chunk.n_rows]
    for note, end in zip(chunk.meta.episodes, ends, strict=True):
        by_people[note.row : end] = note.model is None and (
            by is None or int(by[note.row : end].max()) <= By.PERSON
        )
    return by_people


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
                    f"{name!r} has codec {str(entry)[:60]}; expected ['zlib', dtype, shape]",
                )
        is_shape = len(shape) <= tensors.MAX_DIMENSIONS and all(
            type(n) is int and 0 <= n < 1 << 32 for n in shape
        )
        if not is_shape or columns[name].dtype != np.uint8:
            raise Refused(
                "bad_codec",
                f"{name!r} has shape {str(shape)[:60]} and bytes of {columns[name].dtype}; "
                f"expected at most {tensors.MAX_DIMENSIONS} whole numbers, and uint8",
            )
        size = dtype.itemsize * math.prod(shape)
        budget -= size
        if budget < 0:
            raise Refused("too_large", f"more than {MAX_DECODED_BYTES} bytes when decompressed")
        inflater = zlib.decompressobj()
        try:
            # One byte more than announced detects a longer stream without unpacking all of it.
            raw = inflater.decompress(columns[name].tobytes(), size + 1)
        except zlib.error as error:
            raise Refused("bad_codec", f"{name!r} does not decompress: {error}") from None
        if len(raw) != size or not inflater.eof or inflater.unused_data:
            raise Refused("bad_codec", f"{name!r} does not have exactly the {size} bytes announced")
        columns[name] = np.frombuffer(raw, dtype).reshape(shape)
        tensors.check_bool(name, columns[name])
    return columns


def _check_columns(columns: Mapping[str, Array]) -> None:
    for name, dtype in REQUIRED.items():
        if name not in columns or columns[name].dtype != dtype or columns[name].ndim != 1:
            raise Refused(
                "bad_columns",
                f"column {name!r} is missing, or is not one {DTYPE_NAMES[dtype]} per row",
            )
    n_rows = len(columns["row"])
    counts = {"obs": 0, "action": 0}
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != n_rows:
            raise Refused(
                "bad_columns", f"{name!r} has shape {column.shape}; expected {n_rows} rows"
            )
        head = name.split(".", 1)[0]
        if head in counts:
            counts[head] += 1
        elif name in OPTIONAL:
            if column.dtype != OPTIONAL[name] or column.ndim != 1:
                raise Refused(
                    "bad_columns",
                    f"{name!r} is {column.dtype}{list(column.shape)}; expected "
                    f"{DTYPE_NAMES[OPTIONAL[name]]}[rows]",
                )
        elif name == "action_mask":
            if column.dtype != np.bool_ or column.ndim != 2:
                raise Refused(
                    "bad_columns",
                    f"'action_mask' is {column.dtype}{list(column.shape)}; expected BOOL[rows, "
                    "actions]",
                )
        elif name not in REQUIRED and head != "raw_action":
            raise Refused("bad_columns", f"column {name[:40]!r} is not known; leave it out")
    for head, count in counts.items():
        if count == 0 or (count > 1 and head in columns):
            raise Refused(
                "bad_columns",
                f"give one column {head!r}, or one column {head + '.<key>'!r} for each key; got "
                + ("none of them" if count == 0 else "both"),
            )


def _check_rows(columns: Mapping[str, Array]) -> None:
    row = columns["row"]
    if len(row) < 2:
        raise Refused("bad_rows", "a chunk must have at least one step and the row after it")
    is_step = row == RowKind.STEP
    if int(row.max()) > RowKind.BOOTSTRAP or not is_step[0] or is_step[-1]:
        raise Refused(
            "bad_rows",
            "rows must start with a step, end with a final or bootstrap row, and be 0, 1 or 2",
        )
    is_first = columns["is_first"]
    ends = columns["terminated"] | columns["truncated"]
    after_end = ~is_step[:-1]
    if (after_end != is_first[1:]).any():
        raise Refused("bad_rows", "is_first must be set exactly where the row before is not a step")
    if (ends[:-1] != (row[1:] == RowKind.FINAL)).any() or ends[-1]:
        raise Refused(
            "bad_rows", "terminated or truncated must be set exactly where a final row follows"
        )
    if (is_first & ~is_step).any() or (ends & ~is_step).any():
        raise Refused("bad_rows", "final and bootstrap rows must have no flags")
    for name, column in columns.items():
        is_number = name in _NUMBERS or name.split(".", 1)[0] == "raw_action"
        if is_number and column.dtype.kind == "f":
            check_recordable(name, column)
    if "by" in columns and int(columns["by"].max()) > By.SCRIPT:
        raise Refused("bad_rows", "'by' must be 0 unknown, 1 person, 2 bot or 3 script")


def _check_meta(meta: ChunkMeta, columns: Mapping[str, Array]) -> None:
    n_steps = int((columns["row"] == RowKind.STEP).sum())
    if meta.n_steps != n_steps or n_steps > MAX_STEPS:
        raise Refused(
            "bad_metadata",
            f"n_steps is {meta.n_steps} for {n_steps} steps; at most {MAX_STEPS} are accepted",
        )
    starts = np.flatnonzero(columns["is_first"]).tolist()
    if starts[:1] != [0]:
        starts = [0, *starts]  # the first rows continue an episode of the chunk before
    if [note.row for note in meta.episodes] != starts:
        raise Refused(
            "bad_metadata",
            f"episodes has rows {joined(note.row for note in meta.episodes)}; expected the rows "
            f"where episodes start, {joined(starts)}",
        )
    # The last row of an episode shows how it ended.
    lasts = columns["row"][[*(start - 1 for start in starts[1:]), -1]]
    if any(
        note.cut and last != RowKind.BOOTSTRAP
        for note, last in zip(meta.episodes, lasts, strict=True)
    ):
        raise Refused("bad_metadata", "an episode that was cut must end at a bootstrap row")
    if meta.chunk_no == 0 and (meta.first_step != 0 or not columns["is_first"][0]):
        raise Refused("bad_metadata", "chunk 0 must start an episode at step 0")


def split_chunk(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """Split a chunk into two halves, because it is too large; the second has the next chunk_no."""
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
    """Copies of the columns in which the last row is a bootstrap row, with padding set to 0."""
    copies = {}
    for name, column in columns.items():
        copies[name] = column = column.copy()
        if name == "row":
            column[-1] = RowKind.BOOTSTRAP
        elif not keeps_value_when_padded(name):
            column[-1] = 0
    return copies


def keeps_value_when_padded(name: str) -> bool:
    """Whether final and bootstrap rows have this column: observations and action masks do."""
    return name == "action_mask" or name == "obs" or name.startswith("obs.")
