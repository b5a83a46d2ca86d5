"""Heads: action frequencies, action masks for any outputs, densities, bounds and JSON."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.core.errors import ConfigError
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete, MultiDiscrete
from understudy.nn.heads import (
    DISCRETE,
    GAUSSIAN,
    Head,
    env_actions,
    head_for,
    head_from_json,
    head_to_json,
)

F32 = DTYPES["F32"]
F64 = DTYPES["F64"]
BATCH = 20_000


def box_game(
    low: Any = -2.0, high: Any = 2.0, shape: tuple[int, ...] = (2,), dtype: Any = F32
) -> Any:
    return game_spec("box", obs=3, actions=Box(shape, dtype, low, high))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@given(
    kind=st.sampled_from(DISCRETE),
    outputs=hnp.arrays(
        np.float32, (6, 4), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
    ),
    action_mask=hnp.arrays(np.bool_, (6, 4)),
    forced=st.integers(0, 3),
    epsilon=st.sampled_from([None, 0.0, 0.5, 1.0]),
    deterministic=st.booleans(),
)
def test_an_invalid_action_is_never_taken_whatever_the_outputs(
    kind: str, outputs: Any, action_mask: Any, forced: int, epsilon: Any, deterministic: bool
) -> None:
    action_mask[:, forced] |= ~action_mask.any(1)
    head = Head(kind, 4)
    noise = head.noise(np.random.default_rng(0), 6)
    with np.errstate(all="ignore"):
        decision = head.sample(
            {head.outputs[0]: outputs},
            noise,
            explore=epsilon,
            action_mask=action_mask,
            deterministic=deterministic,
        )
    assert action_mask[np.arange(6), decision.action].all()


@pytest.mark.parametrize("action_mask", [None, np.array([[True, False, True, True]])])
def test_categorical_samples_by_probability(action_mask: Any) -> None:
    head = Head("categorical", 4)
    logits = np.array([[0.0, 1.0, 2.0, -1.0]], np.float32)
    mask = None if action_mask is None else np.repeat(action_mask, BATCH, 0)
    noise = head.noise(np.random.default_rng(1), BATCH)
    decision = head.sample({"logits": np.repeat(logits, BATCH, 0)}, noise, action_mask=mask)
    wanted = np.exp(logits[0]) * (1 if action_mask is None else action_mask[0])
    wanted /= wanted.sum()
    found = np.bincount(decision.action, minlength=4) / BATCH
    np.testing.assert_allclose(found, wanted, atol=0.015)
    np.testing.assert_allclose(np.exp(decision.logp), wanted[decision.action], rtol=1e-4)


def test_epsilon_greedy_explores_valid_actions_evenly_and_knows_its_probability() -> None:
    head = Head("epsilon_greedy", 4)
    q = np.repeat([[0.0, 3.0, 2.0, 1.0]], BATCH, 0).astype(np.float32)
    action_mask = np.repeat([[True, False, True, True]], BATCH, 0)
    decision = head.sample(
        {"q": q}, head.noise(np.random.default_rng(2), BATCH), explore=0.3, action_mask=action_mask
    )
    found = np.bincount(decision.action, minlength=4) / BATCH
    np.testing.assert_allclose(found, [0.1, 0, 0.8, 0.1], atol=0.012)
    np.testing.assert_allclose(
        np.exp(decision.logp), np.array([0.1, 0, 0.8, 0.1])[decision.action], rtol=1e-5
    )


def test_each_row_may_have_its_own_epsilon() -> None:
    head = Head("epsilon_greedy", 3)
    epsilon = np.repeat([0.0, 1.0], BATCH // 2).astype(np.float32)
    q = np.tile(np.array([5, 0, 0], np.float32), (BATCH, 1))
    decision = head.sample({"q": q}, head.noise(np.random.default_rng(3), BATCH), explore=epsilon)
    calm = decision.action[: BATCH // 2]
    wild = decision.action[BATCH // 2 :]
    assert not calm.any()
    np.testing.assert_allclose(np.bincount(wild) / len(wild), 1 / 3, atol=0.02)
    assert np.isfinite(decision.logp).all()


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_gaussian_logp_is_the_density_of_the_raw_action(kind: str) -> None:
    head = head_for(box_game(), kind)
    rng = np.random.default_rng(4)
    mean, log_std = (rng.normal(size=(50, 2)).astype(np.float32) for _ in range(2))
    decision = head.sample({"mean": mean, "log_std": log_std}, head.noise(rng, 50))
    std = np.exp(log_std)
    density = np.exp(-0.5 * ((decision.raw_action - mean) / std) ** 2) / (
        std * math.sqrt(2 * math.pi)
    )
    np.testing.assert_allclose(decision.logp, np.log(density.prod(1)), rtol=1e-3, atol=1e-4)
    assert (np.abs(decision.action) <= 2).all()
    squash: Any = np.tanh if kind == "gaussian_tanh" else lambda raw: np.clip(raw, -1, 1)
    np.testing.assert_allclose(decision.action, 2 * squash(decision.raw_action), atol=1e-5)


def test_unbounded_numbers_are_not_scaled() -> None:
    head = head_for(box_game(low=(0.0, -3.4e38), high=(4.0, 5.0)), "gaussian_clipped")
    assert (head.low, head.high) == ((0.0, -math.inf), (4.0, 5.0))
    raw = np.array([[0.5, -1e6], [-7.0, 6.0]], np.float32)
    np.testing.assert_allclose(head.action_of(raw), [[3.0, -1e6], [0.0, 5.0]])


@pytest.mark.parametrize("kind", [*DISCRETE, *GAUSSIAN])
def test_deterministic_actions_need_no_noise_and_are_certain(kind: str) -> None:
    head = head_for(game_spec("g", obs=1, actions=3) if kind in DISCRETE else box_game(), kind)
    outputs = {name: np.array([[0.1, 0.7, 0.2][: head.size]], np.float32) for name in head.outputs}
    decision = head.sample(outputs, None, deterministic=True)
    assert decision.logp.tolist() == [0.0]
    if kind in DISCRETE:
        assert decision.action.tolist() == [1]
        assert decision.action.dtype == np.int32
    else:
        np.testing.assert_array_equal(decision.raw_action, outputs["mean"])


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_raw_of_stays_finite_at_the_bounds(kind: str) -> None:
    head = head_for(box_game(), kind)
    ends = np.array([[-2.0, 2.0]], np.float32)
    assert np.isfinite(head.raw_of(ends)).all()
    np.testing.assert_allclose(head.action_of(head.raw_of(ends)), ends, atol=5e-3)


def test_actions_are_converted_to_those_of_the_env() -> None:
    shifted = env_actions(game_spec("g", obs=1, actions=Discrete(3, 5)), np.array([0, 2], np.int32))
    assert (shifted.tolist(), shifted.dtype) == ([5, 7], DTYPES["I32"])
    game = box_game(low=0.1, high=0.1 + 1e-9, shape=(2, 1), dtype=F64)
    boxed = env_actions(game, np.array([[0.1, 0.3]], np.float32))
    assert (boxed.shape, boxed.dtype) == ((1, 2, 1), F64)
    assert game.action[""].contains(boxed).all()


@pytest.mark.parametrize(
    "head",
    [
        Head("argmax", 3),
        Head("gaussian_clipped", 2, (-1.5, -math.inf), (math.inf, 2.0)),
        head_for(box_game()),
    ],
)
def test_a_head_is_restored_from_its_json(head: Head) -> None:
    assert head_from_json(json.loads(json.dumps(head_to_json(head)))) == head


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Head("softmax", 3), "'softmax' is not known"),
        (lambda: Head("argmax", 0), "size 0"),
        (lambda: Head("argmax", 2, (0.0, 0.0), (1.0, 1.0)), "has no bounds"),
        (lambda: Head("gaussian_clipped", 2, (0.0,), (1.0,)), "give 2 numbers"),
        (lambda: Head("gaussian_clipped", 1, (1.0,), (1.0,)), "not below high"),
        (lambda: Head("gaussian_tanh", 1, (-math.inf,), (1.0,)), "bounds on both sides"),
        (lambda: head_for(box_game(), "categorical"), "use a gaussian head"),
        (lambda: head_for(game_spec("g", obs=1, actions=3), "gaussian_tanh"), "one Box of floats"),
        (
            lambda: head_for(game_spec("g", obs=1, actions=MultiDiscrete((2, 2), (2,)))),
            "one Box of floats",
        ),
        (lambda: head_for(box_game(), "softmax"), "not known"),
        (lambda: head_from_json({"kind": "argmax"}), "expected exactly kind, size, low and high"),
        (
            lambda: head_from_json({"kind": "argmax", "size": 2, "low": "0", "high": []}),
            "list of numbers",
        ),
    ],
)
def test_invalid_heads_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
