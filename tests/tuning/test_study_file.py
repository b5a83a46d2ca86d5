"""read_study: RLiable's files unchanged, in every mode; TOML; and one clear line for bad files."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.training.preset import read_preset
from understudy.tuning.base_file import ALGORITHM, CUSTOM, read_base
from understudy.tuning.space import Choice, Interval
from understudy.tuning.study_config import Constraint, study_from_json
from understudy.tuning.study_file import read_study, rliable_results, with_settings
from understudy.tuning.trainables import RLIABLE_SETTINGS, rliable_settings
from understudy.tuning.trial import Metric, Trial, TrialResult

SEED = Path(__file__).parent / "seed"
README = Path("optim/config/optim_dqn.json")
DQN = Path("rliable/config/optim_dqn.json")
COUNT = Path("rliable/config/optim_count.json")


@pytest.fixture(autouse=True)
def _in_the_original_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SEED)


# --- RLiable's files ------------------------------------------------------------------------------


def test_the_readmes_file_loads_unchanged():
    study = read_study(README)
    assert study.name == "RandomOptimDQN"
    assert study.max_trials == 3
    assert study.metric == Metric(name="reward", criteria="max")
    assert (study.convergence.threshold, study.convergence.patience) == (0.01, 10)
    assert dict(study.space.dimensions) == {
        "train_iterations": Interval(low=1000, high=4000, is_integer=True),
        "collect_steps_per_iteration": Choice([1]),
        "batch_size": Choice([32, 64]),
        "learning_rate": Interval(low=0.001, high=0.005),
        "qnet_fc_hidden_size": Choice([20, 100, 400]),
        "num_eval_episodes": Choice([200]),
    }
    config = study.trainable.config
    assert study.trainable.path == ALGORITHM
    assert (config["game"], config["algorithm"], config["preset"]) == (
        "CartPole-v0", "dqn", "rliable",
    )  # fmt: skip
    assert config["settings"]["learning_rate"] == 0.001  # of the base file, below the grid's
    assert config["folder"] == "weights/RandomOptimDQN"


@pytest.mark.parametrize("path", [README, DQN, COUNT])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_file_runs_in_each_mode_with_its_number_of_workers(path, level):
    workers = json.loads(path.read_text())["num_workers"]
    study = read_study(path, level=level)
    slots = study.slots
    assert slots.slots == (workers if level == 1 else 1)
    assert slots.rollout_workers == (workers if level == 2 else 0)
    assert study.trainable.config["rollout_workers"] == slots.rollout_workers
    assert study.convergence.legacy_batch == (workers if level else 1)
    assert study.max_trials == json.loads(path.read_text())["max_iters"]


def test_the_count_example_uses_the_shipped_rows_or_those_of_the_user(tmp_path, monkeypatch):
    study = read_study(COUNT)
    assert study.trainable.path == CUSTOM
    rows = Path(study.trainable.config["environment"])
    assert json.loads(rows.read_text().splitlines()[0]) == {"x": 20}
    assert any("CountModel uses those of understudy" in note for note in study.notes)
    shutil.copytree(SEED, tmp_path / "work/project/seed")
    monkeypatch.chdir(tmp_path / "work/project/seed")
    # Relative to the working folder, or to that of the base file, which wins.
    for folder in ("work", "work/project"):
        place = tmp_path / folder / "data/project/count.json"
        place.parent.mkdir(parents=True)
        shutil.copy(rows, place)
        assert read_study(COUNT).trainable.config["environment"] == str(place)
        assert read_study(COUNT).notes == []


def test_the_base_file_is_relative_to_the_grid_file_then_to_the_working_folder(tmp_path):
    grid = json.loads(README.read_text())
    base = json.loads(Path("config/config_dqn.json").read_text())
    base["hp_params"]["gamma"] = 0.9
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config_dqn.json").write_text(json.dumps(base))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(grid))
    assert read_study(path).trainable.config["settings"]["gamma"] == 0.9
    assert "gamma" not in read_study(README).trainable.config["settings"]


@pytest.mark.parametrize(
    ("named", "used", "hint"),
    [
        ("CartPole-V1", "CartPole-v1", "there is no environment CartPole-V1; CartPole-v1 is used"),
        ("cartpole-v9", "CartPole-v1", "there is no environment cartpole-v9; CartPole-v1 is used"),
        ("CartPole-v0", "CartPole-v0", "an old version of CartPole-v1; it is used as is"),
        ("CartPole-v1", "CartPole-v1", ""),
    ],
)
def test_an_environment_may_differ_in_case_and_version_with_a_hint(tmp_path, named, used, hint):
    base = json.loads(Path("config/config_dqn.json").read_text())
    path = tmp_path / "base.json"
    path.write_text(json.dumps({**base, "environment": named, "comment": "ours"}))
    read = read_base(path)
    assert read.trainable.config["game"] == used
    hints = [note for note in read.notes if "comment" not in note]
    assert len(read.notes) - len(hints) == 1
    assert (hint in hints[0]) if hint else not hints


def test_notes_say_how_trials_differ_from_rliables_unless_the_file_sets_it(tmp_path):
    notes = "\n".join(read_study(README).notes)
    assert "gamma is 0.99 by default; RLiable has 1.0" in notes
    assert "target_period is 50" in notes
    assert "gradients have a norm of at most 10" in notes
    shutil.copytree(SEED, tmp_path / "seed")
    path = tmp_path / "seed" / README
    grid = json.loads(path.read_text())
    path.write_text(json.dumps({**grid, "grid": {**grid["grid"], "gamma": [1.0]}}))
    assert "gamma" not in "\n".join(read_study(path).notes)


def test_a_study_survives_its_journal():
    for path in (README, COUNT):
        study = read_study(path, level=2, lag=3, rule="asha")
        assert study_from_json(json.loads(json.dumps(study.to_json()))) == study


def test_results_are_written_in_rliables_format():
    study = read_study(README)
    values = {"train_iterations": 1500, "batch_size": 32}
    trials = [
        (
            Trial(trial_no=0, values=values, seed=1),
            TrialResult(trial_no=0, state="done", metrics={"reward": 70.5}),
        ),
        (
            Trial(trial_no=1, values=values, seed=2),
            TrialResult(trial_no=1, state="failed", error="no memory"),
        ),
    ]
    results = json.loads(json.dumps(rliable_results(study, trials)))
    assert list(results) == ["0", "1"]
    assert results["0"] == {
        "class": "DQN",
        "environment": "CartPole-v0",
        "mdl_file": "weights/RandomOptimDQN/trials/0000",
        "hp_params": {
            "train_iterations": 1500,
            "collect_steps_per_iteration": 1,
            "batch_size": 32,
            "learning_rate": 0.001,
            "qnet_fc_hidden_size": 100,
            "num_eval_episodes": 200,
        },
        "metric": 70.5,
    }
    assert results["1"]["metric"] is None


def test_rliables_settings_become_ours_with_exactly_one_update_per_iteration():
    values = {"train_iterations": 1000, "collect_steps_per_iteration": 2, "batch_size": 32}
    ours = rliable_settings(values)
    assert ours["steps"] == 32 + 2 * 1000
    assert (ours["collect"], ours["envs"], ours["updates_per_call"]) == (2, 1, 1)
    assert ours["samples_per_insert"] * (ours["steps"] - ours["min_inserts"]) == 32 * 1000
    assert (ours["eval_episodes"], ours["test_episodes"]) == (10, 10)
    parallel = rliable_settings({**values, "num_test_episodes": 200}, rollout_workers=4)
    assert (parallel["envs"], parallel["actors"], parallel["updates_per_call"]) == (4, 4, 4)
    assert (parallel["steps"], parallel["test_episodes"]) == (ours["steps"], 200)


def test_defaults_of_rliables_settings_are_those_of_the_preset():
    preset = read_preset("rliable")
    rest = {name: value for part in ("run", "learner", "config", "knobs")
            for name, value in preset[part].items()}  # fmt: skip
    ours = rliable_settings({"train_iterations": 10_000})
    # The preset has no test_episodes and no actors, and its checkpoints are its own.
    for name in rest.keys() & ours.keys():
        assert rest[name] == ours[name], name
    assert rest.keys() - ours.keys() == {
        "checkpoint_every", "n_step", "double", "dueling", "prioritised", "huber_delta",
    }  # fmt: skip
    assert ours.keys() - rest.keys() == {"actors", "test_episodes"}
    assert all(seed.ours for seed in RLIABLE_SETTINGS.values())


# --- Overrides ------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_none_changes_nothing():
    study = read_study(
        README, level=1, slots=3, lag=4, method="sobol", rule="median", seed=7, max_trials=5,
        metric="return", criteria="min", folder="elsewhere", is_legacy=True, lanes=None,
    )  # fmt: skip
    assert (study.slots.slots, study.slots.lanes) == (3, 0)
    assert (study.search.lag, study.search.method) == (4, "sobol")
    assert (study.stopping.rule, study.seed, study.max_trials) == ("median", 7, 5)
    assert study.metric == Metric(name="reward", criteria="min")
    assert study.trainable.config["folder"] == "elsewhere"
    assert study.convergence.is_legacy
    assert read_study(README, rollout_workers=2).trainable.config["rollout_workers"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"slot": 2}, "a study has no setting slot; did you mean slots?"),
        ({"slots": 0}, "slots is 0; give 1 to 4096"),
        ({"lag": "8"}, "lag is '8'; give a whole number"),
        ({"method": "rando"}, "method is 'rando'; give one of random, grid, sobol"),
        ({"metric": "rewrd"}, "there is no metric rewrd; did you mean reward?"),
        ({"criteria": "maximum"}, "the metric's criteria is 'maximum'; give max or min"),
        ({"seed": -1}, "seed is -1"),
        ({"name": "a\x9bb"}, r"name is 'a\\x9bb', which has the control character '\\x9b'; give"),
        ({"folder": "a\rb"}, "folder is .* control character"),
        ({"max_seconds": math.inf}, "max_seconds is inf; give 0 to 1e"),
        ({"max_seconds": 1 << 20_000}, "max_seconds is a number of too many digits; give 0 to 1e"),
        ({"level": 3}, "the level of parallelization is 3; give 1"),
    ],
)
def test_a_bad_override_is_one_clear_line(overrides: dict[str, Any], message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_study(README, **overrides)


def test_the_numbers_of_a_study_made_in_python_are_checked_too():
    for number in (math.nan, -1.0):
        study = replace(read_study(README), max_seconds=number)
        with pytest.raises(ConfigError, match=f"^max_seconds is {number}; give "):
            with_settings(study, {})


# --- Bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_iter": 3}, "there is no key max_iter; did you mean max_iters?"),
        ({"max_seconds": 60}, "there is no key max_seconds in RLiable's files; .* --set max_sec"),
        ({"max_iters": 0}, "max_iters is 0; give a whole number from 1"),
        ({"max_iters": 2.5}, "max_iters is 2.5; give a whole number"),
        ({"max_iters": 1e300}, "max_iters is 1e.300; give a "),
        ({"max_iters": True}, "max_iters is true; give a number"),
        ({"num_workers": "2"}, "num_workers is '2'; give a number"),
        ({"convergence": -1}, "convergence is -1; give a number from 0"),
        ({"optim_name": 3}, "optim_name is 3; give a text"),
        ({"optim_name": "\x1b[31mred"}, r"optim_name is '\\x1b\[31mred', which has the control"),
        ({"config": "config/none.json"}, "config is config/none.json, which does not exist in"),
        ({"metric": "reward"}, "metric is 'reward'; give {\"name\""),
        ({"metric": {"nam": "reward"}}, "metric has a key nam; did you mean name?"),
        ({"metric": {"name": "rewards"}}, "there is no metric rewards; did you mean reward?"),
        ({"metric": {"criteria": "up"}}, "the metric's criteria is 'up'; give max or min"),
        ({"grid": []}, "grid: the space is none|grid: the space is"),
        ({"grid": {}}, "grid: the space is empty; give at least one setting"),
        (
            {"grid": {"batch_sise": [1]}},
            "grid: class DQN has no setting batch_sise; did you",
        ),
        ({"grid": {"batch_size": []}}, "grid: batch_size: its list is empty"),
        ({"grid": {"batch_size": 32}}, "grid: batch_size: it is 32; give a list"),
        ({"grid": {"batch_size": ["32"]}}, "grid: batch_size is '32'; give a whole number"),
        ({"grid": {"batch_size": [32.5]}}, "grid: batch_size is 32.5; give a whole number"),
        ({"grid": {"batch_size": [0]}}, "grid: batch_size is 0; give a number above 0"),
        (
            {"grid": {"batch_size": {"min": 64, "max": 32}}},
            "grid: batch_size: its min 64 is above",
        ),
        (
            {"grid": {"learning_rate": {"min": 0.1, "max": 7}}},
            "grid: learning_rate is 7.0: .*give 1e-07 to 1",
        ),
        (
            {"grid": {"train_iterations": {"min": 1, "max": 10**30}}},
            "grid: train_iterations: its max is .* 2\\^53",
        ),
    ],
)
def test_a_bad_grid_file_is_one_line_with_file_key_and_fix(tmp_path, change, message):
    shutil.copytree(SEED / "config", tmp_path / "config")
    grid = json.loads(README.read_text())
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({**grid, **change}))
    with pytest.raises(ConfigError, match=f"^{path}: ({message})") as caught:
        read_study(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "DQM"}, "there is no class 'DQM'; did you mean 'DQN'?"),
        ({"class": "models.mine:Mine"}, "class 'models.mine:Mine' cannot be imported"),
        ({"class": "json:JSONDecoder"}, "class json:JSONDecoder has no method train and evaluate"),
        ({"class": "BaseModel"}, "class BaseModel trains nothing"),
        ({"class": 3}, "class is 3; give a text"),
        (
            {"environment": "CartPol-v1"},
            "environment: game 'CartPol-v1' is unknown; did you",
        ),
        ({"environment": "rows.json"}, "environment rows.json does not exist"),
        ({"environment": "config_count.json"}, "class DQN cannot train on the rows of"),
        ({"hp_params": []}, "hp_params is \\[\\]; give an object"),
        (
            {"hp_params": {"batch": 3}},
            "hp_params: class DQN has no setting batch; did",
        ),
        ({"hp_params": {"batch_size": 2.5}}, "hp_params: batch_size is 2.5; give a whole number"),
        ({"mdl_file": ""}, "mdl_file is ''; give a text"),
    ],
)
def test_a_bad_base_file_is_one_line_that_names_it(tmp_path, change, message):
    base = json.loads(Path("config/config_dqn.json").read_text())
    (tmp_path / "config").mkdir()
    shutil.copy("config/config_count.json", tmp_path / "config/config_count.json")
    (tmp_path / "config/config_dqn.json").write_text(json.dumps({**base, **change}))
    path = tmp_path / "grid.json"
    path.write_text(README.read_text())
    with pytest.raises(ConfigError, match=f"config_dqn.json: {message}") as caught:
        read_study(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"config": "a", "config": "b"}', "the key config appears twice"),
        ('{"grid": {"x": [NaN]}}', "the number NaN is not finite"),
        ('{"grid": {"x": [1e999]}}', "the number 1e999 is not finite"),
        ('{"grid": ', "it is not valid JSON"),
        ("[1, 2]", "it has \\[1, 2\\]; give an object with config, optim_name"),
        ('{"grid": {"x": [1]}}', "config is missing; a study file has"),
        ("[" * 100_000, "it is not valid JSON"),
    ],
)
def test_ambiguous_json_is_rejected(tmp_path, text, message):
    path = tmp_path / "grid.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: .*{message}"):
        read_study(path)


def test_a_file_that_does_not_exist_or_lacks_keys_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json: it cannot be read: .* give a JSON file"):
        read_study(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"none.toml: it cannot be read: .* give a TOML file"):
        read_study(tmp_path / "none.toml")
    base = tmp_path / "base.json"
    base.write_text('{"class": "DQN"}')
    with pytest.raises(ConfigError, match=r"environment, mdl_file and hp_params is missing"):
        read_base(base)


# --- TOML -----------------------------------------------------------------------------------------

STUDY = """
[study]
game = "CartPole-v1"
algorithm = "dqn"
max_trials = 30
metric = "return"

[settings]
steps = 2_000

[space]
learning_rate = {}
batch = [32, 64]
discount = { min = 0.9, max = 0.999 }
double = {}
epsilon = { max = 0.5 }
n_step = { min = 1, max = 5 }

[search]
method = "sobol"
lag = 4

[stopping]
rule = "asha"

[constraints]
train_s = { max = 60 }

[slots]
slots = 2
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cartpole.toml"
    path.write_text(text)
    return path


def test_a_toml_study_takes_ranges_from_the_algorithms_settings(tmp_path):
    study = read_study(write(tmp_path, STUDY))
    assert dict(study.space.dimensions) == {
        "learning_rate": Interval(low=1e-7, high=1.0, scale="log"),
        "batch": Choice([32, 64]),
        "discount": Interval(low=0.9, high=0.999),
        "double": Choice([False, True]),
        "epsilon": Interval(low=0.0, high=0.5),
        "n_step": Interval(low=1, high=5, is_integer=True),
    }
    assert (study.name, study.max_trials) == ("cartpole", 30)
    assert study.metric == Metric(name="reward")
    assert study.constraints == (Constraint(metric="train_s", high=60),)
    assert (study.search.method, study.search.lag, study.stopping.rule) == ("sobol", 4, "asha")
    config = study.trainable.config
    assert (config["game"], config["algorithm"], config["class"]) == ("CartPole-v1", "dqn", "dqn")
    assert config["settings"] == {"steps": 2_000}
    assert config["folder"] == "runs/cartpole"
    assert study_from_json(json.loads(json.dumps(study.to_json()))) == study


def test_an_interval_of_two_decades_is_logarithmic_unless_it_says_linear(tmp_path):
    text = '[study]\ngame = "CartPole-v1"\n[space]\n'
    text += "clip = { min = 0.001, max = 1.0 }\nlearning_rate = { max = 0.1, scale = 'linear' }\n"
    study = read_study(write(tmp_path, text))
    assert study.trainable.config["class"] == "ppo"
    assert study.space.dimensions["clip"].to_json()["scale"] == "log"
    assert study.space.dimensions["learning_rate"].to_json()["scale"] == "linear"


def test_a_toml_study_may_name_a_class_and_its_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("x\n1\n2\n")
    text = '[study]\nclass = "CountModel"\nenvironment = "rows.csv"\nmetric = "error"\n'
    text += 'criteria = "min"\n[space]\nincrement = [1, 2]\n'
    study = read_study(write(tmp_path, text))
    assert study.trainable.config["environment"] == str(tmp_path / "rows.csv")
    assert study.trainable.config["metric"] == "error"
    assert study.metric == Metric(name="error", criteria="min")
    assert read_study(tmp_path / "cartpole.toml", rdd=True).trainable.config["rdd"] is True
    with pytest.raises(ConfigError, match="rdd is 1; give true or false"):
        read_study(write(tmp_path, text.replace("metric", "rdd = 1\nmetric")))
    with pytest.raises(ConfigError, match="rdd is true, but only classes of your own"):
        read_study(write(tmp_path, STUDY), rdd=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"CartPole-v1"', '"CartPole-v9"', "there is no environment CartPole-v9; did you"),
        (
            "batch = [32, 64]",
            f"batch = {list(range(1, 1_100))}",
            "batch: its list has 1099 values; give",
        ),
        ("[search]", "[serach]", "there is no section serach; did you mean search?"),
        ("lag = 4", "lags = 4", "search has no setting lags; did you mean lag?"),
        ("lag = 4", "lag = -1", "lag is -1; give 0 to 1e"),
        ('metric = "return"', "rdd = true", "study has rdd, which belongs to a class; omit it"),
        ('rule = "asha"', 'rule = "halving"', "rule is 'halving'; give one of none, asha"),
        ("max_trials", "max_trial", "study has no setting max_trial; did you mean max_trials?"),
        ("max_trials = 30", "max_trials = 0", "max_trials is 0"),
        ("max_trials = 30", "max_seconds = -1", "max_seconds is -1; give 0 to 1e"),
        ("max_trials = 30", "max_seconds = nan", "max_seconds is nan; give 0 to 1e"),
        ("max_trials = 30", 'max_seconds = "60"', "max_seconds is '60'; give a number"),
        ("max_trials = 30", f"max_seconds = {'9' * 5_000}", "it is not TOML: Exceeds the limit"),
        (
            "max_trials = 30",
            f"max_seconds = 0x{'f' * 5_000}",
            "max_seconds is a number of too many digits; give 0 to 1e",
        ),
        ("max_trials = 30", f"max_seconds = {'9' * 400}", "max_seconds is 9{39}…9{40}; give 0"),
        ("batch = [32, 64]", "bach = [32, 64]", "dqn has no setting 'bach'; did you"),
        ("batch = [32, 64]", "batch = [0]", "batch is 0; give 1 to 65536"),
        ("batch = [32, 64]", "steps = [100]", "steps is in space and in settings; omit it in one"),
        ("batch = [32, 64]", "widths = {}", "widths has no range; give min and max, or a list"),
        ("max = 0.999", "max = 1.5", "discount is 1.5; give 0 to 1"),
        ("max = 0.999", "max = nan", "discount: its max is nan; give a finite number"),
        (
            'algorithm = "dqn"',
            'algorithm = "dqm"',
            "there is no algorithm 'dqm'; did you",
        ),
        (
            'game = "CartPole-v1"',
            'game = "CartPol-v1"',
            "environment: game 'CartPol-v1' is",
        ),
        ('game = "CartPole-v1"', "", "study has no game; give one"),
        (
            "[study]",
            '[study]\nname = "\\u001b[31mred"',
            r"name is '\\x1b\[31mred', which has the control character '\\x1b'; give printable",
        ),
        ("[study]", '[study]\nfolder = "a\\nb"', "folder is .*the control character"),
        ("batch = [32, 64]", '"x\\u202ey" = [1]', "the space has a setting .*give it a printable"),
        ('metric = "return"', 'metric = "retrun"', "there is no metric retrun"),
        (
            "train_s = { max = 60 }",
            "train = { max = 60 }",
            "there is no metric train; did you",
        ),
        ("train_s = { max = 60 }", "train_s = 60", "the constraint train_s is 60; give"),
        (
            "train_s = { max = 60 }",
            "train_s = { min = 2, max = 1 }",
            "the constraint train_s has",
        ),
        ("[space]", "[settings2]", "there is no section settings2; did you mean settings?"),
        ("steps = 2_000", "steps = 0", "steps is 0; give 1 to 1e"),
        ("steps = 2_000", "steps = 1\nsteps = 2", "it is not TOML"),
    ],
)
def test_a_bad_toml_study_is_one_line_with_the_nearest_name(tmp_path, old, new, message):
    assert old in STUDY
    path = write(tmp_path, STUDY.replace(old, new))
    with pytest.raises(ConfigError, match=f"^{path}: {message}") as caught:
        read_study(path)
    assert "\n" not in str(caught.value)


# --- Cost -----------------------------------------------------------------------------------------


def test_reading_a_study_imports_no_jax_and_importing_it_no_gymnasium():
    code = (
        "import sys, understudy.tuning.study_file, understudy.tuning.models\n"
        "heavy = {'jax', 'gymnasium', 'numba', 'matplotlib'} & sys.modules.keys()\n"
        "from understudy.tuning.study_file import read_study\n"
        f"read_study('{README}')\n"
        "print(sorted(heavy), 'jax' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SEED
    )
    assert process.stdout.split("\n")[-2] == "[] False", process.stdout


def test_a_slot_starts_without_numpy():
    code = "import sys, understudy.tuning.slots, understudy.tuning.trainables\n"
    code += "assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_point_of_the_readmes_space_is_accepted_by_our_settings():
    study = read_study(README)
    rng = np.random.default_rng(1)
    for _ in range(50):
        values = study.space.sample(rng)
        settings = rliable_settings({**study.trainable.config["settings"], **values})
        assert settings["steps"] == values["train_iterations"] + values["batch_size"]
        assert math.isclose(settings["samples_per_insert"], values["batch_size"])
