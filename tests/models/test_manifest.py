"""A manifest proves that the bytes one holds are the model that was signed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.act.policies import random_policy
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import Refused
from understudy.experience.game import game_spec
from understudy.models.manifest import (
    Lineage,
    Manifest,
    make_manifest,
    manifest_from_json,
    open_policy,
)
from understudy.nn.policy import Policy

GAME = game_spec("pong", obs=6, actions=3)


def made(seed: int = 0) -> tuple[Policy, bytes, Manifest]:
    policy = random_policy(GAME, "argmax", seed=seed)
    raw = policy.encode()
    return (
        policy,
        raw,
        make_manifest(
            policy, raw, model_no=7, lineage=Lineage(algorithm="dqn", metrics={"loss": 0.5})
        ),
    )


def test_a_manifest_survives_json_and_opens_its_policy():
    policy, raw, manifest = made()
    again = manifest_from_json(strict_json(canonical_json(manifest.to_json())))
    assert again == manifest
    assert open_policy(again, raw) == policy
    assert again.name == "pong/7"


def test_other_bytes_are_refused_before_they_are_parsed():
    _, raw, manifest = made()
    for wrong in (raw[:-1], raw + b"\0", made(seed=1)[1], b""):
        with pytest.raises(Refused, match="bad_hash"):
            open_policy(manifest, wrong)


def test_a_policy_with_other_outputs_than_signed_is_refused():
    """For example when another version computes something else from the same weights."""
    _, raw, manifest = made()
    outputs = {name: (np.asarray(rows) + 0.01).tolist() for name, rows in manifest.golden.items()}
    with pytest.raises(Refused, match="bad_golden"):
        open_policy(replace(manifest, golden=outputs), raw)
    with pytest.raises(Refused, match="bad_golden"):
        open_policy(replace(manifest, golden={}), raw)


@pytest.mark.parametrize(
    "change",
    [
        {"model_no": 0},
        {"model_no": "7"},
        {"model_no": True},
        {"policy_sha256": "../../etc"},
        {"policy_bytes": 0},
        {"policy_bytes": 1 << 60},
        {"game": "../x"},
        {"lineage": {}},
        {"golden": []},
        {"extra": 1},
    ],
)
def test_facts_of_the_wrong_shape_are_refused(change: dict[str, Any]):
    with pytest.raises(Refused, match="bad_manifest"):
        manifest_from_json(made()[2].to_json() | change)


@pytest.mark.parametrize("facts", [None, [], "x", {}, {"lineage": None}])
def test_anything_else_is_not_a_manifest(facts: Any):
    with pytest.raises(Refused, match="bad_manifest"):
        manifest_from_json(facts)
