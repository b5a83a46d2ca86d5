"""Small frames that decode to much or take long to check: what a batch and a page may hold and
use does not depend on how well their frames are packed."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.card import Card
from tests.faults.amplifying import SPECS, UNKNOWN, Amplifier
from tests.faults.memory import MIB
from tests.faults.profiles import sizes
from tests.ingest.specs import KnownSpecs
from understudy.core.clock import SystemClock
from understudy.core.log import no_sync
from understudy.experience.frame import Frame
from understudy.experience.session import SessionState, unpack_state
from understudy.ingest.service import IngestConfig, IngestService
from understudy.platform.ingest import replay
from understudy.ports import Cursor, Stored
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.streams.file import FileStream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")

BATCH_BYTES = 128 * MIB
"""What ingest may hold at once for one batch: 64 MiB of decoded columns, the frame that exceeds
them, and what checking one frame needs."""
PAGE_BYTES = 128 * MIB
"""The same for a page of the tail that a learner reads."""
BATCH_CPU_S = 4.0
"""Processor time of one batch, on a slow machine."""
KINDS = sorted(Amplifier(0, now_s=0.0).kinds)


def fill(folder: Path, frames: list[Frame]) -> FileStream:
    stream = FileStream(folder / "stream", sync=no_sync)
    for frame in frames:
        assert stream.append([frame])[0].accepted
    return stream


def peak_bytes() -> int:
    """The most bytes held since the last call."""
    peak = tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    return peak


@pytest.mark.parametrize("kind", KINDS)
@sizes("frames", short=10, full=128)
def test_batches_and_pages_are_bounded_however_well_frames_are_packed(
    tmp_path: Path, kind: str, frames: int, seed: int, card: Card
) -> None:
    amplifier = Amplifier(seed, now_s=SystemClock().now())
    sent = [*amplifier.kinds[kind](frames), amplifier.honest()]
    stream = fill(tmp_path, sent)
    sent_bytes = sum(frame.size_bytes for frame in sent)
    specs = KnownSpecs(*SPECS.values())
    batch_cpu_s: list[float] = []
    # Timed in a pass of its own: tracing allocations takes several times as long as ingest.
    with LocalStore(tmp_path / "timed", synchronous="OFF") as store:
        service = IngestService(stream, store, specs, owner="test")
        moved = 1
        while moved:
            began_s = time.process_time()
            moved = service.step()
            batch_cpu_s.append(time.process_time() - began_s)
        assert service.stats.frames == len(sent)
    tracemalloc.start()
    try:
        with LocalStore(tmp_path / "store", synchronous="OFF") as store:
            service = IngestService(stream, store, specs, owner="test")
            batch_bytes: list[int] = []
            moved = 1
            while moved:
                peak_bytes()
                moved = service.step()
                batch_bytes.append(peak_bytes())
            assert service.stats.frames == len(sent)
            page_bytes = read_tail(tmp_path / "store", sent[-1])
            specs.register(UNKNOWN)
            peak_bytes()
            replay(store, specs, None)
            batch_bytes.append(peak_bytes())
    finally:
        tracemalloc.stop()
        stream.close()
    assert max(batch_bytes) < BATCH_BYTES, f"{max(batch_bytes) / MIB:.0f} MiB in one batch"
    assert max(page_bytes) < PAGE_BYTES, f"{max(page_bytes) / MIB:.0f} MiB in one page"
    assert max(batch_cpu_s) < BATCH_CPU_S, f"{max(batch_cpu_s):.2f} s of CPU in one batch"
    card.line(
        f"amplification at ingest and learner, {kind}",
        tried=len(sent),
        held=len(sent),
        note=f"{sent_bytes:,} bytes sent; at most {max(batch_bytes) / MIB:.0f} MiB in a batch, "
        f"{max(page_bytes) / MIB:.0f} MiB in a page",
    )


def read_tail(folder: Path, last: Frame) -> list[int]:
    """Read a whole store as learners do; return the bytes held for each page."""
    held: list[int] = []
    arrivals: list[int] = []
    cursor: Cursor | None = None
    final = None
    with StoreView(folder) as view:
        while True:
            peak_bytes()
            page = view.tail(cursor, max_items=1024, wait_s=0.0)
            held.append(peak_bytes())
            if not page.items:
                break
            cursor = page.cursor
            arrivals += [item.arrival_no for item in page.items]
            final = page.items[-1]
    assert arrivals == list(range(1, len(arrivals) + 1)), "each item once, in order"
    assert isinstance(final, Stored)
    assert final.frame == last, "the honest frame behind all others"
    return held


def test_a_batch_of_very_small_frames_is_bounded_too(tmp_path: Path) -> None:
    amplifier = Amplifier(1, now_s=SystemClock().now())
    stream = FileStream(tmp_path / "stream", sync=no_sync)
    stream.append(list(amplifier.kinds["small frames"](40)))
    with LocalStore(tmp_path / "store", synchronous="OFF") as store:
        config = IngestConfig(max_decoded_bytes=MIB)
        service = IngestService(stream, store, KnownSpecs(), owner="test", config=config)
        batches = []
        while moved := service.step():
            batches.append(moved)
        assert sum(batches) == 2000
        assert max(batches) <= 512
        assert store.next_arrival - 1 == 2000
    stream.close()


def test_a_commit_ends_when_its_checks_took_long_enough(tmp_path: Path) -> None:
    """Also if no frame decodes to much: time is the last bound."""
    amplifier = Amplifier(1, now_s=SystemClock().now())
    stream = fill(tmp_path, list(amplifier.kinds["small frames"](2)))
    with LocalStore(tmp_path / "store", synchronous="OFF") as store:
        config = IngestConfig(max_check_s=1e-9)
        service = IngestService(stream, store, KnownSpecs(), owner="test", config=config)
        assert service.step() == 1
        assert service.drain()
        assert store.next_arrival - 1 == 100
    stream.close()


def test_a_partition_of_packed_frames_is_not_read_again_and_again(tmp_path: Path) -> None:
    amplifier = Amplifier(2, now_s=SystemClock().now())
    frames = [amplifier.honest() for _ in range(200)]
    inner = fill(tmp_path, frames)
    read_bytes = 0

    class Counted:
        partitions = inner.partitions

        def read(self, *args, **kwargs):
            nonlocal read_bytes
            read = inner.read(*args, **kwargs)
            read_bytes += sum(len(record.raw) for record in read.records)
            return read

    with LocalStore(tmp_path / "store", synchronous="OFF") as store:
        config = IngestConfig(max_decoded_bytes=16 * 1024)
        specs = KnownSpecs(*SPECS.values())
        stream = Counted()
        service = IngestService(stream, store, specs, owner="test", config=config)  # type: ignore[arg-type]
        service.drain()
        assert store.next_arrival - 1 == len(frames)
    assert read_bytes < 4 * sum(frame.size_bytes for frame in frames)
    inner.close()


def test_a_lack_of_memory_quarantines_nothing_and_is_over_when_there_is_some(
    tmp_path: Path,
) -> None:
    amplifier = Amplifier(3, now_s=SystemClock().now())
    stream = fill(
        tmp_path,
        [
            amplifier.honest(),
            *amplifier.kinds["many bytes"](1),
            *amplifier.kinds["bytes of an unknown schema"](1),
            amplifier.honest(),
        ],
    )
    stream.close()
    command = [sys.executable, "-m", "tests.faults.low_memory", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert output.returncode == 0, output.stderr
    found = json.loads(output.stdout.splitlines()[-1])
    assert found["short"] == [1, 0], "the honest frame before them, and nothing in quarantine"
    assert len(found["errors"]) == 3
    assert "no memory to store a frame" in found["errors"][0]
    assert found["after"] == [3, 1], "the frame of an unknown schema is parked"


def test_the_state_of_a_session_stays_bounded(tmp_path: Path) -> None:
    amplifier = Amplifier(4, now_s=SystemClock().now())
    frames = list(amplifier.kinds["drop reports of 1,024 ranges"](2))[:7]
    stream = fill(tmp_path, frames)
    with LocalStore(tmp_path / "store", synchronous="OFF") as store:
        IngestService(stream, store, KnownSpecs(), owner="test").drain()
        state: SessionState = store.lookup.require_state(frames[0].session)[1]
        assert 1000 < len(state.ranges) <= 1024
        assert unpack_state(state.pack()) == state
        assert store.next_arrival - 1 == 7
    stream.close()
