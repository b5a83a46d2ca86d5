"""PPO: clipped policy updates on rollouts of the current policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from understudy.algorithm import Decision, Feedback, Rollout, Rollouts, Schedule, setting
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn import flat, networks
from understudy.learn.adam import Adam, norm_of
from understudy.learn.architecture import network_for, policy_outputs
from understudy.nn.heads import Head, head_for
from understudy.nn.network import Dense, NetworkSpec
from understudy.nn.policy import Policy

_ADAM = Adam()
MAX_RETURN = 1e12
"""Rows with a larger return or log probability, or NaN, are invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoConfig:
    """Settings that are fixed for a run."""

    widths: tuple[int, ...] = (64, 64)
    """Widths of the layers of the policy and value networks."""
    network: NetworkSpec | None = None
    """A custom policy network, with a head `logits`, or with heads `mean` and `log_std`."""
    activation: str = "tanh"
    rollout: int = setting(32, 1, 65_536, "steps per env before each update")
    envs: int = setting(8, 1, 4_096, "parallel envs")
    epochs: int = setting(20, 1, 1_000, "passes over each rollout")
    minibatches: int = setting(1, 1, 1_024, "gradient steps per epoch")
    stack: int = setting(1, 1, 16, "frames per observation stack")
    observation_norm: bool = setting(
        False, 0, 1, "normalise observations by their running mean and variance"
    )

    def __post_init__(self) -> None:
        if self.rollout * self.envs % self.minibatches:
            raise ConfigError(
                f"minibatches is {self.minibatches}, which does not divide {self.rollout} steps x "
                f"{self.envs} envs; give a divisor of {self.rollout * self.envs}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoKnobs:
    """Settings that may change during a run: numbers or schedules."""

    learning_rate: float | Schedule = setting(
        Schedule(1e-3, 0.0), 0.0, 1.0, "learning rate of Adam"
    )
    clip: float | Schedule = setting(
        Schedule(0.2, 0.0), 0.0, 1.0, "clipping range of the probability ratio"
    )
    discount: float | Schedule = setting(0.98, 0.0, 1.0, "discount per step (gamma)")
    gae_lambda: float | Schedule = setting(
        0.8, 0.0, 1.0, "lambda of generalised advantage estimation"
    )
    entropy: float | Schedule = setting(0.0, 0.0, 10.0, "weight of the entropy bonus")
    value: float | Schedule = setting(0.5, 0.0, 10.0, "weight of the value loss")
    max_gradient: float | Schedule = setting(0.5, 1e-3, 1e6, "largest gradient norm")


class PpoState(NamedTuple):
    """Policy and value weights as vectors, the optimiser's state, and the next shuffle's key."""

    policy: jax.Array
    value: jax.Array
    optimiser: Any
    key: jax.Array


class _Rows(NamedTuple):
    """The input of a gradient step: a rollout with time and envs as one axis."""

    obs: Mapping[str, Any]
    action: Any
    logp: Any
    action_mask: Any
    advantage: Any
    return_: Any  # float32[rows], the target of the value


@dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation, for discrete and continuous actions."""

    game: GameSpec
    config: PpoConfig = PpoConfig()

    Config = PpoConfig
    Knobs = PpoKnobs

    @property
    def needs(self) -> Rollouts:
        return Rollouts(steps=self.config.rollout, envs=self.config.envs, stack=self.config.stack)

    @cached_property
    def head(self) -> Head:
        return head_for(self.game)

    @cached_property
    def network(self) -> NetworkSpec:
        return self.config.network or self._network_with(policy_outputs(self.head))

    @cached_property
    def value_network(self) -> NetworkSpec:
        return self._network_with({"value": (Dense(1, gain=1.0),)})

    def _network_with(self, heads: Mapping[str, tuple[Any, ...]]) -> NetworkSpec:
        config = self.config
        return network_for(
            self.game,
            heads=heads,
            widths=config.widths,
            activation=config.activation,
            stack=config.stack,
            observation_norm=config.observation_norm,
        )

    def init(self, key: Any, start: Mapping[str, Array] | None = None) -> PpoState:
        for_policy, for_value, key = jax.random.split(key, 3)
        policy = flat.first_weights(for_policy, self.network, start)
        value = flat.first_weights(for_value, self.value_network)
        return PpoState(policy, value, _ADAM.init((policy, value)), key)

    def act(
        self,
        state: PpoState,
        obs: Mapping[str, Any],
        key: Any,
        explore: Any,
        action_mask: Any = None,
    ) -> Decision:
        return flat.decide(
            self.network,
            state.policy,
            self.head,
            obs=obs,
            key=key,
            explore=explore,
            action_mask=action_mask,
        )

    def update(
        self, state: PpoState, batch: Rollout, knobs: Mapping[str, Any]
    ) -> tuple[PpoState, Feedback]:
        """All epochs over one rollout; `ratio_error` shows whether this policy has played it."""
        rows = self._rows(state, batch, knobs)
        first = jnp.exp(self._logp(state.policy, rows) - rows.logp)  # float32[rows]
        key, shuffle = jax.random.split(state.key)
        weights, optimiser, steps = self._epochs(
            (state.policy, state.value), state.optimiser, rows, shuffle, knobs
        )
        policy = flat.observe(self.network, weights[0], rows.obs)
        value = flat.observe(self.value_network, weights[1], rows.obs)
        metrics = {name: values.mean() for name, values in steps.items()}
        finite = [jnp.isfinite(steps[name]).all() for name in ("loss", "gradient_norm")]
        row_ok = (
            jnp.isfinite(first)
            & (jnp.abs(rows.logp) < MAX_RETURN)
            & (jnp.abs(rows.return_) < MAX_RETURN)
        )
        ok = jnp.stack(finite).all() & row_ok.all()
        feedback = Feedback(metrics, ok, row_ok, ratio_error=jnp.abs(first - 1.0).max())
        return PpoState(policy, value, optimiser, key), feedback

    def _rows(self, state: PpoState, batch: Rollout, knobs: Mapping[str, Any]) -> _Rows:
        shape = batch.reward.shape
        weights = flat.unpack(self.value_network, state.value)

        def rows(array: Any) -> Any:
            return array.reshape(shape[0] * shape[1], *array.shape[2:])

        def value(obs: Mapping[str, Any]) -> Any:
            return networks.apply(self.value_network, weights, jax.tree.map(rows, obs))[
                "value"
            ].reshape(shape)

        values = value(batch.obs)
        advantage = advantages(
            batch,
            values,
            value(batch.next_obs),
            discount=knobs["discount"],
            gae_lambda=knobs["gae_lambda"],
        )
        return _Rows(
            obs=jax.tree.map(rows, dict(batch.obs)),
            action=rows(batch.action),
            logp=rows(batch.logp),
            action_mask=None if batch.action_mask is None else rows(batch.action_mask),
            advantage=rows(advantage),
            return_=rows(advantage + values),
        )

    def _logp(self, policy: Any, rows: _Rows) -> Any:
        outputs = networks.apply(self.network, flat.unpack(self.network, policy), rows.obs)
        return networks.logp(self.head, outputs, rows.action, rows.action_mask)

    def _epochs(
        self, weights: Any, optimiser: Any, rows: _Rows, key: Any, knobs: Mapping[str, Any]
    ) -> Any:
        n_rows = rows.logp.shape[0]
        config = self.config
        specs = (self.network, self.value_network)
        shape = (config.epochs * config.minibatches, n_rows // config.minibatches)
        order = jnp.tile(jnp.arange(n_rows), config.epochs)
        if config.minibatches > 1:  # a single minibatch is the whole rollout, in any order
            noise = jax.random.uniform(key, (config.epochs, n_rows))
            order = jnp.argsort(noise, axis=1)
        order = order.reshape(shape)

        def step(carry: Any, chosen: Any) -> tuple[Any, dict[str, Any]]:
            weights, optimiser = carry
            minibatch = (
                rows
                if config.minibatches == 1
                else jax.tree.map(lambda column: column[chosen], rows)
            )
            arrays = tuple(
                flat.unpack(spec, vector) for spec, vector in zip(specs, weights, strict=True)
            )
            (loss, metrics), grads = jax.value_and_grad(self._loss, has_aux=True)(
                arrays, minibatch, knobs
            )
            gradient = tuple(flat.pack(spec, part) for spec, part in zip(specs, grads, strict=True))
            moves, optimiser = _ADAM.update(gradient, optimiser, knobs["max_gradient"])
            weights = jax.tree.map(
                lambda old, move: old - knobs["learning_rate"] * move, weights, moves
            )
            return (weights, optimiser), {
                **metrics,
                "loss": loss,
                "gradient_norm": norm_of(gradient),
            }

        (weights, optimiser), metrics = jax.lax.scan(step, (weights, optimiser), order)
        return weights, optimiser, metrics

    def _loss(
        self, weights: Any, rows: _Rows, knobs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        outputs = networks.apply(self.network, weights[0], rows.obs)
        value = networks.apply(self.value_network, weights[1], rows.obs)["value"][:, 0]
        ratio = jnp.exp(
            networks.logp(self.head, outputs, rows.action, rows.action_mask) - rows.logp
        )
        advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 1.0 - knobs["clip"], 1.0 + knobs["clip"])
        gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
        entropy = networks.entropy(self.head, outputs, rows.action_mask).mean()
        value_loss = jnp.square(rows.return_ - value).mean()
        loss = -gain - knobs["entropy"] * entropy + knobs["value"] * value_loss
        return loss, {"entropy": entropy, "value_loss": value_loss}

    def policy(self, state: PpoState) -> Policy:
        weights = flat.unpack(self.network, np.asarray(state.policy))
        return Policy(self.game, self.network, weights, self.head, stack=self.config.stack)


def advantages(
    rollout: Rollout, values: Any, next_values: Any, *, discount: Any, gae_lambda: Any
) -> Any:
    """Generalised advantages (GAE); all arrays are float32[steps, envs].

    `next_values` are the values of the observations before any reset, so a truncated step
    bootstraps from the observation it reached; a terminated one does not bootstrap. No advantage
    crosses the end of an episode.
    """
    alive = 1.0 - rollout.terminated.astype(jnp.float32)
    continues = 1.0 - (rollout.terminated | rollout.truncated).astype(jnp.float32)
    errors = rollout.reward + discount * next_values * alive - values

    def back(later: Any, row: tuple[Any, Any]) -> tuple[Any, Any]:
        error, on = row
        advantage = error + discount * gae_lambda * on * later
        return advantage, advantage

    _, result = jax.lax.scan(back, jnp.zeros_like(values[0]), (errors, continues), reverse=True)
    return result
