# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""Optuna and Ray Tune with Stable-Baselines3: searches of experiments E1 and E2, on two processes.

The trials are those of bench/tune.py, but for the loss: SB3's DQN has Huber's. A search has a fixed
number of trials (E1), or a fixed time, after which its winner is trained again (E2).
"""

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.against.link import Link, Round, serve

PROCESSES = 2
STEPS_LIMIT = 200
EVALUATION_EPISODES = 20
TRIAL_SEEDS = 100_000
"""Of a study at most: trials of different studies share no seed."""
HELD_OUT = 1_000_000_000
"""Added to seeds: no search uses those of the trainings of its winner."""


class EndedTrial(NamedTuple):
    """A trial that was trained to its end."""

    end_s: float
    """Since 1970."""
    value: float
    values: dict[str, Any]


Search = Callable[[dict[str, Any]], list[EndedTrial]]


def train_and_evaluate(
    values: dict[str, Any], *, iterations: int, seed: int, episodes: int = EVALUATION_EPISODES
) -> float:
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
    mean, _ = evaluate_policy(model, env(), n_eval_episodes=episodes)
    return float(mean)


def rounds_of(search: Search, request: dict[str, Any]) -> Round:
    """Rounds of E2 if the request limits the time, and of E1 otherwise."""

    def search_all_trials() -> dict[str, Any]:
        began_s = time.perf_counter()
        ended = search(request)
        wall_s = time.perf_counter() - began_s
        return {"wall_s": wall_s, "returns": [trial.value for trial in ended]}

    def search_in_time() -> dict[str, Any]:
        ended = [trial for trial in search(request) if trial.end_s <= deadline_s(request)]
        winner = max(ended, key=lambda trial: trial.value, default=None)
        return {
            "ended": [(trial.end_s - request["began_s"], trial.value) for trial in ended],
            "scores": [] if winner is None else train_again(winner.values, request),
        }

    return search_in_time if "seconds" in request else search_all_trials


def deadline_s(request: dict[str, Any]) -> float:
    """When the search ends at the latest, in seconds since 1970."""
    return float(request["began_s"] + request["seconds"]) if "seconds" in request else math.inf


def train_again(values: dict[str, Any], request: dict[str, Any]) -> list[float]:
    """The mean return of each policy that is trained with these settings and held-out seeds."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        runs = [
            pool.apply_async(
                train_and_evaluate,
                (values,),
                {
                    "iterations": request["iterations"],
                    "seed": HELD_OUT + request["seed"] * request["seeds"] + number,
                    "episodes": request["episodes"],
                },
            )
            for number in range(request["seeds"])
        ]
        return [run.get() for run in runs]


# --- Optuna: processes that share a study in a journal --------------------------------------------


def join_optuna_study(path: str, request: dict[str, Any], number: int) -> None:
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
        sampler=samplers[request["sampler"]](seed=request.get("seed", 0) * PROCESSES + number),
    )

    def objective(trial: Any) -> float:
        values = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "discount": trial.suggest_float("discount", 0.95, 0.995),
            "hidden": trial.suggest_categorical("hidden", request["hidden"]),
            "batch": trial.suggest_categorical("batch", request["batches"]),
        }
        seed = request.get("seed", 0) * TRIAL_SEEDS + trial.number
        return train_and_evaluate(values, iterations=request["iterations"], seed=seed)

    study.optimize(objective, n_trials=request["trials"] // PROCESSES)


def _storage(path: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(path))


def search_with_optuna(request: dict[str, Any]) -> list[EndedTrial]:
    import optuna

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "journal.log")
        study = optuna.create_study(study_name="E1", storage=_storage(path), direction="maximize")
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=join_optuna_study, args=(path, request, number))
            for number in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            left_s = deadline_s(request) - time.time()
            process.join(max(0.0, left_s) if math.isfinite(left_s) else None)
        for process in processes:
            process.terminate()
            process.join()
        return [
            EndedTrial(trial.datetime_complete.timestamp(), trial.value, trial.params)
            for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
            if trial.datetime_complete is not None and trial.value is not None
        ]


def with_optuna(_: Link, request: dict[str, Any]) -> Round:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return rounds_of(search_with_optuna, request)


# --- Ray Tune -------------------------------------------------------------------------------------


def search_with_ray(request: dict[str, Any]) -> list[EndedTrial]:
    import ray
    from ray import tune
    from ray.tune.search.basic_variant import BasicVariantGenerator

    def trial(config: dict[str, Any]) -> None:
        value = train_and_evaluate(config, iterations=request["iterations"], seed=config["seed"])
        tune.report({"reward": value, "end_s": time.time()})

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
        try:
            left_s = deadline_s(request) - time.time()
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
                    search_alg=BasicVariantGenerator(random_state=request.get("seed")),
                    num_samples=request["trials"],
                    metric="reward",
                    mode="max",
                    time_budget_s=max(0.1, left_s) if math.isfinite(left_s) else None,
                ),
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            )
            return [
                EndedTrial(result.metrics["end_s"], result.metrics["reward"], result.config)
                for result in tuner.fit()
                if result.error is None and "reward" in (result.metrics or {})
            ]
        finally:
            ray.shutdown()


def with_ray(_: Link, request: dict[str, Any]) -> Round:
    import ray  # noqa: F401  a missing package is an error before any clock starts

    return rounds_of(search_with_ray, request)


if __name__ == "__main__":
    serve(
        ["optuna", "ray", "stable-baselines3", "torch"],
        {"optuna": with_optuna, "ray": with_ray},
    )
