"""Shared state of many processes, built from a signed journal that all of them follow.

    NAME/0000000001.json, NAME/0000000002.json, ...

Each number of a journal is written once. The writer of number N + 1 has read all entries up to N.
If another process was faster, the number exists already, and the writer reads the new entries and
decides again. So a journal provides compare-and-swap with the one conditional write that every
backend has (create if absent), and following a journal takes one request per entry.
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
_MAX_ERROR = 300

Entry = dict[str, Any]


FIRST = 1


class Journal:
    """A named journal; safe for any number of readers and writers in any process."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self.name = name

    def read(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """The numbers and bytes of all documents after the number `after`, in order."""
        number = after
        while (raw := self._objects.get(self._object_name(number := number + 1))) is not None:
            yield number, raw

    def append(self, number: int, raw: bytes) -> bool:
        """Write the next document; False when another one already has this number."""
        name = self._object_name(number)
        if number > FIRST and self._objects.get(self._object_name(number - 1)) is None:
            raise Corrupt(
                f"{self._object_name(number - 1)} is missing, so {name} cannot follow it; "
                "restore the missing entry from a backup"
            )
        if self.is_hole(number):
            raise Corrupt(
                f"{name} is missing, but later entries exist; restore the missing entry from a "
                "backup"
            )
        # The same bytes are ours: an earlier attempt succeeded, but its response was lost.
        return self._objects.create(name, raw) or self._objects.get(name) == raw

    def is_hole(self, number: int) -> bool:
        """Whether this entry is missing although a later one exists: it was lost."""
        # Listed first: every entry before a listed one was already written, so if it cannot be read
        # now, it was lost.
        later = any(name > self._object_name(number) for name in self._objects.list(self.name))
        return later and self._objects.get(self._object_name(number)) is None

    def _object_name(self, number: int) -> str:
        return f"{self.name}/{number:010d}.json"


class JournalState(Protocol):
    """A state that is built by applying entries."""

    number: int
    """The last entry that was applied or skipped."""
    bad_entries: int
    last_bad_entry: str
    """The number of the last invalid entry, and what is wrong with it; empty: none."""

    def apply(self, entry: Mapping[str, Any], raw: bytes) -> None:
        """Apply an entry; if it is invalid in this state, Refused, with the state unchanged."""
        ...


S = TypeVar("S", bound=JournalState)


class Shared(Generic[S]):
    """A state and its journal; thread-safe. Invalid entries are skipped and counted."""

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
        self._look_every_s = objects.poll_every_s
        self._refreshed_s = -math.inf
        self.lock = threading.RLock()
        """Hold it to read several fields of the state together."""

    def now(self) -> S:
        """The state; new entries are read if the last read was `poll_every_s` or longer ago."""
        with self.lock:
            if self._clock.monotonic() - self._refreshed_s < self._look_every_s:
                return self._state
            return self._refresh()

    def _refresh(self) -> S:
        """Apply all new entries; return the state."""
        with self.lock:
            state = self._state
            began_s = self._clock.monotonic()
            for number, raw in self._journal.read(state.number):
                try:
                    entry = open_signed(raw, self._trusted)
                    if (entry.get("journal"), entry.get("number")) != (self._journal.name, number):
                        raise Refused("bad_entry", "signed for another journal or number")
                    state.apply(entry, raw)
                except (Refused, KeyError, TypeError, ValueError) as error:
                    state.bad_entries += 1
                    what = error.detail if isinstance(error, Refused) else repr(error)
                    state.last_bad_entry = f"entry {number}: {what[:_MAX_ERROR]}"
                state.number = number
            self._refreshed_s = began_s
            return state

    @property
    def lost_entry(self) -> str:
        """The name of a missing entry, after which all existing ones are ignored; empty: none."""
        with self.lock:
            number = self._refresh().number + 1
            return (
                f"{self._journal.name}/{number:010d}.json" if self._journal.is_hole(number) else ""
            )

    def damage(self) -> str:
        """What is wrong with the journal, and the next step; empty: nothing."""
        if lost_entry := self.lost_entry:
            return (
                f"{lost_entry} is missing, so all later entries are ignored; restore it from a "
                "backup"
            )
        now = self.now()
        if not now.bad_entries:
            return ""
        return (
            f"{now.bad_entries} of its entries are invalid and were ignored, the last one: "
            f"{now.last_bad_entry}; restore entries that are damaged from a backup"
        )

    def write(self, make_entry: Callable[[S], Entry]) -> S:
        """Append `make_entry(state)`; if another writer was first, make it from the new state."""
        if self._signer is None:
            raise ConfigError(
                "registry and keys are read-only here, because there is no signing key; run this "
                "where the data folder of the deployment is"
            )
        rng = random.Random()
        for attempt in range(_TRIES):
            with self.lock:
                state = self._refresh()
                number = state.number + 1
                position = {
                    "journal": self._journal.name,
                    "number": number,
                    "at_s": round(self._clock.now(), 3),
                }
                raw = self._signer.sign(make_entry(state) | position)
                if self._journal.append(number, raw):
                    return self._refresh()
            time.sleep(_PAUSE_S * rng.random() * min(attempt, 10))
        raise StorageFailed(
            f"writing to {self._journal.name} lost {_TRIES} races against other writers; try again"
        )
