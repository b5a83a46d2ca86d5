"""The commands as a new user types them; in separate processes where that matters."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_status import leave
from understudy.cli.root import run as run_command
from understudy.client.connect import ClientConfig, connect
from understudy.core.clock import SystemClock
from understudy.core.log import END_BYTES
from understudy.core.names import new_session
from understudy.experience.frame import CloseReport, close_frame
from understudy.streams.file import FileStream


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def understudy(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "understudy.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def understudy_here(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process, where the start of another would be most of its time."""
    out = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run_command(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def last_object(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    fields = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(fields, dict)
    return fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = str(tmp_path_factory.mktemp("cli") / "D")
    words = ["--players", "3", "--seconds", "1", "--data", data, "--json"]
    done = understudy_here("simulate", "CartPole-v1", *words)
    assert done.returncode == 0, done.stderr
    fields = last_object(done)
    assert fields["recorded_steps"] == fields["acked_steps"] == fields["stored_steps"] > 0
    assert fields["ack_p99_ms"] >= fields["ack_p50_ms"] > 0
    assert fields["steps_per_s"] > 0
    return data


def test_verify_confirms_what_simulate_recorded(folder: str) -> None:
    done = understudy_here("data", "verify", "--data", folder, "--json")
    assert done.returncode == 0, done.stderr
    fields = last_object(done)
    assert fields["steps"] == fields["ledger_steps"] > 0
    for name in ("lost_steps", "duplicate_steps", "gap_steps", "quarantined_chunks"):
        assert fields[name] == 0
    assert {"sessions", "chunks", "ledger_chunks"} <= fields.keys()


def test_forget_fails_without_the_key(folder: str) -> None:
    done = understudy_here("data", "forget", "nobody", "--data", folder, "--json")
    assert (done.returncode, last_object(done)["models"], last_object(done)["chunks"]) == (0, [], 0)
    (Path(folder) / "key").rename(Path(folder) / "key.away")
    try:
        done = understudy_here("data", "forget", "nobody", "--data", folder)
    finally:
        (Path(folder) / "key.away").rename(Path(folder) / "key")
    assert done.returncode == 2, done.stderr
    assert "has no key, so no player can be found by name" in done.stderr


def test_the_data_folder_may_come_from_the_environment(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("UNDERSTUDY_DATA", folder)
        fields = last_object(understudy_here("data", "stats", "--json"))
    assert fields["games"] == {"CartPole-v1": fields["steps"]}
    assert fields["sessions"] == 3
    assert "steps in" in understudy_here("data", "stats", "--data", folder).stdout


def test_sessions_are_listed(folder: str) -> None:
    rows = last_object(understudy_here("data", "sessions", "--data", folder, "--json"))["sessions"]
    assert len(rows) == 3
    assert all(row["closed"] and not row["missing"] for row in rows)
    assert understudy_here("data", "sessions", "--data", folder, "--game", "other").returncode == 2


def test_doctor_and_version_report_the_installation(folder: str) -> None:
    done = understudy_here("doctor", "--data", folder, "--json")
    assert done.returncode == 0, done.stdout
    assert {check["name"] for check in last_object(done)["checks"]} >= {
        "python",
        "packages",
        "store",
        "spool",
    }
    versions = last_object(understudy_here("version", "--json"))
    assert versions["frame"] == 1
    assert understudy("--version").stdout == f"understudy {versions['understudy']}\n"


def test_a_deleted_spec_of_stored_steps_is_named(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "D"
    shutil.copytree(folder, data)
    assert understudy_here("keys", "create", "--data", str(data)).returncode == 0
    assert understudy_here("games", "list", "--data", str(data)).returncode == 0
    (spec,) = (data / "models" / "games" / "CartPole-v1").glob("*.json")
    spec.unlink()
    listed = understudy_here("games", "list", "--data", str(data))
    assert listed.returncode == 1
    missing = f"games/CartPole-v1/{spec.name} is missing, although recorded steps need it"
    assert f"CartPole-v1: its spec is damaged: {missing}" in listed.stdout
    checked = understudy_here("doctor", "--data", str(data))
    assert checked.returncode == 1
    assert f"CartPole-v1 (spec): {missing}" in checked.stdout
    assert missing in understudy_here("status", "--data", str(data)).stdout


def test_a_lost_key_is_named_in_one_line_and_by_the_doctor(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "D"
    shutil.copytree(folder, data)
    (data / "key").unlink()
    words = ["--players", "1", "--seconds", "1", "--data", str(data)]
    done = understudy_here("simulate", "CartPole-v1", *words)
    assert done.returncode == 3
    assert "key" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    checked = understudy_here("doctor", "--data", str(data), "--json")
    assert checked.returncode == 1
    assert "key" in {
        check["name"] for check in last_object(checked)["checks"] if check["colour"] == "red"
    }


def test_status_tells_how_far_the_learner_has_read(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "D"
    shutil.copytree(folder, data)
    with contextlib.ExitStack() as held:
        leave(data, "learner", held, report={"read_steps": 12, "games": {}}, at_s=4e9)
        done = understudy_here("status", "--data", str(data))
    assert " steps stored, of which the learner has read 12 so far\n" in done.stdout
    done = understudy_here("status", "--data", str(data), "--json")
    assert last_object(done)["read_steps"] is None, "no learner runs"


def test_a_game_or_a_quarantined_frame_that_does_not_exist_is_named(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["data", "sessions", "--game", "nosuch", "--data", folder]) == 2
    assert "so --game matches nothing; known are CartPole-v1" in capsys.readouterr().err
    assert run_command(["data", "quarantine", "replay", "999", "--data", folder]) == 2
    assert "there is no frame 999 in quarantine, so nothing" in capsys.readouterr().err
    assert run_command(["data", "quarantine", "replay", "--data", folder]) == 0


def test_recorded_steps_that_are_not_stored_yet_are_hinted_at_and_verified_by_receipts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "D")
    receipts = str(tmp_path / "receipts.jsonl")
    config = ClientConfig(background=False)
    with connect("tag", obs=3, actions=2, data=data, receipts=receipts, config=config) as game:
        episode = game.episode(player="ada")
        for _ in range(20):
            episode.acted([0.0, 0.0, 0.0], 1)
        episode.end()
    assert run_command(["data", "stats", "--data", data]) == 0
    hint = "recorded steps wait in the stream; store them with: understudy ingest --until-empty"
    assert hint in capsys.readouterr().out
    assert run_command(["data", "verify", "--data", data]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "no damage, gap or duplicate was found, but there are no acknowledgements" in shown
    assert "then run this command with --receipts receipts.jsonl" in shown
    (tmp_path / "empty.jsonl").touch()
    empty = ["--receipts", str(tmp_path / "empty.jsonl")]
    assert run_command(["data", "verify", "--data", data, *empty]) == 2
    assert "empty.jsonl holds no receipts" in " ".join(capsys.readouterr().out.split())
    assert run_command(["data", "verify", "--data", data, "--receipts", receipts]) == 0
    shown = capsys.readouterr().out
    assert "holds no receipts" not in shown
    assert (
        "receipts 2: stored 2, quarantined 0, expired 0, forgotten 0, evicted 0, missing 0" in shown
    )
    with open(receipts, "a") as file:
        file.write('{"session": "0190\n')
    assert run_command(["data", "verify", "--data", data, "--receipts", receipts]) == 0
    assert "line 3 of" in (shown := capsys.readouterr().out)
    assert "is cut off, so its receipt was not checked; 1 such line in all" in " ".join(
        shown.split()
    )
    with open(receipts, "a") as file:
        line = {"session": "01a1e664-43f5-7270-b29c-763765e678e2", "chunk_no": 3}
        file.write(json.dumps({**line, "length": 1, "crc": 2}) + "\n")
    assert run_command(["data", "verify", "--data", data, "--receipts", receipts]) == 1
    assert "missing chunk 3 of session 01a1e664" in capsys.readouterr().out


def test_damage_in_the_streams_last_entry_is_reported_by_every_command(
    folder: str, tmp_path: Path
) -> None:
    data = tmp_path / "D"
    shutil.copytree(folder, data)
    session = new_session(SystemClock().now())
    stream = FileStream(data / "stream")
    close = close_frame(session, 0, CloseReport(0, 0)).stamped(bytes(16), 1)
    assert stream.append([close])[0].accepted
    stream.close()
    log = max((data / "stream").glob("*/*.log"))
    raw = bytearray(log.read_bytes())
    raw[-END_BYTES - 1] ^= 1
    log.write_bytes(bytes(raw))

    def red() -> dict[str, str]:
        checks = last_object(understudy_here("doctor", "--data", str(data), "--json"))["checks"]
        return {check["name"]: check["result"] for check in checks if check["colour"] == "red"}

    assert red()["stream"].startswith(f"1 damaged entry: {log.parent.name}/{log.name}, bytes 0")
    verified = understudy_here("data", "verify", "--data", str(data), "--json")
    assert verified.returncode == 1
    assert "acknowledged frames of the stream are lost" in last_object(verified)["corrupt"][0]
    assert "1 entry of the stream was damaged" in red()["lost frames"]
    status = last_object(understudy_here("status", "--data", str(data), "--json"))
    assert status["quarantined"] == {"damaged_stream": 1}
    assert any("acknowledged frames are lost" in advice for advice in status["next"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dats"], "did you mean 'data'"),
        (["data", "stats"], "UNDERSTUDY_DATA"),
        (["data", "verify", "--data", "nowhere-at-all"], "holds no recorded data"),
        (["data", "verify", "--receipts", "nowhere", "--data", "unused"], "does not exist"),
        (["data", "compact", "--timeout", "-1", "--data", "unused"], "-1.0 is not in the range"),
        (
            ["data", "forget", "ada", "--timeout", "0", "--data", "unused"],
            "0.0 is not in the range",
        ),
        (
            ["data", "quarantine", "replay", "--timeout", "-1", "--data", "unused"],
            "not in the range",
        ),
        (["backup", "B", "--timeout", "-1", "--data", "unused"], "-1.0 is not in the range"),
        (["simulate", "Nope-v1", "--data", "unused"], "did you mean"),
        (["simulate", "CartPole-v1", "--players", "0", "--data", "unused"], "--players is 0"),
        (["simulate", "CartPole-v1", "--seconds", "-1", "--data", "unused"], "--seconds is -1"),
        (["simulate", "CartPole-v1", "--env-kwargs", "{", "--data", "unused"], "--env-kwargs"),
        (
            ["simulate", "CartPole-v1", "--env-kwargs", '{"nope": 1}', "--data", "unused"],
            "does not accept",
        ),
    ],
)
def test_wrong_use_is_rejected_in_one_message_and_leaves_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        "",
        "simulate",
        "ingest",
        "demo",
        "doctor",
        "version",
        "data",
        "data stats",
        "data sessions",
        "data verify",
        "data forget",
        "data quarantine",
        "data quarantine list",
        "data quarantine replay",
        "data compact",
    ],
)
def test_every_command_has_help_with_two_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("understudy ") >= 3, shown


def test_ctrl_c_leaves_no_process_and_nothing_half_done(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "simulate",
        "CartPole-v1",
        "--seconds",
        "600",
        "--players",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--data", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("ledger/*.jsonl")))
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: not processes_of(tmp_path))
    assert understudy_here("data", "verify", "--data", str(tmp_path), "--json").returncode == 0


def test_ingest_drains_and_exits_on_sigterm(tmp_path: Path) -> None:
    words = ["--players", "1", "--seconds", "1", "--no-ingest", "--data", str(tmp_path)]
    done = understudy_here("simulate", "CartPole-v1", *words)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", "ingest", "--data", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (tmp_path / "store" / "store.json").exists())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["steps"] > 0
    again = understudy_here("ingest", "--until-empty", "--data", str(tmp_path), "--json")
    assert last_object(again)["steps"] == 0


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline") if Path("/proc").is_dir() else ():
        try:
            if str(folder) in path.read_text() and "understudy.platform" in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_closed_standard_output_is_no_error(more: list[str]):
    done = subprocess.run(
        [sys.executable, "-m", "understudy.cli.main", "version", *more],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        preexec_fn=lambda: os.close(1),
    )
    assert (done.returncode, done.stderr) == (0, "")
