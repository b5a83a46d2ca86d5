"""make_envs: any game as a vector env that leaves resets to its caller, so that no last
observation is lost."""

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from understudy.act.rally import SPEC as RALLY_SPEC
from understudy.act.rally import RallyVector
from understudy.act.vector_envs import CARTPOLE, MASK, CartPoleVector, PlainEnvs
from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.settings import load
from understudy.experience.game import GameSpec, spec_from_gymnasium
from understudy.games.rally import GAME_ID as RALLY

Env = gymnasium.Env[Any, Any]
Envs = VectorEnv[Any, Any, Any]
Wrap = Callable[[Env], Env]
BOXED = {RALLY: RALLY_SPEC}
"""Games in the box that Gymnasium has not."""
Game = str | Callable[[], Env] | Env | Envs
_BESIDE = ("_np_random_seed", "_cached_spec")
"""Attributes that Gymnasium itself fills in, and that change nothing."""


def make_envs(
    game: Game,
    num_envs: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[str | Wrap] = (),
    frame_skip: int = 1,
    builtin: bool = True,
) -> Envs:
    """`num_envs` envs of a game, stepped together: a Gymnasium id, a function that makes an env, or
    an env to copy.

    Wrappers (`"module:Class"` or functions) go on in order, above the frame skip; `builtin=False`
    takes the env of one game also where we have one of many.
    """
    if num_envs < 1 or frame_skip < 1:
        raise ConfigError(
            f"num_envs is {num_envs} and frame_skip {frame_skip}; give whole numbers from 1"
        )
    if isinstance(game, VectorEnv):
        mode = game.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"a vector env resets by itself ({mode}); make it with "
                "autoreset_mode=AutoresetMode.DISABLED"
            )
        if game.num_envs != num_envs or env_kwargs or wrappers or frame_skip > 1:
            raise ConfigError(
                f"a vector env of {game.num_envs} envs was given for {num_envs}; give that number, "
                "and put wrappers, "
                "settings and frame skip into its own envs"
            )
        return game
    if builtin and not wrappers and frame_skip == 1:
        if game == CARTPOLE and not env_kwargs:
            return CartPoleVector(num_envs)
        if game == RALLY and (env_kwargs or {}).keys() <= {"opponent", "seat"}:
            return RallyVector(num_envs, **(env_kwargs or {}))
    make = _maker(game, dict(env_kwargs or {}))
    layers: list[Wrap] = [
        load(one, what="wrapper") if isinstance(one, str) else one for one in wrappers
    ]

    def make_one() -> Env:
        env = make()
        if frame_skip > 1:
            env = FrameSkip(env, frame_skip)
        for layer in layers:
            env = layer(env)
        return env

    return PlainEnvs(make_one, num_envs)


def game_of(envs: Envs, *, name: str | None = None) -> GameSpec:
    """The spec of the game these envs play; resets them, to see whether they say which actions
    are legal."""
    spec_id = getattr(envs.spec, "id", None)
    if name is None and spec_id is None:
        first = envs.envs[0].unwrapped if isinstance(envs, SyncVectorEnv) else envs
        name = type(first).__name__
    _, infos = envs.reset(seed=0)
    return spec_from_gymnasium(envs, game=name, has_action_mask=MASK in infos)


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action for some frames, or until the episode ends, and adds up their rewards."""

    def __init__(self, env: Env, frames: int) -> None:
        super().__init__(env)
        self._frames = frames

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._frames):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def _maker(game: Any, env_kwargs: dict[str, Any]) -> Callable[[], Env]:
    if isinstance(game, str):
        return lambda: make_env(game, env_kwargs)
    if not isinstance(game, gymnasium.Env):
        if not callable(game):
            raise ConfigError(
                f"game is {str(game)[:60]!r}; give a Gymnasium id, an env, or a function that "
                "makes one"
            )
        return lambda: game(**env_kwargs)
    if env_kwargs:
        raise ConfigError(
            f"settings {sorted(env_kwargs)} came with an env that exists; make it with them instead"
        )
    return lambda: copied(game)


def make_env(game_id: str, env_kwargs: Mapping[str, Any] | None = None) -> Env:
    """One env by its Gymnasium id, or of a game in the box; ConfigError names the nearest."""
    env_kwargs = dict(env_kwargs or {})
    try:
        return gymnasium.make(BOXED.get(game_id, game_id), disable_env_checker=True, **env_kwargs)
    except DependencyNotInstalled as error:
        raise MissingExtra(f"game {game_id!r} needs another package: {error}") from error
    except gymnasium.error.DeprecatedEnv as error:
        raise ConfigError(f"game {game_id!r} is out of date: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        own = "an id of a package of your own is written 'module:Name-v0'"
        by_stem = {
            _stem(known): known for known in (*BOXED, *gymnasium.registry)
        }  # of several versions the last
        near = [
            by_stem[one]
            for one in difflib.get_close_matches(_stem(game_id), by_stem, n=3, cutoff=0.6)
        ]
        hint = f"give {', '.join(BOXED)}, CartPole-v1 or any other id of Gymnasium; {own}"
        if near:
            hint = f"did you mean {' or '.join(near)}? {own[0].upper()}{own[1:]}"
        raise ConfigError(f"no game {game_id!r} is known; {hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"game {game_id!r} cannot be made: {error}; install the package it is in"
        ) from error
    except TypeError as error:
        raise ConfigError(f"game {game_id!r} does not take {dict(env_kwargs)}: {error}") from error
    except (gymnasium.error.Error, ValueError) as error:
        wanted = f"look at {dict(env_kwargs)}" if env_kwargs else "give an id such as CartPole-v1"
        raise ConfigError(f"Gymnasium cannot make {game_id!r}: {error}; {wanted}") from error


def copied(env: Env) -> Env:
    """A copy of this env; where it cannot be copied and is as its spec makes it, an env from the
    spec.

    The env itself is never touched. Some envs are copied by being made again, such as all of Box2D
    and MuJoCo: what was changed in them would be lost, and is a ConfigError.
    """
    why = "a copy of it is made anew, and loses what was changed in it or played"
    refused = "{} cannot be copied ({}); give a function that makes one"
    try:
        made = copy.deepcopy(env)
    except Exception as error:
        why = str(error)
        try:
            assert env.spec is not None
            made = gymnasium.make(env.spec, disable_env_checker=True)
        except Exception:
            raise ConfigError(refused.format(type(env.unwrapped).__name__, why)) from None
    if list(_shown(made)) != list(_shown(env)):
        made.close()
        raise ConfigError(refused.format(type(env.unwrapped).__name__, why))
    return made


def _shown(env: Any) -> Iterator[tuple[type, dict[str, Any]]]:
    """Each layer's class with its plain attributes, from the outermost to the game; checkers are
    no layer."""
    while env is not None:
        if not isinstance(env, gymnasium.wrappers.PassiveEnvChecker):
            fields = {
                name: _plain(value) for name, value in vars(env).items() if name not in _BESIDE
            }
            yield type(env), {name: value for name, value in fields.items() if value is not ...}
        env = env.env if isinstance(env, gymnasium.Wrapper) else None


def _plain(value: Any) -> Any:
    """What can be compared, or an ellipsis; by their texts, so that NaN is NaN."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else ...


def _stem(game_id: str) -> str:
    return game_id.lower().rpartition("-v")[0] or game_id.lower()


def columns_of(game: GameSpec) -> Callable[[Any], dict[str, np.ndarray[Any, Any]]]:
    """A function that takes batched observations apart into columns, by the paths of the game's
    spec."""
    if set(game.obs) == {""}:
        return lambda obs: {"obs": obs}
    paths = {name: name.split(".")[1:] for name in game.obs_columns}

    def at(obs: Any, keys: Sequence[str]) -> Any:
        for key in keys:
            obs = obs[key] if isinstance(obs, Mapping) and key in obs else obs[int(key)]
        return obs

    return lambda obs: {name: at(obs, keys) for name, keys in paths.items()}
