"""Policy: a game, a network, its weights and a head; learners publish policies, bots run them."""

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.core.wording import joined, shortened, sized
from understudy.experience.game import GameSpec, random_action, spec_from_json
from understudy.experience.skill import BotSkill
from understudy.experience.spaces import describe
from understudy.experience.writer import Read, check_mask, obs_reader
from understudy.nn.forward import Forward, compile_network, compile_row
from understudy.nn.heads import (
    LOWEST_VALID,
    Decision,
    Head,
    env_actions,
    head_for,
    head_from_json,
    head_to_json,
    masked,
)
from understudy.nn.network import (
    Constant,
    Dense,
    NetworkSpec,
    Weights,
    checked_weights,
    network_from_json,
    network_to_json,
)

POLICY_FORMAT = "understudy-policy/1"
MAX_VERSION = (1 << 32) - 1
MAX_STACK = 64


Choice = tuple[Any, float | None, Any]
"""An action as the game expects it, its log probability (0 if deterministic, None if not known),
and the action before clip or tanh."""


@dataclass(frozen=True, slots=True)
class InitialPriority:
    """How an actor computes the initial priority of a step in the replay."""

    kind: str = "n_step_td"
    n_step: int = 1
    discount: float = 0.99

    def __post_init__(self) -> None:
        if (
            self.kind != "n_step_td"
            or type(self.n_step) is not int
            or self.n_step < 1
            or not 0 <= self.discount <= 1
        ):
            raise ConfigError(
                f"{self} is not valid; give kind 'n_step_td', an n_step from 1 and a "
                "discount from 0 to 1"
            )


@dataclass(frozen=True, eq=False)
class Policy:
    """Maps observations to actions; immutable and thread-safe. Weights are copied."""

    game: GameSpec
    network: NetworkSpec
    weights: Weights
    head: Head
    stack: int = 1
    """Observations per input, oldest first; 1 means a single observation without a stack axis."""
    version: int = 0
    priority: InitialPriority | None = None

    _forward: Forward = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_fit(self)
        object.__setattr__(self, "weights", checked_weights(self.network, self.weights))
        object.__setattr__(
            self, "_forward", compile_network(self.network, self.weights, heads=self.head.outputs)
        )

    def __eq__(self, other: object) -> bool:
        """Bitwise equality of every field and weight."""
        return self.encode() == other.encode() if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.game.schema, self.network, self.version))

    # --- For a batch ------------------------------------------------------------------------------

    def decide(
        self,
        obs: Mapping[str, Array],
        noise: Array | None,
        *,
        explore: Any = None,
        action_mask: Array | None = None,
        deterministic: bool = False,
    ) -> Decision:
        """Actions for observation columns [batch, (stack,) ...]; `noise` comes from `head.noise`.

        Each row of `action_mask` must have a valid action: callers check that, not this method.
        """
        return self.head.sample(
            self._forward(obs),
            noise,
            explore=explore,
            action_mask=action_mask,
            deterministic=deterministic,
        )

    def outputs(self, obs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of every head of the network for a batch, not only those `decide` reads."""
        return self._all_outputs(obs)

    @cached_property
    def _all_outputs(self) -> Forward:
        return compile_network(self.network, self.weights)

    # --- For one observation ----------------------------------------------------------------------

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """The action for `env.step`, given the env's observation.

        With a stack, `obs` is the sequence of the last observations; `player()` keeps it for you.
        """
        return self.choose(obs, action_mask=action_mask, deterministic=deterministic, rng=rng)[0]

    def choose(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
        skill: BotSkill | None = None,
    ) -> Choice:
        """The action as from `act`, with its log probability and the raw action.

        With a `skill`, the policy plays with its noise, or at its temperature.
        """
        if not deterministic and rng is None:
            raise ConfigError(
                "deterministic=False needs an rng; give rng=numpy.random.default_rng(seed), or "
                "deterministic=True"
            )
        if self.stack > 1 and len(obs) != self.stack:
            raise ConfigError(
                f"act got {len(obs)} observations; give the last {self.stack}, or use "
                "policy.player()"
            )
        return self.choose_columns(
            self._read(obs),
            action_mask=action_mask,
            deterministic=deterministic,
            rng=rng,
            skill=skill,
        )

    def choose_columns(
        self,
        columns: Mapping[str, Array],
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
        skill: BotSkill | None = None,
    ) -> Choice:
        """As `choose`, for observation columns without a batch axis."""
        mask = None
        if action_mask is not None:
            if not self.head.is_discrete:
                raise ConfigError(
                    f"{self.game.game} has no discrete actions; leave out action_mask"
                )
            mask = check_mask(action_mask, self.head.size)
            if not mask.any():
                raise ConfigError(
                    "action_mask has no valid action; give at least one, or end the episode"
                )
        outputs = self._row(columns)
        if skill is not None:
            return self._choose_at(skill, outputs, mask, deterministic=deterministic, rng=rng)
        if self._greedy is not None:
            name, first = self._greedy
            scores = outputs[name] if mask is None else masked(outputs[name], mask)
            noise = (
                None
                if deterministic or rng is None or self.head.kind != "categorical"
                else self.head.noise(rng, 1)
            )
            if noise is None:
                return first + int(scores.argmax()), 0.0, None
            # The same as a categorical head for a batch, but faster for one row.
            action = int((scores + noise[0]).argmax())
            h = scores - scores.max()
            return first + action, float(h[action]) - math.log(float(np.exp(h).sum())), None
        batch = {name: output[None] for name, output in outputs.items()}
        noise = None if rng is None or deterministic else self.head.noise(rng, 1)
        decision = self.head.sample(batch, noise, deterministic=deterministic)
        action = env_actions(self.game, decision.action)[0]
        return action, float(decision.logp[0]), decision.raw_action[0].reshape(action.shape)

    def _choose_at(
        self,
        skill: BotSkill,
        outputs: Mapping[str, Array],
        mask: Array | None,
        *,
        deterministic: bool,
        rng: np.random.Generator | None,
    ) -> Choice:
        """The decision with the skill's noise, or at its temperature; always a valid action."""
        if rng is None:
            raise ConfigError("a skill needs an rng; give rng=numpy.random.default_rng(seed)")
        noise = skill.noise or 0.0
        temperature = skill.temperature or 1.0
        if self._greedy is not None:
            name, first = self._greedy
            scores = outputs[name].astype(np.float64)
            is_valid = np.ones(len(scores), np.bool_) if mask is None else mask
            scores = np.where(is_valid, np.maximum(scores, LOWEST_VALID), -np.inf)
            if deterministic or self.head.kind != "categorical":
                chances = (np.arange(len(scores)) == scores.argmax()).astype(np.float64)
            else:
                chances = np.exp((scores - scores.max()) / temperature)
                chances /= chances.sum()
            chances = (1 - noise) * chances + noise * is_valid / is_valid.sum()
            action = int(rng.choice(len(chances), p=chances))
            return first + action, math.log(chances[action]), None
        batch = {name: output[None] for name, output in outputs.items()}
        batch["log_std"] = batch["log_std"] + np.float32(math.log(temperature))
        decision = self.head.sample(batch, self.head.noise(rng, 1), deterministic=deterministic)
        action = env_actions(self.game, decision.action)[0]
        if not noise:
            return action, float(decision.logp[0]), decision.raw_action[0].reshape(action.shape)
        other = np.asarray(random_action(self.game, rng), action.dtype).reshape(action.shape)
        mixed = (1 - noise) * action + noise * other
        # Rounding must not leave the space.
        low = np.minimum(action, other)
        return np.clip(mixed, low, np.maximum(action, other)).astype(action.dtype), None, None

    @cached_property
    def _read(self) -> Read:
        return obs_reader(self.game, stack=self.stack)

    @cached_property
    def _row(self) -> Forward:
        return compile_row(self.network, self.weights, heads=self.head.outputs)

    @cached_property
    def _greedy(self) -> tuple[str, int] | None:
        """For discrete actions: the output to maximise, and the number of the first action."""
        discrete = self.game.discrete
        return None if discrete is None else (self.head.outputs[0], discrete.start)

    def at_temperature(self, temperature: float) -> "Policy":
        """The same policy with sharper (below 1) or more random choices (above 1).

        Logits are divided by the temperature, and standard deviations multiplied by it. The policy
        of an `argmax` or `epsilon_greedy` head has no such choices and is returned as it is.
        """
        if not 0 < temperature <= 1e6:
            raise ConfigError(f"temperature is {temperature}; give a number above 0, such as 0.25")
        is_categorical = self.head.kind == "categorical"
        if temperature == 1 or (self.head.is_discrete and not is_categorical):
            return self
        output = "logits" if is_categorical else "log_std"
        layer = self.network.heads[output][-1]
        if not isinstance(layer, Dense | Constant):
            raise ConfigError(
                f"the head {output} ends with {type(layer).__name__}; it has a temperature only if "
                "it ends with Dense"
            )
        prefix = f"heads.{output}.{len(self.network.heads[output]) - 1}."
        weights = dict(self.weights)
        for name in weights:
            if name.startswith(prefix) and is_categorical:
                weights[name] = weights[name] / np.float32(temperature)
            elif name.startswith(prefix) and not name.endswith("kernel"):
                weights[name] = weights[name] + np.float32(math.log(temperature))
        return replace(self, weights=weights)

    def player(self) -> "Player":
        """Return a player, which remembers the last observations of its episode for the stack."""
        return Player(self)

    # --- As bytes ---------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """safetensors: weights, and other fields as metadata; equal policies yield equal bytes."""
        metadata = {
            "format": POLICY_FORMAT,
            "game": self.game.to_json().decode(),
            "network": network_to_json(self.network).decode(),
            "head": canonical_json(head_to_json(self.head)).decode(),
            "stack": str(self.stack),
            "version": str(self.version),
            "priority": canonical_json(asdict(self.priority) if self.priority else None).decode(),
        }
        return tensors.encode(self.weights, metadata)


def decode_policy(raw: bytes | memoryview) -> Policy:
    """The inverse of `encode`; Refused unless the bytes are a policy with finite weights."""
    weights, metadata = tensors.decode(raw)
    if metadata.get("format") != POLICY_FORMAT:
        raise Refused(
            "bad_version",
            f"the policy has format {str(metadata.get('format'))[:40]!r}, but this version reads "
            f"{POLICY_FORMAT!r}; use the version that wrote it",
        )
    if metadata.keys() != _METADATA:
        raise Refused(
            "bad_policy",
            f"wrong metadata: missing {joined(_METADATA - metadata.keys())}, unknown "
            f"{joined(metadata.keys() - _METADATA)}",
        )
    for name, array in weights.items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise Refused("bad_policy", f"{name} is not float32, or contains NaN or infinity")
    try:
        priority = strict_json(metadata["priority"])
        return Policy(
            game=spec_from_json(metadata["game"]),
            network=network_from_json(metadata["network"]),
            weights=weights,
            head=head_from_json(strict_json(metadata["head"])),
            stack=_integer(metadata["stack"]),
            version=_integer(metadata["version"]),
            priority=None if priority is None else InitialPriority(**priority),
        )
    except (ConfigError, TypeError) as error:
        raise Refused("bad_policy", shortened(str(error), 300)) from None


_METADATA = {"format", "game", "network", "head", "stack", "version", "priority"}


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and str(int(text)) == text):
        raise Refused("bad_policy", f"stack or version is {text[:30]!r}; expected a whole number")
    return int(text)


def _check_fit(policy: Policy) -> None:
    if type(policy.stack) is not int or not 1 <= policy.stack <= MAX_STACK:
        raise ConfigError(f"stack is {policy.stack!r}; give a whole number from 1 to {MAX_STACK}")
    if type(policy.version) is not int or not 0 <= policy.version <= MAX_VERSION:
        raise ConfigError(
            f"version is {policy.version!r}; give a whole number from 0 to {MAX_VERSION}"
        )
    if policy.head != (expected := head_for(policy.game, policy.head.kind)):
        raise ConfigError(
            f"{policy.head} does not fit {policy.game.game}; give {expected}, as head_for returns"
        )
    columns = policy.game.obs_columns
    before = (policy.stack,) if policy.stack > 1 else ()
    for name, column in policy.network.inputs.items():
        space = columns.get(name)
        if space is None or (column.shape, column.dtype) != (
            (*before, *space.shape),
            space.dtype,
        ):
            got = f"{column.dtype}{list(column.shape)}"
            raise ConfigError(
                f"input {name!r} is {got}; {policy.game.game} with stack {policy.stack} has "
                f"{describe(columns)}; give inputs with the shapes and dtypes of these columns"
            )
    outputs = policy.network.outputs()
    for name in policy.head.outputs:
        shape = outputs.get(name)
        if shape != (policy.head.size,):
            got = "is missing" if shape is None else f"has {sized(shape)}"
            raise ConfigError(
                f"the network's head {name!r} {got}; {policy.head.kind} needs {policy.head.size}"
            )


class Player:
    """Plays a policy, episode after episode, and keeps its observation stack; not thread-safe."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._last: deque[Any] = deque(maxlen=policy.stack)

    def reset(self) -> None:
        """Forget the previous episode."""
        self._last.clear()

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """The action for `env.step`; the first observation of an episode fills the stack."""
        return self.choose(obs, action_mask=action_mask, deterministic=deterministic, rng=rng)[0]

    def choose(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
        skill: BotSkill | None = None,
    ) -> Choice:
        """The action as from `act`, with its log probability and the raw action."""
        if self.policy.stack > 1:
            self._last.append(copy.deepcopy(obs))  # the env may reuse its array
            obs = [self._last[0]] * (self.policy.stack - len(self._last)) + list(self._last)
        return self.policy.choose(
            obs, action_mask=action_mask, deterministic=deterministic, rng=rng, skill=skill
        )
