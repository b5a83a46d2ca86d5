"""Ranking: orders policies by what recorded steps tell about their returns, without playing them.

    recorded steps + each policy's choices ─► fitted Q evaluation ─► a value for each policy

Each policy has a Q network of its own. Q of a recorded action is fitted to its reward plus the
discounted value of the next observation, in which the policy chooses, not the recorded player. A
policy's value is its mean over the recorded observations. Four measures let this converge within
a few thousand updates, and keep policies that leave the recorded play from diverging:

* Q is learned as the difference from the mean value of recorded play, so that it starts near the
  truth and not at 0;
* targets stay within the values that the recorded rewards allow;
* layers are normalised, which bounds what a network says about observations that it never saw;
* targets come from a slow copy of the networks.

Values of policies that choose what was hardly ever recorded mean nothing: `Estimate.support` tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.game import GameSpec
from understudy.learn import flat, networks
from understudy.learn.adam import Adam, AdamState
from understudy.learn.architecture import network_for
from understudy.nn.network import Dense, NetworkSpec
from understudy.nn.policy import Policy

RARE = 0.02
"""An action that the recorded players choose with a lower probability has no support."""
_PER_CALL = 64
"""Updates in one compiled call."""
_MIN_SCALE = 1e-6
"""Of Q, for games whose rewards are all alike."""
_MAX_HORIZON = 1_000.0
"""Steps that a value looks ahead at most, for games that never end."""
_VALUED_STEPS = 8_192
"""Recorded observations over which a policy's value is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingConfig:
    """How policies are evaluated on recorded steps."""

    updates: int = 3_072
    """Updates of each Q network; their time grows with the number of policies."""
    batch: int = 256
    """Steps per update, the same for all policies."""
    widths: tuple[int, ...] = (64, 64)
    """Widths of the dense layers of each Q network."""
    learning_rate: float = 1e-3
    """It falls to a tenth of this."""
    target_rate: float = 0.02
    """Rate at which the targets' copy follows the networks (tau)."""
    min_support: float = 0.9
    """Share of a policy's choices that recorded players must make too, at least rarely."""

    def __post_init__(self) -> None:
        if min(self.updates, self.batch, *self.widths) < 1:
            raise ConfigError(
                f"updates is {self.updates}, batch {self.batch} and widths "
                f"{joined(self.widths)}; give whole numbers from 1"
            )
        if not (self.learning_rate > 0 and 0 < self.target_rate <= 1):
            raise ConfigError(
                f"learning_rate is {self.learning_rate} and target_rate {self.target_rate}; give a "
                "learning_rate above 0 and a target_rate above 0 and at most 1"
            )
        if not 0 <= self.min_support <= 1:
            raise ConfigError(f"min_support is {self.min_support}; give a share from 0 to 1")


class Choices(NamedTuple):
    """The probabilities with which policies choose each action in recorded observations."""

    now: NDArray[np.float32]  # float32[policies, steps, actions]
    next: NDArray[np.float32]  # the same for the next observation of each step


@dataclass(frozen=True, slots=True)
class Estimate:
    """What recorded steps tell about a policy."""

    value: float
    """Its discounted return, a mean over the recorded observations; for comparisons only."""
    support: float
    """Share of its choices, in recorded observations, that recorded players make too."""
    is_supported: bool


class _State(NamedTuple):
    weights: Any  # float32[policies, size]
    target: Any
    optimiser: AdamState


def choices_of(policies: Sequence[Policy], steps: Batch) -> Choices:
    """The choices of policies with discrete actions, computed once for all updates."""
    return Choices(
        np.stack([_chances(policy, steps.obs, steps.action_mask) for policy in policies]),
        np.stack([_chances(policy, steps.next_obs, steps.next_action_mask) for policy in policies]),
    )


def _chances(policy: Policy, obs: Any, action_mask: Array | None) -> NDArray[np.float32]:
    if policy.head.kind != "categorical":
        raise ConfigError(
            f"a policy with a head {policy.head.kind!r} cannot be ranked; give one of bc or iql "
            "with discrete actions"
        )
    logits = policy.outputs(obs)["logits"].astype(np.float64)
    if action_mask is not None:
        # A row without a valid action is the end of an episode that was stopped.
        is_valid = np.asarray(action_mask) | ~np.any(action_mask, axis=1, keepdims=True)
        logits = np.where(is_valid, logits, -np.inf)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True), np.float32)


def estimates(
    game: GameSpec,
    steps: Batch,
    choices: Choices,
    *,
    recorded: NDArray[np.float32],
    config: RankingConfig,
    seed: int,
) -> list[Estimate]:
    """An estimate for each policy, with the arguments of `Ranking`."""
    ranking = Ranking(game, steps, choices, recorded=recorded, config=config, seed=seed)
    while ranking.step():
        pass
    return ranking.estimates()


def best_of(ranked: Sequence[Estimate]) -> int | None:
    """The index of the supported policy with the highest value, the first of several; or None."""
    supported = [
        index
        for index, estimate in enumerate(ranked)
        if estimate.is_supported and np.isfinite(estimate.value)
    ]
    return max(supported, key=lambda index: ranked[index].value, default=None)


# --- Fitted Q evaluation --------------------------------------------------------------------------


class Ranking:
    """Evaluates policies on recorded steps, a call of updates at a time.

    The same arguments lead to the same bits. `recorded`: float32[steps, actions], the probabilities
    with which the recorded players choose, such as those of a clone. Steps without weight do not
    count.
    """

    def __init__(
        self,
        game: GameSpec,
        steps: Batch,
        choices: Choices,
        *,
        recorded: NDArray[np.float32],
        config: RankingConfig,
        seed: int,
    ) -> None:
        n_policies, _, n_actions = choices.now.shape
        self._steps = steps
        self._choices = choices
        self._config = config
        counts = np.asarray(steps.weight, np.float64)
        if not counts.sum() > 0:
            raise ConfigError("no recorded step has a weight, so nothing can be ranked on them")
        self._shares = counts / counts.sum()
        self._support = (choices.now * (recorded >= RARE)).sum(2) @ self._shares
        self._updates = 0
        self._rng = np.random.default_rng(seed)
        self._network = network_for(
            game,
            heads={"q": (Dense(n_actions, gain=0.1),)},
            widths=config.widths,
            layer_norm=True,
            observation_norm=True,
        )
        rewards, self._mean, self._scale, ends = _scaled(steps)
        chances = np.moveaxis(choices.next, 0, 1)
        columns = (steps.obs, steps.action, rewards, steps.next_obs, steps.discount, steps.weight)
        # An argument of the compiled call: constants would be written to JAX's cache on disk, where
        # nothing erases a player's steps.
        self._data = jax.tree.map(jnp.asarray, (*columns, chances))
        self._ends = jnp.asarray(ends, jnp.float32)

        def call(state: _State, data: Any, ends: Any, rows: Any, rates: Any) -> _State:
            def update(state: _State, drawn: Any) -> tuple[_State, None]:
                batch = jax.tree.map(lambda column: column[drawn[0]], data)
                updated = _update(
                    self._network, state, batch, ends=ends, config=config, rate=drawn[1]
                )
                return updated, None

            return jax.lax.scan(update, state, (rows, rates))[0]

        self._call = jax.jit(call)
        observe = partial(flat.observe, self._network, obs=steps.obs, limits=steps.obs_limits)
        keys = jax.random.split(jax.random.key(seed), n_policies)
        weights = jnp.stack([observe(flat.first_weights(key, self._network)) for key in keys])
        self._state = _State(weights, weights, jax.vmap(_ADAM.init)(weights))

    def step(self) -> bool:
        """Run one compiled call of updates; False if all were made before."""
        config = self._config
        if self._updates >= config.updates:
            return False
        progress = (self._updates + np.arange(_PER_CALL)) / config.updates
        rates = config.learning_rate * (1 - 0.9 * np.minimum(progress, 1.0))
        rows = self._rng.integers(len(self._steps.action), size=(_PER_CALL, config.batch))
        self._state = self._call(
            self._state, self._data, self._ends, rows, rates.astype(np.float32)
        )
        self._updates += _PER_CALL
        return True

    def estimates(self) -> list[Estimate]:
        """An estimate for each policy, by the updates so far."""
        rows = np.random.default_rng(0).choice(
            len(self._steps.action), size=_VALUED_STEPS, p=self._shares
        )
        obs = {name: column[rows] for name, column in self._steps.obs.items()}
        q = jax.jit(partial(_q, self._network))(self._state.target, obs)
        values = (self._choices.now[:, rows] * np.asarray(q, np.float64)).sum(2).mean(1)
        return [
            Estimate(float(value), float(share), bool(share >= self._config.min_support))
            for value, share in zip(self._mean + self._scale * values, self._support, strict=True)
        ]


_ADAM = Adam(epsilon=1e-8)
_MAX_GRADIENT = 10.0


def _scaled(steps: Batch) -> tuple[NDArray[np.float32], float, float, tuple[float, float]]:
    """Rewards for Q as the difference from recorded play, in units of its spread.

    Returns the rewards, the mean value of recorded play, the unit, and the limits of targets.
    """
    counts = np.asarray(steps.weight) > 0
    reward = np.asarray(steps.reward, np.float64)[counts]
    discount = np.asarray(steps.discount, np.float64)[counts]
    horizon = min(1 / max(1 - discount.mean(), 1e-9), _MAX_HORIZON)
    mean = float(reward.mean() * horizon)
    # What a step brings more than expected, if the next value is the mean; 0 on average.
    surprise = reward + discount * mean - mean
    scale = max(float(np.sqrt(np.square(surprise).mean() * horizon)), _MIN_SCALE)
    longest = min(1 / max(1 - discount.max(), 1e-9), _MAX_HORIZON)
    low = min(reward.min(), reward.min() * longest)
    high = max(reward.max(), reward.max() * longest)
    ends = ((low - mean) / scale, (high - mean) / scale)
    rewards = (np.asarray(steps.reward) + np.asarray(steps.discount) * mean - mean) / scale
    return rewards.astype(np.float32), mean, scale, ends


def _update(
    network: NetworkSpec,
    state: _State,
    batch: Any,
    *,
    ends: Any,
    config: RankingConfig,
    rate: Any,
) -> _State:
    """One gradient step of every policy's Q towards its own target."""
    obs, action, reward, next_obs, discount, weight, chances = batch
    next_q = _q(network, state.target, next_obs)  # float32[policies, batch, actions]
    next_value = (jnp.moveaxis(chances, 1, 0) * next_q).sum(2)
    target = jnp.clip(reward + discount * next_value, ends[0], ends[1])
    is_chosen = jax.nn.one_hot(action, next_q.shape[2])

    def loss(weights: Any) -> Any:
        error = (_q(network, weights, obs) * is_chosen).sum(2) - target
        # A sum over policies: the gradient of each does not depend on the others.
        return (weight * jnp.square(error)).mean(1).sum()

    adam = jax.vmap(partial(_ADAM.update, max_gradient=_MAX_GRADIENT))
    moves, optimiser = adam(jax.grad(loss)(state.weights), state.optimiser)
    weights = state.weights - rate * moves
    follow = config.target_rate * (weights - state.target)
    return _State(weights, state.target + follow, optimiser)


def _q(network: NetworkSpec, weights: Any, obs: Any) -> Any:
    """Q of every action by each policy's network, float32[policies, batch, actions]."""

    def q_of(vector: Any) -> Any:
        return networks.apply(network, flat.unpack(network, vector), obs)["q"]

    return jax.vmap(q_of)(weights)
