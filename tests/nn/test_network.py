"""NetworkSpec: its weights and outputs by name, its JSON, and what it refuses."""

import json
from typing import Any

import numpy as np
import pytest

from tests.nn.networks import F32, SPECS, U8, plain, random_weights
from understudy.core.errors import ConfigError
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
    Layer,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    checked_weights,
    network_from_json,
    network_to_json,
)


@pytest.mark.parametrize("name", SPECS)
def test_a_network_is_restored_from_its_json(name: str) -> None:
    spec = SPECS[name]
    restored = network_from_json(network_to_json(spec))
    assert restored == spec
    assert hash(restored) == hash(spec)
    assert network_to_json(restored) == network_to_json(spec)


def test_weights_have_flat_names() -> None:
    spec = NetworkSpec(
        {
            "obs.cam": Input((8, 8, 1), U8, (Conv(2, 4, 2), Flatten())),
            "obs.x": Input((3,), F32, (ObservationNorm(),)),
        },
        (Dense(7), LayerNorm()),
        {"q": (Dueling(4, hidden=5),), "value": (Dense(1),), "log_std": (Constant(2),)},
    )
    assert spec.shapes() == {
        "inputs.obs.cam.0.kernel": (4, 4, 1, 2),
        "inputs.obs.cam.0.bias": (2,),
        "inputs.obs.x.0.mean": (3,),
        "inputs.obs.x.0.var": (3,),
        "inputs.obs.x.0.count": (),
        "trunk.0.kernel": (21, 7),
        "trunk.0.bias": (7,),
        "trunk.1.scale": (7,),
        "trunk.1.bias": (7,),
        "heads.log_std.0.constant": (2,),
        "heads.q.0.value.kernel": (5, 1),
        "heads.q.0.value.bias": (1,),
        "heads.q.0.value_hidden.kernel": (7, 5),
        "heads.q.0.value_hidden.bias": (5,),
        "heads.q.0.advantage.kernel": (5, 4),
        "heads.q.0.advantage.bias": (4,),
        "heads.q.0.advantage_hidden.kernel": (7, 5),
        "heads.q.0.advantage_hidden.bias": (5,),
        "heads.value.0.kernel": (7, 1),
        "heads.value.0.bias": (1,),
    }
    assert spec.outputs() == {"log_std": (2,), "q": (4,), "value": (1,)}


def grid(*layers: Layer, x: tuple[int, ...] | None = None) -> NetworkSpec:
    """A network over a grid with two channels, and a further input of this shape."""
    inputs = {"obs": Input((4, 5, 2), F32, (*layers, Flatten()))}
    if x is not None:
        inputs["obs.x"] = Input(x, F32)
    return NetworkSpec(inputs, (), {"q": ()})


def at(name: str, index: int) -> Centre:
    return Centre(row=(name, -1), column=(name, index))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0), "width is 0"),
        (lambda: Dense(True), "width is True"),
        (lambda: Dense(3, gain=float("nan")), "gain is nan"),
        (lambda: Activation("swish"), "give one of relu, tanh"),
        (lambda: Conv(3, 0), "kernel is 0"),
        (lambda: Channels((0, 0)), "each axis once"),
        (lambda: Channels([0]), "tuple of a row's axes"),  # type: ignore[arg-type]
        (lambda: OneHot(3, start=0.5), "start is 0.5"),  # type: ignore[arg-type]
        (lambda: Input((0,), F32), "shape"),
        (lambda: Input((3,), np.dtype(complex)), "dtype complex128"),
        (lambda: NetworkSpec({}, (), {"q": ()}), "at least one of each"),
        (lambda: NetworkSpec({"camera": Input((3,), F32)}, (), {"q": ()}), "'camera'"),
        (lambda: plain(heads={"Q": ()}), "'Q'"),
        (lambda: plain(ObservationNorm()), "put it in an input's layers"),
        (lambda: plain("dense"), "give layers, such as"),  # type: ignore[arg-type]
        (lambda: plain(*[Dense(1)] * 101), "101 layers"),
        (lambda: plain(Dense(1 << 20), Dense(1 << 20)), "at most 268435456"),
        (lambda: NetworkSpec({"obs": Input((3, 3), F32)}, (), {"q": ()}), "end it with Flatten"),
        (
            lambda: NetworkSpec({"obs": Input((3, 3), F32, (Dense(2),))}, (), {"q": ()}),
            "inputs.obs.0: .*put Flatten",
        ),
        (
            lambda: NetworkSpec({"obs": Input((3, 3), U8, (Conv(2, 2),))}, (), {"q": ()}),
            "move the channels",
        ),
        (
            lambda: NetworkSpec({"obs": Input((3, 3), U8, (Channels((2,)),))}, (), {"q": ()}),
            "axes below 2",
        ),
        (
            lambda: NetworkSpec({"obs": Input((), F32, (LayerNorm(),))}, (), {"q": ()}),
            "single number",
        ),
        (lambda: Centre(), "give a channel from 0, or a row"),
        (lambda: Centre(channel=1, column=("obs.x", -1)), "give a channel from 0, or a row"),
        (lambda: Centre(row=("obs.x", -1)), "give a channel from 0, or a row"),
        (lambda: Centre(row=("obs.x", 0), column=("obs.x", -1)), "or a row and a column"),
        (lambda: Centre(row=("obs.x", -1), column=(-1, "obs.x")), "or a row"),  # type: ignore[arg-type]
        (lambda: Centre(channel=1, others=["obs.x"]), "names of inputs"),  # type: ignore[arg-type]
        (lambda: Centre(channel=1, radius=0), "radius is 0"),
        (lambda: plain(Centre(channel=0)), "put it in an input's layers"),
        (lambda: grid(Centre(channel=2)), "more than 2 channels"),
        (lambda: grid(at("obs.x", -1)), "needs the inputs obs.x"),
        (lambda: grid(at("obs.x", -4), x=(3,)), r"number -4 of obs.x, which has shape \(3,\)"),
        (lambda: grid(Centre(channel=0, others=("obs",))), "needs the inputs obs"),
        (lambda: grid(Centre(channel=0), Centre(channel=0)), "several Centre layers"),
    ],
)
def test_an_invalid_network_is_refused_with_a_hint(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(format=2),
        lambda fields: fields.update(extra=1),
        lambda fields: fields.pop("trunk"),
        lambda fields: fields.update(trunk={}),
        lambda fields: fields["trunk"].append("dense"),
        lambda fields: fields["trunk"].append({"layer": "lambda"}),
        lambda fields: fields["trunk"].append({"layer": "dense", "width": 3}),
        lambda fields: fields["trunk"].append({"layer": "dense", "width": "3", "gain": 1.0}),
        lambda fields: fields["inputs"]["obs"].update(dtype="F8"),
        lambda fields: fields["inputs"]["obs"].update(shape=5),
        lambda fields: fields["inputs"]["obs"].update(more=5),
        lambda fields: fields.update(heads=[]),
    ],
)
def test_json_that_is_not_exactly_a_network_is_refused(change: Any) -> None:
    fields = json.loads(network_to_json(plain(Dense(4), Activation("relu"))))
    change(fields)
    with pytest.raises(ConfigError):
        network_from_json(json.dumps(fields))


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        network_from_json(b"{")


def test_weights_are_copied_as_float32_that_cannot_change() -> None:
    spec = plain(Dense(4))
    originals = {
        name: array.astype(np.float64)
        for name, array in random_weights(spec, np.random.default_rng(0)).items()
    }
    weights = checked_weights(spec, originals)
    originals["trunk.0.kernel"][:] = 0
    assert weights["trunk.0.kernel"].any()
    assert {array.dtype for array in weights.values()} == {F32}
    with pytest.raises(ValueError, match="read-only"):
        weights["trunk.0.kernel"][0, 0] = 1


def test_weights_that_do_not_fit_are_named() -> None:
    spec = plain(Dense(4))
    weights = random_weights(spec, np.random.default_rng(0))
    with pytest.raises(
        ConfigError, match=r"trunk\.0\.bias has shape \(5,\); the network needs \(4,\)"
    ):
        checked_weights(spec, {**weights, "trunk.0.bias": np.zeros(5)})
    with pytest.raises(ConfigError, match="unknown names: more; give"):
        checked_weights(spec, {**weights, "more": np.zeros(5)})
