"""How long a store keeps chunks: now, and before that was changed.

Cassandra gives a row its time to live when it is written. So what was written before a change runs out as it was meant
to then, and only what is missing too early is damage.
"""

from dataclasses import dataclass

from understudy.stores.cassandra.wire import Wire

SLACK_S = 3600.0
"""How much clocks may differ, and a change of all tables take, before what ran out looks like what was lost."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Times to live in seconds; 0: for ever."""

    ttl_s: int
    changed_s: int = 0
    """When it was changed last."""
    least_s: int = 0
    """The shortest of those before."""

    def of(self, at_s: float) -> int:
        """How long what was committed at a time is kept, at least."""
        if at_s >= self.changed_s + SLACK_S:
            return self.ttl_s
        return self.least_s if at_s < self.changed_s - SLACK_S else _shortest(self.ttl_s, self.least_s)

    def changed_to(self, ttl_s: int, *, now_s: float) -> "Keeping":
        """As it is from now on."""
        return self if ttl_s == self.ttl_s else Keeping(ttl_s, int(now_s), _shortest(self.ttl_s, self.least_s))


def _shortest(*times_s: int) -> int:
    return min((one for one in times_s if one), default=0)


_NAMES = {"ttl_s": "ttl_s", "changed_s": "ttl_changed_s", "least_s": "ttl_least_s"}


def read_keeping(wire: Wire) -> Keeping:
    """What a store's `meta` says."""
    rows = wire.scan(wire.bind("SELECT name, number FROM meta"))
    found = {row.name: int(row.number or 0) for row in rows}
    return Keeping(**{field: found.get(name, 0) for field, name in _NAMES.items()})


def write_keeping(wire: Wire, keeping: Keeping) -> None:
    """The time to live itself comes last: until then a change is not made, and is made again."""
    for field in ("least_s", "changed_s", "ttl_s"):
        value = getattr(keeping, field)
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES (?, ?)", _NAMES[field], value))
