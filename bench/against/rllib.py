# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""RLlib: PPO with the settings of its own CartPole example, and its env runner."""

import logging
import os
import time
from typing import Any

# Without these, Ray sends usage statistics and writes to the home folder.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1", RAY_DEDUP_LOGS="0")

import ray
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env

from bench.against.link import Link, Round, Training, dense, serve, torch_layers
from bench.against.sleepy import GAMES


def _config(settings: dict[str, Any]) -> Any:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(**settings["env_runners"])
        .learners(num_learners=0)
        .training(**settings["training"])
        .rl_module(model_config=DefaultModelConfig(**settings["model"]))
    )


def solve(link: Link, request: dict[str, Any]) -> Round:
    """Evaluates after each iteration, the finest step that RLlib offers."""
    settings = request["settings"]
    ray.init(
        num_cpus=len(os.sched_getaffinity(0)) + 1,
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    algorithm = _config(settings).debugging(seed=request["seed"]).build_algo()
    training = Training(link)

    def export() -> dict[str, Any]:
        module = algorithm.get_module()
        layers = [
            *torch_layers(
                module.encoder.actor_encoder if _is_split(module) else module.encoder.encoder
            )
        ]
        return dense([*layers, *torch_layers(module.pi)], settings["model"]["fcnet_activation"])

    def run() -> dict[str, Any]:
        training.start()
        steps = 0
        while steps < settings["n_timesteps"]:
            steps = int(algorithm.train()["num_env_steps_sampled_lifetime"])
            if not training.goes_on(steps, export):
                break
        algorithm.stop()
        ray.shutdown()
        return {"steps": steps}

    return run


def _is_split(module: Any) -> bool:
    return hasattr(module.encoder, "actor_encoder")


def collect(_: Link, request: dict[str, Any]) -> Round:
    """One env runner in this process, with its default network at 64-64."""
    settings = {
        "env_runners": {"num_env_runners": 0, "num_envs_per_env_runner": request["envs"]},
        "training": {},
        "model": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"},
    }
    runner = SingleAgentEnvRunner(config=_config(settings))
    n_steps = request["steps"] * request["envs"]

    def run() -> dict[str, Any]:
        began_s = time.perf_counter()
        episodes = runner.sample(num_timesteps=n_steps, random_actions=False)
        took_s = time.perf_counter() - began_s
        steps = sum(len(episode) for episode in episodes)
        return {"values": {"collect": steps / took_s}, "right": steps >= n_steps}

    return run


def scale(_: Link, request: dict[str, Any]) -> Round:
    """DQN with env runners as Ray actors, one update of 64 rows per 8 steps."""
    ray.init(num_cpus=request["actors"] + 1, include_dashboard=False, logging_level=logging.ERROR)
    register_env("game", lambda _config: GAMES[request["game"]]())
    algorithm = (
        DQNConfig()
        .environment("game")
        .env_runners(
            num_env_runners=request["actors"],
            num_envs_per_env_runner=request["envs"] // request["actors"],
            rollout_fragment_length=32,
        )
        .learners(num_learners=0)
        .training(
            lr=1e-3,
            train_batch_size_per_learner=64,
            # RLlib counts one runner more than there are, for its own process, which plays none.
            training_intensity=8.0 * request["actors"] / (request["actors"] + 1),
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 131_072},
            num_steps_sampled_before_learning_starts=1_024,
            target_network_update_freq=1_024,
            double_q=False,
            dueling=False,
        )
        .reporting(min_time_s_per_iteration=1, min_sample_timesteps_per_iteration=1)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="relu"))
        .debugging(seed=0)
        .build_algo()
    )

    def counts() -> tuple[float, float, float]:
        result = algorithm.train()
        trained = result.get("learners", {}).get("__all_modules__", {})
        return (
            time.perf_counter(),
            float(result["num_env_steps_sampled_lifetime"]),
            float(trained.get("num_module_steps_trained_lifetime", 0)) / 64,
        )

    def run() -> dict[str, Any]:
        before = counts()
        while not before[2]:
            before = counts()
        now = counts()
        while now[0] < before[0] + request["seconds"]:
            now = counts()
        took_s = now[0] - before[0]
        algorithm.stop()
        ray.shutdown()
        return {
            "steps_per_s": (now[1] - before[1]) / took_s,
            "updates_per_s": (now[2] - before[2]) / took_s,
        }

    return run


if __name__ == "__main__":
    serve(
        ["ray", "torch", "gymnasium", "numpy"],
        {"solve-ppo": solve, "collect": collect, "scale": scale},
    )
