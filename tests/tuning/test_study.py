import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.tuning.cheap import (
    DeadlyBucket,
    Endless,
    Fragile,
    Impossible,
    Lanes,
    Mortal,
    Quadratic,
    study,
)
from tests.tuning.thread_slots import ThreadSlots
from understudy.core.errors import ConfigError, Locked, MissingExtra
from understudy.core.log import FileLock
from understudy.core.watch import FolderWatch
from understudy.testing.clock import ManualClock
from understudy.tuning.journal import NAME, Journal, Row, create_journal, table
from understudy.tuning.result import StudyResult, load_study
from understudy.tuning.space import read_space
from understudy.tuning.study import (
    SlotEnded,
    Study,
    StudyEvent,
    StudyStarted,
    TrialEnded,
    TrialStarted,
)
from understudy.tuning.study_config import (
    Constraint,
    ConvergenceConfig,
    SearchConfig,
    SlotsConfig,
    StoppingConfig,
    StudyConfig,
)
from understudy.tuning.trial import Metric, Report, Trial, TrialResult, Values
from understudy.tuning.tune import tune


def rows_of(
    config: StudyConfig, folder: Path, *, num_slots: int = 1, order: int = 0, **options: Any
) -> list[Row]:
    """Run a study on slots that are threads."""
    if not (folder / NAME).exists():
        create_journal(folder / NAME, study=config.to_json(), versions={})
    with (
        closing(Journal(folder / NAME)) as journal,
        closing(
            Study(config, journal, ThreadSlots(order), num_slots=num_slots, **options)
        ) as running,
    ):
        running.run()
        return journal.state.rows()


def timeless(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0.0} for row in table(rows)]


ASHA = StoppingConfig(rule="asha", min_reports=1, reduction=2)


# --- One table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Quadratic, Fragile])
def test_the_table_is_the_same_on_any_number_of_slots_in_any_order(tmp_path: Path, kind: type):
    tables = []
    for number, num_slots in enumerate((1, 2, 4, 4, 4, 7)):
        config = study(
            tmp_path / str(number),
            kind,
            config={"reports": 5},
            max_trials=40,
            search=SearchConfig(method="sobol", lag=6),
            stopping=ASHA,
            convergence=ConvergenceConfig(threshold=1e-3, patience=20),
        )
        rows = rows_of(config, tmp_path / str(number), num_slots=num_slots, order=number)
        tables.append(timeless(rows))
    assert all(other == tables[0] for other in tables[1:])
    states = [row["state"] for row in tables[0]]
    assert "stopped" in states
    assert "done" in states
    assert ("failed" in states) == (kind is Fragile)


class Noting:
    """A searcher that notes what it is asked and told; named by its import path."""

    log: list[tuple[str, int]] = []  # noqa: RUF012

    def __init__(self, plan: Any) -> None:
        self._space = plan.space

    def ask(self, trial_no: int) -> Values | None:
        self.log.append(("ask", trial_no))
        return dict(self._space.at([(trial_no % 10) / 10] * 2))

    def tell(self, trial: Trial, result: TrialResult) -> None:
        self.log.append(("tell", result.trial_no))


def test_a_trial_is_asked_when_exactly_those_before_its_lag_are_told(tmp_path: Path):
    Noting.log.clear()
    search = SearchConfig(lag=3)
    object.__setattr__(search, "method", "tests.tuning.test_study:Noting")
    config = study(tmp_path, search=search, max_trials=6)
    rows_of(config, tmp_path, num_slots=3, order=1)
    expected = [("ask", 0), ("ask", 1), ("ask", 2)]
    for trial_no in (3, 4, 5):
        expected += [("tell", trial_no - 3), ("ask", trial_no)]
    assert Noting.log == expected
    Noting.log.clear()
    rows_of(config, tmp_path)  # a resumed study repeats them
    assert Noting.log == expected


def test_exactly_as_many_trials_run_as_requested_unless_the_points_end(tmp_path: Path):
    for max_trials in (1, 2, 5, 13):
        folder = tmp_path / str(max_trials)
        assert len(rows_of(study(folder, max_trials=max_trials), folder, num_slots=4)) == max_trials
    grid = study(
        tmp_path / "grid", search=SearchConfig(method="grid", points=2, lag=4), max_trials=99
    )
    rows = rows_of(grid, tmp_path / "grid", num_slots=2)
    assert len(rows) == 6
    assert load_study(tmp_path / "grid").ended == "the space has no more points"


def test_a_converged_study_asks_no_further_trials(tmp_path: Path):
    config = study(
        tmp_path,
        max_trials=200,
        search=SearchConfig(lag=4),
        convergence=ConvergenceConfig(threshold=0.5, patience=10),
    )
    assert len(rows_of(config, tmp_path, num_slots=4)) == 11 + 4 - 1  # of which 3 were running
    assert load_study(tmp_path).ended == "converged"


def test_the_legacy_rule_ends_a_study_at_the_trial_where_the_original_does(tmp_path: Path):
    for batch, n_trials in ((1, 3), (2, 6)):
        config = study(
            tmp_path / str(batch),
            max_trials=20,
            search=SearchConfig(lag=8),
            convergence=ConvergenceConfig(threshold=10.0, is_legacy=True, legacy_batch=batch),
        )
        assert len(rows_of(config, tmp_path / str(batch), num_slots=4)) == n_trials


def test_the_best_trial_is_within_the_constraints_and_was_not_stopped(tmp_path: Path):
    config = study(
        tmp_path,
        Fragile,
        max_trials=30,
        metric=Metric(name="reward", criteria="min"),
        constraints=[Constraint(metric="cost", low=20, high=40)],
        search=SearchConfig(lag=4),
    )
    rows = rows_of(config, tmp_path)
    best = load_study(tmp_path).best
    able = [row for row in rows if row.result.metrics.get("cost") == 32.0]
    assert best is not None
    assert best == min(able, key=lambda row: row.result.metrics["reward"])
    assert {row.result.state for row in rows} == {"done", "failed"}
    errors = {row.trial.trial_no % 8: row.result.error for row in rows}
    assert errors[3] == errors[4] == "the trial ended without a finite reward"


def test_trials_in_lanes_share_a_slot_by_bucket_and_give_the_same_table(tmp_path: Path):
    tables = []
    for number, (num_slots, lanes) in enumerate(((1, 1), (1, 4), (2, 4), (3, 2))):
        config = study(
            tmp_path / str(number),
            Lanes,
            config={"lanes": lanes, "reports": 4},
            max_trials=30,
            search=SearchConfig(lag=12),
            stopping=ASHA,
        )
        rows = rows_of(config, tmp_path / str(number), num_slots=num_slots, order=number)
        tables.append(timeless(rows))
    assert tables[1] == tables[2] == tables[3]
    assert tables[0][3]["error"] == tables[1][3]["error"]
    assert {row["state"] for row in tables[1]} == {"done", "stopped", "failed"}


# --- Slots that end -------------------------------------------------------------------------------


def test_more_trials_than_a_socket_holds_messages_wait_for_lanes_without_a_deadlock(tmp_path: Path):
    config = study(
        tmp_path / "s",
        Lanes,
        config={"lanes": 4, "reports": 0},
        max_trials=1_000,
        search=SearchConfig(lag=1_000),
        slots=SlotsConfig(lanes=4),
    )
    assert len(tune(config).trials) == 1_000


def test_a_slot_that_ends_while_it_computes_buckets_costs_one_trial_an_attempt(tmp_path: Path):
    config = study(
        tmp_path / "s",
        DeadlyBucket,
        config={"lanes": 4, "reports": 0},
        search=SearchConfig(lag=12),
        slots=SlotsConfig(lanes=4),
    )
    states = [row.result.state for row in tune(config).trials]
    assert states == ["failed", *["done"] * 11]


def test_a_trial_whose_process_ends_starts_again_and_fails_after_three_times(tmp_path: Path):
    for deaths in (2, 3):
        folder = tmp_path / str(deaths)
        events: list[StudyEvent] = []
        config = study(folder, Mortal, config={"victim": 1, "deaths": deaths}, max_trials=3)
        result = tune(config, on_event=events.append)
        state = result.trials[1].result
        assert state.state == ("done" if deaths == 2 else "failed")
        assert len([event for event in events if isinstance(event, SlotEnded)]) == deaths
        assert [row.result.state for row in result.trials].count("done") >= 2
    assert "ended 3 times: it exited with code 7; its output is in" in state.error


def test_a_trial_that_never_ends_fails_at_its_time_limit(tmp_path: Path):
    config = study(tmp_path / "s", Endless, max_trials=5, slots=SlotsConfig(trial_timeout_s=1.0))
    events: list[StudyEvent] = []
    result = tune(config, oversubscribe=True, on_event=events.append)
    assert [row.result.state for row in result.trials] == [
        "done",
        "failed",
        "done",
        "done",
        "failed",
    ]
    ended = [event.why for event in events if isinstance(event, SlotEnded)]
    assert ended == ["a trial did not end within 1 s"] * 2
    assert result.trials[1].result.error == "it did not end within 1 s; raise trial_timeout_s"


class Held(Quadratic):
    """Trial 0 ends at once, and the others when `released` is set; trial 1 reports before that."""

    released = threading.Event()

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        if trial.trial_no == 1:
            report(1, 0.5)
        if trial.trial_no:
            self.released.wait(60)
        return super().run(trial, report)


def held_study(folder: Path) -> StudyConfig:
    Held.released.clear()
    config = study(folder, max_seconds=60.0, search=SearchConfig(lag=3))
    trainable = replace(config.trainable, path="tests.tuning.test_study:Held")
    return replace(config, trainable=trainable)


def test_a_study_ends_when_its_time_is_over_and_a_resume_keeps_its_table(tmp_path: Path):
    folder = tmp_path / "s"
    config = held_study(folder)
    clock = ManualClock()

    def on_event(event: StudyEvent) -> object:
        match event:
            case TrialStarted() if event.trial.trial_no == 0:
                clock.advance(40.0)
            case TrialEnded() if event.row.trial.trial_no == 0:
                return understudy.Stop
            case Report():
                clock.advance(20.0)
                Held.released.set()  # its result comes too late
        return None

    rows = rows_of(config, folder, clock=clock, on_event=on_event)
    assert [row.result.state for row in rows] == ["done"]
    clock.advance(1_000.0)  # no process runs the study
    rows = rows_of(config, folder, num_slots=2, clock=clock, on_event=on_event)
    ends = [(row.trial.trial_no, row.result.state, row.result.seconds) for row in rows]
    assert ends[1:] == [(1, "stopped", 20.0)]
    assert rows[1].result.metrics == {"reward": 0.5}
    result = load_study(folder)
    assert result.ended == "its 60 seconds are over"
    assert result.best == rows[0]
    assert result.why_no_best == ""
    journal = (folder / NAME).read_bytes()
    assert rows_of(config, folder, clock=clock) == rows
    assert (folder / NAME).read_bytes() == journal
    with pytest.raises(ConfigError, match="has ended: its 60 seconds are over; start another"):
        tune(out=folder, resume=True, trials=20)


def test_the_time_of_an_interrupted_trial_counts(tmp_path: Path):
    folder = tmp_path / "s"
    config = held_study(folder)
    create_journal(folder / NAME, study=config.to_json(), versions={})
    clock = ManualClock()
    events: list[StudyEvent] = []
    for number in (1, 2):
        with (
            closing(Journal(folder / NAME)) as journal,
            closing(
                Study(
                    config,
                    journal,
                    ThreadSlots(0),
                    num_slots=1,
                    clock=clock,
                    on_event=events.append,
                )
            ) as running,
        ):
            while sum(isinstance(event, Report) for event in events) < number:
                running.step()
            clock.advance(20.0)
            running.step()
            assert journal.state.used_s == 20.0 * number
            Held.released.set()  # or the slot would not end
        Held.released.clear()
        clock.advance(1_000.0)
    with closing(Journal(folder / NAME)) as journal:
        assert journal.state.rows()[1:] == []


def test_a_study_without_a_trial_in_time_says_what_to_do(tmp_path: Path):
    config = study(tmp_path / "s", max_seconds=60.0)
    result = StudyResult(tmp_path / "s", config, [], "its 60 seconds are over", max_trials=9)
    assert result.why_no_best == (
        "no trial ended within 60 s; start another study with a larger max_seconds, or without one"
    )
    assert replace(result, ended="").why_no_best == ""


def test_a_trainable_that_cannot_be_created_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="the game is missing; install it"):
        tune(study(tmp_path / "s", Impossible))
    assert not (tmp_path / "s").exists()


def test_more_slots_than_cores_are_refused_and_those_of_a_file_reduced(tmp_path: Path):
    cores = len(os.sched_getaffinity(0))
    config = study(tmp_path / "s", slots=SlotsConfig(slots=4 * cores), max_trials=1)
    with pytest.raises(ConfigError, match=f"has {cores} .*give at most {cores}"):
        tune(config, slots=3 * cores)
    assert not (tmp_path / "s").exists()
    started: list[StudyEvent] = []
    tune(config, on_event=started.append)
    assert isinstance(started[0], StudyStarted)
    assert started[0].slots == cores
    assert "with the same results" in started[0].notes[-1]


def test_a_metric_that_no_trial_measures_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="measures no metric rewards; did you mean reward"):
        rows_of(study(tmp_path, metric=Metric(name="rewards")), tmp_path)


# --- understudy.tune ------------------------------------------------------------------------------


def test_tune_returns_the_trials_and_the_best_and_writes_the_folder(tmp_path: Path):
    events: list[StudyEvent] = []
    config = study(tmp_path / "s", config={"reports": 1})
    result = tune(config, trials=5, seed=2, on_event=events.append)
    assert len(result.trials) == 5
    assert result.best is not None
    assert result.best.result.metrics["reward"] == max(
        row.result.metrics["reward"] for row in result.trials
    )
    written = json.loads((tmp_path / "s" / "study.json").read_text())
    assert written == json.loads(json.dumps(result.to_json()))
    assert written["best"] == result.best.trial.trial_no
    kinds = [type(event) for event in events]
    assert kinds[0] is StudyStarted
    assert [kinds.count(kind) for kind in (TrialStarted, Report, TrialEnded)] == [5, 5, 5]
    assert table(load_study(tmp_path / "s").trials) == table(result.trials)
    assert [lease.trial_no for lease in result.leases] == list(range(5))
    assert all(lease.end_s is not None and lease.start_s <= lease.end_s for lease in result.leases)


@pytest.mark.parametrize(
    ("space", "note"),
    [
        ({"x": {"min": 0.5, "max": 0.5}, "width": [16, 32]}, "x is not tuned: min and max allow"),
        ({"x": [0.5], "width": [1, True]}, ""),
        ({"x": {"min": 0.1, "max": 0.5}, "width": {"min": 8, "max": 9, "step": 2}}, "width is not"),
        ({"x": {"min": 0.5, "max": 0.5}, "width": [16]}, "each setting of the space has only one"),
    ],
)
def test_settings_with_one_value_are_noted_once(tmp_path: Path, space: Any, note: str):
    config = replace(study(tmp_path / "s", max_trials=2), space=read_space(space))
    events: list[StudyEvent] = []
    assert len(tune(config, on_event=events.append, settings={"test_seeds": 1}).trials) == 2
    notes = [line for event in events if isinstance(event, StudyStarted) for line in event.notes]
    assert [line.startswith(note) for line in notes] == ([True] if note else [])
    assert len(load_study(tmp_path / "s").config.notes) == len(notes)


def test_a_study_is_ended_by_stop_resumed_and_extended(tmp_path: Path):
    def stop_after(count: int) -> Callable[[StudyEvent], object]:
        ended: list[TrialEnded] = []

        def on_event(event: StudyEvent) -> object:
            if isinstance(event, TrialEnded):
                ended.append(event)
            return understudy.Stop if len(ended) >= count else None

        return on_event

    quiet = tune(study(tmp_path / "quiet"), trials=9)
    folder = tmp_path / "s"
    stopped = tune(study(folder), trials=6, on_event=stop_after(2))
    assert (len(stopped.trials), stopped.ended) == (2, "")
    resumed = tune(out=folder, resume=True)
    assert (len(resumed.trials), resumed.ended) == (6, "all 6 trials")
    extended = tune(out=folder, resume=True, trials=9)
    assert timeless(extended.trials) == timeless(quiet.trials)
    with pytest.raises(ConfigError, match="give more to extend it"):
        tune(out=folder, resume=True, trials=3)


def test_another_study_or_no_study_in_the_folder_is_refused(tmp_path: Path):
    folder = tmp_path / "s"
    tune(study(folder), trials=1)
    with pytest.raises(ConfigError, match="another one: seed is 4 here and 0 in the study; resume"):
        tune(study(folder, seed=4), trials=1, out=folder, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty; give another folder, or resume"):
        tune(study(folder), out=tmp_path / "other")
    with pytest.raises(ConfigError, match="is not a study"):
        tune(out=tmp_path / "none", resume=True)
    with pytest.raises(ConfigError, match="no study was given"):
        tune()
    assert tune(study(folder), trials=1).folder == tmp_path / "s-2"


@pytest.mark.parametrize(
    ("engine", "module", "extra"),
    [("ray", "ray", "understudy[ray]"), ("spark", "pyspark", "understudy[spark]")],
)
def test_an_engine_without_its_package_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, module: str, extra: str
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=re.escape(f"pip install '{extra}'")):
        tune(study(tmp_path / "s"), out=tmp_path / "s", settings={"engine": engine})
    assert not (tmp_path / "s").exists()


def test_a_study_that_could_not_resume_on_another_engine_resumes_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = study(tmp_path, max_trials=4)
    quiet = tune(study(tmp_path / "quiet", max_trials=4), out=tmp_path / "quiet")
    monkeypatch.setitem(sys.modules, "ray", None)
    place = {"engine": "ray", "address": "head:6379"}
    tune(config, out=tmp_path / "s", on_event=stop_after(2))
    with pytest.raises(MissingExtra):
        tune(config, out=tmp_path / "s", resume=True, settings=place)
    resumed = tune(out=tmp_path / "s", resume=True)
    assert timeless(resumed.trials) == timeless(quiet.trials)


def stop_after(trial_no: int) -> Callable[[StudyEvent], Any]:
    return lambda event: (
        understudy.Stop
        if isinstance(event, TrialEnded) and event.row.trial.trial_no == trial_no
        else None
    )


def test_a_study_in_use_by_another_process_is_refused(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("understudy.tuning.tune.LOCK_S", 0.0)
    folder = tmp_path / "s"
    tune(study(folder), trials=1)
    with (
        FileLock(folder / ".lock", what="the test"),
        pytest.raises(Locked, match="the study is in use"),
    ):
        tune(out=folder, resume=True, trials=2)


def test_a_study_of_the_original_file_also_writes_its_result_file(tmp_path: Path):
    config = study(
        tmp_path / "s",
        config={
            "mdl_file": str(tmp_path / "models" / "dqn"),
            "class": "DQN",
            "environment": "CartPole-v1",
            "settings": {"batch_size": 32},
            "is_rliable": True,
        },
        max_trials=3,
    )
    result = tune(config)
    (path,) = (tmp_path / "models").iterdir()
    assert path.name.startswith("single_cv-")
    written = json.loads(path.read_text())
    assert list(written) == ["0", "1", "2"]
    assert set(written["1"]) == {"class", "environment", "mdl_file", "hp_params", "metric"}
    assert written["1"]["metric"] == result.trials[1].result.metrics["reward"]
    assert written["1"]["hp_params"] == {"batch_size": 32, **result.trials[1].trial.values}


_IMPORTS = """
import sys
from pathlib import Path
from tests.tuning.cheap import study
from understudy.tuning.tune import tune
tune(study(Path(sys.argv[1])), trials=2)
assert not {"jax", "gymnasium", "scipy", "torch"} & set(sys.modules), sorted(sys.modules)
"""


def python(script: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        **options,
    )


def test_the_process_of_a_study_imports_no_jax_and_no_gymnasium(tmp_path: Path):
    with python(_IMPORTS, str(tmp_path / "s")) as process:
        assert process.wait() == 0


@pytest.mark.parametrize("changes", [{"slots": 0}, {"slots": -1}, {"trials": 0}, {"trials": -1}])
def test_a_resumed_study_refuses_numbers_below_1(tmp_path: Path, changes: dict[str, int]):
    tune(study(tmp_path / "s", max_trials=2))
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=rf"{name} is {value}"):
        tune(out=tmp_path / "s", resume=True, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 9}, "seed"),
        ({"settings": {"lag": 4, "nonsense": 1}}, "lag and nonsense"),
        ({"level": 2}, "level"),
    ],
)
def test_what_a_resumed_study_keeps_cannot_be_changed(tmp_path: Path, changes: Any, named: str):
    tune(study(tmp_path / "s", max_trials=2))
    with pytest.raises(ConfigError, match=f"a resumed study keeps its {named}; omit it"):
        tune(out=tmp_path / "s", resume=True, **changes)


# --- Chaos ----------------------------------------------------------------------------------------


def chaos_study(folder: Path) -> StudyConfig:
    return study(
        folder,
        Fragile,
        config={"reports": 4},
        max_trials=60,
        seed=3,
        search=SearchConfig(lag=6),
        stopping=ASHA,
        slots=SlotsConfig(slots=2),
    )


def forked_tune(folder: Path) -> int:
    """The id of a process that starts or resumes the study of chaos."""
    if pid := os.fork():
        return pid
    try:
        tune(chaos_study(folder), out=folder, resume=True, oversubscribe=True)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_study_killed_at_random_moments_ends_with_the_table_of_the_quiet_one(tmp_path: Path):
    quiet = rows_of(chaos_study(tmp_path / "quiet"), tmp_path / "quiet")
    folder = tmp_path / "s"
    folder.mkdir()
    watch = FolderWatch()
    assert watch.watch([str(folder)])
    rng = random.Random(5)
    status = -1
    n_kills = 0
    size = 0
    while status:
        # At a random byte of the journal, not at a random time that a slow machine changes.
        kill_at = size + rng.randrange(4_000) if n_kills < 6 else None
        pid = forked_tune(folder)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            size = _size(folder / NAME)
            if kill_at is not None and size >= kill_at:
                os.kill(pid, signal.SIGKILL)
                n_kills += 1
                ended = os.waitpid(pid, 0)
                break
            watch.wait(threading.Event(), 0.2)
        status = ended[1]
        assert status in (0, signal.SIGKILL)
    watch.close()
    assert n_kills >= 5
    assert timeless(load_study(folder).trials) == timeless(quiet)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_slot_killed_again_and_again_loses_and_doubles_no_trial(tmp_path: Path):
    def config(folder: Path) -> StudyConfig:
        search = SearchConfig(lag=5)
        return study(folder, config={"reports": 4}, max_trials=30, search=search, stopping=ASHA)

    kills = 0

    def on_event(event: StudyEvent) -> None:
        nonlocal kills
        if isinstance(event, Report) and event.trial_no % 8 == 3 and event.step == 1:
            kills += _kill_slots_once(tmp_path / "s", event.trial_no)

    result = tune(config(tmp_path / "s"), slots=1, on_event=on_event)
    assert kills == 4
    assert [row.trial.trial_no for row in result.trials] == list(range(30))
    assert timeless(result.trials) == timeless(
        rows_of(config(tmp_path / "quiet"), tmp_path / "quiet")
    )


def _kill_slots_once(folder: Path, trial_no: int) -> int:
    """Kill the processes of slots, unless that was done for this trial; how many were killed."""
    mark = folder / f"killed-{trial_no}"
    if mark.exists():
        return 0
    mark.touch()
    killed = 0
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"understudy.tuning.slots" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                killed += 1
    return killed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_setting_of_slots_and_rollout_workers_hangs(tmp_path: Path):
    rng = random.Random(1)
    for number in range(200):
        slots = SlotsConfig(slots=rng.randint(1, 3), rollout_workers=rng.randint(0, 3))
        config = study(tmp_path / str(number), max_trials=3, slots=slots)
        assert len(tune(config, oversubscribe=True).trials) == 3
