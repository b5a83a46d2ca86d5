"""A process of simulated people: they play through the real client over HTTP, with the bot or against it.

Run as `python -m understudy.app.crowd.people`, with settings as JSON in the first line of its standard input. It
reports a line of JSON a few times a second and stops when its standard input closes, so that it never outlives whoever
started it.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.act.vector import make_env
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.crowd.match import Match
from understudy.app.crowd.pace import rounds
from understudy.app.crowd.solo import Solo
from understudy.app.data import DataFolder
from understudy.app.roles.children import Child, python_module, report, stop_with_parent
from understudy.client.connect import Address, connect
from understudy.client.http import HttpLink
from understudy.core.game import spec_from_gymnasium
from understudy.games.rally import GAME_ID as RALLY


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleSettings:
    """What one process of people does."""

    data: str
    """Where their spool and their ledger lie; not where the platform stores anything."""
    url: str
    key: str
    env_id: str
    names: list[str]
    first_number: int = 0
    """Of the first of them, where skills and seats go round."""
    seed: int = 0
    rate: float = 150.0
    """Decisions a second and person."""
    linger_s: float = 0.25


class Person(Protocol):
    """Somebody who plays; `points` are those that each bot won of those it played."""

    rows_per_step: int
    points: dict[str, list[int]]

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
    people: list[Person] = [
        Match(game, name, settings.first_number + at, rng) if settings.env_id == RALLY
        else Solo(game, name, settings.env_id, rng)
        for at, (name, rng) in enumerate(zip(settings.names, chances, strict=True))
    ]  # fmt: skip
    rows = sum(person.rows_per_step for person in people)

    def play() -> None:
        for person in people:
            person.step()

    def tell(played: int, **more: Any) -> None:
        stats = game.stats()
        report({
            "recorded": played * rows, "acked": link.acked_steps, "dropped": stats.dropped_steps, "bot": stats.bot,
            "last_error": stats.last_error, "last_bot_error": stats.last_bot_error, "refused_bots": stats.refused_bots,
            "points": [person.points for person in people], "view": people[0].view(), **more,
        })  # fmt: skip

    played = rounds(play, tell, stop=stop, rate=settings.rate)
    flushed = game.close(timeout_s=20.0)
    tell(played, flushed=flushed)


def start(name: str, settings: PeopleSettings) -> Child:
    """These people in a process of their own."""
    return Child(name, python_module("understudy.app.crowd.people"), told=json.dumps(asdict(settings)))


if __name__ == "__main__":
    main(PeopleSettings(**json.loads(sys.stdin.readline())))
