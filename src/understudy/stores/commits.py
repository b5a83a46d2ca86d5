"""One commit of the local store: frames and everything that became true with them, in one log entry.

    payload = trailer length u32, trailer (msgpack), then the raw bytes of stored frames and of refused ones

Also the watermark: a small file beside the log that says how far readers may look.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec

from understudy.core.errors import Corrupt
from understudy.core.log import HEAD_BYTES, Entry, LogReader
from understudy.stores.disk import disk

_LENGTH = struct.Struct("<I")
_MARK = struct.Struct("<4sQQQQI")
_MARK_MAGIC = b"mark"


class StoredFrame(msgspec.Struct, array_like=True, frozen=True):
    """What the log says about one stored frame besides its bytes."""

    length: int
    first_step: int
    n_steps: int
    n_rows: int
    decoded_bytes: int
    game: str
    schema: str
    replays: int = 0
    """Quarantine id this frame came from, or 0."""


class QuarantinedFrame(msgspec.Struct, array_like=True, frozen=True):
    """One refused or parked frame; its raw bytes follow the stored ones."""

    id: int
    length: int
    reason: str
    detail: str
    parked: bool
    received_s: float
    game: str
    session: bytes
    chunk_no: int
    crc: int
    player: bytes


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something other than a frame that takes an arrival number."""

    kind: str
    """`forget` (a player), `quarantine` (stored chunks), or `damaged` (arrivals that can no longer be read)."""
    at_s: float
    count: int = 1
    """How many arrival numbers it takes."""
    player: bytes = b""
    chunks: list[tuple[bytes, int]] = []
    reason: str = ""


class Trailer(msgspec.Struct, frozen=True):
    """The facts of one commit."""

    number: int
    """Dense over the store's life."""
    first_arrival: int
    positions: list[tuple[str, str | None]] = []
    """(partition, position) that this commit covers."""
    stored: list[StoredFrame] = []
    quarantined: list[QuarantinedFrame] = []
    event: Event | None = None
    forgotten: list[tuple[bytes, bytes]] = []
    """(session, player) of sessions that first came after their player was forgotten; no frame of them is kept."""

    @property
    def n_arrivals(self) -> int:
        return len(self.stored) + (self.event.count if self.event is not None else 0)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trailer)


def commit_parts(trailer: Trailer, raws: list[bytes]) -> list[bytes]:
    """The parts of a log entry."""
    text = _encoder.encode(trailer)
    return [_LENGTH.pack(len(text)), text, *raws]


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit read back: its trailer, and where in the file its raw bytes begin."""

    trailer: Trailer
    entry: Entry
    raw_start: int
    """Offset of the raw bytes inside the payload."""

    def raw(self, at: int, length: int) -> bytes:
        start = self.raw_start + at
        return self.entry.payload[start : start + length]

    def frames(self) -> Iterator[tuple[StoredFrame, int, bytes]]:
        """Each stored frame: its facts, where its raw bytes lie in the file, and the bytes."""
        at = 0
        for stored in self.trailer.stored:
            yield stored, self._offset(at), self.raw(at, stored.length)
            at += stored.length

    def quarantined(self) -> Iterator[tuple[QuarantinedFrame, int, bytes]]:
        """Each refused or parked frame, likewise."""
        at = sum(stored.length for stored in self.trailer.stored)
        for one in self.trailer.quarantined:
            yield one, self._offset(at), self.raw(at, one.length)
            at += one.length

    def _offset(self, at: int) -> int:
        return self.entry.start + HEAD_BYTES + self.raw_start + at


def read_commit(entry: Entry) -> Commit:
    """The commit in a log entry; Corrupt when it is none."""
    try:
        (length,) = _LENGTH.unpack_from(entry.payload)
        trailer = _decoder.decode(entry.payload[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.MsgspecError) as error:
        raise Corrupt(f"a commit at byte {entry.start} is not readable: {error}") from error
    return Commit(trailer, entry, _LENGTH.size + length)


def commits_in(reader: LogReader, start: int = 0, *, up_to: int | None = None) -> Iterator[Commit]:
    """Every readable commit of a log file; what is damaged between them shows as a jump in their numbers."""
    at = start
    while up_to is None or at < up_to:
        entry = reader.at(at, up_to=up_to)
        if entry is None:
            following = reader.next_readable(at) if at < reader.size_bytes else None
            if following is None:
                return
            at = following
            continue
        at = entry.end
        with contextlib.suppress(Corrupt):
            yield read_commit(entry)


def damage(first_arrival: int, following: int, *, at_s: float = 0.0) -> Event:
    """Arrival numbers that were given out and can no longer be read."""
    return Event(kind="damaged", at_s=at_s, count=max(0, following - first_arrival))


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far the store's readers may look."""

    sealed_below: int
    """Arrival numbers below this are in segments and the catalogue."""
    next_arrival: int
    file: int
    """The log file being written."""
    offset: int
    """Bytes of it that are durable."""

    def has_moved(self, now: "Watermark") -> bool:
        """Whether log files may have gone since: then what is missing was sealed, not damaged."""
        return (self.sealed_below, self.file) != (now.sealed_below, now.file)

    def pack(self) -> bytes:
        head = _MARK.pack(_MARK_MAGIC, self.sealed_below, self.next_arrival, self.file, self.offset, 0)[:-4]
        return head + crc32(head).to_bytes(4, "little")


class WatermarkFile:
    """Written in place after each sync; a reader that meets a half-written one looks again."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, mark: Watermark) -> None:
        with disk("the watermark"):
            os.pwrite(self._descriptor, mark.pack(), 0)

    def read(self) -> Watermark | None:
        for _ in range(1000):
            raw = os.pread(self._descriptor, _MARK.size, 0)
            if len(raw) < _MARK.size:
                return None
            magic, sealed, following, file, offset, crc = _MARK.unpack(raw)
            if magic == _MARK_MAGIC and crc == crc32(raw[:-4]):
                return Watermark(sealed, following, file, offset)
        return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def log_path(folder: Path, number: int) -> Path:
    return folder / "log" / f"{number:08d}.log"


def log_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "log").glob("*.log"))


def pack_keys(chunks: Iterable[tuple[bytes, int]]) -> bytes:
    """(session, chunk_no) pairs as bytes for a database column."""
    return b"".join(session + number.to_bytes(8, "little") for session, number in chunks)


def unpack_keys(raw: bytes) -> list[tuple[bytes, int]]:
    """The pairs that `pack_keys` wrote."""
    keys = (raw[at : at + 24] for at in range(0, len(raw), 24))
    return [(key[:16], int.from_bytes(key[16:], "little")) for key in keys]
