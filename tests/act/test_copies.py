"""copies_of gives the env that was meant, with what was changed in it, or says that it cannot."""

import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from tests.act.envs import PlainEnv
from understudy.act.copies import copies_of
from understudy.core.errors import ConfigError


class Held(PlainEnv):
    """An env that holds what no copy can."""

    def __init__(self, pull: float = 1.0) -> None:
        self.lock, self.pull = threading.Lock(), pull


class Remade(PlainEnv, EzPickle):
    """An env that is copied by being made again."""

    def __init__(self, pull: float = 1.0) -> None:
        EzPickle.__init__(self, pull)
        self.pull = pull


class Doubled(gymnasium.ObservationWrapper[Any, Any, Any]):
    def observation(self, observation: Any) -> Any:
        return observation * 2


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Held-v0", entry_point="tests.act.test_copies:Held")
    gymnasium.register("Remade-v0", entry_point="tests.act.test_copies:Remade")


def test_what_was_changed_in_a_registered_env_is_in_its_copies_and_the_env_stays_as_it_is():
    env: Any = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = 99.0
    copy: Any = copies_of(env)()
    assert copy.unwrapped.gravity == 99.0
    assert copy.unwrapped is not env.unwrapped
    copy.unwrapped.gravity = 1.0
    assert env.unwrapped.gravity == 99.0


def test_a_wrapper_that_no_spec_can_make_is_copied_with_its_env():
    copy = copies_of(Doubled(gymnasium.make("CartPole-v1")))()
    assert isinstance(copy, Doubled)
    shown, plain = copy.reset(seed=3)[0], gymnasium.make("CartPole-v1").reset(seed=3)[0]
    assert np.array_equal(shown, plain * 2)


def test_an_env_that_cannot_be_copied_is_made_again_where_that_gives_the_same():
    copy: Any = copies_of(gymnasium.make("Held-v0", pull=3.0))()
    assert copy.unwrapped.pull == 3.0


@pytest.mark.parametrize("game", ["Held-v0", "Remade-v0"])
def test_an_env_that_was_changed_and_cannot_be_copied_is_refused(game: str):
    env: Any = gymnasium.make(game)
    untouched: Any = copies_of(env)()
    assert untouched.unwrapped.pull == 1.0
    env.unwrapped.pull = 99.0
    with pytest.raises(ConfigError, match="give a function that makes one"):
        copies_of(env)()


@pytest.mark.parametrize("env", [Held(), Doubled(Held())])
def test_an_env_that_cannot_be_copied_and_no_spec_makes_is_refused(env: Any):
    with pytest.raises(ConfigError, match=r"cannot pickle .*give a function that makes one"):
        copies_of(env)()


def test_a_wrapper_around_an_env_that_cannot_be_copied_is_refused():
    with pytest.raises(ConfigError, match="give a function that makes one"):
        copies_of(Doubled(gymnasium.make("Held-v0")))()
