"""LocalLink: the way into any Stream of this process, through the same door as over the wire."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Corrupt, LinkFailed, Refused, StorageFailed, StorageFull
from understudy.core.log import make_folder, write_file
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.experience.intake import Intake
from understudy.ports import Ack, LiveModels, Stream

if TYPE_CHECKING:
    from understudy.models.registry import Registry

RETRY_AFTER_S = 1.0
_LOOK_EVERY_S = 0.25
_REGISTERING = Lock()


class LocalLink:
    """Link over a Stream; specs go where the embedded platform looks for them, bots come from
    the models beside."""

    recording_rate = 1.0

    def __init__(
        self, stream: Stream, *, intake: Intake, specs_folder: Path, clock: Clock | None = None
    ) -> None:
        self._stream = stream
        self._intake = intake
        self._specs_folder = specs_folder
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        self._registry: Registry | None = None
        self._trust: tuple[str, ...] = ()

    def register(self, spec: GameSpec) -> None:
        """Write the spec as GAME/SCHEMA.json, unless it is there."""
        path = self._specs_folder / spec.game / f"{spec.schema}.json"
        with _REGISTERING:
            if not path.exists():
                make_folder(path.parent)
                write_file(path, spec.to_json(), mode=0o644)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """Append what the door lets in; accepted means durable in the stream."""
        judged = self._intake.admit(frames, players)
        admitted = [frame for frame in judged if isinstance(frame, Frame)]
        try:
            appended = iter(self._stream.append(admitted) if admitted else ())
        except (StorageFull, StorageFailed, OSError) as error:
            # Nothing was promised; the spool keeps the frames until the disk takes them again.
            appended = iter(
                [Ack(False, retry_after_s=RETRY_AFTER_S, error=str(error))] * len(admitted)
            )
        return [
            Ack(False, refused=str(one)) if isinstance(one, Refused) else next(appended)
            for one in judged
        ]

    def bot(self, after: int, *, wait_s: float) -> LiveModels | None:
        """Who plays, by looking now and then."""
        from understudy.models.catalogue import live_models

        while True:
            registry = self._models()
            catalogue = None if registry is None else registry.catalogue(self._intake.game)
            if catalogue is not None and catalogue.number > after:
                champion, canary = (
                    catalogue.aliases.get(alias) for alias in ("champion", "canary")
                )
                return live_models(catalogue, champion, canary, trust=self._trust)
            if wait_s <= 0 or self._closing.is_set():
                return None
            self._clock.wait(self._closing, min(_LOOK_EVERY_S, wait_s))
            wait_s -= _LOOK_EVERY_S

    def policy(self, model_no: int) -> bytes:
        """A model's policy as it lies in the registry, not checked."""
        registry = self._models()
        try:
            if registry is None:
                raise KeyError(model_no)
            return registry.policy_bytes(registry.catalogue(self._intake.game).models[model_no])
        except (KeyError, Corrupt) as error:
            raise LinkFailed(
                "not_found", f"model {model_no} of {self._door.game}: {error}"
            ) from None

    def _models(self) -> "Registry | None":
        """The registry beside the specs; None until somebody who signs models has left a key
        there."""
        from understudy.core.signed import trusted_keys
        from understudy.models.objects import FolderObjects
        from understudy.models.registry import Registry, read_trust

        objects = FolderObjects(self._specs_folder.parent)
        trust = read_trust(objects)
        if trust != self._trust:
            self._trust = trust
            self._registry = Registry(objects, trusted=trusted_keys(*trust))
        return self._registry

    def close(self) -> None:
        self._closing.set()
        self._stream.close()
