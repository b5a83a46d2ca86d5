"""Tape: what an actor's envs did during one collect, a row of all envs per time step; cut into chunks at its end.

    time-major [steps, envs] ─► rows of env 0 | rows of env 1 | ...   each: steps, and a row behind every end or cut

All columns move by the same index arithmetic, so that a chunk is a set of views and costs no loop over its steps.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from understudy.core.builder import raw_name
from understudy.core.chunk import CUT_BYTES, MAX_STEPS, REQUIRED, By, EpisodeNote, RowKind
from understudy.core.game import GameSpec
from understudy.core.tensors import Array
from understudy.core.writer import raw_space

Flags = NDArray[np.bool_]
_ROOM_BYTES = CUT_BYTES - 8 * 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """Episodes that ended and what was last seen of them; one row each, in the order of time."""

    step: NDArray[np.int64]
    env: NDArray[np.int64]
    next_seed: NDArray[np.int64]
    """Of the episode that began behind it."""
    seen: dict[str, Array]
    """Observation columns and, where the game has it, `legal`."""
    inputs: dict[str, Array]
    """What a policy would decide on, where first priorities are wanted."""


Ending = tuple[NDArray[np.int64], dict[str, Array], dict[str, Array]]
"""Of the episodes that ended with one time step, by env: `next_seed`, `seen` and `inputs`."""


def _joined(parts: list[Ending], ended: Flags) -> Ends:
    step, env = ended.nonzero()
    if not parts:
        return Ends(step, env, step, {}, {})
    seeds, *columns = zip(*parts, strict=True)
    seen, inputs = ({name: np.concatenate([rows[name] for rows in kind]) for name in kind[0]} for kind in columns)
    return Ends(step, env, np.concatenate(seeds), seen, inputs)


@dataclass(eq=False)
class Tape:
    """Columns that are written step by step and used again by the next collect."""

    game: GameSpec
    steps: int
    num_envs: int
    has_raw: bool
    q_size: int
    """How many action values are kept for first priorities; 0 for none."""
    open_seeds: list[int] = field(default_factory=list)
    """For each env the seed of the episode that was open when the tape began."""
    ending: list[Ending] = field(default_factory=list)
    """For each time step at which something ended."""

    def __post_init__(self) -> None:
        size = (self.steps, self.num_envs)
        more = (self.steps + 1, self.num_envs)
        self.obs = {name: np.empty((*more, *one.shape), one.dtype) for name, one in self.game.obs_columns.items()}
        space = self.game.action[""]
        self.action: Array = np.empty((*size, *space.shape), space.dtype)
        self.raw_action: Array | None = None
        if self.has_raw:
            self.raw_action = np.empty((*size, *space.shape), raw_space(space).dtype)
        discrete = self.game.discrete
        self.legal = np.empty((*more, discrete.n), np.bool_) if self.game.has_legal and discrete else None
        self.q = np.empty((*more, self.q_size), np.float32) if self.q_size else None
        self.reward = np.empty(size, np.float64)
        self.logp = np.empty(size, np.float32)
        self.terminated, self.truncated = np.empty(size, np.bool_), np.empty(size, np.bool_)

    def fits(self, steps: int, *, has_raw: bool, q_size: int) -> bool:
        return (self.steps, self.has_raw, self.q_size) == (steps, has_raw, q_size)

    def rewind(self, open_seeds: list[int]) -> None:
        self.open_seeds, self.ending = open_seeds, []

    def close(self) -> None:
        """Put together what was noted step by step; call when the last step is written."""
        self.ended: Flags = self.terminated | self.truncated
        self.ends = _joined(self.ending, self.ended)

    def rows(self, *, is_first: Flags, version: int, priority: Array | None) -> list["Cut"]:
        """Every chunk's columns and notes, env by env; `is_first` bool[steps, envs]."""
        ended = self.ended
        layout = _layout(ended, self._chunk_steps(ended))
        columns = self._columns(layout, ended, is_first)
        is_step = columns["row"] == RowKind.STEP
        columns["version"], columns["by"] = is_step * np.uint32(version), is_step * np.uint8(By.BOT)
        if priority is not None:
            columns["priority"] = layout.decided(priority)
        begins = self._begins(layout)
        return [
            _cut(columns, layout, env, chunk=chunk, begins=begins[env])
            for env in range(self.num_envs)
            for chunk in layout.chunks
        ]

    def _begins(self, layout: "Layout") -> list[list["Begin"]]:
        """For each env its episodes; those that begin behind the tape have no row in it, and any will do."""
        begins: list[list[Begin]] = [[(-1, 0, seed)] for seed in self.open_seeds]
        first, envs = self.ends.step + 1, self.ends.env
        rows = layout.at[np.minimum(first, self.steps - 1), envs]
        columns = (column.tolist() for column in (envs, first, rows, self.ends.next_seed))
        for env, step, row, seed in zip(*columns, strict=True):
            begins[env].append((step, row, seed))
        return begins

    def seeds_ended(self) -> list[int]:
        """The seed of each episode that ended, in the order of `ends`."""
        seeds, ended = self.open_seeds.copy(), []
        for env, next_seed in zip(self.ends.env.tolist(), self.ends.next_seed.tolist(), strict=True):
            ended.append(seeds[env])
            seeds[env] = next_seed
        return ended

    def _columns(self, layout: "Layout", ended: Flags, is_first: Flags) -> dict[str, Array]:
        decided = {
            "action": self.action, "reward": self.reward.astype(REQUIRED["reward"]), "terminated": self.terminated,
            "truncated": self.truncated, "is_first": is_first, "logp": self.logp,
        }  # fmt: skip
        if self.raw_action is not None:
            decided[raw_name("action")] = self.raw_action
        columns = {name: layout.decided(column) for name, column in decided.items()}
        columns["row"] = np.zeros(layout.n_rows, np.uint8)
        columns["row"][layout.behind] = np.where(ended[layout.closes], RowKind.FINAL, RowKind.BOOTSTRAP)
        last = layout.at[self.ends.step, self.ends.env] + 1
        for name, seen in self._seen().items():
            columns[name] = layout.seen(seen)
            if len(last):
                columns[name][last] = self.ends.seen[name]
        return columns

    def _seen(self) -> dict[str, Array]:
        return self.obs if self.legal is None else {**self.obs, "legal": self.legal}

    def _chunk_steps(self, ended: Flags) -> int:
        """Steps per chunk, so that a body whose columns do not shrink stays below what may travel."""
        raw = self.raw_action[0, 0].nbytes if self.raw_action is not None else 0
        row_bytes = self.game.row_bytes + raw + 13  # logp, priority, version, by
        steps = MAX_STEPS
        while steps > 1:
            longest = np.add.reduceat(ended, np.arange(0, self.steps, steps), axis=0, dtype=np.int64).max()
            if (min(steps, self.steps) + int(longest) + 1) * row_bytes <= _ROOM_BYTES:
                break
            steps //= 2
        return steps


Begin = tuple[int, int, int]
"""An episode's first step, -1 where it began earlier; the row of that step; its seed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One chunk to be: whose it is, which steps of the tape it holds, its columns and its episodes."""

    env: int
    first: int
    n_steps: int
    columns: dict[str, Array]
    notes: tuple[EpisodeNote, ...]


def _cut(columns: dict[str, Array], layout: "Layout", env: int, *, chunk: tuple[int, int], begins: list[Begin]) -> Cut:
    first, last = chunk
    start, stop = int(layout.at[first, env]), int(layout.at[last, env]) + 2
    running = [seed for step, _, seed in begins if step <= first][-1]
    notes = [EpisodeNote(row=0, seed=running)]
    notes += [EpisodeNote(row=row - start, seed=seed) for step, row, seed in begins if first < step <= last]
    rows = {name: column[start:stop] for name, column in columns.items()}
    return Cut(env, first, last + 1 - first, rows, tuple(notes))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each step goes in columns that hold the rows of env 0, then those of env 1, and so on."""

    at: NDArray[np.int64]  # [steps, envs]
    closes: Flags  # [steps, envs], where a final or bootstrap row follows
    behind: NDArray[np.int64]  # those rows, in the order of closes
    source: NDArray[np.int64]  # [rows], which moment each row shows: step * envs + env
    chunks: list[tuple[int, int]]
    """First and last step of each chunk; the same for every env."""

    @property
    def n_rows(self) -> int:
        return len(self.source)

    def decided(self, column: Array) -> Array:
        """[steps, envs, ...] as rows; zeros where no step is."""
        # Rows behind the last step show a moment that has no decision; what is read instead is zeroed.
        rows = column.reshape(-1, *column.shape[2:]).take(self.source, 0, mode="clip")
        rows[self.behind] = 0
        return rows

    def seen(self, column: Array) -> Array:
        """[steps + 1, envs, ...] as rows; a row behind a step shows the next moment, even when that is a reset's."""
        return column.reshape(-1, *column.shape[2:]).take(self.source, 0)


def _layout(ended: Flags, chunk_steps: int) -> Layout:
    n_steps, num_envs = ended.shape
    chunks = [(first, min(first + chunk_steps, n_steps) - 1) for first in range(0, n_steps, chunk_steps)]
    closes = ended.copy()
    closes[[last for _, last in chunks]] = True
    n_behind = np.cumsum(closes, 0)
    per_env = n_steps + n_behind[-1]
    start = np.cumsum(per_env) - per_env
    at = start + np.arange(n_steps)[:, None] + n_behind - closes
    source = np.empty(int(per_env.sum()), np.int64)
    moments = np.arange(n_steps * num_envs)
    source[at.ravel()] = moments
    behind = at[closes] + 1
    source[behind] = moments[closes.ravel()] + num_envs
    return Layout(at, closes, behind, source, chunks)
