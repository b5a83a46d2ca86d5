"""Every built-in algorithm passes the Algorithm contract."""

import pytest

from understudy.algorithm import Algorithm
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box
from understudy.learn.algorithms.bc import Bc, BcConfig
from understudy.learn.algorithms.dqn import Dqn, DqnConfig
from understudy.learn.algorithms.iql import Iql, IqlConfig
from understudy.learn.algorithms.ppo import Ppo, PpoConfig
from understudy.testing.algorithm import AlgorithmContract
from understudy.testing.samples import cart_spec

MASKED = game_spec("cards", obs=5, actions=6, has_action_mask=True)
PULL = game_spec("pull", obs=3, actions=Box((2,), DTYPES["F32"], -2.0, 1.0))


class TestDqn(AlgorithmContract):
    def make(self) -> Algorithm:
        return Dqn(cart_spec())

    def make_masked(self) -> Algorithm:
        return Dqn(MASKED, DqnConfig(widths=(16,), batch=16))


class TestPpo(AlgorithmContract):
    def make(self) -> Algorithm:
        return Ppo(cart_spec(), PpoConfig(rollout=16, envs=4, epochs=2))

    def make_masked(self) -> Algorithm:
        return Ppo(MASKED, PpoConfig(widths=(16,), rollout=8, envs=2, epochs=1))


class TestPpoOfContinuousActions(AlgorithmContract):
    lane_tolerance = 1e-4

    def make(self) -> Algorithm:
        return Ppo(
            PULL, PpoConfig(widths=(16,), rollout=8, envs=4, epochs=1, observation_norm=True)
        )

    @pytest.mark.slow
    def test_a_lane_equals_the_same_run_alone(self) -> None:
        super().test_a_lane_equals_the_same_run_alone()

    @pytest.mark.slow
    def test_a_scan_of_updates_equals_single_updates(self) -> None:
        super().test_a_scan_of_updates_equals_single_updates()


class TestBc(AlgorithmContract):
    def make(self) -> Algorithm:
        return Bc(cart_spec(), BcConfig(widths=(64, 64), batch=64, observation_norm=False))

    def make_masked(self) -> Algorithm:
        return Bc(MASKED, BcConfig(widths=(16,), batch=16))


class TestBcOfContinuousActions(AlgorithmContract):
    lane_tolerance = 1e-4

    def make(self) -> Algorithm:
        return Bc(PULL, BcConfig(widths=(64, 64), batch=64))

    @pytest.mark.slow
    def test_a_lane_equals_the_same_run_alone(self) -> None:
        super().test_a_lane_equals_the_same_run_alone()

    @pytest.mark.slow
    def test_a_scan_of_updates_equals_single_updates(self) -> None:
        super().test_a_scan_of_updates_equals_single_updates()


class TestIql(AlgorithmContract):
    lane_tolerance = 1e-5

    def make(self) -> Algorithm:
        return Iql(cart_spec(), IqlConfig(widths=(64, 64), batch=64, observation_norm=False))

    def make_masked(self) -> Algorithm:
        return Iql(MASKED, IqlConfig(widths=(16,), batch=16))


@pytest.mark.slow
class TestIqlOfContinuousActions(AlgorithmContract):
    lane_tolerance = 1e-4

    def make(self) -> Algorithm:
        return Iql(PULL, IqlConfig(widths=(64, 64), batch=64, n_step=3))
