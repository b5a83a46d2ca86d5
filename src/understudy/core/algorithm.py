"""The Algorithm port: what a learner hands to an algorithm, and what comes back.

    chunks ─► replay or rollout ─► update(state, batch, knobs) ─► state ─► policy ─► actors and games

An algorithm is a frozen dataclass of two fields, `Name(game, config)`, whose methods are pure JAX functions: same
arguments, same bits. It holds no data, does no I/O and knows no loop. What travels through `jax.jit` is a NamedTuple,
which JAX takes apart by itself, so this page needs no JAX. Arrays are `Any` here: NumPy's outside, JAX's inside.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as _field
from typing import Any, NamedTuple, Protocol

from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.heads import Decision as Decision
from understudy.core.policy import Policy

# --- What one update eats --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """One update eats `batch` n-step transitions, sampled from a replay."""

    batch: int
    n_step: int = 1
    discount: float = 0.99
    stack: int = 1
    """Observations per input, oldest first; 1 means the observation itself, without an axis for it."""
    prioritised: bool = False
    is_cloning: bool = False
    """Learns what others did, so its own actors have nothing to teach it."""
    extras: tuple[str, ...] = ()
    """Optional columns it reads as well, such as `logp`."""

    def __post_init__(self) -> None:
        _check_counts(batch=self.batch, n_step=self.n_step, stack=self.stack)
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount is {self.discount}; give a number from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """One update eats `steps` consecutive steps of each of `envs` envs, played with the weights it will update."""

    steps: int
    envs: int
    stack: int = 1

    def __post_init__(self) -> None:
        _check_counts(steps=self.steps, envs=self.envs, stack=self.stack)


class Batch(NamedTuple):
    """n-step transitions; learn `reward + factor * value(next_obs)`."""

    obs: Mapping[str, Any]  # column name -> [batch, (stack,) ...], dtype of the space
    action: Any  # int32[batch] counted from 0, or float32[batch, size]
    reward: Any  # float32[batch], discounted sum of the window's rewards
    next_obs: Mapping[str, Any]
    factor: Any  # float32[batch], discount^steps; 0 where the game terminated
    weight: Any  # float32[batch], importance weights; 1 where sampling is uniform
    legal: Any = None  # bool[batch, actions], or None where the game has no masks
    next_legal: Any = None  # a row that allows nothing, of a game that was stopped, says nothing: take all as legal
    extras: Mapping[str, Any] = {}


class Rollout(NamedTuple):
    """Time-major steps of several envs; `next_obs` is what each step led to, before any reset."""

    obs: Mapping[str, Any]  # [steps, envs, (stack,) ...]
    action: Any  # int32[steps, envs], or float32[steps, envs, size]: raw, before clip or tanh
    reward: Any  # float32[steps, envs]
    next_obs: Mapping[str, Any]
    terminated: Any  # bool[steps, envs]
    truncated: Any
    logp: Any  # float32[steps, envs], under the policy that acted
    legal: Any = None  # bool[steps, envs, actions] or None


# --- What comes back -------------------------------------------------------------------------------------------------


class Feedback(NamedTuple):
    """What an update says about itself; the learner keeps the old state where `ok` is False."""

    metrics: Mapping[str, Any]
    ok: Any  # bool: loss, gradient norm and every row are as they should be
    row_ok: Any  # bool[batch]: rows that did not spoil it
    priorities: Any = None  # float32[batch]: `prioritised` Transitions must tell them
    ratio_error: Any = None  # float32: max |ratio - 1| before the first gradient step; Rollouts must tell it


class Algorithm(Protocol):
    """A rule that turns batches into weights.

    `Config` and `Knobs` are frozen dataclasses of its own, with `setting` fields: a config is fixed for a run, since
    a change means a new compilation; knobs are numbers or schedules, and `update` gets their values of the moment.

    Three names of knobs have a meaning outside of `update`, for algorithms that have them:
    `epsilon`: the share of random actions its actors play with; an `epsilon_greedy` head needs it.
    `importance`: how far, from 0 to 1, `Batch.weight` undoes what priorities do; without it, every weight is 1.
    `learning_rate`: halved each time a run has to go back to its last checkpoint.
    """

    Config: Any
    Knobs: Any

    @property
    def game(self) -> GameSpec: ...

    @property
    def needs(self) -> Transitions | Rollouts: ...

    def init(self, key: Any, start: Mapping[str, Any] | None = None) -> Any:
        """The first state, a pytree of arrays; `start` holds weights by name to begin with where they fit."""
        ...

    def act(self, state: Any, obs: Mapping[str, Any], key: Any, explore: Any, legal: Any = None) -> Decision:
        """What the exported policy does, in JAX: for devices and lanes."""
        ...

    def update(self, state: Any, batch: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        """All that is done with one batch; knobs are float32 scalars by name."""
        ...

    def policy(self, state: Any) -> Policy:
        """The policy as data, with NumPy weights: what actors and games run."""
        ...


# --- Knobs: numbers that may change while training, without a new compilation ---------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """A number that moves in a straight line from `start` to `end` over the first `until` of a run, then stays."""

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in (self.start, self.end)) or not 0 < self.until <= 1:
            raise ConfigError(f"a schedule {self}; give finite numbers, and an until above 0 and at most 1")

    def at(self, progress: float) -> float:
        """Its value when this share of the run is done."""
        share = min(1.0, max(0.0, progress) / self.until)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class Range:
    """What a setting may be, for checks, help texts and searches."""

    low: float
    high: float
    says: str


def setting(default: Any, low: float, high: float, says: str) -> Any:
    """A dataclass field with its range and its line of help."""
    return _field(default=default, metadata={"range": Range(low, high, says)})


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give a whole number from 1")
