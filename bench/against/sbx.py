# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""SBX: Stable-Baselines3 on JAX; trained through the same interface."""

from typing import Any

import sbx

from bench.against.link import dense, serve
from bench.against.sb3 import solver


def _export(state: Any, activation: str) -> dict[str, Any]:
    layers = state.params["params"]
    names = sorted(name for name in layers if name.startswith("Dense_"))
    return dense([(layers[name]["kernel"], layers[name]["bias"]) for name in names], activation)


if __name__ == "__main__":
    serve(
        ["sbx-rl", "jax", "stable-baselines3", "gymnasium", "numpy"],
        {
            "solve-dqn": solver(sbx, "DQN", lambda model: _export(model.policy.qf_state, "relu")),
            "solve-ppo": solver(
                sbx, "PPO", lambda model: _export(model.policy.actor_state, "tanh")
            ),
        },
    )
