"""GameSpec: the layout of a game's rows, as data with a stable id."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import Refused, SpecError
from understudy.core.names import GameName, game_name, game_name_of_env
from understudy.core.tensors import DTYPES, Array
from understudy.core.wording import CONTROL, joined
from understudy.experience.spaces import (
    MAX_NUMBER,
    Box,
    Discrete,
    MultiDiscrete,
    Space,
    describe,
    space_from_gymnasium,
    space_from_json,
)

SPEC_FORMAT = 1
MAX_ROW_BYTES = 240 * 1024
"""Two observations and their header must fit into one frame, even if they do not compress."""

MAX_PARTS = 128
"""Parts of an observation or action; each is a column with an entry in every chunk's header."""
MAX_PATH = 100

MAX_CHOICES = 1 << 16
"""The largest count of actions: a network has an output for each. A Discrete space may have more,
which can be recorded but not learned."""

_KEY = re.compile(r"[A-Za-z0-9_-]{1,40}(\.[A-Za-z0-9_-]{1,40}){0,5}")


@dataclass(frozen=True, kw_only=True)
class GameSpec:
    """A game's name, its observation and action columns, and facts about its episodes.

    `obs` and `action` map a dotted path to a space; the path is `""` if there is only one space.
    """

    game: GameName
    obs: Mapping[str, Space]
    action: Mapping[str, Space]
    obs_names: tuple[str, ...] = ()
    """Names of a flat observation's elements, or empty."""
    action_names: tuple[str, ...] = ()
    """Names of a discrete action's choices, or empty."""
    has_action_mask: bool = False
    """Whether every step has a mask of its valid discrete actions."""
    max_episode_steps: int | None = None

    def __post_init__(self) -> None:
        game_name(self.game)
        _check_leaves("obs", self.obs)
        _check_leaves("action", self.action)
        discrete = self.discrete
        if self.action_names and (discrete is None or len(self.action_names) != discrete.n):
            raise SpecError(
                f"{len(self.action_names)} action names do not match the action space "
                f"{describe(self.action)}; give one for each choice"
            )
        for names in (self.action_names, self.obs_names):
            earlier = set[str]()
            for name in names:
                if not isinstance(name, str) or name in earlier:
                    raise SpecError(
                        f"name {str(name)[:40]!r} is not text or occurs twice; give different texts"
                    )
                earlier.add(name)
            if bad := [name for name in names if CONTROL.search(name)]:
                raise SpecError(
                    f"name {bad[0][:40]!a} contains control characters; give printable text"
                )
            if bad := [name for name in names if not name.strip()]:
                raise SpecError(f"name {bad[0][:40]!r} is empty; give each element a name")
        if self.obs_names and (
            set(self.obs) != {""} or len(self.obs_names) != math.prod(self.obs[""].shape)
        ):
            raise SpecError(
                f"{len(self.obs_names)} observation names do not match the observation space; "
                "give one for each element"
            )
        if type(self.has_action_mask) is not bool:
            raise SpecError(
                f"has_action_mask is {str(self.has_action_mask)[:40]!r}; give True or False"
            )
        if self.has_action_mask and discrete is None:
            raise SpecError(
                f"has_action_mask needs a single Discrete action space, but {self.game} has "
                f"{describe(self.action)}; set it to False"
            )
        limit = self.max_episode_steps
        if limit is not None and (type(limit) is not int or limit < 1):
            raise SpecError(f"max_episode_steps is {limit!r}; give a whole number from 1, or None")
        if self.row_bytes > MAX_ROW_BYTES:
            raise SpecError(
                f"one row of {self.game} has {self.row_bytes} bytes; at most {MAX_ROW_BYTES} can "
                "be recorded, since two observations must fit into one frame: make the observation "
                "smaller or narrower"
            )

    @property
    def discrete(self) -> Discrete | None:
        """The action space if it is a single Discrete space, else None."""
        space = self.action.get("")
        return space if isinstance(space, Discrete) else None

    @cached_property
    def obs_columns(self) -> dict[str, Space]:
        """Column name to space: `obs`, or `obs.<path>` for each part."""
        return {_column("obs", path): space for path, space in sorted(self.obs.items())}

    @cached_property
    def action_columns(self) -> dict[str, Space]:
        """Column name to space: `action`, or `action.<path>` for each part."""
        return {_column("action", path): space for path, space in sorted(self.action.items())}

    @cached_property
    def row_bytes(self) -> int:
        """The size of one row, without optional columns other than the action mask."""
        spaces = (*self.obs.values(), *self.action.values())
        mask_bytes = self.discrete.n if self.has_action_mask and self.discrete else 0
        return (
            sum(space.dtype.itemsize * math.prod(space.shape) for space in spaces) + mask_bytes + 8
        )

    @cached_property
    def schema(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Canonical JSON: equal specs yield equal bytes."""
        return canonical_json(
            {
                "format": SPEC_FORMAT,
                "game": self.game,
                "obs": {path: space.to_json() for path, space in self.obs.items()},
                "action": {path: space.to_json() for path, space in self.action.items()},
                "obs_names": list(self.obs_names),
                "action_names": list(self.action_names),
                "has_action_mask": self.has_action_mask,
                "max_episode_steps": self.max_episode_steps,
            }
        )


def _column(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if path else prefix


def _check_leaves(what: str, leaves: Mapping[str, Space]) -> None:
    if not leaves:
        raise SpecError(f"the {what} space is empty; give it at least one part")
    if len(leaves) > MAX_PARTS:
        raise SpecError(
            f"the {what} space has {len(leaves)} parts; give at most {MAX_PARTS}, and merge parts "
            "into arrays if needed"
        )
    for path in leaves:
        if not (path == "" and len(leaves) == 1) and (
            not isinstance(path, str) or not _KEY.fullmatch(path) or len(path) > MAX_PATH
        ):
            raise SpecError(
                f"{what} key {path!r} cannot name a column; use letters, digits, _ and -, with "
                f"dots between parts, at most {MAX_PATH} characters in total"
            )


def spec_from_json(raw: bytes | str) -> GameSpec:
    """Parse the JSON of `to_json`; SpecError unless it is exactly a spec."""
    try:
        fields = strict_json(raw)
        if not isinstance(fields, dict) or "format" not in fields:
            raise SpecError(
                f"the game spec is {str(fields)[:40]!r}; give a JSON object with "
                f"{', '.join(sorted(_FIELDS))}"
            )
        if fields["format"] != SPEC_FORMAT or type(fields["format"]) is not int:
            raise SpecError(
                f"the game spec has format {fields['format']!r}, but this version reads "
                f"{SPEC_FORMAT}; use the version that wrote it"
            )
        if fields.keys() != _FIELDS:
            raise SpecError(
                f"the game spec has wrong fields: missing {joined(_FIELDS - fields.keys())}, "
                f"unknown {joined(fields.keys() - _FIELDS)}; give those of `GameSpec.to_json()`"
            )
        if not all(isinstance(fields[name], dict) for name in ("obs", "action")):
            raise SpecError(
                "obs and action must be JSON objects that map paths to spaces; the path of "
                "a single space is ''"
            )
        names = [fields["obs_names"], fields["action_names"]]
        if type(fields["has_action_mask"]) is not bool or not all(
            isinstance(texts, list) for texts in names
        ):
            raise SpecError(
                "has_action_mask must be true or false, obs_names and action_names must be lists"
            )
        return GameSpec(
            game=game_name(fields["game"]),
            obs={path: space_from_json(space) for path, space in fields["obs"].items()},
            action={path: space_from_json(space) for path, space in fields["action"].items()},
            obs_names=tuple(names[0]),
            action_names=tuple(names[1]),
            has_action_mask=fields["has_action_mask"],
            max_episode_steps=fields["max_episode_steps"],
        )
    except Refused as error:
        raise SpecError(
            f"the game spec cannot be read: {error}; give the JSON that `spec.to_json()` returns"
        ) from None


_FIELDS = {
    "format",
    "game",
    "obs",
    "action",
    "obs_names",
    "action_names",
    "has_action_mask",
    "max_episode_steps",
}


def game_spec(
    game: str,
    *,
    obs: int | Sequence[int] | Sequence[str] | Space | Mapping[str, Space | int | tuple[int, ...]],
    actions: int | Sequence[str] | Space | Mapping[str, Space],
    has_action_mask: bool = False,
    max_episode_steps: int | None = None,
) -> GameSpec:
    """Create a spec without Gymnasium.

    `obs` is a length, a shape, names or spaces; `actions` is a count, names or spaces.
    """
    obs_spaces, obs_names = _obs(obs)
    action_spaces, action_names = _actions(actions)
    return GameSpec(
        game=game_name(game),
        obs=obs_spaces,
        action=action_spaces,
        obs_names=obs_names,
        action_names=action_names,
        has_action_mask=has_action_mask,
        max_episode_steps=max_episode_steps,
    )


def _obs(obs: Any) -> tuple[Mapping[str, Space], tuple[str, ...]]:
    if isinstance(obs, Mapping):
        return {name: _obs_space(name, part) for name, part in obs.items()}, ()
    if hasattr(obs, "to_json"):
        return {"": obs}, ()
    if isinstance(obs, int) and not isinstance(obs, bool):
        obs = (obs,)
    if isinstance(obs, Sequence) and not isinstance(obs, str) and obs:
        if all(isinstance(part, str) for part in obs):
            return {"": Box((len(obs),), DTYPES["F32"])}, tuple(obs)
        if all(type(part) is int and part > 0 for part in obs):
            return {"": Box(tuple(obs), DTYPES["F32"])}, ()
    raise SpecError(
        f"obs is {obs!r}; give a length (6), a shape ((84, 84)), names, a space, or spaces by name"
    )


def _obs_space(name: Any, part: Any) -> Space:
    """A space, or a Box of floats with this length or shape."""
    if hasattr(part, "to_json"):
        space: Space = part
        return space
    shape = (part,) if type(part) is int else part
    if isinstance(shape, tuple) and shape and all(type(n) is int and n > 0 for n in shape):
        return Box(shape, DTYPES["F32"])
    raise SpecError(
        f"obs[{name!r}] is {str(part)[:80]}; give a space such as Box((7, 7), 'float32'), a length "
        "or a shape"
    )


def _actions(actions: Any) -> tuple[Mapping[str, Space], tuple[str, ...]]:
    if isinstance(actions, Mapping):
        for name, part in actions.items():
            if not hasattr(part, "to_json"):
                raise SpecError(
                    f"actions[{name!r}] is {str(part)[:80]}; give a space such as Discrete(3)"
                )
        return dict(actions), ()
    if hasattr(actions, "to_json"):
        return {"": actions}, ()
    if type(actions) is int and 0 < actions <= MAX_CHOICES:
        return {"": Discrete(actions)}, ()
    is_list = isinstance(actions, Sequence) and not isinstance(actions, str) and len(actions) > 0
    if is_list and all(isinstance(name, str) for name in actions):
        return {"": Discrete(len(actions))}, tuple(actions)
    raise SpecError(
        f"actions is {actions!r}; give a count (3) of at most {MAX_CHOICES}, names (['up', "
        "'down']), a space, or spaces by name"
    )


def spec_from_gymnasium(
    env: Any, *, game: str | None = None, has_action_mask: bool = False
) -> GameSpec:
    """The spec of a Gymnasium env, or of one env of a vector env; does not import gymnasium."""
    env_spec = getattr(env, "spec", None)
    name = (
        game_name(game)
        if game is not None
        else game_name_of_env(getattr(env_spec, "id", None) or "")
    )
    obs_space = getattr(env, "single_observation_space", None) or env.observation_space
    action_space = getattr(env, "single_action_space", None) or env.action_space
    return GameSpec(
        game=name,
        obs=space_from_gymnasium(obs_space, is_action=False),
        action=space_from_gymnasium(action_space, is_action=True),
        has_action_mask=has_action_mask,
        max_episode_steps=getattr(env_spec, "max_episode_steps", None),
        obs_names=_names(env, "obs_names"),
        action_names=_names(env, "action_names"),
    )


def _names(env: Any, which: str) -> tuple[str, ...]:
    """The observation or action names of an env, or of a vector env's first one; may be empty."""
    inner = getattr(env, "unwrapped", env)
    envs = getattr(inner, "envs", None)
    if isinstance(envs, list | tuple) and envs:
        inner = getattr(envs[0], "unwrapped", envs[0])
    names = getattr(inner, which, ())
    return (
        tuple(names)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        else ()
    )


def random_action(
    spec: GameSpec, rng: np.random.Generator, *, action_mask: Array | None = None
) -> Any:
    """Draw an action as the game expects it: a number, an array, or parts by path.

    With `action_mask`, only valid actions are drawn.
    """
    discrete = spec.discrete
    if discrete is not None:
        return (
            _draw(discrete, rng)
            if action_mask is None
            else int(rng.choice(np.flatnonzero(action_mask))) + discrete.start
        )
    parts = {path: _draw(space, rng) for path, space in spec.action.items()}
    return parts[""] if parts.keys() == {""} else nested(parts)


def _draw(space: Space, rng: np.random.Generator) -> Any:
    if isinstance(space, Discrete):
        return int(rng.integers(space.n - 1, dtype=np.uint64, endpoint=True)) + space.start
    if isinstance(space, MultiDiscrete):
        most = np.array([count - 1 for count in space.counts], np.uint64)
        return (
            rng.integers(most, dtype=np.uint64, endpoint=True)
            .astype(space.dtype)
            .reshape(space.shape)
        )
    if not isinstance(space, Box):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    low, high = (bound.reshape(-1) for bound in space.ends())
    if space.dtype.kind != "f":
        dtype = np.dtype(np.uint8) if space.dtype.kind == "b" else space.dtype
        return (
            rng.integers(low, high, dtype=dtype, endpoint=True)
            .astype(space.dtype)
            .reshape(space.shape)
        )
    low = low.astype(np.float64)
    high = high.astype(np.float64)
    is_closed = (abs(low) < MAX_NUMBER) & (abs(high) < MAX_NUMBER)
    drawn = np.where(
        is_closed,
        rng.uniform(np.where(is_closed, low, 0), np.where(is_closed, high, 1)),
        np.clip(rng.standard_normal(len(low)), low, high),  # without bounds, or with huge ones
    )
    return drawn.astype(space.dtype).reshape(space.shape)


def nested(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert parts by dotted path to the nested mappings that games use."""
    tree: dict[str, Any] = {}
    for path, value in parts.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
    return tree
