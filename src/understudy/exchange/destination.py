"""The destination of an import: a deployment's store, its registered games, and its writer."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from understudy.backends.addresses import open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment, spec_registry
from understudy.backends.local import open_view
from understudy.backends.specs import RegistrySpecs
from understudy.core.clock import Clock
from understudy.core.errors import Locked, Unreachable
from understudy.core.log import is_locked
from understudy.core.names import GameName
from understudy.experience.game import GameSpec
from understudy.models.registry import Registry
from understudy.platform.config import Config
from understudy.platform.ingest import IngestRole, open_own_ingest
from understudy.platform.requests import send_request
from understudy.ports import FullStore, SessionFilter, SessionInfo

_ASK_S = 600.0
_TRIES = 3
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MOST_PLAYERS = 8
"""Up to this many players are queried one by one; for more, all sessions of the game are read."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A data folder, and the config that may place parts of it on other machines."""

    data: DataFolder
    config: Config = field(default_factory=Config)
    wait_s: float = 60.0
    """How long to wait for the ingest of a remote store while it stores nothing new."""

    def specs(self, game: GameName) -> Sequence[GameSpec]:
        """Return a game's registered specs."""
        if self.config.models.url:
            return self._registry().specs(game)
        return spec_registry(self.data).specs(game)

    def open_target(self, clock: Clock) -> "ImportTarget":
        """Return the target, which stores frames or waits until another process has stored them."""
        if not self.config.store.url:
            return LocalTarget(self.data, self.config)
        store = open_store(
            self.config.store.url, specs=RegistrySpecs(self._registry()), clock=clock
        )
        return RemoteTarget(store, clock=clock, wait_s=self.wait_s)

    def _registry(self) -> Registry:
        return open_deployment(self.data, models=self.config.models.url).registry

    def next_step(self) -> str:
        """Return advice for the case that steps are in the stream, but not stored."""
        root = self.data.root
        if is_locked(root / "ingest.lock"):
            return (
                "ingest runs here and has not stored them yet, or rejected them: check with "
                f"understudy status --data {root}, "
                f"understudy data quarantine list --data {root}"
            )
        return (
            "no ingest runs in this folder; unless one runs on another machine, start it with: "
            f"understudy ingest --data {root}; then repeat the import, which reports when all "
            "steps are stored"
        )


class LocalTarget:
    """The data folder's own store, written by ingest in this process or in another one."""

    is_remote = False
    """Whether the store is on other machines; a local one is complete after wait_until_stored."""

    def __init__(self, data: DataFolder, config: Config) -> None:
        self._data = data
        self._config = config
        self._role: IngestRole | None = None
        self._open()

    def _open(self) -> None:
        if self._role is None and not self._data.has_writer():
            with suppress(Locked):
                self._role = open_own_ingest(self._data, self._config)

    @property
    def ingests_here(self) -> bool:
        """Whether ingest runs in this process; otherwise it runs in another one."""
        return self._role is not None

    @property
    def refusals(self) -> Mapping[str, int]:
        """Number of frames that this process rejected, by reason."""
        return {} if self._role is None else dict(self._role.service.stats.refusals)

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        with open_view(self._data.store) as view:
            yield from view.sessions(session_filter)

    def step(self) -> None:
        """Store some of the waiting frames, if ingest runs in this process."""
        if self._role is not None:
            self._role.step()

    def wait_until_stored(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Wait until all frames in the stream are stored; Locked if no process can store them."""
        for _ in range(_TRIES):
            if self._role is not None:
                self._role.service.drain()
                return
            try:
                send_request(self._data.requests, "barrier", timeout_s=_ASK_S)
                return
            except Locked:
                if self._data.has_writer():
                    raise
                time.sleep(0.2)
                self._open()
        raise Locked("other processes keep opening and closing the store; try again")

    def close(self) -> None:
        if self._role is not None:
            self._role.close()
            self._role = None


class RemoteTarget:
    """A store on other machines, which only ingest writes; an import waits for ingest."""

    ingests_here = False
    is_remote = True
    refusals: Mapping[str, int] = {}

    def __init__(self, store: FullStore, *, clock: Clock, wait_s: float) -> None:
        """`wait_s`: how long to wait while nothing new is stored."""
        self._store = store
        self._clock = clock
        self._wait_s = wait_s

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        return self._store.sessions(session_filter)

    def step(self) -> None:
        """Do nothing: ingest runs in another process."""

    def wait_until_stored(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Wait until the sessions in `sent` are closed, or nothing new was stored for `wait_s`.

        `sent` has the pseudonym of each session's player.
        """
        waiting = dict(sent)
        steps = dict[uuid.UUID, int]()
        quiet_s = self._clock.monotonic()
        pause_s = _FIRST_PAUSE_S
        while waiting:
            began_s = self._clock.monotonic()
            moved = False
            players = set(waiting.values())
            filters = [SessionFilter(game=game, player=player) for player in players]
            with suppress(Unreachable):
                for session_filter in (
                    filters if len(players) <= _MOST_PLAYERS else [SessionFilter(game=game)]
                ):
                    for info in self._store.sessions(session_filter):
                        if info.session in waiting and (
                            info.closed or steps.get(info.session) != info.n_steps
                        ):
                            steps[info.session] = info.n_steps
                            moved = True
                            if info.closed:
                                del waiting[info.session]
            now_s = self._clock.monotonic()
            if moved:
                quiet_s = now_s
                pause_s = _FIRST_PAUSE_S
            if not waiting or now_s - quiet_s >= self._wait_s:
                return
            # A slow store is polled less often.
            self._clock.wait(Event(), max(pause_s, now_s - began_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        self._store.close()


ImportTarget = LocalTarget | RemoteTarget
"""Stores the frames that an import sends, and reports which sessions are stored."""
