"""The Algorithm port: what a learner passes to an algorithm, and what it returns.

    chunks ─► replay or rollout ─► update(state, batch, knobs) ─► state ─► policy ─► actors, games

An algorithm is a frozen dataclass with two fields, `Name(game, config)`, whose methods are pure JAX
functions: the same arguments return the same bits. It holds no data, does no I/O and contains no
training loop. Values that cross `jax.jit` are NamedTuples, which JAX treats as pytrees, so this
module does not import JAX. Arrays are typed `Any`: NumPy outside of `jax.jit`, JAX inside.
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

# --- The input of one update ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """One update consumes `batch` n-step transitions, sampled from a replay."""

    batch: int
    n_step: int = 1
    discount: float = 0.99
    stack: int = 1
    """Observations per input, oldest first; 1 means a single observation without a stack axis."""
    prioritised: bool = False
    is_cloning: bool = False
    """The algorithm imitates recorded players, so it cannot learn from actors of its own run."""
    best_share: float = 1.0  # of a store's episodes: those with the highest returns
    best_steps: int = 0  # with fewer steps in these, more episodes: see learn/best_episodes.py
    extras: tuple[str, ...] = ()
    """Optional columns that `update` also reads, such as `logp`."""

    def __post_init__(self) -> None:
        _check_counts(batch=self.batch, n_step=self.n_step, stack=self.stack)
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount is {self.discount}; give a number from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """One update consumes `steps` consecutive steps of `envs` envs, played by the newest policy."""

    steps: int
    envs: int
    stack: int = 1

    def __post_init__(self) -> None:
        _check_counts(steps=self.steps, envs=self.envs, stack=self.stack)


class Batch(NamedTuple):
    """n-step transitions; the target is `reward + discount * value(next_obs)`."""

    obs: Mapping[str, Any]  # column name -> [batch, (stack,) ...], dtype of the space
    action: Any  # int32[batch] counted from 0, or float32[batch, size]
    reward: Any  # float32[batch], discounted sum of the rewards of the n steps
    next_obs: Mapping[str, Any]
    discount: Any  # float32[batch], the discount setting ^ steps; 0 where the game terminated
    weight: Any  # float32[batch], importance weights; 1 where sampling is uniform
    action_mask: Any = None  # bool[batch, actions], or None where the game has no masks
    # If a row has no valid action, the episode was stopped there: treat every action as valid.
    next_action_mask: Any = None
    extras: Mapping[str, Any] = {}
    # column name -> float32[2, ...], the lowest and highest value that running statistics use, or
    # None: learners from recorded play set it, since a few players may send false values
    obs_limits: Any = None


class Rollout(NamedTuple):
    """Time-major steps of several envs; `next_obs` follows each step, before any reset."""

    obs: Mapping[str, Any]  # [steps, envs, (stack,) ...]
    action: Any  # int32[steps, envs], or float32[steps, envs, size]: raw, before clip or tanh
    reward: Any  # float32[steps, envs]
    next_obs: Mapping[str, Any]
    terminated: Any  # bool[steps, envs]
    truncated: Any
    logp: Any  # float32[steps, envs], log probability under the policy that acted
    action_mask: Any = None  # bool[steps, envs, actions] or None


# --- The output of one update ---------------------------------------------------------------------


class Feedback(NamedTuple):
    """The report of an update; the learner keeps the old state where `ok` is False."""

    metrics: Mapping[str, Any]
    ok: Any  # bool: the loss, the gradient norm and every row are valid
    row_ok: Any  # bool[batch]: False for rows that made the update invalid
    priorities: Any = None  # float32[batch]; required with `prioritised` Transitions
    # float32, the largest |ratio - 1| of the learner's to the actor's action probabilities before
    # the first gradient step, where they should be equal; required with Rollouts
    ratio_error: Any = None


class Algorithm(Protocol):
    """A rule that turns batches into weights.

    `Config` and `Knobs` are frozen dataclasses of the algorithm with `setting` fields. A config is
    fixed for a run, since a change would recompile the program. Knobs are numbers or schedules;
    `update` receives their current values.

    Three knob names also have a meaning outside of `update`, for algorithms that define them:
    `epsilon`: the share of random actions among those of its actors; required by an
    `epsilon_greedy` head.
    `importance_exponent`: how far, from 0 to 1, `Batch.weight` corrects for prioritised sampling;
    without it, every weight is 1.
    `learning_rate`: halved each time a run returns to its last checkpoint.

    `of_source` (optional): names of `Config` that only `needs` reads, such as `discount`. Runs that
    differ only in these and in knobs can share a program.
    """

    Config: Any
    Knobs: Any

    @property
    def game(self) -> GameSpec: ...

    @property
    def needs(self) -> Transitions | Rollouts: ...

    def init(self, key: Any, start: Mapping[str, Any] | None = None) -> Any:
        """Return the first state, a pytree of arrays.

        `start` holds initial weights by name; those that fit the network are used.
        """
        ...

    def act(
        self, state: Any, obs: Mapping[str, Any], key: Any, explore: Any, action_mask: Any = None
    ) -> Decision:
        """Return the same decision as the exported policy, computed in JAX.

        This code also runs on devices, and in many runs at once (lanes).
        """
        ...

    def update(self, state: Any, batch: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        """Return the state after learning from one batch; knobs are float32 scalars by name."""
        ...

    def policy(self, state: Any) -> Policy:
        """Return the policy as data with NumPy weights, as actors and games run it."""
        ...


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give a whole number from 1")
