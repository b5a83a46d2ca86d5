"""The ingest service: each frame once, whatever the stream, the store and the process do."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.streams.memory import MemoryStream
from understudy.core.errors import ConfigError, StorageFailed, StorageFull, Unreachable
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.experience.frame import MAX_COUNT, Frame
from understudy.experience.game import game_spec
from understudy.experience.session import DAY_S
from understudy.ingest.check import check
from understudy.ingest.service import IngestConfig, IngestService
from understudy.ingest.specs import SpecFolder
from understudy.ports import Partition, Position, Read, Receipt, Record, Stored, WriteBatch
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.faults import Crash, CrashingStore, Faults, FaultyStream
from understudy.testing.samples import (
    OTHER_PLAYER,
    PLAYER,
    cart_spec,
    random_chunk,
    random_session,
    stamped,
)
from understudy.testing.streams import read_all

SPEC = cart_spec()


class Bench:
    """A stream, a store and a service between them, on a manual clock."""

    def __init__(self, folder: Path, *, specs: KnownSpecs | None = None) -> None:
        self.clock = ManualClock()
        self.rng = np.random.default_rng(4)
        self.stream = MemoryStream(2, clock=self.clock)
        self.store = LocalStore(folder, clock=self.clock)
        self.specs = specs or KnownSpecs(SPEC)
        self.service = self.start()

    def start(
        self, *, owner: str = "bench", max_read_bytes: int = 1 << 20, store=None, stream=None
    ) -> IngestService:
        return IngestService(
            stream or self.stream,
            store or self.store,
            self.specs,
            owner=owner,
            config=IngestConfig(max_read_bytes=max_read_bytes),
            clock=self.clock,
        )

    def session(self, n_chunks: int = 3) -> list[Chunk]:
        return random_session(SPEC, self.rng, n_chunks=n_chunks)

    def send(self, chunks: Sequence[Chunk], player: bytes = PLAYER) -> list[Frame]:
        frames = list(stamped(chunks, player=player))
        self.stream.append(frames)
        return frames

    def stored(self) -> list[Chunk]:
        items = self.store.tail(None, max_items=10_000, wait_s=0.0).items
        return [item.chunk for item in items if isinstance(item, Stored) and item.chunk is not None]

    def keys(self) -> list[tuple[str, int]]:
        return sorted((str(chunk.meta.session), chunk.meta.chunk_no) for chunk in self.stored())


def keys_of(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    return sorted((str(chunk.meta.session), chunk.meta.chunk_no) for chunk in chunks)


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()


def test_frames_of_the_stream_are_stored(bench: Bench):
    chunks = [chunk for _ in range(5) for chunk in bench.session()]
    bench.send(chunks)
    bench.clock.advance(2.0)
    assert bench.service.step() == 15
    assert bench.service.step() == 0
    assert bench.keys() == keys_of(chunks)
    stats = bench.service.stats
    assert (stats.frames, stats.fates["new"], stats.lag_s) == (15, 15, 2.0)
    assert stats.steps == sum(chunk.meta.n_steps for chunk in chunks)


def test_the_lag_is_the_age_of_what_may_not_be_stored(bench: Bench, monkeypatch):
    service = bench.service
    bench.clock.advance(3.0)
    assert service.lag_s == 3.0, "nothing was read yet"
    bench.send(bench.session())
    bench.clock.advance(2.0)
    service.step()
    assert service.lag_s == 2.0, "so old is the newest of the stored frames"
    service.step()
    assert service.lag_s == 0.0
    bench.clock.advance(45.0)
    assert service.lag_s == 45.0, "a role that is stuck cannot know what has arrived"

    def away() -> None:
        raise Unreachable("nobody answers")

    monkeypatch.setattr(bench.stream, "partitions", away)
    with pytest.raises(Unreachable):
        service.step()
    assert service.lag_s == 45.0
    monkeypatch.undo()
    service.step()
    assert service.lag_s == 0.0


def test_a_damaged_record_without_a_time_does_not_change_the_lag(bench: Bench, monkeypatch):
    bench.service.step()
    record = Record(Position("0"), 0.0, b"damaged stream entry")
    read = Read([record], Position("0"), ended=False)
    monkeypatch.setattr(bench.stream, "read", lambda *_, **__: read)
    bench.service.step()
    assert bench.service.lag_s == 0.0


def test_one_bad_frame_never_stops_a_partition(bench: Bench):
    good = bench.session(8)
    frames = list(stamped(good))
    odd = [
        frames[0].stamped(PLAYER, 1 << 31),
        Frame(
            kind=frames[0].kind, session=frames[0].session, chunk_no=MAX_COUNT, body=b"", body_crc=0
        ),
        Frame(
            kind=frames[0].kind,
            session=frames[0].session,
            chunk_no=(1 << 64) - 1,
            body=b"",
            body_crc=0,
        ),
        Frame(kind=frames[0].kind, session=new_session(0.0), chunk_no=0, body=b"{}", body_crc=7),
        random_chunk(
            game_spec("nobody", obs=1, actions=1), bench.rng, session=new_session(START_S)
        ).frame(),
    ]
    for index, frame in enumerate(frames):
        bench.stream.append([frame, odd[index % len(odd)]])
    bench.service.drain()
    assert bench.keys() == keys_of(good)
    reasons = bench.service.stats.refusals
    assert set(reasons) == {"bad_number", "bad_body_checksum", "unknown_game"}
    audit = bench.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (8, 0, 0)


def test_duplicates_reorders_failures_and_lost_responses_store_each_frame_once(bench: Bench):
    faults = Faults(duplicate=0.3, reorder=0.5, fail=0.2, lose_answer=0.2)
    stream = FaultyStream(bench.stream, faults, bench.rng)
    chunks = [chunk for _ in range(6) for chunk in bench.session(10)]
    waiting = list(stamped(chunks))
    while waiting:
        batch = waiting[:7]
        waiting = waiting[7:]
        try:
            outcomes = stream.append(batch)
            waiting += [
                frame for frame, one in zip(batch, outcomes, strict=True) if not one.accepted
            ]
        except StorageFailed:
            waiting += batch
        bench.service.step()
    bench.service.drain()
    assert bench.keys() == keys_of(chunks)
    assert bench.service.stats.fates["duplicate"] > 10
    audit = bench.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined) == (
        60,
        0,
        0,
        0,
    )


def test_a_service_that_dies_after_any_write_stores_nothing_twice(bench: Bench):
    chunks = bench.session(24)
    bench.send(chunks)
    lives = 0
    while True:
        lives += 1
        service = bench.start(
            store=CrashingStore(bench.store, dies=lambda write: write == 2), max_read_bytes=1
        )
        try:
            service.drain()
            break
        except Crash:
            continue
    assert lives > 8
    assert bench.service.stats.fates["duplicate"] == 0
    assert bench.keys() == keys_of(chunks)
    assert bench.store.audit().duplicate_chunks == 0


def test_a_restarted_service_resumes_at_the_stored_position(tmp_path: Path):
    bench = Bench(tmp_path)
    first = bench.session(4)
    second = bench.session(4)
    bench.send(first)
    bench.service.drain()
    bench.store.close()
    bench.store = LocalStore(tmp_path, clock=bench.clock)
    again = bench.start(owner="another process")
    bench.send(second)
    again.drain()
    assert again.stats.frames == 4, "nothing is read twice"
    assert bench.keys() == keys_of([*first, *second])
    bench.store.close()


def test_a_parked_schema_is_stored_after_it_is_registered(bench: Bench):
    later = game_spec("cart", obs=7, actions=3)
    chunks = random_session(later, bench.rng, n_chunks=3)
    bench.send(chunks)
    bench.service.drain()
    assert bench.stored() == []
    assert bench.service.stats.refusals == {"unknown_schema": 3}
    waiting = bench.store.quarantined()
    assert [one.parked for one in waiting] == [True] * 3
    bench.specs.register(later)
    checked = [check(one.raw, specs=bench.specs, received_s=one.received_s) for one in waiting]
    candidates = [one.candidate for one in checked if one.candidate is not None]
    assert set(bench.store.replay([one.id for one in waiting], candidates).fates) == {"new"}
    assert bench.stored() == chunks
    bench.send(chunks)
    bench.service.drain()
    assert bench.service.stats.fates["duplicate"] == 3


def test_acknowledged_frames_are_stored_after_any_downtime_of_ingest(bench: Bench):
    chunks = bench.session(3)
    bench.send(chunks)
    bench.clock.advance(40 * DAY_S)
    bench.service.drain()
    assert bench.stored() == chunks


def test_a_parked_frame_can_be_replayed_whenever_its_schema_is_registered(bench: Bench):
    later = game_spec("cart", obs=7, actions=3)
    bench.send(random_session(later, bench.rng, n_chunks=1))
    bench.service.drain()
    bench.clock.advance(40 * DAY_S)
    bench.specs.register(later)
    (waiting,) = bench.store.quarantined()
    assert (
        check(waiting.raw, specs=bench.specs, received_s=waiting.received_s).outcome == "candidate"
    )


def test_an_unknown_game_is_refused_and_an_unknown_schema_of_a_known_game_is_parked(bench: Bench):
    elsewhere = game_spec("elsewhere", obs=2, actions=2)
    chunks = random_session(elsewhere, bench.rng, n_chunks=2)
    bench.send(chunks[:1])
    bench.service.drain()
    bench.specs.register(game_spec("elsewhere", obs=3, actions=2))
    bench.send(chunks[1:])
    bench.service.drain()
    assert [one.reason for one in bench.store.quarantined()] == ["unknown_game", "unknown_schema"]


def test_conflicts_and_foreign_sessions_are_counted_by_reason(bench: Bench):
    chunks = bench.session(3)
    bench.send(chunks[:2])
    bench.send([Chunk(chunks[1].meta, {**chunks[1].columns, "obs": chunks[1].columns["obs"] * 2})])
    bench.send(chunks[2:], player=OTHER_PLAYER)
    bench.service.drain()
    assert bench.service.stats.refusals == {"conflict": 1, "other_player": 1}
    assert bench.stored() == chunks[:2]


def test_a_lost_partition_is_claimed_again_when_it_is_free(bench: Bench):
    first = bench.session(2)
    second = bench.session(2)
    bench.send(first)
    bench.service.drain()
    bench.clock.advance(31.0)
    rival = bench.start(owner="rival")
    bench.send(second)
    assert rival.step() == 2
    bench.send(bench.session(1))
    assert bench.service.step() == 0, "the rival holds the partitions"
    assert bench.service.step() == 0
    bench.clock.advance(31.0)
    assert bench.service.step() == 1
    assert bench.store.audit().duplicate_chunks == 0
    assert len(bench.stored()) == 5


class BusyStore:
    """A store whose every write appends more to the stream than one read returns."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.claim = bench.store.claim
        self.writes = 0

    def write(self, batch: WriteBatch) -> Receipt:
        self.writes += 1
        assert self.writes < 100, "draining has no end"
        self._bench.clock.advance(0.1)
        for _ in range(4):
            self._bench.send(self._bench.session(1))
        return self._bench.store.write(batch)


def test_draining_ends_although_players_are_faster_than_ingest(bench: Bench):
    before = [chunk for _ in range(8) for chunk in bench.session(3)]
    bench.send(before)
    service = bench.start(store=BusyStore(bench), max_read_bytes=1)
    service.drain()
    assert set(keys_of(before)) <= set(bench.keys()), "what was there before the call"
    assert len(bench.stored()) <= len(before) + 2, "one record behind it for each partition"


def test_draining_reads_everything_before_the_call_in_every_partition_and_child(bench: Bench):
    """Even when a child's records were appended at the moment of the call."""
    chunks = [chunk for _ in range(12) for chunk in bench.session(2)]
    bench.send(chunks[:12])
    bench.stream.split("p0")
    bench.stream.split("p1")
    bench.send(chunks[12:])
    bench.start(max_read_bytes=1).drain()
    assert bench.keys() == keys_of(chunks)


def test_draining_continues_with_other_partitions_when_a_claim_is_lost(bench: Bench):
    chunks = [chunk for _ in range(12) for chunk in bench.session(2)]
    bench.send(chunks)
    service = bench.start(max_read_bytes=1)
    service.step()
    bench.clock.advance(31.0)
    bench.store.claim("p0", owner="rival", ttl_s=30.0)
    service.drain()
    left = len(read_all(bench.stream)["p0"]) - 1
    assert left > 0
    assert len(bench.stored()) == len(chunks) - left, "all but what the rival holds"
    bench.clock.advance(31.0)
    service.drain()
    assert bench.keys() == keys_of(chunks)


class Elsewhere(MemoryStream):
    """A stream on a machine whose clock is wrong; it says how complete a read is by durations
    alone."""

    def __init__(self, clock: ManualClock, *, ahead_s: float) -> None:
        super().__init__(2, clock=clock)
        self._ours = clock
        self._ahead_s = ahead_s

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        last_s = read.records[-1].time_s if read.records else self._ours.now()
        wrong = [replace(one, time_s=one.time_s + self._ahead_s) for one in read.records]
        return Read(wrong, read.next, read.ended, last_s - 0.001)


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_draining_does_not_need_synchronised_clocks(bench: Bench, ahead_s: float):
    bench.stream = Elsewhere(bench.clock, ahead_s=ahead_s)
    before = [chunk for _ in range(8) for chunk in bench.session(3)]
    bench.send(before)
    bench.clock.advance(1.0)
    service = bench.start(store=BusyStore(bench), max_read_bytes=1)
    service.drain()
    assert set(keys_of(before)) <= set(bench.keys()), "what was there before the call"
    assert len(bench.stored()) <= len(before) + 4, "and hardly more"


class SetBack(Elsewhere):
    """A stream that was written before the machine's clock was set back."""

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        return replace(read, complete_to_s=None)


def test_draining_reads_everything_although_the_clock_was_set_back(bench: Bench):
    bench.stream = SetBack(bench.clock, ahead_s=7200.0)
    before = [chunk for _ in range(8) for chunk in bench.session(3)]
    bench.send(before)
    bench.start(max_read_bytes=1).drain()
    assert bench.keys() == keys_of(before)


class Hidden(Elsewhere):
    """A stream that lists children only after their parent was read to its end, as Kinesis may."""

    is_read = False

    def partitions(self) -> Sequence[Partition]:
        return [one for one in super().partitions() if self.is_read or not one.parents]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        self.is_read |= read.ended
        return read


def test_draining_includes_the_children_of_ended_partitions(bench: Bench):
    stream = bench.stream = Hidden(bench.clock, ahead_s=7200.0)
    chunks = [chunk for _ in range(12) for chunk in bench.session(2)]
    bench.send(chunks[:12])
    stream.split("p0")
    stream.split("p1")
    bench.send(chunks[12:])
    bench.clock.advance(1.0)
    bench.start(max_read_bytes=1).drain()
    assert bench.keys() == keys_of(chunks)


class OneIsAway(MemoryStream):
    """A stream with one unreachable partition."""

    is_away = True

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        if self.is_away and partition == "p0":
            raise Unreachable("p0 is read by others")
        return super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)


def test_an_unreachable_partition_does_not_block_the_others(bench: Bench):
    stream = bench.stream = OneIsAway(3, clock=bench.clock)
    chunks = [chunk for _ in range(9) for chunk in bench.session(1)]
    bench.send(chunks)
    service = bench.start()
    for _ in range(3):
        with pytest.raises(Unreachable, match="p0"):
            service.step()
    bench.clock.advance(30.0)
    with pytest.raises(Unreachable, match="p0"):
        service.step()
    assert service.lag_s >= 30.0, "the others are up to date, but nothing of p0 was ever stored"
    stream.is_away = False
    left = len(read_all(stream)["p0"])
    assert 0 < left == len(chunks) - len(bench.stored())
    assert service.step() == left


def test_a_frame_without_enough_memory_does_not_block_the_other_partitions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    stream = bench.stream = MemoryStream(3, clock=bench.clock)
    chunks = [chunk for _ in range(9) for chunk in bench.session(1)]
    bench.send(chunks)
    too_large = {record.raw for record in read_all(stream)["p0"]}
    assert len(too_large) < len(chunks)

    def write(batch: WriteBatch) -> Receipt:
        if batch.partition == "p0":
            raise MemoryError
        return true_write(batch)

    true_write = bench.store.write
    monkeypatch.setattr(bench.store, "write", write)
    service = bench.start()
    for _ in range(3):
        with pytest.raises(StorageFull, match="no memory to store a frame"):
            service.step()
    assert len(bench.stored()) == len(chunks) - len(too_large)
    monkeypatch.undo()
    service.step()
    assert bench.keys() == keys_of(chunks)


@pytest.mark.parametrize("name", ["max_read_bytes", "claim_ttl_s", "full_pause_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_invalid_settings_are_rejected(name: str, value: float):
    with pytest.raises(ConfigError, match=f"{name} is {value}; use a number above 0"):
        IngestConfig(**{name: value})  # type: ignore[arg-type]


def test_reading_resumes_at_the_earliest_position_after_a_trim(bench: Bench):
    stream = bench.stream = MemoryStream(1, clock=bench.clock)
    service = bench.start()
    first = bench.session(2)
    bench.send(first)
    service.drain()
    lost = bench.session(3)
    kept = bench.session(3)
    bench.send(lost)
    bench.send(kept)
    stream.trim("p0", keep_last=3)
    service.drain()
    assert bench.keys() == keys_of([*first, *kept])
    bench.send(first)
    service.drain()
    assert service.stats.fates["duplicate"] == 2


def test_children_are_read_after_their_parents(bench: Bench):
    stream = bench.stream = MemoryStream(1, clock=bench.clock)
    service = bench.start(max_read_bytes=1)
    chunks = bench.session(6)
    bench.send(chunks[:3])
    stream.split("p0")
    bench.send(chunks[3:])
    seen: list[int] = []
    while service.step():
        seen = [chunk.meta.chunk_no for chunk in bench.stored()]
    assert seen == [0, 1, 2, 3, 4, 5]


class ScriptedStore:
    """A store that is full during the first writes."""

    def __init__(self, inner: LocalStore, full_for: int) -> None:
        self._inner = inner
        self._left = full_for
        self.claim = inner.claim

    def write(self, batch: WriteBatch) -> Receipt:
        if self._left:
            self._left -= 1
            raise StorageFull("no room")
        return self._inner.write(batch)


def test_ingest_waits_while_the_store_is_full_and_resumes(bench: Bench):
    chunks = bench.session(3)
    bench.send(chunks)
    stop = Event()

    class Stopping(ManualClock):
        """Stops the run once it waits for want of work rather than of room."""

        def wait(self, event: Event, timeout_s: float) -> bool:
            waits.append(timeout_s)
            if timeout_s < 0.5:
                event.set()
            return super().wait(event, timeout_s)

    waits: list[float] = []
    bench.clock = Stopping()
    service = bench.start(store=ScriptedStore(bench.store, full_for=3))
    service.run(stop)
    assert waits[:3] == [1.0] * 3
    assert bench.stored() == chunks


def test_run_ends_when_stop_is_set(bench: Bench):
    stop = Event()
    service = IngestService(bench.stream, bench.store, bench.specs, owner="bench")
    thread = Thread(target=service.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()


class BrokenReads:
    """A stream with records that are not frames."""

    def __init__(self, raws: Sequence[bytes]) -> None:
        self._records = [Record(Position(str(n)), START_S, raw) for n, raw in enumerate(raws)]

    def append(self, frames: Sequence[Frame]) -> Sequence[object]:
        return []

    def partitions(self) -> Sequence[Partition]:
        return [Partition("p")]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        start = 0 if after is None else int(after) + 1
        records = self._records[start : start + 50]
        return Read(records, records[-1].position if records else after, False)

    def close(self) -> None: ...


def test_garbage_of_every_length_is_quarantined(bench: Bench):
    raws = [bench.rng.bytes(int(n)) for n in bench.rng.integers(0, 300, 400)]
    frame = next(stamped(bench.session(1))).encode()
    raws += [frame[:n] for n in range(0, len(frame), 40)]
    service = bench.start(stream=BrokenReads([*raws, frame]))
    service.drain()
    assert len(bench.stored()) == 1
    audit = bench.store.audit()
    assert audit.quarantined > 400
    assert audit.gap_chunks == 0


def test_ingest_from_a_file_stream_survives_reopening_everything(tmp_path: Path):
    bench = Bench(tmp_path / "store")
    folder = tmp_path / "games" / SPEC.game
    folder.mkdir(parents=True)
    (folder / f"{SPEC.schema}.json").write_bytes(SPEC.to_json())
    chunks = bench.session(20)
    for start in range(0, 20, 4):
        stream = FileStream(tmp_path / "stream", clock=bench.clock)
        stream.append(list(stamped(chunks[start : start + 4])))
        service = IngestService(
            stream, bench.store, SpecFolder(tmp_path / "games"), owner="x", clock=bench.clock
        )
        service.drain()
        stream.close()
        service.drain()
        bench.store.close()
        bench.store = LocalStore(tmp_path / "store", clock=bench.clock)
    assert bench.stored() == chunks
    assert len(bench.store.positions()) == 5
    bench.store.close()


def test_a_spec_folder_returns_only_specs_with_the_right_schema(tmp_path: Path):
    specs = SpecFolder(tmp_path)
    assert specs.spec("cart", SPEC.schema) is None
    assert not specs.has_game("cart")
    folder = tmp_path / "cart"
    folder.mkdir()
    assert specs.has_game("cart")
    (folder / f"{'0' * 64}.json").write_bytes(SPEC.to_json())
    (folder / f"{'1' * 64}.json").write_bytes(b"{")
    assert specs.spec("cart", "0" * 64) is None
    assert specs.spec("cart", "1" * 64) is None
    (folder / f"{SPEC.schema}.json").write_bytes(SPEC.to_json())
    assert specs.spec("cart", SPEC.schema) == SPEC
    assert specs.spec("../cart", SPEC.schema) is None
    assert not specs.has_game("../cart")
    assert specs.spec("cart", "no schema") is None
