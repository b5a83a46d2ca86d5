"""Landing elsewhere: in a store on other machines, of which an import is no writer: ingest is, wherever it runs."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Event

from understudy.core.clock import Clock
from understudy.core.errors import Unreachable
from understudy.core.ports import FullStore, SessionFilter, SessionInfo

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MOST_PLAYERS = 8
"""Players whose sessions are asked for one by one; for more of them all sessions are read."""


class LandingElsewhere:
    """Tells what the store holds, and waits until it holds what was sent; a context manager."""

    is_ours, is_elsewhere = False, True
    refusals: Mapping[str, int] = {}

    def __init__(self, store: FullStore, *, clock: Clock, wait_s: float) -> None:
        """`wait_s`: how long to wait while nothing gets on."""
        self._store, self._clock, self._wait_s = store, clock, wait_s

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        return self._store.sessions(wanted)

    def step(self) -> None:
        """Nothing: others store."""

    def settle(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Return when these sessions (with their players' pseudonyms) are closed, or nothing got on for a while."""
        waiting, steps = dict(sent), dict[uuid.UUID, int]()
        quiet_s, pause_s = self._clock.monotonic(), _FIRST_PAUSE_S
        while waiting:
            began_s, moved = self._clock.monotonic(), False
            with suppress(Unreachable):
                for info in self._infos(game, set(waiting.values())):
                    if info.session in waiting and (info.closed or steps.get(info.session) != info.n_steps):
                        steps[info.session], moved = info.n_steps, True
                        if info.closed:
                            del waiting[info.session]
            now_s = self._clock.monotonic()
            if moved:
                quiet_s, pause_s = now_s, _FIRST_PAUSE_S
            if not waiting or now_s - quiet_s >= self._wait_s:
                return
            # A store that takes long to answer is asked less often.
            self._clock.wait(Event(), max(pause_s, now_s - began_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _infos(self, game: str, players: set[bytes]) -> Iterator[SessionInfo]:
        if len(players) > _MOST_PLAYERS:
            yield from self._store.sessions(SessionFilter(game=game))
            return
        for player in players:
            yield from self._store.sessions(SessionFilter(game=game, player=player))

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> "LandingElsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
