"""Admission: which frames of a parcel may enter the stream under a key, and whose they are from then on."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from understudy.core.chunk import MAX_STEPS
from understudy.core.clock import Clock
from understudy.core.door import Door
from understudy.core.errors import Refused
from understudy.core.frame import Frame, FrameKind
from understudy.core.names import GameName, PlayerName
from understudy.core.tensors import MAX_HEADER_BYTES
from understudy.serve.keys import Key


@dataclass(frozen=True, slots=True)
class Admitted:
    """A frame with its player's pseudonym and the time."""

    frame: Frame
    n_steps: int
    """How many steps it says it brings, for the quota; ingest checks whether that is true."""


class Admission:
    """The door of every game of a deployment; what a key may not write never enters the stream."""

    def __init__(self, deployment_key: bytes, clock: Clock) -> None:
        self._deployment_key, self._clock = deployment_key, clock
        self._doors: dict[str, Door] = {}

    def admit(
        self, key: Key, game: str, frames: Sequence[Frame | Refused], players: Mapping[uuid.UUID, PlayerName]
    ) -> list[Admitted | Refused]:
        """For each frame the stamped one, or why it is refused for good; the game is a registered one."""
        door = self._doors.get(game)
        if door is None:
            door = self._doors[game] = Door(self._deployment_key, GameName(game), self._clock)
        judged = iter(door.admit([one for one in frames if isinstance(one, Frame)], players))
        stamped = [next(judged) if isinstance(one, Frame) else one for one in frames]
        return [_owned(one, key, game) if isinstance(one, Frame) else one for one in stamped]


class _Facts(msgspec.Struct):
    """What of a chunk's metadata decides at the door."""

    game: str
    kind: str
    n_steps: str


class _Header(msgspec.Struct):
    metadata: _Facts = msgspec.field(name="__metadata__")


_read = msgspec.json.Decoder(_Header).decode


def _owned(frame: Frame, key: Key, game: str) -> Admitted | Refused:
    """The frame when its chunk is of the key's game and of a kind the key may write."""
    if frame.kind is not FrameKind.DATA:
        return Admitted(frame, 0)
    length = int.from_bytes(frame.body[:8], "little")
    if not 8 <= 8 + length <= min(len(frame.body), 8 + MAX_HEADER_BYTES):
        return Refused("bad_tensors", f"a header of {length} bytes in a body of {len(frame.body)}")
    try:
        # Only these facts are read here, at a tenth of the cost of all of them: ingest refuses whatever is not exact.
        facts = _read(memoryview(frame.body)[8 : 8 + length]).metadata
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Refused("bad_tensors", f"the header is no chunk's: {str(error)[:100]}")
    if facts.game != game:
        return Refused("wrong_game", f"a chunk of {facts.game[:63]!r} was sent to {game}")
    if facts.kind != "player" and not key.may("work"):
        return Refused("wrong_scope", f"chunks of kind {facts.kind[:20]!r} need a key with scope work")
    said = facts.n_steps
    return Admitted(frame, min(int(said), MAX_STEPS) if said.isascii() and said.isdigit() and len(said) < 7 else 0)
