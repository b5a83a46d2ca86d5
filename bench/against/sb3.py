# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
# mypy: disallow-subclassing-any=False
"""Stable-Baselines3: training with its own callbacks, and acting with `predict`."""

import time
from collections.abc import Callable
from typing import Any

import stable_baselines3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from bench.against.link import Link, Round, Training, dense, serve, torch_layers
from bench.against.sleepy import GAMES


class Look(BaseCallback):
    """Sends the weights after an update, before the next steps are collected."""

    def __init__(self, training: Training, export: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self._training = training
        self._export = export
        self._may_go_on = True

    def look(self) -> None:
        if self._may_go_on:
            self._may_go_on = self._training.goes_on(
                self.num_timesteps, lambda: self._export(self.model)
            )

    def _on_rollout_start(self) -> None:
        self.look()

    def _on_step(self) -> bool:
        return self._may_go_on


def solver(
    library: Any, algorithm: str, export: Callable[[Any], dict[str, Any]]
) -> Callable[..., Round]:
    """Trains until the harness stops it; also for SBX, which has the same interface."""

    def prepare(link: Link, request: dict[str, Any]) -> Round:
        settings = {name: _linear(value) for name, value in request["settings"].items()}
        envs = make_vec_env("CartPole-v1", n_envs=settings.pop("n_envs", 1), seed=request["seed"])
        steps = settings.pop("n_timesteps")
        model = getattr(library, algorithm)(
            "MlpPolicy", envs, seed=request["seed"], device="cpu", **settings
        )
        training = Training(link)

        def run() -> dict[str, Any]:
            training.start()
            look = Look(training, export)
            model.learn(steps, callback=look)
            look.look()
            return {"steps": int(model.num_timesteps)}

        return run

    return prepare


def _linear(value: Any) -> Any:
    """Parse RL Zoo's notation for a linear schedule to 0: `lin_0.001`."""
    if isinstance(value, str) and value.startswith("lin_"):
        start = float(value.removeprefix("lin_"))
        return lambda left: left * start
    return value


def collect(_: Link, request: dict[str, Any]) -> Round:
    """DummyVecEnv and `predict`, sampled actions, 64-64."""
    envs = make_vec_env("CartPole-v1", n_envs=request["envs"], seed=0)
    model = stable_baselines3.PPO(
        "MlpPolicy", envs, device="cpu", seed=0, policy_kwargs={"net_arch": [64, 64]}
    )
    obs = envs.reset()

    def run() -> dict[str, Any]:
        nonlocal obs
        began_s = time.perf_counter()
        for _ in range(request["steps"]):
            actions, _state = model.predict(obs, deterministic=False)
            obs, *_rest = envs.step(actions)
        took_s = time.perf_counter() - began_s
        return {
            "values": {"collect": request["steps"] * request["envs"] / took_s},
            "right": obs.shape[1] == 4,
        }

    return run


class Counted(BaseCallback):
    """Ends a training some seconds after its first update, and keeps what happened in between."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._first: tuple[float, int, int] | None = None
        self.rates: dict[str, float] = {}

    def _on_step(self) -> bool:
        now = (time.perf_counter(), self.num_timesteps, self.model._n_updates)
        if self._first is None:
            if now[2]:
                self._first = now
            return True
        took_s, steps, updates = (
            after - before for after, before in zip(now, self._first, strict=True)
        )
        if took_s < self._seconds:
            return True
        self.rates = {"steps_per_s": steps / took_s, "updates_per_s": updates / took_s}
        return False


def scale(_: Link, request: dict[str, Any]) -> Round:
    """DQN with SubprocVecEnv: one process per env, one update of 64 rows per 8 steps."""
    envs = SubprocVecEnv([GAMES[request["game"]]] * request["envs"], start_method="spawn")
    model = stable_baselines3.DQN(
        "MlpPolicy",
        envs,
        device="cpu",
        seed=0,
        learning_rate=1e-3,
        buffer_size=131_072,
        learning_starts=1_024,
        batch_size=64,
        train_freq=8,
        gradient_steps=request["envs"],
        target_update_interval=1_024,
        policy_kwargs={"net_arch": [64, 64]},
    )

    def run() -> dict[str, Any]:
        counted = Counted(request["seconds"])
        model.learn(10**9, callback=counted)
        envs.close()
        return counted.rates

    return run


def _q_network(model: Any) -> dict[str, Any]:
    return dense(torch_layers(model.policy.q_net), "relu")


def _actor(model: Any) -> dict[str, Any]:
    hidden = torch_layers(model.policy.mlp_extractor.policy_net)
    return dense([*hidden, *torch_layers(model.policy.action_net)], "tanh")


if __name__ == "__main__":
    serve(
        ["stable-baselines3", "torch", "gymnasium", "numpy"],
        {
            "solve-dqn": solver(stable_baselines3, "DQN", _q_network),
            "solve-ppo": solver(stable_baselines3, "PPO", _actor),
            "collect": collect,
            "scale": scale,
        },
    )
