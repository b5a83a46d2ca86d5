"""Bad frames among healthy sessions are rejected or quarantined with a reason, never stored."""

import itertools
import random
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from tests.card import Card
from tests.faults.memory import MIB, own_bytes, steady_growth
from tests.faults.poison import Poisoner, RawFrame
from tests.faults.profiles import sizes
from understudy.core.clock import SystemClock
from understudy.core.log import no_sync
from understudy.core.names import new_session
from understudy.experience.frame import CloseReport, Frame, close_frame, data_frame
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.ports import Ack, Partition, Position, Read, Record, SessionFilter, Stored
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.samples import cart_spec, random_chunk, random_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")

SPEC = cart_spec()


@pytest.fixture
def specs(tmp_path: Path) -> SpecFolder:
    path = tmp_path / "games" / SPEC.game / f"{SPEC.schema}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(SPEC.to_json())
    return SpecFolder(tmp_path / "games")


def healthy(rng: random.Random, now_s: float) -> list[Frame]:
    """A whole session of one player, closed."""
    player = rng.randbytes(16)
    session = new_session(now_s, rng.randbytes(10))
    chunks = random_session(
        SPEC, np.random.default_rng(rng.randrange(1 << 30)), session=session, n_chunks=3
    )
    frames = [chunk.frame() for chunk in chunks]
    n_steps = sum(chunk.meta.n_steps for chunk in chunks)
    frames.append(close_frame(session, len(frames), CloseReport(len(frames), n_steps)))
    return [frame.stamped(player, int(now_s)) for frame in frames]


@sizes("mutants", short=2_000, full=200_000)
def test_no_bad_frame_is_stored_and_no_healthy_session_is_disturbed(
    tmp_path: Path, specs: SpecFolder, mutants: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    now_s = SystemClock().now()
    poisoner = Poisoner(SPEC, rng, now_s=now_s)
    poisoner.open = healthy(rng, now_s)[0]
    stream = FileStream(tmp_path / "stream", sync=no_sync)
    stream.append([poisoner.open])
    kept = {(poisoner.open.session, 0, poisoner.open.body_crc)}
    too_large = 0
    tried: Counter[str] = Counter()
    memory: list[int] = []
    with LocalStore(tmp_path / "store", specs=specs, synchronous="OFF") as store:
        service = IngestService(stream, store, specs, owner="test")
        while tried.total() < mutants:
            session = healthy(rng, now_s)
            kept |= {(frame.session, frame.chunk_no, frame.body_crc) for frame in session}
            poisoner.stored += session[:-1]
            del poisoner.stored[:-300]
            stream.append(session[:2])
            service.drain()
            for frame in session[2:]:
                for _ in range(20):
                    name, raw = poisoner.make()
                    tried[name] += 1
                    (outcome,) = stream.append([RawFrame(raw, frame.session)])  # type: ignore[list-item]
                    too_large += not outcome.accepted
                stream.append([frame])
            service.drain()
            if tried.total() % (mutants // 10) == 0:
                memory.append(own_bytes())
                stream.trim(store.positions(), before_s=now_s + 1e9)
        stats = service.stats
        found = set(stored_keys(store))
        sessions = [one for one in store.sessions(SessionFilter()) if one.n_chunks]
        broken = [one for one in sessions if one.missing or not one.closed]
        quarantined = store.audit().quarantined
    stream.close()
    assert found == kept, (
        f"{len(found - kept)} bad frames stored, {len(kept - found)} healthy ones missing"
    )
    assert [one.session for one in broken] == [poisoner.open.session]
    assert too_large == tried["too_large"], "the stream itself refuses these"
    assert stats.fates["new"] == len(kept)
    # A flipped length makes two records of one frame, so there may be a few more than were sent.
    assert stats.frames == len(kept) + sum(stats.refusals.values()), (
        "each record is stored or has a reason"
    )
    assert sum(stats.refusals.values()) >= tried.total() - too_large
    refused = min(tried.total(), sum(stats.refusals.values()) + too_large)
    assert "" not in stats.refusals
    assert len(tried) == len(poisoner.kinds)
    growth = memory[-1] - memory[len(memory) // 3]
    assert growth < 64 * MIB, f"memory grew by {growth / MIB:.0f} MiB: {[m // MIB for m in memory]}"
    note = (
        f"{len(tried)} kinds, {len(stats.refusals)} reasons, {quarantined} quarantined, "
        f"{growth / MIB:+.0f} MiB"
    )
    card.line("bad frames", tried=tried.total(), held=refused, note=note)
    card.line("healthy frames among them", tried=len(kept), held=len(kept & found))


def stored_keys(store: LocalStore) -> Iterator[tuple[uuid.UUID, int, int]]:
    """Every stored frame."""
    cursor = None
    while (page := store.tail(cursor, max_items=1000, wait_s=0.0)).items:
        cursor = page.cursor
        for item in page.items:
            assert isinstance(item, Stored)
            yield item.frame.session, item.frame.chunk_no, item.frame.body_crc


class EndlessSessions:
    """A Stream that makes a new session of one tiny chunk and a close whenever it is read."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._now_s = SystemClock().now()
        self._template = random_chunk(
            SPEC, np.random.default_rng(0), session=new_session(self._now_s), n_steps=1
        )
        self._body = self._template.encode()

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        raise NotImplementedError

    def partitions(self) -> Sequence[Partition]:
        return [Partition("p")]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        start = int(after) + 1 if after is not None else 0
        numbers = range(start // 2, min(start // 2 + 500, self._count))
        records = [record for number in numbers for record in self._session(number)]
        records = records[start % 2 :]
        return Read(records, records[-1].position if records else after, not records)

    def _session(self, number: int) -> Iterator[Record]:
        rng = random.Random(f"{self._seed} {number}")
        session = new_session(self._now_s, rng.randbytes(10))
        player = rng.randbytes(16)
        body = self._body.replace(str(self._template.meta.session).encode(), str(session).encode())
        frames = [data_frame(session, 0, body), close_frame(session, 1, CloseReport(1, 1))]
        for place, frame in enumerate(frames, 2 * number):
            yield Record(
                Position(str(place)), self._now_s, frame.stamped(player, int(self._now_s)).encode()
            )

    def close(self) -> None:
        pass


@sizes("sessions", short=6_000, full=1_000_000, timeout_s=3000)
def test_memory_stays_flat_over_many_sessions(
    tmp_path: Path, specs: SpecFolder, sessions: int, seed: int, card: Card
) -> None:
    stream = EndlessSessions(sessions, seed)
    memory: list[int] = []
    with LocalStore(tmp_path / "store", specs=specs, synchronous="OFF") as store:
        service = IngestService(stream, store, specs, owner="test")
        for turn in itertools.count():
            if not service.step():
                break
            if turn % max(1, sessions // 500 // 20) == 0:
                memory.append(own_bytes())
        assert service.stats.fates == {"new": 2 * sessions}
    half = len(memory) // 2
    early = steady_growth(memory[:half])
    late = steady_growth(memory[half:])
    shown = f"memory in MiB: {[one // MIB for one in memory]}"
    # A leak grows with the number of sessions, so the limit does; other growth does not.
    assert late < MIB * min(8, 1 + sessions // 2_000), shown
    assert memory[-1] - memory[half] < 32 * MIB, shown
    note = f"memory {early / MIB:+.1f} MiB in the first half, {late / MIB:+.1f} MiB in the second"
    card.line("sessions, memory flat", tried=sessions, held=sessions, note=note)


def test_a_leak_is_detected_and_one_large_allocation_is_not_a_leak() -> None:
    """The control of flat memory."""
    assert steady_growth([n * MIB for n in range(20)]) == pytest.approx(19 * MIB)
    assert steady_growth([n // 4 * 4 * MIB for n in range(20)]) > 8 * MIB
    assert steady_growth([60 * MIB] * 12 + [110 * MIB] * 8) == 0


def test_the_bomb_would_be_large() -> None:
    """The control of the bombs: they inflate to what one frame may never take."""
    poisoner = Poisoner(SPEC, random.Random(0), now_s=SystemClock().now())
    raw = poisoner.kinds["zlib_bomb"](poisoner)
    assert len(raw) < 32 * 1024
    assert crc32(raw[64:]) == int.from_bytes(raw[12:16], "little")
