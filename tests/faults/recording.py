"""Recording without processes: simulated players of a small game, at any amount and speed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np

from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, Game, connect, local_link
from understudy.core.clock import SystemClock
from understudy.experience.game import GameSpec, game_spec
from understudy.ports import Link
from understudy.simulation.ledger import LedgerLink
from understudy.simulation.people import Tester

GAME = "cart"


def cart() -> GameSpec:
    """A small game: four floats, two actions."""
    return game_spec(GAME, obs=4, actions=2)


class Cart(gymnasium.Env[Any, Any]):
    """The game as an env without rules; each observation counts one more than the one before it."""

    def __init__(
        self, rng: np.random.Generator, *, end_share: float = 0.1, canary: bytes = b""
    ) -> None:
        """The `canary` is seen now and then, as bytes of an observation."""
        self.action_space = gymnasium.spaces.Discrete(2)
        self._rng = rng
        self._end_share = end_share
        self._canary = canary
        self._count = 0

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self._obs(), {}

    def step(self, _: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        has_ended = bool(self._rng.random() < self._end_share)
        return self._obs(), float(self._rng.normal()), has_ended, False, {}

    def _obs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        obs = self._rng.normal(size=4).astype(np.float32)
        obs[0] = self._count
        self._count += 1
        return (
            np.frombuffer(self._canary, np.float32)
            if self._canary and self._count % 5 == 1
            else obs
        )


@contextmanager
def playing(
    data: DataFolder,
    players: Sequence[str],
    rng: np.random.Generator,
    *,
    wrap: Callable[[Link], Link] | None = None,
    canary: bytes = b"",
) -> Iterator["Table"]:
    """A game with one recorder per player, a ledger, and no thread: `Table.play` decides when
    chunks are cut.

    The first player sees the `canary`.
    """
    link: Link = LedgerLink(local_link(data.root, cart(), SystemClock()), data.ledger)
    config = ClientConfig(link=wrap(link) if wrap else link, background=False, spool=data.spool)
    with connect(cart(), consent="granted", config=config) as game:
        yield Table(game, players, rng, canary)


class Table:
    """Simulated players whose steps are sent when a test requests it."""

    def __init__(
        self, game: Game, players: Sequence[str], rng: np.random.Generator, canary: bytes = b""
    ) -> None:
        self.game = game
        self._people = [
            Tester(
                Cart(rng, canary=b"" if at else canary),
                game.recorder(player),
                int(rng.integers(1 << 30)),
            )
            for at, player in enumerate(players)
        ]

    def play(self, *, steps: int = 8) -> None:
        """Each player makes some steps, which leave as one chunk each."""
        for person in self._people:
            for _ in range(steps):
                person.step()
        self.game.flush(timeout_s=0.0)
        while self.game.pump() == 0:
            pass
