"""Power cuts while players, stream, ingest and store work: acknowledged steps are stored once.

A kill proves nothing about fsync, because the kernel keeps what a dead process wrote; this does.
The control runs the same without fsync and must lose data.
"""

import ctypes.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.card import Card
from tests.faults.power_cut import Disk
from tests.faults.processes import Answer, environment, start, understudy_here, wait_until
from tests.faults.profiles import sizes
from tests.faults.writer import WriterSettings
from understudy.backends.data import DataFolder
from understudy.experience.frame import FrameKind
from understudy.ports import Stored
from understudy.stores.database import Synchronous
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView


def missing_fuse() -> str:
    """Why no FUSE file system can be mounted here, or empty text."""
    if sys.platform != "linux":
        return "FUSE is used on Linux only"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return (
            "no power cut: /dev/fuse is missing or not ours (run as root, or in a container "
            "with --device /dev/fuse)"
        )
    if os.geteuid() != 0:
        return "no power cut: mounting needs root"
    if ctypes.util.find_library("fuse3") is None:
        return "no power cut: libfuse3 is missing (apt-get install fuse3)"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no power cut: {error}"
    return ""


needs_fuse = pytest.mark.skipif(bool(missing_fuse()), reason=missing_fuse() or "FUSE works")


# --- The disk itself ------------------------------------------------------------------------------


@pytest.fixture
def disk() -> Disk:
    return Disk()


def contents(disk: Disk, folder: Path) -> dict[str, bytes]:
    """Files of a disk by path."""
    disk.save(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Unlucky(random.Random):
    """Keeps nothing that was not synced."""

    def random(self) -> float:
        return 1.0

    def choice(self, seq):
        return seq[0]


def test_a_cut_disk_keeps_synced_bytes_and_the_name_of_a_synced_file(
    disk: Disk, tmp_path: Path
) -> None:
    node = disk.create("/a", 0o600)
    disk.write(node, b"synced", 0)
    disk.sync_file(node)
    disk.write(node, b"not", 0)
    disk.create("/b", 0o600)
    disk.cut(Unlucky())
    assert contents(disk, tmp_path / "out") == {"a": b"synced"}


def test_a_cut_disk_loses_a_rename_until_the_folder_is_synced(disk: Disk, tmp_path: Path) -> None:
    for synced in (False, True):
        node = disk.create("/draft", 0o600)
        disk.write(node, b"x", 0)
        disk.sync_file(node)
        disk.rename("/draft", "/final")
        if synced:
            disk.sync_folder(disk.root)
        disk.cut(Unlucky())
        assert list(contents(disk, tmp_path / "out")) == ["final" if synced else "draft"]
        if not synced:
            disk.remove("/draft")
            disk.sync_folder(disk.root)


def test_a_cut_disk_loses_an_unsynced_folder_with_its_synced_files(
    disk: Disk, tmp_path: Path
) -> None:
    disk.create("/new", 0o700, is_folder=True)
    disk.sync_file(disk.create("/new/file", 0o600))
    disk.cut(Unlucky())
    assert contents(disk, tmp_path / "out") == {}


def test_a_cut_disk_keeps_any_subset_of_unsynced_writes(tmp_path: Path) -> None:
    found = set()
    for seed in range(200):
        disk = Disk()
        node = disk.create("/a", 0o600)
        disk.sync_file(node)
        for at in range(3):
            disk.write(node, b"x", at)
        disk.cut(random.Random(seed))
        found.add(bytes(disk.find("/a").live))
    assert {b"", b"x", b"xxx", b"\0x", b"\0\0x", b"x\0x"} <= found


# --- The platform on it ---------------------------------------------------------------------------


class Machine:
    """A state that survives power cuts, and a place where it is mounted while there is power."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        *,
        syncs: bool = True,
        synchronous: Synchronous = "FULL",
    ) -> None:
        self.state = folder / "state"
        self.mount = folder / "mount"
        self.outside = folder / "outside"
        self._folder = folder
        self._rng = rng
        self._syncs = syncs
        self._synchronous = synchronous
        for path in (self.state / "data", self.mount, self.outside):
            path.mkdir(parents=True)
        self.cuts = 0

    def run_until_cut(self) -> None:
        """Power on, work for a moment, power off."""
        command = [sys.executable, "-m", "tests.faults.power_cut", str(self.state), str(self.mount)]
        server = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(
                lambda: os.path.ismount(self.mount) or server.poll() is not None,
                timeout_s=60,
                what="mounting",
            )
            assert server.poll() is None, server.communicate()[1]
            self._work(server)
        finally:
            subprocess.run(["umount", str(self.mount)], check=False, capture_output=True)
            _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors

    def _work(self, server: "subprocess.Popen[str]") -> None:
        settings = WriterSettings(
            data=str(self.mount / "data"),
            outside=str(self.outside),
            seed=self._rng.randrange(1 << 30),
            syncs=self._syncs,
            synchronous=self._synchronous,
            roll_bytes=self._rng.choice([4 * 1024, 32 * 1024]),
        )
        writer = start("tests.faults.writer", asdict(settings))
        try:
            if self._rng.random() < 0.8:
                wait_until(
                    lambda: bool(writer.latest) or writer.exit_code is not None,
                    timeout_s=60,
                    what="the first turn",
                )
            time.sleep(self._rng.uniform(0.0, 0.9))
            assert writer.exit_code is None, writer.errors
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"cut {self._rng.randrange(1 << 30)}\n")
            server.stdin.flush()
            assert server.stdout.readline().startswith("cut")
        finally:
            writer.kill()
            writer.wait(10.0)
        self.cuts += 1

    def problems(self) -> list[str]:
        """The errors that a new start finds in a copy; the next cut affects the original."""
        copy = DataFolder(self._folder / "copy" / "data")
        shutil.copytree(self.state, copy.root.parent)
        if (self.outside / "ledger").exists():
            shutil.copytree(self.outside / "ledger", copy.ledger)
        answer = (
            understudy_here("data", "verify", "--data", copy.root)
            if any(copy.root.iterdir())
            else None
        )
        found = [] if answer is None else list(_complaints(answer))
        if answer is not None and answer.fields.get("quarantined_chunks"):
            found += _quarantined_data(copy)
        key = self.outside / "key"
        if key.exists() and (
            not (copy.root / "key").exists() or (copy.root / "key").read_bytes() != key.read_bytes()
        ):
            found.append("the deployment's key is not what it was")
        found += list(self._remembered(copy)) if answer is not None and not found else []
        shutil.rmtree(copy.root.parent)
        return found

    def _remembered(self, copy: DataFolder) -> Iterator[str]:
        """Frames of players that were forgotten before the cut."""
        path = self.outside / "forgotten"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        forgotten = {bytes.fromhex(line["player"]): line["before"] for line in lines}
        with StoreView(copy.store) as view:
            for item in view.tail(None, max_items=1_000_000, wait_s=0.0).items:
                if isinstance(item, Stored) and item.arrival_no < forgotten.get(
                    item.frame.player, 0
                ):
                    yield f"arrival {item.arrival_no} of a forgotten player is back"


def _complaints(answer: Answer) -> Iterator[str]:
    fields = answer.fields
    if answer.code not in (0, 2):
        yield f"verify exited {answer.code}: {fields.get('corrupt', answer.errors)}"
    for name in ("lost_steps", "duplicate_steps", "gap_steps", "parked_chunks"):
        if fields.get(name):
            yield f"{fields[name]} {name}"


def _quarantined_data(copy: DataFolder) -> list[str]:
    """Steps in quarantine. Reports may be there: the spool is not synced, so that what a game
    adopts after a power cut may be older than what it had sent, and its report of that takes a
    number that was given before."""
    with LocalStore(copy.store) as store:
        frames = store.quarantined(limit=100_000)
    return [f"{one.reason}: {one.detail}" for one in frames if one.raw[5] == FrameKind.DATA]


@pytest.fixture
def machine_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path / "mount")], check=False, capture_output=True)


@needs_fuse
@sizes("cuts", short=3, full=70)
def test_acknowledged_steps_survive_power_cuts(
    machine_folder: Path, cuts: int, seed: int, card: Card
) -> None:
    machine = Machine(machine_folder, random.Random(seed))
    for _ in range(cuts):
        machine.run_until_cut()
        assert machine.problems() == [], f"seed {seed}, cut {machine.cuts}"
    lines = sum(
        path.read_text().count("\n") for path in (machine.outside / "ledger").glob("*.jsonl")
    )
    assert lines > 3 * cuts
    card.line("power cuts", tried=cuts, held=cuts, note=f"{lines} acknowledged frames")


@needs_fuse
@pytest.mark.parametrize(
    ("syncs", "synchronous"),
    [(False, "FULL"), (True, "OFF"), (True, "NORMAL")],
    ids=["stream", "off", "normal"],
)
def test_without_syncs_a_power_cut_loses_data_and_is_detected(
    machine_folder: Path, seed: int, card: Card, syncs: bool, synchronous: Synchronous
) -> None:
    machine = Machine(machine_folder, random.Random(seed), syncs=syncs, synchronous=synchronous)
    went_red = False
    while not went_red and machine.cuts < 12:
        machine.run_until_cut()
        went_red = bool(machine.problems())
    name = "stream's syncs off" if not syncs else f"synchronous={synchronous}"
    card.line(
        f"control: {name} goes red", tried=1, held=int(went_red), note=f"after {machine.cuts} cuts"
    )
    assert went_red, f"{machine.cuts} cuts without syncs, and nothing was lost"
