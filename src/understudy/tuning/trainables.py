"""What a trial runs: `understudy.train`, or a class of the user's with `train` and `evaluate`.

Importing this module imports no JAX, Gymnasium or NumPy; only a trial does, if it needs them.
"""

import contextlib
import inspect
import math
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from understudy.core.child_process import ChildProcess, parent_connection, receive, send
from understudy.core.errors import ConfigError, GameFailed, LearningFailed, UnderstudyError
from understudy.core.log import FileLock
from understudy.core.settings import load_object, value_text
from understudy.core.wording import joined, shortened
from understudy.tuning.rows import is_rows_file, read_rows
from understudy.tuning.trial import Trial, Values

OnReport = Callable[[int, float], bool]
LOST_S = 30.0
"""How long a trial waits for the process that ran it before."""

METRICS = ("reward", "return_std", "env_steps", "updates", "train_s", "compile_s", "eval_s")
"""What a trial of ours measures; `reward` is the mean return of its final test."""
LANE_METRICS = METRICS[:4]
"""What a trial in a lane measures, which shares its time with others."""


def trial_folder(config: Mapping[str, Any], trial_no: int) -> Path:
    """Where a trial writes."""
    return Path(config["folder"]) / "trials" / f"{trial_no:04d}"


def model_path(config: Mapping[str, Any], trial_no: int) -> Path:
    """Where a trial's model is: its run's folder, or the `mdl_file` of a custom class."""
    folder = trial_folder(config, trial_no)
    return folder if "game" in config else folder / Path(config["mdl_file"]).name


# --- RLiable's names ------------------------------------------------------------------------------


class RliableSetting(NamedTuple):
    """A setting of RLiable's DQN."""

    kind: type
    default: float | None
    """RLiable's, or ours where RLiable has no such setting; None: there must be a value."""
    ours: str
    """What it sets here."""
    difference: str = ""
    """How the default differs from RLiable's."""


RLIABLE_SETTINGS: Mapping[str, RliableSetting] = {
    "train_iterations": RliableSetting(
        int, None, "steps: so many iterations, after the first batch"
    ),
    "collect_steps_per_iteration": RliableSetting(int, 1, "collect: env steps before each update"),
    "batch_size": RliableSetting(int, 64, "batch, and min_inserts: steps before the first update"),
    "learning_rate": RliableSetting(float, 1e-3, "learning_rate"),
    "qnet_fc_hidden_size": RliableSetting(int, 100, "widths: of one hidden layer"),
    "num_eval_episodes": RliableSetting(
        int, 10, "eval_episodes, and test_episodes unless it is set"
    ),
    "num_test_episodes": RliableSetting(int, 0, "test_episodes"),
    "log_interval": RliableSetting(int, 200, "nothing: every update is in the run's events"),
    "eval_interval": RliableSetting(int, 1_000, "eval_every: iterations between two evaluations"),
    "replay_buffer_max_length": RliableSetting(int, 100_000, "capacity"),
    "gamma": RliableSetting(float, 0.99, "discount", "RLiable has 1.0"),
    "target_period": RliableSetting(int, 50, "target_period", "RLiable has 1"),
    "epsilon": RliableSetting(float, 0.1, "epsilon"),
}
"""RLiable's settings of DQN, and ours. An iteration is `collect_steps_per_iteration` env steps and
one update of `batch_size` transitions; at level 2 each rollout worker plays an iteration at a time.
The rest is the preset rliable."""

DIFFERENCES = (
    "gradients have a norm of at most 10; RLiable's have no limit",
    "the first batch is played by the untrained network with epsilon; RLiable plays it at random",
    "episodes end at the env's own step limit, as a truncation; RLiable tests with 1000 steps",
    "the reward is the best evaluated policy's, on new episodes; RLiable's is the last policy's",
)
"""Between a trial of class DQN and one of RLiable, besides defaults."""


def rliable_settings(values: Values, *, rollout_workers: int = 0) -> dict[str, Any]:
    """Our settings for RLiable's, which may be whole numbers such as 32.0.

    ConfigError if `train_iterations` is missing.
    """
    if "train_iterations" not in values:
        raise ConfigError("train_iterations is missing; give it in hp_params or in the grid")
    named: dict[str, Any] = {name: setting.default for name, setting in RLIABLE_SETTINGS.items()}
    named |= {name: RLIABLE_SETTINGS[name].kind(value) for name, value in values.items()}
    envs = max(1, rollout_workers)
    collect = named["collect_steps_per_iteration"]
    batch = named["batch_size"]
    return {
        "steps": batch + named["train_iterations"] * collect,
        "envs": envs,
        "actors": envs,
        "collect": collect,
        "updates_per_call": envs,
        "samples_per_insert": batch / collect,
        "min_inserts": batch,
        "batch": batch,
        "learning_rate": named["learning_rate"],
        "widths": [named["qnet_fc_hidden_size"]],
        "eval_episodes": named["num_eval_episodes"],
        "test_episodes": named["num_test_episodes"] or named["num_eval_episodes"],
        "eval_every": named["eval_interval"] * collect,
        "capacity": named["replay_buffer_max_length"],
        "discount": named["gamma"],
        "target_period": named["target_period"],
        "epsilon": named["epsilon"],
    }


# --- Algorithms of ours, and of the user's --------------------------------------------------------


class AlgorithmTrainable:
    """A trial is a run of `understudy.train` in a folder of the study.

    A trial that was killed resumes from its run's last checkpoint, and reports what it had reported
    before.
    """

    metrics = METRICS

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is that of a TrainableSpec from a study file.

        ConfigError if the algorithm cannot learn this game, whatever its settings are.
        """
        from understudy.training.env_info import GameChoice, inspect_env
        from understudy.training.train_request import TrainRequest, resolve

        self._config = config
        request = TrainRequest(algorithm=config["algorithm"], preset=config["preset"])
        with old_envs_allowed():
            spec = inspect_env(GameChoice(game=config["game"])).spec
            usual = resolve(request, spec)
        usual.algorithm_type(spec, usual.config)

    def run(self, trial: Trial, report: OnReport) -> Mapping[str, float]:
        """Train in the trial's folder, and report each evaluation: its env steps and mean."""
        return self.run_in(trial_folder(self._config, trial.trial_no), trial, report)

    def run_in(self, folder: Path, trial: Trial, report: OnReport) -> Mapping[str, float]:
        """As `run`, in another folder."""
        # Imported late: a study imports this module, too, and needs no game.
        from understudy.training.events import Evaluation, Event, Started, Stop
        from understudy.training.folder import RunFolder
        from understudy.training.train import TrainOptions, train

        config = self._config
        run_folder = RunFolder(folder)
        if folder.exists():
            # The process of a lost slot may still be ending, perhaps on another machine.
            FileLock(run_folder.lock, what="the trial", timeout_s=LOST_S).close()
        if folder.exists() and not run_folder.exists:
            shutil.rmtree(folder)  # of a trial that was killed before it began
        n_reported = 0
        must_stop = False

        def report_new() -> Any:
            nonlocal n_reported, must_stop
            for row in run_folder.curve_rows()[n_reported:]:
                n_reported += 1
                must_stop = must_stop or report(int(row["env_steps"]), row["return_mean"])
            return Stop if must_stop else None

        def on_event(event: Event) -> Any:
            return report_new() if isinstance(event, Started | Evaluation) else None

        settings = self.settings(trial.values)
        with old_envs_allowed():
            result = train(
                config["game"],
                algorithm=config["algorithm"],
                settings=settings,
                seed=trial.seed,
                until=None if "until" in settings else math.inf,
                out=folder,
                resume=True,
                on_event=on_event,
                options=TrainOptions(
                    preset=config["preset"],
                    engine="process" if config["rollout_workers"] else None,
                ),
            ).result
        report_new()
        if result["return_mean"] is None:
            raise GameFailed(f"the trial has no return: {result['why_no_return']}")
        measured = {"reward": result["return_mean"]} | {name: result[name] for name in METRICS[1:]}
        return {name: float(value) for name, value in measured.items() if value is not None}

    def settings(self, values: Values) -> dict[str, Any]:
        """The settings of a trial's run, by our names."""
        config = self._config
        workers = config["rollout_workers"]
        settings = {**config["settings"], **values}
        if config["is_rliable"]:
            return rliable_settings(settings, rollout_workers=workers)
        if not workers:
            return settings
        from understudy.training.env_info import GameChoice, inspect_env
        from understudy.training.train_request import TrainRequest, resolve

        request = TrainRequest(
            algorithm=config["algorithm"], preset=config["preset"], settings=settings
        )
        with old_envs_allowed():
            run = resolve(request, inspect_env(GameChoice(game=config["game"])).spec)
        envs = getattr(run.config, "envs", run.run.envs)
        return {**settings, "actors": workers, "envs": math.ceil(envs / workers) * workers}


@contextlib.contextmanager
def old_envs_allowed() -> Iterator[None]:
    """No warnings about envs that have a newer version, such as CartPole-v0; a study has a note."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is out of date.*")
        yield


# --- Classes of the user's ------------------------------------------------------------------------


class CustomTrainable:
    """A trial creates an object of a class, trains it, saves it and evaluates it.

    The class is created with `(sc, cfg)`. sc is None; with the study's setting `rdd`, it is a
    SparkContext, and rows are an RDD. cfg has the keys of RLiable's base file, with the trial's
    settings in `hp_params`, and the trial's `seed`. `train(data)`, or
    `train(data, test_data)`, and `evaluate(data)` get a Gymnasium env or rows; `evaluate` returns a
    number, or (predictions, number), or numbers by name. `save()` is called if there is one.
    If `evaluate` has a second parameter, it gets the number of episodes; at level 2, several
    processes then `load_model()` and evaluate a part of the episodes each.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is that of a TrainableSpec from a study file."""
        self._config = config
        self.metrics: Sequence[str] = (config["metric"],)
        self._opened = contextlib.ExitStack()
        """Holds a Spark, which ends with this process."""
        self._sc: Any = None
        if config.get("rdd"):
            from understudy.tuning.spark_slots import spark_context

            os.environ.pop("PYSPARK_GATEWAY_PORT", None)  # the JVM of the study's own process
            log = Path(config["folder"]) / "slots" / f"spark-{os.getpid()}"
            self._sc = self._opened.enter_context(spark_context(log, address="", num_slots=1))

    def run(self, trial: Trial, report: OnReport) -> Mapping[str, float]:
        """Train and evaluate in the trial's folder; nothing is reported in between."""
        return self.run_in(model_path(self._config, trial.trial_no), trial)

    def run_in(self, mdl_file: Path, trial: Trial) -> Mapping[str, float]:
        """As `run`, with another place for the model."""
        mdl_file.parent.mkdir(parents=True, exist_ok=True)
        config = self._config
        model = self._create(mdl_file, trial)
        with contextlib.ExitStack() as opened:
            environment = config["environment"]
            data, test_data = [
                opened.enter_context(
                    _data(environment, seed=partial(_env_seed, trial, number), sc=self._sc)
                )
                for number in range(2)
            ]
            both = (data, test_data) if _accepts(model.train, 2) else (data,)
            _call(model, "train", *both)
            if hasattr(model, "save"):
                _call(model, "save")
            episodes = self._episodes(model, trial)
            workers = min(config["rollout_workers"], episodes)
            if workers > 1 and hasattr(model, "load_model"):
                return self._evaluate_in_parts(mdl_file, trial, episodes, workers)
            return self._evaluated(model, test_data, episodes)

    def evaluate(
        self, mdl_file: Path, trial: Trial, *, episodes: int | None = None
    ) -> Mapping[str, float]:
        """The metrics of a saved model; None: as many episodes as its settings say."""
        model = self._create(mdl_file, trial)
        _call(model, "load_model")
        environment = self._config["environment"]
        with _data(environment, seed=lambda: trial.seed, sc=self._sc) as data:
            return self._evaluated(model, data, episodes or self._episodes(model, trial))

    def _create(self, mdl_file: Path, trial: Trial) -> Any:
        config = self._config
        kind = load_object(config["path"], what="class")
        cfg = {
            "class": config["class"],
            "environment": config["environment"],
            "mdl_file": str(mdl_file),
            "hp_params": {**config["settings"], **trial.values},
            "seed": trial.seed,
        }
        with _named(f"{config['class']}.__init__"):
            return kind(self._sc, cfg)

    def _episodes(self, model: Any, trial: Trial) -> int:
        """How many episodes `evaluate` is asked for; 0 if it has no parameter for it."""
        values = {**self._config["settings"], **trial.values}
        named = values.get("num_test_episodes") or values.get("num_eval_episodes") or 0
        is_asked = not is_rows_file(self._config["environment"]) and _accepts(model.evaluate, 2)
        return int(named) if is_asked else 0

    def _evaluated(self, model: Any, data: Any, episodes: int) -> dict[str, float]:
        answer = _call(model, "evaluate", *((data, episodes) if episodes else (data,)))
        metric = self._config["metric"]
        where = f"{type(model).__name__}.evaluate"
        if isinstance(answer, tuple | list) and len(answer) == 2:
            answer = answer[1]
        answers = dict(answer) if isinstance(answer, Mapping) else {metric: answer}
        numbers = {}
        for name, value in answers.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError):
                what = value_text(_short(value))
                raise LearningFailed(
                    f"{where} returned {what} as {name}; return a number, or (predictions, "
                    "number), or numbers by name"
                ) from None
        if metric not in numbers:
            raise LearningFailed(
                f"{where} returned {joined(numbers)}, but the study's metric is {metric}; return "
                f"{metric}, or name another metric in the study"
            )
        if bad := [name for name, number in numbers.items() if not math.isfinite(number)]:
            raise LearningFailed(
                f"{where} returned {numbers[bad[0]]} as {bad[0]}; return finite numbers"
            )
        return numbers

    def _evaluate_in_parts(
        self, mdl_file: Path, trial: Trial, episodes: int, workers: int
    ) -> dict[str, float]:
        """The means over all episodes, each part of which another process plays."""
        import numpy as np

        seeds = np.random.SeedSequence(trial.seed).spawn(workers)
        counts = [len(range(index, episodes, workers)) for index in range(workers)]
        requests = [
            {
                "config": dict(self._config),
                "mdl_file": str(mdl_file),
                "trial_no": trial.trial_no,
                "values": dict(trial.values),
                "seed": int(seed.generate_state(1)[0]),
                "episodes": count,
            }
            for seed, count in zip(seeds, counts, strict=True)
        ]
        with contextlib.ExitStack() as opened:
            parts = []
            for request in requests:
                part = ChildProcess(__name__, lost=_PartLost)
                opened.callback(part.kill)
                parts.append(part)
                with contextlib.suppress(_PartLost):  # `receive` raises it again
                    part.send(request)
            try:
                answers = [part.receive()[0] for part in parts]
            except _PartLost as error:
                raise LearningFailed(
                    f"a process that evaluated {self._config['class']}: {error}; its message is "
                    "above this one; evaluate without rollout workers to see more"
                ) from None
        for answer in answers:
            if "error" in answer:
                raise LearningFailed(answer["error"])
        numbers = [answer["numbers"] for answer in answers]
        return {
            name: sum(part[name] * count for part, count in zip(numbers, counts, strict=True))
            / episodes
            for name in set.intersection(*map(set, numbers))
        }


@contextlib.contextmanager
def _data(environment: str, *, seed: Callable[[], int], sc: Any) -> Iterator[Any]:
    """A Gymnasium env whose episodes follow from the seed, or rows: an RDD if there is an `sc`."""
    if is_rows_file(environment):
        rows = read_rows(Path(environment))
        yield rows if sc is None else sc.parallelize(rows)
        return
    from understudy.act.vector import make_env

    with old_envs_allowed():
        env = make_env(environment)
    with contextlib.closing(env):
        env.reset(seed=seed())
        yield env


def _env_seed(trial: Trial, number: int) -> int:
    """A seed of the trial; rows need none, and importing NumPy takes a tenth of a second."""
    import numpy as np

    return int(np.random.SeedSequence(trial.seed).generate_state(2)[number])


def _accepts(method: Any, count: int) -> bool:
    """Whether a method can be called with so many arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _call(model: Any, method: str, *arguments: Any) -> Any:
    name = f"{type(model).__name__}.{method}"
    if not callable(getattr(model, method, None)):
        raise ConfigError(f"class {type(model).__name__} has no method {method}; define {name}")
    with _named(name):
        return getattr(model, method)(*arguments)


@contextlib.contextmanager
def _named(method: str) -> Iterator[None]:
    """Names the method of the user's class in its errors."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise LearningFailed(
            f"{method} raised {shortened(what, 300)} ({Path(last.filename).name}, line "
            f"{last.lineno}); correct it in your class"
        ) from error


def _short(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


# --- A part of an evaluation, in a process of its own ---------------------------------------------


class _PartLost(Exception):
    """The process of a part ended; the message states how."""


def main() -> None:
    """Evaluate the part that the process of the trial requests."""
    connection = parent_connection(close_s=0.0)
    request, _ = receive(connection)
    trial = Trial(trial_no=request["trial_no"], values=request["values"], seed=request["seed"])
    answer: dict[str, Any]
    try:
        trainable = CustomTrainable(request["config"])
        numbers = trainable.evaluate(Path(request["mdl_file"]), trial, episodes=request["episodes"])
        answer = {"numbers": dict(numbers)}
    except UnderstudyError as error:
        answer = {"error": str(error)}
    send(connection, answer)


if __name__ == "__main__":
    main()
