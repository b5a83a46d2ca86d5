"""A full or failing disk under the real processes: no acknowledgement, no loss, work resumes."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.card import Card
from tests.faults.processes import environment, start, understudy_here, wait_until
from tests.faults.profiles import sizes
from tests.faults.recorder import RecorderSettings
from tests.faults.recording import cart
from tests.faults.writer import WriterSettings
from understudy.backends.data import DataFolder
from understudy.client.connect import local_link
from understudy.core.clock import SystemClock
from understudy.core.names import PlayerName, new_session
from understudy.experience.frame import data_frame
from understudy.platform.children import Child
from understudy.simulation.ledger import read_ledger
from understudy.stores.view import StoreView
from understudy.streams.file import FileStream

SMALL = "6m"
LARGE = "256m"


# --- A full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of a few megabytes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("no full disk: mounting a tmpfs needs Linux and root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(mount)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(
            f"no full disk: a tmpfs cannot be mounted here ({done.stderr.decode().strip()})"
        )
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def is_full(disk: Path) -> bool:
    return shutil.disk_usage(disk).free < 128 * 1024


def test_a_full_disk_stops_acknowledgements_and_loses_nothing(
    small_disk: Path, tmp_path: Path, seed: int, card: Card
) -> None:
    data = DataFolder(small_disk / "data")
    (tmp_path / "ledger").mkdir()
    data.root.mkdir()
    # What was promised is noted on another disk, or the promises themselves would not fit.
    data.ledger.symlink_to(tmp_path / "ledger")
    settings = RecorderSettings(
        data=str(data.root), players=["ada", "bob"], seed=seed, rate=20_000.0
    )
    recorder = start("tests.faults.recorder", asdict(settings))
    ingest = start("tests.faults.ingester", str(data.root))
    try:
        wait_until(
            lambda: is_full(small_disk) or died(recorder, ingest),
            timeout_s=90,
            what="filling the disk",
        )
        wait_until(
            lambda: stopped_acking(recorder), timeout_s=60, what="the end of acknowledgements"
        )
        says_full(data)
        # Ingest complains, unless it had stored everything before there was no room left.
        wait_until(
            lambda: "store_full" in ingest.errors or has_caught_up(data) or died(ingest),
            timeout_s=60,
            what="ingest's complaint",
        )
        assert not died(recorder, ingest), recorder.errors + ingest.errors
        before = recorder.latest["acked"]
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", str(small_disk)], check=True)
        wait_until(
            lambda: recorder.latest["acked"] > before + 2000,
            timeout_s=60,
            what="acknowledgements again",
        )
        recorder.stop()
        recorder.wait(60.0)
        assert not died(ingest), ingest.errors
        ingest.stop()
        assert ingest.wait(60.0) == 0, ingest.errors
    finally:
        for child in (recorder, ingest):
            child.kill()
            child.wait(10.0)
    answer = understudy_here("data", "verify", "--data", data.root)
    assert answer.code == 0, answer
    assert answer.fields["ledger_steps"] > before
    steps = answer.fields["ledger_steps"]
    card.line(
        "disk full, then space again", tried=1, held=1, note=f"{steps} acknowledged steps, 0 lost"
    )


def died(*children: Child) -> bool:
    return any(child.exit_code is not None for child in children)


def stopped_acking(recorder: Child) -> bool:
    before = recorder.latest["acked"]
    time.sleep(1.5)
    return bool(recorder.latest["acked"] == before)


def has_caught_up(data: DataFolder) -> bool:
    """Whether the store holds as many frames as were acknowledged."""
    acked = {(promise.session, promise.chunk_no) for promise in read_ledger(data.ledger)}
    with StoreView(data.store) as view:
        return view.next_arrival - 1 >= len(acked)


def says_full(data: DataFolder) -> None:
    """The stream answers with a clear error, and a client is told to come again later."""
    session = new_session()
    frame = data_frame(session, 0, bytes(400_000))
    stream = FileStream(data.stream)
    (outcome,) = stream.append([frame])
    stream.close()
    assert not outcome.accepted
    assert "room" in (outcome.error or ""), outcome
    assert outcome.retry_after_s > 0
    link = local_link(data.root, cart(), SystemClock())
    (ack,) = link.send([frame], {session: PlayerName("eve")})
    link.close()
    assert (ack.accepted, ack.refused) == (False, None)
    assert ack.retry_after_s > 0


# --- Failing calls --------------------------------------------------------------------------------


def missing_strace() -> str:
    """Why calls cannot be made to fail here, or empty text."""
    if shutil.which("strace") is None:
        return "no injected disk errors: strace is missing (apt-get install strace)"
    done = subprocess.run(["strace", "-e", "trace=none", "true"], capture_output=True, check=False)
    return (
        f"no injected disk errors: strace cannot trace here ({done.stderr.decode()[:80]})"
        if done.returncode
        else ""
    )


needs_strace = pytest.mark.skipif(bool(missing_strace()), reason=missing_strace() or "strace works")

CALLS = [
    "fdatasync:error=EIO",
    "fsync:error=EIO",
    "pwrite64:error=ENOSPC",
    "fdatasync:error=ENOSPC",
    "pwrite64:error=EIO",
]


@needs_strace
@sizes("faults", short=3, full=40)
def test_after_a_failed_call_a_new_start_has_everything_acknowledged(
    tmp_path: Path, faults: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    data = DataFolder(tmp_path / "data")
    outside = tmp_path / "outside"
    injected = ended = 0
    for number in itertools.count():
        if injected >= faults:
            break
        assert number < 4 * faults + 8, f"{injected} of {number} faults met a call"
        call = CALLS[number % len(CALLS)]
        hits, has_ended = run_with_fault(
            data, outside, tmp_path / "trace", f"{call}:when={rng.randrange(3, 40)}", rng
        )
        injected = injected + hits
        ended = ended + has_ended
        if not data.ledger.is_symlink():
            data.ledger.symlink_to(outside / "ledger")
        answer = understudy_here("data", "verify", "--data", data.root)
        promised = sum(path.stat().st_size for path in (outside / "ledger").glob("*.jsonl"))
        assert answer.code == (0 if promised else 2), (
            f"seed {seed}, fault {number}, {call}: {answer}"
        )
    card.line(
        "disk errors injected", tried=injected, held=injected, note=f"{ended} ended the process"
    )


def run_with_fault(
    data: DataFolder, outside: Path, trace: Path, fault: str, rng: random.Random
) -> tuple[int, bool]:
    """Run a platform while a call fails; returns the failures, and whether the process ended."""
    settings = WriterSettings(
        data=str(data.root), outside=str(outside), seed=rng.randrange(1 << 30)
    )
    call = fault.split(":")[0]
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        str(trace),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={fault}",
    ]
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    writer = [sys.executable, "-m", "tests.faults.writer", json.dumps(asdict(settings))]
    child = Child("writer", [*command, *writer])
    try:
        wait_until(lambda: bool(child.latest) or died(child), timeout_s=60, what="the first turn")
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not died(child):
            time.sleep(0.02)
        ended = died(child)
        assert child.exit_code in (None, 1), f"{child.exit_code}: {child.errors}"
    finally:
        kill_with_children(child)
    return trace.read_text().count("INJECTED"), ended


def kill_with_children(child: Child) -> None:
    """Kill strace and what it traces."""
    path = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    traced = [int(text) for text in path.read_text().split()] if path.exists() else []
    for pid in traced:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait(10.0)
    child.kill()
    child.wait(10.0)
