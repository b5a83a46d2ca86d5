"""The file stream: one locked log per process, readable while it grows, with any disk error."""

import errno
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stores.local_stores import fork
from understudy.core.errors import Closed, ConfigError
from understudy.core.log import END_BYTES, LogReader
from understudy.experience.frame import Frame
from understudy.ports import DAMAGED_ENTRY, Position
from understudy.streams import file as module
from understudy.streams.file import FileStream
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.faults import FaultySync
from understudy.testing.streams import read_all, sample_frames


def only(stream: FileStream) -> str:
    (partition,) = stream.partitions()
    return partition.id


def raws(stream: FileStream) -> list[bytes]:
    return [record.raw for records in read_all(stream).values() for record in records]


def test_records_carry_the_time_they_were_appended(tmp_path: Path):
    clock = ManualClock()
    stream = FileStream(tmp_path, clock=clock)
    first, second = sample_frames(2)
    stream.append([first])
    clock.advance(9.0)
    stream.append([second])
    assert [record.time_s for record in read_all(stream)[only(stream)]] == [START_S, START_S + 9.0]
    stream.close()


def test_one_sync_serves_all_waiting_appends(tmp_path: Path):
    sync = FaultySync(delay_s=0.01)
    stream = FileStream(tmp_path, sync=sync)
    frames = sample_frames(64)
    threads = [threading.Thread(target=stream.append, args=([frame],)) for frame in frames]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(raws(stream)) == sorted(frame.encode() for frame in frames)
    assert sync.calls < 40
    stream.close()


@pytest.mark.parametrize("is_full", [True, False])
def test_a_failed_sync_rejects_its_frames_and_later_appends_work(tmp_path: Path, is_full: bool):
    frames = sample_frames(8)
    for call in range(1, 7):
        sync = FaultySync(full_at=[call]) if is_full else FaultySync(eio_at=[call])
        stream = FileStream(tmp_path / str(call), sync=sync)
        outcomes = [stream.append([frame])[0] for frame in frames]
        assert [one.accepted for one in outcomes] == [number + 1 != call for number in range(8)]
        refused = outcomes[call - 1]
        assert refused.error
        assert refused.retry_after_s > 0
        promised = {
            frame.encode() for frame, one in zip(frames, outcomes, strict=True) if one.accepted
        }
        assert promised <= set(raws(stream))
        stream.close()
        assert promised <= set(raws(FileStream(tmp_path / str(call))))


def test_the_offset_of_a_failed_entry_is_never_reused(tmp_path: Path):
    """A reader may have seen the entry before its sync failed; its position must not hide
    later entries."""
    frames = sample_frames(5)
    stream = FileStream(tmp_path)
    stream.append(frames[:1])
    log = next(tmp_path.glob("*/*.log"))
    seen: list[Position] = []

    def read_before_failing(descriptor: int) -> None:
        records = stream.read(only(stream), None, max_bytes=1 << 20, wait_s=0.0).records
        seen.extend(record.position for record in records)
        raise OSError(28, "injected")

    stream._own_partition()._log._sync = read_before_failing  # type: ignore[union-attr]
    assert not stream.append(frames[1:3])[0].accepted
    assert len(seen) == 3
    assert log.stat().st_size > 0
    stream.append([frames[3]])
    stream.append([frames[4]])
    read = stream.read(only(stream), seen[-1], max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [frame.encode() for frame in frames[3:]]
    stream.close()


def test_a_full_disk_is_reported_per_frame(tmp_path: Path, monkeypatch):
    stream = FileStream(tmp_path / "stream", roll_bytes=1)
    frames = sample_frames(3)
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync_folder", _no_room)
        assert not stream.append(frames[:1])[0].accepted
    assert stream.append(frames[:1])[0].accepted
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log.sync_folder", _no_room)
        assert not stream.append(frames[1:2])[0].accepted
    assert stream.append(frames[1:])[1].accepted
    assert raws(stream) == [frame.encode() for frame in frames]
    stream.close()


def _no_room(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_an_entry_that_is_still_being_written_is_not_taken_for_damage(tmp_path: Path, monkeypatch):
    stream = FileStream(tmp_path)
    frames = sample_frames(3)
    stream.append(frames[:1])
    stream.append(frames[1:2])
    stream.append(frames[2:])
    real = LogReader.at
    calls = []

    def torn_once(self: LogReader, start: int):
        # The second entry is still being written at the first look, and whole at the next.
        calls.append(start)
        if start > 0 and calls.count(start) == 1:
            return None
        return real(self, start)

    monkeypatch.setattr(LogReader, "at", torn_once)
    assert raws(stream) == [frame.encode() for frame in frames]
    stream.close()


def test_a_damaged_entry_is_returned_as_an_invalid_record(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(4)
    ends = []
    for frame in frames:
        stream.append([frame])
        ends.append(next(tmp_path.glob("*/*.log")).stat().st_size)
    with next(tmp_path.glob("*/*.log")).open("r+b") as log:
        log.seek(ends[0] + 30)
        log.write(b"\xff\x00\xff")
    found = raws(stream)
    damaged = f"damaged stream entry: {only(stream)}/00000001.log, bytes {ends[0]} to {ends[1]}"
    assert found == [
        frames[0].encode(),
        damaged.encode(),
        frames[2].encode(),
        frames[3].encode(),
    ]
    assert [DAMAGED_ENTRY + f": {line}".encode() for line in stream.damage()] == [found[1]]
    for position in [record.position for record in read_all(stream)[only(stream)]]:
        stream.read(only(stream), position, max_bytes=1, wait_s=0.0)
    stream.close()


def test_a_missing_file_is_returned_as_an_invalid_record(tmp_path: Path):
    stream = FileStream(tmp_path, roll_bytes=1)
    frames = sample_frames(4)
    for frame in frames:
        stream.append([frame])
    folder = tmp_path / only(stream)
    first = stream.read(only(stream), None, max_bytes=1, wait_s=0.0).next
    (folder / "00000002.log").unlink()
    missing = DAMAGED_ENTRY + f": {folder.name}, files 2 to 2, which are missing".encode()
    rest = [missing, frames[2].encode(), frames[3].encode()]
    assert raws(stream) == [frames[0].encode(), *rest]
    assert [DAMAGED_ENTRY + f": {line}".encode() for line in stream.damage()] == [missing]
    following = stream.read(only(stream), first, max_bytes=1, wait_s=0.0)
    assert [record.raw for record in following.records] == rest[:1]
    after = stream.read(only(stream), following.next, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in after.records] == rest[1:], "it is reported once"
    stream.trim({only(stream): following.next}, before_s=2 * START_S)
    assert raws(stream) == rest[1:], "trimmed files are not missing"
    assert stream.damage() == []
    stream.close()


def test_a_lost_file_of_the_position_is_reported(tmp_path: Path):
    stream = FileStream(tmp_path, roll_bytes=1)
    frames = sample_frames(3)
    for frame in frames:
        stream.append([frame])
    folder = tmp_path / only(stream)
    (folder / "00000002.log").unlink()
    read = stream.read(only(stream), Position("2:0:-1"), max_bytes=1 << 20, wait_s=0.0)
    assert read.records[0].raw.startswith(DAMAGED_ENTRY)
    assert [record.raw for record in read.records[1:]] == [frames[2].encode()]
    stream.close()


@pytest.mark.parametrize("failures", [1, 3])
def test_a_file_that_was_removed_after_a_failed_sync_is_not_missing(tmp_path: Path, failures: int):
    sync = FaultySync(eio_at=range(2, 2 + failures))
    stream = FileStream(tmp_path, roll_bytes=1, sync=sync)
    frames = sample_frames(3 + failures)
    stream.append([frames[0]])
    for frame in frames[3:]:
        assert not stream.append([frame])[0].accepted
    for frame in frames[1:3]:
        assert stream.append([frame])[0].accepted
    names = sorted(path.name for path in (tmp_path / only(stream)).glob("*.log"))
    assert names == [f"{number:08d}.log" for number in (1, 2 + failures, 3 + failures)]
    assert raws(stream) == [frame.encode() for frame in frames[:3]]
    assert stream.damage() == []
    stream.close()


def test_a_file_that_the_listing_missed_is_read_first(tmp_path: Path, monkeypatch):
    stream = FileStream(tmp_path, roll_bytes=1)
    frames = sample_frames(3)
    for frame in frames:
        stream.append([frame])
    listings = [[1, 3], [1, 2, 3]]
    real = module._file_numbers
    monkeypatch.setattr(
        module, "_file_numbers", lambda folder: listings.pop(0) if listings else real(folder)
    )
    assert raws(stream) == [frame.encode() for frame in frames]
    stream.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_flipped_bit_in_the_last_entry_is_reported_not_torn(tmp_path: Path, is_open: bool):
    stream = FileStream(tmp_path)
    frames = sample_frames(3)
    stream.append(frames[:1])
    log = next(tmp_path.glob("*/*.log"))
    start = log.stat().st_size
    stream.append(frames[1:])
    end = log.stat().st_size
    name = only(stream)
    first = stream.read(name, None, max_bytes=1, wait_s=0.0).next
    if not is_open:
        stream.close()
        stream = FileStream(tmp_path)
    whole = log.read_bytes()
    for at in range(start, end - END_BYTES, 7):
        broken = bytearray(whole)
        broken[at] ^= 16
        log.write_bytes(bytes(broken))
        read = stream.read(name, first, max_bytes=1 << 20, wait_s=0.0)
        assert [record.raw[: len(DAMAGED_ENTRY)] for record in read.records] == [DAMAGED_ENTRY]
        assert read.records[0].time_s == pytest.approx(log.stat().st_mtime)
        assert len(stream.damage()) == 1
        stream.trim({name: first}, before_s=1e12)
        assert len(stream.damage()) == 1, "only what was stored before it is trimmed"
        after = stream.read(name, read.next, max_bytes=1 << 20, wait_s=0.0)
        assert (list(after.records), after.ended) == ([], not is_open)
    log.write_bytes(whole)
    assert raws(stream) == [frame.encode() for frame in frames]
    assert stream.damage() == []
    stream.close()


def test_an_entry_damaged_after_some_of_its_frames_were_read_is_reported(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(4)
    stream.append(frames)
    name = only(stream)
    second = read_all(stream)[name][1].position
    log = next(tmp_path.glob("*/*.log"))
    raw = bytearray(log.read_bytes())
    raw[-END_BYTES - 1] ^= 1
    log.write_bytes(bytes(raw))
    read = stream.read(name, second, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw[: len(DAMAGED_ENTRY)] for record in read.records] == [DAMAGED_ENTRY]
    stream.close()


def test_files_that_are_not_the_streams_stop_nothing_and_stay(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(2)
    stream.append(frames)
    name = only(stream)
    strays = [tmp_path / ".DS_Store", tmp_path / "notes.txt"]
    strays += [tmp_path / name / file for file in (".DS_Store", "old.log", "00000001.log.bak")]
    for path in strays:
        path.write_bytes(b"stray")
    strays.append(tmp_path / "loop")
    strays[-1].symlink_to(strays[-1])
    assert only(stream) == name
    assert sorted(stream.folders()) == [str(tmp_path), str(tmp_path / name)]
    assert raws(stream) == [frame.encode() for frame in frames]
    before = stream.state()
    frames += sample_frames(1)
    stream.append(frames[-1:])
    assert stream.state() != before
    assert raws(stream) == [frame.encode() for frame in frames]
    last = read_all(stream)[name][-1].position
    stream.close()
    stream = FileStream(tmp_path)
    assert stream.trim({name: last}, before_s=1e12) > 0
    assert [path for path in strays if not os.path.lexists(path)] == []
    assert raws(stream) == []


def test_a_torn_last_entry_is_ignored(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(2)
    stream.append(frames[:1])
    size = next(tmp_path.glob("*/*.log")).stat().st_size
    stream.append(frames[1:])
    stream.close()
    log = next(tmp_path.glob("*/*.log"))
    whole = log.read_bytes()
    for cut in [*range(size, len(whole), 50), *range(len(whole) - END_BYTES - 1, len(whole))]:
        log.write_bytes(whole[:cut])
        assert raws(FileStream(tmp_path)) == [frames[0].encode()]
        assert FileStream(tmp_path).damage() == []
        name = only(FileStream(tmp_path))
        position = read_all(FileStream(tmp_path))[name][-1].position
        assert FileStream(tmp_path).read(name, position, max_bytes=1, wait_s=0.0).ended


def _append_and_hang(folder: str, ready: "multiprocessing.synchronize.Event") -> None:
    stream = FileStream(Path(folder))
    stream.append(sample_frames(3, seed=1))
    ready.set()
    signal.pause()


def test_the_partition_of_a_killed_process_ends(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_append_and_hang, args=(str(tmp_path), ready))
    child.start()
    assert ready.wait(30.0)
    stream = FileStream(tmp_path)
    stream.append(sample_frames(2))
    theirs = next(name for name, records in read_all(stream).items() if len(records) == 3)
    position = read_all(stream)[theirs][-1].position
    assert not stream.read(theirs, position, max_bytes=1, wait_s=0.0).ended
    child.kill()
    child.join(30.0)
    assert stream.read(theirs, position, max_bytes=1, wait_s=5.0).ended
    assert len(raws(stream)) == 5
    stream.close()


def test_a_forked_child_appends_to_a_partition_of_its_own(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(3)
    stream.append(frames[:1])
    child = fork()
    if child == 0:
        try:
            os._exit(0 if stream.append(frames[1:2])[0].accepted else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.append(frames[2:])
    assert sorted(raws(stream)) == sorted(frame.encode() for frame in frames)
    assert len(stream.partitions()) == 2
    stream.close()


def test_trim_deletes_only_what_is_stored_and_old(tmp_path: Path):
    stream = FileStream(tmp_path, roll_bytes=1)
    frames = sample_frames(5)
    for frame in frames:
        stream.append([frame])
    name = only(stream)
    positions = [record.position for record in read_all(stream)[name]]
    assert stream.trim({}, before_s=1e12) == 0, "nothing is stored"
    assert stream.trim({name: positions[2]}, before_s=0.0) == 0, "nothing is old"
    assert stream.trim({name: positions[2]}, before_s=1e12) > 0
    assert raws(stream) == [frame.encode() for frame in frames[3:]]
    assert stream.trim({name: positions[4]}, before_s=1e12) > 0
    assert raws(stream) == [], "what is stored of the last file is overwritten"
    assert [path.name for path in tmp_path.glob("*/*.log")] == ["00000005.log"], "it may still grow"
    stream.close()
    stream = FileStream(tmp_path)
    assert stream.trim({name: positions[3]}, before_s=1e12) == 0, "not wholly read"
    assert stream.trim({name: positions[4]}, before_s=1e12) > 0
    assert list(stream.partitions()) == []
    assert stream.read(name, positions[4], max_bytes=1, wait_s=0.0).ended


def test_trim_overwrites_the_stored_part_of_a_file_that_grows(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(6)
    for frame in frames[:4]:
        stream.append([frame])
    name = only(stream)
    (path,) = tmp_path.glob("*/*.log")
    size = path.stat().st_size
    positions = [record.position for record in read_all(stream)[name]]
    for stored, left in ((1, 2), (3, 0)):
        assert stream.trim({name: positions[stored]}, before_s=0.0) == 0, "nothing is old"
        assert stream.trim({name: positions[stored]}, before_s=1e12) > 0
        assert stream.trim({name: positions[stored]}, before_s=1e12) == 0, "it is done already"
        raw = path.read_bytes()
        assert [frame.body in raw for frame in frames[:4]] == [False] * (4 - left) + [True] * left
        assert raws(stream) == [frame.encode() for frame in frames[4 - left : 4]]
    assert path.stat().st_size == size, "offsets stay"
    assert not path.read_bytes()[12:-END_BYTES].strip(b"\0")
    # The position is still valid, and so is the file for its appending process.
    stream.append(frames[4:])
    read = stream.read(name, positions[3], max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [frame.encode() for frame in frames[4:]]
    stream.close()
    assert stream.trim({name: read.next}, before_s=1e12) > 0
    assert list(stream.partitions()) == []


def test_trim_keeps_the_file_of_a_position_while_more_records_follow(tmp_path: Path):
    stream = FileStream(tmp_path, roll_bytes=1)
    frames = sample_frames(3)
    for frame in frames:
        stream.append([frame])
    name = only(stream)
    stream.close()
    stream = FileStream(tmp_path)
    first = read_all(stream)[name][0].position
    stream.trim({name: first}, before_s=1e12)
    read = stream.read(name, first, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [frame.encode() for frame in frames[1:]]


def test_trim_keeps_an_entry_of_which_some_frames_are_not_stored(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(3)
    stream.append(frames)
    stream.close()
    name = only(stream)
    positions = [record.position for record in read_all(stream)[name]]
    assert stream.trim({name: positions[1]}, before_s=1e12) == 0
    assert stream.trim({name: positions[2]}, before_s=1e12) > 0
    assert list(stream.partitions()) == []


def test_trim_removes_an_unfinished_file_of_a_dead_process(tmp_path: Path):
    stream = FileStream(tmp_path)
    stream.append(sample_frames(1))
    stream.close()
    name = only(stream)
    (tmp_path / name / "00000002.log").write_bytes(b"ulog torn")
    last = read_all(stream)[name][-1].position
    assert stream.trim({name: last}, before_s=1e12) > 0
    assert list(stream.partitions()) == []


def test_waiting_at_the_end_reads_no_entry_again(tmp_path: Path, monkeypatch):
    stream = FileStream(tmp_path)
    frames = sample_frames(50)
    stream.append(frames)
    name = only(stream)
    last = read_all(stream)[name][-1].position
    read_bytes: list[int] = []

    def counted(descriptor: int, length: int, at: int) -> bytes:
        raw = os.pread(descriptor, length, at)
        read_bytes.append(len(raw))
        return raw

    monkeypatch.setattr("understudy.core.log._pread", counted)
    idle = stream.read(name, last, max_bytes=1 << 20, wait_s=0.0)
    assert (list(idle.records), idle.next, idle.ended) == ([], last, False)
    assert sum(read_bytes) == 0
    stream.append(frames[:1])
    read = stream.read(name, last, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [frames[0].encode()]
    stream.close()


def test_positions_of_earlier_releases_still_work(tmp_path: Path):
    """They named the last frame of an entry by its index, and stores still hold them."""
    stream = FileStream(tmp_path)
    frames = sample_frames(5)
    stream.append(frames[:3])
    end = next(tmp_path.glob("*/*.log")).stat().st_size
    stream.append(frames[3:])
    name = only(stream)
    expected = {"1:0:-1": 0, "1:0:0": 1, "1:0:1": 2, "1:0:2": 3, f"1:{end}:0": 4, f"1:{end}:1": 5}
    for text, start in expected.items():
        read = stream.read(name, Position(text), max_bytes=1 << 20, wait_s=0.0)
        assert [record.raw for record in read.records] == [
            frame.encode() for frame in frames[start:]
        ]
    stream.close()
    assert stream.trim({name: Position("1:0:2")}, before_s=1e12) == 0
    assert stream.trim({name: Position(f"1:{end}:1")}, before_s=1e12) > 0


def test_an_old_file_is_closed_so_that_it_can_be_trimmed(tmp_path: Path):
    clock = ManualClock()
    frames = sample_frames(4)
    stream = FileStream(tmp_path, clock=clock, roll_s=60.0)
    for frame, wait_s in zip(frames, [59.0, 1.0, 59.0, 0.0], strict=True):
        stream.append([frame])
        clock.advance(wait_s)
    name = only(stream)
    assert len(list(tmp_path.glob("*/*.log"))) == 2
    records = read_all(stream)[name]
    assert [record.raw for record in records] == [frame.encode() for frame in frames]
    assert stream.trim({name: records[2].position}, before_s=1e12) > 0
    assert raws(stream) == [frame.encode() for frame in frames[3:]]
    stream.close()


def test_waiting_uses_the_clock_of_the_stream(tmp_path: Path):
    clock = ManualClock()
    stream = FileStream(tmp_path, clock=clock)
    stream.append(sample_frames(1))
    last = read_all(stream)[only(stream)][-1].position
    assert not stream.read(only(stream), last, max_bytes=1, wait_s=30.0).records
    assert clock.now() == pytest.approx(START_S + 30.0, abs=0.1)
    stream.close()


def test_closing_wakes_a_waiting_reader(tmp_path: Path):
    stream = FileStream(tmp_path)
    other = FileStream(tmp_path)
    other.append(sample_frames(1))
    last = read_all(stream)[only(stream)][-1].position
    reader = threading.Thread(
        target=stream.read, args=(only(stream), last), kwargs={"max_bytes": 1, "wait_s": 60.0}
    )
    reader.start()
    stream.close()
    reader.join(20.0)
    assert not reader.is_alive()
    other.close()


def test_closing_waits_for_a_running_append_and_rejects_later_ones(tmp_path: Path):
    is_inside = threading.Event()
    may_go = threading.Event()

    def slow(descriptor: int) -> None:
        is_inside.set()
        assert may_go.wait(20.0)
        os.fsync(descriptor)

    stream = FileStream(tmp_path, sync=slow)
    frames = sample_frames(2)
    found: list[object] = []

    def append(frame: Frame) -> None:
        try:
            found.append(stream.append([frame])[0].accepted)
        except Closed:
            found.append("closed")

    threads = [
        threading.Thread(target=append, args=(frames[0],)),
        threading.Thread(target=stream.close),
    ]
    threads[0].start()
    assert is_inside.wait(20.0)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive(), "closing waits for the append"
    may_go.set()
    for thread in threads:
        thread.join(20.0)
    append(frames[1])
    assert found == [True, "closed"]
    assert raws(stream) == [frames[0].encode()]
    assert len(stream.partitions()) == 1


def test_an_append_that_waits_during_close_opens_no_partition(tmp_path: Path):
    stream = FileStream(tmp_path / "stream")
    with ThreadPoolExecutor(1) as pool:
        with stream._group.alone:
            waiting = pool.submit(stream.append, sample_frames(1))
            while not stream._group._waiting:
                threading.Event().wait(0.001)
            stream._closed.set()
        with pytest.raises(Closed):
            waiting.result(20.0)
    assert list(stream.partitions()) == []


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(errno.EACCES, "write permission"), (errno.EROFS, "mount"), (errno.EMFILE, "ulimit")],
)
def test_other_disk_errors_do_not_ask_for_space_and_attempts_leave_nothing(
    tmp_path: Path, monkeypatch, code: int, wanted: str
):
    stream = FileStream(tmp_path / "stream", roll_bytes=1)
    frames = sample_frames(2)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("sync_folder", "FileLock"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, **__: refuse())
            error = stream.append(frames[:1])[0].error
        assert error
        assert wanted in error
        assert "space" not in error
        assert list((tmp_path / "stream").iterdir()) == []
    assert stream.append(frames[:1])[0].accepted
    with monkeypatch.context() as patch:
        patch.setattr(module, "LogFile", lambda *_, **__: refuse())
        error = stream.append(frames[1:])[0].error
    assert error
    assert wanted in error
    stream.close()


def test_invalid_positions_and_closed_streams_are_rejected(tmp_path: Path):
    stream = FileStream(tmp_path / "stream")
    assert list(stream.partitions()) == []
    stream.append(sample_frames(1))
    with pytest.raises(ConfigError, match="not a position of a file stream"):
        stream.read(only(stream), Position("17"), max_bytes=1, wait_s=0.0)
    stream.close()
    with pytest.raises(Closed):
        stream.append([])


def test_a_large_append_is_read_in_pages(tmp_path: Path):
    stream = FileStream(tmp_path)
    frames = sample_frames(200)
    assert all(one.accepted for one in stream.append(frames))
    found = read_all(stream, max_bytes=5000)[only(stream)]
    assert [record.raw for record in found] == [frame.encode() for frame in frames]
    stream.close()
