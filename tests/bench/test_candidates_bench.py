"""bench/candidates.py: which promotions are judged, what misses, and which runs are kept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import candidates
from bench.candidates import (
    JUDGED,
    RESULT,
    LoopRun,
    champions_of,
    loop_config,
    main,
    misses,
    promotions_of,
)
from understudy.core.errors import UnderstudyError
from understudy.models.catalogue import Alias, Catalogue
from understudy.platform.children import Child
from understudy.simulation.loop import LoopConfig


def models_of(*means: float, standard_error: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"model": number, "mean": mean, "standard_error": standard_error}
        for number, mean in enumerate(means, start=1)
    ]


def row_of(**changes: Any) -> dict[str, Any]:
    run = LoopRun("rally", 0, candidates.PLAY_S, candidates.EPISODES)
    row = {**run._asdict(), "commit": "an earlier one", "champions": [1], "promotions": []}
    unmeasured = {"model": 2, "algorithm": "dqn", "verdict": "reject: worse"}
    row |= {"models": [*models_of(0.0), unmeasured], "n_candidates": 2, "n_judged": 1}
    row |= {"n_promotions": 1}
    row |= {"lost_steps": 0, "duplicate_steps": 0, "n_episodes": 9, "minutes": 7.5, "missed": []}
    return row | changes


def test_a_promoted_model_misses_only_if_it_lowered_the_return_by_more_than_the_error() -> None:
    def missed(before: float, after: float) -> list[str]:
        promotions = promotions_of([1, 2], [1, 2], models_of(before, after))
        return misses(row_of(champions=[1, 2], promotions=promotions))

    assert missed(0.5, 0.5) == []
    assert missed(0.5, 0.9) == []
    assert missed(0.5, 0.5 - 0.27) == []
    assert missed(0.5, 0.5 - 0.28) == ["model 2 lowered the champion's return"]


def test_models_are_compared_with_the_champion_that_they_replaced() -> None:
    models = models_of(0.0, 0.9, 0.4, 0.8)
    (promotion,) = promotions_of([1, 4], [3, 4], models)
    assert promotion == {
        "model": 4,
        "replaced": 1,
        "change": 0.8,
        "interval": 0.2772,
        "is_lowered": False,
    }
    assert promotions_of([1], [1, 2], models) == []
    assert promotions_of([], [1, 2], models) == []


def test_only_promotions_among_the_last_candidates_are_judged() -> None:
    models = models_of(0.9, 0.1, *([0.0] * JUDGED))
    judged = [model["model"] for model in models[-JUDGED:]]
    assert promotions_of([1, 2], judged, models) == []
    assert [each["model"] for each in promotions_of([1, 2, 3], judged, models)] == [3]


def test_champions_are_in_order_and_one_that_was_restored_is_there_twice() -> None:
    history = [Alias(number, at, 0.0, "", b"") for at, number in enumerate((1, 1, 3, 0, 1))]
    assert champions_of(Catalogue("rally", history=history)) == [1, 3, 1]


def test_lost_steps_and_a_loop_without_a_champion_are_missed() -> None:
    assert misses(row_of()) == []
    assert misses(row_of(champions=[])) == ["no champion"]
    assert misses(row_of(duplicate_steps=1)) == ["steps were lost or stored twice"]


def test_the_loop_is_that_of_the_demo_and_does_not_end_early() -> None:
    config = loop_config(LoopRun("CartPole-v1", 3, 400.0, 1_000))
    assert config == LoopConfig(env_id="CartPole-v1", seed=3, max_seconds=400.0, min_seconds=400.0)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["candidates.py", "--game", "rally", *arguments])
    return main()


def test_runs_in_the_result_file_are_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "candidates.json"
    lowered = row_of(seed=1, missed=["model 1 lowered the champion's return"])
    out.write_text(json.dumps({"rows": [row_of(), lowered]}))
    before = out.read_text()
    kept = ("--keep", "--out", str(out))
    assert run_main(monkeypatch, "--seed", "0", *kept) == 0
    assert run_main(monkeypatch, "--seed", "1", *kept) == 1
    assert "kept: rally seed 1" in capsys.readouterr().out
    assert out.read_text() == before


def test_a_run_of_another_commit_is_measured_again_and_one_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def child(name: str, _: list[str]) -> Child:
        ran = json.dumps({"row": row_of(commit="this one")})
        ends = "raise SystemExit('the disk is full')" if name.endswith("1") else f"print({ran!r})"
        return Child(name, [sys.executable, "-c", ends])

    monkeypatch.setattr(candidates, "Child", child)
    out = tmp_path / "candidates.json"
    out.write_text(json.dumps({"rows": [row_of(), row_of(seed=1)]}))
    arguments = ("--parallel", "2", "--out", str(out))
    assert run_main(monkeypatch, "--seed", "0", *arguments) == 0
    assert run_main(monkeypatch, "--seed", "1", *arguments) == 1
    assert "rally seed 1 failed: the disk is full" in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == [row_of(commit="this one"), row_of(seed=1)]


@pytest.mark.slow
def test_a_loop_is_played_and_its_models_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "candidates.json"
    command = [sys.executable, candidates.__file__, "--quick", "--game", "rally"]
    ran = subprocess.run([*command, "--seconds", "40", "--out", out], check=False, timeout=550)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["stored_steps"] >= row["acked_steps"] > 0
    assert row["lost_steps"] == row["duplicate_steps"] == 0
    assert row["n_episodes"] > 0
    measured = [model["model"] for model in row["models"] if "greedy_mean" in model]
    assert {*row["champions"]} <= {*measured}
    assert len(measured) >= row["n_judged"] > 0
    assert row["missed"] == misses(row)
    assert ran.returncode == bool(row["missed"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel", "0"), "--parallel is 0; pass a number of at least 1"),
        (("--seed", "-1"), "--seed is -1; pass a number of at least 0"),
        (("--seconds", "4"), "--seconds is 4; pass a number of at least 5"),
        (("--seconds", "nan"), "--seconds is nan; pass a number of at least 5"),
        (("--game", "chess"), "invalid choice: 'chess'"),
    ],
)
def test_wrong_options_are_rejected(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_wrong_result_files_are_rejected_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "candidates.json"
    with pytest.raises(UnderstudyError, match="does not exist; create it, or pass --out"):
        run_main(monkeypatch, "--out", str(tmp_path / "nowhere" / "x.json"))
    out.write_text('{"rows": [{}]}')
    with pytest.raises(UnderstudyError, match="move it away, or pass another --out"):
        run_main(monkeypatch, "--out", str(out))


def test_the_committed_runs_are_judged_by_their_true_returns() -> None:
    for row in json.loads(RESULT.read_text())["rows"]:
        judged = [model["model"] for model in row["models"]][-JUDGED:]
        assert row["n_judged"] == len(judged)
        assert row["promotions"] == promotions_of(row["champions"], judged, row["models"])
        assert row["missed"] == misses(row)
