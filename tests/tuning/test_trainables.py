"""What a trial runs: our algorithms by RLiable's settings, the user's classes, and tables."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.cli.root import run
from understudy.core.errors import ConfigError, LearningFailed
from understudy.training.folder import RunFolder
from understudy.tuning.base_file import custom_class, evaluate_base, train_base
from understudy.tuning.rows import read_rows
from understudy.tuning.study_file import read_study
from understudy.tuning.trainables import AlgorithmTrainable, CustomTrainable
from understudy.tuning.trial import Trial, Values

SEED = Path(__file__).parent / "seed"
SMALL = {
    "train_iterations": 96, "batch_size": 32, "learning_rate": 2e-3, "qnet_fc_hidden_size": 20,
    "eval_interval": 40, "num_eval_episodes": 7,
}  # fmt: skip


def never(step: int, value: float) -> bool:
    return False


def seed_config(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "class": "DQN",
        "environment": "CartPole-v1",
        "game": "CartPole-v1",
        "algorithm": "dqn",
        "preset": "rliable",
        "is_rliable": True,
        "mdl_file": "weights/dqn.model",
        "settings": {**SMALL, **settings},
        "folder": str(folder),
        "rollout_workers": 0,
    }


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


# --- Ours -----------------------------------------------------------------------------------------


def test_a_trial_of_rliables_dqn_has_one_update_per_iteration_and_reports_evaluations(tmp_path):
    reports = []

    def report(step: int, value: float) -> bool:
        reports.append((step, value))
        return False

    trainable = AlgorithmTrainable(seed_config(tmp_path))
    values = {"collect_steps_per_iteration": 2, "num_test_episodes": 11}
    metrics = trainable.run(Trial(trial_no=7, values=values, seed=3), report)
    assert set(metrics) == set(trainable.metrics)
    assert metrics["updates"] == 96
    assert metrics["env_steps"] == 32 + 2 * 96
    run = RunFolder(tmp_path / "trials/0007")
    result = run.result()
    assert result is not None
    assert (result["episodes"], result["seed"]) == (11, 3)
    assert metrics["reward"] == result["return_mean"]
    assert [step for step, _ in reports] == [80, 160, 224]  # every 40 iterations, and at the end
    assert [row["return_mean"] for row in run.curve_rows()] == [value for _, value in reports]
    # A finished trial is not run again, and reports the same.
    again = list(reports)
    reports.clear()
    assert trainable.run(Trial(trial_no=7, values=values, seed=3), report) == metrics
    assert reports == again


def test_a_report_may_stop_a_trial_which_still_has_its_metrics(tmp_path):
    trainable = AlgorithmTrainable(seed_config(tmp_path))
    metrics = trainable.run(Trial(trial_no=0, values={}, seed=0), lambda step, value: True)
    assert metrics["env_steps"] == 40
    assert metrics["reward"] > 0


def test_a_trial_that_was_interrupted_ends_with_the_same_metrics_and_reports(tmp_path):
    def run(folder: Path, interrupt_at: int) -> tuple[list[Any], Mapping[str, float] | None]:
        reports: list[Any] = []

        def report(step: int, value: float) -> bool:
            reports.append((step, value))
            if len(reports) == interrupt_at:
                raise KeyboardInterrupt
            return False

        trainable = AlgorithmTrainable(seed_config(folder))
        try:
            return reports, trainable.run(Trial(trial_no=0, values={}, seed=5), report)
        except KeyboardInterrupt:
            return reports, None

    whole, metrics = run(tmp_path / "whole", 0)
    assert metrics is not None
    folder = tmp_path / "interrupted"
    (folder / "trials/0000").mkdir(parents=True)
    (folder / "trials/0000/.preset.toml.9.tmp").touch()  # killed before it began
    first, none = run(folder, 2)
    assert none is None
    reports, resumed = run(folder, 0)
    assert resumed is not None
    assert first == whole[:2]
    assert reports == whole
    assert untimed(resumed) == untimed(metrics)


def test_rollout_workers_play_and_evaluate_every_episode(tmp_path):
    config = {**seed_config(tmp_path, num_test_episodes=9), "rollout_workers": 2}
    trial = Trial(trial_no=0, values={}, seed=1)
    metrics = AlgorithmTrainable(config).run(trial, never)
    result = RunFolder(tmp_path / "trials/0000").result()
    assert result is not None
    assert result["episodes"] == 9
    assert metrics["updates"] == 96
    # The same actors in one process: the same steps, episodes, and metrics.
    from understudy.training.train import TrainOptions, train

    settings = AlgorithmTrainable(config).settings({})
    alone = train(
        "CartPole-v1", settings=settings, seed=1, until=float("inf"), out=tmp_path / "alone",
        options=TrainOptions(preset="rliable"),
    )  # fmt: skip
    assert alone.result["return_mean"] == metrics["reward"]
    assert alone.result["return_std"] == metrics["return_std"]


def test_envs_of_our_own_settings_are_a_multiple_of_the_rollout_workers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[study]\ngame = "CartPole-v1"\n[space]\nlearning_rate = {}\n')
    study = read_study(path, rollout_workers=3, folder=str(tmp_path))
    settings = AlgorithmTrainable(study.trainable.config).settings({"learning_rate": 1e-3})
    assert settings == {"learning_rate": 1e-3, "actors": 3, "envs": 9}
    study = read_study(path)
    assert AlgorithmTrainable(study.trainable.config).settings({"envs": 4}) == {"envs": 4}


# --- The user's classes and tables ----------------------------------------------------------------


def custom(folder: Path, name: str, environment: str, **config: Any) -> CustomTrainable:
    return CustomTrainable(
        {
            "class": name,
            "path": f"tests.tuning.classes:{name}" if name != "CountModel" else COUNT_MODEL,
            "environment": environment,
            "mdl_file": "weights/a.model",
            "settings": {},
            "folder": str(folder),
            "rollout_workers": 0,
            "metric": "reward",
            **config,
        }
    )


COUNT_MODEL = "understudy.tuning.models:CountModel"


def trial_of(values: Values) -> Trial:
    return Trial(trial_no=2, values=values, seed=11)


def test_the_count_example_finds_the_increment_of_the_shipped_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(SEED)
    study = read_study("rliable/config/optim_count.json", folder=str(tmp_path))
    trainable = CustomTrainable(study.trainable.config)
    errors = {
        increment: trainable.run(trial_of({"increment": increment}), never)["reward"]
        for increment in (1, 2, 4, 6)
    }
    assert errors[2] == 0
    assert errors[1] > 0
    saved = json.loads((tmp_path / "trials/0002/count.model").read_text())
    assert saved == {"count": 20}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_env_class_evaluates_all_episodes_at_each_level(tmp_path, workers):
    settings = {"num_test_episodes": 7}
    trainable = custom(
        tmp_path, "PushLeft", "CartPole-v1", settings=settings, rollout_workers=workers
    )
    metrics = trainable.run(trial_of({"bonus": 100}), never)
    lines = (tmp_path / "trials/0002/played.txt").read_text().split()
    counts = list(map(int, lines[::2]))
    assert sorted(counts) == {0: [7], 2: [3, 4]}[workers]
    assert metrics["reward"] == pytest.approx(100 + sum(map(int, lines[1::2])) / 7)
    # The same trial plays the same episodes.
    assert trainable.run(trial_of({"bonus": 100}), never) == metrics


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ("mapping", {"reward": 2.0, "size": 3.5}),
        ("pair", {"reward": 4.0}),
        ("rows", {"reward": 3.0}),
    ],
)
def test_evaluate_may_return_a_number_a_pair_or_numbers_by_name(tmp_path, returns, expected):
    rows = tmp_path / "rows.txt"
    rows.write_text("a\n\nb\nc\n")
    trainable = custom(tmp_path, "Answers", str(rows))
    assert trainable.run(trial_of({"returns": returns}), never) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"raise_in": "__init__"},
            "Answers.__init__ raised ValueError: bad settings \\(classes.py",
        ),
        ({"raise_in": "train"}, "Answers.train raised KeyError: 'x' \\(classes.py, line \\d+\\)"),
        ({"returns": "exit"}, "Answers.evaluate raised SystemExit: 3"),
        ({"returns": "nan"}, "Answers.evaluate returned nan as reward; return finite numbers"),
        ({"returns": "other"}, "Answers.evaluate returned loss, but the study's metric is reward"),
        ({"returns": "text"}, "Answers.evaluate returned 'good' as reward; return a number"),
        ({}, "Answers.evaluate returned none as reward; return a number"),
    ],
)
def test_an_error_of_the_users_class_names_class_and_method(tmp_path, values, message):
    rows = tmp_path / "rows.txt"
    rows.write_text("a\n")
    with pytest.raises(LearningFailed, match=message) as caught:
        custom(tmp_path, "Answers", str(rows)).run(trial_of(values), never)
    assert "\n" not in str(caught.value)


def test_an_error_in_a_process_of_an_evaluation_is_the_trials(tmp_path, monkeypatch):
    trainable = custom(
        tmp_path, "PushLeft", "CartPole-v1", settings={"num_eval_episodes": 4}, rollout_workers=2
    )
    monkeypatch.setattr("tests.tuning.classes.PushLeft.save", lambda self: None)
    with pytest.raises(LearningFailed, match=r"PushLeft.load_model raised FileNotFoundError"):
        trainable.run(trial_of({"bonus": 1}), never)


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.json", '{"x": 1}\n\n{"x": 2}\n', [{"x": 1}, {"x": 2}]),
        ("a.json", ' [{"x": 1}, {"x": 2}]', [{"x": 1}, {"x": 2}]),
        ("a.jsonl", "1\n[2]\n", [1, [2]]),
        ("a.csv", "x,name\n1,one\n2.5,two\n", [{"x": 1, "name": "one"}, {"x": 2.5, "name": "two"}]),
        ("a.txt", "one\ntwo\n", ["one", "two"]),
        ("data", "one\ntwo\n", ["one", "two"]),
    ],
)
def test_rows_are_json_lines_a_json_list_csv_or_lines(tmp_path, name, text, rows):
    path = tmp_path / name
    path.write_text(text)
    assert read_rows(path) == rows


def test_rows_that_are_no_json_are_one_clear_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{x}")
    with pytest.raises(ConfigError, match=r"a.json has neither a JSON list nor one JSON value"):
        read_rows(path)
    with pytest.raises(ConfigError, match=r"none.csv cannot be read"):
        read_rows(tmp_path / "none.csv")


class OneArgument:
    def __init__(self, cfg: Any) -> None: ...

    def train(self, data: Any) -> None: ...

    def evaluate(self, data: Any) -> float:
        return 0.0


def test_a_class_that_cannot_be_created_with_a_context_and_a_config_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be created with \(sc, cfg\)"):
        custom_class(f"{__name__}:OneArgument")


def test_an_algorithm_that_cannot_learn_the_game_is_refused_before_any_trial():
    config = {"game": "Pendulum-v1", "algorithm": "dqn", "preset": None}
    with pytest.raises(ConfigError, match="dqn needs one Discrete action"):
        AlgorithmTrainable(config)


# --- A single training from the base file ---------------------------------------------------------


def test_a_base_file_is_trained_and_evaluated_once(tmp_path, monkeypatch, capsys):
    shutil.copytree(SEED, tmp_path / "seed")
    monkeypatch.chdir(tmp_path / "seed")
    path = Path("config/config_count.json")
    trained = train_base(path)
    assert trained == {"reward": 0.0}
    assert evaluate_base(path) == trained
    Path("rows.jsonl").write_text('{"x": 20}\n{"x": 23}\n')
    assert evaluate_base(path, environment="rows.jsonl") == {"reward": 0.5}
    assert run(["tune", "train", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == trained
    assert run(["tune", "evaluate", str(path), "--environment", "rows.jsonl"]) == 0
    assert capsys.readouterr().out == "reward  0.5\n"

    base = json.loads(Path("config/config_dqn.json").read_text())
    path = Path("config/small.json")
    path.write_text(json.dumps({**base, "hp_params": SMALL, "environment": "CartPole-V1"}))
    trained = train_base(path, seed=2)
    assert trained["updates"] == 96
    assert RunFolder(Path("weights/dqn.model")).exists
    evaluated = evaluate_base(path)
    assert evaluated["episodes"] == 7
    assert np.isfinite(evaluated["reward"])


def test_a_model_that_was_not_trained_is_named(tmp_path, monkeypatch):
    shutil.copytree(SEED, tmp_path / "seed")
    monkeypatch.chdir(tmp_path / "seed")
    with pytest.raises(ConfigError, match=r"the folder weights/dqn.model does not exist"):
        evaluate_base("config/config_dqn.json")
    with pytest.raises(LearningFailed, match=r"CountModel.load_model raised FileNotFoundError"):
        evaluate_base("config/config_count.json")
