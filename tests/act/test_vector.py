"""make_envs takes whatever plays a game, and says in one line what it cannot take."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.act.envs import MaskedEnv, MixedEnv
from understudy.act.cartpole import CartPoleVector
from understudy.act.vector import FrameSkip, columns_of, game_of, make_envs
from understudy.core.errors import ConfigError


class Halved(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return float(reward) / 2


def test_cartpole_is_our_own_unless_something_is_changed():
    assert isinstance(make_envs("CartPole-v1", 4), CartPoleVector)
    for changed in ({"builtin": False}, {"env_kwargs": {"sutton_barto_reward": True}}, {"wrappers": [Halved]}):
        envs = make_envs("CartPole-v1", 2, **changed)
        assert isinstance(envs, SyncVectorEnv)
        assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_ids_functions_and_envs_all_become_envs():
    for game in ("Acrobot-v1", lambda: gymnasium.make("Acrobot-v1"), gymnasium.make("Acrobot-v1")):
        envs = make_envs(game, 2)
        assert envs.num_envs == 2
        assert game_of(envs).game == "Acrobot-v1"
    mine = MixedEnv()
    envs = make_envs(mine, 1)
    assert isinstance(envs, SyncVectorEnv)
    assert isinstance(envs.envs[0], MixedEnv)
    assert envs.envs[0] is not mine


def test_a_vector_env_is_taken_as_it_is_when_it_fits():
    envs = CartPoleVector(3)
    assert make_envs(envs, 3) is envs
    with pytest.raises(ConfigError, match="3 envs was given for 4"):
        make_envs(envs, 4)
    with pytest.raises(ConfigError, match="autoreset_mode=AutoresetMode"):
        make_envs(gymnasium.make_vec("CartPole-v1", 2), 2)


@pytest.mark.parametrize("typed", ["CartPoles-v1", "cartpole-v1", "CartPol-v1", "CartPole-v9"])
def test_an_unknown_game_names_the_nearest(typed: str):
    with pytest.raises(ConfigError, match=r"no game .* is known; did you mean .*CartPole-v1"):
        make_envs(typed, 1)


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        ("CartPole-v1", {"num_envs": 0}, "from 1"),
        ("CartPole-v1", {"num_envs": 1, "frame_skip": 0}, "from 1"),
        ("CartPole-v1", {"num_envs": 1, "env_kwargs": {"wings": 2}}, "does not take"),
        ("CartPole-v1", {"num_envs": 1, "wrappers": ["tests.act.test_vector:Nothing"]}, "module:Class"),
        ("CartPole-v1", {"num_envs": 1, "wrappers": ["nothing"]}, "module:Class"),
        ("nothing_here:Game-v0", {"num_envs": 1}, "nothing_here"),
        (MixedEnv(), {"num_envs": 1, "env_kwargs": {"a": 1}}, "make it with them"),
        (7, {"num_envs": 1}, "give a Gymnasium id"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(game: Any, settings: Any, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        make_envs(game, **settings)
    assert "\n" not in str(caught.value)


def test_wrappers_by_import_path_and_frame_skip_are_applied():
    envs = make_envs("CartPole-v1", 2, wrappers=["tests.act.test_vector:Halved"], frame_skip=3)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(np.array([0, 1]))
    assert rewards.tolist() == [1.5, 1.5]


def test_frame_skip_stops_where_the_episode_ends():
    env, plain = FrameSkip(gymnasium.make("CartPole-v1"), 4), gymnasium.make("CartPole-v1")
    env.reset(seed=5), plain.reset(seed=5)
    total, frames, ended = 0.0, 0, False
    while not ended:
        _, reward, ended, _, _ = env.step(1)
        total += reward
    ended = False
    while not ended:
        _, _, ended, _, _ = plain.step(1)
        frames += 1
    assert total == frames


def test_the_game_of_envs_says_whether_it_has_masks():
    assert game_of(make_envs(MaskedEnv, 2)).has_legal
    assert not game_of(make_envs("CartPole-v1", 1)).has_legal
    assert game_of(make_envs(MixedEnv, 2)).game == "MixedEnv"
    assert game_of(make_envs(MixedEnv, 2), name="mine").game == "mine"


def test_nested_observations_are_taken_apart_by_path():
    envs = make_envs(MixedEnv, 3)
    columns = columns_of(game_of(envs))(envs.reset(seed=1)[0])
    assert {name: (column.shape, column.dtype.name) for name, column in columns.items()} == {
        "obs.inner.0": ((3, 2), "float32"), "obs.inner.1": ((3,), "int64"), "obs.picture": ((3, 4, 4), "uint8"),
    }  # fmt: skip
