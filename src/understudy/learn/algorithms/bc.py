"""Behavioural cloning: maximises the likelihood of recorded actions."""

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
from understudy.learn.architecture import check_centre, network_for, policy_outputs
from understudy.learn.symmetry import Symmetry, check_symmetry
from understudy.nn.heads import Head, head_for
from understudy.nn.network import NetworkSpec
from understudy.nn.policy import Policy

_ADAM = Adam(epsilon=1e-8)
MAX_SURPRISE = 1e12
"""Rows with a larger |log probability| are invalid, such as an action that its mask forbids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BcConfig:
    """Settings that are fixed for a run."""

    widths: tuple[int, ...] = (64, 64)
    """Widths of the trunk's layers."""
    network: NetworkSpec | None = None
    """A custom network, with a head `logits`, or with heads `mean` and `log_std`."""
    batch: int = setting(64, 1, 65_536, "steps per update")
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
    best_share: float = setting(
        1.0,
        1e-3,
        1.0,
        "share of the recorded episodes that are cloned: those with the highest returns",
    )
    best_steps: int = setting(
        0,
        0,
        1_000_000_000,
        "with fewer steps in these, more episodes are cloned, up to half of all",
    )

    def __post_init__(self) -> None:
        if not 0 < self.best_share <= 1:
            raise ConfigError(
                f"best_share is {self.best_share}; give a number above 0, up to 1 for all episodes"
            )
        check_centre(self.centre)
        check_symmetry(self.symmetry)


@dataclass(frozen=True, slots=True, kw_only=True)
class BcKnobs:
    """Settings that may change during a run: numbers or schedules."""

    learning_rate: float | Schedule = setting(
        Schedule(1e-3, 1e-4), 0.0, 1.0, "learning rate of Adam"
    )
    weight_decay: float | Schedule = setting(1e-4, 0.0, 1.0, "weight decay of kernels")
    entropy: float | Schedule = setting(0.0, 0.0, 10.0, "weight of the entropy bonus")
    max_gradient: float | Schedule = setting(10.0, 1e-3, 1e6, "largest gradient norm")


class BcState(NamedTuple):
    """Weights as one vector, and the optimiser's state."""

    weights: jax.Array
    optimiser: Any


@dataclass(frozen=True)
class Bc:
    """Supervised learning of recorded play, with discrete (masked) or continuous actions."""

    game: GameSpec
    config: BcConfig = BcConfig()

    Config = BcConfig
    Knobs = BcKnobs

    @property
    def needs(self) -> Transitions:
        return Transitions(
            batch=self.config.batch,
            stack=self.config.stack,
            is_cloning=True,
            best_share=self.config.best_share,
            best_steps=self.config.best_steps,
        )

    @cached_property
    def head(self) -> Head:
        return head_for(self.game)

    @cached_property
    def network(self) -> NetworkSpec:
        config = self.config
        return config.network or network_for(
            self.game,
            heads=policy_outputs(self.head),
            widths=config.widths,
            stack=config.stack,
            observation_norm=config.observation_norm,
            centre=config.centre,
        )

    @cached_property
    def _symmetry(self) -> Symmetry:
        return Symmetry(self.game, self.config.centre, self.config.symmetry)

    def init(self, key: Any, start: Mapping[str, Array] | None = None) -> BcState:
        weights = flat.first_weights(key, self.network, start)
        return BcState(weights, _ADAM.init(weights))

    def act(
        self,
        state: BcState,
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
        self, state: BcState, batch: Batch, knobs: Mapping[str, Any]
    ) -> tuple[BcState, Feedback]:
        """One gradient step towards the recorded actions."""
        batch = self._symmetry.mirrored(batch)
        weights = flat.observe(self.network, state.weights, batch.obs, limits=batch.obs_limits)
        loss_of = jax.value_and_grad(self._loss, has_aux=True)
        (loss, logp), grads = loss_of(flat.unpack(self.network, weights), batch, knobs)
        gradient = flat.pack(self.network, grads)
        move, optimiser = _ADAM.update(gradient, state.optimiser, knobs["max_gradient"])
        decay = knobs["weight_decay"] * flat.kernel_mask(self.network)
        updated = weights - knobs["learning_rate"] * (move + decay * weights)
        norm = norm_of(gradient)
        metrics = {"loss": loss, "gradient_norm": norm, "likelihood": jnp.exp(logp).mean()}
        row_ok = jnp.abs(logp) < MAX_SURPRISE
        feedback = Feedback(
            metrics, ok=jnp.isfinite(loss) & jnp.isfinite(norm) & row_ok.all(), row_ok=row_ok
        )
        return BcState(updated, optimiser), feedback

    def _loss(self, weights: Any, batch: Batch, knobs: Mapping[str, Any]) -> tuple[Any, Any]:
        outputs = networks.apply(self.network, weights, batch.obs)
        action = batch.action if self.head.is_discrete else networks.raw_of(self.head, batch.action)
        logp = networks.logp(self.head, outputs, action, batch.action_mask)
        entropy = networks.entropy(self.head, outputs, batch.action_mask).mean()
        return -(batch.weight * logp).mean() - knobs["entropy"] * entropy, logp

    def policy(self, state: BcState) -> Policy:
        weights = flat.unpack(self.network, np.asarray(state.weights))
        return Policy(self.game, self.network, weights, self.head, stack=self.config.stack)
