"""The measures of the learner: their contestants, settings and goals."""

from dataclasses import dataclass, field
from typing import Any

from bench.contestants import Contestant

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Goal:
    """How many times better than a peer we aim to be, in the row of that name."""

    row: str
    peer: str
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One result file: contestants that do the same work, and the rows that are compared."""

    name: str
    title: str
    unit: str
    more_is_better: bool
    cores: int
    contestants: tuple[Contestant, ...]
    goals: tuple[Goal, ...]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Requests to contestants, by prefix of their row names; empty if they solve a game."""
    quick: dict[str, Any] = field(default_factory=dict)
    """Fields of the requests that a quick run replaces."""
    notes: tuple[str, ...] = ()

    @property
    def is_solving(self) -> bool:
        return not self.parts


# --- Settings: RL Zoo's for CartPole-v1, in each library's own names ------------------------------

_ZOO_DQN = {
    "n_timesteps": 50_000,
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
_ROW_64: dict[str, Any] = {"policy_kwargs": {"net_arch": [64, 64]}}
_RLOX_DQN = {
    "n_timesteps": 50_000,
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "gamma": 0.99,
    "target_update_freq": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "hidden": 256,
}
_ZOO_PPO = {
    "n_timesteps": 100_000,
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": "lin_0.001",
    "clip_range": "lin_0.2",
}
_RLOX_PPO = {
    "n_timesteps": 100_000,
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "anneal_lr": True,
    "clip_eps": 0.2,
}
_RLLIB_PPO = {
    "n_timesteps": 300_000,
    "env_runners": {"num_env_runners": 2, "num_envs_per_env_runner": 8},
    "training": {"lr": 3e-4, "num_epochs": 6, "vf_loss_coeff": 0.01},
    "model": {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
}


def _ours(name: str = OURS, **settings: Any) -> Contestant:
    return Contestant(name=name, module="bench.ours", settings=settings)


def _peer(name: str, script: str, environment: str = "", **rest: Any) -> Contestant:
    return Contestant(
        name=name, module=f"bench.against.{script}", environment=environment or script, **rest
    )


TRAINING = "training"
WHOLE = "with import, set-up and compilation"
_LOOKS = (
    "every 2,560 env steps one NumPy evaluator evaluates the weights (100 greedy episodes, then a "
    "second hundred); that time is in no figure, and no process reuses compiled programs of an "
    "earlier one"
)
_REPLAY: dict[str, Any] = {
    "alpha": 0.6,
    "beta": 0.4,
    "columns": ["obs", "next_obs", "reward", "weights"],
}
_VECTOR = "1 M rows of 4 floats"
_FRAMES = "100 k rows of 84x84 frames"

MEASURES = {
    measure.name: measure
    for measure in (
        Measure(
            name="solve-dqn",
            title="CartPole-v1 solved, DQN",
            unit="s",
            more_is_better=False,
            cores=2,
            contestants=(
                _ours(),
                _peer("SB3 DQN, 256-256", "sb3", settings=_ZOO_DQN, tries_threads=True),
                _peer("SB3 DQN, 64-64", "sb3", settings=_ZOO_DQN | _ROW_64, tries_threads=True),
                _peer("SBX DQN, 256-256", "sbx", settings=_ZOO_DQN),
                _peer("SBX DQN, 64-64", "sbx", settings=_ZOO_DQN | _ROW_64),
                _peer("rlox DQN, 256-256", "rlox", settings=_RLOX_DQN, tries_threads=True),
                _peer(
                    "rlox DQN, 64-64",
                    "rlox",
                    settings=_RLOX_DQN | {"hidden": 64},
                    tries_threads=True,
                ),
            ),
            goals=(
                Goal(TRAINING, "SB3 DQN, 256-256", 10),
                Goal(TRAINING, "SB3 DQN, 64-64", 5),
                *(
                    Goal(TRAINING, f"{peer} DQN, {net}", 2)
                    for peer in ("SBX", "rlox")
                    for net in ("256-256", "64-64")
                ),
            ),
            notes=(
                _LOOKS,
                (
                    "the target interval counts env steps: with train_freq 256 the target moves "
                    "once per 256"
                ),
            ),
        ),
        Measure(
            name="solve-ppo",
            title="CartPole-v1 solved, PPO",
            unit="s",
            more_is_better=False,
            cores=2,
            contestants=(
                _ours(),
                _peer("SB3 PPO", "sb3", settings=_ZOO_PPO, tries_threads=True),
                _peer("SBX PPO", "sbx", settings=_ZOO_PPO),
                _peer("rlox PPO", "rlox", settings=_RLOX_PPO, tries_threads=True),
                _peer("RLlib PPO", "rllib", settings=_RLLIB_PPO),
            ),
            goals=(
                Goal(TRAINING, "SB3 PPO", 5),
                Goal(TRAINING, "RLlib PPO", 10),
                Goal(TRAINING, "SBX PPO", 2),
                Goal(TRAINING, "rlox PPO", 2),
            ),
            notes=(
                _LOOKS,
                (
                    "RLlib is evaluated after each iteration of 4,000 steps, "
                    "the finest step it offers"
                ),
                "rlox anneals the learning rate and has no schedule for the clip range",
            ),
        ),
        Measure(
            name="collect",
            title="Acting, 64 CartPole envs, policy 64-64",
            unit="steps/s",
            more_is_better=True,
            cores=1,
            parts={"64 envs": {"envs": 64, "steps": 256}},
            quick={"steps": 32},
            contestants=(
                _ours(),
                _ours("ours, Gymnasium's envs", builtin=False),
                _peer("SB3 DummyVecEnv + predict", "sb3"),
                _peer("Gymnasium vector + torch", "torch_policy", "sb3"),
                _peer("RLlib SingleAgentEnvRunner", "rllib"),
            ),
            goals=(Goal("64 envs: collect", "SB3 DummyVecEnv + predict", 10),),
            notes=(
                (
                    "ours builds chunks that are ready to be stored; "
                    "the peers' loops keep only the observation"
                ),
            ),
        ),
        Measure(
            name="replay",
            title="Prioritised replay: insert 512, sample 512, update 512",
            unit="µs",
            more_is_better=False,
            cores=1,
            quick={"capacity": 8_192, "cycles": 10},
            parts={
                _VECTOR: _REPLAY | {"payload": "vector", "capacity": 1_000_000, "cycles": 200},
                _FRAMES: _REPLAY | {"payload": "frames", "capacity": 100_000, "cycles": 40},
            },
            contestants=(_ours(), _peer("cpprb", "cpprb"), _peer("torchrl", "torchrl")),
            goals=(
                Goal(f"{_VECTOR}: cycle", "cpprb", 5),
                Goal(f"{_VECTOR}: cycle", "torchrl", 10),
                Goal(f"{_VECTOR}: sample", "cpprb", 15),
            ),
            notes=("ours and cpprb (by next_of) store one copy of each frame, torchrl two",),
        ),
        Measure(
            name="inference",
            title="One decision for one observation",
            unit="µs",
            more_is_better=False,
            cores=1,
            parts={"batch 1": {"calls": 20_000}},
            quick={"calls": 500},
            contestants=(
                _ours(),
                _ours("ours, decide", call="decide"),
                _peer("torch eager", "torch_policy", "sb3"),
                _peer("ONNX Runtime", "onnx_policy", "onnx"),
            ),
            goals=(
                Goal("batch 1: 64-64 p50", "torch eager", 5),
                Goal("batch 1: 256-256 p50", "torch eager", 5),
                Goal("batch 1: 64-64 p50", "ONNX Runtime", 1),
                Goal("batch 1: 256-256 p50", "ONNX Runtime", 1),
            ),
        ),
    )
}
