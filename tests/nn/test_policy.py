"""Policy: single observations and batches, actions for an env, its bytes, and what it refuses."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym

from tests.nn.networks import F32, U8, random_obs, random_weights
from understudy.core import tensors
from understudy.core.errors import ConfigError, Refused
from understudy.experience.game import GameSpec, game_spec, spec_from_gymnasium
from understudy.experience.spaces import Box, Discrete
from understudy.nn.heads import DISCRETE, GAUSSIAN, Head, env_actions, head_for
from understudy.nn.network import (
    Activation,
    Channels,
    Conv,
    Dense,
    Flatten,
    Input,
    NetworkSpec,
    ScaleImage,
)
from understudy.nn.policy import InitialPriority, Policy, decode_policy


def policy_for(
    game: GameSpec, kind: str | None = None, *, stack: int = 1, seed: int = 0, **more: Any
) -> Policy:
    """A policy with random weights over every column of a game."""
    before = (stack,) if stack > 1 else ()
    head = head_for(game, kind)
    network = NetworkSpec(
        {
            name: Input((*before, *space.shape), space.dtype, (Flatten(),))
            for name, space in game.obs_columns.items()
        },
        (Dense(8), Activation("tanh")),
        {**{name: (Dense(head.size),) for name in head.outputs}, "value": (Dense(1),)},
    )
    return Policy(
        game,
        network,
        random_weights(network, np.random.default_rng(seed)),
        head,
        stack=stack,
        **more,
    )


CART = game_spec("cart", obs=4, actions=Discrete(3, 10), has_action_mask=True)


def test_one_observation_has_the_same_action_as_in_a_batch() -> None:
    policy = policy_for(CART)
    rng = np.random.default_rng(1)
    obs = rng.normal(size=(50, 4)).astype(np.float32)
    batch = policy.decide({"obs": obs}, None, deterministic=True)
    assert [policy.act(row) for row in obs] == (batch.action + 10).tolist()
    assert {type(policy.act(row.tolist())) for row in obs} == {int}
    assert len(set(batch.action.tolist())) > 1


MIXED = game_spec(
    "mixed", obs={"a": Box((3,), F32), "b": Box((2, 2), U8)}, actions=Box((2,), F32, -1.0, 2.0)
)


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("game", "kind"), [*((CART, kind) for kind in DISCRETE), *((MIXED, kind) for kind in GAUSSIAN)]
)
def test_act_and_decide_agree_also_when_sampling(game: GameSpec, kind: str, stack: int) -> None:
    policy = policy_for(game, kind, stack=stack)
    rng = np.random.default_rng(8)
    mask = np.array([True, False, True]) if game is CART else None
    for seed in range(20):
        columns = random_obs(policy.network, 1, rng)
        rows = [
            {name: column[0][at] if stack > 1 else column[0] for name, column in columns.items()}
            for at in range(stack)
        ]
        obs: Any = [
            row["obs"] if game is CART else {"a": row["obs.a"], "b": row["obs.b"]} for row in rows
        ]
        for deterministic in (True, False):
            noise = policy.head.noise(np.random.default_rng(seed), 1)
            action_mask = None if mask is None else mask[None]
            expected = policy.decide(
                columns, noise, action_mask=action_mask, deterministic=deterministic
            )
            action, logp, raw = policy.choose(
                obs if stack > 1 else obs[0],
                action_mask=mask,
                deterministic=deterministic,
                rng=np.random.default_rng(seed),
            )
            assert logp == pytest.approx(float(expected.logp[0]), abs=1e-5)
            assert (raw is None) == (expected.raw_action is None)
            if raw is not None:
                np.testing.assert_allclose(raw, expected.raw_action[0], atol=1e-5)
            np.testing.assert_allclose(action, env_actions(game, expected.action)[0], atol=1e-5)
            assert type(action) is (int if game is CART else np.ndarray)


def test_outputs_has_every_head_and_decide_reads_its_own() -> None:
    policy = policy_for(CART, "epsilon_greedy")
    obs = random_obs(policy.network, 5, np.random.default_rng(2))
    outputs = policy.outputs(obs)
    assert outputs.keys() == {"q", "value"}
    decision = policy.decide(obs, policy.head.noise(np.random.default_rng(3), 5), explore=0.0)
    np.testing.assert_array_equal(decision.action, outputs["q"].argmax(1))


def test_action_masks_are_obeyed_and_need_a_valid_action() -> None:
    policy = policy_for(CART)
    obs = np.zeros(4)
    rng = np.random.default_rng(4)
    for _ in range(20):
        assert policy.act(obs, action_mask=[False, True, False], deterministic=False, rng=rng) == 11
    with pytest.raises(ConfigError, match="has no valid action"):
        policy.act(obs, action_mask=[False] * 3)
    with pytest.raises(Refused, match="one flag for each of the 3 actions"):
        policy.act(obs, action_mask=[True])


def test_sampling_needs_an_rng_and_repeats_with_its_seed() -> None:
    policy = policy_for(CART)
    obs = np.zeros(4)
    with pytest.raises(ConfigError, match="default_rng"):
        policy.act(obs, deterministic=False)

    def drawn() -> list[int]:
        rng = np.random.default_rng(5)
        return [policy.act(obs, deterministic=False, rng=rng) for _ in range(30)]

    assert drawn() == drawn()
    assert len(set(drawn())) == 3


def test_a_temperature_sharpens_or_softens_choices_and_keeps_the_best_one() -> None:
    policy = policy_for(CART, "categorical")
    obs = {"obs": np.random.default_rng(2).normal(size=(20, 4)).astype(np.float32)}
    logits = policy.outputs(obs)["logits"]
    for temperature in (0.25, 1.0, 4.0):
        at = policy.at_temperature(temperature)
        np.testing.assert_allclose(at.outputs(obs)["logits"], logits / temperature, rtol=1e-5)
        assert decode_policy(at.encode()) == at
    assert policy.at_temperature(1.0) is policy
    assert policy_for(CART, "argmax").at_temperature(0.25) == policy_for(CART, "argmax")


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_a_temperature_scales_the_deviation_of_continuous_actions_and_not_their_mean(
    kind: str,
) -> None:
    policy = policy_for(MIXED, kind)
    obs = random_obs(policy.network, 5, np.random.default_rng(3))
    plain, sharp = (one.outputs(obs) for one in (policy, policy.at_temperature(0.25)))
    np.testing.assert_allclose(np.exp(sharp["log_std"]), np.exp(plain["log_std"]) / 4, rtol=1e-5)
    np.testing.assert_array_equal(sharp["mean"], plain["mean"])


def test_a_temperature_must_be_positive_and_needs_a_last_layer_that_it_can_scale() -> None:
    policy = policy_for(CART, "categorical")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="give a number above 0"):
            policy.at_temperature(wrong)
    heads = {"logits": (Dense(3), Activation("tanh"))}
    network = NetworkSpec(policy.network.inputs, policy.network.trunk, heads)
    weights = random_weights(network, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="ends with Activation"):
        Policy(CART, network, weights, policy.head).at_temperature(0.5)


def test_any_gymnasium_env_accepts_the_action() -> None:
    obs_space = gym.Dict(
        {
            "cam": gym.Box(0, 255, (6, 5), np.uint8),
            "self": gym.Tuple([gym.Discrete(3), gym.Box(-1, 1)]),
        }
    )
    action_space = gym.Box(np.array([[0.1], [-3.0]]), np.array([[0.7], [9.0]]), dtype=np.float64)
    env = gymnasium.Env[Any, Any]()
    env.observation_space = obs_space
    env.action_space = action_space
    policy = policy_for(spec_from_gymnasium(env, game="any"), "gaussian_clipped")
    rng = np.random.default_rng(6)
    obs_space.seed(0)
    for _ in range(20):
        action = policy.act(obs_space.sample(), deterministic=False, rng=rng)
        assert action_space.contains(action)


@pytest.mark.parametrize("obs", [np.zeros(3), "no", [np.nan] * 4])
def test_an_observation_of_another_game_is_refused(obs: Any) -> None:
    with pytest.raises(Refused):
        policy_for(CART).act(obs)


# --- Stacks ---------------------------------------------------------------------------------------


def test_a_player_remembers_its_episode() -> None:
    game = game_spec("frames", obs=Box((12, 12), U8), actions=4)
    network = NetworkSpec(
        {
            "obs": Input(
                (3, 12, 12),
                U8,
                (ScaleImage(), Channels((0,)), Conv(4, 4, 2), Activation("relu"), Flatten()),
            )
        },
        (),
        {"logits": (Dense(4),)},
    )
    rng = np.random.default_rng(7)
    policy = Policy(game, network, random_weights(network, rng), Head("categorical", 4), stack=3)
    frames = rng.integers(0, 256, (5, 12, 12), dtype=np.uint8)
    player = policy.player()
    for _ in range(2):
        player.reset()
        reused = np.empty((12, 12), np.uint8)
        for at, frame in enumerate(frames):
            reused[:] = frame
            stacked = frames[[max(0, at - 2), max(0, at - 1), at]]
            expected = policy.decide({"obs": stacked[None]}, None, deterministic=True).action[0]
            assert player.act(reused) == expected
            assert policy.act(stacked) == policy.act(list(stacked)) == expected


def test_a_stack_needs_all_its_observations() -> None:
    policy = policy_for(CART, stack=2)
    with pytest.raises(ConfigError, match=r"give the last 2, or use policy\.player"):
        policy.act([np.zeros(4)])


def test_a_player_without_a_stack_is_the_policy() -> None:
    policy = policy_for(CART)
    obs = np.array([0.1, 2, 3, 4], np.float32)
    player = policy.player()
    assert player.act(obs, action_mask=[True, False, True]) == policy.act(
        obs, action_mask=[True, False, True]
    )


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [None, InitialPriority(n_step=3, discount=0.97)])
def test_a_policy_is_restored_from_its_bytes(priority: Any) -> None:
    policy = policy_for(CART, "epsilon_greedy", stack=2, version=17, priority=priority)
    found = decode_policy(policy.encode())
    assert found == policy
    assert hash(found) == hash(policy)
    assert (found.version, found.stack, found.priority, found.head) == (
        17,
        2,
        priority,
        policy.head,
    )
    assert found.encode() == policy.encode()
    assert found != replace(policy, version=18)
    assert found != "policy"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "understudy-policy/2"}, "bad_version"),
        ({"more": "1"}, "bad_policy"),
        ({"stack": "+1"}, "bad_policy"),
        ({"version": "99999999999"}, "bad_policy"),
        ({"version": "9999999999"}, "bad_policy"),
        ({"head": "[]"}, "bad_policy"),
        ({"priority": '{"kind":"n_step_td","n_step":0,"discount":1}'}, "bad_policy"),
        ({"priority": '{"code":1}'}, "bad_policy"),
        ({"priority": "[1]"}, "bad_policy"),
        ({"game": "{}"}, "bad_policy"),
        ({"network": "{}"}, "bad_policy"),
        ({"head": "{"}, "bad_json"),
    ],
)
def test_bytes_that_are_not_exactly_a_policy_are_refused(
    changes: dict[str, str], reason: str
) -> None:
    weights, metadata = tensors.decode(policy_for(CART).encode())
    with pytest.raises(Refused) as error:
        decode_policy(tensors.encode(weights, metadata | changes))
    assert error.value.reason == reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_from_outside_are_finite_and_fit(bad: float) -> None:
    weights, metadata = tensors.decode(policy_for(CART).encode())
    name = "trunk.0.bias"
    for spoilt in (np.full(8, bad, np.float32), np.zeros(8), np.zeros(9, np.float32)):
        with pytest.raises(Refused, match=name):
            decode_policy(tensors.encode({**weights, name: spoilt}, metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": Head("categorical", 4)}, "as head_for returns"),
        ({"head": Head("epsilon_greedy", 3)}, "head 'q' is missing; epsilon_greedy needs 3"),
        ({"stack": 0}, "stack is 0"),
        ({"stack": 2}, "with stack 2"),
        ({"version": -1}, "version is -1"),
        ({"game": game_spec("cart", obs=5, actions=3)}, "input 'obs' is float32"),
        ({"weights": {}}, "missing or unknown names"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(policy_for(CART), **change)


def test_action_masks_are_refused_for_continuous_actions() -> None:
    policy = policy_for(game_spec("box", obs=2, actions=Box((1,), F32, -1.0, 1.0)))
    with pytest.raises(ConfigError, match="leave out action_mask"):
        policy.act(np.zeros(2), action_mask=[True])
