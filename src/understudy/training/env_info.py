"""Which game a run is about, how its envs are made, and what one look at them tells."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

from understudy.act.vector import Envs, game_of, make_envs
from understudy.core.errors import ConfigError, GameFailed, UnderstudyError
from understudy.experience.game import GameSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GameChoice:
    """Which game, and how its envs are made."""

    game: Any
    """A Gymnasium id, a function that makes an env, or an env, which is copied and never
    touched."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[Any] = ()
    """`module:Class`, or the class itself where an import finds it; the first goes on first."""
    frame_skip: int = 1
    """Frames an action is repeated for."""

    def __post_init__(self) -> None:
        if isinstance(self.game, gymnasium.vector.VectorEnv):
            raise ConfigError(
                f"game is a vector env ({type(self.game).__name__}), and a run makes its envs "
                "itself, some to train in "
                "and some to evaluate in; give a function that makes one env"
            )
        for one in self.wrappers:
            _path_of(one)
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
                f"env_kwargs cannot be written into the run's folder: {error}; give plain values, "
                "or a function that "
                "makes the env with them"
            ) from None

    @property
    def is_named(self) -> bool:
        """Whether another process can make the same envs from the name alone."""
        return isinstance(self.game, str)

    @property
    def name(self) -> str:
        if isinstance(self.game, str):
            return self.game
        spec = getattr(self.game, "spec", None)
        shown = self.game.unwrapped if isinstance(self.game, gymnasium.Env) else self.game
        return str(getattr(spec, "id", None) or getattr(shown, "__name__", type(shown).__name__))

    def make(self, num_envs: int) -> Envs:
        """That many envs, stepped together."""
        try:
            return make_envs(
                self.game,
                num_envs,
                env_kwargs=dict(self.env_kwargs),
                wrappers=list(self.wrappers),
                frame_skip=self.frame_skip,
            )
        except UnderstudyError:
            raise
        except Exception as error:
            parts = [f"wrappers {list(self.wrappers)}"] if self.wrappers else []
            parts += [f"env_kwargs {dict(self.env_kwargs)}"] if self.env_kwargs else []
            raise ConfigError(
                f"envs of {self.name} cannot be made: {type(error).__name__}: {error}; check "
                f"{' and '.join(parts) or 'the game itself'}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        return {
            "game": self.game if self.is_named else None,
            "name": self.name,
            "env_kwargs": dict(self.env_kwargs),
            "wrappers": [_path_of(one) for one in self.wrappers],
            "frame_skip": self.frame_skip,
        }


def choice_of(facts: Mapping[str, Any], given: GameChoice | None, *, call: str = "") -> GameChoice:
    """The choice of a run with what is given again, such as an env object; what was left out is as
    it was.

    ConfigError where an object must be given again, which no folder holds; `call` is how to do that
    in Python.
    """
    if given is None and facts["game"] is None:
        raise ConfigError(
            f"this run was trained on an env object or function ({facts['name']}), which no folder "
            "holds; do this in "
            f"Python, where the game can be given again{call and ': ' + call}"
        )
    given = given or GameChoice(game=facts["game"])
    plain = GameChoice(game=None).to_json()
    fields = given.to_json()
    left_out = [
        name for name in ("env_kwargs", "wrappers", "frame_skip") if fields[name] == plain[name]
    ]
    return replace(given, **{name: facts[name] for name in left_out})


def _path_of(wrapper: Any) -> str:
    """`module:Class` of a wrapper; ConfigError where that would not lead back to it from a run's
    folder."""
    if isinstance(wrapper, str):
        return wrapper
    module = getattr(wrapper, "__module__", None)
    name = getattr(wrapper, "__qualname__", None)
    if name is None or getattr(sys.modules.get(str(module)), name, None) is not wrapper:
        raise ConfigError(
            f"wrapper {name or wrapper!r} is not found by an import, so the run's folder cannot "
            "name it; put it at the "
            "top of a module, or give a function that makes the env with it"
        )
    return f"{module}:{name}"


@dataclass(frozen=True, slots=True)
class EnvInfo:
    """What one look at a game's envs tells."""

    spec: GameSpec
    threshold: float | None
    """The return at which the game's makers call it solved, where they say so."""
    env_class: str
    is_builtin: bool


def look_at(choice: GameChoice) -> EnvInfo:
    """Make one env and see what it is."""
    envs = choice.make(1)
    try:
        one = envs.envs[0].unwrapped if hasattr(envs, "envs") else envs
        spec = game_of(envs)
        found = getattr(envs.spec, "reward_threshold", None)
        env_class = f"{type(one).__module__}:{type(one).__qualname__}"
        return EnvInfo(spec, found, env_class, type(one).__module__.startswith("understudy."))
    except UnderstudyError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise GameFailed(
            f"an env of {choice.name} failed in its first reset: {what}; mend the env (gymnasium's "
            "check_env helps); "
            "--debug shows where"
        ) from error
    finally:
        envs.close()
