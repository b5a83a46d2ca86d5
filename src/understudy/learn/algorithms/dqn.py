"""DQN with double, dueling, n-step and prioritised extensions; Ape-X uses all four.

For recorded play, a conservative term (CQL) lowers the values of actions that were not tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from understudy.algorithm import Batch, Decision, Feedback, Schedule, Transitions, setting
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.experience.spaces import describe
from understudy.learn import flat, networks
from understudy.learn.adam import Adam, norm_of
from understudy.learn.architecture import network_for
from understudy.nn.heads import Head, head_for
from understudy.nn.network import Dense, Dueling, NetworkSpec
from understudy.nn.policy import InitialPriority, Policy

_ADAM = Adam()
MAX_ERROR = 1e12
"""Rows with a larger TD error, or NaN, are invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnConfig:
    """Settings that are fixed for a run."""

    widths: tuple[int, ...] = (64, 64)
    """Widths of the trunk's layers."""
    network: NetworkSpec | None = None
    """A custom network with a head `q`, instead of the game's default."""
    batch: int = setting(64, 1, 65_536, "transitions per update")
    n_step: int = setting(3, 1, 100, "steps per transition")
    discount: float = setting(0.99, 0.0, 1.0, "discount per step (gamma)")
    stack: int = setting(1, 1, 16, "frames per observation stack")
    observation_norm: bool = setting(
        False, 0, 1, "normalise observations by their running mean and variance"
    )
    double: bool = setting(
        True, 0, 1, "the online network chooses the next action, the target network evaluates it"
    )
    dueling: bool = setting(True, 0, 1, "separate streams for state value and advantages")
    prioritised: bool = setting(True, 0, 1, "sample by TD error instead of uniformly")
    conservative: float = setting(
        0.0, 0.0, 1e3, "weight of the conservative term (CQL), for training from a store; 0: off"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnKnobs:
    """Settings that may change during a run: numbers or schedules."""

    learning_rate: float | Schedule = setting(1e-3, 1e-7, 1.0, "learning rate of Adam")
    target_rate: float | Schedule = setting(
        1.0, 1e-4, 1.0, "target update rate (tau); 1 copies the weights"
    )
    target_period: int = setting(
        128, 1, 1_000_000, "updates between two updates of the target network"
    )
    max_gradient: float | Schedule = setting(10.0, 1e-3, 1e6, "largest gradient norm")
    huber_delta: float | Schedule = setting(1.0, 1e-3, 1e6, "TD errors up to this are squared")
    epsilon: float | Schedule = setting(
        Schedule(1.0, 0.04, 0.16), 0.0, 1.0, "probability of a random action"
    )
    importance_exponent: float | Schedule = setting(
        Schedule(0.4, 1.0), 0.0, 1.0, "exponent of importance weights (beta); 1 corrects fully"
    )


class DqnState(NamedTuple):
    """Weights and target weights as vectors, the optimiser's state, and the number of updates."""

    weights: jax.Array
    target: jax.Array
    optimiser: Any
    updates: jax.Array  # int32


@dataclass(frozen=True)
class Dqn:
    """Deep Q-learning for discrete actions; action masks apply to acting and bootstrapping."""

    game: GameSpec
    config: DqnConfig = DqnConfig()

    Config = DqnConfig
    Knobs = DqnKnobs
    of_source = ("discount",)

    def __post_init__(self) -> None:
        if self.game.discrete is None:
            raise ConfigError(
                f"dqn needs one Discrete action; {self.game.game} has "
                f"{describe(self.game.action)}; use ppo, or iql for recorded play"
            )

    @property
    def needs(self) -> Transitions:
        config = self.config
        return Transitions(
            batch=config.batch,
            n_step=config.n_step,
            discount=config.discount,
            stack=config.stack,
            prioritised=config.prioritised,
        )

    @cached_property
    def network(self) -> NetworkSpec:
        config = self.config
        size = self.head.size
        q = (Dueling(size),) if config.dueling else (Dense(size, gain=1.0),)
        return config.network or network_for(
            self.game,
            heads={"q": q},
            widths=config.widths,
            stack=config.stack,
            observation_norm=config.observation_norm,
        )

    @cached_property
    def head(self) -> Head:
        return head_for(self.game, "epsilon_greedy")

    def init(self, key: Any, start: Mapping[str, Array] | None = None) -> DqnState:
        weights = flat.first_weights(key, self.network, start)
        return DqnState(weights, jnp.copy(weights), _ADAM.init(weights), jnp.zeros((), jnp.int32))

    def act(
        self,
        state: DqnState,
        obs: Mapping[str, Any],
        key: Any,
        explore: Any,
        action_mask: Any = None,
    ) -> Decision:
        return flat.decide(
            self.network,
            state.weights,
            self.head,
            obs=obs,
            key=key,
            explore=explore,
            action_mask=action_mask,
        )

    def update(
        self, state: DqnState, batch: Batch, knobs: Mapping[str, Any]
    ) -> tuple[DqnState, Feedback]:
        """One gradient step on the Huber loss of the n-step TD error, which sets the priorities."""
        weights = flat.unpack(self.network, state.weights)
        target = flat.unpack(self.network, state.target)
        loss_and_gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, error), grads = loss_and_gradient(weights, target, batch, knobs["huber_delta"])
        gradient = flat.pack(self.network, grads)
        move, optimiser = _ADAM.update(gradient, state.optimiser, knobs["max_gradient"])
        updated = state.weights - knobs["learning_rate"] * move
        updated = flat.observe(self.network, updated, batch.obs, limits=batch.obs_limits)
        updates = state.updates + 1
        is_due = updates % jnp.asarray(knobs["target_period"]).astype(jnp.int32) == 0
        rate = jnp.where(is_due, knobs["target_rate"], 0.0)
        updated_target = state.target + rate * (updated - state.target)
        norm = norm_of(gradient)
        metrics = {"loss": loss, "gradient_norm": norm, "error": jnp.abs(error).mean()}
        row_ok = jnp.abs(error) < MAX_ERROR
        ok = jnp.isfinite(loss) & jnp.isfinite(norm) & row_ok.all()
        feedback = Feedback(metrics, ok, row_ok, priorities=jnp.abs(error) + 1e-6)
        return DqnState(updated, updated_target, optimiser, updates), feedback

    def _loss(self, weights: Any, target: Any, batch: Batch, delta: Any) -> tuple[Any, Any]:
        q = networks.apply(self.network, weights, batch.obs)["q"]  # float32[batch, actions]
        q_taken = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
        error = jax.lax.stop_gradient(self._td_target(weights, target, batch)) - q_taken
        size = jnp.abs(error)
        small = jnp.minimum(size, delta)  # only small errors are squared: 1e30^2 overflows
        huber = 0.5 * small * small + delta * (size - small)
        if self.config.conservative:  # lowers Q of actions that were not recorded
            taken = jax.nn.one_hot(batch.action, q.shape[1], dtype=jnp.bool_)
            valid = True if batch.action_mask is None else batch.action_mask | taken
            gap = jax.nn.logsumexp(q, axis=1, where=valid) - q_taken
            huber = huber + self.config.conservative * gap
        return (batch.weight * huber).mean(), error

    def _td_target(self, weights: Any, target: Any, batch: Batch) -> Any:
        """The n-step TD target; never bootstraps from an invalid action.

        The mask of a truncated episode's last state may be all False; then every action counts as
        valid, since the game was not over.
        """
        next_q = networks.apply(self.network, target, batch.next_obs)["q"]
        selection = next_q
        if self.config.double:
            selection = networks.apply(self.network, weights, batch.next_obs)["q"]
        if batch.next_action_mask is not None:
            has_no_mask = ~batch.next_action_mask.any(axis=1, keepdims=True)
            mask = batch.next_action_mask | has_no_mask
            selection = jnp.where(mask, selection, -jnp.inf)
        best = jnp.argmax(selection, axis=1)
        value = jnp.take_along_axis(next_q, best[:, None], axis=1)[:, 0]
        return batch.reward + batch.discount * value

    def policy(self, state: DqnState) -> Policy:
        config = self.config
        priority = None
        if config.prioritised:
            priority = InitialPriority(n_step=config.n_step, discount=config.discount)
        weights = flat.unpack(self.network, np.asarray(state.weights))
        return Policy(
            self.game, self.network, weights, self.head, stack=config.stack, priority=priority
        )
