# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""Optuna and Ray Tune with Stable-Baselines3: a random search of experiment E1, on two processes.

The trials are those of bench/tune.py, but for the loss: SB3's DQN has Huber's.
"""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.against.link import Link, Round, serve

PROCESSES = 2
STEPS_LIMIT = 200
EVALUATION_EPISODES = 20


def train_and_evaluate(values: dict[str, Any], *, iterations: int, seed: int) -> float:
    """The mean return of the last policy of one trial."""
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)

    def env() -> Any:
        return Monitor(gymnasium.make("CartPole-v1", max_episode_steps=STEPS_LIMIT))

    model = stable_baselines3.DQN(
        "MlpPolicy",
        env(),
        learning_rate=values["learning_rate"],
        gamma=values["discount"],
        batch_size=values["batch"],
        policy_kwargs={"net_arch": [values["hidden"]]},
        buffer_size=4_096,
        learning_starts=values["batch"],
        train_freq=1,
        gradient_steps=1,
        target_update_interval=50,
        exploration_initial_eps=1.0,
        exploration_final_eps=0.05,
        exploration_fraction=0.2,
        device="cpu",
        seed=seed,
    )
    model.learn(iterations)
    mean, _ = evaluate_policy(model, env(), n_eval_episodes=EVALUATION_EPISODES)
    return float(mean)


# --- Optuna: processes that share a study in a journal --------------------------------------------


def search_with_optuna(path: str, n_trials: int, request: dict[str, Any], seed: int) -> None:
    """A process of the study: its share of the trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers: dict[str, Any] = {
        "random": optuna.samplers.RandomSampler,
        "tpe": optuna.samplers.TPESampler,
    }
    study = optuna.load_study(
        study_name="E1",
        storage=_storage(path),
        sampler=samplers[request["sampler"]](seed=seed),
    )

    def objective(trial: Any) -> float:
        values = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "discount": trial.suggest_float("discount", 0.95, 0.995),
            "hidden": trial.suggest_categorical("hidden", request["hidden"]),
            "batch": trial.suggest_categorical("batch", request["batches"]),
        }
        return train_and_evaluate(values, iterations=request["iterations"], seed=trial.number)

    study.optimize(objective, n_trials=n_trials)


def _storage(path: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(path))


def with_optuna(_: Link, request: dict[str, Any]) -> Round:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "journal.log")
            began_s = time.perf_counter()
            study = optuna.create_study(
                study_name="E1", storage=_storage(path), direction="maximize"
            )
            context = multiprocessing.get_context("spawn")
            processes = [
                context.Process(
                    target=search_with_optuna,
                    args=(path, request["trials"] // PROCESSES, request, number),
                )
                for number in range(PROCESSES)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            wall_s = time.perf_counter() - began_s
            values = [trial.value for trial in study.trials if trial.value is not None]
        return {"wall_s": wall_s, "returns": values}

    return run


# --- Ray Tune -------------------------------------------------------------------------------------


def with_ray(_: Link, request: dict[str, Any]) -> Round:
    import ray
    from ray import tune

    def trial(config: dict[str, Any]) -> None:
        value = train_and_evaluate(config, iterations=request["iterations"], seed=config["seed"])
        tune.report({"reward": value})

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.perf_counter()
            ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
            try:
                tuner = tune.Tuner(
                    trial,
                    param_space={
                        "learning_rate": tune.loguniform(1e-4, 1e-2),
                        "discount": tune.uniform(0.95, 0.995),
                        "hidden": tune.choice(request["hidden"]),
                        "batch": tune.choice(request["batches"]),
                        "seed": tune.randint(0, 1 << 31),
                    },
                    tune_config=tune.TuneConfig(
                        num_samples=request["trials"], metric="reward", mode="max"
                    ),
                    run_config=tune.RunConfig(storage_path=folder, verbose=0),
                )
                results = tuner.fit()
                wall_s = time.perf_counter() - began_s
                values = [result.metrics["reward"] for result in results if result.error is None]
            finally:
                ray.shutdown()
        return {"wall_s": wall_s, "returns": values}

    return run


if __name__ == "__main__":
    serve(
        ["optuna", "ray", "stable-baselines3", "torch"],
        {"optuna": with_optuna, "ray": with_ray},
    )
