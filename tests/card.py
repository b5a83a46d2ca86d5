"""Lines of the reliability card: a claim, how often a test tried it and how often it held."""

from collections.abc import Callable


class Card:
    """The counts of one test, printed and recorded as test properties for `scripts/card.py`."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def line(self, what: str, *, tried: int, held: int, note: str = "") -> None:
        """One claim: how often it was tried and how often it held."""
        print(f"{what}: tried {tried}, held {held}{'; ' + note if note else ''}")
        self._record("card", {"what": what, "tried": tried, "held": held, "note": note})
