"""Settings: presets, files and single values, in this order, checked, and written down again."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.act.evaluate import MAX_STEPS
from understudy.algorithm import Schedule
from understudy.core.errors import ConfigError
from understudy.core.names import game_name
from understudy.core.settings import parse_value
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete
from understudy.learn.algorithms.bc import Bc
from understudy.learn.algorithms.dqn import Dqn
from understudy.learn.replay_source import Limiter
from understudy.nn.network import Dense, Input, NetworkSpec
from understudy.training.preset import (
    default_preset,
    preset_names,
    read_preset,
    read_toml,
    with_study,
)
from understudy.training.settings import (
    ALGORITHMS,
    Resolver,
    algorithm_class,
    algorithm_name,
    describe_algorithm,
)
from understudy.training.train_request import TrainRequest, resolve, with_network

GAME = GameSpec(
    game=game_name("g"), obs={"": Box((3,), np.dtype(np.float32))}, action={"": Discrete(2)}
)
NETWORK = NetworkSpec(
    {"obs": Input((3,), np.dtype(np.float32), ())}, (Dense(4),), {"q": (Dense(2),)}
)


def settings(algorithm: str, **single: Any) -> Any:
    resolver = Resolver(algorithm)
    for name, value in single.items():
        resolver.set(name, value)
    return resolver.settings()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_unchanged_by_a_round_trip(name: str):
    fields = read_preset(name)
    resolver = Resolver(fields["algorithm"])
    resolver.add(fields)
    first = resolver.settings()
    again = Resolver(first.algorithm)
    again.add(tomllib.loads(first.to_toml()))
    assert again.settings() == first


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithms_defaults_are_within_their_ranges(name: str):
    first = settings(name)
    again = Resolver(name)
    again.add(tomllib.loads(first.to_toml()))
    assert again.settings() == first


def test_later_ones_win_preset_then_file_then_single_values(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('algorithm = "dqn"\n[config]\nbatch = 32\nn_step = 2\n')
    wanted = TrainRequest(
        preset="dqn-vector", config_file=file, settings={"n_step": 4}, network=(5,)
    )
    found = resolve(wanted, GAME)
    assert found.algorithm == "dqn"
    assert found.run.envs == read_preset("dqn-vector")["run"]["envs"]
    assert (found.config.batch, found.config.n_step, found.config.widths) == (32, 4, (5,))


def test_a_variable_wins_over_the_file_and_a_single_value_over_the_variable(
    tmp_path: Path, monkeypatch
):
    file = tmp_path / "mine.toml"
    file.write_text("[knobs]\nlearning_rate = 0.2\n[run]\nsteps = 7\n")
    (tmp_path / "widths").write_text("32, 16\n")
    monkeypatch.setenv("UNDERSTUDY_TRAIN_LEARNING_RATE", "{start = 0.3, end = 0.1}")
    monkeypatch.setenv("UNDERSTUDY_TRAIN_WIDTHS_FILE", str(tmp_path / "widths"))
    found = resolve(TrainRequest(algorithm="dqn", config_file=file), GAME)
    assert (found.knobs.learning_rate, found.config.widths, found.run.steps) == (
        Schedule(0.3, 0.1),
        (32, 16),
        7,
    )
    found = resolve(
        TrainRequest(algorithm="dqn", config_file=file, settings={"learning_rate": 0.4}), GAME
    )
    assert found.knobs.learning_rate == 0.4
    monkeypatch.setenv("UNDERSTUDY_TRAIN_BATCH", "many")
    with pytest.raises(
        ConfigError, match=r"batch is 'many' \(UNDERSTUDY_TRAIN_BATCH\); give a whole number"
    ):
        resolve(TrainRequest(algorithm="dqn"), GAME)


@pytest.mark.parametrize("name", ["LEARNING_RAT", "LEARNING_RAT_FILE"])
def test_a_variable_of_no_setting_is_rejected(name: str, monkeypatch):
    monkeypatch.setenv("UNDERSTUDY_TRAIN_EXPECTILE", "0.5")  # another algorithm has it
    resolve(TrainRequest(algorithm="dqn"), GAME)
    monkeypatch.setenv(f"UNDERSTUDY_TRAIN_{name}", "0.1")
    with pytest.raises(
        ConfigError,
        match=f"UNDERSTUDY_TRAIN_{name} is set in the environment, but dqn has no setting "
        "'learning_rat'; did you mean 'learning_rate'",
    ):
        resolve(TrainRequest(algorithm="dqn"), GAME)


def test_the_algorithm_is_from_flags_file_preset_or_kind_of_training(
    tmp_path: Path,
):
    file = tmp_path / "mine.toml"
    file.write_text('algorithm = "bc"\n')
    assert resolve(TrainRequest(), GAME).algorithm == "ppo"
    assert resolve(TrainRequest(from_store=tmp_path), GAME).algorithm == "bc"
    assert resolve(TrainRequest(preset="dqn-vector"), GAME).algorithm == "dqn"
    assert resolve(TrainRequest(preset="bc-vector", config_file=file), GAME).algorithm == "bc"
    assert (
        resolve(TrainRequest(algorithm="bc", preset="bc-vector", config_file=file), GAME).algorithm
        == "bc"
    )


def test_two_sources_with_different_algorithms_are_rejected_by_name(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('algorithm = "bc"\n')
    for request, said in [
        (
            TrainRequest(algorithm="ppo", preset="dqn-vector"),
            "algorithm is for ppo, and preset dqn-vector for dqn",
        ),
        (
            TrainRequest(algorithm="ppo", config_file=file),
            f"algorithm is for ppo, and config {file} for bc",
        ),
        (
            TrainRequest(preset="dqn-vector", config_file=file),
            f"config {file} is for bc, and preset dqn-vector for dqn",
        ),
    ]:
        with pytest.raises(ConfigError, match=re.escape(said)):
            resolve(request, GAME)


class OwnBc(Bc):
    pass


def test_an_own_algorithm_takes_from_a_preset_what_is_not_the_algorithms_own():
    found = resolve(TrainRequest(algorithm=OwnBc, preset="dqn-vector"), GAME)
    assert found.learner.capacity == read_preset("dqn-vector")["learner"]["capacity"]
    assert found.config == algorithm_class("bc").Config()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_read_from_the_source_are_those_of_the_class(name: str):
    real = algorithm_class(name)
    read = describe_algorithm(name)
    for part in ("Config", "Knobs"):
        fields = [
            {
                one.name: (one.default, one.metadata.get("range"))
                for one in dataclasses.fields(getattr(whose, part))
            }
            for whose in (real, read)
        ]
        assert fields[0] == fields[1]
    assert read.__doc__.splitlines()[0] == real.__doc__.splitlines()[0]


def test_an_algorithm_has_its_short_name_however_it_was_passed():
    assert (
        algorithm_name("dqn") == algorithm_name(Dqn) == algorithm_name(ALGORITHMS["dqn"]) == "dqn"
    )
    assert algorithm_name("mine:Algorithm") == "mine:Algorithm"
    assert (
        resolve(TrainRequest(algorithm=Dqn), GAME).config
        == resolve(TrainRequest(algorithm="dqn"), GAME).config
    )


# --- The horizon of schedules ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "horizon"),
    [
        ({}, 100_000),
        ({"steps": 1_000}, 100_000),
        ({"steps": 300_000}, 300_000),
        ({"steps": 1_000, "horizon": 1_000}, 1_000),
        ({"steps": 300_000, "horizon": 200_000}, 200_000),
    ],
)
@pytest.mark.parametrize("preset", [None, "ppo-vector"])
def test_schedules_span_the_steps_of_the_preset_or_a_longer_run(
    requested: dict[str, int], horizon: int, preset: str | None
):
    request = TrainRequest(algorithm="ppo", preset=preset, settings=requested)
    assert resolve(request, GAME).run.horizon == horizon


def test_a_horizon_in_a_file_or_the_environment_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "mine.toml"
    file.write_text("[run]\nhorizon = 4_000\nsteps = 5_000\n")
    request = TrainRequest(algorithm="ppo", config_file=file)
    assert resolve(request, GAME).run.horizon == 4_000
    monkeypatch.setenv("UNDERSTUDY_TRAIN_HORIZON", "3000")
    assert resolve(request, GAME).run.horizon == 3_000


def test_the_preset_of_a_run_keeps_its_horizon(tmp_path: Path):
    file = tmp_path / "preset.toml"
    for asked, steps, horizon in (
        ({"steps": 1_000}, None, 100_000),
        ({"steps": 1_000}, 2_000, 100_000),
        ({"steps": 1_000}, 200_000, 200_000),
        ({"steps": 1_000, "horizon": 500}, 2_000, 500),
    ):
        file.write_text(resolve(TrainRequest(algorithm="ppo", settings=asked), GAME).to_toml())
        more = {} if steps is None else {"steps": steps}
        again = TrainRequest(algorithm="ppo", preset=str(file), settings=more)
        assert resolve(again, GAME).run.horizon == horizon


def test_an_extended_run_stretches_its_schedules_unless_they_were_shorter():
    for horizon, stretched in ((0, 2_000), (1_000, 2_000), (5_000, 5_000), (500, 500)):
        longer = settings("ppo", steps=2_000, horizon=horizon).with_horizon(1_000)
        assert longer.run.horizon == stretched


def test_evaluations_are_cut_at_the_limit_that_evaluate_has_by_default():
    assert settings("ppo").run.eval_max_steps == MAX_STEPS


def test_cut_schedules_are_those_that_end_after_the_run():
    request = TrainRequest(algorithm="dqn", settings={"steps": 8_000, "learning_rate": 1e-3})
    cut = resolve(request, GAME).cut_schedules()
    last, end = cut["epsilon"]
    assert last == pytest.approx(1.0 - 0.96 / 2)
    assert end == 0.04
    assert "learning_rate" not in cut
    request = TrainRequest(algorithm="dqn", settings={"steps": 16_000})
    assert "epsilon" not in resolve(request, GAME).cut_schedules()
    assert resolve(TrainRequest(algorithm="dqn"), GAME).cut_schedules() == {}


def test_games_of_no_kind_of_their_own_use_the_small_preset_and_unknown_algorithms_none():
    assert default_preset("dqn", GAME) == "dqn-vector"
    assert default_preset("mine:Algorithm", GAME) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[64, 64]", [64, 64]),
        ("tanh", "tanh"),
        ('"tanh"', "tanh"),
        ("{start=1.0, end=0.1}", {"start": 1.0, "end": 0.1}),
        ("", ""),
        ("64,64", "64,64"),
    ],
)
def test_values_are_toml_or_plain_text(text: str, value: Any):
    assert parse_value(text) == value


def test_knobs_may_stand_in_config_as_in_files_of_earlier_versions(tmp_path: Path):
    file = tmp_path / "old.toml"
    file.write_text(
        'algorithm = "dqn"\n[config]\nbatch = 32\ntarget_period = 7\nmax_gradient = 3\n'
    )
    found = resolve(TrainRequest(config_file=file, settings={"max_gradient": 4.0}), GAME)
    assert (found.config.batch, found.knobs.target_period, found.knobs.max_gradient) == (32, 7, 4.0)


def test_numbers_become_what_the_setting_is():
    assert settings("dqn", epsilon={"start": 1, "end": 0}).knobs.epsilon == Schedule(1.0, 0.0)
    assert isinstance(settings("dqn", max_gradient=1).knobs.max_gradient, float)
    assert settings("dqn", widths=[3, 4]).config.widths == (3, 4)
    assert settings("dqn", steps=np.int64(5)).run.steps == 5


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learnign_rate", 1, "did you mean 'learning_rate'"),
        ("xyzzy", 1, "understudy train --list"),
        ("learning_rate", 2.0, "learning_rate is 2.0; give .* to 1: learning rate of Adam"),
        ("learning_rate", "fast", "give a number, or a schedule"),
        ("learning_rate", float("nan"), "learning_rate is nan"),
        ("learning_rate", 10**400, "to 1: learning rate"),
        ("learning_rate", {"start": 1.0}, "a schedule has start, end and until"),
        ("learning_rate", {"start": 1.0, "end": 0.0, "until": 0.0}, "until above 0"),
        ("discount", {"start": 1.0, "end": 0.0}, "give a number: "),
        ("discount", Schedule(1.0, 0.5), "fixed for a run"),
        ("batch", 1.5, "give a whole number"),
        ("batch", True, "give a whole number"),
        ("double", 1, "give true or false"),
        ("widths", "64,64", r"such as \[64, 64\]"),
        ("widths", [0], r"such as \[64, 64\]"),
        ("network", "64,64", "such as 64,64"),
    ],
)
def test_an_invalid_value_is_reported_with_what_is_expected(name: str, value: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        settings("dqn", **{name: value})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[runn]\nsteps = 1\n", "has a section 'runn'"),
        ("run = 3\n", r"write a section \[run\]"),
        ("algorithm = 3\n", "has algorithm = 3"),
        ("[run\n", "is not TOML"),
        ("[config]\nbatchh = 1\n", "did you mean 'batch'"),
    ],
)
def test_a_malformed_file_is_rejected_with_its_name(text: str, said: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Resolver("dqn").add(read_toml(path))


def test_a_missing_file_is_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_preset(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="did you mean 'dqn-vector'"):
        read_preset("dqn-vektor")


@pytest.mark.parametrize("preset", ["dqn-vector", "dqn-pixels", "bc-vector", "iql-vector"])
@pytest.mark.parametrize("samples_per_insert", [1e-3, 0.4, 8.0, 1e6])
def test_every_samples_per_insert_within_its_range_is_accepted(
    preset: str, samples_per_insert: float
):
    found = resolve(
        TrainRequest(preset=preset, settings={"samples_per_insert": samples_per_insert}), GAME
    )
    limiter = found.learner_config().limiter
    assert limiter is not None
    assert Limiter(limiter).updates_due(found.config.batch) == 0


def test_a_network_has_a_file_of_its_own():
    found = with_network(settings("dqn"), NETWORK)
    assert found.config.network == NETWORK
    assert "network" not in tomllib.loads(found.to_toml())["config"]
    assert with_network(found, None) is found


def test_texts_survive_being_written_down():
    found = settings("ppo", activation='a"b\\c')
    assert tomllib.loads(found.to_toml())["config"]["activation"] == 'a"b\\c'


def test_a_study_is_its_best_settings_over_the_preset_of_its_trials(tmp_path: Path):
    (tmp_path / "best.toml").write_text('algorithm = "dqn"\n[config]\nbatch = 48\n')
    study = {"study": {"trainable": {"config": {"preset": "rliable"}}}}
    (tmp_path / "study.json").write_text(json.dumps(study))
    preset, config_file = with_study(str(tmp_path), None)
    found = resolve(TrainRequest(preset=preset, config_file=config_file), GAME)
    assert (found.algorithm, found.config.batch) == ("dqn", 48)
    assert found.knobs.huber_delta == read_preset("rliable")["knobs"]["huber_delta"]
    assert with_study("dqn-vector", None) == ("dqn-vector", None)
    assert with_study(None, Path("c.toml")) == (None, Path("c.toml"))
    with pytest.raises(ConfigError, match="omit one of the two"):
        with_study(str(tmp_path), Path("c.toml"))
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(ConfigError, match="write it again: understudy tune resume"):
        with_study(str(tmp_path), None)
