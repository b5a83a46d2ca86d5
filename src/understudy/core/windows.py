"""Windows over one session's rows: n-step transitions and frame stacks that cross chunk cuts.

A chunk that ends in the middle of an episode repeats its last observation, as a bootstrap row, in the next chunk's
first row. A window that goes on skips that bootstrap row; where nothing continues it, the bootstrap row is the end.

Two forms with the same answers: `join` lays a few chunks side by side, for data that is at hand; `ChunkTable` moves
row ids from chunk to chunk by arithmetic, for data larger than memory, and reads only the rows it names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.chunk import REQUIRED, RowKind
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]

Gather = Callable[[str, Ids], Array]
"""Values of a column at row ids of any shape; the answer has the shape of the ids."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows of consecutive chunks laid side by side, without the bootstrap rows that the next chunk repeats."""

    chunk: Ids  # int64[rows], index of the source chunk
    source_row: Ids  # int64[rows], row within the source chunk
    row: NDArray[np.uint8]
    is_first: Flags
    terminated: Flags
    truncated: Flags
    reward: Floats
    begins: Flags
    """Where an episode begins, or where its beginning is not here (then `is_first` is False)."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class NStep:
    """One window per start; the value to learn is `returns + factor * value(bootstrap)`."""

    start: Ids
    n_steps: NDArray[np.int64]
    """How many rewards the return holds: n, or fewer where the episode's known end came first."""
    returns: Floats
    bootstrap: Ids
    """The row to bootstrap from; its observation may be padding where `factor` is 0."""
    factor: Floats
    """discount^n_steps, or 0 where the last step terminated."""
    terminated: Flags
    truncated: Flags
    waiting: Flags
    """Shorter than n only because the session's next chunk has not come yet: not to be used as it is."""


@dataclass(frozen=True, slots=True)
class Stack:
    """For each row the last k observations, oldest first; before a reset the episode's first is repeated."""

    rows: Ids  # int64[rows, k]
    may_sample: Flags
    """False where frames are missing, because the data begins in the middle of an episode."""


def join(chunks: Sequence[Mapping[str, Array]]) -> Joined:
    """The columns of chunks with consecutive numbers as one sequence of rows; split at gaps before calling."""
    keep = [_rows_kept(chunk, after) for chunk, after in zip(chunks, [*chunks[1:], None], strict=False)]
    columns: dict[str, Any] = {
        name: np.concatenate([np.empty(0, dtype), *(chunk[name][:n] for chunk, n in zip(chunks, keep, strict=True))])
        for name, dtype in REQUIRED.items()
    }
    row, is_first = columns["row"], columns["is_first"]
    counts = np.asarray(keep, np.int64)
    begins = np.ones(len(row), np.bool_)
    begins[1:] = is_first[1:] | (row[:-1] != RowKind.STEP)
    return Joined(
        chunk=np.repeat(np.arange(len(chunks), dtype=np.int64), counts),
        source_row=np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts),
        begins=begins,
        **columns,
    )


def _rows_kept(chunk: Mapping[str, Array], after: Mapping[str, Array] | None) -> int:
    n_rows = len(chunk["row"])
    continued = after is not None and chunk["row"][-1] == RowKind.BOOTSTRAP and not after["is_first"][0]
    return n_rows - 1 if continued else n_rows


def n_step(joined: Joined, *, n: int, discount: float, session_open: bool) -> NStep:
    """The window of every start. `session_open`: the last chunk may still be continued, so its last starts wait.

    Say False when the session closed, was cut, continues behind a gap, or was idle for 60 s.
    """
    _check_n(n)
    is_step = joined.row == RowKind.STEP
    start = np.flatnonzero(is_step).astype(np.int64)
    stops = np.flatnonzero(~is_step)
    stop = stops[np.searchsorted(stops, start)].astype(np.int64)  # the episode's known end, behind its last step
    steps = np.minimum(n, stop - start)
    rewards = joined.reward[np.minimum(start[:, None] + np.arange(n), len(joined) - 1)]  # float32[starts, n]
    last = start + steps - 1
    waits = session_open and len(joined) > 0 and bool(joined.row[-1] == RowKind.BOOTSTRAP)
    return _windows(
        start=start, steps=steps, rewards=rewards, bootstrap=start + steps, discount=discount,
        terminated=joined.terminated[last], truncated=joined.truncated[last],
        waiting=(steps < n) & (stop == len(joined) - 1) & waits,
    )  # fmt: skip


def _windows(
    *, start: Ids, steps: Ids, rewards: Array, bootstrap: Ids, discount: float, terminated: Flags, truncated: Flags,
    waiting: Flags,
) -> NStep:  # fmt: skip
    powers = np.power(float(discount), np.arange(rewards.shape[1] + 1))
    inside = np.arange(rewards.shape[1]) < steps[:, None]
    returns = np.where(inside, rewards.astype(np.float64) * powers[:-1], 0.0).sum(axis=1)
    factor = np.where(terminated, 0.0, powers[steps])
    return NStep(
        start, steps, returns.astype(np.float32), bootstrap, factor.astype(np.float32), terminated, truncated, waiting
    )


def stack(joined: Joined, *, k: int) -> Stack:
    """The last k observations of every row, final and bootstrap rows included."""
    _check_n(k)
    at = np.arange(len(joined), dtype=np.int64)
    begin = np.maximum.accumulate(np.where(joined.begins, at, 0)) if len(at) else at
    rows = np.maximum(at[:, None] - np.arange(k - 1, -1, -1), begin[:, None])
    return Stack(rows, joined.is_first[begin] | (at - begin >= k - 1))


def _check_n(n: int) -> None:
    if n < 1:
        raise ConfigError(f"a window of {n} steps; give a number from 1, such as 3")


@dataclass(frozen=True, slots=True)
class Moved:
    """Where row ids came to, and by how many steps each stopped short of where it was sent."""

    ids: Ids
    short: Ids


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where chunks lie in a space of row ids, and which chunk continues which one's last episode.

    Chunk c holds the ids `start[c] .. start[c] + n_rows[c] - 1`; starts rise. The bootstrap row of a chunk that is
    continued and row 0 of the chunk that continues it are the same moment; moving names it by the latter.
    """

    start: Ids
    n_rows: Ids
    continues_in: Ids
    """The chunk whose first row repeats this one's bootstrap row, or -1; `link` finds it."""
    continued_from: Ids
    may_continue: Flags | None = None
    """Chunks whose continuation may still come, so that their last starts wait; none by default."""

    def chunk_of(self, ids: Ids) -> Ids:
        """The chunk that holds each row id."""
        return np.searchsorted(self.start, ids, side="right").astype(np.int64) - 1

    def advance(self, ids: Ids, steps: Ids | int) -> Moved:
        """Row ids some steps later in the session; they stop at the last row known. Episode ends do not stop them."""
        ids, chunk = self._located(ids, steps)
        at = ids - self.start[chunk] + steps
        while True:
            hops = (at >= self.n_rows[chunk] - 1) & (self.continues_in[chunk] >= 0)
            if not hops.any():
                break
            at = np.where(hops, at - (self.n_rows[chunk] - 1), at)
            chunk = np.where(hops, self.continues_in[chunk], chunk)
        short = np.maximum(at - (self.n_rows[chunk] - 1), 0)
        return Moved(self.start[chunk] + at - short, short)

    def back(self, ids: Ids, steps: Ids | int) -> Moved:
        """Row ids some steps earlier in the session; they stop at the first row known. Resets do not stop them."""
        ids, chunk = self._located(ids, steps)
        at = ids - self.start[chunk] - steps
        while True:
            hops = (at < 0) & (self.continued_from[chunk] >= 0)
            if not hops.any():
                break
            chunk = np.where(hops, self.continued_from[chunk], chunk)
            at = np.where(hops, at + (self.n_rows[chunk] - 1), at)
        short = np.maximum(-at, 0)
        return Moved(self.start[chunk] + at + short, short)

    def _located(self, ids: Ids, steps: Ids | int) -> tuple[Ids, Ids]:
        ids = np.asarray(ids, np.int64)
        shape = np.broadcast_shapes(ids.shape, np.shape(steps))
        return np.broadcast_to(ids, shape), np.broadcast_to(self.chunk_of(ids), shape)

    def n_step(self, ids: Ids, gather: Gather, *, n: int, discount: float) -> NStep:
        """The windows that start at these ids, which must be steps; reads n + 1 rows of each."""
        _check_n(n)
        path = self.advance(np.asarray(ids, np.int64)[:, None], np.arange(n + 1)).ids  # int64[ids, n + 1]
        # A chunk's last row is never a step, so a path that stopped short repeats a row that ends the window.
        kind = gather("row", path[:, 1:])
        stops = kind != RowKind.STEP
        steps = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, n).astype(np.int64)
        lane = np.arange(len(path))
        unfinished = (steps < n) & (kind[lane, steps - 1] == RowKind.BOOTSTRAP)
        last, bootstrap = path[lane, steps - 1], path[lane, steps]
        return _windows(
            start=path[:, 0], steps=steps, rewards=gather("reward", path[:, :-1]), bootstrap=bootstrap,
            discount=discount, terminated=gather("terminated", last), truncated=gather("truncated", last),
            waiting=unfinished & self._waits(bootstrap),
        )  # fmt: skip

    def _waits(self, ids: Ids) -> Flags:
        if self.may_continue is None:
            return np.zeros(len(ids), np.bool_)
        chunk = self.chunk_of(ids)
        at_end = ids == self.start[chunk] + self.n_rows[chunk] - 1
        waits: Flags = at_end & self.may_continue[chunk] & (self.continues_in[chunk] < 0)
        return waits

    def stack(self, ids: Ids, gather: Gather, *, k: int) -> Stack:
        """The last k observations of the rows with these ids."""
        _check_n(k)
        moved = self.back(np.asarray(ids, np.int64)[:, None], np.arange(k - 1, -1, -1))
        is_first = gather("is_first", moved.ids)
        resets = is_first.any(axis=1)
        begin = np.where(resets, k - 1 - is_first[:, ::-1].argmax(axis=1), 0)  # the latest reset in the window
        column = np.maximum(np.arange(k), begin[:, None])
        return Stack(np.take_along_axis(moved.ids, column, axis=1), resets | (moved.short[:, 0] == 0))


def link(*, session: Array, chunk_no: Array, starts_episode: Flags, ends_open: Flags) -> tuple[Ids, Ids]:
    """`continues_in` and `continued_from` of chunks in any order, one entry each.

    `session` is any number that stands for the session, `starts_episode` the first row's is_first, and `ends_open`
    whether the last row is a bootstrap row.
    """
    n_chunks = len(session)
    continues_in, continued_from = np.full(n_chunks, -1, np.int64), np.full(n_chunks, -1, np.int64)
    order = np.lexsort((chunk_no, session))
    before, after = order[:-1], order[1:]
    follows = (session[before] == session[after]) & (chunk_no[before] + 1 == chunk_no[after])
    follows &= ends_open[before] & ~starts_episode[after]
    continues_in[before[follows]] = after[follows]
    continued_from[after[follows]] = before[follows]
    return continues_in, continued_from
