"""A cursor: how far a tail came in every partition, and how many items it has shown."""

import json
from dataclasses import dataclass, field

from understudy.core.errors import ConfigError
from understudy.core.ports import Cursor


@dataclass(frozen=True, slots=True)
class Place:
    """A place in one partition: a commit that was shown whole, and how much of the one behind it."""

    commit_no: int = 0
    index: int = 0
    arrivals: int = 0
    """Arrivals of the partition that were shown, or passed over because nothing is left of them."""


@dataclass(slots=True)
class Places:
    """Where a tail is."""

    shown: int = 0
    """The last arrival number along this tail."""
    at: dict[str, Place] = field(default_factory=dict)

    def text(self) -> Cursor:
        fields = {name: [place.commit_no, place.index, place.arrivals] for name, place in sorted(self.at.items())}
        return Cursor(json.dumps([self.shown, fields], separators=(",", ":")))

    def copy(self) -> "Places":
        return Places(self.shown, dict(self.at))


def read_cursor(cursor: Cursor | None) -> Places:
    """The places that a cursor stands for; ConfigError when it is none of this store."""
    if cursor is None:
        return Places()
    try:
        shown, fields = json.loads(cursor)
        return Places(int(shown), {name: Place(*map(int, place)) for name, place in fields.items()})
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{cursor[:40]!r} is no cursor of a Cassandra store; begin without one") from None
