"""What fault tests share: a seed, and the lines of the reliability card."""

import os
from collections.abc import Callable

import pytest


class Card:
    """Counts of one test: printed, and handed to `scripts/card.py` as properties of the test."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def line(self, what: str, *, tried: int, held: int, note: str = "") -> None:
        """One claim: how often it was tried and how often it held."""
        print(f"{what}: tried {tried}, held {held}{'; ' + note if note else ''}")
        self._record("card", {"what": what, "tried": tried, "held": held, "note": note})


@pytest.fixture
def card(record_property: Callable[[str, object], None]) -> Card:
    return Card(record_property)


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of everything random here; `scripts/card.py --seed` sets it."""
    return int(os.environ.get("UNDERSTUDY_FAULT_SEED", "1"))
