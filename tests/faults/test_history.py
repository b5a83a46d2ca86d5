"""Games over HTTP under kills, pauses, clock jumps and flips: the store agrees with its clients."""

import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.card import Card
from tests.faults import sabotage
from tests.faults.history import Op, Reader, check_history, read_history, read_store
from tests.faults.processes import environment, understudy_here, wait_until
from tests.faults.profiles import sizes
from tests.faults.recorder import RecorderSettings
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.client.receipts import AckedFrame, read_receipts
from understudy.platform.children import Child, python_module
from understudy.platform.config import Config, GatewaySection, write_config
from understudy.simulation.verify import verify

HOUR_S = 3600.0
EACH = (("kill", "gateway"), ("jump", ""), ("pause", "ingest"), ("kill", "ada"))
"""The first faults, one of each kind; the next ones are random. `Stage.stop` kills ingest."""
JUMPS_S = (-8 * HOUR_S, -0.5 * HOUR_S, 0.5 * HOUR_S, 8 * HOUR_S)
"""Within what sessions may be off; `bad_session_time` refuses the rest."""


class Stage:
    """A gateway and an ingest with clocks that jump, and two games that record over HTTP."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self.data = DataFolder(root / "D")
        self._clock = root / "clock"
        self._set_clock(0.0)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        config = Config(data=str(self.data.root), gateway=GatewaySection(port=self._port))
        self._config = root / "config.json"
        write_config(config, self._config)
        deployment = open_deployment(self.data)
        self._key, _ = deployment.keys.create(["play"], registers=True, bytes_s=1e9)
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        self.faults: Counter[str] = Counter()
        self.children = {name: self._start(name) for name in ("gateway", "ingest", "ada", "bob")}

    def _start(self, name: str) -> Child:
        if name in ("gateway", "ingest"):
            roles = [name, str(self._clock), str(self.data.root), str(self._config)]
            return Child(name, python_module("tests.faults.jumping", *roles))
        settings = RecorderSettings(
            data=str(self.data.root),
            players=[f"{name}-{at}" for at in range(2)],
            seed=self._rng.randrange(1 << 30),
            rate=150.0,
            linger_s=0.1,
            url=f"http://127.0.0.1:{self._port}",
            key=self._key,
            folder=str(self._root),
            name=name,
        )
        return Child(name, python_module("tests.faults.recorder"), first_line=settings.to_json())

    def _set_clock(self, offset_s: float) -> None:
        self._clock.with_suffix(".new").write_text(str(offset_s))
        self._clock.with_suffix(".new").replace(self._clock)

    def acked(self) -> int:
        return sum(int(self.children[name].latest.get("acked", 0)) for name in ("ada", "bob"))

    def wait_for_acks(self) -> None:
        before = self.acked()
        wait_until(
            lambda: self.acked() > before or self.acked() < before,
            timeout_s=60.0,
            what="an acknowledgement",
        )

    def fault(self) -> None:
        """Kill, pause or mislead one of the processes."""
        number = self.faults.total()
        kind, name = EACH[number] if number < len(EACH) else self._any_fault()
        self.faults[kind] += 1
        if kind == "jump":
            self._set_clock(self._rng.choice(JUMPS_S))
        elif kind == "pause":
            child = self.children[name]
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.1, 0.5))
            os.kill(child.pid, signal.SIGCONT)
        else:
            self.kill(name)
            self.children[name] = self._start(name)

    def _any_fault(self) -> tuple[str, str]:
        kind = self._rng.choice(["kill", "kill", "pause", "jump"])
        return kind, self._rng.choice(["gateway", "ingest", "ada"])

    def kill(self, name: str) -> None:
        child = self.children[name]
        assert child.exit_code is None, f"{name} ended by itself: {child.errors}"
        child.kill()
        child.wait(10.0)

    def stop(self) -> None:
        """End ingest in the middle of its work, then the games, then the gateway."""
        self.wait_for_acks()
        self.kill("ingest")
        self.wait_for_acks()
        for name in ("ada", "bob", "gateway"):
            self.children[name].stop()
            assert self.children[name].wait(60.0) == 0, self.children[name].errors

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait(10.0)

    def receipts(self) -> list[AckedFrame]:
        paths = sorted(self._root.glob("*.receipts"))
        return [acked for path in paths for acked in read_receipts(path)]


@sizes("faults", short=len(EACH), full=120)
def test_the_store_agrees_with_what_every_client_saw(
    tmp_path: Path, faults: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    stage = Stage(tmp_path, rng)
    try:
        with Reader(stage.data.store) as reader:
            wait_until(lambda: bool(reader.seen), timeout_s=60.0, what="a stored frame")
            while stage.faults.total() < faults:
                stage.fault()
                time.sleep(rng.uniform(0.0, 0.3))
            stage.stop()
    finally:
        stage.close()
    receipts = stage.receipts()
    flips = max(4, faults // 2)
    caught = sum(flip_once(stage.data, tmp_path / "copy", receipts, rng) for _ in range(flips))
    files = [text for path in tmp_path.glob("*.receipts") for text in ("--receipts", str(path))]
    answer = understudy_here("data", "verify", "--data", stage.data.root, *files)
    assert answer.code == 0, f"seed {seed}: {answer}"
    assert answer.fields["receipt_fates"]["stored"] == len(set(receipts)) > 0
    history = list(read_history(tmp_path))
    acked = {op.frame for op in history if op.kind == "ok"}
    assert set(receipts) <= acked, "a receipt without an acknowledgement"
    stored = read_store(stage.data.store)
    problems = check_history(history, stored, reader.seen)
    assert problems == [], f"seed {seed}: {problems[:5]}"
    note = f"{dict(stage.faults)}, {flips} flips of which {caught} changed something"
    tried = stage.faults.total() + flips
    card.line("history check over HTTP: faults", tried=tried, held=tried, note=note)
    card.line("history check over HTTP: acknowledged frames", tried=len(acked), held=len(acked))
    fates = answer.fields["receipt_fates"]
    card.line("receipts answered", tried=sum(fates.values()), held=fates["stored"])


def flip_once(
    data: DataFolder, target: Path, receipts: list[AckedFrame], rng: random.Random
) -> bool:
    """Flip a byte of a copy; every receipt's answer is true. Returns whether anything is amiss."""
    copy = DataFolder(Path(shutil.copytree(data.root, target)))
    folder = rng.choice([copy.stream, copy.store])
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".log", ".sqlite")]
    path = rng.choice([path for path in files if path.stat().st_size])
    at = rng.randrange(path.stat().st_size)
    sabotage.flip(path, at)
    found = verify(copy, receipts=receipts)
    what = f"byte {at} of {path.relative_to(copy.root)}"
    if found.exit_code == 0:
        readable = set(read_store(copy.store).values())
        assert set(receipts) <= readable, f"{what}: verify did not see the loss"
    else:
        assert found.corrupt or found.lost_chunks or found.receipt_fates["missing"], what
    shutil.rmtree(copy.root)
    return found.exit_code != 0


A, B = (AckedFrame(bytes([at] * 16), 0, 9, at) for at in (1, 2))


@pytest.mark.parametrize(
    ("history", "stored", "said"),
    [
        ([Op("invoke", A), Op("ok", A)], {1: A}, ""),
        ([Op("invoke", A), Op("info", A)], {1: A}, ""),
        ([Op("invoke", A), Op("info", A)], {}, ""),
        ([Op("invoke", A), Op("fail", A), Op("invoke", A), Op("ok", A)], {1: A}, ""),
        ([Op("invoke", A), Op("ok", A)], {}, "acknowledged but not stored"),
        ([Op("invoke", A), Op("ok", A)], {1: A._replace(crc=7)}, "acknowledged but not stored"),
        ([Op("invoke", A), Op("ok", A)], {1: A, 2: A}, "stored twice"),
        ([Op("invoke", A), Op("info", A)], {1: A, 2: A._replace(crc=7)}, "stored twice"),
        ([Op("invoke", A), Op("fail", A)], {1: A}, "refused but stored"),
        ([], {1: A}, "stored but never sent"),
    ],
)
def test_the_check_of_a_history_sees_every_kind_of_disagreement(
    history: list[Op], stored: dict[int, AckedFrame], said: str
) -> None:
    problems = check_history(history, stored)
    assert any(said in problem for problem in problems) if said else problems == []


def test_the_check_of_a_history_sees_readers_that_disagree() -> None:
    history = [Op(kind, frame) for frame in (A, B) for kind in ("invoke", "ok")]
    stored = {1: A, 2: B}
    assert check_history(history, stored, [(1, A), (2, B)]) == []
    assert "out of order" in check_history(history, stored, [(2, B), (1, A)])[0]
    assert "out of order" in check_history(history, stored, [(1, A), (1, A)])[0]
    assert "a reader saw" in check_history(history, stored, [(1, B)])[0]
