"""Networks that cover every kind of layer, with weights and observations for them."""

import numpy as np

from understudy.core.tensors import DTYPES, Array
from understudy.nn.network import (
    ACTIVATIONS,
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
    ScaleImage,
)

F32 = DTYPES["F32"]
U8 = DTYPES["U8"]
I64 = DTYPES["I64"]


def plain(
    *trunk: Layer, heads: dict[str, tuple[Layer, ...]] | None = None, size: int = 5
) -> NetworkSpec:
    """A network over one vector."""
    return NetworkSpec({"obs": Input((size,), F32)}, trunk, heads or {"q": (Dense(3, 1.0),)})


def image(shape: tuple[int, ...], *layers: Layer) -> NetworkSpec:
    """A network over one image."""
    return NetworkSpec(
        {"obs": Input(shape, U8, (ScaleImage(), *layers, Flatten()))}, (), {"q": (Dense(3),)}
    )


SPECS: dict[str, NetworkSpec] = {
    **{name: plain(Dense(16), Activation(name)) for name in ACTIVATIONS},
    "activation alone": plain(
        Activation("silu"), Dense(4), heads={"q": (Activation("elu"), Dense(2))}
    ),
    "layer norm": plain(Dense(16), LayerNorm(), Activation("relu"), LayerNorm()),
    "observation norm": NetworkSpec(
        {"obs": Input((2, 3), DTYPES["F64"], (ObservationNorm(), Flatten()))},
        (Dense(8),),
        {"q": (Dense(2),)},
    ),
    "dueling": plain(Dense(16), heads={"q": (Dueling(4),)}),
    "dueling with hidden layers": plain(heads={"q": (Dueling(4, hidden=8), Activation("tanh"))}),
    "constant": plain(Dense(8), heads={"mean": (Dense(2),), "log_std": (Constant(2, -0.5),)}),
    "grey image": image((9, 10), Channels(), Conv(4, 3, 2), Activation("relu"), Conv(3, 2, 1)),
    "colour image": image((9, 8, 3), Conv(4, 3, 1), LayerNorm()),
    "stacked colour images": image(
        (4, 9, 8, 3), Channels((0, 3)), Conv(5, 4, 3), Activation("gelu")
    ),
    "a grid shown from a cell": image(
        (5, 7, 3), Centre(channel=1, radius=2), Conv(4, 3), Activation("relu")
    ),
    "a grid shown from a place": NetworkSpec(
        {
            "obs.map": Input(
                (2, 4, 6),
                I64,
                (
                    OneHot(200),
                    Channels((0, 3)),
                    Centre(
                        row=("obs.place", -1),
                        column=("obs.place", -2),
                        others=("obs.x", "obs.place"),
                    ),
                    Conv(3, 1),
                    Flatten(),
                ),
            ),
            "obs.place": Input((2, 2), I64, (OneHot(7), Flatten())),
            "obs.x": Input((3,), F32, (ObservationNorm(),)),
        },
        (Dense(8),),
        {"q": (Dense(2),)},
    ),
    "a grid of numbers that are codes": NetworkSpec(
        {"obs": Input((2, 4, 6), F32, (OneHot(3), Channels((0, 3)), Centre(channel=4), Flatten()))},
        (Dense(8),),
        {"q": (Dense(2),)},
    ),
    "choices": NetworkSpec(
        {
            "obs": Input((), I64, (OneHot(4, 2),)),
            "obs.many": Input((3,), U8, (OneHot(5), Flatten())),
        },
        (Dense(8), Activation("tanh")),
        {"q": (Dense(2),), "value": (Dense(1),)},
    ),
}


def random_weights(spec: NetworkSpec, rng: np.random.Generator) -> dict[str, Array]:
    """Weights of a usual size; variances and counts above 0."""
    weights = {}
    for name, shape in spec.shapes().items():
        values = rng.normal(0, 0.4, shape).astype(np.float32)
        weights[name] = (
            np.abs(values) + np.float32(0.1) if name.endswith(("var", "count")) else values
        )
    return weights


def random_obs(spec: NetworkSpec, batch: int, rng: np.random.Generator) -> dict[str, Array]:
    """Observations of every column's dtype."""
    obs: dict[str, Array] = {}
    for name, column in spec.inputs.items():
        shape = (batch, *column.shape)
        if column.dtype.kind == "f":
            values = rng.normal(0, 2, shape)
            is_code = OneHot in map(type, column.layers)
            obs[name] = (np.rint(values) if is_code else values).astype(column.dtype)
        else:
            high = 256 if len(column.shape) > 1 else 8
            obs[name] = rng.integers(0, high, shape).astype(column.dtype)
    return obs
