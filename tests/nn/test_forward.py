"""The NumPy runtime against formulas written by hand; tests/learn compares it with JAX."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.nn.networks import F32, SPECS, U8, image, plain, random_obs, random_weights
from understudy.nn.forward import compile_network, compile_row
from understudy.nn.network import (
    Activation,
    Centre,
    Channels,
    Constant,
    Conv,
    Dense,
    Dueling,
    Flatten,
    Input,
    NetworkSpec,
    ObservationNorm,
    ScaleImage,
    aligned,
)


def outputs(spec: Any, weights: Any, obs: Any) -> Any:
    return compile_network(spec, weights)({"obs": obs})["q"]


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("tanh", math.tanh),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        (
            "gelu",
            lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
        ("elu", lambda x: x if x > 0 else math.expm1(x)),
    ],
)
def test_activations_are_their_formulas_and_never_overflow(name: str, formula: Any) -> None:
    x = np.array([[-80.0, -2.0, -0.1, 0.0, 3.0]], np.float32)
    spec = plain(heads={"q": (Activation(name),)})
    np.testing.assert_allclose(
        outputs(spec, {}, x)[0], [formula(float(value)) for value in x[0]], atol=1e-6
    )
    assert np.isfinite(outputs(spec, {}, x * 1e9)).all()


def test_a_convolution_is_the_sum_over_each_patch() -> None:
    rng = np.random.default_rng(0)
    spec = image((2, 7, 6), Channels((0,)), Conv(3, 3, 2))
    weights = random_weights(spec, rng)
    frames = rng.integers(0, 256, (2, 2, 7, 6), dtype=np.uint8)
    kernel = weights["inputs.obs.2.kernel"]
    bias = weights["inputs.obs.2.bias"]
    rows = frames.transpose(0, 2, 3, 1) / 255
    found = np.empty((2, 3, 2, 3))
    for at in np.ndindex(3, 2):
        patch = rows[:, 2 * at[0] : 2 * at[0] + 3, 2 * at[1] : 2 * at[1] + 3]
        found[:, at[0], at[1]] = np.tensordot(patch, kernel, 3) + bias
    wanted = found.reshape(2, -1) @ weights["heads.q.0.kernel"] + weights["heads.q.0.bias"]
    np.testing.assert_allclose(outputs(spec, weights, frames), wanted, atol=1e-5)


def test_a_grid_is_shown_from_the_highest_cell_of_a_channel() -> None:
    """A grid of 3 x 4, with the cell in its second row and last column set."""
    cells = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    mark = np.zeros((1, 3, 4), np.float32)
    mark[0, 1, 3] = 1
    spec = NetworkSpec(
        {"obs": Input((3, 4, 2), F32, (Centre(channel=1, radius=2), Flatten()))}, (), {"q": ()}
    )
    assert spec.outputs() == {"q": (5 * 5 * 3,)}
    run = compile_network(spec, {})
    shown = run({"obs": np.stack([cells, mark], -1)})["q"].reshape(5, 5, 3)
    assert shown[..., 0].tolist() == [
        [0, 0, 0, 0, 0],
        [1, 2, 3, 0, 0],
        [5, 6, 7, 0, 0],
        [9, 10, 11, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert np.argwhere(shown[..., 1]).tolist() == [[2, 2]]
    assert np.argwhere(shown[..., 2]).tolist() == [
        [row, column] for row in (1, 2, 3) for column in (0, 1, 2)
    ]


def test_dueling_is_value_plus_advantage_minus_its_mean() -> None:
    rng = np.random.default_rng(1)
    spec = plain(heads={"q": (Dueling(3),)})
    weights = random_weights(spec, rng)
    x = rng.normal(size=(4, 5)).astype(np.float32)
    value = x @ weights["heads.q.0.value.kernel"] + weights["heads.q.0.value.bias"]
    advantage = x @ weights["heads.q.0.advantage.kernel"] + weights["heads.q.0.advantage.bias"]
    wanted = value + advantage - advantage.mean(1, keepdims=True)
    np.testing.assert_allclose(outputs(spec, weights, x), wanted, atol=1e-5)


def test_observations_are_cast_and_not_changed() -> None:
    rng = np.random.default_rng(2)
    spec = SPECS["activation alone"]
    weights = random_weights(spec, rng)
    obs = rng.normal(size=(3, 5))
    before = obs.copy()
    result = outputs(spec, weights, obs)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(obs, before)
    narrow = obs.astype(np.float32)
    np.testing.assert_array_equal(outputs(spec, weights, narrow), result)
    np.testing.assert_array_equal(narrow, before.astype(np.float32))


def test_rows_of_a_strided_array_are_read_in_order() -> None:
    rng = np.random.default_rng(3)
    spec = SPECS["stacked colour images"]
    weights = random_weights(spec, rng)
    obs = random_obs(spec, 6, rng)["obs"]
    np.testing.assert_allclose(
        outputs(spec, weights, obs[::2]), outputs(spec, weights, obs)[::2], atol=1e-6
    )


def test_only_the_requested_heads_are_computed() -> None:
    rng = np.random.default_rng(4)
    spec = SPECS["choices"]
    run = compile_network(spec, random_weights(spec, rng), heads=("value",))
    assert run(random_obs(spec, 2, rng)).keys() == {"value"}


def test_a_constant_has_the_batch_size_and_is_read_only() -> None:
    spec = plain(Dense(2), heads={"q": (Constant(2),)})
    weights = {
        **random_weights(spec, np.random.default_rng(5)),
        "heads.q.0.constant": np.array([1, 2], np.float32),
    }
    run = compile_network(spec, weights)
    for batch in range(1, 12):
        found = run({"obs": np.zeros((batch, 5), np.float32)})["q"]
        np.testing.assert_array_equal(found, [[1, 2]] * batch)
        assert not found.flags.writeable


SINGLE_NUMBERS = NetworkSpec(
    {
        "obs": Input((), F32, (ObservationNorm(), Activation("sigmoid"), Flatten())),
        "obs.byte": Input((), U8, (ScaleImage(), Channels(), Activation("elu"))),
    },
    (Constant(2, 1.0), Activation("silu")),
    {"q": (Dense(3),), "same": ()},
)


@pytest.mark.parametrize("spec", [*SPECS.values(), SINGLE_NUMBERS], ids=[*SPECS, "single numbers"])
def test_one_row_has_the_same_outputs_as_in_a_batch(spec: NetworkSpec) -> None:
    rng = np.random.default_rng(7)
    weights = random_weights(spec, rng)
    obs = random_obs(spec, 20, rng)
    wanted = compile_network(spec, weights)(obs)
    alone = compile_row(spec, weights)
    for at in range(20):
        row = {name: column[at, ...] for name, column in obs.items()}
        before = {name: column.copy() for name, column in row.items()}
        found = alone(row)
        assert found.keys() == wanted.keys()
        for name, output in found.items():
            np.testing.assert_allclose(output, wanted[name][at], atol=1e-5, rtol=1e-5)
        for name, column in row.items():
            np.testing.assert_array_equal(column, before[name])


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 3), (3, 1), (0, 1, 2, 3)])
def test_channels_are_moved_last_however_many_there_are(axes: tuple[int, ...]) -> None:
    for shape in ((4, 3, 2, 5), (20, 3, 2, 9)):
        x = np.random.default_rng(8).random((2, *shape), np.float32)
        spec = NetworkSpec({"obs": Input(shape, F32, (Channels(axes), Flatten()))}, (), {"q": ()})
        wanted = x.transpose(
            0, *(axis + 1 for axis in range(4) if axis not in axes), *(axis + 1 for axis in axes)
        )
        np.testing.assert_array_equal(outputs(spec, {}, x), wanted.reshape(2, -1))
        np.testing.assert_array_equal(compile_row(spec, {})({"obs": x[0]})["q"], wanted[0].ravel())


def test_aligned_arrays_start_with_a_cache_line() -> None:
    many = np.arange(100, dtype=np.float32)
    for start in range(20):
        found = aligned(many[start:90].reshape(-1, 2 if start % 2 == 0 else 1))
        assert found.ctypes.data % 64 == 0
        np.testing.assert_array_equal(found.ravel(), many[start:90])
        assert aligned(found) is found


def test_threads_share_a_network() -> None:
    rng = np.random.default_rng(6)
    spec = plain(Dense(64), Activation("relu"), Dense(64), Activation("tanh"))
    run = compile_network(spec, random_weights(spec, rng))
    batches = [random_obs(spec, 1 + n % 5, rng) for n in range(200)]
    alone = [run(obs)["q"] for obs in batches]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(alone, pool.map(lambda obs: run(obs)["q"], batches), strict=True):
            np.testing.assert_array_equal(one, other)
