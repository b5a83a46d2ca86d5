"""Frames that kill the ingest process: one is isolated and quarantined, all others are stored."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.stores.local_stores import fork
from understudy.core.clock import SystemClock
from understudy.core.log import no_sync
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ingest.service import BatchMark, IngestService
from understudy.ports import CRASHED_INGEST, Claim, Receipt, SessionFilter, Stored, WriteBatch
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.samples import cart_spec, random_session, stamped

SPEC = cart_spec()
POISON = cart_spec("poison")


class DeadlySpecs(KnownSpecs):
    """Kills or fails the process that checks a frame of the poisoned game."""

    def __init__(self, at_poison: Callable[[], None]) -> None:
        super().__init__(SPEC, POISON)
        self._at_poison = at_poison

    def spec(self, game: str, schema: str) -> GameSpec | None:
        if game == POISON.game:
            self._at_poison()
        return super().spec(game, schema)


class DeadlyStore(LocalStore):
    """Kills the process in every commit that stores frames."""

    def write(self, batch: WriteBatch) -> Receipt:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class BuggyStore(LocalStore):
    """Fails in an unexpected way at a commit with a frame of the poisoned game."""

    def write(self, batch: WriteBatch) -> Receipt:
        if any(one.chunk and one.chunk.meta.game == POISON.game for one in batch.candidates):
            raise ZeroDivisionError("a bug")
        return super().write(batch)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def chunks_of(spec: GameSpec, rng: np.random.Generator, n_chunks: int) -> list[Chunk]:
    session = new_session(SystemClock().now(), rng.bytes(10))
    return random_session(spec, rng, n_chunks=n_chunks, session=session)


def fill(folder: Path, groups: list[list[Chunk]]) -> list[Frame]:
    stream = FileStream(folder / "stream", sync=no_sync)
    frames = [
        frame for chunks in groups for frame in stamped(chunks, received_s=SystemClock().now())
    ]
    stream.append(frames)
    stream.close()
    return frames


def exit_code_of_ingest(folder: Path, specs: KnownSpecs, store_class: type[LocalStore]) -> int:
    """The exit code of a forked process that stores the stream; -9 if it was killed."""
    child = fork()
    if child == 0:
        try:
            with store_class(folder / "store", synchronous="OFF") as store:
                mark = BatchMark(folder / "ingest.batch")
                stream = FileStream(folder / "stream")
                IngestService(stream, store, specs, owner="test", mark=mark).drain()
            os._exit(0)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fates(folder: Path) -> tuple[set[tuple[bytes, int]], Counter[str]]:
    """Keys of stored frames, and how many frames are quarantined by reason."""
    with LocalStore(folder / "store", synchronous="OFF") as store:
        items = store.tail(None, max_items=10_000, wait_s=0.0).items
        stored = {
            (item.frame.session.bytes, item.frame.chunk_no)
            for item in items
            if isinstance(item, Stored)
        }
        reasons = Counter(entry.reason for entry in store.quarantined())
        assert all(not info.missing for info in store.sessions(SessionFilter()))
        return stored, reasons


@pytest.mark.parametrize("place", [0, 7, 20, 39])
def test_a_frame_that_kills_ingest_is_isolated_and_quarantined(tmp_path: Path, place: int):
    rng = np.random.default_rng(place)
    honest = chunks_of(SPEC, rng, 39)
    (poison,) = chunks_of(POISON, rng, 1)
    frames = fill(tmp_path, [honest[:place], [poison], honest[place:]])
    specs = DeadlySpecs(die)
    runs = 1
    while (code := exit_code_of_ingest(tmp_path, specs, LocalStore)) != 0:
        assert code == -signal.SIGKILL
        runs += 1
        assert runs <= 7, "40 records, then 2, then 1 three times"
    stored, reasons = fates(tmp_path)
    assert stored == {
        (frame.session.bytes, frame.chunk_no)
        for frame in frames
        if frame.session != poison.meta.session
    }
    assert reasons == {CRASHED_INGEST: 1}


def test_an_unexpected_error_of_the_store_is_isolated_too(tmp_path: Path):
    rng = np.random.default_rng(1)
    honest = chunks_of(SPEC, rng, 20)
    fill(tmp_path, [honest[:10], chunks_of(POISON, rng, 1), honest[10:]])
    runs = 1
    while exit_code_of_ingest(tmp_path, KnownSpecs(SPEC, POISON), BuggyStore) != 0:
        runs += 1
        assert runs <= 6
    stored, reasons = fates(tmp_path)
    assert (len(stored), reasons) == (20, {CRASHED_INGEST: 1})


def test_kills_during_commits_quarantine_nothing(tmp_path: Path):
    rng = np.random.default_rng(2)
    frames = fill(tmp_path, [chunks_of(SPEC, rng, 1)])
    for _ in range(8):
        assert exit_code_of_ingest(tmp_path, KnownSpecs(SPEC), DeadlyStore) == -signal.SIGKILL
    assert exit_code_of_ingest(tmp_path, KnownSpecs(SPEC), LocalStore) == 0
    stored, reasons = fates(tmp_path)
    assert (len(stored), reasons) == (len(frames), {})


def test_expected_errors_and_clean_ends_leave_no_mark(tmp_path: Path):
    """After them, the next process uses batches of full size."""
    rng = np.random.default_rng(3)
    fill(tmp_path, [chunks_of(SPEC, rng, 5)])

    def fail() -> None:
        raise OSError("the registry does not respond")

    for specs in (DeadlySpecs(fail), KnownSpecs(SPEC)):
        exit_code_of_ingest(tmp_path, specs, LocalStore)
        mark = BatchMark(tmp_path / "ingest.batch")
        assert mark.interrupted is None
        mark.close()


def test_a_damaged_mark_is_ignored(tmp_path: Path):
    rng = np.random.default_rng(4)
    frames = fill(tmp_path, [chunks_of(SPEC, rng, 5)])
    for raw in (b"\xff" * 2000, b"{", b'{"partition": 1}', b"null"):
        (tmp_path / "ingest.batch").write_bytes(raw)
        assert exit_code_of_ingest(tmp_path, KnownSpecs(SPEC), LocalStore) == 0
    assert len(fates(tmp_path)[0]) == len(frames)


def test_a_mark_of_another_position_changes_nothing(tmp_path: Path):
    rng = np.random.default_rng(5)
    fill(tmp_path, [chunks_of(SPEC, rng, 5)])
    stream = FileStream(tmp_path / "stream")
    (partition,) = stream.partitions()
    mark = b'{"partition":"%s","position":"9:9:9","records":1,"crashes":7,"is_suspect":true}'
    (tmp_path / "ingest.batch").write_bytes(mark % partition.id.encode())
    with LocalStore(tmp_path / "store", synchronous="OFF") as store:
        batches = Counting(store)
        service = IngestService(
            stream,
            batches,  # type: ignore[arg-type]
            KnownSpecs(SPEC),
            owner="test",
            mark=BatchMark(tmp_path / "ingest.batch"),
        )
        service.drain()
    assert batches.sizes == [5]


class Counting:
    """Counts the candidates of each write to a store."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.sizes: list[int] = []

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        return self._store.claim(partition, owner=owner, ttl_s=ttl_s)

    def write(self, batch: WriteBatch) -> Receipt:
        self.sizes.append(len(batch.candidates))
        return self._store.write(batch)
