"""A model is looked at without playing, in a process that has no JAX and no game."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.simulation.recordings import CONTINUOUS, GAME, balancing_policy
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from understudy.experience.writer import obs_reader
from understudy.models.gate import ModelCheck
from understudy.models.manifest import Lineage, Manifest, make_manifest
from understudy.nn.policy import Policy
from understudy.release.model_check import (
    Budget,
    check_in_subprocess,
    check_model,
    fuzzed_observations,
)

BUDGET = Budget()
NESTED = game_spec(
    "nested",
    actions=3,
    has_action_mask=True,
    obs={
        "self.hp": Box((2,), np.dtype(np.float16)),
        "room": Discrete(5, 2),
        "kit": MultiBinary((3,)),
        "cards": MultiDiscrete((2, 9), (2,)),
        "map": Box((2, 2), np.dtype(np.uint8), 0, 7),
        "far": Box((1,), np.dtype(np.int64)),
        "box": Box((2,), np.dtype(np.float32), (0.0, 1.0), (2.0, 3.0)),
    },
)


def model(policy: Policy) -> tuple[Manifest, bytes]:
    raw = policy.encode()
    return make_manifest(policy, raw, model_no=1, lineage=Lineage(algorithm="bc")), raw


def failed(checks: list[ModelCheck]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_sound_model_passes_in_a_process_without_jax_or_a_game():
    checks = check_in_subprocess(*model(balancing_policy()), BUDGET)
    assert [check.name for check in checks] == ["size", "loads", "acts", "latency", "light"]
    assert failed(checks) == []


@pytest.mark.parametrize(
    ("game", "kind"),
    [
        (GAME, "categorical"),
        (CONTINUOUS, "gaussian_clipped"),
        (CONTINUOUS, "gaussian_tanh"),
        (game_spec("masked", obs=3, actions=4, has_action_mask=True), "categorical"),
    ],
)
def test_policies_of_every_kind_pass(game: GameSpec, kind: str):
    for stack in (1, 3):
        assert failed(check_model(*model(random_policy(game, kind, stack=stack)), BUDGET)) == []


def test_fuzzed_observations_lie_in_their_spaces_up_to_the_ends():
    read = obs_reader(NESTED)
    seen = []
    for obs in fuzzed_observations(NESTED, np.random.default_rng(0)):
        columns = read(obs)
        for name, space in NESTED.obs_columns.items():
            assert space.contains(np.asarray(columns[name])[None]).all(), name
        seen.append(columns)
    assert {int(one["obs.room"]) for one in seen} >= {2, 6}
    assert max(one["obs.cards"][1] for one in seen) == 8
    assert max(abs(float(one["obs.self.hp"][0])) for one in seen) > 1_000


def test_bytes_that_are_not_the_model_fail():
    manifest, raw = model(balancing_policy())
    for bad in (
        raw[:-1],
        raw[:100],
        b"",
        raw.replace(b"tanh", b"relu"),
        model(balancing_policy(spin=0.5))[1],
    ):
        assert failed(check_model(manifest, bad, BUDGET)) == ["loads"]


def test_weights_that_are_not_finite_fail_also_when_they_were_signed():
    manifest, raw = model(balancing_policy())
    one = np.float32(balancing_policy().weights["trunk.0.kernel"].ravel()[3]).tobytes()
    poisoned = raw.replace(one, np.float32(np.nan).tobytes(), 1)
    assert poisoned != raw
    signed = replace(manifest, policy_sha256=hashlib.sha256(poisoned).hexdigest())
    assert failed(check_in_subprocess(signed, poisoned, BUDGET)) == ["loads"]


def test_a_model_that_decides_otherwise_than_when_it_was_signed_fails():
    manifest, raw = model(balancing_policy())
    other = {name: (np.asarray(rows) + 0.1).tolist() for name, rows in manifest.golden.items()}
    (check,) = check_model(replace(manifest, golden=other), raw, BUDGET)
    assert "bad_golden" in check.detail


def test_a_model_that_is_too_large_or_too_slow_fails():
    manifest, raw = model(balancing_policy())
    assert failed(check_model(manifest, raw, Budget(max_bytes=100))) == ["size"]
    assert failed(check_model(manifest, raw, Budget(max_decision_ms=1e-6))) == ["latency"]


def test_a_check_that_takes_too_long_or_dies_has_failed():
    manifest, raw = model(balancing_policy())
    (check,) = check_in_subprocess(manifest, raw, Budget(timeout_s=0.001))
    assert "the check timed out after" in check.detail
    (check,) = check_in_subprocess(replace(manifest, policy_sha256="no hash"), raw, BUDGET)
    assert "the check process exited with 1" in check.detail
