"""The built-in vector envs equal a loop over Gymnasium's envs."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv
from understudy.act.vector import make_envs
from understudy.act.vector_envs import CartPoleVector, PlainEnvs
from understudy.core.errors import ConfigError


class CountEnv(PlainEnv):
    """A Discrete observation, and an unused info."""

    observation_space = spaces.Discrete(7)  # type: ignore[assignment]

    def observe(self) -> Any:
        return np.int64(self.np_random.integers(7))

    def info(self) -> dict[str, Any]:
        return {"lives": 3}


class ReusingEnv(PlainEnv):
    """Returns the same array each time, in another dtype than its space has."""

    def observe(self) -> Any:
        self.shown = getattr(self, "shown", np.zeros(3))
        self.shown[:] = self.numbers(3)
        return self.shown


def flat(obs: Any) -> list[tuple[str, bytes]]:
    if isinstance(obs, dict):
        return [part for key in sorted(obs) for part in flat(obs[key])]
    return (
        [part for one in obs for part in flat(one)]
        if isinstance(obs, tuple)
        else [(obs.dtype.str, obs.tobytes())]
    )


@pytest.mark.parametrize("make", [PlainEnv, MixedEnv, MaskedEnv, CountEnv, ReusingEnv])
def test_every_step_and_reset_equals_gymnasiums(make: Any):
    ours = PlainEnvs(make, 5)
    theirs = SyncVectorEnv([make] * 5, autoreset_mode=AutoresetMode.DISABLED)
    rng = np.random.default_rng(0)
    shown = []
    for envs in (ours, theirs):
        shown.append(envs.reset(seed=[1, 2, 3, 4, 5]))
    n_ended = 0
    for step in range(200):
        masks: list[Any] = [infos.get("action_mask") for _, infos in shown]
        assert flat(shown[0][0]) == flat(shown[1][0])
        assert (masks[0] is None) == (masks[1] is None)
        if masks[0] is None:
            theirs.action_space.seed(step)
            actions = theirs.action_space.sample()
        else:
            assert masks[0].tobytes() == masks[1].tobytes()
            actions = (masks[0] * rng.random((5, 4))).argmax(1) - 1
        kept = flat(shown[0][0])
        stepped = [envs.step(actions) for envs in (ours, theirs)]
        assert flat(shown[0][0]) == kept  # what was given before is the caller's own
        assert [part.tobytes() for part in stepped[0][1:4]] == [
            part.tobytes() for part in stepped[1][1:4]
        ]
        assert flat(stepped[0][0]) == flat(stepped[1][0])
        shown = [(obs, infos) for obs, _, _, _, infos in stepped]
        ended = stepped[0][2] | stepped[0][3]
        if ended.any():
            n_ended += int(ended.sum())
            seeds: list[int | None] = [100 * step + env for env in range(5)]
            before = shown
            shown = [
                envs.reset(seed=seeds, options={"reset_mask": ended.copy()})
                for envs in (ours, theirs)
            ]
            for now, then in zip(shown, before, strict=True):
                if "action_mask" in then[1]:  # those that went on are told of at their step only
                    assert now[1]["_action_mask"].tolist() == ended.tolist()
                    now[1]["action_mask"] = np.where(
                        ended[:, None], now[1]["action_mask"], then[1]["action_mask"]
                    )
    assert n_ended > 20


def test_unused_infos_are_dropped():
    envs = PlainEnvs(CountEnv, 2)
    envs.reset(seed=0)
    assert envs.step(np.array([2, 3]))[4] == {}


def test_an_env_that_ended_and_was_not_reset_is_an_error():
    envs = PlainEnvs(lambda: gymnasium.make("CartPole-v1"), 2)
    envs.reset(seed=0)
    while not envs.step(np.array([1, 0]))[2].any():
        pass
    with pytest.raises(AssertionError, match="not reset"):
        envs.step(np.array([1, 0]))


class WrongEnv(PlainEnv):
    """Returns observations that are not in its space."""

    shows: Any = None

    def observe(self) -> Any:
        self.n_shown = getattr(self, "n_shown", 0) + 1
        return self.numbers(3) if self.n_shown == 1 else self.shows


@pytest.mark.parametrize(
    "shows",
    [
        np.zeros(2, np.float32),
        np.zeros((3, 1), np.float32),
        np.float32(1),
        None,
        "abc",
        np.zeros(3, np.complex64),
    ],
)
def test_an_observation_of_another_shape_or_kind_is_an_error(shows: Any):
    envs = PlainEnvs(type("Wrong", (WrongEnv,), {"shows": shows}), 2)
    envs.reset(seed=0)
    with pytest.raises((ValueError, TypeError)):
        envs.step(np.array([2, 2]))


def test_lengths_that_make_up_for_each_other_are_an_error():
    envs = PlainEnvs(WrongEnv, 2)
    envs.reset(seed=0)
    for env, n in zip(envs.envs, (2, 4), strict=True):
        env.shows = np.zeros(n, np.float32)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="shape"):
        envs.step(np.array([2, 2]))


# --- CartPole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 5, 16])
def test_every_step_is_bit_identical_to_gymnasiums_vector_env(num_envs: int):
    ours = CartPoleVector(num_envs)
    theirs = make_envs("CartPole-v1", num_envs, builtin=False)
    assert isinstance(theirs, SyncVectorEnv)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    rng = np.random.default_rng(num_envs)
    n_ended = 0
    obs, _ = ours.reset(seed=7)
    assert obs.tobytes() == theirs.reset(seed=7)[0].tobytes()
    for _ in range(300):
        action = rng.integers(2, size=num_envs)
        got: tuple[Any, ...] = ours.step(action)
        wanted: tuple[Any, ...] = theirs.step(action)
        for one, other in zip(got[:4], wanted[:4], strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        ended = got[2] | got[3]
        n_ended += int(ended.sum())
        if ended.any():
            seeds = rng.integers(1 << 32, size=num_envs).tolist()
            after = [
                envs.reset(seed=seeds, options={"reset_mask": ended})[0] for envs in (ours, theirs)
            ]
            assert after[0].tobytes() == after[1].tobytes()
    assert n_ended > 5


def test_an_episode_is_truncated_at_its_500th_step():
    ours = CartPoleVector(1)
    theirs = make_envs("CartPole-v1", 1, builtin=False)
    obs, _ = ours.reset(seed=3)
    theirs.reset(seed=3)
    for number in range(1, 501):
        action = np.array(
            [int(obs[0, 2] + 0.3 * obs[0, 3] + 0.05 * obs[0, 0] + 0.1 * obs[0, 1] > 0)]
        )
        obs, _, terminated, truncated, _ = ours.step(action)
        assert truncated[0] == theirs.step(action)[3][0] == (number == 500)
        assert not terminated[0]


def test_a_masked_reset_does_not_change_the_other_envs():
    envs = CartPoleVector(3)
    before, _ = envs.reset(seed=[1, 2, 3])
    after, _ = envs.reset(seed=[9, 9, 9], options={"reset_mask": np.array([False, True, False])})
    assert after[[0, 2]].tobytes() == before[[0, 2]].tobytes()
    assert (after[1] != before[1]).all()


def test_the_wrong_number_of_seeds_is_rejected():
    with pytest.raises(ConfigError, match="2 seeds for 3 envs"):
        CartPoleVector(3).reset(seed=[1, 2])


def test_its_metadata_disables_autoreset():
    assert CartPoleVector(1).metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_prepared_seeds_start_the_same_episodes():
    plain = CartPoleVector(3)
    prepared = CartPoleVector(3)
    prepared.prepare(np.array([8, 9, 4_000_000_000], np.uint32))
    for seeds in ([8, 9, 4_000_000_000], [8, 1, 2]):
        assert plain.reset(seed=seeds)[0].tobytes() == prepared.reset(seed=seeds)[0].tobytes()
