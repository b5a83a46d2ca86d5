"""Heads: turn a network's outputs into actions, in NumPy; `learn/networks.py` does so in JAX.

    kind              reads          noise [batch, ...]  action
    argmax            q              none                the one with the largest q
    epsilon_greedy    q              uniform [1 + n]     the one with the largest q, or a random
                                                         valid one if noise[0] is below epsilon
    categorical       logits         Gumbel [n]          sampled by probability
    gaussian_clipped  mean, log_std  normal [size]       mean + std * noise, scaled from ±1 to
                                                         low..high, then clipped
    gaussian_tanh     mean, log_std  normal [size]       tanh(mean + std * noise), scaled from ±1
                                                         to low..high

Noise is an argument, so that NumPy and JAX return the same action and logp. If an element of a Box
has no lower or no upper bound, gaussian_clipped does not scale it, and clips it only to the bound
that it has.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER, Box, Discrete, describe

DISCRETE = ("argmax", "epsilon_greedy", "categorical")
GAUSSIAN = ("gaussian_clipped", "gaussian_tanh")

INVALID = -1e30
LOWEST_VALID = -1e20
"""Invalid actions get the output INVALID and valid ones at least LOWEST_VALID, so that a valid one
always wins."""
LOG_STD = (-20.0, 4.0)
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

TANH_LIMIT = 0.999
"""`raw_of` limits tanh to ± this, since the raw number of an action at its bound is infinite."""

_OUTPUTS = {"argmax": ("q",), "epsilon_greedy": ("q",), "categorical": ("logits",)}


class Decision(NamedTuple):
    """Actions for a batch of observations."""

    action: Any  # int32[batch] counted from 0, or float32[batch, size]
    logp: Any  # float32[batch]; 0 where deterministic
    raw_action: Any = None  # float32[batch, size], before clip or tanh; None for discrete actions


@dataclass(frozen=True)
class Head:
    """A kind of the table above for `size` discrete actions, or `size` numbers within low..high."""

    kind: str
    size: int
    low: tuple[float, ...] = ()
    """One bound per number of a gaussian head; -inf where there is no bound."""
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if type(self.size) is not int or self.size < 1:
            raise ConfigError(f"a head has size {self.size!r}; give a whole number from 1")
        if self.is_discrete and (self.low or self.high):
            raise ConfigError(f"a {self.kind} head has no bounds; leave low and high empty")
        if self.is_discrete:
            return
        for name, end in (("low", self.low), ("high", self.high)):
            if (
                not isinstance(end, tuple)
                or len(end) != self.size
                or any(math.isnan(value) for value in end)
            ):
                raise ConfigError(
                    f"{name} is {str(end)[:60]}; give {self.size} numbers, infinity for no bound"
                )
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ConfigError(
                f"low {self.low} is not below high {self.high}; each low must be below its high"
            )
        if self.kind == "gaussian_tanh" and not all(self.is_closed):
            raise ConfigError(
                "gaussian_tanh needs bounds on both sides; use gaussian_clipped, or bound the Box"
            )

    @property
    def is_discrete(self) -> bool:
        return self.kind in DISCRETE

    @property
    def outputs(self) -> tuple[str, ...]:
        """The network outputs that the head reads."""
        return _OUTPUTS.get(self.kind, ("mean", "log_std"))

    @property
    def is_closed(self) -> tuple[bool, ...]:
        """For each number: whether it is bounded on both sides, so that ±1 maps to low and high."""
        return tuple(
            abs(low) < MAX_NUMBER and abs(high) < MAX_NUMBER
            for low, high in zip(self.low, self.high, strict=True)
        )

    @cached_property
    def scale(self) -> tuple[Array, Array]:
        """float32[size] each: factor and offset from ±1 to low..high; 1 and 0 if unbounded."""
        pairs = [
            ((high - low) / 2, (high + low) / 2) if is_closed else (1.0, 0.0)
            for low, high, is_closed in zip(self.low, self.high, self.is_closed, strict=True)
        ]
        return np.array([pair[0] for pair in pairs], np.float32), np.array(
            [pair[1] for pair in pairs], np.float32
        )

    @cached_property
    def ends(self) -> tuple[Array, Array]:
        """float32[size] each: low and high."""
        return np.array(self.low, np.float32), np.array(self.high, np.float32)

    def noise(self, rng: np.random.Generator, batch: int) -> Array | None:
        """The noise that `sample` needs for a batch, float32; None for argmax."""
        match self.kind:
            case "argmax":
                return None
            case "epsilon_greedy":
                return rng.random((batch, 1 + self.size), np.float32)
            case "categorical":
                waits = rng.standard_exponential((batch, self.size), np.float32)
                return -np.log(np.maximum(waits, np.float32(1e-30)))
            case _:
                return rng.standard_normal((batch, self.size), np.float32)

    def sample(
        self,
        outputs: Mapping[str, Array],
        noise: Array | None,
        *,
        explore: Any = None,
        action_mask: Array | None = None,
        deterministic: bool = False,
    ) -> Decision:
        """Actions for a batch; deterministic ones need no noise, and their logp is 0.

        `explore` is epsilon, for all rows or one per row. `action_mask` is bool[batch, n] with at
        least one valid action per row.
        """
        if self.kind not in DISCRETE:
            mean = outputs["mean"]
            log_std = outputs["log_std"]
            if deterministic or noise is None:
                return Decision(self.action_of(mean), np.zeros(len(mean), np.float32), mean)
            log_std = np.minimum(np.maximum(log_std, LOG_STD[0]), LOG_STD[1])
            raw = mean + np.exp(log_std) * noise
            density = np.add.reduce(-0.5 * (noise * noise) - log_std, 1) - np.float32(
                self.size * HALF_LOG_2PI
            )
            return Decision(self.action_of(raw), density, raw)
        scores = outputs[self.outputs[0]]
        if action_mask is not None:
            scores = masked(scores, action_mask)
        is_categorical = self.kind == "categorical"
        if deterministic or noise is None or not (is_categorical or explore is not None):
            action = scores.argmax(1)
            return Decision(action.astype(np.int32), np.zeros(len(action), np.float32))
        if is_categorical:
            action = (scores + noise).argmax(1)
            h = scores - np.maximum.reduce(scores, 1, keepdims=True)
            logp = h[np.arange(len(h)), action] - np.log(np.add.reduce(np.exp(h), 1))
            return Decision(action.astype(np.int32), logp)
        epsilon = np.asarray(explore, np.float32)
        greedy = scores.argmax(1)
        lots = noise[:, 1:]
        n_valid: Any = np.float32(scores.shape[1])
        if action_mask is not None:
            lots = np.where(action_mask, lots, np.float32(-1))
            n_valid = np.add.reduce(action_mask, 1, np.float32)
        action = np.where(noise[:, 0] < epsilon, lots.argmax(1), greedy)
        probability = epsilon / n_valid + (1 - epsilon) * (action == greedy)
        return Decision(action.astype(np.int32), np.log(probability))

    def action_of(self, raw: Array) -> Array:
        """Convert raw numbers to actions: clipped or through tanh, scaled to low..high."""
        factor, middle = self.scale
        low, high = self.ends
        scaled = (
            np.tanh(raw) * factor + middle
            if self.kind == "gaussian_tanh"
            else raw * factor + middle
        )
        bounded: Array = np.minimum(np.maximum(scaled, low), high)
        return bounded

    def raw_of(self, action: Array) -> Array:
        """The raw numbers that yield these actions, float32; tanh is limited to ±TANH_LIMIT."""
        factor, middle = self.scale
        unit = (np.asarray(action, np.float32) - middle) / factor
        return (
            np.arctanh(np.clip(unit, -TANH_LIMIT, TANH_LIMIT))
            if self.kind == "gaussian_tanh"
            else unit
        )


def masked(outputs: Array, action_mask: Array) -> Array:
    """Outputs with every invalid action below every valid one."""
    return np.where(action_mask, np.maximum(outputs, np.float32(LOWEST_VALID)), np.float32(INVALID))


def head_for(game: GameSpec, kind: str | None = None) -> Head:
    """The head of this kind for a game's actions; by default categorical or gaussian_clipped."""
    kind = kind or ("gaussian_clipped" if game.discrete is None else "categorical")
    _check_kind(kind)
    if kind in DISCRETE:
        if game.discrete is None:
            raise ConfigError(
                f"{kind} chooses one of n actions; {game.game} has {describe(game.action)}: use a "
                "gaussian head"
            )
        return Head(kind, game.discrete.n)
    space = game.action.get("")
    if not isinstance(space, Box) or space.dtype.kind != "f":
        raise ConfigError(
            f"{game.game} has the actions {describe(game.action)}; policies support one Discrete "
            "or one Box of floats: convert them in an env wrapper"
        )
    size = math.prod(space.shape)
    return Head(kind, size, _end(space.low, size, -math.inf), _end(space.high, size, math.inf))


def _check_kind(kind: object) -> None:
    if kind not in (*DISCRETE, *GAUSSIAN):
        raise ConfigError(
            f"head {kind!r} is not known; give one of {', '.join((*DISCRETE, *GAUSSIAN))}"
        )


def _end(bound: Any, size: int, default: float) -> tuple[float, ...]:
    values = bound if isinstance(bound, tuple) else (default if bound is None else bound,) * size
    return tuple(default if abs(value) >= MAX_NUMBER else float(value) for value in values)


def env_actions(game: GameSpec, action: Array) -> Array:
    """Convert a decision's actions to the game's numbering from `start`, or its shape and dtype."""
    space = game.action[""]
    if isinstance(space, Discrete):
        shifted: Array = action.astype(space.dtype) + space.dtype.type(space.start)
        return shifted
    boxed = action.reshape(len(action), *space.shape).astype(space.dtype)
    if space.dtype == np.float32 or not isinstance(space, Box):
        return boxed
    # In another dtype, a bound may differ slightly from its float32 value.
    low, high = (
        end if not isinstance(end, tuple) else np.reshape(end, space.shape)
        for end in (space.low, space.high)
    )
    return boxed if low is None and high is None else np.clip(boxed, low, high).astype(space.dtype)


def head_to_json(head: Head) -> dict[str, Any]:
    """The head's fields as JSON values; null where there is no bound."""
    ends = {
        name: [value if math.isfinite(value) else None for value in getattr(head, name)]
        for name in ("low", "high")
    }
    return {"kind": head.kind, "size": head.size, **ends}


def head_from_json(fields: Any) -> Head:
    """The inverse of `head_to_json`; ConfigError unless the fields are exactly those of a head."""
    if not isinstance(fields, dict):
        raise ConfigError(
            f"a head is {str(fields)[:80]}; expected an object of kind, size, low and high"
        )
    if fields.keys() != {"kind", "size", "low", "high"}:
        raise ConfigError(
            f"a head has the fields {joined(fields)}; expected exactly kind, size, low and high"
        )
    ends = []
    for name, default in (("low", -math.inf), ("high", math.inf)):
        values = fields[name] if isinstance(fields[name], list) else [""]
        if not all(
            value is None or (isinstance(value, int | float) and type(value) is not bool)
            for value in values
        ):
            raise ConfigError(
                f"{name} is {str(fields[name])[:60]}; give a list of numbers, null for no bound"
            )
        ends.append(tuple(default if value is None else float(value) for value in values))
    return Head(fields["kind"], fields["size"], *ends)
