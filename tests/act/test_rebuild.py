"""An actor that resumes from its saved state does exactly what it would have done."""

import json
from typing import Any

import numpy as np
import pytest

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv, UnseededEnv
from tests.act.policies import random_policy
from understudy.act.actor import Actor
from understudy.act.vector import game_of, make_envs
from understudy.core.errors import ConfigError
from understudy.nn.policy import Policy


def actor_of(make: Any, num_envs: int = 4, root_seed: int = 5) -> Actor:
    envs = make_envs(make, num_envs)
    return Actor(envs, game_of(envs), root_seed=root_seed, created_ms=1_700_000_000_000)


def saved(actor: Actor) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays, facts = actor.state()
    return arrays, json.loads(json.dumps(facts))


@pytest.mark.parametrize(
    ("make", "kind", "stack"),
    [
        (PlainEnv, "categorical", 1),
        (PlainEnv, "epsilon_greedy", 3),
        (MaskedEnv, "categorical", 1),
        (MixedEnv, "gaussian_tanh", 1),
        ("CartPole-v1", "categorical", 2),
    ],
)
def test_a_resumed_actor_is_bit_equal(make: Any, kind: str, stack: int):
    whole = actor_of(make)
    rounds = [3, 1, 9, 2, 30, 4, 4]
    policy = random_policy(whole.game, kind, stack=stack)
    for number, steps in enumerate(rounds):
        resumed = actor_of(make)
        resumed.restore(*saved(whole))
        wanted = whole.collect(policy, steps, round_no=number, explore=0.3)
        got = resumed.collect(policy, steps, round_no=number, explore=0.3)
        assert got.chunks == wanted.chunks
        assert got.episodes == wanted.episodes
        again = saved(resumed)
        kept = saved(whole)
        assert again[1] == kept[1]
        assert {name: rows.tobytes() for name, rows in again[0].items()} == {
            name: rows.tobytes() for name, rows in kept[0].items()
        }


def played(make: Any, root_seed: int = 5) -> tuple[Actor, Policy]:
    actor = actor_of(make, root_seed=root_seed)
    policy = random_policy(actor.game, "categorical")
    actor.collect(policy, 13, round_no=0)
    return actor, policy


def test_an_env_with_randomness_beyond_its_seed_is_named():
    arrays, facts = saved(played(UnseededEnv)[0])
    with pytest.raises(ConfigError, match=r"env \d of UnseededEnv cannot be rebuilt from its seed"):
        actor_of(UnseededEnv).restore(arrays, facts)


def test_a_state_that_differs_from_the_rebuilt_one_is_rejected():
    arrays, facts = saved(played(PlainEnv)[0])
    arrays["live.obs"] = arrays["live.obs"] + np.float32(0.5)
    with pytest.raises(ConfigError, match="'obs' is"):
        actor_of(PlainEnv).restore(arrays, facts)


def test_the_state_of_another_actor_is_rejected():
    arrays, facts = saved(played(PlainEnv)[0])
    with pytest.raises(ConfigError, match="restore it in the actor that saved it"):
        actor_of(PlainEnv, root_seed=6).restore(arrays, facts)
    with pytest.raises(ConfigError, match="restore it in the actor that saved it"):
        actor_of(PlainEnv, num_envs=3).restore(arrays, facts)
