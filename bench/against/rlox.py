# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
# mypy: disallow-subclassing-any=False
"""rlox: environments and buffers in Rust, networks in torch."""

from typing import Any

import numpy as np
import torch
from rlox.algorithms.dqn import DQN
from rlox.algorithms.ppo import PPO
from rlox.callbacks import Callback

from bench.against.link import Link, Round, Training, dense, serve, torch_layers


class Look(Callback):
    """Sends the weights; DQN calls it after each step, PPO after each update."""

    def __init__(self, training: Training, steps_per_call: int) -> None:
        super().__init__()
        self._training = training
        self._per_call = steps_per_call
        self.steps = 0

    def on_step(self, **fields: Any) -> bool:
        self.steps += self._per_call
        return self._training.goes_on(self.steps, lambda: self._export(fields["algo"]))

    def _export(self, algorithm: Any) -> dict[str, Any]:
        if isinstance(algorithm, PPO):
            return dense(torch_layers(algorithm.policy.actor), "tanh")
        return dense(torch_layers(algorithm.q_network), "relu")


def solve(link: Link, request: dict[str, Any]) -> Round:
    """Either algorithm; rlox seeds only its envs, so torch and NumPy are seeded here."""
    settings = dict(request["settings"])
    steps = settings.pop("n_timesteps")
    torch.manual_seed(request["seed"])
    np.random.seed(request["seed"])
    training = Training(link)
    is_ppo = request["do"] == "solve-ppo"
    look = Look(training, settings["n_envs"] * settings["n_steps"] if is_ppo else 1)
    algorithm = (PPO if is_ppo else DQN)(
        "CartPole-v1", seed=request["seed"], callbacks=[look], **settings
    )

    def run() -> dict[str, Any]:
        training.start()
        algorithm.train(total_timesteps=steps)
        return {"steps": look.steps}

    return run


if __name__ == "__main__":
    serve(["rlox", "torch", "gymnasium", "numpy"], {"solve-dqn": solve, "solve-ppo": solve})
