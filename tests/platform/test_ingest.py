"""The ingest role with a local or remote store: it recovers from errors and stops in time."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.ingest.specs import KnownSpecs
from tests.streams.memory import MemoryStream
from understudy.backends.data import DataFolder
from understudy.backends.local import trim_file_stream
from understudy.core.errors import Locked, StorageFailed, StorageFull, Unreachable
from understudy.experience.intake import deployment_key
from understudy.ingest.service import IngestConfig, IngestService
from understudy.platform import ingest
from understudy.platform.ingest import IngestRole, drain
from understudy.ports import Position, Read, Receipt, WriteBatch
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec
from understudy.testing.streams import sample_frames

SPECS = KnownSpecs(cart_spec())
NEXT = "remaining frames stay in the stream and are stored at the next start"


class Slow(MemoryStream):
    """A stream of which each read takes a second, by a clock of its own."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._time = clock

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        self._time.advance(1.0)
        return super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)


def test_draining_ends_in_time_and_the_rest_is_stored_by_the_next_start(tmp_path: Path):
    clock = ManualClock()
    stream = Slow(clock)
    stream.append(sample_frames(40))
    with LocalStore(tmp_path, clock=clock) as store:
        for within_s, chunks, said in ((15.0, 15, 1), (15.0, 30, 1), (15.0, 40, 0)):
            config = IngestConfig(max_read_bytes=1)
            service = IngestService(stream, store, SPECS, owner="test", config=config, clock=clock)
            with capture_logs() as logs:
                drain(service, within_s=within_s)
            assert store.audit().chunks == chunks
            assert [(one["event"], one["next"]) for one in logs] == [("not_drained", NEXT)] * said
        audit = store.audit()
    assert (audit.gap_chunks, audit.duplicate_chunks) == (0, 0)


class Refusing:
    """A store that takes nothing: it has no room, or its disk is broken."""

    def __init__(self, inner: Any, error: Exception) -> None:
        self._inner = inner
        self._error = error

    def write(self, batch: WriteBatch) -> Receipt:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_stop_while_the_disk_is_full_is_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere
):
    stop = threading.Event()
    data = DataFolder(tmp_path)
    stop.set()

    def filled() -> MemoryStream:
        stream = MemoryStream(clock=ManualClock())
        stream.append(sample_frames(3))
        return stream

    def role() -> Any:
        if not is_elsewhere:
            return IngestRole(data, specs=SPECS, open_stream=filled)
        there = tmp_path / "there"
        return IngestRole(
            data, specs=SPECS, open_stream=filled, open_store=lambda: LocalStore(there, specs=SPECS)
        )

    with role() as one, capture_logs() as logs, monkeypatch.context() as full:
        full.setattr(
            one.service._partitions,
            "_store",
            Refusing(one.store, StorageFull("no room; free some space")),
        )
        one.run(stop)
    assert [(log["event"], log["error"], log["next"]) for log in logs] == [
        ("not_drained", "no room; free some space", NEXT)
    ]
    with role() as one:
        one.run(stop)
        assert one.store.audit().chunks == 3


def test_a_stop_while_the_disk_fails_is_not_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop = threading.Event()
    stop.set()
    stream = MemoryStream(clock=ManualClock())
    stream.append(sample_frames(3))
    with (
        IngestRole(DataFolder(tmp_path), specs=SPECS, open_stream=lambda: stream) as role,
        capture_logs() as logs,
    ):
        monkeypatch.setattr(
            role.service._partitions,
            "_store",
            Refusing(role.store, StorageFailed("the disk refuses")),
        )
        with pytest.raises(StorageFailed, match="the disk refuses"):
            role.run(stop)
    assert logs == []


def test_only_old_stored_parts_of_a_file_stream_are_trimmed(tmp_path: Path):
    frames = sample_frames(3)
    elsewhere = MemoryStream(clock=ManualClock())
    elsewhere.append(frames)
    assert trim_file_stream(elsewhere, {"p0": Position("2")}, retention_s=0.0) == 0
    stream = FileStream(tmp_path)
    stream.append(frames)
    (partition,) = [one.id for one in stream.partitions()]
    stored = stream.read(partition, None, max_bytes=1 << 20, wait_s=0.0).next
    stream.close()
    stream = FileStream(tmp_path)
    assert trim_file_stream(stream, {partition: None}, retention_s=0.0) == 0
    assert trim_file_stream(stream, {partition: stored}, retention_s=3600.0) == 0
    assert trim_file_stream(stream, {partition: stored}, retention_s=-1.0) > 0


class AwayForAWhile(MemoryStream):
    """A stream that does not answer some of the times it is read."""

    def __init__(self, away: int) -> None:
        super().__init__(clock=ManualClock())
        self.away = away

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        if self.away:
            self.away -= 1
            raise Unreachable("nobody answers; try again")
        return super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.platform.ingest._TROUBLE_S", 0.01)


def role_of(folder: Path, stream: MemoryStream) -> IngestRole:
    return IngestRole(
        DataFolder(folder),
        specs=SPECS,
        open_stream=lambda: stream,
        open_store=lambda: LocalStore(folder / "there", specs=SPECS),
    )


def test_frames_are_stored_once_after_the_stream_is_reachable_again(tmp_path: Path, quick: None):
    stream = AwayForAWhile(5)
    frames = sample_frames(6)
    stop = threading.Event()
    stream.append(frames)
    with role_of(tmp_path, stream) as role:
        runner = threading.Thread(target=role.run, args=(stop,))
        runner.start()
        while role.service.stats.frames < 6 and runner.is_alive():
            stop.wait(0.01)
        stop.set()
        runner.join(20.0)
        audit = role.store.audit()
    assert not runner.is_alive()
    assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks) == (6, 0, 0)


def test_a_stop_while_a_backend_is_unreachable_leaves_the_rest_to_the_next_start(
    tmp_path: Path, quick: None
):
    stream = AwayForAWhile(10_000)
    stop = threading.Event()
    stream.append(sample_frames(3))
    stop.set()
    with role_of(tmp_path, stream) as role:
        role.run(stop)
        assert role.store.audit().chunks == 0
    again = AwayForAWhile(0)
    again.append(sample_frames(3))
    with role_of(tmp_path, again) as role:
        role.run(stop)
        assert role.store.audit().chunks == 3


class Opened:
    """What was opened here, and what of it was closed again."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stream(self) -> MemoryStream:
        opened = self.names
        opened.append("stream")

        class Told(MemoryStream):
            def close(self) -> None:
                super().close()
                opened.remove("stream")

        return Told()


def fails() -> Any:
    raise Unreachable("nobody answers")


def test_a_second_role_in_the_same_folder_is_rejected_before_anything_is_opened(tmp_path: Path):
    with role_of(tmp_path, MemoryStream()), pytest.raises(Locked):
        IngestRole(
            DataFolder(tmp_path),
            specs=SPECS,
            open_stream=fails,
            open_store=lambda: LocalStore(tmp_path / "x"),
        )
    assert not (tmp_path / "x").exists()


def test_what_was_opened_is_closed_when_the_rest_cannot_be_opened(tmp_path: Path):
    opened = Opened()
    data = DataFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(Unreachable):
            IngestRole(data, specs=SPECS, open_stream=opened.stream, open_store=fails)
        with pytest.raises(Unreachable):
            IngestRole(data, specs=SPECS, open_stream=fails, open_store=fails)
        with pytest.raises(Unreachable):
            IngestRole(data, specs=SPECS, open_stream=fails)
        assert opened.names == []
    with IngestRole(data, specs=SPECS, open_stream=opened.stream):
        assert opened.names == ["stream"]
    assert opened.names == []
    with role_of(tmp_path, MemoryStream()):
        """Nobody holds its lock any more."""


# --- Waiting --------------------------------------------------------------------------------------


@pytest.fixture
def only_changes_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ingest reads an idle stream again only after a change, or after a minute."""
    monkeypatch.setattr(ingest, "_LOOK_S", 60.0)
    monkeypatch.setattr(ingest, "_WATCH_S", 60.0)


def waits_until(role: IngestRole, change: Callable[[], object]) -> bool:
    """Whether a waiting role returns after the change, and long before it looks by itself."""
    while role.step():
        pass
    waiting = threading.Thread(target=role.wait, args=(threading.Event(),), daemon=True)
    waiting.start()
    change()
    waiting.join(20)
    return not waiting.is_alive()


@pytest.mark.usefixtures("only_changes_wake")
def test_an_idle_role_reads_again_as_soon_as_something_arrives(tmp_path: Path):
    data = DataFolder(tmp_path)
    deployment_key(data.root)
    others = [FileStream(data.stream) for _ in range(2)]
    frames = iter(sample_frames(9))
    others[0].append([next(frames)])
    data.requests.mkdir(parents=True)
    with IngestRole(data, specs=SPECS) as role:
        assert waits_until(role, lambda: others[0].append([next(frames)])), "an append"
        assert role.step() == 1
        assert waits_until(role, lambda: others[1].append([next(frames)])), "a new partition"
        assert role.step() == 1
        assert waits_until(role, lambda: others[1].append([next(frames)]))
        assert role.step() == 1
        request = data.requests / "1.request"
        assert waits_until(role, lambda: request.write_text('{"command": "barrier"}')), "a request"
        while request.exists():
            role.step()
    for stream in others:
        stream.close()


@pytest.mark.usefixtures("only_changes_wake")
def test_a_change_before_the_wait_is_not_missed(tmp_path: Path):
    data = DataFolder(tmp_path)
    deployment_key(data.root)
    stream = FileStream(data.stream)
    frames = iter(sample_frames(9))
    stream.append([next(frames)])
    with IngestRole(data, specs=SPECS) as role:
        while role.step():
            pass
        stream.append([next(frames)])
        waiting = threading.Thread(target=role.wait, args=(threading.Event(),), daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        assert role.step() == 1
    stream.close()


def test_an_idle_role_reads_rarely_and_reports_no_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reads = []
    read = FileStream.read

    def counted(*given: Any, **more: Any) -> Read:
        reads.append(1)
        return read(*given, **more)

    monkeypatch.setattr(FileStream, "read", counted)
    monkeypatch.setattr(ingest, "_LOOK_S", 0.2)
    data = DataFolder(tmp_path)
    deployment_key(data.root)
    stream = FileStream(data.stream)
    stream.append(sample_frames(1))
    stop = threading.Event()
    with IngestRole(data, specs=SPECS) as role:
        while role.step():
            pass
        reads.clear()
        for _ in range(4):
            role.wait(stop)
            assert role.report()["lag_s"] < 0.15
            role.step()
    assert len(reads) == 4
    stream.close()
