"""copies_of: envs like one that exists, with all that was changed in it; the env itself is never touched."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from understudy.core.errors import ConfigError

Env = gymnasium.Env[Any, Any]
_BESIDE = ("_np_random_seed", "_cached_spec")
"""Attributes that Gymnasium itself fills in, and that change nothing."""


def copies_of(env: Env) -> Callable[[], Env]:
    """Makes copies of this env; where it cannot be copied and is as its spec makes it, envs from the spec."""

    def copied() -> Env:
        why = "a copy of it is made anew, and loses what was changed in it or played"
        try:
            made = copy.deepcopy(env)
        except Exception as error:
            why = str(error)
            made = _made_anew(env, why)
        # Some envs are copied by being made again, such as all of Box2D and MuJoCo.
        if list(_shown(made)) != list(_shown(env)):
            made.close()
            raise _cannot(env, why)
        return made

    return copied


def _made_anew(env: Env, why: str) -> Env:
    try:
        assert env.spec is not None
        return gymnasium.make(env.spec, disable_env_checker=True)
    except Exception:
        raise _cannot(env, why) from None


def _cannot(env: Env, why: str) -> ConfigError:
    return ConfigError(f"{type(env.unwrapped).__name__} cannot be copied ({why}); give a function that makes one")


def _shown(env: Any) -> Iterator[tuple[type, dict[str, Any]]]:
    """Each layer's class with its plain attributes, from the outermost to the game; checkers are no layer."""
    while env is not None:
        if not isinstance(env, gymnasium.wrappers.PassiveEnvChecker):
            fields = {name: _plain(value) for name, value in vars(env).items() if name not in _BESIDE}
            yield type(env), {name: value for name, value in fields.items() if value is not ...}
        env = env.env if isinstance(env, gymnasium.Wrapper) else None


def _plain(value: Any) -> Any:
    """What can be compared, or an ellipsis; by their texts, so that NaN is NaN."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else ...
