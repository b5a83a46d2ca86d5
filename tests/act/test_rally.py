"""Rally as a single env, a vector env and a two-player env."""

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from understudy.act.rally import RallyEnv, RallyParallel, RallyVector
from understudy.act.vector import game_of, make_env, make_envs
from understudy.core.errors import ConfigError
from understudy.experience.game import game_spec
from understudy.games import rally

SEEDS = [3, 5, 8, 13, 21]


def test_gymnasium_accepts_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather have spaces within ±1
        check_env(RallyEnv(), skip_render_check=True)


@pytest.mark.parametrize("more", [{}, {"opponent": "strong", "seat": 1}])
def test_the_vector_env_equals_single_envs(more: dict[str, Any]):
    vector = make_envs("rally", len(SEEDS), env_kwargs=more)
    singles = [make_env("rally", more) for _ in SEEDS]
    assert isinstance(vector, RallyVector)
    obs, _ = vector.reset(seed=SEEDS)
    for at, (env, seed) in enumerate(zip(singles, SEEDS, strict=True)):
        assert env.reset(seed=seed)[0].tobytes() == obs[at].tobytes()
    rng = np.random.default_rng(0)
    is_live = np.ones(len(SEEDS), bool)
    while is_live.any():
        actions = rng.integers(0, 3, len(SEEDS))
        obs, rewards, terminated, truncated, _ = vector.step(actions)
        for at in is_live.nonzero()[0].tolist():
            one = singles[at].step(int(actions[at]))
            assert (one[0].tobytes(), one[1:4]) == (
                obs[at].tobytes(),
                (rewards[at], terminated[at], truncated[at]),
            )
        is_live &= ~(terminated | truncated)


def test_only_the_envs_of_the_mask_are_reset():
    vector = RallyVector(3)
    vector.reset(seed=SEEDS[:3])
    after = vector.step(np.array([0, 1, 2]))[0]
    obs, _ = vector.reset(seed=[99, 99, 99], options={"reset_mask": np.array([False, True, False])})
    assert (obs[[0, 2]] == after[[0, 2]]).all()
    assert obs[1].tobytes() == RallyEnv().reset(seed=99)[0].tobytes()


def test_its_actions_have_names_in_every_form():
    specs = [game_of(make_envs("rally", 2)), game_of(make_envs("rally", 2, builtin=False))]
    assert specs[0] == specs[1]
    assert specs[0].action_names == ("up", "stay", "down")
    named = game_spec("rally", obs=rally.OBS_NAMES, actions=rally.ACTION_NAMES)
    assert specs[0] == named, "whoever knows the names, in any language, has the same schema"


def test_two_players_see_mirrored_courts_and_share_the_point():
    env = RallyParallel()
    rng = np.random.default_rng(1)
    obs, _ = env.reset(seed=4)
    assert set(obs) == set(env.agents) == {"left", "right"}
    steps = 0
    while env.agents:
        obs, rewards, terminated, truncated, _ = env.step(
            {name: int(rng.integers(3)) for name in env.agents}
        )
        assert rewards["left"] == -rewards["right"]
        assert obs["left"][0] == -obs["right"][0]
        steps += 1
    assert terminated == {"left": True, "right": True}
    assert truncated == {"left": False, "right": False}
    assert abs(rewards["left"]) == 1
    assert 5 < steps < rally.MAX_DECISIONS


def test_invalid_settings_and_unknown_games_are_rejected():
    with pytest.raises(ConfigError, match="use 0"):
        make_envs("rally", 1, env_kwargs={"seat": 2})
    with pytest.raises(ConfigError, match="strong"):
        make_envs("rally", 1, env_kwargs={"opponent": "nobody"})
    with pytest.raises(ConfigError, match="does not accept"):
        make_envs("rally", 1, env_kwargs={"wind": 3})
    with pytest.raises(ConfigError, match="did you mean rally"):
        make_env("raly")
    for unlike in ("nosuch", "nosuch-v0"):
        with pytest.raises(
            ConfigError, match=r"unknown; use rally, .*CartPole-v1 or any other id of Gymnasium"
        ):
            make_env(unlike)
    for near in ("cartpole", "CartPole-v7", "cart-pole-v1"):
        with pytest.raises(ConfigError, match="did you mean CartPole-v1"):
            make_env(near)


@pytest.mark.parametrize("action", [-1, 3, 7])
def test_an_invalid_action_moves_no_paddle(action: int):
    env = RallyEnv()
    both = RallyParallel()
    env.reset(seed=1)
    both.reset(seed=1)
    with pytest.raises(ConfigError, match=r"2 \(down\)"):
        env.step(action)
    with pytest.raises(ConfigError, match=r"2 \(down\)"):
        both.step({"left": 1, "right": action})
    assert env.court == both.court == rally.serve(1)


def test_two_players_need_a_reset_before_they_step():
    env = RallyParallel()
    both = {"left": 1, "right": 1}
    with pytest.raises(ConfigError, match="call reset first"):
        env.step(both)
    env.reset(seed=1)
    for actions, names in (
        ({"left": 1}, "left"),
        ({}, "no agent"),
        (both | {"umpire": 1}, "umpire"),
    ):
        with pytest.raises(ConfigError, match=f"{names}; pass one for left and one for right"):
            env.step(actions)
    while env.agents:
        env.step(both)
    with pytest.raises(ConfigError, match="after the serve was over"):
        env.step(both)


def test_the_two_player_env_has_the_api_of_pettingzoo():
    env = RallyParallel(render_mode="rgb_array")
    assert (env.possible_agents, env.num_agents, env.max_num_agents) == (["left", "right"], 0, 2)
    obs, _ = env.reset(seed=np.int64(3))  # type: ignore[arg-type]
    assert env.num_agents == 2
    for name in env.agents:
        assert env.observation_spaces[name] is env.observation_space(name)
        assert env.action_spaces[name] is env.action_space(name)
        assert env.observation_space(name).contains(obs[name])
    assert env.render().ndim == 3
    assert isinstance(RallyParallel().render(), str)
    assert RallyParallel().render_mode is None


@pytest.mark.parametrize("kind", [RallyEnv, RallyParallel])
def test_an_unknown_render_mode_is_rejected(kind: Any):
    with pytest.raises(ConfigError, match="'human'; use ansi, rgb_array or None"):
        kind(render_mode="human")


@pytest.mark.parametrize("game", ["rally", "CartPole-v1"])
def test_vector_envs_reject_invalid_actions(game: str):
    envs: Any = make_envs(game, 3)
    last = 2 if game == "rally" else 1
    before, _ = envs.reset(seed=[1, 2, 3])
    for wrong, said in (
        ([0, 9, 0], "env 1 is 9; .* 0 to"),
        ([0, 1, -1], "env 2 is -1"),
        ([0, 1.7, 0], r"float64\[3\]"),
        ([0, 1], r"int64\[2\].* 3 envs"),
        ([last + 1, 0, 0], f"0 to {last}"),
    ):
        with pytest.raises(ConfigError, match=said):
            envs.step(np.array(wrong))
    nothing = {"reset_mask": np.zeros(3, bool)}
    assert envs.reset(options=nothing)[0].tobytes() == before.tobytes(), "nothing has moved"
    for kind in (np.uint8, np.int32, np.int64):
        envs.step(np.array([0, 1, last], kind))


@pytest.mark.parametrize("game", ["rally", "CartPole-v1"])
def test_invalid_resets_are_rejected(game: str):
    envs: Any = make_envs(game, 3)
    assert envs.reset(seed=np.int64(5))[0].tobytes() == envs.reset(seed=5)[0].tobytes()
    with pytest.raises(ConfigError, match=r"reset_mask has shape \[2\]; use 3"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ConfigError, match=r"seed is 1\.5"):
        envs.reset(seed=1.5)
    with pytest.raises(ConfigError, match="num_envs is -1"):
        type(envs)(-1)
