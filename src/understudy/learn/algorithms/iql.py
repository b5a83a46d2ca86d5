"""Implicit Q-learning (IQL): learns from the play of others, and aims to play better than they did.

    recorded steps ─► Q ─► V, an expectile of Q ─► advantage Q - V ─► weighted cloning ─► policy

Q and V are learned from recorded actions only, so untried actions get no value. The
policy clones the recorded actions, those with a higher advantage more. With an expectile of 0.5,
this is advantage-weighted cloning: V is then the value of the average player.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from understudy.algorithm import Batch, Decision, Feedback, Schedule, Transitions, setting
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn import flat, networks
from understudy.learn.adam import Adam, norm_of
from understudy.learn.architecture import check_centre, network_for, policy_outputs
from understudy.learn.symmetry import Symmetry, check_symmetry
from understudy.nn.heads import Head, head_for
from understudy.nn.network import Dense, Input, Layer, NetworkSpec
from understudy.nn.policy import Policy

_ADAM = Adam(epsilon=1e-8)
MAX_ERROR = 1e12
"""Rows with a larger |reward|, |TD error|, |advantage| or |log probability| are invalid."""
MIN_SCALE = 1e-6
"""Rewards and advantages are divided by at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IqlConfig:
    """Settings that are fixed for a run."""

    widths: tuple[int, ...] = (256, 256)
    """Widths of the layers of the policy, value and Q networks."""
    network: NetworkSpec | None = None
    """A custom policy network, with a head `logits`, or with heads `mean` and `log_std`."""
    batch: int = setting(256, 1, 65_536, "transitions per update")
    n_step: int = setting(1, 1, 100, "steps per transition")
    discount: float = setting(0.99, 0.0, 1.0, "discount per step (gamma)")
    stack: int = setting(1, 1, 16, "frames per observation stack")
    observation_norm: bool = setting(
        True, 0, 1, "normalise observations by their running mean and variance"
    )
    centre: str = ""
    """The cell from which a grid is shown: `obs.grid 5`, that of its channel or code 5;
    `obs.grid obs.y,obs.x` or `obs.grid obs.place[0],obs.place[1]`, the one in this row and column.
    ` of 0..6` after it makes plain numbers codes of cells. If it is empty, the learner service
    finds it, unless it is `none`."""
    symmetry: str = ""
    """With a centre: mirror images of the grid that are learned from, too, and for each the action
    that takes the place of action 0, 1 and so on: `rows 1,0,2,3; columns 0,1,3,2; swap 2,3,0,1`, if
    the actions are north, south, west and east. If it is empty, the learner service finds it and
    tries it on held-out steps, unless it is `none`."""

    def __post_init__(self) -> None:
        check_centre(self.centre)
        check_symmetry(self.symmetry)


@dataclass(frozen=True, slots=True, kw_only=True)
class IqlKnobs:
    """Settings that may change during a run: numbers or schedules."""

    learning_rate: float | Schedule = setting(
        Schedule(1e-3, 1e-5), 0.0, 1.0, "learning rate of Adam"
    )
    weight_decay: float | Schedule = setting(
        1e-4, 0.0, 100.0, "weight decay of the policy's kernels"
    )
    expectile: float | Schedule = setting(
        0.9, 0.5, 0.999, "how far values follow the best recorded play; 0.5 is its mean"
    )
    advantage_weight: float | Schedule = setting(
        1.5,
        0.0,
        100.0,
        "preference for actions by advantage, in units of its mean size; 0 clones",
    )
    max_weight: float | Schedule = setting(20.0, 1.0, 1e6, "largest weight of a cloned action")
    target_rate: float | Schedule = setting(
        0.005, 1e-4, 1.0, "target update rate (tau); 1 copies the weights"
    )
    max_gradient: float | Schedule = setting(
        10.0, 1e-3, 1e6, "largest gradient norm of each network"
    )


class IqlState(NamedTuple):
    """Weights as vectors, the optimisers' states, and the mean square of rewards so far."""

    policy: jax.Array
    value: jax.Array
    q: jax.Array  # float32[2, size]: two networks, of which the smaller Q counts
    target: jax.Array  # float32[2, size]
    optimisers: tuple[Any, Any, Any]  # of policy, value and q
    reward_square: jax.Array  # float32
    updates: jax.Array  # int32


class _Rows(NamedTuple):
    """Results by row."""

    error: Any  # float32[2, batch], the TD errors of both Q
    advantage: Any  # float32[batch]
    weight: Any
    logp: Any


@dataclass(frozen=True)
class Iql:
    """Offline reinforcement learning of recorded play, with discrete or continuous actions."""

    game: GameSpec
    config: IqlConfig = IqlConfig()

    Config = IqlConfig
    Knobs = IqlKnobs
    of_source = ("discount",)

    @property
    def needs(self) -> Transitions:
        config = self.config
        return Transitions(
            batch=config.batch, n_step=config.n_step, discount=config.discount, stack=config.stack
        )

    @cached_property
    def head(self) -> Head:
        return head_for(self.game)

    @cached_property
    def network(self) -> NetworkSpec:
        return self.config.network or self._network_with(policy_outputs(self.head))

    @cached_property
    def value_network(self) -> NetworkSpec:
        return self._network_with({"value": (Dense(1, gain=1.0),)})

    @cached_property
    def q_network(self) -> NetworkSpec:
        """Q of every discrete action, or of one continuous action, which is an input."""
        if self.head.is_discrete:
            return self._network_with({"q": (Dense(self.head.size, gain=1.0),)})
        spec = self._network_with({"q": (Dense(1, gain=1.0),)})
        action = Input((self.head.size,), np.dtype(np.float32), ())
        return NetworkSpec({**spec.inputs, "action": action}, spec.trunk, spec.heads)

    def _network_with(self, heads: Mapping[str, tuple[Layer, ...]]) -> NetworkSpec:
        config = self.config
        return network_for(
            self.game,
            heads=heads,
            widths=config.widths,
            stack=config.stack,
            observation_norm=config.observation_norm,
            centre=config.centre,
        )

    @cached_property
    def _symmetry(self) -> Symmetry:
        return Symmetry(self.game, self.config.centre, self.config.symmetry)

    def init(self, key: Any, start: Mapping[str, Array] | None = None) -> IqlState:
        for_policy, for_value, *for_q = jax.random.split(key, 4)
        policy = flat.first_weights(for_policy, self.network, start)
        value = flat.first_weights(for_value, self.value_network)
        q = jnp.stack([flat.first_weights(each, self.q_network) for each in for_q])
        return IqlState(
            policy,
            value,
            q,
            target=jnp.copy(q),
            optimisers=(_ADAM.init(policy), _ADAM.init(value), _ADAM.init(q)),
            reward_square=jnp.zeros((), jnp.float32),
            updates=jnp.zeros((), jnp.int32),
        )

    def act(
        self,
        state: IqlState,
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
        self, state: IqlState, batch: Batch, knobs: Mapping[str, Any]
    ) -> tuple[IqlState, Feedback]:
        """One gradient step of the policy, of V and of each Q.

        Rewards are divided by their root mean square so far, and advantages by their mean size in
        the batch, so that no setting depends on the size of a game's rewards.
        """
        batch = self._symmetry.mirrored(batch)
        is_valid = jnp.abs(batch.reward) < MAX_ERROR
        square = jnp.square(jnp.where(is_valid, batch.reward, 0.0)).mean()
        updates = state.updates + 1
        reward_square = state.reward_square + (square - state.reward_square) / updates
        scale = jnp.maximum(jnp.sqrt(reward_square), MIN_SCALE)

        observe = partial(flat.observe, obs=batch.obs, limits=batch.obs_limits)
        observe_q = jax.vmap(partial(observe, self.q_network))
        policy = observe(self.network, state.policy)
        value = observe(self.value_network, state.value)
        q = observe_q(state.q)
        target = observe_q(state.target)
        unpack = jax.vmap(partial(flat.unpack, self.q_network))
        (loss, rows), grads = jax.value_and_grad(self._loss, has_aux=True)(
            (
                flat.unpack(self.network, policy),
                flat.unpack(self.value_network, value),
                unpack(q),
            ),
            unpack(target),
            batch._replace(reward=batch.reward / scale),
            knobs,
        )
        gradients = (
            flat.pack(self.network, grads[0]),
            flat.pack(self.value_network, grads[1]),
            jax.vmap(partial(flat.pack, self.q_network))(grads[2]),
        )
        clipped = partial(_ADAM.update, max_gradient=knobs["max_gradient"])
        moves, optimisers = zip(*map(clipped, gradients, state.optimisers), strict=True)
        rate = knobs["learning_rate"]
        decay = knobs["weight_decay"] * flat.kernel_mask(self.network)
        policy = policy - rate * (moves[0] + decay * policy)
        value = value - rate * moves[1]
        q = q - rate * moves[2]
        target = target + knobs["target_rate"] * (q - target)
        norm = norm_of(gradients)
        metrics = {
            "loss": loss,
            "gradient_norm": norm,
            "error": scale * jnp.abs(rows.error).mean(),
            "advantage": scale * jnp.abs(rows.advantage).mean(),
            "weight": rows.weight.mean(),
            "likelihood": jnp.exp(rows.logp).mean(),
        }
        largest = jnp.maximum(jnp.abs(rows.error).max(0), jnp.abs(rows.advantage))
        row_ok = is_valid & (jnp.maximum(largest, jnp.abs(rows.logp)) < MAX_ERROR)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm) & row_ok.all()
        learned = IqlState(policy, value, q, target, optimisers, reward_square, updates)
        return learned, Feedback(metrics, ok, row_ok)

    def _loss(
        self, weights: Any, target: Any, batch: Batch, knobs: Mapping[str, Any]
    ) -> tuple[Any, _Rows]:
        policy, value, q = weights
        v = networks.apply(self.value_network, value, batch.obs)["value"][:, 0]
        next_v = networks.apply(self.value_network, value, batch.next_obs)["value"][:, 0]
        td_target = jax.lax.stop_gradient(batch.reward + batch.discount * next_v)
        q_of = jax.vmap(partial(self._q, batch=batch))
        error = td_target - q_of(q)  # float32[2, batch]
        advantage = q_of(target).min(0) - v
        expectile_weight = jnp.where(advantage > 0, knobs["expectile"], 1.0 - knobs["expectile"])
        critic_loss = jnp.square(error).sum(0) + expectile_weight * jnp.square(advantage)

        advantage = jax.lax.stop_gradient(advantage)
        size = jnp.abs(advantage)
        size = jnp.where(size < MAX_ERROR, size, 0.0).mean()
        preference = knobs["advantage_weight"] * advantage / jnp.maximum(size, MIN_SCALE)
        weight = jnp.minimum(jnp.exp(preference), knobs["max_weight"])
        outputs = networks.apply(self.network, policy, batch.obs)
        logp = networks.logp(self.head, outputs, self._action(batch), batch.action_mask)
        loss = (batch.weight * (critic_loss - weight * logp)).mean()
        return loss, _Rows(error, advantage, weight, logp)

    def _q(self, weights: Any, batch: Batch) -> Any:
        """Q of the recorded actions, float32[batch]."""
        if self.head.is_discrete:
            q = networks.apply(self.q_network, weights, batch.obs)["q"]
            return jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
        columns = {**batch.obs, "action": self._action(batch)}
        return networks.apply(self.q_network, weights, columns)["q"][:, 0]

    def _action(self, batch: Batch) -> Any:
        """Indices of discrete actions, or the raw numbers of continuous ones."""
        return batch.action if self.head.is_discrete else networks.raw_of(self.head, batch.action)

    def policy(self, state: IqlState) -> Policy:
        """The policy alone; critics are part of checkpoints, not of what a game runs."""
        weights = flat.unpack(self.network, np.asarray(state.policy))
        return Policy(self.game, self.network, weights, self.head, stack=self.config.stack)
