"""What a checkpoint keeps of a replay: where each chunk lies and what it weighs, never the rows.

The rows are read again from the run's store, so that checkpoints stay small and hold nothing a player may want
forgotten. A stretch whose chunks are gone by then is left out.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from understudy.core.algorithm import Transitions
from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError
from understudy.core.meta import ChunkId
from understudy.core.tensors import Array
from understudy.learn.layout import RowLayout
from understudy.learn.ring import Placed, Ring, Stretch, Tail, ends_open, join_rows, rows_of

ReadChunks = Callable[[Sequence[ChunkId]], Iterator[Chunk]]
"""Reads these chunks again, in this order; those that are gone are left out."""

_NUMBERS = ("chunk_no", "start", "n_rows", "lead", "lead_from", "n_waiting", "stamp")
_COUNTERS = ("head", "used", "n_steps_inserted", "stamp")


def ring_state(ring: Ring) -> tuple[dict[str, Array], dict[str, Any]]:
    """The ring as arrays and facts."""
    stretches = list(ring.stretches.values())
    at = {id(stretch): number for number, stretch in enumerate(stretches)}
    tails = sorted(ring.tails.values(), key=lambda tail: at[id(tail.stretch)])
    leads = {
        name: np.concatenate([np.empty(0, np.float32), *(tail.lead[name] for tail in tails if tail.lead)])
        for name in ("weight", "priority")
    }
    arrays: dict[str, Array] = {
        "sessions": np.frombuffer(b"".join(s.session.bytes for s in stretches), np.uint8).reshape(-1, 16),
        "places": np.array([[getattr(s, name) for name in _NUMBERS] for s in stretches], np.int64).reshape(-1, 7),
        "tails": np.array([[at[id(t.stretch)], _n_rows(t.lead)] for t in tails], np.int64).reshape(-1, 2),
        "tail_weights": leads["weight"],
        "tail_priorities": leads["priority"],
    }
    return arrays, {name: getattr(ring, name) for name in _COUNTERS}


def layout_facts(needs: Transitions, *, capacity: int, schema: str) -> dict[str, Any]:
    """What must be the same when a state is restored."""
    facts = asdict(needs) | {"capacity": capacity, "schema": schema, "extras": list(needs.extras)}
    del facts["batch"]
    return facts


def check_layout(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """ConfigError where a state belongs to a replay of another kind."""
    other = {name: (saved.get(name), value) for name, value in mine.items() if saved.get(name) != value}
    if other:
        told = ", ".join(f"{name} {was!r}, now {now!r}" for name, (was, now) in other.items())
        raise ConfigError(f"a saved replay does not fit this one: {told}; restore with the settings it was saved with")


class RingReader:
    """Rebuilds a ring from its state; `placed` yields what to write, then `gone` lists what could not be read."""

    def __init__(self, ring: Ring, layout: RowLayout, needs: Transitions) -> None:
        self.gone: list[Stretch] = []
        self._ring, self._layout, self._needs = ring, layout, needs
        self._recent: dict[uuid.UUID, tuple[int, dict[str, Array]]] = {}  # a session's newest chunk and its last rows
        self._missing: set[ChunkId] = set()

    def placed(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks, *, weight: Array
    ) -> Iterator[Placed]:
        """One stretch after the other; `weight` holds the weights of all rows."""
        ring = self._ring
        ring.stretches.clear()
        ring.tails.clear()
        for name in _COUNTERS:
            setattr(ring, name, int(facts[name]))
        stretches = [
            Stretch(uuid.UUID(bytes=session.tobytes()), **dict(zip(_NUMBERS, numbers.tolist(), strict=True)))
            for session, numbers in zip(arrays["sessions"], arrays["places"], strict=True)
        ]
        tails = _saved_tails(arrays)
        wanted = _wanted(stretches)
        source = _Source(read(wanted))
        asked = iter(wanted)
        for number, stretch in enumerate(stretches):
            chunk = self._read_up_to((stretch.session, stretch.chunk_no), asked, source)
            if chunk is not None and not self._lacks(stretch):
                ring.stretches[stretch.session, stretch.chunk_no] = stretch
                yield self._place(stretch, chunk, weight=weight, tail=tails.get(number))
                continue
            self.gone.append(stretch)
            if chunk is not None:
                self._remember(chunk, {})

    def _read_up_to(self, last: ChunkId, asked: Iterator[ChunkId], source: "_Source") -> Chunk | None:
        """The chunk `last`; those asked for before it serve as lead-in."""
        for one in asked:
            chunk = source.take(one)
            if chunk is None:
                self._missing.add(one)
            if one == last:
                return chunk
            if chunk is not None:
                self._remember(chunk, self._lead_for(chunk.meta.session, chunk.meta.chunk_no))
        return None

    def _lacks(self, stretch: Stretch) -> bool:
        return any((stretch.session, number) in self._missing for number in range(stretch.lead_from, stretch.chunk_no))

    def _lead_for(self, session: uuid.UUID, chunk_no: int) -> dict[str, Array]:
        before, lead = self._recent.get(session, (-1, {}))
        return lead if before + 1 == chunk_no else {}

    def _remember(self, chunk: Chunk, lead: Mapping[str, Array]) -> dict[str, Array]:
        """The last rows of the chunk's open episode, kept for the chunk that follows it."""
        meta = chunk.meta
        own = rows_of(chunk.columns, self._layout.take(chunk), weight=1.0)
        if chunk.columns["is_first"][0]:
            lead = {}
        n_open = self._ring.windows_of(join_rows(lead, own), 0, needs=self._needs).n_open
        kept = self._ring.lead_after(lead, own, n_open=n_open, chunk_no=meta.chunk_no)
        if meta.chunk_no > self._recent.get(meta.session, (-1, {}))[0]:
            self._recent[meta.session] = meta.chunk_no, kept
        return kept

    def _place(self, stretch: Stretch, chunk: Chunk, *, weight: Array, tail: "_SavedTail | None") -> Placed:
        lead = self._lead_of(stretch)
        rows = self._layout.take(chunk)
        own = rows_of(chunk.columns, rows, weight=1.0)
        windows = self._ring.windows_of(join_rows(lead, own), stretch.lead, needs=self._needs)
        last = self._remember(chunk, lead)
        if tail is not None:
            n_rows, weights, priorities = tail
            kept = {name: column[len(column) - n_rows :].copy() for name, column in last.items()} if n_rows else {}
            if kept:
                kept["weight"], kept["priority"] = weights.copy(), priorities.copy()
            self._ring.tails[stretch.session] = Tail(stretch, ends_open(chunk.columns), kept)
        windows.weight[:] = weight[stretch.start : stretch.start + stretch.n_rows]
        return Placed(stretch, (lead, rows) if lead else (rows,), windows, ())

    def _lead_of(self, stretch: Stretch) -> dict[str, Array]:
        if stretch.lead == 0:
            return {}
        if stretch.lead_from == stretch.chunk_no:  # evicted: the rows stay empty, and nothing reads them
            return self._empty_rows(stretch)
        lead = self._lead_for(stretch.session, stretch.chunk_no)
        return {name: column[len(column) - stretch.lead :] for name, column in lead.items()}

    def _empty_rows(self, stretch: Stretch) -> dict[str, Array]:
        n = stretch.lead
        rows = {name: np.zeros((n, *kept.shape), kept.dtype) for name, kept in self._layout.columns.items()}
        flags = {name: np.zeros(n, np.bool_) for name in ("is_first", "terminated")}
        columns: dict[str, Array] = {"row": np.zeros(n, np.uint8), "reward": np.zeros(n, np.float32), **flags}
        return rows_of(columns, rows, weight=0.0) | {"chunk_no": np.full(n, stretch.chunk_no - 1, np.int64)}


_SavedTail = tuple[int, Array, Array]


class _Source:
    """Chunks in the order they were asked for, some of which may be missing."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._next = next(chunks, None)

    def take(self, wanted: ChunkId) -> Chunk | None:
        chunk = self._next
        if chunk is None or (chunk.meta.session, chunk.meta.chunk_no) != wanted:
            return None
        self._next = next(self._chunks, None)
        return chunk


def _wanted(stretches: Sequence[Stretch]) -> list[ChunkId]:
    """Every chunk that is needed, before or with the first stretch that needs it."""
    wanted: dict[ChunkId, None] = {}
    for stretch in stretches:
        numbers = range(stretch.lead_from, stretch.chunk_no + 1)
        wanted.update(((stretch.session, number), None) for number in numbers)
    return list(wanted)


def _saved_tails(arrays: Mapping[str, Array]) -> dict[int, _SavedTail]:
    tails, at = {}, 0
    for number, n_rows in arrays["tails"].tolist():
        tails[number] = n_rows, arrays["tail_weights"][at : at + n_rows], arrays["tail_priorities"][at : at + n_rows]
        at += n_rows
    return tails


def _n_rows(lead: Mapping[str, Array]) -> int:
    return len(lead["chunk_no"]) if lead else 0
