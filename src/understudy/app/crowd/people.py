"""A process of simulated people: they play through the real client over HTTP, with the bot or against it.

Run as `python -m understudy.app.crowd.people`, with settings as JSON in the first argument. It reports a line of JSON a
few times a second and stops when its standard input closes, so that it never outlives whoever started it.
"""

import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.act.vector import make_env
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.crowd.match import Match
from understudy.app.crowd.solo import Solo
from understudy.app.data import DataFolder
from understudy.app.roles.children import python_module, report, stop_with_parent
from understudy.client.connect import Game, connect
from understudy.client.http import HttpLink
from understudy.client.place import Address
from understudy.core.game import spec_from_gymnasium

_REPORT_EVERY_S = 0.1


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
    linger_s: float = 0.25


class Person(Protocol):
    """Somebody who plays; `decides` decisions are recorded in each step."""

    decides: int
    points: Counter[str]

    def step(self) -> None: ...
    def view(self) -> dict[str, Any]: ...


def main(settings: PeopleSettings) -> None:
    """Play, report, flush."""
    stop = stop_with_parent()
    data = DataFolder(Path(settings.data))
    spec = spec_from_gymnasium(make_env(settings.env_id))
    link = LedgerLink(HttpLink(Address(settings.url, settings.key), spec.game), data.ledger)
    game = connect(spec=spec, link=link, spool=data.spool, consent="granted", linger_s=settings.linger_s)
    chances = np.random.default_rng(settings.seed).spawn(len(settings.names))
    one = Match if settings.env_id == "rally" else Solo
    people: list[Person] = [
        one(game, name, settings.env_id, rng) for name, rng in zip(settings.names, chances, strict=True)
    ]
    recorded = _play(people, settings, stop, game, link)
    flushed = game.close(timeout_s=20.0)
    _report(recorded, people, game, link, flushed=flushed, has_ended=True)


def _play(people: list[Person], settings: PeopleSettings, stop: threading.Event, game: Game, link: LedgerLink) -> int:
    began_s = report_s = time.monotonic()
    recorded = 0
    while not stop.is_set():
        now_s = time.monotonic()
        if now_s >= report_s:
            report_s = now_s + _REPORT_EVERY_S
            _report(recorded, people, game, link)
        if recorded > (now_s - began_s) * settings.rate * sum(person.decides for person in people):
            stop.wait(min(0.5 / settings.rate, 0.05))
            continue
        for person in people:
            person.step()
        recorded += sum(person.decides for person in people)
    return recorded


def _report(recorded: int, people: list[Person], game: Game, link: LedgerLink, **more: Any) -> None:
    stats, points = game.stats(), sum((person.points for person in people), Counter[str]())
    report({
        "recorded": recorded, "acked": link.acked_steps, "dropped": stats.dropped_steps, "bot": stats.bot,
        "last_error": stats.last_error, "last_bot_error": stats.last_bot_error, "refused_bots": stats.refused_bots,
        "points": points, **people[0].view(), **more,
    })  # fmt: skip


def command(settings: PeopleSettings) -> list[str]:
    """The command line that runs these people in a process of their own."""
    return python_module("understudy.app.crowd.people", json.dumps(asdict(settings)))


if __name__ == "__main__":
    main(PeopleSettings(**json.loads(sys.argv[1])))
