"""The JAX runtime against the NumPy one, first weights, running statistics and what losses read
from heads."""

import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.networks import F32, SPECS, plain, random_obs, random_weights
from understudy.core.errors import ConfigError
from understudy.learn import networks
from understudy.nn.forward import compile_network, compile_row
from understudy.nn.heads import GAUSSIAN, Head
from understudy.nn.network import Constant, Dense, Dueling, Input, NetworkSpec, ObservationNorm

ROWS = 1_000
TOLERANCE = 1e-5

HEADS = {
    "argmax": Head("argmax", 5),
    "epsilon_greedy": Head("epsilon_greedy", 5),
    "categorical": Head("categorical", 5),
    "gaussian_clipped": Head("gaussian_clipped", 2, (-2.0, -math.inf), (1.0, 3.0)),
    "gaussian_tanh": Head("gaussian_tanh", 2, (-2.0, 0.0), (1.0, 3.0)),
}


def outputs_of(head: Head, rng: np.random.Generator, batch: int = ROWS) -> dict[str, Any]:
    return {
        name: rng.normal(0, 1.5, (batch, head.size)).astype(np.float32) for name in head.outputs
    }


def masks(head: Head, rng: np.random.Generator, batch: int = ROWS) -> Any:
    action_mask = rng.random((batch, head.size)) < 0.4
    action_mask[np.arange(batch), rng.integers(0, head.size, batch)] = True
    return action_mask


applied = jax.jit(networks.apply, static_argnums=0)
"""One program for each spec compiles much sooner than each operation on its own."""
sampled = jax.jit(networks.sample, static_argnums=0, static_argnames="deterministic")


@pytest.mark.parametrize("name", SPECS)
def test_jax_and_numpy_return_the_same_outputs(name: str) -> None:
    rng = np.random.default_rng(1)
    spec = SPECS[name]
    weights = random_weights(spec, rng)
    obs = random_obs(spec, ROWS, rng)
    ours = compile_network(spec, weights)(obs)
    theirs = applied(spec, weights, obs)
    assert ours.keys() == theirs.keys() == spec.heads.keys()
    for head, width in spec.outputs().items():
        assert ours[head].dtype == theirs[head].dtype == np.float32
        assert ours[head].shape == theirs[head].shape == (ROWS, *width)
        np.testing.assert_allclose(ours[head], theirs[head], atol=TOLERANCE, rtol=TOLERANCE)
    alone = compile_row(spec, weights)
    for at in range(32):
        row = alone({column: values[at, ...] for column, values in obs.items()})
        for head, width in spec.outputs().items():
            assert row[head].dtype == np.float32
            assert row[head].shape == width
            np.testing.assert_allclose(row[head], theirs[head][at], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_jax_and_numpy_take_the_same_actions(kind: str, has_masks: bool) -> None:
    rng = np.random.default_rng(2)
    head = HEADS[kind]
    if has_masks and not head.is_discrete:
        return
    outputs = outputs_of(head, rng)
    noise = head.noise(rng, ROWS)
    action_mask = masks(head, rng) if has_masks else None
    epsilons = (
        (np.float32(0.3), rng.random(ROWS, np.float32)) if kind == "epsilon_greedy" else (None,)
    )
    for epsilon, deterministic in ((None, True), *((epsilon, False) for epsilon in epsilons)):
        how: Any = {"explore": epsilon, "action_mask": action_mask, "deterministic": deterministic}
        ours = head.sample(outputs, noise, **how)
        theirs = sampled(head, outputs, noise, **how)
        np.testing.assert_allclose(
            ours.action, theirs.action, atol=0 if head.is_discrete else TOLERANCE
        )
        np.testing.assert_allclose(ours.logp, theirs.logp, atol=TOLERANCE, rtol=TOLERANCE)
        assert (ours.action.dtype, ours.logp.dtype) == (theirs.action.dtype, theirs.logp.dtype)
        if not head.is_discrete:
            np.testing.assert_allclose(ours.raw_action, theirs.raw_action, atol=TOLERANCE)


def test_what_actors_and_games_import_loads_no_jax() -> None:
    code = """
import importlib, pkgutil, sys
for package in ("act", "client", "core"):
    folder = importlib.import_module(f"understudy.{package}")
    for module in pkgutil.iter_modules(folder.__path__, f"understudy.{package}."):
        importlib.import_module(module.name)
print("understudy.act.actor" in sys.modules, "jax" in sys.modules)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert told.split() == ["True", "False"]


@pytest.mark.parametrize("kind", ["categorical", *GAUSSIAN])
def test_logp_equals_that_of_acting(kind: str) -> None:
    rng = np.random.default_rng(3)
    head = HEADS[kind]
    outputs = outputs_of(head, rng)
    action_mask = masks(head, rng) if head.is_discrete else None
    decision = head.sample(outputs, head.noise(rng, ROWS), action_mask=action_mask)
    taken = decision.action if head.is_discrete else decision.raw_action
    found = networks.logp(head, outputs, taken, action_mask)
    np.testing.assert_allclose(found, decision.logp, atol=TOLERANCE, rtol=TOLERANCE)


def test_entropy_counts_valid_actions_only() -> None:
    logits = {"logits": jnp.zeros((2, 4))}
    action_mask = jnp.array([[True, True, True, True], [False, True, False, True]])
    found = networks.entropy(Head("categorical", 4), logits, action_mask)
    np.testing.assert_allclose(found, [math.log(4), math.log(2)], rtol=1e-6)


def test_entropy_of_a_gaussian_is_its_formula() -> None:
    outputs = {"mean": jnp.zeros((1, 2)), "log_std": jnp.array([[0.0, 1.0]])}
    found = networks.entropy(HEADS["gaussian_tanh"], outputs)
    np.testing.assert_allclose(found, [math.log(2 * math.pi * math.e) + 1], rtol=1e-6)


def test_gradients_through_masks_are_finite() -> None:
    head = Head("categorical", 3)
    action_mask = jnp.array([[True, False, False]])

    def loss(logits: Any) -> Any:
        outputs = {"logits": logits}
        return (
            networks.logp(head, outputs, jnp.array([0]), action_mask)
            + networks.entropy(head, outputs, action_mask)
        ).sum()

    for logits in (jnp.zeros((1, 3)), jnp.array([[-jnp.inf, 5.0, 1e30]])):
        assert jnp.isfinite(jax.jit(jax.grad(loss))(logits)).all()


@pytest.mark.parametrize("kind", ["argmax", "epsilon_greedy"])
def test_heads_without_probabilities_reject_logp(kind: str) -> None:
    for ask in (
        lambda: networks.logp(HEADS[kind], {}, 0),
        lambda: networks.entropy(HEADS[kind], {}),
    ):
        with pytest.raises(ConfigError, match="no log probabilities"):
            ask()


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_raw_of_undoes_action_of(kind: str) -> None:
    head = HEADS[kind]
    action = np.random.default_rng(4).uniform([-1.9, 0.1], [0.9, 2.9], (50, 2)).astype(np.float32)
    np.testing.assert_allclose(networks.raw_of(head, action), head.raw_of(action), atol=TOLERANCE)
    np.testing.assert_allclose(
        networks.action_of(head, networks.raw_of(head, action)), action, atol=TOLERANCE
    )


@pytest.mark.parametrize("kind", HEADS)
def test_noise_has_the_shape_that_numpy_draws(kind: str) -> None:
    head = HEADS[kind]
    ours = head.noise(np.random.default_rng(0), 7)
    theirs = networks.noise(jax.random.key(0), head, 7)
    assert (ours is None) == (theirs is None) == (kind == "argmax")
    if ours is not None and theirs is not None:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


# --- Weights and statistics -----------------------------------------------------------------------


def test_first_weights_are_orthogonal_with_the_gain_of_their_layer() -> None:
    heads: Any = {
        "q": (Dueling(3, hidden=8, gain=0.5),),
        "mean": (Dense(2, gain=0.01),),
        "log_std": (Constant(2, -1.0),),
    }
    spec = plain(Dense(16), heads=heads)
    weights = networks.init_weights(jax.random.key(0), spec)
    assert {name: array.shape for name, array in weights.items()} == dict(spec.shapes())
    wide = weights["trunk.0.kernel"]
    narrow = weights["heads.mean.0.kernel"]
    np.testing.assert_allclose(wide @ wide.T, 2 * np.eye(5), atol=1e-5)
    np.testing.assert_allclose(narrow.T @ narrow, 1e-4 * np.eye(2), atol=1e-8)
    hidden = weights["heads.q.0.value_hidden.kernel"]
    last = weights["heads.q.0.value.kernel"]
    np.testing.assert_allclose(hidden.T @ hidden, 2 * np.eye(8), atol=1e-5)
    np.testing.assert_allclose(last.T @ last, [[0.25]], atol=1e-6)
    assert not weights["trunk.0.bias"].any()
    np.testing.assert_array_equal(weights["heads.log_std.0.constant"], [-1, -1])


def test_a_lane_starts_with_the_same_weights_as_the_run_alone() -> None:
    spec = SPECS["observation norm"]
    keys = jax.random.split(jax.random.key(5), 3)
    lanes = jax.jit(jax.vmap(lambda key: networks.init_weights(key, spec)))(keys)
    for lane, key in enumerate(keys):
        for name, array in networks.init_weights(key, spec).items():
            np.testing.assert_array_equal(lanes[name][lane], array)
    assert (lanes["trunk.0.kernel"][0] != lanes["trunk.0.kernel"][1]).any()


def test_apply_takes_any_axes_before_the_row() -> None:
    spec = SPECS["choices"]
    rng = np.random.default_rng(6)
    weights = random_weights(spec, rng)
    obs = random_obs(spec, 6, rng)
    flat = applied(spec, weights, obs)["q"]
    timed = applied(
        spec, weights, {name: x.reshape(2, 3, *x.shape[1:]) for name, x in obs.items()}
    )["q"]
    one = applied(spec, weights, {name: x[4] for name, x in obs.items()})["q"]
    np.testing.assert_array_equal(timed.reshape(6, -1), flat)
    np.testing.assert_allclose(one, flat[4], rtol=1e-5)


def test_values_beyond_limits_are_left_out_of_running_statistics():
    spec = NetworkSpec({"obs": Input((2,), F32, (ObservationNorm(),))}, (), {"q": (Dense(1),)})
    obs = np.array([[0, 0], [1, 1], [1e6, 3]], np.float32)
    weights = networks.observe(
        spec,
        networks.init_weights(jax.random.PRNGKey(0), spec),
        {"obs": obs},
        limits={"obs": np.array([[-np.inf, 1], [5, np.inf]], np.float32)},
    )
    np.testing.assert_allclose(weights["inputs.obs.0.mean"], [0.5, 2.0], rtol=1e-3)
    np.testing.assert_allclose(weights["inputs.obs.0.var"], [0.25, 1.0], rtol=1e-3)
    nothing = networks.observe(
        spec, weights, {"obs": obs}, limits={"obs": np.full((2, 2), -5, np.float32)}
    )
    np.testing.assert_allclose(nothing["inputs.obs.0.mean"], [0.5, 2.0], rtol=1e-3)


def observed(spec: NetworkSpec, obs: Any, *, parts: int) -> dict[str, Any]:
    weights: Any = networks.init_weights(jax.random.key(0), spec)
    for part in np.array_split(obs, parts):
        weights = jax.jit(networks.observe, static_argnums=0)(spec, weights, {"obs": part})
    return dict(weights)


def test_running_statistics_are_those_of_all_observations() -> None:
    spec = SPECS["observation norm"]
    obs = np.random.default_rng(7).normal(5, 3, (300, 2, 3))
    weights = observed(spec, obs, parts=3)
    np.testing.assert_allclose(weights["inputs.obs.0.mean"], obs.mean(0), rtol=1e-4)
    np.testing.assert_allclose(weights["inputs.obs.0.var"], obs.var(0), rtol=1e-3)
    assert weights["inputs.obs.0.count"] == 300


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e30])
def test_running_statistics_survive_absurd_observations(bad: float) -> None:
    obs = np.random.default_rng(8).normal(0, 1, (100, 2, 3))
    obs[3, 1, 1] = bad
    weights = observed(SPECS["observation norm"], obs, parts=2)
    assert all(np.isfinite(array).all() for array in weights.values())
    np.testing.assert_allclose(weights["inputs.obs.0.var"], 1, atol=0.6)


def test_observing_changes_nothing_without_the_layer_and_trains_nothing_with_it() -> None:
    rng = np.random.default_rng(9)
    spec = SPECS["dueling"]
    weights = random_weights(spec, rng)
    assert networks.observe(spec, weights, random_obs(spec, 4, rng)) == weights
    spec = SPECS["observation norm"]
    weights = random_weights(spec, rng)
    obs = random_obs(spec, 4, rng)
    grads: Any = jax.jit(jax.grad(lambda weights: networks.apply(spec, weights, obs)["q"].sum()))(
        weights
    )
    assert not any(grads[f"inputs.obs.0.{part}"].any() for part in ("mean", "var", "count"))
    assert grads["trunk.0.kernel"].any()
