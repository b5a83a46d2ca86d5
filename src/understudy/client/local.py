"""LocalLink: the way into any Stream of this process, through the same door as over the wire."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from understudy.core.door import Door
from understudy.core.errors import Refused, StorageFailed, StorageFull
from understudy.core.frame import Frame
from understudy.core.game import GameSpec
from understudy.core.log import make_folder, write_file
from understudy.core.names import PlayerName
from understudy.core.ports import Ack, Outcome, Stream

RETRY_AFTER_S = 1.0
_REGISTERING = Lock()


class LocalLink:
    """Link over a Stream; specs go where the embedded platform looks for them."""

    def __init__(self, stream: Stream, *, door: Door, specs_folder: Path) -> None:
        self._stream, self._door, self._specs_folder = stream, door, specs_folder

    def register(self, spec: GameSpec) -> None:
        """Write the spec as GAME/SCHEMA.json, unless it is there."""
        path = self._specs_folder / spec.game / f"{spec.schema}.json"
        with _REGISTERING:
            if not path.exists():
                make_folder(path.parent)
                write_file(path, spec.to_json(), mode=0o644)

    def send(self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]) -> Sequence[Ack]:
        """Append what the door lets in; accepted means durable in the stream."""
        judged = self._door.admit(frames, players)
        admitted = [frame for frame in judged if isinstance(frame, Frame)]
        appended = iter(self._append(admitted) if admitted else ())
        return [Ack(False, refused=str(one)) if isinstance(one, Refused) else next(appended) for one in judged]

    def _append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        try:
            outcomes = self._stream.append(frames)
        except (StorageFull, StorageFailed, OSError) as error:
            # Nothing was promised; the spool keeps the frames until the disk takes them again.
            return [Ack(False, retry_after_s=RETRY_AFTER_S, error=str(error))] * len(frames)
        return [_ack(outcome) for outcome in outcomes]

    def close(self) -> None:
        self._stream.close()


def _ack(outcome: Outcome) -> Ack:
    if outcome.durable:
        return Ack(True)
    if outcome.retry_after_s > 0:
        return Ack(False, retry_after_s=outcome.retry_after_s, error=outcome.error or "")
    # Without a time to come back, trying again would fail for ever.
    return Ack(False, refused=outcome.error or "not_taken: the stream did not say why")
