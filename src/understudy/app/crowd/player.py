"""A process of simulated players: real envs, real recorders, and a ledger of what was acknowledged.

Run as `python -m understudy.app.crowd.player`, with settings as JSON in the first argument. It reports a line of JSON a
few times a second and stops when its standard input closes, so that it never outlives whoever started it.
"""

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from understudy.act.vector import make_env
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.data import DataFolder
from understudy.app.roles.children import python_module, report, stop_with_parent
from understudy.client.connect import connect, local_link
from understudy.client.recorder import Recorder
from understudy.core.clock import SystemClock
from understudy.core.game import spec_from_gymnasium

_REPORT_EVERY_S = 0.25


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
    recorded = _play(seats, settings, stop, link)
    flushed = game.close(timeout_s=10.0)
    stats = game.stats()
    _report(recorded, link, flushed=flushed, dropped=stats.dropped_steps, done=True)


def _play(seats: list[_Seat], settings: PlayerSettings, stop: threading.Event, link: LedgerLink) -> int:
    began_s = report_s = time.monotonic()
    recorded = 0
    while not stop.is_set():
        now_s = time.monotonic()
        if now_s - began_s >= settings.seconds:
            break
        if now_s >= report_s:
            report_s = now_s + _REPORT_EVERY_S
            _report(recorded, link)
        if settings.rate and recorded > (now_s - began_s) * settings.rate * len(seats):
            stop.wait(min(0.5 / settings.rate, 0.05))
            continue
        for seat in seats:
            seat.step()
        recorded += len(seats)
    return recorded


def _report(recorded: int, link: LedgerLink, **more: Any) -> None:
    fields = {"recorded": recorded, "acked": link.acked_steps, **more}
    if more:
        fields["latencies_ms"] = np.round(np.asarray(link.latencies_s) * 1000, 3).tolist()
    report(fields)


def command(settings: PlayerSettings) -> list[str]:
    """The command line that runs these players in a process of their own."""
    return python_module("understudy.app.crowd.player", json.dumps(asdict(settings)))


if __name__ == "__main__":
    main(PlayerSettings(**json.loads(sys.argv[1])))
