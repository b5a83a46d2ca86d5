"""DQN and its family: double, dueling, n-step, prioritised. All four on is what Ape-X learns
with."""

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
from understudy.learn import flat, networks
from understudy.learn.adam import Adam, norm_of
from understudy.learn.architecture import network_for
from understudy.nn.heads import Head, head_for
from understudy.nn.network import Dense, Dueling, NetworkSpec
from understudy.nn.policy import InitialPriority, Policy

MAX_ERROR = 1e12
"""No row of a sane game is this far off; NaN is not below it either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnConfig:
    """What a run cannot change while it goes."""

    widths: tuple[int, ...] = (64, 64)
    """Widths of the trunk's layers."""
    network: NetworkSpec | None = None
    """A network of one's own with a head `q`, instead of one made from the game."""
    batch: int = setting(64, 1, 65_536, "transitions per update")
    n_step: int = setting(3, 1, 100, "steps per transition")
    discount: float = setting(0.99, 0.0, 1.0, "what a reward one step later is worth")
    stack: int = setting(1, 1, 16, "observations per input")
    double: bool = setting(
        True, 0, 1, "the online network chooses the next action, the target values it"
    )
    dueling: bool = setting(True, 0, 1, "state value and advantages apart")
    prioritised: bool = setting(True, 0, 1, "sample by error instead of uniformly")
    target_period: int = setting(128, 1, 1_000_000, "updates between two moves of the target")
    max_gradient: float = setting(10.0, 1e-3, 1e6, "longest gradient, by norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnKnobs:
    """What may change while a run goes: numbers or schedules."""

    learning_rate: float | Schedule = setting(1e-3, 1e-7, 1.0, "step of the optimiser")
    target_rate: float | Schedule = setting(1.0, 1e-4, 1.0, "how far the target moves; 1 copies")
    epsilon: float | Schedule = setting(
        Schedule(1.0, 0.04, 0.16), 0.0, 1.0, "share of random actions"
    )
    importance_exponent: float | Schedule = setting(
        Schedule(0.4, 1.0), 0.0, 1.0, "how far importance weights correct sampling"
    )


class DqnState(NamedTuple):
    """Weights and the slower target, each as one vector, the optimiser's moments, and the
    updates done."""

    weights: jax.Array
    target: jax.Array
    optimiser: Any
    updates: jax.Array  # int32


@dataclass(frozen=True)
class Dqn:
    """Deep Q-learning for discrete actions; masks are obeyed in acting and in what is
    bootstrapped from."""

    game: GameSpec
    config: DqnConfig = DqnConfig()

    Config = DqnConfig
    Knobs = DqnKnobs

    def __post_init__(self) -> None:
        if self.game.discrete is None:
            raise ConfigError(
                f"dqn needs one Discrete action, {self.game.game} has {dict(self.game.action)}; "
                "try ppo"
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
            self.game, heads={"q": q}, widths=config.widths, stack=config.stack
        )

    @cached_property
    def head(self) -> Head:
        return head_for(self.game, "epsilon_greedy")

    @cached_property
    def _adam(self) -> Adam:
        return Adam(self.config.max_gradient)

    def init(self, key: Any, start: Mapping[str, Array] | None = None) -> DqnState:
        weights = flat.first_weights(key, self.network, start)
        return DqnState(
            weights, jnp.copy(weights), self._adam.init(weights), jnp.zeros((), jnp.int32)
        )

    def act(
        self, state: DqnState, obs: Mapping[str, Any], key: Any, explore: Any, action_mask: Any = None
    ) -> Decision:
        return flat.decide(
            self.network, state.weights, self.head, obs=obs, key=key, explore=explore, action_mask=action_mask
        )

    def update(
        self, state: DqnState, batch: Batch, knobs: Mapping[str, Any]
    ) -> tuple[DqnState, Feedback]:
        """One gradient step on Huber's loss of the n-step error; feedback carries the new
        priorities."""
        weights, target = (
            flat.unpack(self.network, vector) for vector in (state.weights, state.target)
        )
        (loss, error), grads = jax.value_and_grad(self._loss, has_aux=True)(weights, target, batch)
        gradient = flat.pack(self.network, grads)
        move, optimiser = self._adam.update(gradient, state.optimiser)
        moved = flat.observe(self.network, state.weights - knobs["learning_rate"] * move, batch.obs)
        updates = state.updates + 1
        rate = jnp.where(updates % self.config.target_period == 0, knobs["target_rate"], 0.0)
        followed = state.target + rate * (moved - state.target)
        norm = norm_of(gradient)
        metrics = {"loss": loss, "gradient_norm": norm, "error": jnp.abs(error).mean()}
        row_ok = jnp.abs(error) < MAX_ERROR
        ok = jnp.isfinite(loss) & jnp.isfinite(norm) & row_ok.all()
        feedback = Feedback(metrics, ok, row_ok, priorities=jnp.abs(error) + 1e-6)
        return DqnState(moved, followed, optimiser, updates), feedback

    def _loss(self, weights: Any, target: Any, batch: Batch) -> tuple[Any, Any]:
        q = networks.apply(self.network, weights, batch.obs)["q"]  # float32[batch, actions]
        taken = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
        error = jax.lax.stop_gradient(self._wanted(weights, target, batch)) - taken
        size = jnp.abs(error)
        near = jnp.minimum(
            size, 1.0
        )  # squared only where it is small: a square of 1e30 has no gradient
        huber = 0.5 * near * near + (size - near)
        return (batch.weight * huber).mean(), error

    def _wanted(self, weights: Any, target: Any, batch: Batch) -> Any:
        """What the taken actions should be worth: no illegal action is ever bootstrapped from.

        A game that was stopped may say no more what is legal. It was not over, so that its value
        counts: of all.
        """
        following = networks.apply(self.network, target, batch.next_obs)["q"]
        chooses = (
            networks.apply(self.network, weights, batch.next_obs)["q"]
            if self.config.double
            else following
        )
        if batch.next_action_mask is not None:
            action_mask = batch.next_action_mask | ~batch.next_action_mask.any(axis=1, keepdims=True)
            chooses = jnp.where(action_mask, chooses, -jnp.inf)
        best = jnp.argmax(chooses, axis=1)
        value = jnp.take_along_axis(following, best[:, None], axis=1)[:, 0]
        return batch.reward + batch.discount * value

    def policy(self, state: DqnState) -> Policy:
        config = self.config
        priority = (
            InitialPriority(n_step=config.n_step, discount=config.discount)
            if config.prioritised
            else None
        )
        weights = flat.unpack(self.network, np.asarray(state.weights))
        return Policy(
            self.game, self.network, weights, self.head, stack=config.stack, priority=priority
        )
