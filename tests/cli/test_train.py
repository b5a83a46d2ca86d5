"""understudy train and understudy evaluate, as a new user types them."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import understudy
from tests.platform.switches import GAME, QUICK
from tests.training.test_engines import actor_pids
from understudy.act.remote_team import RemoteTeam
from understudy.cli.root import run
from understudy.cli.train import process_age_s
from understudy.cli.training_view import (
    RunProgress,
    format_duration,
    init_from_line,
    progress_line,
    progress_table,
    run_view,
)
from understudy.core.errors import StorageFull
from understudy.core.log import is_locked
from understudy.experience.spaces import Box
from understudy.training.evaluation import Evaluator
from understudy.training.events import (
    CheckpointSaved,
    Compiling,
    EpisodeEnded,
    Evaluation,
    Event,
    Guarded,
    InitFrom,
    Started,
    Update,
)
from understudy.training.folder import RunFolder
from understudy.training.inline import Inline

SETS = [word for name, value in QUICK.items() for word in ("--set", f"{name}={value}")]
PROMISED = {
    "solved",
    "return_mean",
    "episodes",
    "env_steps",
    "updates",
    "train_s",
    "compile_s",
    "startup_s",
    "resumed_at_step",
    "env_class",
    "run",
}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("cli") / "R")
    assert (
        run(["train", GAME, "--seed", "3", "--steps", "1024", "--out", out, *SETS, "--json"]) == 0
    )
    return out


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    found = run(words)
    told = capsys.readouterr()
    assert found == code, told.err
    return told.out, told.err


# --- train ----------------------------------------------------------------------------------------


def test_standard_output_is_json_only(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = [
        "--algorithm",
        "dqn",
        "--seed",
        "0",
        "--until",
        "9",
        "--out",
        str(tmp_path / "R"),
        "--json",
    ]
    out, err = said(capsys, "train", GAME, *words, *SETS)
    fields = json.loads(out)
    assert out.count("\n") == 1
    assert fields.keys() >= PROMISED
    assert fields["solved"] is True
    assert fields["return_mean"] >= 9
    assert fields["episodes"] == 100
    assert fields["env_class"] == "tests.platform.switches:Switches"
    assert fields["startup_s"] > 0.2  # from the start of the process, which has imported JAX since
    assert "compiling" in err
    assert "return" in err


def test_the_text_output_has_progress_a_summary_and_the_next_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    out, err = said(capsys, "train", GAME, "--steps", "512", *SETS)
    run_folder = "runs/tests.platform.switches-Switches-v0-ppo-1"
    lines = out.splitlines()
    assert lines[0] == f"{GAME}, ppo, seed 0: run {run_folder}"
    assert lines[1] == (
        "schedules span 100 000 steps, this run 512: learning_rate ends at 0.000995, not 0, clip "
        "ends at 0.199, not 0; fit them to the run with --set horizon=512"
    )
    assert lines[2] == "compiling ..."
    assert f"policy  {run_folder}/best.safetensors" in lines
    assert f"next: understudy evaluate {run_folder} --episodes 100 --seeds 10" in lines
    assert err == ""
    out, _ = said(capsys, "train", GAME, "--steps", "256", "--until", "11", *SETS)
    assert "run runs/tests.platform.switches-Switches-v0-ppo-2" in out
    assert "not solved: return" in out


def test_settings_come_from_files_and_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "mine.toml").write_text(
        'algorithm = "dqn"\n[config]\nbatch = 32\n[knobs]\nlearning_rate = 1e-4\n'
    )
    out, _ = said(
        capsys,
        "train",
        GAME,
        "--config",
        str(tmp_path / "mine.toml"),
        "--set",
        "learning_rate={start=1e-2,end=1e-3}",
        "--network",
        "8,8",
        "--env-kwargs",
        '{"presses": 3}',
        "--frame-skip",
        "2",
        "--wrapper",
        "tests.platform.switches:Brighter",
        "--eval-every",
        "256",
        "--keep-history",
        "--steps",
        "512",
        "--out",
        str(tmp_path / "R"),
        *SETS,
        "--json",
    )
    assert json.loads(out)["algorithm"] == "dqn"
    assert json.loads(out)["return_mean"] <= 3
    preset = (tmp_path / "R" / "preset.toml").read_text()
    for told in (
        "batch = 32",
        "widths = [8, 8]",
        "start = 0.01, end = 0.001",
        "eval_every = 256",
        "keep_history = true",
        "steps = 512",
    ):
        assert told in preset
    assert (tmp_path / "R" / "curve.csv").read_text().count("\n") == 3


def test_resuming_a_finished_run_returns_its_result(
    capsys: pytest.CaptureFixture[str], trained: str
):
    out, _ = said(
        capsys,
        "train",
        GAME,
        "--seed",
        "3",
        "--steps",
        "1024",
        "--out",
        trained,
        *SETS,
        "--json",
        "--resume",
    )
    assert json.loads(out) == json.loads((Path(trained) / "result.json").read_text())
    out, _ = said(capsys, "train", "--resume", "--out", trained)
    assert "policy  " in out
    _, err = said(capsys, "train", GAME, "--resume", "--out", trained, "--seed", "4", code=2)
    assert "was started with seed 3, not 4; omit it" in err


def test_several_seeds_make_several_runs_and_one_summary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out, _ = said(
        capsys, "train", GAME, "--seeds", "2", "--steps", "256", "--out", str(tmp_path / "S"), *SETS
    )
    assert "0 of 2 seeds solved: IQM of returns" in out
    assert "no interval below 5 seeds" in out
    out, _ = said(
        capsys,
        "train",
        GAME,
        "--seeds",
        "2",
        "--steps",
        "256",
        "--out",
        str(tmp_path / "S"),
        *SETS,
        "--resume",
        "--json",
    )
    fields = json.loads(out)
    assert fields.keys() >= PROMISED | {"return_iqm", "return_low", "return_high"}
    assert [one["run"] for one in fields["runs"]] == [
        str(tmp_path / "S" / f"seed-{seed}") for seed in (0, 1)
    ]


def test_a_run_from_another_ones_policy_and_a_video(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: str
):
    words = ["--init-from", trained, "--steps", "256", "--video", "1", "--out", str(tmp_path / "R")]
    out, _ = said(capsys, "train", GAME, *words, *SETS)
    assert f"from {trained}: all 6 weights fit" in out
    assert f"video   {tmp_path}/R/videos/episode-1.gif" in out


def test_list_shows_every_setting_with_default_range_and_help(capsys: pytest.CaptureFixture[str]):
    out, _ = said(capsys, "train", "--list")
    names = ["bc", "dqn", "iql", "ppo"]
    assert [name for name in names if f"\n{name}  " in "\n" + out] == names
    assert "n_step 3 1 to 100 steps per transition" in [
        " ".join(line.split()) for line in out.splitlines()
    ]
    assert "presets: " in out
    assert "one of apex, bc, dqn, iql, ppo: --preset apex" in out
    assert "double true true or false the online network" in " ".join(out.split())
    out, _ = said(capsys, "train", "--list", "--json")
    fields = json.loads(out)
    assert list(fields["algorithms"]) == names
    assert fields["preset_families"] == ["apex", *names]
    parts = [one[part] for one in fields["algorithms"].values() for part in ("config", "knobs")]
    for row in (row for part in (*parts, fields["run"], fields["learner"]) for row in part):
        assert row["says"], row
        # A word, a list and a return have no range; all others have a default too.
        words = ("activation", "centre", "network", "replay", "symmetry", "until", "widths")
        if row["name"] not in words:
            assert row["default"] is not None, row
            assert row["is_switch"] or row["low"] < row["high"], row
    out, _ = said(capsys, "train", "--list", "--algorithm", "dqn", "--json")
    assert list(json.loads(out)["algorithms"]) == ["dqn"]
    out, _ = said(capsys, "train", "--list", "--algorithm", "bc")
    assert "best_share 1 0.001 to 1 share of the recorded episodes" in " ".join(out.split())
    _, err = said(capsys, "train", "--list", "--algorithm", "dqq", code=2)
    assert "did you mean 'dqn'" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no game given"),
        (["--from-store", "D"], "understudy train GAME --from-store D"),
        (["CartPole-v2"], "did you mean CartPole-v1"),
        ([GAME, "--algorithm", "ppoo"], "did you mean 'ppo'"),
        ([GAME, "--preset", "ppo-vektor"], "did you mean 'ppo-vector'"),
        ([GAME, "--config", "none.toml"], "none.toml cannot be read"),
        ([GAME, "--set", "learning_rate"], "give NAME=VALUE"),
        ([GAME, "--set", "=3"], "give NAME=VALUE"),
        (
            [GAME, "--set", "learning_rate=1", "--set", " learning_rate =2"],
            "--set learning_rate is given twice, as '1' and '2'; give it once",
        ),
        ([GAME, "--set", "lerning_rate=1"], "did you mean 'learning_rate'"),
        ([GAME, "--set", "learning_rate=many"], "learning_rate is 'many'; give a number"),
        ([GAME, "--network", "64,big"], "such as 64,64"),
        ([GAME, "--wrapper", "nowhere:Wrapper"], "cannot be imported"),
        ([GAME, "--wrapper", "json:dumps"], "check wrappers"),
        ([GAME, "--env-kwargs", "{"], "--env-kwargs is not valid JSON"),
        ([GAME, "--env-kwargs", "3"], "give a JSON object"),
        ([GAME, "--env-kwargs", '{"nope": 1}'], "does not accept"),
        ([GAME, "--frame-skip", "0"], "frame_skip is 0"),
        ([GAME, "--actors", "0"], "actors is 0"),
        ([GAME, "--eval-every", "0"], "eval_every is 0"),
        ([GAME, "--actors", "2", "--set", "actors=4"], "actors is set twice"),
        (
            [GAME, "--engine", "dask"],
            "engine is 'dask'; give one of inline, process, ray and workers",
        ),
        ([GAME, "--frame-skip", "x"], "is not a valid integer"),
        ([GAME, "--seed", "-1"], "seed is -1"),
        ([GAME, "--seed", "one"], "is not a valid integer"),
        ([GAME, "--seeds", "0"], "seeds is 0"),
        ([GAME, "--until", "nan"], "until is nan"),
        ([GAME, "--until", "high"], "is not a valid float"),
        ([GAME, "--steps", "0"], "steps is 0"),
        ([GAME, "--eval-every", "-5"], "eval_every is -5"),
        ([GAME, "--init-from", "nowhere"], "has no policy"),
        ([GAME, "--from-store", "nowhere"], "nowhere contains no store"),
        ([GAME, "--resume"], "no run to resume was given"),
        ([GAME, "--resume", "--seeds", "2"], "no runs to resume were given; pass their folder"),
        (["--resume", "--out", "nowhere"], "nowhere is not a run"),
        ([GAME, "--video", "-1"], "video is -1"),
        ([GAME, "--log", "paper"], "give one or more of mlflow, tensorboard, wandb"),
        ([GAME, "--lst"], "--lst"),
        (
            [GAME, "--algorithm", "ppo", "--preset", "dqn-vector"],
            "algorithm is for ppo, and preset dqn-vector for",
        ),
        (["Pendulum-v1", "--algorithm", "dqn"], "use ppo"),
        (
            [GAME, "--algorithm", "bc", "--set", "symmetry=rows 1,0"],
            "symmetry is 'rows 1,0', but no centre is set",
        ),
    ],
)
def test_wrong_use_is_rejected_in_one_message_and_leaves_nothing(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    out, err = said(capsys, "train", *words, code=2)
    assert told in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_missing_renderer_or_log_package_is_rejected_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for package in ("wandb", "pygame"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("understudy.training.sinks.SINKS", {"wandb": ("no_such_package", None)})
    assert (
        "pip install 'understudy[wandb]'"
        in said(capsys, "train", GAME, "--log", "wandb", code=2)[1]
    )
    assert "pygame" in said(capsys, "train", "CartPole-v1", "--video", "1", code=2)[1]
    assert list(tmp_path.iterdir()) == []


def test_modules_in_the_current_folder_can_be_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "dimmer_of_mine.py").write_text(
        "from tests.platform.switches import Brighter as Dimmer\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    said(
        capsys,
        "train",
        GAME,
        "--wrapper",
        "dimmer_of_mine:Dimmer",
        "--steps",
        "256",
        "--out",
        "R",
        *SETS,
    )
    seen = RunFolder(Path("R")).policy().game.obs[""]
    assert isinstance(seen, Box)
    assert seen.high == 2.0  # the wrapper's own, twice the game's


def test_a_run_on_rewards_that_are_no_numbers_ends_with_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    words = ["--wrapper", "tests.platform.switches:Unpaid", "--steps", "512"]
    _, err = said(capsys, "train", GAME, *words, "--out", str(tmp_path / "R"), *SETS, code=3)
    assert "nothing was learned: 16 chunks were rejected and 0 updates skipped" in err
    assert "Traceback" not in err
    assert not (tmp_path / "R" / "result.json").exists()


def test_how_many_episodes_were_cloned_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    played = str(tmp_path / "P")
    said(capsys, "train", GAME, "--steps", "512", "--algorithm", "dqn", "--out", played, *SETS)
    options = ["--algorithm", "bc", "--from-store", played, "--set", "best_share=0.25"]
    out, _ = said(
        capsys, "train", GAME, *options, "--steps", "200", "--out", str(tmp_path / "R"), *SETS
    )
    result = RunFolder(tmp_path / "R").result()
    assert result is not None
    n_best, n_known = (result[f"{name}_episodes"] for name in ("best", "known"))
    assert 0 < n_known / 4 <= n_best <= n_known
    assert f"\ncloned the best {n_best} of {n_known} whole episodes\n" in out


def test_cut_episodes_are_told_by_train_and_by_evaluate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    run_folder = str(tmp_path / "R")
    out, _ = said(
        capsys,
        "train",
        GAME,
        "--env-kwargs",
        '{"presses": 1000000000}',
        "--set",
        "eval_max_steps=20",
        "--steps",
        "256",
        "--out",
        run_folder,
        *SETS,
    )
    assert ", 5 of 5 episodes cut" in out
    assert (
        "100 of 100 episodes had not ended and were cut after 20 steps; change that with --set "
        "eval_max_steps=N" in out
    )
    words = ["--episodes", "3", "--seeds", "2"]
    out, _ = said(capsys, "evaluate", run_folder, *words)
    assert "6 episodes had not ended and were cut after 20 steps" in out
    out, _ = said(capsys, "evaluate", run_folder, *words, "--max-steps", "9", "--json")
    fields = json.loads(out)
    assert (fields["cut"], fields["max_steps"]) == (6, 9)


def test_one_update_is_called_one(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    text, _ = said(
        capsys,
        "train",
        GAME,
        "--algorithm",
        "ppo",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "R"),
        *SETS,
    )
    assert " steps and 1 update in " in text


def test_what_the_game_prints_is_not_in_the_json(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    out = str(tmp_path / "R")
    words = ["train", "tests.platform.switches:Chatty-v0", "--algorithm", "dqn", "--steps", "256"]
    words += ["--engine", "process", "--actors", "2", "--out", out, *SETS]
    for command in (words, ["evaluate", out, "--episodes", "2", "--seeds", "1"]):
        text, err = said(capfd, *command, "--json")
        assert json.loads(text)["episodes"] in (100, 2)
        assert text.count("\n") == 1
        assert "Hello" in err
        assert "from C" in err
    # Afterwards, standard output is the caller's again.
    os.write(1, b"below ")
    print("Python", flush=True)
    assert capfd.readouterr().out == "below Python\n"


def test_what_the_game_prints_when_the_process_ends_is_not_in_the_json():
    words = ["games", "check", "tests.platform.switches:Polite-v0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "understudy.cli.main", *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["game"]
    assert done.stderr.endswith("Goodbye")


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_prints_the_resume_command_and_leaves_nothing_half_done(number: int, tmp_path: Path):
    out = tmp_path / "R"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "understudy.cli.main",
            "train",
            GAME,
            "--algorithm",
            "dqn",
            "--out",
            str(out),
            "--steps",
            "100000000",
            *SETS,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    deadline = time.monotonic() + 90
    while len(list(out.glob("checkpoints/*.safetensors"))) < 2:
        assert time.monotonic() < deadline, "no checkpoint came"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    assert is_locked(out / ".lock")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume with: understudy train --resume --out {out}" in err
    assert "Traceback" not in err
    saved = max(int(path.stem) for path in out.glob("checkpoints/*.safetensors"))
    assert f", the last checkpoint is at step {saved}; resume with" in err
    assert not is_locked(out / ".lock")
    assert not list(out.rglob("*.tmp"))
    stop = lambda event: understudy.Stop if isinstance(event, Update) else None  # noqa: E731
    assert understudy.train(out=out, resume=True, on_event=stop).result["resumed_at_step"] > 0


def tiny_words(out: Path, *more: str) -> list[str]:
    """A short run whose only checkpoints of its own are those of its first and last rounds."""
    sets = ["envs=4", "actors=2", "min_inserts=200", "eval_every=500", "eval_episodes=5", *more]
    sets += ["checkpoint_every=1000000"]
    words = ["train", GAME, "--algorithm", "dqn", "--steps", "1000", "--out", str(out)]
    return [*words, "--until", "inf", *(word for text in sets for word in ("--set", text))]


def interrupt(
    patch: pytest.MonkeyPatch, method: tuple[type, str], *, call: int, times: int
) -> None:
    """Let Ctrl-C be pressed, once or more, when a method is called for the `call`th time."""
    real = getattr(*method)
    calls = itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    patch.setattr(*method, interrupted)


@pytest.mark.parametrize(
    ("engine", "method", "call"),
    [
        ("inline", (Inline, "step"), 7),
        ("inline", (Evaluator, "play"), 1),
        ("process", (RemoteTeam, "collect"), 6),
    ],
)
def test_ctrl_c_saves_a_checkpoint_and_the_resumed_run_ends_with_the_same_bits(
    capsys: pytest.CaptureFixture[str],
    whole: Path,
    tmp_path: Path,
    engine: str,
    method: tuple[type, str],
    call: int,
):
    out = tmp_path / "R"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, method, call=call, times=1)
        _, err = said(capsys, *tiny_words(out), "--engine", engine, code=130)
    saved = RunFolder(out).saved_steps()
    assert saved
    assert (
        f"stopped at step {saved}, the last checkpoint is at step {saved}; resume with: "
        f"understudy train --resume --out {out}" in err
    )
    text, _ = said(capsys, "train", "--resume", "--out", str(out), "--engine", "inline", "--json")
    assert json.loads(text)["resumed_at_step"] == saved
    for name in ("best.safetensors", "last.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert curve_without_times(out) == curve_without_times(whole)
    assert not actor_pids()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "R"
    assert run(tiny_words(out)) == 0
    assert json.loads((out / "result.json").read_text())["updates"] > 16
    return out


def curve_without_times(run: Path) -> list[list[str]]:
    """The rows of a learning curve without their third column, `train_s`."""
    rows = [line.split(",") for line in (run / "curve.csv").read_text().splitlines()]
    return [row[:2] + row[3:] for row in rows]


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_ctrl_c_saves_a_checkpoint_of_an_asynchronous_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
):
    out = tmp_path / "R"
    words = tiny_words(out, "asynchronous=true")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, (Inline, "step"), call=3, times=1)
        _, err = said(capsys, *words, "--engine", engine, code=130)
    saved = RunFolder(out).saved_steps()
    assert f"stopped at step {saved}, the last checkpoint is at step {saved}; resume with" in err
    assert not actor_pids()
    text, _ = said(capsys, "train", "--resume", "--out", str(out), "--engine", "inline", "--json")
    assert json.loads(text)["resumed_at_step"] == saved


def test_a_second_ctrl_c_ends_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "R"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, (Inline, "step"), call=3, times=2)
        _, err = said(capsys, *tiny_words(out), "--engine", "process", code=130)
    assert "the last checkpoint is at step 128; resume with" in err  # that of the first round
    assert not is_locked(out / ".lock")
    assert not actor_pids()
    assert not list(out.rglob("*.tmp"))


def test_a_full_disk_prints_the_resume_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise StorageFull("no room for a checkpoint; free some space and try again")

    monkeypatch.setattr("understudy.training.training_job.Checkpoints.save", full)
    out = str(tmp_path / "R")
    _, err = said(capsys, "train", GAME, "--steps", "512", "--out", out, *SETS, code=3)
    assert f"there is no checkpoint yet; resume with: understudy train --resume --out {out}" in err
    assert (
        err.splitlines()[-1]
        == "understudy: no room for a checkpoint; free some space and try again"
    )


# --- evaluate -------------------------------------------------------------------------------------


def test_evaluate_prints_iqm_and_interval(capsys: pytest.CaptureFixture[str], trained: str):
    out, _ = said(capsys, "evaluate", trained, "--episodes", "10", "--seeds", "5", "--json")
    fields = json.loads(out)
    assert fields["low"] <= fields["iqm"] <= fields["high"]
    assert {"episodes": 10, "seeds": 5, "run": trained}.items() <= fields.items()
    out, _ = said(
        capsys, "evaluate", trained, "--episodes", "10", "--seeds", "2", "--policy", "last"
    )
    assert "no interval below 5 seed sets" in out
    assert "20 episodes of the last policy, 2 seed sets of 10 episodes each" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Missing argument"),
        (["nowhere"], "the folder nowhere does not exist"),
        (["."], "is not a run"),
        (["R", "--episodes", "0"], "episodes is 0"),
        (["R", "--seeds", "0"], "seeds is 0"),
        (["R", "--policy", "first"], "is not one of"),
    ],
)
def test_wrong_use_of_evaluate_is_rejected(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    _, err = said(capsys, "evaluate", *words, code=2)
    assert told in err


def test_usage_errors_help_and_the_list_do_not_import_jax(tmp_path: Path):
    commands = {
        "train CartPole-v1 --set nope=1": 2,
        "train CartPole-v1 --algorithm x": 2,
        "train CartPole-v1 --preset x": 2,
        "train CartPole-v1 --network a": 2,
        "train CartPole-v1 --steps -5": 2,
        "train CartPole-v2": 2,
        "train --list": 0,
        "train --help": 0,
        "evaluate --help": 0,
    }
    # All in one process, where the first import would be seen by every later command.
    code = (
        "import sys; from understudy.cli.root import run\n"
        f"for words in {list(commands)}:\n"
        "    print('ended', words, run(words.split()), 'jax' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    ends = [line for line in out.splitlines() if line.startswith("ended ")]
    assert ends == [f"ended {words} {code} False" for words, code in commands.items()]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]):
    out, _ = said(capsys, command, "--help")
    assert out.count("understudy ") >= 3


# --- the view -------------------------------------------------------------------------------------


def events() -> list[Event]:
    return [
        Started(env_steps=0, run="R", game="g", algorithm="dqn", seed=0, steps=10_000, until=9.0),
        EpisodeEnded(env_steps=500, env=0, return_=4.0, length=10),
        Compiling(env_steps=500, what="update"),
        Update(
            env_steps=1_000, updates=100, version=1, replay_ratio=8.0, lag_versions=0, metrics={}
        ),
        Update(
            env_steps=3_000, updates=300, version=2, replay_ratio=8.0, lag_versions=1, metrics={}
        ),
        Evaluation(env_steps=3_000, returns=[5.0], mean=5.0, low=4.5, high=5.5, is_best=True),
    ]


def test_progress_counts_rates_without_compiling_and_knows_what_is_left():
    now_s = iter(range(100))
    progress = RunProgress(lambda: float(next(now_s)))
    seen = []
    for event in events():
        progress.handle_event(event)
        seen.append(progress.is_compiling)
    assert seen == [False, False, True, False, False, False]
    steps_s, updates_s = progress.rates
    assert steps_s == pytest.approx(updates_s * 10)
    assert steps_s > 0
    assert progress.remaining_s == pytest.approx(7_000 / steps_s)
    assert progress.train_return == 4.0
    shown = progress_line(progress)
    for part in (
        "3 000 steps",
        "300 updates",
        "return 5.0 (4.5 to 5.5)",
        "lag 1, replay ratio 8.0",
        "left at most",
    ):
        assert part in shown


def test_a_terminal_gets_a_table_that_shows_compiling():
    progress = RunProgress()
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    with run_view(out, progress) as handle_event:
        for event in events()[:3]:
            handle_event(event)
        out.print(progress_table(progress))
        for event in events()[3:]:
            handle_event(event)
        handle_event(Guarded(env_steps=3_000, what="a chunk was refused", chunks=["s/1"]))
        out.print(progress_table(progress))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "compiling ...",
        "3 000 of 10 000",
        "5.0 (4.5 to 5.5)",
        "goal 9",
        "lag 1",
        "time left",
        "guarded",
    ):
        assert part in shown


def test_lines_are_few():
    out = Console(file=io.StringIO(), width=80)
    with run_view(out, RunProgress()) as handle_event:
        for event in [*events(), CheckpointSaved(env_steps=3_000, path="p"), *events()[1:2] * 50]:
            handle_event(event)
    assert 3 <= out.file.getvalue().count("\n") <= 5  # type: ignore[attr-defined]


def test_guards_of_a_kind_are_shown_a_few_times_and_then_counted():
    out = Console(file=io.StringIO(), width=200)
    refused = [
        Guarded(env_steps=step, what=f"a chunk was refused: {step}", chunks=["s/1"])
        for step in range(100)
    ]
    with run_view(out, RunProgress()) as handle_event:
        for event in [
            *events(),
            *refused,
            Guarded(env_steps=3_000, what="weights of step 9 restored"),
            events()[-1],
        ]:
            handle_event(event)
    told = out.file.getvalue()  # type: ignore[attr-defined]
    assert told.count("a chunk was refused") == 3
    assert told.count(" R/guarded.csv lists them all") == 1
    assert told.count("weights of step 9 restored") == 1
    assert "guarded 101 times" in told.splitlines()[-1]


def test_a_run_from_a_store_is_counted_in_updates_alone():
    started = Started(
        env_steps=64,
        run="R",
        game="g",
        algorithm="bc",
        seed=0,
        steps=10_000,
        until=None,
        is_from_store=True,
    )
    progress = RunProgress()
    out = Console(file=io.StringIO(), width=200)
    with run_view(out, progress) as handle_event:
        for event in [started, *events()[2:]]:
            handle_event(event)
    out.print(progress_table(progress))
    told = out.file.getvalue()  # type: ignore[attr-defined]
    assert "resumed at update 64" in told
    assert "3 000 of 10 000" in told
    assert "step" not in told


def test_weights_from_another_run_are_summarised_in_one_line():
    names = [f"trunk.{number}.kernel" for number in range(9)]
    assert init_from_line(InitFrom(run="S", fit=names, new=[])) == "from S: all 9 weights fit"
    some = init_from_line(InitFrom(run="S", fit=names[:7], new=names[7:]))
    assert some == "from S: 7 of 9 weights fit; new: trunk.7.kernel, trunk.8.kernel"
    assert init_from_line(InitFrom(run="S", fit=[], new=names)).endswith(
        "trunk.5.kernel and 3 more"
    )
    unused = init_from_line(InitFrom(run="S", fit=names[:6], new=[], unused=names[6:]))
    assert unused == (
        "from S: all 6 weights fit; without a place here: trunk.6.kernel, trunk.7.kernel, "
        "trunk.8.kernel"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.4, "0 s"), (61, "1 min 01 s"), (7_260, "2 h 01 min")]
)
def test_durations_are_readable(seconds: float | None, text: str):
    assert format_duration(seconds) == text


def test_a_processs_age_counts_from_its_real_start(monkeypatch: pytest.MonkeyPatch):
    assert process_age_s() >= time.process_time() / max(1, os.cpu_count() or 1) / 4
    monkeypatch.setattr(Path, "read_text", lambda path: "nonsense")
    assert process_age_s() > 0
