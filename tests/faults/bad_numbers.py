"""Injects NaN, infinities and 1e30 into a training: by game, chunks, replay ring or gradient."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from understudy.experience.chunk import Chunk, RowKind
from understudy.learn.algorithms.dqn import Dqn, DqnState
from understudy.learn.replay import HostReplay
from understudy.ports import Collected

BAD = (np.nan, np.inf, -np.inf, 1e30)
ChunkId = tuple[Any, int]


def is_bad(column: Any) -> Any:
    """bool[...]: NaN, infinite or absurdly large."""
    return ~(np.abs(column) <= 1e20)


@dataclass(slots=True)
class Poison:
    """Poisons at chosen occasions, counted from 0, and remembers where."""

    occasions: set[int]
    rng: np.random.Generator
    columns: tuple[str, ...] = ("obs", "reward")
    """Which columns of a chunk; a learner refuses only what it reads."""
    n_occasions: int = 0
    chunks: set[ChunkId] = field(default_factory=set)
    """What must be named."""

    def is_due(self) -> bool:
        self.n_occasions += 1
        return self.n_occasions - 1 in self.occasions

    def value(self) -> float:
        return float(self.rng.choice(BAD))

    def collected(self, collected: Collected) -> Collected:
        """What an actor brought, with one bad number in one chunk where it is due."""
        if not self.is_due():
            return collected
        at = int(self.rng.integers(len(collected.chunks)))
        chunks = list(collected.chunks)
        chunks[at] = self._chunk(chunks[at])
        self.chunks.add((chunks[at].meta.session, chunks[at].meta.chunk_no))
        return replace(collected, chunks=chunks)

    def _chunk(self, chunk: Chunk) -> Chunk:
        columns = {name: column.copy() for name, column in chunk.columns.items()}
        column = columns[str(self.rng.choice(self.columns))]
        column[self.rng.choice(np.flatnonzero(columns["row"] == RowKind.STEP))] = self.value()
        return Chunk(chunk.meta, columns)

    def ring(self, replay: HostReplay) -> None:
        """One bad number in one row that may be sampled, where it is due."""
        if not self.is_due():
            return
        masses: Any = replay._masses
        rows = (
            masses.rows[: len(masses)]
            if hasattr(masses, "rows")
            else np.flatnonzero(masses.leaves > 0)
        )
        row = self.rng.choice(rows)
        value = self.value()
        if self.rng.random() < 0.5:
            replay._columns["obs"][row] = value
        else:
            replay._facts[row, 0] = value  # the row's return

    def rollout(self, rollout: Any, played: Any) -> Any:
        """A rollout with one bad number in one env's steps, where it is due."""
        if not self.is_due():
            return rollout
        env = int(self.rng.integers(len(played)))
        step = int(self.rng.integers(rollout.reward.shape[1]))
        name = str(self.rng.choice(["reward", "logp"]))
        column = np.array(getattr(rollout, name))
        column[0, step, env] = self.value()
        self.chunks.update(played[env])
        return rollout._replace(**{name: column})


# --- the gradient ---------------------------------------------------------------------------------


@jax.custom_vjp
def spoil(weights: Any, value: Any) -> Any:
    """The weights as they are; `value` is added to their gradient."""
    return weights


def _forth(weights: Any, value: Any) -> tuple[Any, Any]:
    return weights, value


def _back(value: Any, gradient: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda leaf: leaf + value, gradient), jnp.zeros_like(value)


spoil.defvjp(_forth, _back)


class SpoiledDqn(Dqn):
    """Dqn whose gradient is bad where `spoils` returns true."""

    @staticmethod
    def spoils(state: DqnState, batch: Any, knobs: Mapping[str, Any]) -> Any:
        """What is added to the gradient of this update."""
        raise NotImplementedError

    def update(self, state: DqnState, batch: Any, knobs: Mapping[str, Any]) -> Any:
        return super().update(
            state, batch._replace(extras={"value": self.spoils(state, batch, knobs)}), knobs
        )

    def _loss(self, weights: Any, target: Any, batch: Any, delta: Any) -> tuple[Any, Any]:
        return super()._loss(spoil(weights, batch.extras["value"]), target, batch, delta)


def lot(reward: Any, action: Any) -> Any:
    """A number that differs for each batch: int[...] from [..., batch]; equal in NumPy and JAX."""
    return ((reward * 8).astype("int32") * 7 + action * 13 + 3).sum(-1)


class SometimesSpoiled(SpoiledDqn):
    """About one update in eleven, by what its batch holds."""

    @staticmethod
    def spoils(state: DqnState, batch: Any, knobs: Mapping[str, Any]) -> Any:
        number = lot(batch.reward, batch.action)
        return jnp.where(number % 11 == 0, jnp.array(BAD, jnp.float32)[number // 11 % 4], 0.0)


class SpoiledWhileFast(SpoiledDqn):
    """Bad from some update on while the learning rate is above 7e-4; every row looks bad."""

    def update(self, state: DqnState, batch: Any, knobs: Mapping[str, Any]) -> Any:
        updated, told = super().update(state, batch, knobs)
        return updated, told._replace(row_ok=told.row_ok & (self.spoils(state, batch, knobs) == 0))

    @staticmethod
    def spoils(state: DqnState, batch: Any, knobs: Mapping[str, Any]) -> Any:
        return jnp.where((state.updates >= 40) & (knobs["learning_rate"] > 7e-4), jnp.nan, 0.0)


# --- a game ---------------------------------------------------------------------------------------


class BadGame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A game with occasional bad rewards and observations, deterministic by seed."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._rng = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._rng.random() < 0.01:
            reward = float(self._rng.choice(BAD))
        if self._rng.random() < 0.01:
            obs = np.full_like(obs, self._rng.choice(BAD))
        return obs, reward, terminated, truncated, info
