"""understudy tune, as a new user and a user of the original type it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import understudy
from understudy.cli.root import run
from understudy.cli.tune import StudyProgress, _progress_bar, _progress_line
from understudy.core.log import FileLock
from understudy.tuning.journal import Row
from understudy.tuning.study import SlotEnded, StudyStarted, TrialEnded, TrialStarted
from understudy.tuning.trial import Metric, Trial, TrialResult
from understudy.tuning.tune import LOCK, tune


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A grid file of the original, with its base file."""
    (tmp_path / "rows.json").write_text('{"x": 1}\n{"x": 2}\n')
    base = {
        "class": "tests.tuning.cheap:Model",
        "environment": "rows.json",
        "mdl_file": str(tmp_path / "models" / "count"),
        "hp_params": {"best": 0.25},
    }
    study = {
        "config": "base.json",
        "optim_name": "Small",
        "num_workers": 2,
        "grid": {"x": {"min": 0.0, "max": 1.0}},
        "metric": {"name": "reward", "criteria": "max"},
        "max_iters": 6,
    }
    (tmp_path / "base.json").write_text(json.dumps(base))
    (tmp_path / "grid.json").write_text(json.dumps(study))
    return tmp_path / "grid.json"


def last_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("form", ["positional", "option", "parallel"])
def test_the_forms_of_the_original_run_its_file(
    grid: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    words = {
        "positional": [str(grid)],
        "option": ["--optim-config", str(grid)],
        "parallel": ["--parallelized", "--plevel=1", str(grid)],
    }[form]
    assert run(["tune", *words, "--json"]) == 0
    fields = last_json(capsys)
    assert len(fields["trials"]) == 6
    best = fields["trials"][fields["best"]]
    assert best["metrics"]["reward"] == max(
        trial["metrics"]["reward"] for trial in fields["trials"] if trial["state"] == "done"
    )
    (results,) = (grid.parent / "models").glob("*_cv*.json")
    assert results.name.startswith("parallel_cv_2-" if form == "parallel" else "single_cv-")
    assert len(json.loads(results.read_text())) == 6


def test_a_study_is_run_shown_resumed_and_extended(grid: Path, capsys: pytest.CaptureFixture[str]):
    out = str(grid.parent / "S")
    assert run(["tune", str(grid), "--trials", "4", "--seed", "1", "--out", out]) == 0
    text = capsys.readouterr().out
    assert "4 trials on 1 slot, max reward" in text
    assert "4 trials, 1 failed; all 4 trials" in text
    assert run(["tune", "show", out]) == 0
    assert out in capsys.readouterr().out
    assert run(["tune", "resume", out, "--trials", "7", "--json"]) == 0
    assert len(last_json(capsys)["trials"]) == 7
    assert run(["tune", "show", out, "--json"]) == 0
    assert last_json(capsys)["ended"] == "all 7 trials"
    assert run(["tune", "--resume", str(grid), "--seed", "1", "--out", out, "--json"]) == 0
    assert len(last_json(capsys)["trials"]) == 7


def test_a_study_is_drawn_and_exported(grid: Path, capsys: pytest.CaptureFixture[str]):
    out = str(grid.parent / "[S]")
    assert run(["tune", str(grid), "--trials", "4", "--seed", "1", "--out", out]) == 0
    page = grid.parent / "[new]" / "report.html"
    png = grid.parent / "png"
    capsys.readouterr()
    assert run(["tune", "show", out, "--html", str(page), "--png", str(png)]) == 0
    text = capsys.readouterr().out
    for path in (page, *(png / f"{name}.png" for name in ("history", "slices", "slots"))):
        assert f"wrote   {path}" in text
        assert path.stat().st_size > 1000
    table = grid.parent / "trials.csv"
    assert run(["tune", "export", out, "--csv", str(table), "--json"]) == 0
    assert last_json(capsys) == {"trials": 4, "csv": str(table)}
    assert len(table.read_text().splitlines()) == 5
    assert run(["tune", "export", out]) == 2
    assert "give --csv FILE or --optuna FILE" in capsys.readouterr().err


def test_a_study_is_exported_for_optuna_once(grid: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("optuna", reason="the extra `optuna` is not installed")
    out = str(grid.parent / "S")
    assert run(["tune", str(grid), "--trials", "2", "--out", out]) == 0
    target = grid.parent / "trials.log"
    assert run(["tune", "export", out, "--optuna", str(target)]) == 0
    assert f"open it with: optuna-dashboard {target}" in capsys.readouterr().out
    assert run(["tune", "export", out, "--optuna", str(target)]) == 2
    assert "already has a study named 'Small'" in capsys.readouterr().err


def test_settings_of_a_study_are_set_by_flags(grid: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--search", "sobol", "--stop", "median", "--legacy-convergence", "--set", "lag=3"]
    assert run(["tune", str(grid), *words, "--json"]) == 0
    study = last_json(capsys)["study"]
    assert study["search"]["method"] == "sobol"
    assert study["search"]["lag"] == 3
    assert study["stopping"]["rule"] == "median"
    assert study["convergence"]["is_legacy"] is True
    assert run(["tune", str(grid), "--search", "sobol", "--set", "method=grid"]) == 2
    assert "method is set twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "1"], "no study was given"),
        (["grid.json", "--optim-config", "grid.json"], "given twice"),
        (["none.json"], "none.json"),
        (["grid.json", "--search", "sobel"], "sobol"),
        (["grid.json", "--slots", "5000"], "slots"),
        (["grid.json", "--plevel", "3"], "3 is not in the range"),
        (["grid.json", "--engine", "cloud"], "give one of local, ray, spark"),
        (["grid.json", "--address", "head:6379"], "the engine local has none"),
        (["grid.json", "--engine", "spark", "--set", "engine=ray"], "engine is set twice"),
        (["grid.json", "--engine", "spark", "--plevel", "2"], "rollout_workers is 2, but a Spark"),
        (["show", "none"], "none is not a study"),
        (["shw", "none"], "no such command or file 'shw'; did you mean 'show'?"),
        (["resume", "none"], "none is not a study"),
        (["show", "none", "--html", "x.html"], "none is not a study"),
        (["export", "none", "--csv", "x.csv"], "none is not a study"),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_leaves_nothing(
    grid: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
):
    monkeypatch.chdir(grid.parent)
    before = sorted(grid.parent.rglob("*"))
    assert run(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert sorted(grid.parent.rglob("*")) == before


def test_the_help_has_options_commands_and_examples(capsys: pytest.CaptureFixture[str]):
    assert run(["tune", "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("Usage: understudy tune [OPTIONS] [FILE]", "--optim-config", "resume", "export",
                 "understudy tune config/optim_dqn.json --parallelized --plevel 1"):  # fmt: skip
        assert part in text


def test_ctrl_c_ends_the_slots_and_names_the_command_that_resumes(grid: Path):
    base = json.loads((grid.parent / "base.json").read_text())
    base["class"] = "tests.tuning.cheap:Slow"
    (grid.parent / "base.json").write_text(json.dumps(base))
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    out = grid.parent / "S"
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "understudy.cli.main",
            "tune",
            str(grid),
            "--out",
            str(out),
            "--json",
        ],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if b"0 of 6 trials" in line:
                break
        process.send_signal(signal.SIGINT)
        fields = json.loads(process.stdout.read().splitlines()[-1])
        error = process.stderr.read().decode()
    assert process.returncode == 130
    assert fields["next"] == f"understudy tune resume {out}"
    assert f"resume with: understudy tune resume {out}" in error
    assert json.loads((out / "study.json").read_text())["ended"] == ""


def test_the_view_shows_progress_the_time_left_and_the_incumbent():
    now = [0.0]
    progress = StudyProgress(now=lambda: now[0])
    assert "? trials" in _progress_line(progress)
    rows = [_row(number) for number in range(4)]
    progress.handle_event(
        StudyStarted(
            folder="S",
            name="x",
            max_trials=10,
            metric=Metric(),
            rows=rows[:2],
            best=rows[1],
            slots=1,
            is_test=False,
            notes=(),
        )
    )
    assert "best reward 1 (trial 1)" in _progress_line(progress)
    progress.handle_event(TrialStarted(trial=rows[2].trial, slot=0))
    now[0] = 60.0  # it compiles
    progress.handle_event(TrialEnded(row=rows[2], is_best=True))
    progress.handle_event(TrialStarted(trial=rows[3].trial, slot=0))
    assert _progress_line(progress) == "3 of 10 trials; best reward 2 (trial 2)"
    now[0] = 65.0
    failed = TrialResult(trial_no=3, state="failed", error="no")
    progress.handle_event(TrialEnded(row=Row(rows[3].trial, failed), is_best=False))
    line = _progress_line(progress)
    assert line == "4 of 10 trials, 1 failed; best reward 2 (trial 2); 30 s left"
    view = Console(width=120, force_terminal=True)
    with view.capture() as captured:
        view.print(_progress_bar(progress))
    assert "30 s left" in captured.get()
    assert progress.started is not None
    progress.started = replace(progress.started, limit_s=80.0)
    assert _progress_line(progress).endswith("; 15 s left")
    progress.handle_event(replace(progress.started, is_test=True))
    assert "; the best trials again, on held-out seeds" in _progress_line(progress)


def test_the_time_left_is_that_of_the_slots_together_without_their_starts():
    """Two slots compile for 60 s; trials then take 10 s."""
    now = [0.0]
    progress = StudyProgress(now=lambda: now[0])
    started = StudyStarted(
        folder="S", name="x", max_trials=12, metric=Metric(), rows=(), best=None, slots=2,
        is_test=False, notes=(),
    )  # fmt: skip

    def started_and_ended(first: int) -> None:
        for slot in (0, 1):
            progress.handle_event(TrialStarted(trial=_row(first + slot).trial, slot=slot))
        now[0] += 10.0 if first else 60.0
        for slot in (0, 1):
            progress.handle_event(TrialEnded(row=_row(first + slot), is_best=False))

    for _ in ("search", "test"):  # each has slots of its own
        progress.handle_event(started)
        started_and_ended(0)
        assert "left" not in _progress_line(progress)
        started_and_ended(2)
        assert progress.remaining_s == 40.0
        progress.handle_event(TrialStarted(trial=_row(4).trial, slot=0))
        now[0] += 4.0
        assert progress.remaining_s == 38.0
        progress.handle_event(SlotEnded(slot=0, why="it was killed"))
        progress.handle_event(TrialStarted(trial=_row(4).trial, slot=0))
        now[0] += 70.0  # it compiles again
        progress.handle_event(TrialEnded(row=_row(4), is_best=False))
        assert progress.remaining_s == 35.0


def test_a_running_study_is_shown_as_running(grid: Path, capsys: pytest.CaptureFixture[str]):
    out = grid.parent / "S"
    tune(str(grid), out=out, trials=50, on_event=lambda event: understudy.Stop)
    with FileLock(out / LOCK, what="the study"):
        assert run(["tune", "show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "of 50 trials; running" in text
    assert "next:" not in text
    assert "no trial can be the best" not in text
    assert run(["tune", "show", str(out)]) == 0
    assert "of 50 trials; not finished" in (text := capsys.readouterr().out)
    assert f"next: understudy tune resume {out}" in text


def test_a_study_without_a_best_trial_exits_with_1(grid: Path, capsys: pytest.CaptureFixture[str]):
    base = json.loads((grid.parent / "base.json").read_text())
    base["class"] = "tests.tuning.classes:Answers"
    base["hp_params"] = {"raise_in": "train"}
    (grid.parent / "base.json").write_text(json.dumps(base))
    assert run(["tune", str(grid), "--out", str(grid.parent / "S")]) == 1
    assert "no trial can be the best: each one failed" in capsys.readouterr().out


def _row(number: int) -> Row:
    result = TrialResult(trial_no=number, state="done", metrics={"reward": float(number)})
    return Row(Trial(trial_no=number, values={"x": 0.0}, seed=0), result)


def test_the_winner_is_tested_shown_and_compared(
    grid: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    for name, seed in (("A", "1"), ("B", "2")):
        words = ["--set", "test_seeds=5", "--seed", seed, "--out", str(tmp_path / name)]
        assert run(["tune", str(grid), *words]) == 0
        text = capsys.readouterr().out
        assert "held-out seeds" in text
        assert "no winner yet" in text or "is better than" in text
        assert "the search's number" in text
    names = [str(tmp_path / name) for name in ("A", "B")]
    assert run(["tune", "compare", *names]) == 0
    assert "with probability" in capsys.readouterr().out
    assert run(["tune", "compare", *names, "--json"]) == 0
    fields = last_json(capsys)
    assert 0 <= fields["probability"]["low"] <= fields["probability"]["value"] <= 1
    scores = [len(each["scores"]) for each in fields["studies"][0]["test"]["finalists"]]
    assert scores == [5, 5]
    assert run(["tune", "compare", names[0], str(tmp_path)]) == 2
    assert "is not a study" in capsys.readouterr().err
    assert run(["train", "CartPole-v1", "--preset", names[0]]) == 2
    assert "a folder without best.toml" in capsys.readouterr().err
