"""make_envs: any game as a vector env that the caller resets, so no final observation is lost."""

import copy
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from understudy.act.rally import SPEC as RALLY_SPEC
from understudy.act.rally import RallyVector
from understudy.act.vector_envs import (
    CARTPOLES,
    MASK,
    CartPoleVector,
    PlainEnvs,
    RawReward,
    layers_of,
    put_raw_reward,
    put_raw_rewards,
)
from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.settings import load_object
from understudy.core.wording import joined, pairs
from understudy.experience.game import GameSpec, spec_from_gymnasium
from understudy.games.rally import GAME_ID as RALLY

Env = gymnasium.Env[Any, Any]
Envs = VectorEnv[Any, Any, Any]
Wrap = Callable[[Env], Env]
BUILTIN_GAMES = {RALLY: RALLY_SPEC}
"""Built-in games that are not registered in Gymnasium, by id."""
Game = str | Callable[..., Env | Envs] | Env | Envs
_IGNORED = ("_np_random_seed", "_cached_spec")
"""Attributes that Gymnasium sets itself and that do not affect the env."""
_OF_MAKE_VEC = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
"""Arguments that `gymnasium.make_vec` adds to those of an env in a spec."""


def make_envs(
    game: Game,
    num_envs: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[str | Wrap] = (),
    frame_skip: int = 1,
    builtin: bool = True,
    may_autoreset: bool = False,
) -> Envs:
    """Return `num_envs` envs that are stepped together.

    `game` is an id, a function that creates an env, an env to copy, a vector env, which is returned
    itself, or a function with a parameter `num_envs` that creates a vector env. Vector envs that
    reset themselves are rejected unless `may_autoreset`. Wrappers (`"module:Class"` or functions)
    are applied in order, on top of the frame skip; `raw_reward_reader` has the rewards below them,
    and below a NormalizeReward that the game itself applies. With `builtin=False`, single envs are
    used even if understudy has a vectorized version of the game.
    """
    if num_envs < 1 or frame_skip < 1:
        raise ConfigError(
            f"num_envs is {num_envs} and frame_skip {frame_skip}; use integers of at least 1"
        )
    if is_vector(game):
        envs: Any = game
        if is_created := not isinstance(game, VectorEnv):
            envs = envs(num_envs=num_envs, **(env_kwargs or {}))
        try:
            is_changed = bool(wrappers or frame_skip > 1 or (env_kwargs and not is_created))
            _check_vector(envs, num_envs, is_changed=is_changed, may_autoreset=may_autoreset)
            put_raw_rewards(envs)
        except ConfigError:
            if is_created and hasattr(envs, "close"):
                envs.close()
            raise
        return envs  # type: ignore[no-any-return]
    if builtin and not wrappers and frame_skip == 1:
        if isinstance(game, str) and game in CARTPOLES and not env_kwargs:
            return CartPoleVector(num_envs, game=game)
        if game == RALLY and (env_kwargs or {}).keys() <= {"opponent", "seat"}:
            return RallyVector(num_envs, **(env_kwargs or {}))
    make = _maker(game, dict(env_kwargs or {}))
    layers: list[Wrap] = [
        load_object(wrapper, what="wrapper") if isinstance(wrapper, str) else wrapper
        for wrapper in wrappers
    ]

    def make_wrapped() -> Env:
        env = make()
        if frame_skip > 1:
            env = FrameSkip(env, frame_skip)
        if not put_raw_reward(env) and layers:
            env = RawReward(env)
        for layer in layers:
            env = layer(env)
        return env

    return PlainEnvs(make_wrapped, num_envs)


_TRAIN_ONLY = "train:"


def is_train_only(wrapper: Any) -> bool:
    """Whether it is `train:module:Class`; `train:Class` is a class of a module called train."""
    return isinstance(wrapper, str) and wrapper.startswith(_TRAIN_ONLY) and wrapper.count(":") > 1


def wrappers_of(wrappers: Sequence[Any], *, is_training: bool) -> list[Any]:
    """Those around the envs of training or of evaluations, as `make_envs` accepts them."""
    return [
        wrapper.removeprefix(_TRAIN_ONLY) if is_train_only(wrapper) else wrapper
        for wrapper in wrappers
        if is_training or not is_train_only(wrapper)
    ]


def is_vector(game: Any) -> bool:
    """Whether `game` is a vector env, or a function with a parameter `num_envs`."""
    if isinstance(game, VectorEnv):
        return True
    try:
        return callable(game) and "num_envs" in inspect.signature(game).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        return False


def _check_vector(envs: Any, num_envs: int, *, is_changed: bool, may_autoreset: bool) -> None:
    name = type(envs).__name__
    if not isinstance(envs, VectorEnv):
        raise ConfigError(
            f"the function of num_envs returned a {name}; return a gymnasium.vector.VectorEnv, or "
            "give a function without num_envs that creates one env"
        )
    mode = envs.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ConfigError(
            f"the metadata of the vector env {name} has autoreset_mode {mode!r}, so steps across a "
            "reset cannot be recognized; set its metadata['autoreset_mode'] to the AutoresetMode "
            "of gymnasium.vector that it implements"
        )
    if mode is not AutoresetMode.DISABLED and not may_autoreset:
        raise ConfigError(
            f"the vector env resets its envs itself ({mode}); create it with "
            "autoreset_mode=AutoresetMode.DISABLED"
        )
    if envs.num_envs != num_envs or is_changed:
        raise ConfigError(
            f"a vector env is used unchanged: this one has {envs.num_envs} envs, and {num_envs} "
            "were requested; request as many as it has, return as many as the function's num_envs "
            "says, and apply env_kwargs, wrappers and frame skip where you create it"
        )


def single_game(envs: Envs) -> Env | Callable[[], Env]:
    """Return single envs like those of a vector env, as a game for `make_envs`.

    It is a copy of the first env of a SyncVectorEnv or, if there is none or it cannot be copied,
    what the spec creates. ConfigError if neither exists, or if wrappers surround all envs together.
    """
    name = type(envs).__name__
    if isinstance(envs, VectorWrapper):
        raise ConfigError(
            f"the wrapper {name} surrounds a vector env and cannot be applied to single envs; "
            "apply wrappers to each env where you create it"
        )
    spec = envs.spec
    if isinstance(envs, SyncVectorEnv):
        try:
            return copy_env(envs.envs[0])
        except ConfigError:
            spec = envs.envs[0].spec
    if not isinstance(spec, EnvSpec):
        raise ConfigError(
            f"the vector env {name} has no spec of Gymnasium that creates single envs; create it "
            "with gymnasium.make_vec, or evaluate the run afterwards with an env of the same "
            "spaces: evaluate_run(folder, game=env)"
        )
    if spec.kwargs.get("wrappers"):
        raise ConfigError(
            f"the spec of the vector env {name} does not have its wrappers; create it with "
            "vectorization_mode='sync'"
        )
    spec = copy.deepcopy(spec)
    spec.kwargs = {name: value for name, value in spec.kwargs.items() if name not in _OF_MAKE_VEC}
    limit = spec.kwargs.pop("max_episode_steps", spec.max_episode_steps)
    return lambda: gymnasium.make(spec, max_episode_steps=limit, disable_env_checker=True)


def game_of(envs: Envs, *, name: str | None = None) -> GameSpec:
    """Return the spec of these envs' game; resets the envs to see if they have action masks."""
    spec_id = getattr(envs.spec, "id", None)
    if name is None and spec_id is None:
        first = envs.envs[0].unwrapped if isinstance(envs, SyncVectorEnv) else envs
        name = type(first).__name__
    _, infos = envs.reset(seed=0)
    return spec_from_gymnasium(envs, game=name, has_action_mask=MASK in infos)


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action for several frames, or until the episode ends, and sums the rewards."""

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
                f"game is {str(game)[:60]!r}; use a Gymnasium id, an env, or a function that "
                "creates one"
            )
        return lambda: game(**env_kwargs)
    if env_kwargs:
        raise ConfigError(
            f"env_kwargs {joined(env_kwargs)} cannot be applied to an existing env; create the env "
            "with them"
        )
    return lambda: copy_env(game)


def make_env(game_id: str, env_kwargs: Mapping[str, Any] | None = None) -> Env:
    """Return one env by its Gymnasium or built-in id; ConfigError suggests similar ids."""
    env_kwargs = dict(env_kwargs or {})
    try:
        return gymnasium.make(
            BUILTIN_GAMES.get(game_id, game_id), disable_env_checker=True, **env_kwargs
        )
    except DependencyNotInstalled as error:
        raise MissingExtra(f"game {game_id!r} needs another package: {error}") from error
    except gymnasium.error.DeprecatedEnv as error:
        raise ConfigError(f"game {game_id!r} is out of date: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        own = "an id of your own package has the form 'module:Name-v0'"
        # Of several versions of a game, the last one registered is suggested.
        by_stem = {_stem(other): other for other in (*BUILTIN_GAMES, *gymnasium.registry)}
        stems = difflib.get_close_matches(_stem(game_id), by_stem, n=3, cutoff=0.6)
        near = [by_stem[stem] for stem in stems]
        hint = f"use {', '.join(BUILTIN_GAMES)}, CartPole-v1 or any other id of Gymnasium; {own}"
        if near:
            hint = f"did you mean {' or '.join(near)}? {own[0].upper()}{own[1:]}"
        raise ConfigError(f"game {game_id!r} is unknown; {hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"game {game_id!r} cannot be created: {error}; install the package that contains it"
        ) from error
    except TypeError as error:
        raise ConfigError(
            f"game {game_id!r} does not accept {pairs(env_kwargs)}: {error}; correct its arguments"
        ) from error
    except (gymnasium.error.Error, ValueError) as error:
        hint = f"check {pairs(env_kwargs)}" if env_kwargs else "use an id such as CartPole-v1"
        raise ConfigError(f"Gymnasium cannot create {game_id!r}: {error}; {hint}") from error


def copy_env(env: Env) -> Env:
    """Return a copy of an env, or an equal env from its spec if it cannot be copied.

    The env itself is never changed. Copying some envs, such as all of Box2D and MuJoCo, creates
    them from scratch; if that would lose changes, ConfigError is raised.
    """
    reason = "a copy is created from scratch and loses changes to the env and steps played in it"
    message = "{} cannot be copied ({}); pass a function that creates one"
    try:
        duplicate = copy.deepcopy(env)
    except Exception as error:
        reason = str(error)
        try:
            assert env.spec is not None
            duplicate = gymnasium.make(env.spec, disable_env_checker=True)
        except Exception:
            raise ConfigError(message.format(type(env.unwrapped).__name__, reason)) from None
    if list(_layers(duplicate)) != list(_layers(env)):
        duplicate.close()
        raise ConfigError(message.format(type(env.unwrapped).__name__, reason))
    return duplicate


def _layers(env: Any) -> Iterator[tuple[type, dict[str, Any]]]:
    """Yield class and comparable attributes of each wrapper, outermost first, and of the env."""
    for layer in layers_of(env):
        if not isinstance(layer, gymnasium.wrappers.PassiveEnvChecker):
            fields = {
                name: _plain(value) for name, value in vars(layer).items() if name not in _IGNORED
            }
            yield type(layer), {name: value for name, value in fields.items() if value is not ...}


def _plain(value: Any) -> Any:
    """Return a comparable form of a value, or ... if it has none; as text, NaN equals NaN."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else ...


def _stem(game_id: str) -> str:
    return game_id.lower().rpartition("-v")[0] or game_id.lower()


def obs_splitter(game: GameSpec) -> Callable[[Any], dict[str, np.ndarray[Any, Any]]]:
    """Return a function that splits batched observations into the columns of the game's spec."""
    if set(game.obs) == {""}:
        return lambda obs: {"obs": obs}
    return lambda obs: {name: obs_part(obs, name) for name in game.obs_columns}


def obs_part(obs: Any, column: str) -> Any:
    """Return the part of an observation that a column of the game's spec has."""
    for key in column.split(".")[1:]:
        obs = obs[key] if isinstance(obs, Mapping) and key in obs else obs[int(key)]
    return obs
