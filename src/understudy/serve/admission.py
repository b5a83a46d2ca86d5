"""Admission: which frames of a parcel may enter the stream under a key, and whose they are from then on."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.core import tensors
from understudy.core.chunk import MAX_STEPS
from understudy.core.clock import Clock
from understudy.core.door import Door
from understudy.core.errors import Refused
from understudy.core.frame import Frame, FrameKind
from understudy.core.names import GameName, PlayerName
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


def _owned(frame: Frame, key: Key, game: str) -> Admitted | Refused:
    """The frame when its chunk is of the key's game and of a kind the key may write."""
    if frame.kind is not FrameKind.DATA:
        return Admitted(frame, 0)
    try:
        metadata = tensors.parse_header(frame.body, total_bytes=len(frame.body)).metadata
    except Refused as refused:
        return refused
    if metadata.get("game") != game:
        return Refused("wrong_game", f"a chunk of {metadata.get('game', '')[:63]!r} was sent to {game}")
    if metadata.get("kind") != "player" and not key.may("work"):
        return Refused("wrong_scope", f"chunks of kind {metadata.get('kind', '')[:20]!r} need a key with scope work")
    said = metadata.get("n_steps", "")
    return Admitted(frame, min(int(said), MAX_STEPS) if said.isascii() and said.isdigit() and len(said) < 7 else 0)
