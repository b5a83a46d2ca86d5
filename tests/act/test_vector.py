"""make_envs accepts every form of a game, and rejects the rest with a one-line error."""

import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv
from understudy.act.vector import FrameSkip, copy_env, game_of, make_envs, obs_splitter, wrappers_of
from understudy.act.vector_envs import CartPoleVector
from understudy.core.errors import ConfigError


class Halved(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return float(reward) / 2


def test_cartpole_is_the_built_in_one_unless_it_is_customized():
    assert isinstance(make_envs("CartPole-v1", 4), CartPoleVector)
    for changed in (
        {"builtin": False},
        {"env_kwargs": {"sutton_barto_reward": True}},
        {"wrappers": [Halved]},
    ):
        envs = make_envs("CartPole-v1", 2, **changed)
        assert isinstance(envs, SyncVectorEnv)
        assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED


@pytest.mark.parametrize(("game", "limit"), [("CartPole-v0", 200), ("CartPole-v1", 500)])
def test_both_cartpoles_are_built_in_and_end_at_their_limit(game: str, limit: int):
    envs: Any = make_envs(game, 1)
    assert game_of(envs).max_episode_steps == limit
    envs.reset(seed=[1])
    for step in range(1, limit + 1):
        envs._carts.state[:] = 0.0  # a pole that never falls
        _, _, terminated, truncated, _ = envs.step(np.zeros(1, np.int64))
        assert (bool(terminated[0]), bool(truncated[0])) == (False, step == limit)


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


def test_a_suitable_vector_env_is_used_as_it_is():
    envs = CartPoleVector(3)
    assert make_envs(envs, 3) is envs
    with pytest.raises(ConfigError, match="has 3 envs, and 4 were requested"):
        make_envs(envs, 4)
    with pytest.raises(ConfigError, match="autoreset_mode=AutoresetMode"):
        make_envs(gymnasium.make_vec("CartPole-v1", 2), 2)


@pytest.mark.parametrize("typed", ["CartPoles-v1", "cartpole-v1", "CartPol-v1", "CartPole-v9"])
def test_the_error_for_an_unknown_game_suggests_close_names(typed: str):
    with pytest.raises(ConfigError, match=r"game .* is unknown; did you mean .*CartPole-v1"):
        make_envs(typed, 1)


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        ("CartPole-v1", {"num_envs": 0}, "at least 1"),
        ("CartPole-v1", {"num_envs": 1, "frame_skip": 0}, "at least 1"),
        ("CartPole-v1", {"num_envs": 1, "env_kwargs": {"wings": 2}}, "does not accept"),
        (
            "CartPole-v1",
            {"num_envs": 1, "wrappers": ["tests.act.test_vector:Nothing"]},
            "module:Class",
        ),
        ("CartPole-v1", {"num_envs": 1, "wrappers": ["nothing"]}, "module:Class"),
        ("nothing_here:Game-v0", {"num_envs": 1}, "nothing_here"),
        (MixedEnv(), {"num_envs": 1, "env_kwargs": {"a": 1}}, "create the env with them"),
        (7, {"num_envs": 1}, "use a Gymnasium id"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(game: Any, settings: Any, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        make_envs(game, **settings)
    assert "\n" not in str(caught.value)


def test_wrappers_of_training_do_not_surround_the_envs_of_evaluations():
    """`train:Class` is a class of a module called train."""
    wrappers = ["train:mine:Scaled", "train:Scaled", "mine:Other", Halved]
    others = ["train:Scaled", "mine:Other", Halved]
    assert wrappers_of(wrappers, is_training=True) == ["mine:Scaled", *others]
    assert wrappers_of(wrappers, is_training=False) == others


def test_wrappers_by_import_path_and_frame_skip_are_applied():
    envs = make_envs("CartPole-v1", 2, wrappers=["tests.act.test_vector:Halved"], frame_skip=3)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(np.array([0, 1]))
    assert rewards.tolist() == [1.5, 1.5]


def test_frame_skip_stops_where_the_episode_ends():
    env = FrameSkip(gymnasium.make("CartPole-v1"), 4)
    plain = gymnasium.make("CartPole-v1")
    env.reset(seed=5), plain.reset(seed=5)
    total = 0.0
    frames = 0
    ended = False
    while not ended:
        _, reward, ended, _, _ = env.step(1)
        total += reward
    ended = False
    while not ended:
        _, _, ended, _, _ = plain.step(1)
        frames += 1
    assert total == frames


def test_the_spec_of_envs_tells_whether_they_have_masks():
    assert game_of(make_envs(MaskedEnv, 2)).has_action_mask
    assert not game_of(make_envs("CartPole-v1", 1)).has_action_mask
    assert game_of(make_envs(MixedEnv, 2)).game == "MixedEnv"
    assert game_of(make_envs(MixedEnv, 2), name="mine").game == "mine"


def test_nested_observations_are_flattened_by_path():
    envs = make_envs(MixedEnv, 3)
    columns = obs_splitter(game_of(envs))(envs.reset(seed=1)[0])
    assert {name: (column.shape, column.dtype.name) for name, column in columns.items()} == {
        "obs.inner.0": ((3, 2), "float32"),
        "obs.inner.1": ((3,), "int64"),
        "obs.picture": ((3, 4, 4), "uint8"),
    }


# --- Copies of an existing env: they have its changes, or the copy is rejected --------------------


class Held(PlainEnv):
    """An env with an attribute that cannot be copied."""

    def __init__(self, pull: float = 1.0) -> None:
        self.lock = threading.Lock()
        self.pull = pull


class Remade(PlainEnv, EzPickle):
    """An env that is copied by creating it again."""

    def __init__(self, pull: float = 1.0) -> None:
        EzPickle.__init__(self, pull)
        self.pull = pull


class Doubled(gymnasium.ObservationWrapper[Any, Any, Any]):
    def observation(self, observation: Any) -> Any:
        return observation * 2


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Held-v0", entry_point="tests.act.test_vector:Held")
    gymnasium.register("Remade-v0", entry_point="tests.act.test_vector:Remade")


def test_copies_of_a_registered_env_have_its_changes_and_the_env_stays_unchanged():
    env: Any = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = 99.0
    copy: Any = copy_env(env)
    assert copy.unwrapped.gravity == 99.0
    assert copy.unwrapped is not env.unwrapped
    copy.unwrapped.gravity = 1.0
    assert env.unwrapped.gravity == 99.0


def test_a_wrapper_without_a_spec_is_copied_with_its_env():
    copy = copy_env(Doubled(gymnasium.make("CartPole-v1")))
    assert isinstance(copy, Doubled)
    shown = copy.reset(seed=3)[0]
    plain = gymnasium.make("CartPole-v1").reset(seed=3)[0]
    assert np.array_equal(shown, plain * 2)


def test_an_env_that_cannot_be_copied_is_recreated_if_the_result_is_equal():
    copy: Any = copy_env(gymnasium.make("Held-v0", pull=3.0))
    assert copy.unwrapped.pull == 3.0


@pytest.mark.parametrize("game", ["Held-v0", "Remade-v0"])
def test_an_env_that_was_changed_and_cannot_be_copied_is_rejected(game: str):
    env: Any = gymnasium.make(game)
    untouched: Any = copy_env(env)
    assert untouched.unwrapped.pull == 1.0
    env.unwrapped.pull = 99.0
    with pytest.raises(ConfigError, match="pass a function that creates one"):
        copy_env(env)


@pytest.mark.parametrize("env", [Held(), Doubled(Held())])
def test_an_env_that_cannot_be_copied_and_has_no_spec_is_rejected(env: Any):
    with pytest.raises(ConfigError, match=r"cannot pickle .*pass a function that creates one"):
        copy_env(env)


def test_a_wrapper_around_an_env_that_cannot_be_copied_is_rejected():
    with pytest.raises(ConfigError, match="pass a function that creates one"):
        copy_env(Doubled(gymnasium.make("Held-v0")))
