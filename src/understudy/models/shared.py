"""Shared state: what many processes agree on, folded from a signed journal that all of them follow.

    NAME/0000000001.json, NAME/0000000002.json, ...

Each number of a journal is written once. Writing number N + 1 says: I have read everything up to N.
If somebody else was faster, the number is taken, and one reads on and decides again. So a journal
is compare-and-swap with the one conditional write that every backend has, and following it means
asking for one object.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Refused, StorageFailed
from understudy.core.signed import Signer, Trusted, open_signed
from understudy.ports import Objects

_TRIES = 200
_PAUSE_S = 0.01

Entry = dict[str, Any]


FIRST = 1


class Journal:
    """One journal of a name; safe for any number of readers and writers, here and elsewhere."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self.name = name

    def read(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Documents behind a number, in order."""
        number = after
        while (raw := self._objects.get(self._place(number := number + 1))) is not None:
            yield number, raw

    def append(self, number: int, raw: bytes) -> bool:
        """Whether the document now stands under this number, which must be the one behind the
        last that was read."""
        place = self._place(number)
        if number > FIRST and self._objects.get(self._place(number - 1)) is None:
            raise Corrupt(
                f"{self._place(number - 1)} is missing, so {place} cannot follow it; restore it "
                "from a backup"
            )
        if self.is_hole(number):
            raise Corrupt(
                f"{place} is missing, and later entries are there; restore it from a backup before "
                "you go on"
            )
        # Taken, yet with our bytes: an earlier attempt arrived although its answer was lost.
        return self._objects.create(place, raw) or self._objects.get(place) == raw

    def is_hole(self, number: int) -> bool:
        """Whether there is nothing under this number although there is behind it: somebody has
        lost it."""
        # Looked for in this order: whatever stands behind it was written after it.
        later = any(name > self._place(number) for name in self._objects.list(self.name))
        return later and self._objects.get(self._place(number)) is None

    def _place(self, number: int) -> str:
        return f"{self.name}/{number:010d}.json"


class Folded(Protocol):
    """A state that grows by entries."""

    number: int
    """The last entry that was taken, or passed over."""
    bad_entries: int

    def take(self, entry: Mapping[str, Any], raw: bytes) -> None:
        """Fold in an entry; Refused when it cannot follow what is there, which leaves the state
        as it was."""
        ...


S = TypeVar("S", bound=Folded)


class Shared(Generic[S]):
    """A state and its journal; thread-safe. Entries that are not genuine are passed over and
    counted."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        state: S,
        *,
        trusted: Trusted,
        signer: Signer | None,
        clock: Clock,
    ) -> None:
        self._journal = Journal(objects, name)
        self._state = state
        self._trusted = trusted
        self._signer = signer
        self._clock = clock
        self._look_every_s = objects.look_every_s
        self._looked_s = -math.inf
        self.lock = threading.RLock()
        """Held by whoever reads more than one thing of the state."""

    def now(self) -> S:
        """The state; where it costs to look for newer entries, they are looked for now and then."""
        with self.lock:
            if self._clock.monotonic() - self._looked_s < self._look_every_s:
                return self._state
            return self._read_on()

    def _read_on(self) -> S:
        """The state at the newest entry."""
        with self.lock:
            state = self._state
            began_s = self._clock.monotonic()
            for number, raw in self._journal.read(state.number):
                try:
                    entry = open_signed(raw, self._trusted)
                    if (entry.get("journal"), entry.get("number")) != (self._journal.name, number):
                        raise Refused("bad_entry", "it was signed for another place")
                    state.take(entry, raw)
                except (Refused, KeyError, TypeError, ValueError):
                    state.bad_entries += 1
                state.number = number
            self._looked_s = began_s
            return state

    @property
    def lost_entry(self) -> str:
        """The first entry that is missing although later ones are there, so that nobody sees
        those; empty: none."""
        with self.lock:
            number = self._read_on().number + 1
            return (
                f"{self._journal.name}/{number:010d}.json" if self._journal.is_hole(number) else ""
            )

    def write(self, make: Callable[[S], Entry]) -> S:
        """Write the entry that `make` finds right for the newest state; asked again when
        somebody else was faster."""
        if self._signer is None:
            raise ConfigError(
                "what gateways share is read-only here; the signing key is in the deployment's "
                "data folder"
            )
        chance = random.Random()
        for attempt in range(_TRIES):
            with self.lock:
                state = self._read_on()
                number = state.number + 1
                place = {
                    "journal": self._journal.name,
                    "number": number,
                    "at_s": round(self._clock.now(), 3),
                }
                raw = self._signer.sign(make(state) | place)
                if self._journal.append(number, raw):
                    return self._read_on()
            time.sleep(_PAUSE_S * chance.random() * min(attempt, 10))
        raise StorageFailed(
            f"{_TRIES} others wrote to {self._journal.name} at the same time; try again"
        )
