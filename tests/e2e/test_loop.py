"""The closed loop as a user sees it: people play, a learner learns from them, its bots improve."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.card import Card
from tests.cli.platforms import processes_of, wait_for

COMMAND = [sys.executable, "-m", "understudy.cli.main", "demo"]


def run(*arguments: str, timeout_s: float = 560.0) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=timeout_s
    )
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.parametrize(
    ("game", "players", "kill"),
    [("rally", "2", "learner"), pytest.param("CartPole-v1", "8", "", marks=pytest.mark.slow)],
)
def test_the_demo_ends_by_itself_with_a_better_bot_and_nothing_lost(
    game: str, players: str, kill: str, tmp_path: Path, card: Card
) -> None:
    """Takes more than 20 seconds: a bot learns until it is measurably better than the first one.

    The limit is for machines that are busy with other tests; alone it takes well under half.
    """
    picture = tmp_path / "demo.svg"
    killing = ["--kill", kill] if kill else []
    code, found, said = run(
        *("--game", game, "--players", players, "--check"),
        *("--seconds", "480", "--svg", str(picture), *killing),
    )
    assert code == 0, said
    assert found["improved"]
    assert found["last_low"] > found["first_high"]
    assert found["first_low"] <= found["first_return"] <= found["first_high"]
    if game == "rally":
        assert found["last_share_low"] > found["first_share_high"]
        assert 0 <= found["first_share_low"] <= found["first_share"] <= found["last_share"] <= 1
    else:
        assert found["first_share"] is None
    assert len(found["model_versions"]) >= 2
    assert (found["lost_steps"], found["duplicate_steps"]) == (0, 0)
    assert found["stored_steps"] >= found["acked_steps"] >= 1_000
    assert found["steps_from_players"] == found["stored_steps"]
    assert found["killed"] == (kill or None)
    assert found["restarts"] >= bool(kill)
    drawn = picture.read_text(encoding="utf-8")
    assert "<svg" in drawn
    assert "uk_" not in drawn, "a key that plays"
    card.line("closed loops that ended with a better bot", tried=1, held=1)
    card.line(
        "steps acknowledged over HTTP",
        tried=found["acked_steps"],
        held=found["acked_steps"] - found["lost_steps"],
    )


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT], id="once"),
        pytest.param([signal.SIGINT, signal.SIGINT], id="twice", marks=pytest.mark.slow),
        pytest.param([signal.SIGHUP], id="hangup", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_leaves_no_process_and_no_folder(
    signals: list[signal.Signals], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_for(lambda: any(tmp_path.glob("understudy-demo-*/data/ledger/*.jsonl")), timeout_s=120)
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.15)  # as fast as fingers are
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("understudy-demo-*")) == []
