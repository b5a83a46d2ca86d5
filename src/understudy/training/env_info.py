"""The game of a run, how its envs are created, and what inspecting one env reveals."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from understudy.act.vector import (
    Envs,
    game_of,
    is_train_only,
    is_vector,
    make_envs,
    single_game,
    wrappers_of,
)
from understudy.act.vector_envs import layers_of, single_envs
from understudy.core.errors import ConfigError, GameFailed, UnderstudyError
from understudy.core.wording import joined, pairs
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class GameChoice:
    """A game, and how its envs are created."""

    game: Any
    """A Gymnasium id, a function that creates an env, or an env (copied, never modified).

    Or a vector env, which is trained on and never closed, or a function of `num_envs` that creates
    one."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Any] = ()
    """`module:Class`, or an importable class; the first one is the innermost.

    `train:module:Class` wraps only the envs of training."""
    frame_skip: int = 1
    """Frames that each action is repeated for."""

    def __post_init__(self) -> None:
        for wrapper in self.wrappers:
            _path_of(wrapper)
        if type(self.frame_skip) is not int or self.frame_skip < 1:
            raise ConfigError(
                f"frame_skip is {self.frame_skip!r}; give a whole number from 1 (1 repeats nothing)"
            )
        if not isinstance(self.env_kwargs, Mapping):
            raise ConfigError(
                f"env_kwargs is {self.env_kwargs!r}; give an object such as {{'render_mode': None}}"
            )
        try:
            json.dumps(dict(self.env_kwargs))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env_kwargs cannot be stored in the run's folder: {error}; give JSON values, or a "
                "function that creates the env with them"
            ) from None

    @property
    def is_named(self) -> bool:
        """Whether the game is an id, so that another process can create the same envs."""
        return isinstance(self.game, str)

    @property
    def is_vector(self) -> bool:
        """Whether training uses a vector env that is passed or created by a function."""
        return is_vector(self.game)

    @property
    def num_envs(self) -> int | None:
        """The number of envs of a vector env that was passed; None: as many as are requested."""
        return self.game.num_envs if isinstance(self.game, VectorEnv) else None

    @property
    def name(self) -> str:
        if isinstance(self.game, str):
            return self.game
        spec = getattr(self.game, "spec", None)
        game = self.game.unwrapped if isinstance(self.game, gymnasium.Env) else self.game
        return str(getattr(spec, "id", None) or getattr(game, "__name__", type(game).__name__))

    def make(self, num_envs: int, *, is_training: bool = False) -> Envs:
        """Create `num_envs` envs that are stepped together; only those of training may autoreset.

        If the game is a vector env, training gets it unchanged, and the caller must not close it.
        """
        try:
            game = self.game
            if self.is_vector and not is_training:
                game = self._evaluated_game()
            return make_envs(
                game,
                num_envs,
                may_autoreset=is_training,
                env_kwargs=dict(self.env_kwargs) if game is self.game else None,
                wrappers=wrappers_of(self.wrappers, is_training=is_training),
                frame_skip=self.frame_skip,
            )
        except UnderstudyError:
            raise
        except Exception as error:
            parts = [f"wrappers {joined(map(_path_of, self.wrappers))}"] if self.wrappers else []
            parts += [f"env_kwargs {pairs(self.env_kwargs)}"] if self.env_kwargs else []
            raise ConfigError(
                f"envs of {self.name} cannot be created: {type(error).__name__}: {error}; check "
                f"{' and '.join(parts) or 'the game itself'}"
            ) from error

    def _evaluated_game(self) -> Any:
        """The game of evaluations, whose episodes start from held-out seeds, for a vector env.

        ConfigError if there are no envs that can be reset with a seed.
        """
        envs = self.make(self.num_envs or 1, is_training=True)
        if envs is self.game:
            return single_game(envs)
        try:
            return single_game(envs) if resets_itself(envs) else self.game
        finally:
            envs.close()

    def to_json(self) -> dict[str, Any]:
        return {
            "game": self.game if self.is_named else None,
            "name": self.name,
            "env_kwargs": dict(self.env_kwargs),
            "wrappers": [_path_of(wrapper) for wrapper in self.wrappers],
            "frame_skip": self.frame_skip,
        }


def choice_of(facts: Mapping[str, Any], choice: GameChoice | None, *, call: str = "") -> GameChoice:
    """A run's game: `choice`, or the stored game, with omitted options from the run's facts.

    ConfigError if there is no choice and the run was trained on an env object or function, which no
    folder can store; the message shows `call`, the Python call that passes the game again.
    """
    if choice is None and facts["game"] is None:
        raise ConfigError(
            f"this run was trained on an env object or function ({facts['name']}), which cannot be "
            f"stored; use Python, where the game can be passed again{call and ': ' + call}"
        )
    choice = choice or GameChoice(game=facts["game"])
    defaults = GameChoice(game=None).to_json()
    fields = choice.to_json()
    omitted = [
        name for name in ("env_kwargs", "wrappers", "frame_skip") if fields[name] == defaults[name]
    ]
    return replace(choice, **{name: facts[name] for name in omitted})


def _path_of(wrapper: Any) -> str:
    """`module:Class` of a wrapper; ConfigError if it cannot be imported by that path."""
    if isinstance(wrapper, str):
        return wrapper
    module = getattr(wrapper, "__module__", None)
    name = getattr(wrapper, "__qualname__", None)
    if name is None or getattr(sys.modules.get(str(module)), name, None) is not wrapper:
        raise ConfigError(
            f"wrapper {name or wrapper!r} cannot be imported, so the run's folder cannot refer to "
            "it; define it at the top level of a module, or give a function that creates the "
            "wrapped env"
        )
    return f"{module}:{name}"


@dataclass(frozen=True, slots=True)
class EnvInfo:
    """Properties of a game's envs."""

    spec: GameSpec
    threshold: float | None
    """The game's own `reward_threshold`, if it has one."""
    env_class: str
    is_builtin: bool
    resets_itself: bool
    """A vector env starts its episodes itself, from seeds of its own."""


def resets_itself(envs: Envs) -> bool:
    """Whether a vector env resets its envs itself."""
    return envs.metadata["autoreset_mode"] is not AutoresetMode.DISABLED


def inspect_env(choice: GameChoice, *, is_training: bool = False) -> EnvInfo:
    """Create and reset one env, and return its properties.

    With `is_training`, and if the game is a vector env, it is the one of training. GameFailed if
    its reset fails; ConfigError if its wrappers do not fit a run.
    """
    info = _inspect(choice, is_training=is_training and choice.is_vector)
    if any(map(is_train_only, choice.wrappers)):
        spec = _inspect(choice, is_training=True).spec
        if replace(spec, max_episode_steps=info.spec.max_episode_steps) != info.spec:
            raise ConfigError(
                f"the wrappers {joined(map(_path_of, choice.wrappers))} change the spaces of "
                f"{choice.name} in training only, where its policy could not be evaluated; remove "
                "the prefix 'train:' of those that change spaces"
            )
    return info


def different_spaces(env: GameSpec, other: GameSpec) -> str:
    """How an env's spaces differ from another spec's; empty if a policy of that spec can play it.

    Names, the step limit and the bounds of observations do not matter to a policy.
    """

    def layout(spec: GameSpec) -> dict[str, Any]:
        return {
            name: (space.shape, space.dtype) if isinstance(space, Box) else space
            for name, space in spec.obs_columns.items()
        }

    for what, here, there in (
        ("observations are", layout(env), layout(other)),
        ("actions are", dict(env.action), dict(other.action)),
        ("has_action_mask is", env.has_action_mask, other.has_action_mask),
    ):
        if here != there:
            return f"{what} {here}, not {there}"
    return ""


def _inspect(choice: GameChoice, *, is_training: bool) -> EnvInfo:
    num_envs = choice.num_envs if is_training else None
    envs = choice.make(num_envs or 1, is_training=is_training)
    try:
        singles = single_envs(envs)[:1]
        env = singles[0].unwrapped if singles else envs
        if wrapper := _observation_statistics(envs):
            raise ConfigError(
                f"{wrapper} around {choice.name} keeps running statistics in each env, where "
                "evaluations and bots do not have them; remove it and set observation_norm=true, "
                "which keeps them in the policy"
            )
        spec = game_of(envs)
        threshold = getattr(envs.spec, "reward_threshold", None)
        env_class = f"{type(env).__module__}:{type(env).__qualname__}"
        is_builtin = type(env).__module__.startswith("understudy.")
        return EnvInfo(spec, threshold, env_class, is_builtin, resets_itself(envs))
    except UnderstudyError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise GameFailed(
            f"an env of {choice.name} failed in its first reset: {what}; fix the env (gymnasium's "
            "check_env helps); --debug shows the traceback"
        ) from error
    finally:
        if envs is not choice.game:
            envs.close()


def _observation_statistics(envs: Envs) -> str:
    """The class of a wrapper in or around the envs that still changes statistics, or ""."""
    *_, inner = layers = list(layers_of(envs))
    for env in single_envs(envs)[:1]:
        layers += layers_of(env)
    for layer in layers:
        # Statistics that are frozen are constants of the env.
        if "obs_rms" in vars(layer) and getattr(layer, "update_running_mean", True):
            return type(layer).__name__
    if isinstance(inner, AsyncVectorEnv) and all(inner.call("has_wrapper_attr", "obs_rms")):
        return "NormalizeObservation" if any(inner.get_attr("update_running_mean")) else ""
    return ""
