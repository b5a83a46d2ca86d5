"""Networks and heads in JAX: same specs, weights and results as in `nn/forward.py`, `nn/heads.py`.

Every function is pure and works under jit, vmap and grad. Observations and outputs may have any
number of leading axes: none, [batch], [steps, envs].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.nn.forward import NORM_EPSILON, OBSERVATION_EPSILON, OBSERVATION_LIMIT
from understudy.nn.heads import (
    HALF_LOG_2PI,
    INVALID,
    LOG_STD,
    LOWEST_VALID,
    TANH_LIMIT,
    Decision,
    Head,
)
from understudy.nn.network import (
    SQRT2,
    Activation,
    Centre,
    Channels,
    Constant,
    Conv,
    Dense,
    Dueling,
    Flatten,
    Layer,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    ScaleImage,
    centre_of,
)

Weights = Mapping[str, Any]
"""float32 arrays of JAX or NumPy, by name, such as `trunk.0.kernel`."""

_FAR = 1e9
"""Observations beyond this do not enter the running statistics: their squares would ruin them."""

_ACTS: Mapping[str, Callable[[Any], jax.Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}


# --- Weights --------------------------------------------------------------------------------------


def init_weights(key: jax.Array, spec: NetworkSpec) -> dict[str, Any]:
    """Initial weights: orthogonal kernels, biases 0, scales 1, constants from the spec.

    NumPy draws them from the key's bits: compiling QR for each shape would take seconds at every
    start. They are NumPy arrays, unless the key is traced: then a callback draws them, so that a
    lane starts with the same bits as a single run.
    """
    bits = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if not isinstance(bits, jax.core.Tracer):
        return _drawn(bits, spec)
    shape_of: Any = jax.ShapeDtypeStruct
    results = {name: shape_of(shape, jnp.float32) for name, shape in spec.shapes().items()}
    drawn: dict[str, Any] = jax.pure_callback(
        lambda bits: _drawn(bits, spec), results, bits, vmap_method="sequential"
    )
    return drawn


def _drawn(bits: Any, spec: NetworkSpec) -> dict[str, Array]:
    weights: dict[str, Array] = {}
    seed = [int(word) for word in np.asarray(bits).ravel()]
    shapes = spec.shapes()
    for place, layers in spec.places():
        for index, layer in enumerate(layers):
            prefix = f"{place}.{index}."
            for name in (name for name in shapes if name.startswith(prefix)):
                part = name.removeprefix(prefix)
                shape = shapes[name]
                if part.endswith("kernel"):
                    # A dueling layer's hidden kernels feed a relu; only its output kernels have
                    # the spec's gain.
                    gain = SQRT2 if "hidden" in part else getattr(layer, "gain", 1.0)
                    weights[name] = _orthogonal(
                        shape, gain, rng=np.random.default_rng([*seed, len(weights)])
                    )
                else:
                    first = (
                        layer.value
                        if isinstance(layer, Constant)
                        else float(part in ("scale", "var"))
                    )
                    weights[name] = np.full(shape, first, np.float32)
    return weights


def _orthogonal(shape: tuple[int, ...], gain: float, *, rng: np.random.Generator) -> Array:
    """A kernel whose columns (or rows, if there are fewer) are orthogonal and of length `gain`."""
    rows = math.prod(shape[:-1])
    columns = shape[-1]
    drawn = rng.standard_normal((max(rows, columns), min(rows, columns)), np.float32)
    q, r = np.linalg.qr(drawn)
    q *= gain * np.sign(np.diag(r))  # makes signs random; otherwise the QR method decides them
    return np.ascontiguousarray(q if rows >= columns else q.T).reshape(shape)


# --- Forward --------------------------------------------------------------------------------------


def apply(spec: NetworkSpec, weights: Weights, obs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Each head's output, float32[..., width]."""
    rows: dict[str, jax.Array] = {}
    leading: tuple[int, ...] = ()
    for name in spec.order():
        column = spec.inputs[name]
        x = jnp.asarray(obs[name])
        leading = x.shape[: x.ndim - len(column.shape)]
        x = x.reshape(-1, *column.shape)
        at = centre_of(column)
        place = f"inputs.{name}"
        x = _through(place, column.layers[:at], weights=weights, x=x)
        if at is not None:
            centre = column.layers[at]
            assert isinstance(centre, Centre)
            x = _centre(centre, x, obs, rows)
            x = _through(place, column.layers[at + 1 :], weights=weights, x=x, first=at + 1)
        rows[name] = x.astype(jnp.float32)
    parts = [rows[name] for name in spec.inputs]
    trunk = _through(
        "trunk",
        spec.trunk,
        weights=weights,
        x=jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0],
    )
    ends = {
        name: _through(f"heads.{name}", layers, weights=weights, x=trunk)
        for name, layers in spec.heads.items()
    }
    return {name: x.reshape(*leading, *x.shape[1:]) for name, x in ends.items()}


def _through(
    place: str, layers: Sequence[Layer], *, weights: Weights, x: jax.Array, first: int = 0
) -> jax.Array:
    for index, layer in enumerate(layers, start=first):
        prefix = f"{place}.{index}."
        x = _layer(
            layer,
            {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)},
            x,
        )
    return x


def _layer(layer: Layer, own: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    if not isinstance(layer, ScaleImage | OneHot | Channels | Flatten):
        x = x.astype(jnp.float32)
    match layer:
        case Dense():
            return x @ own["kernel"] + own["bias"]
        case Conv():
            return _conv(layer, own["kernel"], x) + own["bias"]
        case LayerNorm():
            h = x - x.mean(-1, keepdims=True)
            return (
                h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + NORM_EPSILON) * own["scale"]
                + own["bias"]
            )
        case ObservationNorm():
            mean, var = jax.lax.stop_gradient((own["mean"], own["var"]))
            return jnp.clip(
                (x - mean) / jnp.sqrt(var + OBSERVATION_EPSILON),
                -OBSERVATION_LIMIT,
                OBSERVATION_LIMIT,
            )
        case Activation():
            return _ACTS[layer.name](x)
        case Flatten():
            return x.reshape(len(x), -1)
        case Dueling():
            return _dueling(layer, own, x)
        case ScaleImage():
            return x.astype(jnp.float32) * (1 / 255)
        case Channels():
            order = (0, *(axis + 1 for axis in layer.order(x.ndim - 1)))
            moved = x.transpose(order)
            return moved.reshape(*moved.shape[: x.ndim - len(layer.axes)], -1)
        case OneHot():
            return (x[..., None] == jnp.arange(layer.start, layer.start + layer.n)).astype(
                jnp.float32
            )
        case Constant():
            return jnp.broadcast_to(own["constant"], (len(x), layer.width))
        case Centre():
            raise AssertionError("a Centre needs other inputs too")


def _centre(
    layer: Centre, x: jax.Array, obs: Mapping[str, Any], rows: Mapping[str, jax.Array]
) -> jax.Array:
    """As in nn/forward.py."""
    n, high, wide, _ = x.shape
    if layer.row and layer.column:
        row, column = (
            jnp.clip(jnp.asarray(obs[name]).reshape(n, -1)[:, at], 0, side - 1).astype(jnp.int32)
            for (name, at), side in ((layer.row, high), (layer.column, wide))
        )
    else:
        row, column = jnp.divmod(x[..., layer.channel].reshape(n, -1).argmax(1), wide)
    sides = layer.sides((high, wide))
    up, left = (side // 2 for side in sides)
    x = x.astype(jnp.float32)
    inside = jnp.concatenate([x, jnp.ones((*x.shape[:3], 1), jnp.float32)], -1)
    padded = jnp.pad(inside, ((0, 0), (up, up), (left, left), (0, 0)))

    def shown_from(grid: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(grid, (row, column, 0), (*sides, grid.shape[-1]))

    parts = [jax.vmap(shown_from)(padded, row, column)]
    for name in layer.others:
        other = rows[name][:, None, None]
        parts.append(jnp.broadcast_to(other, (n, *sides, other.shape[-1])))
    return jnp.concatenate(parts, -1)


def _conv(layer: Conv, kernel: jax.Array, x: jax.Array) -> jax.Array:
    """float32[batch, height, width, channels]; on a CPU as one matrix product over patches.

    On CPUs, XLA's convolutions lose their fast path inside a scan, where all updates run, and are
    slower than this.
    """
    size = layer.kernel
    stride = layer.stride
    if jax.default_backend() != "cpu":
        axes = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "VALID", dimension_numbers=axes
        )
    rows, columns = ((side - size) // stride + 1 for side in x.shape[1:3])
    parts = [
        x[
            :,
            at : at + (rows - 1) * stride + 1 : stride,
            beside : beside + (columns - 1) * stride + 1 : stride,
        ]
        for at in range(size)
        for beside in range(size)
    ]
    return jnp.concatenate(parts, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def _dueling(layer: Dueling, own: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    def stream(name: str) -> jax.Array:
        h = (
            jax.nn.relu(x @ own[f"{name}_hidden.kernel"] + own[f"{name}_hidden.bias"])
            if layer.hidden
            else x
        )
        return h @ own[f"{name}.kernel"] + own[f"{name}.bias"]

    advantage = stream("advantage")
    return stream("value") + advantage - advantage.mean(-1, keepdims=True)


def observe(
    spec: NetworkSpec,
    weights: Weights,
    obs: Mapping[str, Any],
    *,
    limits: Mapping[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """The weights after these observations have updated the ObservationNorms, if any.

    `limits`: the lowest and highest value by column, as in `Batch.obs_limits`; values outside of
    them are left out.
    """
    updated = dict(weights)
    for name, column in spec.inputs.items():
        for index, layer in enumerate(column.layers):
            if isinstance(layer, ObservationNorm):
                rows = jnp.asarray(obs[name]).reshape(-1, *column.shape)
                before = column.layers[:index]
                x = _through(f"inputs.{name}", before, weights=weights, x=rows).astype(jnp.float32)
                prefix = f"inputs.{name}.{index}."
                mean, var, count = (weights[prefix + part] for part in ("mean", "var", "count"))
                x = jnp.where(jnp.abs(x) <= _FAR, x, mean)  # also replaces NaN
                more = len(x)
                own_mean = x.mean(0)
                own_var = x.var(0)
                if index == 0 and limits is not None and name in limits:
                    low, high = limits[name]
                    is_within = (x >= low) & (x <= high)
                    has_any = is_within.any(0)
                    own_mean = jnp.where(has_any, x.mean(0, where=is_within), mean)
                    own_var = jnp.where(has_any, x.var(0, where=is_within), var)
                total = count + more
                delta = own_mean - mean
                spread = (
                    var * count + own_var * more + delta * delta * (count * more / total)
                ) / total
                updated |= {
                    prefix + "mean": mean + delta * (more / total),
                    prefix + "var": spread,
                    prefix + "count": total,
                }
    return updated


# --- Heads ----------------------------------------------------------------------------------------


def noise(key: jax.Array, head: Head, batch: int) -> jax.Array | None:
    """The noise that `sample` needs for a batch; None for argmax."""
    match head.kind:
        case "argmax":
            return None
        case "epsilon_greedy":
            return jax.random.uniform(key, (batch, 1 + head.size))
        case "categorical":
            return jax.random.gumbel(key, (batch, head.size))
        case _:
            return jax.random.normal(key, (batch, head.size))


def sample(
    head: Head,
    outputs: Mapping[str, Any],
    noise: Any,
    *,
    explore: Any = None,
    action_mask: Any = None,
    deterministic: bool = False,
) -> Decision:
    """Actions and logp, equal to those of `Head.sample` for the same outputs and noise."""
    if not head.is_discrete:
        mean = outputs["mean"]
        log_std = outputs["log_std"]
        if deterministic or noise is None:
            return Decision(action_of(head, mean), jnp.zeros(mean.shape[:-1], jnp.float32), mean)
        raw = mean + jnp.exp(jnp.clip(log_std, *LOG_STD)) * noise
        return Decision(action_of(head, raw), _density(noise, log_std), raw)
    values = _masked(outputs[head.outputs[0]], action_mask)
    greedy = values.argmax(-1)
    is_random = head.kind == "categorical" or (
        head.kind == "epsilon_greedy" and explore is not None
    )
    if deterministic or noise is None or not is_random:
        return Decision(greedy.astype(jnp.int32), jnp.zeros(greedy.shape, jnp.float32))
    if head.kind == "categorical":
        action = (values + noise).argmax(-1)
        return Decision(action.astype(jnp.int32), _picked(jax.nn.log_softmax(values), action))
    lots = noise[..., 1:] if action_mask is None else jnp.where(action_mask, noise[..., 1:], -1.0)
    n_valid = head.size if action_mask is None else action_mask.sum(-1)
    action = jnp.where(noise[..., 0] < explore, lots.argmax(-1), greedy)
    logp = jnp.log(explore / n_valid + (1 - explore) * (action == greedy))
    return Decision(action.astype(jnp.int32), logp)


def _density(unit: Any, log_std: Any) -> jax.Array:
    return jnp.sum(-0.5 * unit * unit - jnp.clip(log_std, *LOG_STD) - HALF_LOG_2PI, -1)


def action_of(head: Head, raw: Any) -> jax.Array:
    """The game's actions for a Gaussian's raw numbers, clipped or squashed by tanh to low..high."""
    scale, middle = head.scale
    scaled = (jnp.tanh(raw) if head.kind == "gaussian_tanh" else raw) * scale + middle
    return jnp.clip(scaled, *head.ends)


def raw_of(head: Head, action: Any) -> jax.Array:
    """The raw numbers of these actions, for the `logp` of recorded actions."""
    scale, middle = head.scale
    unit = (action - middle) / scale
    return (
        jnp.arctanh(jnp.clip(unit, -TANH_LIMIT, TANH_LIMIT))
        if head.kind == "gaussian_tanh"
        else unit
    )


def logp(head: Head, outputs: Mapping[str, Any], action: Any, action_mask: Any = None) -> jax.Array:
    """Log probability of action indices, or log density of *raw* actions; float32[...]."""
    if head.kind == "categorical":
        return _picked(jax.nn.log_softmax(_masked(outputs["logits"], action_mask)), action)
    _check_random(head)
    std = jnp.exp(jnp.clip(outputs["log_std"], *LOG_STD))
    return _density((action - outputs["mean"]) / std, outputs["log_std"])


def entropy(head: Head, outputs: Mapping[str, Any], action_mask: Any = None) -> jax.Array:
    """Entropy over valid actions, or of the Gaussian before clip or tanh; float32[...]."""
    if head.kind == "categorical":
        logs = jax.nn.log_softmax(_masked(outputs["logits"], action_mask))
        return -(jnp.exp(logs) * logs).sum(-1)
    _check_random(head)
    return (jnp.clip(outputs["log_std"], *LOG_STD) + (0.5 + HALF_LOG_2PI)).sum(-1)


def _check_random(head: Head) -> None:
    if head.is_discrete:
        raise ConfigError(
            f"a head of kind {head.kind} has no log probabilities; use a categorical or gaussian "
            "head"
        )


def _masked(values: Any, action_mask: Any) -> Any:
    return (
        values
        if action_mask is None
        else jnp.where(action_mask, jnp.maximum(values, LOWEST_VALID), INVALID)
    )


def _picked(values: Any, action: Any) -> jax.Array:
    return jnp.take_along_axis(values, action[..., None].astype(jnp.int32), -1)[..., 0]
