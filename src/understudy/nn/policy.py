"""Policy: a game, a network, its weights and a head, as data that acts; what learners publish
and bots are made of."""

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec, spec_from_json
from understudy.experience.writer import Read, check_mask, obs_reader
from understudy.nn.forward import Forward, compile_network, compile_row
from understudy.nn.heads import (
    Decision,
    Head,
    env_actions,
    head_for,
    head_from_json,
    head_to_json,
    masked,
)
from understudy.nn.network import (
    NetworkSpec,
    Weights,
    checked_weights,
    network_from_json,
    network_to_json,
)

POLICY_FORMAT = "understudy-policy/1"
MAX_VERSION = (1 << 32) - 1
MAX_STACK = 64


Choice = tuple[Any, float, Any]
"""An action as the game takes it, its log probability (0 where it was certain), and itself
before clip or tanh."""


@dataclass(frozen=True, slots=True)
class InitialPriority:
    """How an actor computes the priority a step enters the replay with."""

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
                f"{self}; give kind 'n_step_td', an n_step from 1 and a discount from 0 to 1"
            )


@dataclass(frozen=True, eq=False)
class Policy:
    """Observations to actions. Weights are copied; a policy never changes and may be used by
    several threads."""

    game: GameSpec
    network: NetworkSpec
    weights: Weights
    head: Head
    stack: int = 1
    """Observations per input, oldest first; 1 means the observation itself, without an axis for
    it."""
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
        """Bit-equal: every fact and every weight."""
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
        """Actions for observation columns [batch, (stack,) ...]; `noise` is what `head.noise` gave.

        Each row of `legal` must have a legal action: that is checked where rows are made, not here.
        """
        return self.head.sample(
            self._forward(obs),
            noise,
            explore=explore,
            action_mask=action_mask,
            deterministic=deterministic,
        )

    def outputs(self, obs: Mapping[str, Array]) -> dict[str, Array]:
        """What every head of the network gives for a batch, also those that `decide` does not
        read."""
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
        """What `env.step` takes for an observation as the env gives it; with a stack, for a
        sequence of its last ones.

        `player()` keeps the stack by itself.
        """
        return self.choose(obs, action_mask=action_mask, deterministic=deterministic, rng=rng)[0]

    def choose(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Choice:
        """The same with what the policy knows about its choice."""
        if not deterministic and rng is None:
            raise ConfigError(
                "act draws by chance and has no rng; give numpy.random.default_rng(seed), or "
                "deterministic"
            )
        if self.stack > 1 and len(obs) != self.stack:
            raise ConfigError(
                f"act got {len(obs)} observations; give the last {self.stack}, or use "
                "policy.player()"
            )
        columns = self._read(obs)
        mask = None
        if action_mask is not None:
            if not self.head.is_discrete:
                raise ConfigError(f"{self.game.game} has no discrete actions; leave out legal")
            mask = check_mask(action_mask, self.head.size)
            if not mask.any():
                raise ConfigError(
                    "legal allows no action; give a mask with at least one, or end the episode"
                )
        outputs = self._row(columns)
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
            # What a categorical head draws for a batch, quicker for one row.
            action = int((scores + noise[0]).argmax())
            h = scores - scores.max()
            return first + action, float(h[action]) - math.log(float(np.exp(h).sum())), None
        batch = {name: output[None] for name, output in outputs.items()}
        noise = None if rng is None or deterministic else self.head.noise(rng, 1)
        decision = self.head.sample(batch, noise, deterministic=deterministic)
        action = env_actions(self.game, decision.action)[0]
        return action, float(decision.logp[0]), decision.raw_action[0].reshape(action.shape)

    @cached_property
    def _read(self) -> Read:
        return obs_reader(self.game, stack=self.stack)

    @cached_property
    def _row(self) -> Forward:
        return compile_row(self.network, self.weights, heads=self.head.outputs)

    @cached_property
    def _greedy(self) -> tuple[str, int] | None:
        """For discrete actions: the output whose largest element is taken, and the number of the
        first action."""
        discrete = self.game.discrete
        return None if discrete is None else (self.head.outputs[0], discrete.start)

    def player(self) -> "Player":
        """One that remembers the last observations of its episode, where the policy stacks them."""
        return Player(self)

    # --- As bytes ---------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """safetensors: the weights, and every other fact as text in the metadata; equal policies
        give equal bytes."""
        facts = {
            "format": POLICY_FORMAT,
            "game": self.game.to_json().decode(),
            "network": network_to_json(self.network).decode(),
            "head": canonical_json(head_to_json(self.head)).decode(),
            "stack": str(self.stack),
            "version": str(self.version),
            "priority": canonical_json(asdict(self.priority) if self.priority else None).decode(),
        }
        return tensors.encode(self.weights, facts)


def decode_policy(raw: bytes | memoryview) -> Policy:
    """The policy that `encode` wrote; Refused unless the bytes are exactly one, with finite
    weights."""
    weights, facts = tensors.decode(raw)
    if facts.get("format") != POLICY_FORMAT:
        raise Refused(
            "bad_version",
            f"format {str(facts.get('format'))[:40]!r}; this build reads {POLICY_FORMAT}",
        )
    if facts.keys() != _FACTS:
        raise Refused("bad_policy", f"metadata keys differ: {sorted(facts.keys() ^ _FACTS)[:6]}")
    for name, array in weights.items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise Refused("bad_policy", f"{name} is not float32, or holds NaN or infinity")
    try:
        priority = strict_json(facts["priority"])
        return Policy(
            game=spec_from_json(facts["game"]),
            network=network_from_json(facts["network"]),
            weights=weights,
            head=head_from_json(strict_json(facts["head"])),
            stack=_whole(facts["stack"]),
            version=_whole(facts["version"]),
            priority=None if priority is None else InitialPriority(**priority),
        )
    except (ConfigError, TypeError) as error:
        raise Refused("bad_policy", str(error)[:300]) from None


_FACTS = {"format", "game", "network", "head", "stack", "version", "priority"}


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and str(int(text)) == text):
        raise Refused("bad_policy", f"{text[:30]!r} stands where a whole number is wanted")
    return int(text)


def _check_fit(policy: Policy) -> None:
    if type(policy.stack) is not int or not 1 <= policy.stack <= MAX_STACK:
        raise ConfigError(f"stack is {policy.stack!r}; give a whole number from 1 to {MAX_STACK}")
    if type(policy.version) is not int or not 0 <= policy.version <= MAX_VERSION:
        raise ConfigError(
            f"version is {policy.version!r}; give a whole number from 0 to {MAX_VERSION}"
        )
    if policy.head != (wanted := head_for(policy.game, policy.head.kind)):
        raise ConfigError(
            f"{policy.head} does not fit {policy.game.game}; give {wanted}, which head_for makes"
        )
    columns = policy.game.obs_columns
    before = (policy.stack,) if policy.stack > 1 else ()
    for name, one in policy.network.inputs.items():
        space = columns.get(name)
        if space is None or (one.shape, one.dtype) != ((*before, *space.shape), space.dtype):
            got = f"{one.dtype}{list(one.shape)}"
            raise ConfigError(
                f"input {name!r} is {got}; {policy.game.game} with stack {policy.stack} has "
                f"{dict(columns)}"
            )
    given = policy.network.outputs()
    for name in policy.head.outputs:
        if given.get(name) != (policy.head.size,):
            raise ConfigError(
                f"head {name!r} gives {given.get(name)}; {policy.head.kind} wants "
                f"({policy.head.size},)"
            )


class Player:
    """Plays a policy through one episode after another; not thread-safe, since it remembers."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._last: deque[Any] = deque(maxlen=policy.stack)

    def reset(self) -> None:
        """Forget the episode before."""
        self._last.clear()

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """What `env.step` takes; before there are enough observations, the episode's first is
        repeated."""
        return self.choose(obs, action_mask=action_mask, deterministic=deterministic, rng=rng)[0]

    def choose(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Choice:
        """The same with what the policy knows about its choice."""
        if self.policy.stack > 1:
            self._last.append(copy.deepcopy(obs))  # the env may reuse its array
            obs = [self._last[0]] * (self.policy.stack - len(self._last)) + list(self._last)
        return self.policy.choose(
            obs, action_mask=action_mask, deterministic=deterministic, rng=rng
        )
