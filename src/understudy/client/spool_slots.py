"""The file `sessions` of a spool folder: a slot for each session, written in place.

Each slot has a checksum and says how many slots the file had, so that a damaged or cut file is
noticed: its sessions are then found by their frames.
"""

import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from understudy.core.errors import Corrupt, InvalidName
from understudy.core.names import PlayerName, player_name

_SLOT = struct.Struct("<16sQQQQH")
SLOT_BYTES = 512
"""A divisor of the page size, so that a killed process leaves whole slots."""
_COUNT = struct.Struct("<I")
"""Before the checksum of a slot: how many slots the file had at least when it was written."""
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Slot:
    """One session in a folder's file `sessions`."""

    session: uuid.UUID
    player: PlayerName
    done_below: int
    done_steps: int
    next_no: int
    n_steps: int

    def encode(self, n_slots: int) -> bytes:
        """Return the slot for a file that has this many slots."""
        player = self.player.encode()
        head = _SLOT.pack(
            self.session.bytes,
            self.done_below,
            self.done_steps,
            self.next_no,
            self.n_steps,
            len(player),
        )
        return seal(head + player, n_slots)


def seal(raw: bytes, n_slots: int) -> bytes:
    """Return a slot with these contents, free if there are none, for a file of so many slots."""
    raw = raw.ljust(SLOT_BYTES - _COUNT.size - _CRC.size, b"\0") + _COUNT.pack(n_slots)
    return raw + _CRC.pack(crc32(raw))


def read_slots(folder: Path) -> tuple[list[Slot | None], bool]:
    """Return a folder's slots, None for each free or damaged one, and whether any is damaged.

    A file that is missing or shorter than its slots say is damaged, too.
    """
    try:
        raw = (folder / "sessions").read_bytes()
    except OSError:
        return [], True
    slots: list[Slot | None] = []
    n_slots = 1
    is_damaged = False
    for start in range(0, len(raw), SLOT_BYTES):
        slot = None
        try:
            slot, least = _read_slot(raw[start : start + SLOT_BYTES])
            n_slots = max(n_slots, least)
        except Corrupt:
            is_damaged = True
        slots.append(slot)
    return slots, is_damaged or len(slots) < n_slots


def _read_slot(raw: bytes) -> tuple[Slot | None, int]:
    """Return the slot, None if it is free, and how many slots the file has at least."""
    if len(raw) < SLOT_BYTES or _CRC.pack(crc32(raw[: -_CRC.size])) != raw[-_CRC.size :]:
        raise Corrupt("a slot has a wrong checksum")
    session, done_below, done_steps, next_no, n_steps, length = _SLOT.unpack_from(raw)
    (least,) = _COUNT.unpack_from(raw, SLOT_BYTES - _COUNT.size - _CRC.size)
    if not length:
        return None, least
    try:
        player = player_name(raw[_SLOT.size : _SLOT.size + length].decode())
    except (InvalidName, UnicodeDecodeError):
        raise Corrupt("a slot has an invalid player") from None
    slot = Slot(uuid.UUID(bytes=session), player, done_below, done_steps, next_no, n_steps)
    return slot, least
