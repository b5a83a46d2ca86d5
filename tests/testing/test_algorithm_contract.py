"""The Algorithm contract detects faults: a broken algorithm fails the test of that promise."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from understudy.algorithm import Algorithm, Decision, Feedback
from understudy.experience.game import game_spec
from understudy.learn.algorithms.bc import Bc, BcConfig, BcState
from understudy.nn.policy import Policy
from understudy.testing.algorithm import AlgorithmContract

PLAIN = game_spec("cart", obs=4, actions=2)
MASKED = game_spec("cards", obs=5, actions=6, has_action_mask=True)
CONFIG = BcConfig(widths=(), batch=8, observation_norm=False)

_calls = itertools.count()


@dataclass(frozen=True)
class Forgetful(Bc):
    """Starts with different weights each time."""

    def init(self, key: Any, start: Mapping[str, Any] | None = None) -> BcState:
        return super().init(jax.random.fold_in(key, next(_calls)), start)


@dataclass(frozen=True)
class Flattering(Bc):
    """Exports weights that it does not act with."""

    def policy(self, state: BcState) -> Policy:
        return super().policy(state._replace(weights=2.0 * state.weights + 1.0))


@dataclass(frozen=True)
class Careless(Bc):
    """Always reports that the update is ok."""

    def update(
        self, state: BcState, batch: Any, knobs: Mapping[str, Any]
    ) -> tuple[BcState, Feedback]:
        state, feedback = super().update(state, batch, knobs)
        return state, feedback._replace(ok=jnp.ones_like(feedback.ok))


@dataclass(frozen=True)
class Blaming(Bc):
    """Reports every row as bad."""

    def update(
        self, state: BcState, batch: Any, knobs: Mapping[str, Any]
    ) -> tuple[BcState, Feedback]:
        state, feedback = super().update(state, batch, knobs)
        row_ok = jnp.broadcast_to(feedback.ok, feedback.row_ok.shape)
        return state, feedback._replace(row_ok=row_ok)


@dataclass(frozen=True)
class Cheating(Bc):
    """Ignores action masks."""

    def act(
        self,
        state: BcState,
        obs: Mapping[str, Any],
        key: Any,
        explore: Any,
        action_mask: Any = None,
    ) -> Decision:
        return super().act(state, obs, key, explore)


def contract_of(kind: type[Bc]) -> AlgorithmContract:
    class Contract(AlgorithmContract):
        def make(self) -> Algorithm:
            return kind(PLAIN, CONFIG)

        def make_masked(self) -> Algorithm:
            return kind(MASKED, replace(CONFIG, batch=4))

    return Contract()


BROKEN = {
    Forgetful: "test_the_same_key_gives_the_same_bits",
    Flattering: "test_the_exported_policy_does_what_the_live_one_does",
    Careless: "test_a_batch_that_is_not_finite_is_reported_with_its_rows",
    Blaming: "test_a_batch_that_is_not_finite_is_reported_with_its_rows",
    Cheating: "test_invalid_actions_are_never_taken",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_an_algorithm_that_breaks_a_promise_fails(kind: type[Bc]):
    with pytest.raises(AssertionError):
        getattr(contract_of(kind), BROKEN[kind])()


def test_the_unbroken_algorithm_passes():
    contract = contract_of(Bc)
    for name in set(BROKEN.values()):
        getattr(contract, name)()
