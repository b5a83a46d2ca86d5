"""Tape: records the steps of one `Actor.collect`, for all envs at once, and cuts them into chunks.

    time-major [steps, envs] ─► rows of env 0 | rows of env 1 | ...
                                each: its steps, and a final or bootstrap row after the
                                      last step of every episode and chunk

All columns are reordered by the same index, so a chunk is a set of views and needs no loop over its
steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.builder import raw_name
from understudy.experience.chunk import CUT_BYTES, MAX_STEPS, REQUIRED, By, EpisodeNote, RowKind
from understudy.experience.game import GameSpec
from understudy.experience.writer import raw_space
from understudy.nn.heads import LOWEST_VALID, masked

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
_MAX_ROWS_BYTES = CUT_BYTES - 8 * 1024
UNKNOWN_SEED = -1
"""The seed of an episode that a vector env started by itself."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ended episodes with their final observations; one row each, in order of time."""

    step: Ints
    env: Ints
    next_seed: Ints
    """The seed of the env's next episode."""
    final_obs: dict[str, Array]
    """Observation columns and, if the game has it, `action_mask`."""
    inputs: dict[str, Array]
    """The policy's inputs at the episodes' ends; empty unless initial priorities are computed."""


Ending = tuple[Ints, dict[str, Array], dict[str, Array]]
"""`next_seed`, `final_obs` and `inputs` of the episodes that ended at one time step, by env."""


class Cut(NamedTuple):
    """One chunk to build; `number` counts its env's chunks, `first` its env's steps before it."""

    env: int
    number: int
    first: int
    n_steps: int
    columns: dict[str, Array]
    notes: tuple[EpisodeNote, ...]


@dataclass(eq=False)
class Tape:
    """The arrays of one collect, written step by step; the next collect writes into them again."""

    game: GameSpec
    steps: int
    num_envs: int
    has_raw: bool
    q_size: int
    """The number of action values per step, stored for initial priorities; 0 for none."""
    open_seeds: list[int] = field(default_factory=list)
    """The seed of each env's episode that was open when the tape started."""
    ending: list[Ending] = field(default_factory=list)
    """One entry for each time step at which an episode ended."""

    def __post_init__(self) -> None:
        size = (self.steps, self.num_envs)
        more = (self.steps + 1, self.num_envs)
        self.obs = {
            name: np.empty((*more, *column.shape), column.dtype)
            for name, column in self.game.obs_columns.items()
        }
        space = self.game.action[""]
        self.action: Array = np.empty((*size, *space.shape), space.dtype)
        self.raw_action: Array | None = None
        if self.has_raw:
            self.raw_action = np.empty((*size, *space.shape), raw_space(space).dtype)
        discrete = self.game.discrete
        self.action_mask = (
            np.empty((*more, discrete.n), np.bool_)
            if self.game.has_action_mask and discrete
            else None
        )
        self.q = np.empty((*more, self.q_size), np.float32) if self.q_size else None
        self.reward = np.empty(size, np.float64)
        self.raw_reward: NDArray[np.float64] | None = None
        """Rewards below any wrappers; None if the envs have none."""
        self.logp = np.empty(size, np.float32)
        self.terminated = np.empty(size, np.bool_)
        self.truncated = np.empty(size, np.bool_)
        self.skipped = np.zeros(size, np.bool_)
        """Steps of the vector env that only reset an env; they have no row."""

    def close(self) -> None:
        """Set `ended` and `ends` from what was written; call after the last step."""
        self.ended: Flags = self.terminated | self.truncated
        step, env = self.ended.nonzero()
        self.ends = Ends(step, env, step, {}, {})
        if self.ending:
            seeds, *columns = zip(*self.ending, strict=True)
            final_obs, inputs = (
                {name: np.concatenate([rows[name] for rows in kind]) for name in kind[0]}
                for kind in columns
            )
            self.ends = Ends(step, env, np.concatenate(seeds), final_obs, inputs)

    def cuts(self, *, is_open: Flags, version: int, priority: Array | None) -> Iterator[Cut]:
        """Yield every chunk, env by env; `is_open`, bool[envs]: the tape continues an episode."""
        layout = Layout(self.ended, skipped=self.skipped, chunk_steps=self._chunk_steps())
        starts = (self.ended | self.skipped)[:-1]
        columns = self._columns(layout, is_first=np.concatenate([~is_open[None], starts]))
        is_step = columns["row"] == RowKind.STEP
        columns["version"] = is_step * np.uint32(version)
        columns["by"] = is_step * np.uint8(By.BOT)
        if priority is not None:
            columns["priority"] = layout.step_rows(priority)
        # For each env, its episodes: the first step (-1 if it was before the tape), the row of that
        # step, and the seed. An episode that starts after the tape has no row; its entry is unused.
        begins = [[(-1, 0, seed)] for seed in self.open_seeds]
        envs = self.ends.env
        first = self.ends.step + 1
        first += self.skipped[np.minimum(first, self.steps - 1), envs]
        rows = layout.at[np.minimum(first, self.steps - 1), envs]
        of_episodes = (column.tolist() for column in (envs, first, rows, self.ends.next_seed))
        for env, step, row, seed in zip(*of_episodes, strict=True):
            begins[env].append((step, row, seed))
        firsts = [first for first, _ in layout.chunks]
        lasts = [last for _, last in layout.chunks]
        # [chunks][envs]: rows of a chunk, how many of its steps are skipped, and if its first is.
        starts_at = layout.at[firsts].tolist()
        stops_at = (layout.at[lasts] + layout.n_rows[lasts]).tolist()
        n_skipped = np.add.reduceat(self.skipped, firsts, axis=0, dtype=np.int64).tolist()
        is_late = self.skipped[firsts].tolist()
        for env, episodes in enumerate(begins):
            number = 0
            n_before = 0
            for chunk, (begin, end) in enumerate(layout.chunks):
                n_steps = end + 1 - begin - n_skipped[chunk][env]
                if n_steps == 0:
                    continue
                start = starts_at[chunk][env]
                stop = stops_at[chunk][env]
                begin += is_late[chunk][env]
                notes = [(0, [seed for step, _, seed in episodes if step <= begin][-1])]
                notes += [
                    (row - start, seed) for step, row, seed in episodes if begin < step <= end
                ]
                yield Cut(
                    env,
                    number,
                    n_before,
                    n_steps,
                    {name: column[start:stop] for name, column in columns.items()},
                    tuple(EpisodeNote(row=row, seed=_known(seed)) for row, seed in notes),
                )
                number += 1
                n_before += n_steps

    def seeds_ended(self) -> list[int | None]:
        """Return the seed of each ended episode, in the order of `ends`; None if unknown."""
        seeds = self.open_seeds.copy()
        ended = []
        for env, next_seed in zip(
            self.ends.env.tolist(), self.ends.next_seed.tolist(), strict=True
        ):
            ended.append(_known(seeds[env]))
            seeds[env] = next_seed
        return ended

    def _columns(self, layout: "Layout", *, is_first: Flags) -> dict[str, Array]:
        decided = {
            "action": self.action,
            "reward": self.reward.astype(REQUIRED["reward"]),
            "terminated": self.terminated,
            "truncated": self.truncated,
            "is_first": is_first,
            "logp": self.logp,
        }
        if self.raw_action is not None:
            decided[raw_name("action")] = self.raw_action
        columns = {name: layout.step_rows(column) for name, column in decided.items()}
        columns["row"] = np.zeros(len(layout.source), np.uint8)
        columns["row"][layout.behind] = np.where(
            self.ended[layout.closes], RowKind.FINAL, RowKind.BOOTSTRAP
        )
        last = layout.at[self.ends.step, self.ends.env] + 1
        for name, values in (
            self.obs if self.action_mask is None else {**self.obs, "action_mask": self.action_mask}
        ).items():
            columns[name] = layout.obs_rows(values)
            if len(last):
                columns[name][last] = self.ends.final_obs[name]
        return columns

    def _chunk_steps(self) -> int:
        """Return a number of steps per chunk that keeps an uncompressed body below the limit."""
        raw = self.raw_action[0, 0].nbytes if self.raw_action is not None else 0
        row_bytes = self.game.row_bytes + raw + 13  # logp, priority, version, by
        steps = MAX_STEPS
        while steps > 1:
            longest = np.add.reduceat(
                self.ended, np.arange(0, self.steps, steps), axis=0, dtype=np.int64
            ).max()
            if (min(steps, self.steps) + int(longest) + 1) * row_bytes <= _MAX_ROWS_BYTES:
                break
            steps //= 2
        return steps


def _known(seed: int) -> int | None:
    return None if seed == UNKNOWN_SEED else seed


class Layout:
    """Maps steps to rows, in columns with all rows of env 0, then those of env 1, and so on."""

    def __init__(self, ended: Flags, *, skipped: Flags, chunk_steps: int) -> None:
        n_steps, num_envs = ended.shape
        self.chunks = [
            (first, min(first + chunk_steps, n_steps) - 1)
            for first in range(0, n_steps, chunk_steps)
        ]
        """First and last step of each chunk; the same for every env."""
        self.closes = ended.copy()  # [steps, envs], where a final or bootstrap row follows
        self.closes[[last for _, last in self.chunks]] = True
        self.closes &= ~skipped
        self.n_rows = np.where(skipped, 0, 1 + self.closes)
        """[steps, envs], how many rows each step has: itself, and a row behind it."""
        n_so_far = np.cumsum(self.n_rows, 0)
        per_env = n_so_far[-1]
        start = np.cumsum(per_env) - per_env
        self.at: Ints = start + n_so_far - self.n_rows
        """[steps, envs], the row of each step; of a skipped one, the next row."""
        self.behind: Ints = self.at[self.closes] + 1
        """The final and bootstrap rows, in the order of `closes`."""
        self.source = np.empty(int(per_env.sum()), np.int64)
        """[rows], the index of the observation in each row: step * envs + env."""
        moments = np.arange(n_steps * num_envs)
        is_step = ~skipped.ravel()
        self.source[self.at.ravel()[is_step]] = moments[is_step]
        self.source[self.behind] = moments[self.closes.ravel()] + num_envs

    def step_rows(self, column: Array) -> Array:
        """Return a column [steps, envs, ...] as rows, with zeros in rows that are not steps."""
        # Rows after the last step are past the column's end; `clip` fills them, and then they are
        # zeroed.
        rows = column.reshape(-1, *column.shape[2:]).take(self.source, 0, mode="clip")
        rows[self.behind] = 0
        return rows

    def obs_rows(self, column: Array) -> Array:
        """Return a column [steps + 1, envs, ...] as rows.

        A final row gets the next episode's first observation; the caller must overwrite it.
        """
        return column.reshape(-1, *column.shape[2:]).take(self.source, 0)


# --- Ended episodes, and the progress of open ones ------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpisodeProgress:
    """Return and length so far of each env's open episode: float64[envs] and int64[envs]."""

    return_: NDArray[np.float64]
    length: Ints


def track_episodes(
    reward: NDArray[np.float64],
    ended: Flags,
    before: EpisodeProgress,
    *,
    skipped: Flags | None = None,
) -> tuple[EpisodeProgress, NDArray[np.float64], Ints]:
    """Return the progress after these steps, and the returns and lengths of ended episodes.

    `skipped` steps do not count; their rewards must be 0.
    """
    n_steps, num_envs = reward.shape
    rewards = reward.T.flatten()  # env after env; a copy, since it is changed here
    ends = ended.T.ravel()
    first = np.arange(num_envs) * n_steps
    rewards[first] += before.return_
    begins = ends.copy()  # a part starts after an end, and at each env's first step
    begins[1:] = ends[:-1]
    begins[first] = True
    starts = np.flatnonzero(begins)
    last = np.append(starts[1:], len(rewards)) - 1
    returns = np.add.reduceat(rewards, starts)
    lengths = last + 1 - starts
    if skipped is not None:
        lengths -= np.add.reduceat(skipped.T.ravel(), starts, dtype=np.int64)
    lengths[np.searchsorted(starts, first)] += before.length
    has_ended = ends[last]
    of_env = starts // n_steps
    after = EpisodeProgress(np.zeros(num_envs), np.zeros(num_envs, np.int64))
    after.return_[of_env[~has_ended]] = returns[~has_ended]
    after.length[of_env[~has_ended]] = lengths[~has_ended]
    closed = np.flatnonzero(has_ended)
    in_time = closed[np.lexsort((of_env[closed], last[closed] % n_steps))]
    return after, returns[in_time], lengths[in_time]


# --- Initial priorities: |n-step return + discounted value - value of the action| -----------------


def best_value(q: Array, action_mask: Array | None) -> Array:
    """Return the largest value of valid actions along the last axis; if none is valid, of all."""
    best: Array = (q if action_mask is None else masked(q, action_mask)).max(-1)
    if action_mask is not None and (is_empty := best < LOWEST_VALID).any():
        best[is_empty] = q[is_empty].max(-1)
    return best


def q_of(outputs: Mapping[str, Array]) -> Array:
    """Return the action values of a network's outputs."""
    if "q" not in outputs:
        raise ConfigError(
            f"initial priorities need a head 'q', but the network has {joined(outputs)}; remove "
            "the policy's `priority`"
        )
    return outputs["q"]


def n_step_td(
    q_taken: Array, after: Array, *, reward: Array, ended: Flags, n_step: int, discount: float
) -> NDArray[np.float32]:
    """Return the absolute n-step TD error of each step, float32[steps, envs].

    Windows that would pass the last step end there and bootstrap. `q_taken` is the value of each
    step's action, `after` the value of the next state: 0 if the episode terminated.
    """
    n_steps = len(reward)
    target = np.zeros(reward.shape)
    is_open = np.ones(reward.shape, np.bool_)
    stops = ended.copy()
    stops[-1] = True
    for k in range(min(n_step, n_steps)):
        is_live = is_open[: n_steps - k]
        stop = stops[k:] if k < n_step - 1 else np.ones_like(stops[k:])
        gain = discount**k * (reward[k:] + stop * (discount * after[k:]))
        target[: n_steps - k] += np.where(is_live, gain, 0.0)
        is_live &= ~stop
    return np.abs(target - q_taken).astype(np.float32)
