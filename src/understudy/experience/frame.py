"""A frame: a 64-byte header and a body, as they are sent and stored.

offset  0  magic      4s   b"UNDY"
        4  version    u8   1
        5  kind       u8   0 data, 1 drop report, 2 close, 3 late reward (reserved)
        6  flags      u16  0
        8  body_len   u32
       12  body_crc   u32  CRC-32 of the body
       16  session    16s  UUIDv7
       32  chunk_no   u64  dense from 0 within the session
       40  player     16s  pseudonym, stamped by the intake; clients send zeros
       56  received_s u32  stamped by the intake; clients send 0
       60  header_crc u32  CRC-32 of the first 60 bytes
"""

import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from zlib import crc32

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import InvalidName, Refused
from understudy.core.names import PlayerName, player_name
from understudy.core.wording import joined

MAGIC = b"UNDY"
VERSION = 1
HEADER_BYTES = 64
MAX_FRAME_BYTES = 512 * 1024
MAX_BODY_BYTES = MAX_FRAME_BYTES - HEADER_BYTES
MAX_FRAMES_PER_SEND = 64
MAX_COUNT = 1 << 48
"""Chunk numbers and step counts are below this, so that sums of them fit into 63 bits."""
NO_PLAYER = bytes(16)

_HEADER = struct.Struct("<4sBBHII16sQ16sII")
_SUMMED = HEADER_BYTES - 4
_CRC = struct.Struct("<I")


class FrameKind(IntEnum):
    """The content of a frame's body."""

    DATA = 0
    DROP = 1
    CLOSE = 2
    LATE_REWARD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One numbered message of a session; equal frames have equal bytes."""

    kind: FrameKind
    session: uuid.UUID
    chunk_no: int
    body: bytes
    body_crc: int
    player: bytes = NO_PLAYER
    received_s: int = 0
    flags: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of the encoded frame."""
        return HEADER_BYTES + len(self.body)

    def header(self) -> bytes:
        """The 64 bytes before the body."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.flags,
            len(self.body),
            self.body_crc,
            self.session.bytes,
            self.chunk_no,
            self.player,
            self.received_s,
            0,
        )
        return head[:_SUMMED] + _CRC.pack(crc32(head[:_SUMMED]))

    def encode(self) -> bytes:
        """The bytes of the frame."""
        return self.header() + self.body

    def stamped(self, player: bytes, received_s: int) -> "Frame":
        """The same frame with the player and time of the intake; the body does not change."""
        return Frame(
            kind=self.kind,
            session=self.session,
            chunk_no=self.chunk_no,
            body=self.body,
            body_crc=self.body_crc,
            player=player,
            received_s=received_s,
            flags=self.flags,
        )


@dataclass(frozen=True, slots=True)
class DropReport:
    """Chunk numbers that a client dropped unsent, and how many steps they had."""

    ranges: tuple[tuple[int, int], ...]
    n_steps: int


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How much a finished session sent: the number of frames before this one, and of steps."""

    n_chunks: int
    n_steps: int


def data_frame(session: uuid.UUID, chunk_no: int, body: bytes) -> Frame:
    """A frame for an encoded chunk; Refused if it exceeds the size limit."""
    return _frame(FrameKind.DATA, session, chunk_no, body)


def drop_frame(session: uuid.UUID, chunk_no: int, report: DropReport) -> Frame:
    """A frame that reports dropped chunk numbers."""
    body = canonical_json(
        {"n_steps": report.n_steps, "ranges": [list(pair) for pair in report.ranges]}
    )
    return _frame(FrameKind.DROP, session, chunk_no, body)


def close_frame(session: uuid.UUID, chunk_no: int, report: CloseReport) -> Frame:
    """A frame that closes a session."""
    body = canonical_json({"n_chunks": report.n_chunks, "n_steps": report.n_steps})
    return _frame(FrameKind.CLOSE, session, chunk_no, body)


def _frame(kind: FrameKind, session: uuid.UUID, chunk_no: int, body: bytes) -> Frame:
    if len(body) > MAX_BODY_BYTES:
        raise Refused(
            "too_large", f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} fit into a frame"
        )
    return Frame(kind=kind, session=session, chunk_no=chunk_no, body=body, body_crc=crc32(body))


def decode_frame(raw: bytes | memoryview) -> Frame:
    """Decode and check one frame; Refused states the problem."""
    view = memoryview(raw)
    if len(view) < HEADER_BYTES:
        raise Refused("truncated", f"{len(view)} bytes; the header alone has {HEADER_BYTES}")
    fields = _HEADER.unpack_from(view)
    (
        magic,
        version,
        kind,
        flags,
        body_len,
        body_crc,
        session,
        chunk_no,
        player,
        received_s,
        header_crc,
    ) = fields
    if magic != MAGIC:
        raise Refused("bad_magic", f"starts with {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION:
        raise Refused("bad_version", f"frame version {version}; this build reads {VERSION}")
    if header_crc != crc32(view[:_SUMMED]):
        raise Refused("bad_header_checksum", "the header does not match its checksum")
    if kind == FrameKind.LATE_REWARD:
        raise Refused("reserved_kind", "late rewards are reserved and not accepted yet")
    if kind > FrameKind.LATE_REWARD or flags:
        raise Refused("bad_kind", f"kind {kind}, flags {flags}; expected a known kind and flags 0")
    if body_len > MAX_BODY_BYTES:
        raise Refused(
            "too_large", f"a body of {body_len} bytes; at most {MAX_BODY_BYTES} are accepted"
        )
    if chunk_no >= MAX_COUNT:
        raise Refused("bad_number", f"chunk_no is {chunk_no}; numbers must be below 2^48")
    body = bytes(view[HEADER_BYTES : HEADER_BYTES + body_len])
    if len(body) != body_len:
        raise Refused("truncated", f"a body of {len(body)} bytes; the header announces {body_len}")
    if crc32(body) != body_crc:
        raise Refused("bad_body_checksum", "the body does not match its checksum")
    if len(view) != HEADER_BYTES + body_len:
        raise Refused(
            "trailing_bytes", f"{len(view) - HEADER_BYTES - body_len} bytes after the frame's end"
        )
    return Frame(
        kind=FrameKind(kind),
        session=uuid.UUID(bytes=session),
        chunk_no=chunk_no,
        body=body,
        body_crc=body_crc,
        player=player,
        received_s=received_s,
        flags=flags,
    )


def announced_size(raw: bytes | memoryview) -> int:
    """A frame's size according to its unchecked header; 64 if there are fewer than 64 bytes."""
    if len(raw) < HEADER_BYTES:
        return HEADER_BYTES
    return HEADER_BYTES + int(_HEADER.unpack_from(raw)[4])


def identity_of(raw: bytes) -> tuple[bytes, int, bytes]:
    """Session, chunk number and player from an intact header; zeros if the header is damaged."""
    if len(raw) >= HEADER_BYTES:
        magic, *_rest, session, chunk_no, player, _received_s, header_crc = _HEADER.unpack_from(raw)
        if magic == MAGIC and header_crc == crc32(raw[:_SUMMED]) and chunk_no < MAX_COUNT:
            return session, chunk_no, player
    return bytes(16), 0, bytes(16)


def read_drop(frame: Frame) -> DropReport:
    """Decode a drop report; every range must be before the report's own number."""
    fields = _report(frame, FrameKind.DROP, {"n_steps", "ranges"})
    ranges = fields["ranges"]
    if not isinstance(ranges, list) or not 0 < len(ranges) <= 1024:
        raise Refused("bad_report", "ranges must be a list of 1 to 1024 pairs")
    last = -1
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(_is_count(n) for n in pair)):
            raise Refused("bad_report", f"range {pair!r} is not a pair of whole numbers")
        if not last < pair[0] <= pair[1] < frame.chunk_no:
            raise Refused(
                "bad_report",
                f"range {pair!r} must be [first, last], after the previous range and before the "
                f"report's own chunk number {frame.chunk_no}",
            )
        last = pair[1]
    return DropReport(tuple((int(a), int(b)) for a, b in ranges), _count(fields, "n_steps"))


def read_close(frame: Frame) -> CloseReport:
    """Decode a close frame, which always has the last number of its session."""
    fields = _report(frame, FrameKind.CLOSE, {"n_chunks", "n_steps"})
    report = CloseReport(_count(fields, "n_chunks"), _count(fields, "n_steps"))
    if report.n_chunks != frame.chunk_no:
        raise Refused(
            "bad_report",
            f"n_chunks is {report.n_chunks}; expected {frame.chunk_no}, the close frame's number",
        )
    return report


def _report(frame: Frame, kind: FrameKind, keys: set[str]) -> dict[str, Any]:
    if frame.kind is not kind:
        raise Refused(
            "bad_report", f"a {frame.kind.name.lower()} frame was read as {kind.name.lower()}"
        )
    fields = strict_json(frame.body)
    if not isinstance(fields, dict) or set(fields) != keys:
        raise Refused(
            "bad_report",
            f"the report is {str(fields)[:60]}; expected an object with exactly {joined(keys)}",
        )
    return fields


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _count(fields: dict[str, Any], name: str) -> int:
    if not _is_count(fields[name]):
        raise Refused("bad_report", f"{name} is {fields[name]!r}; expected a whole number from 0")
    return int(fields[name])


# --- A frame batch: the body of one request -------------------------------------------------------
#
# offset  0  magic   4s   b"UNPA"
#         4  length  u32  of the preamble
#         8  preamble     JSON: {"players": {session: name}, "skipped_steps": n}
#         …  frames       up to 64, one after the other

_BATCH_MAGIC = b"UNPA"
CONTENT_TYPE = "application/vnd.understudy.frames"
_MAX_PREAMBLE_BYTES = 64 * 1024
MAX_FRAME_BATCH_BYTES = MAX_FRAMES_PER_SEND * MAX_FRAME_BYTES + _MAX_PREAMBLE_BYTES + 8
_BATCH_HEAD = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """The frames of one request; each invalid frame is replaced by a Refused with the reason."""

    frames: Sequence[Frame | Refused]
    players: Mapping[uuid.UUID, PlayerName]
    skipped_steps: int = 0
    """Steps played since the last batch but not recorded, because of the recording rate."""


def encode_frame_batch(
    frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], skipped_steps: int = 0
) -> bytes:
    """Encode the body of a request; sessions in `players` without a frame are left out."""
    sessions = {frame.session for frame in frames}
    names = {str(session): name for session, name in players.items() if session in sessions}
    preamble = canonical_json({"players": names, "skipped_steps": skipped_steps})
    head = _BATCH_HEAD.pack(_BATCH_MAGIC, len(preamble))
    return b"".join([head, preamble, *(frame.encode() for frame in frames)])


def decode_frame_batch(raw: bytes | memoryview) -> FrameBatch:
    """Decode the body of a request; Refused if it is not a frame batch.

    An invalid frame does not affect the others.
    """
    view = memoryview(raw)
    if len(view) < _BATCH_HEAD.size or bytes(view[:4]) != _BATCH_MAGIC:
        raise Refused(
            "bad_frame_batch",
            f"starts with {bytes(view[:4])!r}; expected {_BATCH_MAGIC!r} and a length",
        )
    length = _BATCH_HEAD.unpack_from(view)[1]
    at = _BATCH_HEAD.size + length
    if length > _MAX_PREAMBLE_BYTES or at > len(view):
        raise Refused(
            "bad_frame_batch",
            f"a preamble of {length} bytes in a batch of {len(view)}; at most "
            f"{_MAX_PREAMBLE_BYTES} are accepted",
        )
    preamble = strict_json(bytes(view[_BATCH_HEAD.size : at]))
    if not isinstance(preamble, dict) or preamble.keys() != {"players", "skipped_steps"}:
        raise Refused(
            "bad_frame_batch", "the preamble must have players and skipped_steps, and nothing else"
        )
    names = preamble["players"]
    if not isinstance(names, dict) or not _is_count(preamble["skipped_steps"]):
        raise Refused(
            "bad_frame_batch",
            "players must be an object and skipped_steps a whole number from 0",
        )
    try:
        players = {uuid.UUID(session): player_name(name) for session, name in names.items()}
    except (InvalidName, ValueError, TypeError) as error:
        raise Refused("bad_frame_batch", f"players cannot be read: {str(error)[:120]}") from None
    frames: list[Frame | Refused] = []
    while at < len(view):
        if len(frames) == MAX_FRAMES_PER_SEND:
            raise Refused(
                "bad_frame_batch", f"more than {MAX_FRAMES_PER_SEND} frames; send several batches"
            )
        size = announced_size(view[at : at + HEADER_BYTES])
        if size > MAX_FRAME_BYTES or at + size > len(view):
            raise Refused(
                "bad_frame_batch",
                f"frame {len(frames)} announces {size} bytes; {len(view) - at} are left, and "
                f"at most {MAX_FRAME_BYTES} are accepted",
            )
        try:
            frames.append(decode_frame(view[at : at + size]))
        except Refused as refused:
            frames.append(refused)
        at += size
    return FrameBatch(frames, players, preamble["skipped_steps"])
