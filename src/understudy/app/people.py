"""A process of simulated people: they play a real env through the real client over HTTP, and let the bot play too.

Run as `python -m understudy.app.people`, with settings as JSON in the first argument. It reports a line of JSON a few
times a second and stops when its standard input closes, so that it never outlives whoever started it.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.act.vector import make_env
from understudy.app.children import python_module, report, stop_with_parent
from understudy.app.data import DataFolder
from understudy.app.ledger import LedgerLink
from understudy.client.connect import Game, connect
from understudy.client.episode import Episode
from understudy.client.http import HttpLink
from understudy.client.place import Address
from understudy.core.game import spec_from_gymnasium

_REPORT_EVERY_S = 0.25

Choose = Callable[[Any], Any]
"""An observation to the action that a person takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleSettings:
    """What one process of people does."""

    data: str
    """Where their spool and their ledger lie; not where the platform stores anything."""
    url: str
    key: str
    env_id: str
    names: list[str]
    seed: int = 0
    rate: float = 150.0
    """Steps a second and person."""
    bot_share: float = 0.5
    """The share of episodes that they leave to the bot."""
    linger_s: float = 0.25


class _Person:
    """Somebody at one env, more or less skilled; some episodes are left to the bot."""

    def __init__(self, game: Game, name: str, settings: PeopleSettings, rng: np.random.Generator) -> None:
        self._game, self._name, self._rng = game, name, rng
        self._bot_share = settings.bot_share
        self._env = make_env(settings.env_id)
        self._env.action_space.seed(int(rng.integers(1 << 31)))
        skilled = SKILLS.get(settings.env_id, self._any_action)
        # From people who mostly try things out to people who know what they do.
        skill = float(rng.uniform(0.45, 0.9))
        self._choose: Choose = lambda obs: skilled(obs) if rng.random() < skill else self._any_action(obs)
        self._begin()

    def _any_action(self, _: Any) -> Any:
        return self._env.action_space.sample()

    def _begin(self) -> None:
        self._obs, info = self._env.reset(seed=int(self._rng.integers(1 << 30)))
        self._legal = info.get("action_mask")
        self._is_bots = bool(self._rng.random() < self._bot_share)
        self._episode: Episode = self._game.episode(self._name)

    def step(self) -> None:
        episode, obs, legal = self._episode, self._obs, self._legal
        if self._is_bots:
            action = episode.act(obs, legal=legal, otherwise=self._choose)
        else:
            action = self._choose(obs)
            episode.acted(obs, action, legal=legal)
        self._obs, reward, terminated, truncated, info = self._env.step(action)
        self._legal = info.get("action_mask")
        episode.reward(float(reward))
        if terminated or truncated:
            episode.end(self._obs, legal=self._legal, truncated=not terminated)
            self._begin()


def _cartpole(obs: Any) -> int:
    """As beginners do: push to the side where the pole leans, whatever its speed."""
    return int(obs[2] > 0)


SKILLS: dict[str, Choose] = {"CartPole-v1": _cartpole}
"""What skilled people do, by game; in other games they try things out."""


def main(settings: PeopleSettings) -> None:
    """Play, report, flush."""
    stop = stop_with_parent()
    data = DataFolder(Path(settings.data))
    env = make_env(settings.env_id)
    spec = spec_from_gymnasium(env)
    link = LedgerLink(HttpLink(Address(settings.url, settings.key), spec.game), data.ledger)
    game = connect(spec=spec, link=link, spool=data.spool, consent="granted", linger_s=settings.linger_s)
    chances = np.random.default_rng(settings.seed).spawn(len(settings.names))
    people = [_Person(game, name, settings, rng) for name, rng in zip(settings.names, chances, strict=True)]
    recorded = _play(people, settings, stop, game, link)
    flushed = game.close(timeout_s=20.0)
    _report(recorded, game, link, flushed=flushed, has_ended=True)


def _play(people: list[_Person], settings: PeopleSettings, stop: threading.Event, game: Game, link: LedgerLink) -> int:
    began_s = report_s = time.monotonic()
    recorded = 0
    while not stop.is_set():
        now_s = time.monotonic()
        if now_s >= report_s:
            report_s = now_s + _REPORT_EVERY_S
            _report(recorded, game, link)
        if recorded > (now_s - began_s) * settings.rate * len(people):
            stop.wait(min(0.5 / settings.rate, 0.05))
            continue
        for person in people:
            person.step()
        recorded += len(people)
    return recorded


def _report(recorded: int, game: Game, link: LedgerLink, **more: Any) -> None:
    stats = game.stats()
    report({
        "recorded": recorded, "acked": link.acked_steps, "dropped": stats.dropped_steps, "bot": stats.bot,
        "last_error": stats.last_error, "last_bot_error": stats.last_bot_error, "refused_bots": stats.refused_bots,
        **more,
    })  # fmt: skip


def command(settings: PeopleSettings) -> list[str]:
    """The command line that runs these people in a process of their own."""
    return python_module("understudy.app.people", json.dumps(asdict(settings)))


if __name__ == "__main__":
    main(PeopleSettings(**json.loads(sys.argv[1])))
