"""Ring: the location of each span in a replay, which rows may be sampled, and which are evicted.

A span holds the rows of one chunk (see `rows`). The ring itself stores no rows: it returns places
and edits, which the host and the device replay both apply:

    chunk ─► place ─► Placed(parts to write, windows, edits of mass)

A span never wraps: if it does not fit before the end, the head skips to 0. Spans in its way
are evicted whole, oldest first. A step whose window is cut off by the end of its chunk waits there
with mass 0; it is sampled in the next chunk's span, whose lead-in repeats it, or in its own span,
with a shorter window, once it is known that no chunk follows.
"""

import itertools
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import GameSpec
from understudy.learn.rows import RowLayout, Windows, windows_of
from understudy.replay import ReadChunks

ALIGNMENT = 16
"""Spans start at multiples of this, so that a node of the sum tree belongs to one span."""

Floats = NDArray[np.float32]

_NUMBERS = ("chunk_no", "start", "n_rows", "lead", "lead_from", "n_waiting", "stamp")
_COUNTERS = ("head", "used", "n_steps_inserted", "stamp")
_SMALL = ("row", "reward", "is_first", "terminated", "weight", "priority")
"""The columns that windows and masses are computed from."""


@dataclass(slots=True)
class Span:
    """The rows of one chunk."""

    session: uuid.UUID
    chunk_no: int
    start: int
    n_rows: int
    lead: int
    """The number of lead-in rows."""
    lead_from: int
    """The number of the chunk in which its lead-in starts; its own if no lead-in is readable."""
    n_waiting: int
    """Steps at its end that wait for the next chunk."""
    stamp: int
    """The number of this insertion; shows whether a drawn row was overwritten since."""

    @property
    def needed_chunks(self) -> list[ChunkId]:
        """The chunks that its rows are read from again: those of its lead-in, then its own."""
        return [(self.session, number) for number in range(self.lead_from, self.chunk_no + 1)]


@dataclass(slots=True)
class OpenSession:
    """The newest span of an open session, and its last rows, for the next chunk's lead-in."""

    span: Span
    ends_open: bool
    """Whether its last episode may continue in the next chunk."""
    lead: dict[str, Array]


class Edit(NamedTuple):
    """Sets rows from `start` to mass weight * priority^alpha; NaN: the largest priority lately."""

    start: int
    weight: Floats
    priority: Floats | None
    """None to set the mass to 0."""


class Placed(NamedTuple):
    """What to write for one chunk: its parts, one after another from `span.start`, then edits."""

    span: Span
    parts: tuple[Mapping[str, Array], ...]
    windows: Windows
    edits: tuple[Edit, ...]


class Ring:
    """The spans of a replay of at least `capacity` rows."""

    def __init__(
        self,
        game: GameSpec,
        needs: Transitions,
        capacity: int,
        *,
        windows: Callable[..., Windows] = windows_of,
    ) -> None:
        self.layout = RowLayout(game, needs)
        self.capacity = _rounded(capacity)
        self.head = 0
        self.used = 0
        """No row at or after this one was ever written."""
        self.n_steps_inserted = 0
        self.stamp = 0
        # Oldest first; an OrderedDict finds its first entry faster than a dict.
        self.spans: OrderedDict[ChunkId, Span] = OrderedDict()
        self.tails: dict[uuid.UUID, OpenSession] = {}
        self._needs = needs
        self._windows_of = windows
        self.fixed = asdict(needs) | {
            "capacity": self.capacity,
            "schema": game.schema,
            "extras": list(needs.extras),
        }
        """Settings that must match those of a state to restore."""
        for name in ("batch", "best_share", "best_steps"):
            del self.fixed[name]

    def place(self, chunk: Chunk, *, weight: float) -> Placed:
        """Allocate rows for the chunk; changes nothing if it raises."""
        rows = self.layout.take(chunk)
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"a chunk's weight is {weight}; give a positive number, or 0 to never draw it"
            )
        if weight not in (0, 1) and not self._needs.prioritised:
            raise ConfigError(
                f"a chunk's weight is {weight}, but this replay is uniform; give 0 or 1, or use a "
                "prioritised replay, with an alpha of 0 to sample by weight alone"
            )
        meta = chunk.meta
        columns = chunk.columns
        name = meta.session, meta.chunk_no
        if name in self.spans:
            raise Refused(
                "duplicate",
                f"chunk {meta.chunk_no} of session {meta.session} is already in the replay",
            )
        tail = self.tails.get(meta.session)
        lead: Mapping[str, Array] = {}
        continues = tail is not None and tail.ends_open and not columns["is_first"][0]
        if tail is not None and continues and tail.span.chunk_no + 1 == meta.chunk_no:
            lead = tail.lead
        n_lead = len(lead["chunk_no"]) if lead else 0
        n_rows = n_lead + chunk.n_rows
        if _rounded(n_rows) > self.capacity:
            raise ConfigError(
                f"a chunk of {n_rows} rows does not fit into a replay of {self.capacity} rows; "
                f"set its capacity to at least {_rounded(n_rows)}, better many times that"
            )
        own = _with_small(columns, rows, weight=weight)
        joined = _joined(lead, own)
        windows = self._windows_of(joined, n_lead, needs=self._needs)
        # No chunk continues a late one: newer chunks of its session are already in the ring.
        is_late = tail is not None and meta.chunk_no < tail.span.chunk_no
        n_waiting = 0 if is_late else min(windows.n_open, self._needs.n_step - 1)
        start, edits = self._claim(n_rows)
        if tail is not None and not is_late and not lead:
            edits += self._release(tail)
        self.stamp = (self.stamp + 1) & 0x7FFFFFFF
        lead_from = int(lead["chunk_no"][0]) if lead else meta.chunk_no
        span = Span(*name, start, n_rows, n_lead, lead_from, n_waiting, self.stamp)
        self.spans[name] = span
        self.n_steps_inserted += meta.n_steps
        weights = windows.weight
        if not is_late:
            own["weight"] = weights[n_lead:]
            next_lead = self._lead_after(lead, own, n_open=windows.n_open, chunk_no=meta.chunk_no)
            self.tails[meta.session] = OpenSession(span, chunk.ends_open, next_lead)
        if n_waiting:
            weights = weights.copy()
            weights[n_rows - 1 - n_waiting :] = 0.0
        edits.append(Edit(start, weights, joined["priority"]))
        return Placed(span, (lead, rows) if lead else (rows,), windows, tuple(edits))

    def close(self, session: uuid.UUID) -> list[Edit]:
        """End a session: its waiting steps become sampleable, with windows cut off at its end."""
        tail = self.tails.pop(session, None)
        return self._release(tail) if tail is not None else []

    def evict(self, session: uuid.UUID, chunk_no: int) -> list[Edit]:
        """Evict a chunk's rows, including those that later spans repeat."""
        edits = []
        span = self.spans.pop((session, chunk_no), None)
        if span is not None:
            self._forget_tail(span)
            edits.append(zero_mass_edit(span.start, span.n_rows))
        following = chunk_no + 1
        while (
            later := self.spans.get((session, following))
        ) is not None and later.lead_from <= chunk_no:
            n_affected = min(later.lead + self._needs.stack - 1, later.n_rows)
            later.lead_from = later.chunk_no
            tail = self.tails.get(session)
            if tail is not None and tail.span is later and tail.lead:
                own = tail.lead["chunk_no"] == later.chunk_no
                at = later.n_rows - 1 - len(own) + np.arange(len(own))  # their rows in the span
                tail.lead["weight"][at < n_affected] = 0.0
                tail.lead = (
                    {name: column[own] for name, column in tail.lead.items()} if own.any() else {}
                )
                later.n_waiting = min(later.n_waiting, int(own.sum()))
            edits.append(zero_mass_edit(later.start, n_affected))
            following += 1
        return edits

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that the windows and stacks of these rows touch, each once."""
        placed = sorted(self.spans.values(), key=lambda span: span.start)
        starts = np.array([span.start for span in placed], np.int64)
        chunks: dict[ChunkId, None] = {}
        for row in np.unique(rows).tolist():
            at = int(np.searchsorted(starts, row, side="right")) - 1
            if at < 0 or row >= placed[at].start + placed[at].n_rows:
                continue  # evicted in the meantime
            span = placed[at]
            reaches_back = row - span.start < span.lead + self._needs.stack - 1
            first = span.lead_from if reaches_back else span.chunk_no
            chunks.update(
                ((span.session, number), None) for number in range(first, span.chunk_no + 1)
            )
        return list(chunks)

    def _claim(self, n_rows: int) -> tuple[int, list[Edit]]:
        """The start of the next span, and edits that clear evicted rows it does not overwrite."""
        size = _rounded(n_rows)
        evicted = []
        end = self.head + size
        if end > self.capacity:
            # The rows after the head are the oldest, so they are evicted first.
            evicted = self._drop_oldest_within(self.head, self.capacity)
            self.head = 0
            end = size
        evicted += self._drop_oldest_within(self.head, end)
        start = self.head
        self.head = end
        self.used = max(self.used, end)
        edits = [
            zero_mass_edit(span.start, span.n_rows)
            for span in evicted
            if span.start < start or span.start + span.n_rows > start + n_rows
        ]
        return start, edits

    def _drop_oldest_within(self, begin: int, end: int) -> list[Span]:
        evicted: list[Span] = []
        while self.spans:
            oldest = next(iter(self.spans.values()))
            if not begin <= oldest.start < end:
                break
            self.spans.popitem(last=False)
            self._forget_tail(oldest)
            evicted.append(oldest)
        return evicted

    def _forget_tail(self, span: Span) -> None:
        tail = self.tails.get(span.session)
        if tail is not None and tail.span is span:
            del self.tails[span.session]

    def _release(self, tail: OpenSession) -> list[Edit]:
        span = tail.span
        n = span.n_waiting
        if n == 0 or (span.session, span.chunk_no) not in self.spans:
            return []
        span.n_waiting = 0
        return [
            Edit(
                span.start + span.n_rows - 1 - n,
                tail.lead["weight"][-n:],
                tail.lead["priority"][-n:],
            )
        ]

    def _lead_after(
        self, lead: Mapping[str, Array], own: Mapping[str, Array], *, n_open: int, chunk_no: int
    ) -> dict[str, Array]:
        """The rows that the next chunk's span repeats."""
        n_lead = min(self._needs.n_step - 1 + self._needs.stack - 1, n_open)
        if n_lead == 0:
            return {}
        n_rows = len(own["row"])
        n_own = min(n_lead, n_rows - 1)
        n_old = n_lead - n_own
        next_lead = {}
        for name, column in {**own, "chunk_no": np.full(n_rows, chunk_no, np.int64)}.items():
            part = column[n_rows - 1 - n_own : n_rows - 1]
            next_lead[name] = (
                np.concatenate([lead[name][len(lead[name]) - n_old :], part])
                if n_old
                else part.copy()
            )
        return next_lead

    # --- Checkpoints: the location and weights of each chunk, never its rows ----------------------

    def needed_chunks(self) -> list[ChunkId]:
        """The chunks that `restore` reads, some of them twice."""
        return [key for span in self.spans.values() for key in span.needed_chunks]

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The ring as arrays and facts."""
        spans = list(self.spans.values())
        at = {id(span): number for number, span in enumerate(spans)}
        tails = sorted(self.tails.values(), key=lambda tail: at[id(tail.span)])
        leads = {
            name: np.concatenate(
                [np.empty(0, np.float32), *(tail.lead[name] for tail in tails if tail.lead)]
            )
            for name in ("weight", "priority")
        }
        lengths = [
            (at[id(tail.span)], len(tail.lead["chunk_no"]) if tail.lead else 0) for tail in tails
        ]
        arrays: dict[str, Array] = {
            "sessions": np.frombuffer(b"".join(s.session.bytes for s in spans), np.uint8).reshape(
                -1, 16
            ),
            "places": np.array(
                [[getattr(s, name) for name in _NUMBERS] for s in spans], np.int64
            ).reshape(-1, 7),
            "tails": np.array(lengths, np.int64).reshape(-1, 2),
            "tail_weights": leads["weight"],
            "tail_priorities": leads["priority"],
        }
        return arrays, {name: getattr(self, name) for name in _COUNTERS} | self.fixed

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> tuple[Iterator[Placed], list[Edit]]:
        """Restore the ring from its `state`.

        Returns the rows to write, and the edits that clear chunks which can no longer be read.
        ConfigError if a replay with other settings saved the state. `arrays["weights"]`, which
        replays add to the state, has the weights of all rows.
        """
        differences = [
            f"{name} was {facts.get(name)!r}, now {value!r}"
            for name, value in self.fixed.items()
            if facts.get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"a saved replay does not match this one: {', '.join(differences)}; restore it "
                "with the settings it was saved with"
            )
        for name in _COUNTERS:
            setattr(self, name, int(facts[name]))
        spans = [
            Span(
                uuid.UUID(bytes=session.tobytes()),
                **dict(zip(_NUMBERS, numbers.tolist(), strict=True)),
            )
            for session, numbers in zip(arrays["sessions"], arrays["places"], strict=True)
        ]
        needed = [span.needed_chunks for span in spans]
        chunks = {
            chunk.meta.id: chunk for chunk in read(list(dict.fromkeys(itertools.chain(*needed))))
        }
        is_readable = [chunks.keys() >= set(ids) for ids in needed]
        self.spans.clear()
        self.tails.clear()
        for span, readable in zip(spans, is_readable, strict=True):
            if readable:
                self.spans[span.session, span.chunk_no] = span
        ends = np.cumsum(arrays["tails"][:, 1]).tolist()
        tails = {
            number: slice(end - n, end)
            for (number, n), end in zip(arrays["tails"].tolist(), ends, strict=True)
        }
        placed = (
            self._restore_span(span, [chunks[key] for key in ids], arrays, tail=tails.get(number))
            for number, (span, ids) in enumerate(zip(spans, needed, strict=True))
            if is_readable[number]
        )
        cleared = [
            zero_mass_edit(span.start, span.n_rows)
            for span, readable in zip(spans, is_readable, strict=True)
            if not readable
        ]
        return placed, cleared

    def _restore_span(
        self,
        span: Span,
        chunks: Sequence[Chunk],
        arrays: Mapping[str, Array],
        *,
        tail: slice | None,
    ) -> Placed:
        """The span of the last of these chunks; its lead-in is from the others."""
        *before, chunk = chunks
        n_lead = span.lead
        lead = dict[str, Array]()
        if n_lead and not before:  # its chunks were evicted: the rows stay empty
            rows = {
                name: np.zeros((n_lead, *column.shape), column.dtype)
                for name, column in self.layout.columns.items()
            }
            flags = {name: np.zeros(n_lead, np.bool_) for name in ("is_first", "terminated")}
            empty: dict[str, Array] = {
                "row": np.zeros(n_lead, np.uint8),
                "reward": np.zeros(n_lead, np.float32),
                **flags,
            }
            lead = _with_small(empty, rows, weight=0.0)
            lead["chunk_no"] = np.full(n_lead, span.chunk_no - 1, np.int64)
        elif n_lead:
            for earlier in before:
                lead = self._last_rows(earlier, lead)
            lead = {name: column[len(column) - n_lead :] for name, column in lead.items()}
        rows = self.layout.take(chunk)
        own = _with_small(chunk.columns, rows, weight=1.0)
        windows = self._windows_of(_joined(lead, own), n_lead, needs=self._needs)
        if tail is not None:
            next_lead: dict[str, Array] = {}
            if n_rows := tail.stop - tail.start:
                last = self._last_rows(chunk, lead)
                next_lead = {
                    name: column[len(column) - n_rows :].copy() for name, column in last.items()
                }
                next_lead["weight"] = arrays["tail_weights"][tail].copy()
                next_lead["priority"] = arrays["tail_priorities"][tail].copy()
            self.tails[span.session] = OpenSession(span, chunk.ends_open, next_lead)
        windows.weight[:] = arrays["weights"][span.start : span.start + span.n_rows]
        return Placed(span, (lead, rows) if lead else (rows,), windows, ())

    def _last_rows(self, chunk: Chunk, lead: Mapping[str, Array]) -> dict[str, Array]:
        """The last rows of the chunk's open episode, for the lead-in of the next chunk."""
        own = _with_small(chunk.columns, self.layout.take(chunk), weight=1.0)
        if chunk.columns["is_first"][0]:
            lead = {}
        n_open = self._windows_of(_joined(lead, own), 0, needs=self._needs).n_open
        return self._lead_after(lead, own, n_open=n_open, chunk_no=chunk.meta.chunk_no)


def _with_small(
    columns: Mapping[str, Array], rows: Mapping[str, Array], *, weight: float
) -> dict[str, Array]:
    """A chunk's stored columns, and those for windows and masses."""
    weights = np.empty(len(columns["row"]), np.float32)
    priority = columns.get("priority")
    weights.fill(weight)
    own = {
        **rows,
        "weight": weights,
        "priority": np.full_like(weights, np.nan) if priority is None else priority,
    }
    for name in ("row", "reward", "is_first", "terminated"):
        own[name] = columns[name]
    return own


def _joined(lead: Mapping[str, Array], own: Mapping[str, Array]) -> Mapping[str, Array]:
    """The columns for windows and masses of a whole span."""
    return {name: np.concatenate([lead[name], own[name]]) for name in _SMALL} if lead else own


def zero_mass_edit(start: int, n_rows: int) -> Edit:
    """An edit that sets the mass of these rows to 0."""
    return Edit(start, np.zeros(n_rows, np.float32), None)


def _rounded(n_rows: int) -> int:
    return -(-n_rows // ALIGNMENT) * ALIGNMENT
