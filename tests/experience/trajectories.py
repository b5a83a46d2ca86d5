"""Reference trajectories and their chunks, built step by step without the code under test."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

ENDS = ("terminated", "truncated", "cut")


@dataclass(frozen=True)
class Step:
    """One reference step: the moment of its decision (a unique number), its reward and the next
    moment."""

    moment: int
    after: int
    reward: float
    episode: int
    is_first: bool
    end: str | None  # how the episode ended with this step: one of ENDS, or None


@dataclass(frozen=True)
class Trajectory:
    """The steps of a session and after which of them its chunks are cut."""

    steps: tuple[Step, ...]
    cuts: frozenset[int]

    def chunk_steps(self) -> list[list[Step]]:
        """The steps of each chunk, in order."""
        chunks: list[list[Step]] = [[]]
        for number, step in enumerate(self.steps):
            chunks[-1].append(step)
            if number in self.cuts and number + 1 < len(self.steps):
                chunks.append([])
        return chunks

    def columns(self) -> list[dict[str, Any]]:
        """The columns of each chunk; `obs` is the number of the moment."""
        return [rows_of(steps) for steps in self.chunk_steps()]


def rows_of(steps: list[Step]) -> dict[str, Any]:
    """The rows of one chunk with these steps, written one by one."""
    rows: list[tuple[int, int, bool, bool, bool, float]] = []
    for number, step in enumerate(steps):
        flags = (step.is_first, step.end == "terminated", step.end == "truncated")
        rows.append((step.moment, 0, *flags, step.reward))
        if step.end in ("terminated", "truncated"):
            rows.append((step.after, 1, False, False, False, 0.0))
        elif step.end == "cut" or number + 1 == len(steps):
            rows.append((step.after, 2, False, False, False, 0.0))
    obs, row, is_first, terminated, truncated, reward = zip(*rows, strict=True)
    return {
        "obs": np.array(obs, np.int64),
        "row": np.array(row, np.uint8),
        "is_first": np.array(is_first, np.bool_),
        "terminated": np.array(terminated, np.bool_),
        "truncated": np.array(truncated, np.bool_),
        "reward": np.array(reward, np.float32),
    }


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The joined columns of consecutive chunks, without the bootstrap rows that are repeated."""
    ends = [
        -1 if before["row"][-1] == 2 and not after["is_first"][0] else None
        for before, after in pairwise(chunks)
    ]
    parts = list(zip(chunks, [*ends, None], strict=True))
    return {name: np.concatenate([chunk[name][:end] for chunk, end in parts]) for name in chunks[0]}


def walked(columns: Any, start: int, *, n: int, discount: float) -> tuple[float, float, int]:
    """(return, discount, row to bootstrap from) of the n steps at a row, computed row by row."""
    returns = 0.0
    steps = 0
    while steps < n and columns["row"][start + steps] == 0:
        returns += discount**steps * float(columns["reward"][start + steps])
        steps += 1
    row_discount = 0.0 if columns["terminated"][start + steps - 1] else discount**steps
    return returns, row_discount, start + steps


def stacked(columns: Any, row: int, *, k: int) -> list[int] | None:
    """The rows of a stack, oldest first, found one at a time; None if frames are missing."""
    rows = [row]
    while len(rows) < k:
        first = rows[0]
        if columns["is_first"][first]:
            rows.insert(0, first)
        elif first > 0 and columns["row"][first - 1] == 0:
            rows.insert(0, first - 1)
        else:
            return None
    return rows


@st.composite
def trajectories(draw: st.DrawFn, *, max_episodes: int = 5, max_steps: int = 9) -> Trajectory:
    """Random sessions; the last episode may be open."""
    lengths = draw(st.lists(st.integers(1, max_steps), min_size=1, max_size=max_episodes))
    ends = [draw(st.sampled_from(ENDS)) for _ in lengths]
    last_is_open = draw(st.booleans())
    steps: list[Step] = []
    moment = 0
    for episode, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        for number in range(length):
            ended = (
                end
                if number + 1 == length and not (last_is_open and episode + 1 == len(lengths))
                else None
            )
            reward = float(draw(st.integers(-4, 4)))
            steps.append(Step(moment, moment + 1, reward, episode, number == 0, ended))
            moment += 1
        moment += 1  # the final observation is a moment of its own
    cuts = frozenset(number for number in range(len(steps)) if draw(st.booleans()))
    return Trajectory(tuple(steps), cuts)
