"""The Algorithm port: what a learner hands to an algorithm, and what comes back.

    chunks ─► replay or rollout ─► update(state, batch, knobs) ─► state ─► policy ─► actors, games

An algorithm is a frozen dataclass of two fields, `Name(game, config)`, whose methods are pure JAX
functions: same arguments, same bits. It holds no data, does no I/O and knows no loop. What travels
through `jax.jit` is a NamedTuple, which JAX takes apart by itself, so this page needs no JAX.
Arrays are `Any` here: NumPy's outside, JAX's inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from understudy.core.errors import ConfigError
from understudy.core.settings import Range as Range
from understudy.core.settings import Schedule as Schedule
from understudy.core.settings import setting as setting
from understudy.experience.game import GameSpec
from understudy.nn.heads import Decision as Decision
from understudy.nn.policy import Policy

# --- What one update eats -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """One update eats `batch` n-step transitions, sampled from a replay."""

    batch: int
    n_step: int = 1
    discount: float = 0.99
    stack: int = 1
    """Observations per input, oldest first; 1 means the observation itself, without an axis for
    it."""
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
    """One update eats `steps` consecutive steps of each of `envs` envs, played with the weights
    it will update."""

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
    action_mask: Any = None  # bool[batch, actions], or None where the game has no masks
    # a row that allows nothing, of a game that was stopped, says nothing: take all as legal
    next_action_mask: Any = None
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
    action_mask: Any = None  # bool[steps, envs, actions] or None


# --- What comes back ------------------------------------------------------------------------------


class Feedback(NamedTuple):
    """What an update says about itself; the learner keeps the old state where `ok` is False."""

    metrics: Mapping[str, Any]
    ok: Any  # bool: loss, gradient norm and every row are as they should be
    row_ok: Any  # bool[batch]: rows that did not spoil it
    priorities: Any = None  # float32[batch]: `prioritised` Transitions must tell them
    ratio_error: Any = (
        None  # float32: max |ratio - 1| before the first gradient step; Rollouts must tell it
    )


class Algorithm(Protocol):
    """A rule that turns batches into weights.

    `Config` and `Knobs` are frozen dataclasses of its own, with `setting` fields: a config is fixed
    for a run, since a change means a new compilation; knobs are numbers or schedules, and `update`
    gets their values of the moment.

    Three names of knobs have a meaning outside of `update`, for algorithms that have them:
    `epsilon`: the share of random actions its actors play with; an `epsilon_greedy` head needs it.
    `importance`: how far, from 0 to 1, `Batch.weight` undoes what priorities do; without it, every
    weight is 1. `learning_rate`: halved each time a run has to go back to its last checkpoint.
    """

    Config: Any
    Knobs: Any

    @property
    def game(self) -> GameSpec: ...

    @property
    def needs(self) -> Transitions | Rollouts: ...

    def init(self, key: Any, start: Mapping[str, Any] | None = None) -> Any:
        """The first state, a pytree of arrays; `start` holds weights by name to begin with where
        they fit."""
        ...

    def act(
        self, state: Any, obs: Mapping[str, Any], key: Any, explore: Any, action_mask: Any = None
    ) -> Decision:
        """What the exported policy does, in JAX: for devices and lanes."""
        ...

    def update(self, state: Any, batch: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        """All that is done with one batch; knobs are float32 scalars by name."""
        ...

    def policy(self, state: Any) -> Policy:
        """The policy as data, with NumPy weights: what actors and games run."""
        ...


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give a whole number from 1")
