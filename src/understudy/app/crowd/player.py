"""A process of simulated players: real envs, real recorders, and a ledger of what was acknowledged.

Run as `python -m understudy.app.crowd.player`, with settings as JSON in the first argument. It reports a line of JSON a
few times a second and stops when its standard input closes, so that it never outlives whoever started it.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from understudy.act.vector import make_env
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.crowd.pace import rounds
from understudy.app.data import DataFolder
from understudy.app.roles.children import python_module, report, stop_with_parent
from understudy.client.connect import connect, local_link
from understudy.client.episode import Recorder
from understudy.core.clock import SystemClock
from understudy.core.game import spec_from_gymnasium


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSettings:
    """What one process of players does."""

    data: str
    env_id: str
    players: list[str]
    seconds: float
    seed: int = 0
    rate: float = 0.0
    """Steps a second and player; 0 means as fast as they go."""
    linger_s: float = 1.0
    env_kwargs: dict[str, Any] = field(default_factory=dict)


class _Seat:
    """One simulated player at one env."""

    def __init__(self, env: "gymnasium.Env[Any, Any]", recorder: Recorder, seed: int) -> None:
        self._env, self._recorder, self._seed = env, recorder, seed
        env.action_space.seed(seed)
        self._begin()

    def _begin(self) -> None:
        obs, _ = self._env.reset(seed=self._seed)
        self._seed += 1_000_003
        self._recorder.reset(obs)

    def step(self) -> None:
        action = self._env.action_space.sample()
        obs, reward, terminated, truncated, _ = self._env.step(action)
        self._recorder.step(action, float(reward), obs, terminated, truncated, by="script")
        if terminated or truncated:
            self._begin()


def main(settings: PlayerSettings) -> None:
    """Play, report, flush."""
    stop = stop_with_parent()
    data = DataFolder(Path(settings.data))
    envs = [make_env(settings.env_id, settings.env_kwargs) for _ in settings.players]
    spec = spec_from_gymnasium(envs[0])
    link = LedgerLink(local_link(data.root, spec, SystemClock()), data.ledger)
    game = connect(spec=spec, link=link, spool=data.spool, consent="granted", linger_s=settings.linger_s)
    seats = [
        _Seat(env, game.recorder(player), settings.seed + 7919 * at)
        for at, (env, player) in enumerate(zip(envs, settings.players, strict=True))
    ]

    def play() -> None:
        for seat in seats:
            seat.step()

    def tell(played: int, **more: Any) -> None:
        report({"recorded": played * len(seats), "acked": link.acked_steps, **more})

    played = rounds(play, tell, stop=stop, rate=settings.rate, seconds=settings.seconds)
    game.close(timeout_s=10.0)
    latencies_ms = np.round(np.asarray(link.latencies_s) * 1000, 3).tolist()
    tell(played, done=True, dropped=game.stats().dropped_steps, latencies_ms=latencies_ms)


def command(settings: PlayerSettings) -> list[str]:
    """The command line that runs these players in a process of their own."""
    return python_module("understudy.app.crowd.player", json.dumps(asdict(settings)))


if __name__ == "__main__":
    main(PlayerSettings(**json.loads(sys.argv[1])))
