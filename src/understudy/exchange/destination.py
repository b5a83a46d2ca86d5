"""Where an import goes: the store and the registered games that a deployment's config names, and
who stores there."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from understudy.backends.addresses import open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.backends.specs import RegistrySpecs
from understudy.core.clock import Clock
from understudy.core.errors import Locked, Unreachable
from understudy.core.log import is_locked
from understudy.core.names import GameName
from understudy.experience.game import GameSpec, spec_from_json
from understudy.models.registry import Registry
from understudy.platform.config import Config
from understudy.platform.ingest import IngestRole, open_own_ingest
from understudy.platform.requests import ask
from understudy.ports import FullStore, SessionFilter, SessionInfo
from understudy.stores.view import StoreView

_ASK_S = 600.0
_TRIES = 3
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MOST_PLAYERS = 8
"""Players whose sessions are asked for one by one; for more of them all sessions are read."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A data folder, and what the config puts elsewhere."""

    data: DataFolder
    config: Config = field(default_factory=Config)
    wait_s: float = 60.0
    """How long to wait for the ingest of a store elsewhere while nothing gets on."""

    def specs(self, game: GameName) -> Sequence[GameSpec]:
        """A game's specs that are registered."""
        if self.config.models.url:
            return self._registry().specs(game)
        return [
            spec_from_json(path.read_bytes())
            for path in sorted((self.data.games / game).glob("*.json"))
        ]

    def landing(self, clock: Clock) -> "Landing":
        """What stores, or waits until it is stored."""
        if not self.config.store.url:
            return LandingHere(self.data, self.config)
        store = open_store(
            self.config.store.url, specs=RegistrySpecs(self._registry()), clock=clock
        )
        return LandingElsewhere(store, clock=clock, wait_s=self.wait_s)

    def _registry(self) -> Registry:
        return open_deployment(self.data, models=self.config.models.url).registry

    def next_step(self) -> str:
        """What to do about steps that are in the stream and not stored."""
        root = self.data.root
        if is_locked(root / "ingest.lock"):
            return (
                "ingest runs here and has not stored them yet, or refused them: understudy status "
                f"--data {root}, "
                f"understudy data quarantine list --data {root}"
            )
        return (
            "no ingest runs in this folder; unless one runs on another machine, start it with: "
            "understudy ingest "
            f"--data {root}; then give the same import again, which says when all is stored"
        )


class LandingHere:
    """The data folder's own store, written by ingest in this process, or by the one that another
    process runs."""

    is_elsewhere = False
    """Whether the store lies on other machines; in one of our own, all that was sent is seen
    once this has settled."""

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
    def is_ours(self) -> bool:
        """Whether this process stores; otherwise another one does."""
        return self._role is not None

    @property
    def refusals(self) -> Mapping[str, int]:
        """Frames that were refused by this process, by reason."""
        return {} if self._role is None else dict(self._role.service.stats.refusals)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        with StoreView(self._data.store) as view:
            yield from view.sessions(wanted)

    def step(self) -> None:
        """Store some of what waits, where that is up to us."""
        if self._role is not None:
            self._role.step()

    def settle(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Return when everything that was in the stream is stored, of whichever game; Locked if
        no process does it."""
        for _ in range(_TRIES):
            if self._role is not None:
                self._role.service.drain()
                return
            try:
                ask(self._data.requests, "barrier", timeout_s=_ASK_S)
                return
            except Locked:
                if self._data.has_writer():
                    raise
                time.sleep(0.2)
                self._open()
        raise Locked("the store is opened and closed by others all the time; try again")

    def close(self) -> None:
        if self._role is not None:
            self._role.close()
            self._role = None


class LandingElsewhere:
    """A store on other machines, which ingest alone writes, wherever it runs; an import waits
    for that."""

    is_ours = False
    is_elsewhere = True
    refusals: Mapping[str, int] = {}

    def __init__(self, store: FullStore, *, clock: Clock, wait_s: float) -> None:
        """`wait_s`: how long to wait while nothing gets on."""
        self._store = store
        self._clock = clock
        self._wait_s = wait_s

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        return self._store.sessions(wanted)

    def step(self) -> None:
        """Nothing: others store."""

    def settle(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Return when these sessions (with their players' pseudonyms) are closed, or nothing got
        on for a while."""
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
                for wanted in (
                    filters if len(players) <= _MOST_PLAYERS else [SessionFilter(game=game)]
                ):
                    for info in self._store.sessions(wanted):
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
            # A store that takes long to answer is asked less often.
            self._clock.wait(Event(), max(pause_s, now_s - began_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        self._store.close()


Landing = LandingHere | LandingElsewhere
"""How what an import sends becomes stored, and how it sees that."""
