"""Extending a finished run with more steps or a higher goal."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.platform.switches import GAME, QUICK
from understudy.core.errors import ConfigError
from understudy.training.events import Event, Started, Update
from understudy.training.folder import RunFolder
from understudy.training.train import Run

STEADY = QUICK | {"epsilon": 0.1, "importance_exponent": 0.5, "min_inserts": 256}
"""Without schedules, so that no setting depends on the length of a run."""
ASKED: dict[str, Any] = {"algorithm": "dqn", "seed": 3, "settings": STEADY}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return understudy.train(
        GAME, out=tmp_path_factory.mktemp("short") / "R", steps=1_000, **ASKED
    ).folder


@pytest.fixture
def ended(short: Path, tmp_path: Path) -> Path:
    """A run of 1 000 steps, which is 1 024 in whole rounds, for one test only."""
    shutil.copytree(short, tmp_path / "ended")
    return tmp_path / "ended"


def weights(run: Path) -> bytes:
    return (run / "last.safetensors").read_bytes()


def test_with_more_steps_it_ends_as_if_it_had_been_that_long_from_the_start(
    ended: Path, tmp_path: Path
):
    straight = understudy.train(GAME, out=tmp_path / "S", steps=2_048, **ASKED)
    heard: list[Event] = []
    longer = understudy.train(out=ended, resume=True, steps=2_048, on_event=heard.append)
    assert isinstance(heard[0], Started)
    assert (heard[0].env_steps, heard[0].steps) == (1_024, 2_048)
    assert longer.result["env_steps"] == straight.result["env_steps"] == 2_048
    assert longer.result["updates"] == straight.result["updates"]
    assert weights(longer.folder) == weights(straight.folder)
    assert [row["env_steps"] for row in RunFolder(ended).curve_rows()] == [1_024, 2_048]
    assert (
        understudy.train(GAME, out=ended, resume=True, steps=2_048, **ASKED).result == longer.result
    )


def test_schedules_of_an_extended_run_are_those_of_a_run_of_that_length(tmp_path: Path):
    asked: dict[str, Any] = {"algorithm": "ppo", "seed": 3, "settings": QUICK}
    first = understudy.train(GAME, out=tmp_path / "R", steps=512, **asked)
    longer = understudy.train(out=first.folder, resume=True, steps=1_024)
    straight = understudy.train(GAME, out=tmp_path / "S", steps=1_024, **asked)
    assert weights(longer.folder) == weights(straight.folder)


def test_a_kill_during_the_extension_changes_nothing(ended: Path, tmp_path: Path):
    class Crash(Exception):
        pass

    def crash(event: Event) -> None:
        if isinstance(event, Update) and event.env_steps >= 1_792:
            raise Crash

    other = shutil.copytree(ended, tmp_path / "other")
    with pytest.raises(Crash):
        understudy.train(out=ended, resume=True, steps=2_048, on_event=crash)
    killed = understudy.train(out=ended, resume=True)
    straight = understudy.train(out=other, resume=True, steps=2_048)
    assert killed.result["resumed_at_step"] > straight.result["resumed_at_step"] == 1_024
    assert weights(killed.folder) == weights(straight.folder)
    assert killed.result["return_mean"] == straight.result["return_mean"]


def test_a_kill_at_the_first_moment_leaves_a_run_that_ends_as_it_did(ended: Path):
    before = RunFolder(ended).result()
    (ended / "result.json").unlink()
    again = understudy.train(out=ended, resume=True)
    assert before is not None
    assert {
        name: again.result[name] for name in ("env_steps", "return_mean", "updates")
    }.items() <= before.items()


@pytest.mark.parametrize("asked", [{"until": 5}, {"steps": 512}])
def test_a_kill_between_the_last_checkpoint_and_the_result_changes_nothing(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(*_: Any, **__: Any) -> None:
        raise InterruptedError

    straight = understudy.train(GAME, out=tmp_path / "S", **ASKED, **asked)
    with monkeypatch.context() as patched:
        patched.setattr("understudy.training.train.draw_curve", killed)
        with pytest.raises(InterruptedError):
            understudy.train(GAME, out=tmp_path / "R", **ASKED, **asked)
    again = understudy.train(out=tmp_path / "R", resume=True)
    assert weights(again.folder) == weights(straight.folder)
    for name in ("solved", "return_mean", "return_std", "env_steps", "updates", "episodes"):
        assert again.result[name] == straight.result[name]
    assert RunFolder(again.folder).curve_rows()[-1]["env_steps"] == straight.result["env_steps"]


def test_a_solved_run_is_extended_only_with_a_higher_goal(tmp_path: Path):
    run = understudy.train(GAME, out=tmp_path / "R", until=5, **ASKED)
    assert run.result["solved"]
    with pytest.raises(ConfigError, match="is solved: its goal was 5; give a higher one"):
        understudy.train(out=run.folder, resume=True, steps=200_000)
    stop = lambda event: understudy.Stop if event.env_steps > run.result["env_steps"] else None  # noqa: E731
    higher = understudy.train(out=run.folder, resume=True, until=math.inf, on_event=stop)
    assert higher.result["until"] is None
    assert higher.result["env_steps"] > run.result["env_steps"]


def test_an_extension_that_cannot_work_is_rejected_with_the_next_step(ended: Path):
    (ended / "checkpoints" / "000000001024.safetensors").unlink()
    with pytest.raises(
        ConfigError,
        match=r"has no final checkpoint, at 1024 env steps.*--preset \S*/preset.toml --init-from",
    ):
        understudy.train(out=ended, resume=True, steps=4_000)
    with pytest.raises(
        ConfigError, match=r"has already done 1024 env steps; give a larger number: steps=2048"
    ):
        understudy.train(out=ended, resume=True, steps=1_010)
    with pytest.raises(ConfigError, match="started with steps 1000, not 500"):
        understudy.train(out=ended, resume=True, steps=500)
    assert RunFolder(ended).result() is not None


def test_a_run_from_a_store_is_extended_too(short: Path, tmp_path: Path):
    run: Run = understudy.train(
        GAME,
        algorithm="bc",
        steps=100,
        out=tmp_path / "R",
        settings=QUICK,
        options=understudy.TrainOptions(from_store=short),
    )
    longer = understudy.train(out=run.folder, resume=True, steps=2 * run.result["updates"])
    assert longer.result["updates"] == 2 * run.result["updates"]
