"""Shared state of many processes, built from a signed journal that all of them follow.

    NAME/0000000001.json, NAME/0000000002.json, ...

Each number of a journal is written once. The writer of number N + 1 has read all entries up to N.
If another process was faster, the number exists already, and the writer reads the new entries and
decides again. So a journal provides compare-and-swap with the one conditional write that every
backend has (create if absent), and following a journal takes two requests, and one per new entry.

Each entry names the SHA-256 of the one before it, so the newest entry's hash covers all others. A
process keeps the newest entry that it has read, and a machine remembers it for later processes. If
the journal ends before that entry, or has another one in its place, it was cut or replaced by an
old copy, and reading it raises Corrupt. To accept that, an operator writes a restart entry, which
begins a new *line*; all machines accept a later line.

A damaged or missing entry is skipped and counted; all others stay valid.
"""

import contextlib
import hashlib
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Refused, StorageFailed, StorageFull
from understudy.core.plural import plural
from understudy.core.signed import Signer, Trusted, open_signed
from understudy.ports import Objects

_TRIES = 200
_PAUSE_S = 0.01
_MAX_ERROR = 300
_LIST_EVERY_S = 30.0
"""How often a process that follows a journal looks for entries after a missing one."""
_MAX_MISSING = 1000
"""More consecutive missing entries than this are not skipped, so that one misplaced file cannot
cause a long search."""
_ENTRY = re.compile(r"([0-9]{10})\.json")
_REMEMBERED = re.compile(r"(\d{16})-(\d{10})-([0-9a-f]{64})")

Entry = dict[str, Any]


class Mark(NamedTuple):
    """A valid entry: the line it belongs to, its number and its SHA-256."""

    line: int = 0
    """When the newest restart was written, in milliseconds since 1970; 0: there was none."""
    number: int = 0
    sha256: str = ""


class Journal:
    """A named journal; safe for any number of readers and writers in any process."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self.name = name

    def get(self, number: int) -> bytes | None:
        return self._objects.get(self.object_name(number))

    def read(self, after: int = 0, *, last: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """The numbers and bytes of all documents after the number `after`, in order.

        The first missing document ends it, except that a missing one before `last` is None.
        """
        number = after + 1
        while (raw := self.get(number)) is not None or number < last:
            yield number, raw
            number += 1

    def last_number(self, after: int = 0) -> int:
        """The highest number that exists, found in a listing; Corrupt if very many are missing."""
        last = after
        for name in self._objects.list(self.name):
            match = _ENTRY.fullmatch(name.removeprefix(f"{self.name}/"))
            number = int(match[1]) if match else 0
            if number - last > _MAX_MISSING:
                raise Corrupt(
                    f"{name} exists, but the {number - last - 1} entries before it are missing; "
                    "restore them from a backup, or move it away if it does not belong there"
                )
            last = max(last, number)
        return last

    def append(self, number: int, raw: bytes) -> bool:
        """Write the next document; False when another one already has this number."""
        # The same bytes are ours: an earlier attempt succeeded, but its response was lost.
        return self._objects.create(self.object_name(number), raw) or self.get(number) == raw

    def object_name(self, number: int) -> str:
        return f"{self.name}/{number:010d}.json"


class JournalState(Protocol):
    """A state that is built by applying entries."""

    number: int
    """The last entry that was applied."""
    unread: int
    """How many entries follow it that cannot be read."""
    bad_entries: int
    """How many entries were skipped, or are unread."""
    last_bad_entry: str
    """The number of the last one, and what is wrong with it; empty: none."""

    def apply(self, entry: Mapping[str, Any], raw: bytes, *, lost: int) -> None:
        """Apply an entry, before which `lost` entries cannot be read; Refused if it is invalid."""
        ...


S = TypeVar("S", bound=JournalState)


class Shared(Generic[S]):
    """A state and its journal; thread-safe. Invalid entries are skipped and counted."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        make_state: Callable[[], S],
        *,
        trusted: Trusted,
        signer: Signer | None,
        clock: Clock,
        memory: Objects | None = None,
    ) -> None:
        """`memory`: objects on this machine, which remember the newest entry of each journal."""
        self._journal = Journal(objects, name)
        self._make_state = make_state
        self._trusted = trusted
        self._signer = signer
        self._clock = clock
        self._memory = memory
        self._look_every_s = objects.poll_every_s
        self._seen = Mark()
        """The newest entry that this process has read, or that its machine remembers."""
        self._is_opened = False
        self._reset()
        self.lock = threading.RLock()
        """Hold it to read several fields of the state together."""

    def _reset(self) -> None:
        self._state = self._make_state()
        self._mark = Mark()
        self._skipped = 0
        self._doubt = ""
        """Why this may not be the journal that was read before; empty: it is."""
        self._refreshed_s = -math.inf
        self._listed_s = -math.inf
        self._last_listed = 0
        """The highest number in the last listing; entries before it are missing, not unwritten."""

    # --- Reading ----------------------------------------------------------------------------------

    def now(self) -> S:
        """The state; new entries are read if the last read was `poll_every_s` or longer ago.

        Raises Corrupt if the journal was cut or replaced.
        """
        with self.lock:
            if self._clock.monotonic() - self._refreshed_s >= self._look_every_s:
                self._refresh()
            self._check()
            return self._state

    def unchecked(self) -> S:
        """The state, even if the journal was cut or replaced."""
        with self.lock:
            self._refresh()
            return self._state

    def _refresh(self, *, lists: bool = False) -> None:
        """Apply all new entries; with `lists`, also those after a missing one."""
        began_s = self._clock.monotonic()
        if not self._is_opened:
            self._seen = self._remembered()
            self._is_opened = True
        lists = lists or began_s - self._listed_s >= _LIST_EVERY_S
        # A journal in doubt is read again, because its entries may have been restored.
        if self._mark.number and ((lists and self._doubt) or not self._is_in_place()):
            self._reset()
            lists = True
        if lists:
            self._last_listed = self._journal.last_number(self._mark.number)
            self._listed_s = began_s
        state = self._state
        unread: list[str] = []
        for number, raw in self._journal.read(self._mark.number, last=self._last_listed):
            try:
                entry = self._open(number, raw)
                line = max(int(entry["line"]), self._mark.line)
                before = entry["before"]
                state.apply(entry, raw or b"", lost=len(unread))
            except (Refused, KeyError, TypeError, ValueError) as error:
                what = error.detail if isinstance(error, Refused) else repr(error)
                unread.append(f"entry {number}: {what[:_MAX_ERROR]}")
                continue
            if not unread and before not in ("", self._mark.sha256):
                unread = [f"entry {number - 1}: it is not the one that entry {number} follows"]
            mark = Mark(line, number, _sha256(raw or b""))
            self._doubt = self._doubt or _doubt(
                mark, follows=self._mark, before=before, seen=self._seen
            )
            if entry["kind"] == "restart" and line > self._mark.line:
                # An operator accepted the journal as it was.
                self._skipped = 0
                state.last_bad_entry = ""
            elif unread:
                self._skipped += len(unread)
                state.last_bad_entry = unread[-1]
            unread = []
            self._mark = mark
            state.number = number
        state.unread = len(unread)
        state.bad_entries = self._skipped + len(unread)
        if unread:
            state.last_bad_entry = unread[-1]
        self._refreshed_s = began_s
        if not self._is_behind() and self._mark[:2] > self._seen[:2]:
            self._seen = self._mark
            self._doubt = ""
            self._remember()

    def _open(self, number: int, raw: bytes | None) -> Entry:
        if raw is None:
            raise Refused("bad_entry", f"{self._journal.object_name(number)} is missing")
        entry = open_signed(raw, self._trusted)
        if (entry.get("journal"), entry.get("number")) != (self._journal.name, number):
            raise Refused("bad_entry", "signed for another journal or number")
        return entry

    def _is_in_place(self) -> bool:
        """Whether the last entry of the state is still there; it may have been damaged since."""
        raw = self._journal.get(self._mark.number)
        if raw is not None and _sha256(raw) != self._mark.sha256:
            with contextlib.suppress(Refused, ValueError):
                self._open(self._mark.number, raw)
                return False
        return raw is not None

    # --- What was read before ---------------------------------------------------------------------

    def _is_behind(self) -> bool:
        """Whether the journal lacks the newest entry that was read before."""
        if self._mark.line != self._seen.line:
            return self._mark.line < self._seen.line
        last = self._mark.number + self._state.unread
        return bool(self._doubt) or last < self._seen.number

    def _check(self) -> None:
        if self._is_behind():
            raise Corrupt(self._lost())

    def _lost(self) -> str:
        last = self._mark.number + self._state.unread
        what = self._doubt or (
            f"ends at entry {last}, but this machine has read entry {self._seen.number}: entries "
            "were removed, or replaced by an old copy"
        )
        return (
            f"the journal {self._journal.name} {what}; restore them from a backup, or accept what "
            f"is there now with '{self.repair_command}'"
        )

    @property
    def repair_command(self) -> str:
        game = self._journal.name.partition("/")[2]
        if game:
            return f"understudy models repair {game}"
        return "understudy keys repair --keys keep|revoke"

    def _remembered(self) -> Mark:
        names = () if self._memory is None else self._memory.list(self._journal.name)
        matches = (_REMEMBERED.fullmatch(name.rpartition("/")[2]) for name in names)
        marks = (Mark(int(match[1]), int(match[2]), match[3]) for match in matches if match)
        return max(marks, default=Mark())

    def _remember(self) -> None:
        if self._memory is None:
            return
        # A file per entry, created once: processes of this machine never replace a newer one.
        line, number, sha256 = self._seen
        name = f"{self._journal.name}/{line:016d}-{number:010d}-{sha256}"
        # A machine that cannot write now, such as on a full disk, can still read.
        with contextlib.suppress(StorageFailed, StorageFull, OSError):
            self._memory.create(name, b"")
            for older in self._memory.list(self._journal.name):
                if older < name and _REMEMBERED.fullmatch(older.rpartition("/")[2]):
                    self._memory.delete(older)

    def damage(self) -> str:
        """What is wrong with the journal, and the next step; empty: nothing."""
        with self.lock:
            try:
                self._refresh(lists=True)
            except Corrupt as error:
                return str(error)
            if self._is_behind():
                return self._lost()
            state = self._state
            if not state.bad_entries:
                return ""
            return (
                f"{state.bad_entries} invalid {plural(state.bad_entries, 'entry', 'entries')}, "
                f"ignored, the last one: {state.last_bad_entry}; restore what is damaged from a "
                f"backup, or accept what is there now with '{self.repair_command}'"
            )

    # --- Writing ----------------------------------------------------------------------------------

    def write(self, make_entry: Callable[[S], Entry], *, restart_line: int | None = None) -> S:
        """Append `make_entry(state)`; if another writer was first, make it from the new state."""
        if self._signer is None:
            raise ConfigError(
                "registry and keys are read-only here, because there is no signing key; run this "
                "where the data folder of the deployment is"
            )
        rng = random.Random()
        for attempt in range(_TRIES):
            with self.lock:
                self._refresh(lists=True)
                if restart_line is None:
                    self._check()
                state = self._state
                number = state.number + state.unread + 1
                position = {
                    "journal": self._journal.name,
                    "number": number,
                    "at_s": round(self._clock.now(), 3),
                    "line": self._mark.line if restart_line is None else restart_line,
                    "before": "" if state.unread else self._mark.sha256,
                }
                raw = self._signer.sign(make_entry(state) | position)
                if self._journal.append(number, raw):
                    self._refresh()
                    return self._state
            time.sleep(_PAUSE_S * rng.random() * min(attempt, 10))
        raise StorageFailed(
            f"writing to {self._journal.name} lost {_TRIES} races against other writers; try again"
        )

    def restart(self, make_entry: Callable[[S], Entry]) -> S:
        """Accept the journal as it is, on every machine; new numbers are above all seen here."""
        with self.lock:
            self._refresh(lists=True)
            seen = self._seen
            now_ms = int(self._clock.now() * 1000)
            line = max(now_ms, seen.line + 1, self._mark.line + 1)
            while self._mark.line < line or self._mark.number <= seen.number:
                self.write(make_entry, restart_line=line)
            return self._state


def _doubt(mark: Mark, *, follows: Mark, before: str, seen: Mark) -> str:
    """Why an entry shows that the journal may not be the one read before; empty: it does not.

    `follows`: the readable entry in front of it; `before`: the hash of the entry in front of it,
    empty if its writer could not read that one; `seen`: the newest entry that was read before.
    """
    if mark.line != seen.line:
        return ""
    is_next = mark.number == seen.number + 1
    has_passed = follows.number < seen.number < mark.number and before != ""
    if (mark.number == seen.number and mark.sha256 != seen.sha256) or (
        has_passed and is_next and before != seen.sha256
    ):
        return (
            f"has an entry {seen.number} that differs from the one this machine has read: entries "
            "were removed, or replaced by an old copy"
        )
    if has_passed and not is_next:
        return (
            f"has unreadable entries from {seen.number} to {mark.number - 1}, and this machine has "
            f"read {seen.number}, so it cannot tell whether they were replaced"
        )
    return ""


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
