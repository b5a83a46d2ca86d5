"""Recording without processes: real clients and a ledger, as much and as fast as a test asks for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from understudy.app.crowd.ledger import LedgerLink
from understudy.app.data import DataFolder
from understudy.client.connect import ClientConfig, Game, connect, local_link
from understudy.core.clock import SystemClock
from understudy.core.game import GameSpec, game_spec
from understudy.core.ports import Link

GAME = "cart"


def cart() -> GameSpec:
    """A small game: four floats, two actions."""
    return game_spec(GAME, obs=4, actions=2)


@contextmanager
def playing(
    data: DataFolder,
    players: Sequence[str],
    rng: np.random.Generator,
    *,
    wrap: Callable[[Link], Link] | None = None,
    canary: bytes = b"",
) -> Iterator["Table"]:
    """A game with one recorder per player, a ledger, and no thread: `Table.play` decides when chunks are cut.

    The first player sees the `canary`, as bytes of an observation, now and then.
    """
    link: Link = LedgerLink(local_link(data.root, cart(), SystemClock()), data.ledger)
    config = ClientConfig(background=False, spool=data.spool)
    with connect(spec=cart(), link=wrap(link) if wrap else link, consent="granted", config=config) as game:
        yield Table(game, players, rng, canary)


class Table:
    """Players at their recorders; each observation counts one more than the one before it."""

    def __init__(self, game: Game, players: Sequence[str], rng: np.random.Generator, canary: bytes = b"") -> None:
        self.game, self._rng, self._canary = game, rng, canary
        self._recorders = [game.recorder(player) for player in players]
        self._counts = [0] * len(players)
        for at, recorder in enumerate(self._recorders):
            recorder.reset(self._obs(at))

    def play(self, *, steps: int = 8) -> None:
        """Everybody makes some steps, which leave as one chunk each."""
        for at in range(len(self._recorders)):
            self._play(at, steps)
        self.game.flush(timeout_s=0.0)
        while self.game.pump() == 0:
            pass

    def _play(self, at: int, steps: int) -> None:
        recorder = self._recorders[at]
        for _ in range(steps):
            ends = bool(self._rng.random() < 0.1)
            action, reward = int(self._rng.integers(2)), float(self._rng.normal())
            recorder.step(action, reward, self._obs(at), ends, False, by="script")
            if ends:
                recorder.reset(self._obs(at))

    def _obs(self, at: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if at == 0 and self._canary and self._counts[at] % 5 == 0:
            self._counts[at] += 1
            return np.frombuffer(self._canary, np.float32)
        obs = self._rng.normal(size=4).astype(np.float32)
        obs[0], self._counts[at] = self._counts[at], self._counts[at] + 1
        return obs
