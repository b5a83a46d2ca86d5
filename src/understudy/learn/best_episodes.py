"""The best recorded episodes, by their returns: what filtered cloning learns from.

    chunk ─► pieces_of ─► returns_of ─► least_return ─► rows_from ─► the rows that are cloned

An episode may span several chunks, so a chunk holds pieces of episodes. The return of an episode
is known if all of its pieces are: from its first step to its end, without a cut or a missing chunk.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.experience.chunk import Chunk, ChunkId, RowKind

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Pieces(NamedTuple):
    """The pieces of episodes in one chunk, in their order."""

    n_rows: NDArray[np.int64]
    """Steps, and the row after the last one."""
    reward: Floats
    """Sums of rewards."""
    largest: Floats
    """The largest sizes of rewards."""
    is_start: Bools
    """Whether the episode starts here; only the first piece may continue an earlier chunk's."""
    is_end: Bools
    """Whether the episode was played to its end here, terminated or truncated."""
    ends_open: bool
    """Whether the last episode may continue in the next chunk."""


def pieces_of(chunk: Chunk) -> Pieces:
    """The pieces of episodes in a chunk."""
    row = chunk.columns["row"]
    lasts = np.flatnonzero(row != RowKind.STEP)
    starts = np.append(0, lasts[:-1] + 1)
    # Rows that are not steps have padding instead of rewards.
    rewards = np.where(row == RowKind.STEP, chunk.columns["reward"], 0).astype(np.float64)
    return Pieces(
        lasts - starts + 1,
        np.add.reduceat(rewards, starts),
        np.maximum.reduceat(np.abs(rewards), starts),
        chunk.columns["is_first"][starts],
        row[lasts] == RowKind.FINAL,
        chunk.ends_open,
    )


def returns_of(pieces: Mapping[ChunkId, Pieces], *, max_reward: float) -> dict[ChunkId, Floats]:
    """By chunk, the return of the whole episode of each piece; NaN if it is not known.

    That of an episode with a reward above `max_reward` is not believed, so it is not known either.
    """
    returns = {}
    for key, own in pieces.items():
        is_known = own.is_start & own.is_end & (own.largest <= max_reward)
        returns[key] = np.where(is_known, own.reward, np.nan)
    for key, own in pieces.items():
        if not own.is_start[-1] or not own.ends_open:
            continue
        chunks = [key, *_continued(key, pieces)]
        if len(chunks) == 1:
            continue
        parts = [(own.reward[-1], own.largest[-1])]
        parts += [(pieces[later].reward[0], pieces[later].largest[0]) for later in chunks[1:]]
        if max(largest for _, largest in parts) <= max_reward:
            whole = math.fsum(reward for reward, _ in parts)
            returns[key][-1] = whole
            for later in chunks[1:]:
                returns[later][0] = whole
    return returns


def _continued(key: ChunkId, pieces: Mapping[ChunkId, Pieces]) -> list[ChunkId]:
    """The chunks that continue the last episode of a chunk to its end; none if one is missing."""
    session, number = key
    chunks: list[ChunkId] = []
    while True:
        number += 1
        own = pieces.get((session, number))
        if own is None or own.is_start[0]:
            return []
        chunks.append((session, number))
        if own.is_end[0]:
            return chunks
        if len(own.is_end) > 1 or not own.ends_open:  # it was cut
            return []


def known_returns(pieces: Mapping[ChunkId, Pieces], returns: Mapping[ChunkId, Floats]) -> Floats:
    """The returns of all episodes whose return is known, in ascending order."""
    every = np.concatenate(
        [np.empty(0), *(returns[key][own.is_start] for key, own in pieces.items())]
    )
    return np.sort(every[~np.isnan(every)])


def known_steps(
    pieces: Mapping[ChunkId, Pieces], returns: Mapping[ChunkId, Floats]
) -> tuple[int, int]:
    """How many steps are of episodes whose return is known, and how many there are."""
    n_known = 0
    n_steps = 0
    for key, own in pieces.items():
        steps = own.n_rows - 1
        n_known += int(steps.sum(where=~np.isnan(returns[key])))
        n_steps += int(steps.sum())
    return n_known, n_steps


def least_return(
    pieces: Mapping[ChunkId, Pieces],
    returns: Mapping[ChunkId, Floats],
    share: float,
    *,
    min_steps: int = 0,
) -> float:
    """The lowest return among the best share of the episodes; infinity if no return is known.

    With `min_steps`, the share is larger, up to a half, where it would be fewer steps than these.
    If then less than half of the steps are of episodes whose return is known, all count.
    """
    known = known_returns(pieces, returns)
    if min_steps:
        n_known, n_steps = known_steps(pieces, returns)
        if 2 * n_known < n_steps:
            return -math.inf
        share = max(share, min(0.5, min_steps / max(1, n_known)))
    if not len(known):
        return math.inf
    # The tolerance is for rounding: 0.07 * 100 is 7.000000000000001.
    n_best = max(1, math.ceil(share * len(known) - 1e-9))
    return float(known[-n_best])


def rows_from(
    pieces: Mapping[ChunkId, Pieces], returns: Mapping[ChunkId, Floats], least: float
) -> dict[ChunkId, Bools]:
    """By chunk, the rows of episodes with at least this return."""
    return {key: np.repeat(returns[key] >= least, own.n_rows) for key, own in pieces.items()}
