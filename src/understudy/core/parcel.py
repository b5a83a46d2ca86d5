"""A parcel: what one request carries, the names of its players and up to 64 frames.

offset  0  magic   4s   b"UNPA"
        4  length  u32  of the preamble
        8  preamble     JSON: {"players": {session: name}, "skipped_steps": n}
        …  frames       one behind the other, each as in core/frame.py
"""

import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import InvalidName, Refused
from understudy.core.frame import (
    HEADER_BYTES,
    MAX_COUNT,
    MAX_FRAME_BYTES,
    MAX_FRAMES_PER_SEND,
    Frame,
    announced_size,
    decode_frame,
)
from understudy.core.names import PlayerName, player_name

MAGIC = b"UNPA"
CONTENT_TYPE = "application/vnd.understudy.parcel"
MAX_PREAMBLE_BYTES = 64 * 1024
MAX_PARCEL_BYTES = MAX_FRAMES_PER_SEND * MAX_FRAME_BYTES + MAX_PREAMBLE_BYTES + 8
_HEAD = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class Parcel:
    """One request's worth of frames; each is a frame, or why these bytes are none."""

    frames: Sequence[Frame | Refused]
    players: Mapping[uuid.UUID, PlayerName]
    skipped_steps: int = 0
    """Steps of episodes that were not recorded since the last parcel, because the platform asked for a share only."""


def encode_parcel(frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], skipped_steps: int = 0) -> bytes:
    """The body of a request."""
    wanted = {frame.session for frame in frames}
    named = {str(session): name for session, name in players.items() if session in wanted}
    preamble = canonical_json({"players": named, "skipped_steps": skipped_steps})
    return b"".join([_HEAD.pack(MAGIC, len(preamble)), preamble, *(frame.encode() for frame in frames)])


def decode_parcel(raw: bytes | memoryview) -> Parcel:
    """What a request's body holds; Refused when it is no parcel. A frame that is none does not spoil the others."""
    view = memoryview(raw)
    if len(view) < _HEAD.size or bytes(view[:4]) != MAGIC:
        raise Refused("bad_parcel", f"starts with {bytes(view[:4])!r}; a parcel starts with {MAGIC!r} and a length")
    length = _HEAD.unpack_from(view)[1]
    at = _HEAD.size + length
    if length > MAX_PREAMBLE_BYTES or at > len(view):
        raise Refused("bad_parcel", f"a preamble of {length} bytes in a parcel of {len(view)}")
    players, skipped_steps = _preamble(bytes(view[_HEAD.size : at]))
    frames: list[Frame | Refused] = []
    while at < len(view):
        if len(frames) == MAX_FRAMES_PER_SEND:
            raise Refused("bad_parcel", f"more than {MAX_FRAMES_PER_SEND} frames")
        size = announced_size(view[at : at + HEADER_BYTES])
        if size > MAX_FRAME_BYTES or at + size > len(view):
            raise Refused("bad_parcel", f"frame {len(frames)} announces {size} bytes, {len(view) - at} are left")
        frames.append(_frame(view[at : at + size]))
        at += size
    return Parcel(frames, players, skipped_steps)


def _frame(raw: memoryview) -> Frame | Refused:
    try:
        return decode_frame(raw)
    except Refused as refused:
        return refused


def _preamble(raw: bytes) -> tuple[dict[uuid.UUID, PlayerName], int]:
    found = strict_json(raw)
    if not isinstance(found, dict) or found.keys() != {"players", "skipped_steps"}:
        raise Refused("bad_parcel", "the preamble has players and skipped_steps, and nothing else")
    names, skipped = found["players"], found["skipped_steps"]
    if not isinstance(names, dict) or type(skipped) is not int or not 0 <= skipped < MAX_COUNT:
        raise Refused("bad_parcel", "players is an object, skipped_steps a whole number from 0")
    try:
        return {uuid.UUID(session): player_name(name) for session, name in names.items()}, skipped
    except (InvalidName, ValueError, TypeError) as error:
        raise Refused("bad_parcel", f"players: {str(error)[:120]}") from None
