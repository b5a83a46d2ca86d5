"""data export and data import as a user types them; the commands of their page are run."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange.exports import recorded, steps_in, to_parquet
from understudy.backends.data import DataFolder
from understudy.cli.root import run as run_command
from understudy.testing.samples import cart_spec, random_session

PAGE = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
RECORD = {
    "episode": 0,
    "step": 0,
    "state": [0.1, 0.2, 0.3, 0.4],
    "action": 1,
    "reward": 1.0,
    "next_state": [0.1, 0.2, 0.3, 0.4],
    "done": False,
    "game_id": "CartPole-v0",
}


def last_object(text: str) -> dict[str, Any]:
    fields = json.loads(text.splitlines()[-1])
    assert isinstance(fields, dict)
    return fields


def file_of_steps(folder: Path, *, n_chunks: int = 12) -> tuple[Path, int]:
    spec = cart_spec()
    chunks = random_session(spec, np.random.default_rng(0), n_chunks=n_chunks, max_steps=30)
    path = folder / "a.parquet"
    to_parquet(recorded(folder / "source", spec, chunks), path)
    return path, sum(chunk.meta.n_steps for chunk in chunks)


def test_every_command_of_the_page_works_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {**RECORD, "episode": one, "step": at, "done": at == 9}
        for one in range(3)
        for at in range(10)
    ]
    (tmp_path / "records.jsonl").write_text("".join(f"[{json.dumps(row)}]\n" for row in rows))
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        first, *arguments = shlex.split(command)
        if first == "understudy":
            assert run_command(arguments) == 0, f"{command}: {capsys.readouterr().err}"
        else:
            assert first == "python"
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"
    capsys.readouterr()
    for folder in ("E", "F", "G"):
        assert run_command(["data", "verify", "--data", folder, "--json"]) == 0
        assert last_object(capsys.readouterr().out)["ok"]


def test_export_and_import_report_their_results_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, n_steps = file_of_steps(tmp_path)
    to_d = ["--data", str(tmp_path / "D"), "--format", "parquet"]
    assert run_command(["data", "import", str(path), *to_d, "--json"]) == 0
    fields = last_object(capsys.readouterr().out)
    assert (fields["steps"], fields["stored_steps"], fields["there_steps"]) == (n_steps, n_steps, 0)
    out = tmp_path / "b.parquet"
    assert run_command(["data", "export", str(out), *to_d, "--json"]) == 0
    fields = last_object(capsys.readouterr().out)
    assert (fields["out"], fields["steps"], fields["game"]) == (str(out), n_steps, "cart")
    assert steps_in(out) == steps_in(path)
    assert run_command(["data", "import", str(path), *to_d]) == 0
    assert f"stored 0, already stored {n_steps}" in capsys.readouterr().out


def test_filters_of_the_command_choose_players_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, n_steps = file_of_steps(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert (
        run_command(
            ["data", "import", str(path), "--data", "D", "--format", "parquet", "--player", "ada"]
        )
        == 0
    )
    chosen = [
        "--data",
        "D",
        "--format",
        "parquet",
        "--game",
        "cart",
        "--consent",
        "granted",
        "--since",
        "2026-01-01",
    ]
    assert (
        run_command(
            ["data", "export", "ada.parquet", *chosen, "--player", "ada", "--with-player", "--json"]
        )
        == 0
    )
    assert last_object(capsys.readouterr().out)["steps"] == n_steps
    assert run_command(["data", "export", "bob.parquet", *chosen, "--player", "bob"]) == 2
    assert (
        run_command(
            ["data", "export", "late.parquet", *chosen, "--since", "2999-01-01T00:00+02:00"]
        )
        == 2
    )
    assert not (tmp_path / "bob.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["export", "x.parquet", "--data", "none", "--format", "parquet"],
            "holds no recorded data",
        ),
        (["export", "x.parquet", "--data", "source", "--format", "csv"], "Invalid value"),
        (
            ["export", "x.parquet", "--data", "source", "--format", "parquet", "--since", "soon"],
            "--since is 'soon'",
        ),
        (
            ["export", "x.parquet", "--data", "source", "--format", "parquet", "--player", "ada"],
            "needs --game",
        ),
        (
            ["export", "no/x.parquet", "--data", "source", "--format", "parquet"],
            "/no does not exist; create it first",
        ),
        (["export", "a.parquet", "--data", "source", "--format", "parquet"], "exists already"),
        (
            ["export", "x-v0", "--data", "source", "--format", "minari", "--with-player"],
            "--with-player needs --format parquet",
        ),
        (
            ["import", "a.parquet", "--data", "D", "--format", "parquet", "--as-is"],
            "--as-is cannot be used with --format parquet",
        ),
        (
            ["import", "a.parquet", "--data", "D", "--format", "parquet", "--player", "a\nb"],
            "player name",
        ),
        (
            ["import", "a.parquet", "--data", "D", "--format", "seed-a", "--consent", "granted"],
            "--repair-shift",
        ),
        (
            ["import", "a.parquet", "--data", "D", "--format", "seed-a", "--repair-shift"],
            "give --consent",
        ),
        (["import", "a.parquet", "--data", "D", "--format", "seed-a", "--as-is"], "not valid JSON"),
        (
            ["import", "source", "--data", "D", "--format", "minari", "--consent", "granted"],
            "is not a Minari dataset",
        ),
        (["import", "source", "--data", "D", "--format", "parquet"], "is not a file"),
        (["import", "nothing", "--data", "D", "--format", "parquet"], "is not a file"),
        (["import", "--data", "D", "--format", "parquet"], "Missing argument"),
    ],
)
def test_wrong_use_is_rejected_in_one_line_and_stores_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    file_of_steps(tmp_path, n_chunks=2)
    monkeypatch.chdir(tmp_path)
    assert run_command(["data", *arguments]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1 or found.startswith("Usage:")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "source"]


def test_rejected_episodes_are_named_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {**RECORD, "episode": one, "step": at, "done": at == 3}
        for one in range(2)
        for at in range(4)
    ]
    rows.append({**rows[1], "reward": 5.0})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ["--format", "seed-a", "--repair-shift", "--consent", "granted"]
    assert run_command(["data", "import", "a.jsonl", "--data", "D", *how]) == 1
    found = capsys.readouterr().out
    assert "rejected episode 0: step 1 has two different records" in found
    assert "lost 1 first steps" in found
    assert "3 steps of CartPole-v0 in 1 session: stored 3" in found


@pytest.mark.parametrize(
    ("n_kills", "n_sessions"), [(2, 20), pytest.param(4, 40, marks=pytest.mark.slow)]
)
def test_an_import_killed_with_9_again_and_again_ends_with_the_same_steps(
    n_kills: int, n_sessions: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    spec = cart_spec()
    chunks = [
        one
        for _ in range(n_sessions)
        for one in random_session(spec, rng, n_chunks=20, max_steps=12)
    ]
    path = tmp_path / "a.parquet"
    to_parquet(recorded(tmp_path / "source", spec, chunks), path)
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "data",
        "import",
        str(path),
        "--data",
        str(tmp_path / "D"),
    ]
    kills = 0
    for _ in range(n_kills):
        sent_before = sent_bytes(tmp_path / "D")
        with subprocess.Popen(
            [*command, "--format", "parquet"], stdout=subprocess.DEVNULL
        ) as process:
            deadline_s = time.monotonic() + 60
            while (
                process.poll() is None
                and sent_bytes(tmp_path / "D") == sent_before
                and time.monotonic() < deadline_s
            ):
                time.sleep(0.005)
            time.sleep(float(rng.uniform(0.0, 0.1)))
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
    assert kills > 0
    to_d = ["--data", str(tmp_path / "D")]
    assert run_command(["data", "import", str(path), *to_d, "--format", "parquet"]) == 0
    assert run_command(["data", "verify", *to_d]) == 0
    to_parquet(DataFolder(tmp_path / "D"), tmp_path / "b.parquet")
    assert steps_in(tmp_path / "b.parquet") == steps_in(path)


def sent_bytes(data: Path) -> int:
    """How much an import has sent so far."""
    return sum(path.stat().st_size for path in (data / "stream").glob("[!.]*/*.log"))
