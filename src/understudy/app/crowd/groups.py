"""Groups: the simulated people of a loop, in processes of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from understudy.app.crowd.people import PeopleSettings, start
from understudy.core.errors import UnderstudyError

_CLOSE_S = 40.0


class Groups:
    """Two processes, each with a client and a ledger of its own."""

    def __init__(self, settings: PeopleSettings, n_people: int) -> None:
        """`settings` are those of everybody; names, numbers and seeds are given out here."""
        middle = (n_people + 1) // 2
        self._children = [
            start(
                f"people {at}",
                replace(
                    settings, names=[f"person-{number}" for number in numbers], first_number=numbers.start,
                    seed=settings.seed + at,
                ),
            )
            for at, numbers in enumerate((range(middle), range(middle, n_people)))
            if numbers
        ]  # fmt: skip

    def total(self, name: str) -> int:
        return sum(int(child.latest.get(name, 0)) for child in self._children)

    def points(self) -> dict[str, tuple[int, int]]:
        """Points that each bot won, and that were played with it."""
        found: dict[str, tuple[int, int]] = {}
        for child in self._children:
            for person in child.latest.get("points", ()):
                for bot, (won, played) in person.items():
                    before = found.get(bot, (0, 0))
                    found[bot] = before[0] + won, before[1] + played
        return found

    def view(self) -> Mapping[str, Any]:
        """What the first of them sees."""
        return dict(self._children[0].latest.get("view", {}))

    def check(self) -> None:
        """Raise when a process of people failed."""
        for child in self._children:
            if child.exit_code not in (None, 0):
                raise UnderstudyError(f"{child.name} failed:\n{child.errors}")

    def stop(self) -> None:
        """Let them finish what they recorded; whoever does not is ended."""
        for child in self._children:
            child.stop()
        for child in self._children:
            if child.wait(_CLOSE_S) is None:
                child.kill()
                child.wait(5.0)
