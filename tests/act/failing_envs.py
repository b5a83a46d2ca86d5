"""Games that fail, and one that leaves a trace, for actors in processes of their own.

They are apart from the tests: a process that creates one imports its module, and would import
pytest as well.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.act.envs import PlainEnv
from understudy.act.vector import Envs, make_envs


class Unrepeatable(PlainEnv):
    """Shows other numbers each time, whatever the seed."""

    def observe(self) -> Any:
        return np.random.default_rng().random(3, dtype=np.float32)


class Closing(PlainEnv):
    """Leaves a file when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self) -> None:
        (self._folder / f"{os.getpid()} {id(self)}").touch()


class Reporting(PlainEnv):
    """Raises in its reset, with a variable of its process."""

    def reset(self, **arguments: Any) -> Any:
        raise RuntimeError(f"the path is {os.environ.get('PYTHONPATH')}")


def make_without_jax(num_envs: int) -> Envs:
    assert "jax" not in sys.modules, "an actor's process loaded JAX"
    return make_envs(PlainEnv, num_envs)


class Failing(PlainEnv):
    """Raises in its sixth step."""

    def step(self, action: Any) -> Any:
        if self.n_steps == 5:
            raise RuntimeError("the door is stuck")
        return super().step(action)


class Leaving(PlainEnv):
    """Calls sys.exit in its first step."""

    def step(self, action: Any) -> Any:
        sys.exit(5)


class Exiting(PlainEnv):
    """Ends its process in its first step."""

    def step(self, action: Any) -> Any:
        os._exit(7)


class ExitsAtSeed3(PlainEnv):
    """Ends its process in one episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == 3:
            os._exit(7)
        return super().reset(seed=seed, options=options)


class RaisesAtSeed3(PlainEnv):
    """Raises in one episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == 3:
            raise RuntimeError("no such level")
        return super().reset(seed=seed, options=options)
