"""LocalLink: writes to a Stream in this process, with the same intake checks as over HTTP."""

import hashlib
import os
import random
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import (
    ConfigError,
    Corrupt,
    LinkFailed,
    Refused,
    StorageFailed,
    StorageFull,
)
from understudy.core.log import make_folder, write_file
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.experience.intake import Intake, read_key
from understudy.ports import Ack, LiveModels, Stream, TicketBatch, refused_ack

if TYPE_CHECKING:
    from understudy.models.registry import Registry

RETRY_AFTER_S = 1.0
_POLL_EVERY_S = 0.25
_REGISTERING = threading.RLock()
"""Held while a spec is written. A fork waits for it, or a child could never acquire it."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_REGISTERING.acquire,
        after_in_parent=_REGISTERING.release,
        after_in_child=_REGISTERING.release,
    )


class LocalLink:
    """Link over a Stream; specs and models are in the folders of the embedded platform."""

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
        """Write the spec as GAME/SCHEMA.json, unless it exists; a damaged file is kept aside."""
        path = self._specs_folder / spec.game / f"{spec.schema}.json"
        with _REGISTERING:
            raw = path.read_bytes() if path.exists() else None
            if raw is not None and hashlib.sha256(raw).hexdigest() != spec.schema:
                path.replace(path.with_suffix(f".damaged-{crc32(raw):08x}"))
                raw = None
            if raw is None:
                make_folder(path.parent)
                write_file(path, spec.to_json(), mode=0o644)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """Append the frames that the intake admits; an accepted frame is durable in the stream."""
        checked = self._intake.admit(frames, players)
        admitted = [frame for frame in checked if isinstance(frame, Frame)]
        try:
            appended = iter(self._stream.append(admitted) if admitted else ())
        except (StorageFull, StorageFailed, OSError) as error:
            # Nothing was acknowledged; the spool keeps the frames until the disk has space again.
            ack = Ack(False, retry_after_s=RETRY_AFTER_S, error=str(error))
            appended = iter([ack] * len(admitted))
        return [
            refused_ack(result) if isinstance(result, Refused) else next(appended)
            for result in checked
        ]

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        """Return live models newer than `after`, by polling; None if there are none in time."""
        from understudy.models.catalogue import live_models

        while True:
            registry = self._models()
            catalogue = None if registry is None else registry.catalogue(self._intake.game)
            if catalogue is not None and catalogue.number > after:
                champion, canary = catalogue.pointers(schema)
                return live_models(catalogue, champion, canary, trust=self._trust)
            if wait_s <= 0 or self._closing.is_set():
                return None
            self._clock.wait(self._closing, min(_POLL_EVERY_S, wait_s))
            wait_s -= _POLL_EVERY_S

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        """Draw the bots of the next `n` episodes, as a gateway does."""
        from understudy.models.trial import draw_tickets, trial_of

        registry = self._models()
        catalogue = None if registry is None else registry.catalogue(self._intake.game)
        trial = None if catalogue is None else trial_of(catalogue, *catalogue.pointers(schema))
        return draw_tickets(
            trial,
            self._intake.seal,
            n,
            now_s=self._clock.now(),
            rng=random.SystemRandom(),
            with_control=with_control,
        )

    def policy(self, model_no: int) -> bytes:
        """Return the bytes of a model's policy, not checked."""
        registry = self._models()
        try:
            if registry is None:
                raise KeyError(model_no)
            return registry.policy_bytes(registry.catalogue(self._intake.game).models[model_no])
        except (KeyError, Corrupt) as error:
            raise LinkFailed(
                "not_found", f"model {model_no} of {self._intake.game} is missing: {error}"
            ) from None

    def _models(self) -> "Registry | None":
        """Return the registry beside the specs; None until there is a key that signs models."""
        from understudy.core.signed import Signer, public_key_text
        from understudy.models.objects import FolderObjects
        from understudy.models.registry import Registry

        if self._registry is None:
            models = self._specs_folder.parent
            # Not models/trust: a user who may write only the models must not add a key.
            path = models.parent / "signing.key"
            if not path.exists():
                return None
            try:
                signer = Signer(read_key(path))
            except (OSError, ConfigError) as error:
                raise LinkFailed(
                    "no_signing_key", f"models cannot be verified without {path}: {error}"
                ) from None
            self._trust = (public_key_text(signer.public),)
            trusted = {signer.key_id: signer.public}
            self._registry = Registry(FolderObjects(models), trusted=trusted)
        return self._registry

    def close(self) -> None:
        self._closing.set()
        self._stream.close()
