"""An observation that does not fit its space is named: env, field, expected and got."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tests.act.envs import MixedEnv, PlainEnv
from understudy.act.live import LiveEnvs
from understudy.act.vector import game_of, make_envs
from understudy.core.errors import GameFailed


class WithFault(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Changes the third observation of an episode."""

    def __init__(self, env: gymnasium.Env[Any, Any], change: Callable[[Any], Any]) -> None:
        super().__init__(env)
        self._change = change

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = super().step(action)
        is_third = self.env.unwrapped.n_steps == 2  # type: ignore[attr-defined]
        return self._change(obs) if is_third else obs, reward, False, False, info


def message_of(make: type[Any], change: Callable[[Any], Any]) -> str:
    """The error of three envs of which the second has the fault."""
    count = iter(range(9))

    def make_env() -> gymnasium.Env[Any, Any]:
        return WithFault(make(), change if next(count) % 3 == 1 else lambda obs: obs)

    envs = make_envs(make_env, 3)
    live = LiveEnvs(envs, game_of(envs))
    live.reset([1, 2, 3])
    live.step(envs.action_space.sample())
    with pytest.raises(GameFailed) as raised:
        live.step(envs.action_space.sample())
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda obs: obs[:2], "float32[2]"),
        (lambda obs: obs[None], "float32[1, 3]"),
        (lambda obs: obs.astype(complex), "complex128[3]"),
        (lambda obs: ["a", "b", "c"], "<U1[3]"),
        (lambda obs: None, "object[]"),
    ],
)
def test_a_wrong_observation_of_one_space_is_named(change: Callable[[Any], Any], got: str):
    assert f"env 1 of PlainEnv returned an 'obs' of {got} in step(), not of float32[3]" in (
        message_of(PlainEnv, change)
    )


def test_a_wrong_field_is_named():
    def taller(obs: Any) -> Any:
        return {**obs, "picture": np.zeros((5, 4), np.uint8)}

    def halved(obs: Any) -> Any:
        return {**obs, "picture": obs["picture"] / 2}

    def without(obs: Any) -> Any:
        return {"inner": obs["inner"]}

    for change, got in (
        (taller, "returned an 'obs.picture' of uint8[5, 4] in step(), not of uint8[4, 4]"),
        (halved, "returned an 'obs.picture' of float64[4, 4] in step(), not of uint8[4, 4]"),
        (without, "returned no 'obs.picture' in step()"),
    ):
        assert f"env 1 of MixedEnv {got}" in message_of(MixedEnv, change)


def test_values_of_a_wider_type_are_accepted():
    envs = make_envs(lambda: WithFault(PlainEnv(), lambda obs: obs.astype(np.float64)), 2)
    live = LiveEnvs(envs, game_of(envs))
    live.reset([1, 2])
    for _ in range(3):
        live.step(envs.action_space.sample())
    assert live.obs["obs"].dtype == np.float32


class Shrinking(VectorEnv[Any, Any, Any]):
    """A vector env whose observations lose a number in its first step."""

    num_envs = 2
    single_observation_space = PlainEnv.observation_space
    single_action_space = PlainEnv.action_space
    observation_space = batch_space(single_observation_space, 2)
    action_space = batch_space(single_action_space, 2)
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    dtype: Any = np.float32
    size = 2

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        return np.zeros((2, self.size), self.dtype), np.zeros(2), *np.zeros((2, 2), bool), {}


@pytest.mark.parametrize(
    ("size", "dtype", "got"),
    [
        (2, np.float32, "float32[2, 2]"),
        (1, np.float32, "float32[2, 1]"),  # which NumPy would repeat
        (3, np.complex64, "complex64[2, 3]"),
    ],
)
def test_a_wrong_observation_of_a_vector_env_is_named(size: int, dtype: Any, got: str):
    envs = Shrinking()
    envs.size = size
    envs.dtype = dtype
    live = LiveEnvs(envs, game_of(envs))
    live.reset([1, 2])
    with pytest.raises(GameFailed) as raised:
        live.step(np.full(2, 2))
    assert f"the vector env of Shrinking returned an 'obs' of {got} in step(), not of " in str(
        raised.value
    )
