"""The log: torn at any byte it returns the entries before; tells damage, full disks and failed
syncs apart."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core import log
from understudy.core.errors import Closed, Corrupt, Refused, StorageFailed, StorageFull
from understudy.core.log import (
    END_BYTES,
    HEAD_BYTES,
    LogFile,
    LogReader,
    create_once,
    no_sync,
    remove,
    storage_error,
    sync_data,
    write_file,
)

AROUND = HEAD_BYTES + END_BYTES
"""Bytes of an entry besides its payload."""

PAYLOADS = [b"first", b"", b"ulog in the middle", bytes(range(256)), b"last"]


def write(path: Path, payloads: list[bytes]) -> list[int]:
    """The start of each entry, and the end of the file."""
    file = LogFile(path)
    ends = [0]
    for payload in payloads:
        entry = file.append([payload])
        assert (entry.start, entry.end, entry.payload) == (ends[-1], file.size_bytes, payload)
        ends.append(file.size_bytes)
    file.close()
    return ends


def payloads_of(path: Path) -> list[bytes]:
    with LogReader(path) as reader:
        return [entry.payload for entry in reader.entries()]


def readable_end(reader: LogReader) -> int:
    """The end of a file's readable entries; Corrupt if what follows is damage."""
    end = max((entry.end for entry in reader.entries()), default=0)
    if reader.damage_end(end) is not None:
        raise Corrupt(f"damaged at byte {end}")
    return end


def test_entries_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.log"
    ends = write(path, PAYLOADS)
    assert path.stat().st_size == ends[-1] == sum(AROUND + len(payload) for payload in PAYLOADS)
    assert path.stat().st_mode & 0o077 == 0
    with LogReader(path) as reader:
        assert [(e.start, e.end, e.payload) for e in reader.entries()] == list(
            zip(ends[:-1], ends[1:], PAYLOADS, strict=True)
        )
        assert readable_end(reader) == ends[-1]
        assert reader.at(ends[-1]) is None
        assert reader.at(1) is None


def test_parts_are_one_entry(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log")
    file.append([b"he", memoryview(b"ll"), b"o"])
    file.append([])
    file.close()
    assert payloads_of(tmp_path / "a.log") == [b"hello", b""]


def test_a_log_torn_at_any_byte_returns_the_entries_before(tmp_path: Path) -> None:
    ends = write(tmp_path / "a.log", PAYLOADS)
    raw = (tmp_path / "a.log").read_bytes()
    torn = tmp_path / "torn.log"
    for length in range(len(raw) + 1):
        torn.write_bytes(raw[:length])
        whole = sum(end <= length for end in ends[1:])
        assert payloads_of(torn) == PAYLOADS[:whole]
        with LogReader(torn) as reader:
            assert readable_end(reader) == ends[whole]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=40))
def test_a_tail_of_noise_or_zeros_is_a_torn_end(length: int, noise: bytes) -> None:
    # A power cut may leave the file at its new size with old or zero bytes at the end.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        ends = write(path, PAYLOADS)
        with path.open("ab") as file:
            file.write(bytes(length) if length % 2 else noise)
        with LogReader(path) as reader:
            assert readable_end(reader) == ends[-1]


def test_a_flipped_byte_in_the_middle_is_damage_not_a_torn_end(tmp_path: Path) -> None:
    ends = write(tmp_path / "a.log", PAYLOADS)
    raw = (tmp_path / "a.log").read_bytes()
    for position in range(ends[-2]):
        broken = bytearray(raw)
        broken[position] ^= 0x20
        (tmp_path / "b.log").write_bytes(bytes(broken))
        entry = sum(end <= position for end in ends[1:])
        if position >= ends[entry + 1] - END_BYTES:
            assert payloads_of(tmp_path / "b.log") == PAYLOADS, "only its end mark is damaged"
            continue
        assert payloads_of(tmp_path / "b.log") == PAYLOADS[:entry]
        with LogReader(tmp_path / "b.log") as reader:
            with pytest.raises(Corrupt, match=f"damaged at byte {ends[entry]}"):
                readable_end(reader)
            assert reader.damage_end(ends[entry]) == ends[entry + 1]


def test_any_flipped_bit_of_the_last_entry_is_damage_or_harms_nothing(tmp_path: Path) -> None:
    ends = write(tmp_path / "a.log", PAYLOADS)
    raw = (tmp_path / "a.log").read_bytes()
    for bit in range(ends[-2] * 8, ends[-1] * 8):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b.log").write_bytes(bytes(broken))
        with LogReader(tmp_path / "b.log") as reader:
            if bit // 8 >= ends[-1] - END_BYTES:
                assert readable_end(reader) == ends[-1]
            else:
                assert reader.at(ends[-2]) is None
                assert reader.damage_end(ends[-2]) == ends[-1]


def test_damage_in_the_last_two_entries_is_one_damage(tmp_path: Path) -> None:
    ends = write(tmp_path / "a.log", PAYLOADS)
    raw = bytearray((tmp_path / "a.log").read_bytes())
    for start in ends[-3:-1]:
        raw[start + HEAD_BYTES] ^= 1
    (tmp_path / "a.log").write_bytes(bytes(raw))
    with LogReader(tmp_path / "a.log") as reader:
        assert reader.damage_end(ends[-3]) == ends[-2]
        assert reader.damage_end(ends[-2]) == ends[-1]


def test_a_damaged_entry_before_a_torn_one_is_damage(tmp_path: Path) -> None:
    ends = write(tmp_path / "a.log", PAYLOADS)
    raw = bytearray((tmp_path / "a.log").read_bytes()[:-1])
    raw[ends[-3]] ^= 1
    (tmp_path / "a.log").write_bytes(bytes(raw))
    with LogReader(tmp_path / "a.log") as reader:
        assert reader.damage_end(ends[-3]) == ends[-2]
        assert reader.damage_end(ends[-2]) is None


@pytest.mark.parametrize("payload", [b"x" * 20_000, bytes(20_000), b"y" * 5000 + bytes(9000)])
@pytest.mark.parametrize("first", [b"", b"f" * (4096 - AROUND - 3), b"f" * 4000, b"f" * 5000])
def test_a_write_of_which_any_pages_are_lost_is_torn_and_a_flipped_bit_is_not(
    tmp_path: Path, first: bytes, payload: bytes
) -> None:
    """A power cut may leave any pages of a write that was not synced; lost ones read as zeros."""
    ends = write(tmp_path / "a.log", [first, payload])
    raw = (tmp_path / "a.log").read_bytes()
    mark_page = (ends[2] - END_BYTES) // 4096
    torn = tmp_path / "torn.log"
    for page in range(ends[1] // 4096, mark_page):
        start = max(ends[1], page * 4096)
        end = min(ends[2], (page + 1) * 4096)
        if not any(raw[start:end]):
            continue  # as lost as it is there
        torn.write_bytes(raw[:start] + bytes(end - start) + raw[end:])
        with LogReader(torn) as reader:
            assert reader.at(ends[1]) is None
            assert reader.damage_end(ends[1]) is None
    for position in range(ends[1], ends[2] - END_BYTES, 61):
        broken = bytearray(raw)
        broken[position] ^= 1 << position % 8
        torn.write_bytes(bytes(broken))
        with LogReader(torn) as reader:
            assert reader.at(ends[1]) is None
            assert reader.damage_end(ends[1]) == ends[2]


@pytest.mark.parametrize("decoy", [b"ulog", b"uend", b"ulog\x00\x00\x04\x00crc."])
def test_a_torn_payload_full_of_decoys_is_read_only_a_few_times(
    tmp_path: Path, decoy: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Players control the bytes of an observation, and must not make a torn write slow to read."""
    payload = decoy * (300_000 // len(decoy))
    ends = write(tmp_path / "a.log", [b"first", payload])
    raw = (tmp_path / "a.log").read_bytes()
    (tmp_path / "a.log").write_bytes(raw[:-1])
    n_read = 0
    real = log._pread

    def counted(descriptor: int, length: int, at: int) -> bytes:
        nonlocal n_read
        part = real(descriptor, length, at)
        n_read += len(part)
        return part

    monkeypatch.setattr(log, "_pread", counted)
    with LogReader(tmp_path / "a.log") as reader:
        assert reader.damage_end(ends[1]) is None
    assert n_read < 10 * len(payload)


def test_a_torn_entry_that_contains_a_log_is_still_a_torn_end(tmp_path: Path) -> None:
    # Players control the bytes of an observation, which must not make a torn write look like
    # damage.
    write(tmp_path / "inner.log", [b"inner"])
    inner = (tmp_path / "inner.log").read_bytes()
    ends = write(tmp_path / "outer.log", [b"first", b"xx" + inner + b"yy"])
    raw = (tmp_path / "outer.log").read_bytes()
    (tmp_path / "outer.log").write_bytes(raw[:-1])
    with LogReader(tmp_path / "outer.log") as reader:
        assert readable_end(reader) == ends[1]


def test_damage_far_from_the_next_entry_is_found(tmp_path: Path) -> None:
    big = b"ulo" * (1 << 20)
    ends = write(tmp_path / "a.log", [b"first", big, b"last"])
    with (tmp_path / "a.log").open("r+b") as file:
        file.seek(ends[1] + HEAD_BYTES)
        file.write(b"X")
    with LogReader(tmp_path / "a.log") as reader:
        assert reader.damage_end(ends[1]) == ends[2]


def test_a_file_is_never_appended_to_by_a_second_writer(tmp_path: Path) -> None:
    write(tmp_path / "a.log", [b"x"])
    with pytest.raises(FileExistsError):
        LogFile(tmp_path / "a.log")


def test_each_entry_is_synced_before_it_is_acknowledged(tmp_path: Path) -> None:
    synced: list[int] = []
    file = LogFile(
        tmp_path / "a.log", sync=lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    )
    assert [file.append([b"x" * n]).end for n in (3, 5)] == synced == [AROUND + 3, 2 * AROUND + 8]
    file.close()
    file.close()
    with pytest.raises(Closed):
        file.append([b"x"])


def test_a_closed_reader_raises_closed(tmp_path: Path) -> None:
    write(tmp_path / "a.log", [b"x"])
    reader = LogReader(tmp_path / "a.log")
    reader.close()
    reader.close()
    with pytest.raises(Closed):
        reader.at(0)
    with pytest.raises(Closed):
        _ = reader.size_bytes


def test_an_entry_that_is_too_large_to_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_ENTRY_BYTES", 10)
    file = LogFile(tmp_path / "a.log")
    with pytest.raises(Refused) as caught:
        file.append([b"x" * 6, b"x" * 5])
    assert caught.value.reason == "too_large"
    file.append([b"x" * 10])
    assert payloads_of(tmp_path / "a.log") == [b"x" * 10]


def failing(error: int, *, times: int = 1) -> Callable[[int], None]:
    left = [times]

    def sync(descriptor: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        sync_data(descriptor)

    return sync


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_acknowledges_nothing_and_the_file_stays_usable(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LogFile(tmp_path / "a.log")
    file.append([b"before"])
    pwrite = log._pwrite

    def short(descriptor: int, view: memoryview, at: int) -> int:
        if len(view) > 8:
            return pwrite(descriptor, view[:8], at)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(log, "_pwrite", short)
        for _ in range(2):
            with pytest.raises(StorageFull, match="free some space") as caught:
                file.append([b"this does not fit"])
            assert caught.value.retry_helps
    assert (tmp_path / "a.log").stat().st_size == file.size_bytes
    file.append([b"after"])
    file.close()
    assert payloads_of(tmp_path / "a.log") == [b"before", b"after"]


def test_a_disk_that_is_full_at_the_sync_acknowledges_nothing(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log", sync=failing(errno.ENOSPC))
    with pytest.raises(StorageFull):
        file.append([b"lost"])
    file.append([b"kept"])
    assert payloads_of(tmp_path / "a.log") == [b"kept"]


def test_after_a_failed_sync_the_file_accepts_nothing_more(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log", sync=failing(errno.EIO))
    with pytest.raises(StorageFailed, match="open a new file"):
        file.append([b"unknown outcome"])
    for _ in range(2):
        with pytest.raises(StorageFailed):
            file.append([b"never written"])
    file.close()
    assert b"never" not in (tmp_path / "a.log").read_bytes()


def test_a_file_that_cannot_be_truncated_accepts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "no")

    file = LogFile(tmp_path / "a.log", sync=failing(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(StorageFull):
            file.append([b"x"])
    with pytest.raises(StorageFailed):
        file.append([b"x"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_only_a_full_disk_asks_for_space(code: int) -> None:
    error = storage_error(OSError(code, os.strerror(code)), "a commit")
    assert isinstance(error, StorageFull)
    assert f"no room for a commit: {os.strerror(code)}; free some space" in str(error)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "write permission there, then reopen"),
        (errno.EPERM, "write permission there, then reopen"),
        (errno.EROFS, "mount that disk for writing, then reopen"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "the machine's limit of open files"),
        (errno.EIO, "; reopen"),
        (errno.ENOENT, "; reopen"),
    ],
)
def test_any_other_disk_error_states_what_to_fix(code: int, remedy: str) -> None:
    error = storage_error(OSError(code, os.strerror(code)), "a commit", then="reopen")
    assert isinstance(error, StorageFailed)
    assert not error.retry_helps
    assert f"a commit failed: {os.strerror(code)}" in str(error)
    assert remedy in str(error)
    assert "space" not in str(error)


def test_an_error_without_a_number_is_a_failure() -> None:
    assert "odd" in str(storage_error(OSError("odd"), "a commit"))


def test_the_file_that_failed_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        LogReader(tmp_path / "gone.log")
    assert f"({tmp_path / 'gone.log'})" in str(storage_error(caught.value, "a commit"))


WRITER = """
import sys
from pathlib import Path
from understudy.core.log import LogFile
file = LogFile(Path(sys.argv[1]))
for number in range(400):
    file.append([number.to_bytes(4, "little") * (number % 37)])
    print(file.size_bytes, flush=True)
"""


def test_another_process_reads_while_one_appends(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        promised = int(writer.stdout.readline())
        seen = 0
        at = 0
        with LogReader(path) as reader:
            while seen < 400:
                while (entry := reader.at(at)) is not None:
                    assert entry.payload == seen.to_bytes(4, "little") * (seen % 37)
                    seen = seen + 1
                    at = entry.end
                # Every acknowledged entry can be read at once.
                assert at >= promised
                line = writer.stdout.readline()
                promised = int(line) if line else promised


def test_a_small_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mark"
    write_file(path, b"one")
    write_file(path, b"two two")
    assert path.read_bytes() == b"two two"
    assert path.stat().st_mode & 0o077 == 0
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, raw: real(descriptor, bytes(raw)[:3]))
    write_file(path, b"written in pieces")
    assert path.read_bytes() == b"written in pieces"
    create_once(tmp_path / "key", b"created in pieces")
    create_once(tmp_path / "key", b"never replaced")
    assert (tmp_path / "key").read_bytes() == b"created in pieces"
    (tmp_path / "key").unlink()

    def full(descriptor: int, raw: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        write_file(path, b"three")
    with pytest.raises(OSError, match="full"):
        create_once(tmp_path / "key", b"four")
    assert path.read_bytes() == b"written in pieces"
    assert [file.name for file in tmp_path.iterdir()] == ["mark"]


def test_a_log_without_sync_is_read_like_any_other(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log", sync=no_sync)
    file.append([b"x"])
    file.close()
    assert payloads_of(tmp_path / "a.log") == [b"x"]


def test_removing_a_missing_file_is_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.log", [b"x"])
    remove(tmp_path / "a.log")
    remove(tmp_path / "a.log")
    assert not list(tmp_path.iterdir())
