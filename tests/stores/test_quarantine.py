"""Quarantine is bounded: junk neither fills the disk nor displaces frames that can be stored."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.local_stores import local_harness, sessions
from understudy.ports import CRASHED_INGEST, RefusedFrame, WriteBatch
from understudy.stores import local
from understudy.stores.local import LocalStore
from understudy.testing.samples import PLAYER


def junk(number: int, size: int = 2_000) -> RefusedFrame:
    return RefusedFrame(number.to_bytes(4, "little") * (size // 4), "bad_magic", "a test", 1.0)


def writer(store: LocalStore) -> Callable[..., None]:
    """Writes refused and parked frames."""
    epoch = store.claim("p", owner="test", ttl_s=60).epoch

    def write(refused: list[RefusedFrame], parked: list[RefusedFrame] | None = None) -> None:
        store.write(WriteBatch("p", epoch, None, refused=refused, parked=parked or []))

    return write


def test_the_oldest_refused_bytes_are_evicted_first_and_their_reasons_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 10_000)
    with LocalStore(tmp_path) as store:
        write = writer(store)
        for number in range(20):
            write([junk(number)])
        assert [frame.raw[0] for frame in store.quarantined()] == [15, 16, 17, 18, 19]
        audit = store.audit()
        assert (audit.quarantined, audit.evicted, list(audit.corrupt)) == (5, 15, [])
        assert store._view.counts().evicted == 15
    with LocalStore(tmp_path) as store:
        writer(store)([junk(20)])
        assert [frame.raw[0] for frame in store.quarantined()] == [16, 17, 18, 19, 20]


def test_an_eviction_costs_the_same_however_many_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 20_000)
    with LocalStore(tmp_path, synchronous="OFF") as store:
        write = writer(store)
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        def cost_of_a_commit(number: int) -> int:
            nonlocal steps
            steps = 0
            store._db.set_progress_handler(count, 10)
            write([junk(number), junk(number + 1)])
            store._db.set_progress_handler(None, 0)
            return steps

        write([junk(number) for number in range(100)])
        few = cost_of_a_commit(100)
        write([junk(number) for number in range(200, 2_000)])
        assert cost_of_a_commit(6_000) < 2 * few


def test_a_large_frame_evicts_a_bounded_number_of_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 100 * 1024)
    with LocalStore(tmp_path) as store:
        write = writer(store)
        write([junk(number, 4) for number in range(100)])
        write([junk(0, 50 * 1024)])
        assert len(store.quarantined()) == 51


def test_junk_does_not_evict_frames_that_can_still_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 10_000)
    harness = local_harness(tmp_path)
    parked, crashed, withdrawn = (session[0] for session in sessions(3, 1))
    harness.put(withdrawn)
    harness.store.quarantine([withdrawn.meta.id], reason="guard")
    crash = RefusedFrame(
        crashed.frame().stamped(PLAYER, 1).encode(), CRASHED_INGEST, "crashed 3 times", 1.0
    )
    harness.write(refused=[crash], parked=[harness.refusal(parked, "unknown_schema")])
    for number in range(20):
        harness.write(refused=[junk(number)])
    held = {frame.reason: frame for frame in harness.store.quarantined()}
    assert held.keys() == {"guard", CRASHED_INGEST, "unknown_schema", "bad_magic"}
    audit = harness.store.audit()
    assert (audit.parked, audit.quarantined, audit.evicted) == (1, 2 + 5, 15)
    receipt = harness.store.replay([held["unknown_schema"].id], [harness.candidate(parked)])
    assert list(receipt.fates) == ["new"]
    harness.store.close()


def test_replayable_frames_have_a_limit_of_their_own_and_are_reported_when_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 5 * 1024)
    harness = local_harness(tmp_path)
    chunks = [session[0] for session in sessions(8, 1, max_steps=2)]
    for chunk in chunks:
        harness.write(parked=[harness.refusal(chunk, "unknown_schema")])
    kept = len(harness.store.quarantined())
    assert 0 < kept < 8
    audit = harness.store.audit()
    assert (audit.parked, audit.evicted, audit.gap_chunks) == (kept, 8 - kept, 0)
    oldest = harness.store.quarantined()[0]
    harness.store.replay([oldest.id], [harness.candidate(chunks[8 - kept])])
    harness.write(parked=[harness.refusal(sessions(1, 1, seed=1, max_steps=2)[0][0])])
    assert harness.store.audit().evicted == 8 - kept, "a replayed frame leaves its space"
    harness.store.close()


def test_expiry_and_forgetting_read_each_quarantined_frame_once(tmp_path: Path) -> None:
    harness = local_harness(tmp_path)
    store = harness.store
    assert isinstance(store, LocalStore)
    harness.write(refused=[junk(number, 64) for number in range(800)])
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def cost(work: Callable[[], object]) -> int:
        nonlocal steps
        steps = 0
        store._db.set_progress_handler(count, 100)
        work()
        store._db.set_progress_handler(None, 0)
        return steps

    # Reading all frames again for every four of them takes more than 5,000.
    assert cost(lambda: store.expire(harness.clock.now())) < 2_000
    mine = [
        RefusedFrame(number.to_bytes(4, "little") + PLAYER, "bad_magic", "a test", 1.0)
        for number in range(800)
    ]
    harness.write(refused=mine)
    assert cost(lambda: store.forget(PLAYER)) < 2_000
    assert store.quarantined() == []
    store.close()
