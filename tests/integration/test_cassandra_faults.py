"""The store on Cassandra under faults: nothing acknowledged is lost, nothing is stored twice.

Each test has a control that must fail: the same faults without one rule of the store.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.integration.between import Crash, Cut, Delay, Hold, is_claim, is_data, is_row
from tests.integration.keyspaces import Keyspace
from tests.integration.source import Key, Source, faults_in, insist, tailed
from understudy.core.errors import ClaimLost, Unreachable
from understudy.ports import Cursor, Forgotten, Stored, WriteBatch
from understudy.stores.cassandra import partitions
from understudy.stores.cassandra.commits import Commit, apply
from understudy.stores.cassandra.partitions import Lease, Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Statement, Wire
from understudy.testing.clock import ManualClock

IS_QUICK = True

# --- a crash between each pair of write steps -----------------------------------------------------


def crash_after(keyspace: Keyspace, counts: Iterable[int]) -> tuple[list[str], int]:
    """Writers that die after some writes, each followed by another; faults and deaths."""
    clock = ManualClock()
    sources: list[Source] = []
    wrong: list[str] = []
    n_died = stored = 0
    for writes in counts:
        source = Source(writes + 1, n_sessions=2, n_chunks=3)
        store = keyspace.open(clock)
        claim = store.claim(source.name, owner="test", ttl_s=60.0)
        store.wire.send = Cut(store.wire.send, writes)
        try:
            store.write(source.batch(claim.epoch, None, 4))
            has_died = False
        except Crash:
            has_died = True
        store.wire.close()
        n_died += has_died
        sources.append(source)
        with keyspace.open(clock) as following:
            shown = len(tailed(following))
            if shown not in (stored, stored + 4):
                wrong.append(
                    f"after {writes} writes, {shown - stored} items of a batch of 4 are shown"
                )
            # Whoever comes next reads the stream in other portions.
            source.drain(following, 3)
        stored += len(source.chunks)
        if not has_died:
            break
    with keyspace.open(clock) as last:
        return wrong + faults_in(last, *sources), n_died


def test_a_crash_between_any_two_writes_loses_and_duplicates_nothing(keyspace: Keyspace) -> None:
    wrong, n_died = crash_after(keyspace, range(100))
    assert 10 <= n_died < 100, "once for every write of a batch"
    assert wrong == []


def test_control_sessions_written_before_their_commit_lose_frames(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Partitions.commit

    def apply_first(self: Partitions, lease: Lease, one: Commit, position: str | None) -> None:
        apply(self._wire, one)
        commit(self, lease, one, position)

    monkeypatch.setattr(Partitions, "commit", apply_first)
    wrong, _ = crash_after(keyspace, [13])
    assert any("is not shown" in one for one in wrong)


def test_control_a_claim_that_does_not_apply_the_last_commit_loses_count(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "redo", lambda *_: None)
    wrong, _ = crash_after(keyspace, [8])
    assert any(" counts " in one for one in wrong)


def test_control_a_position_before_the_data_loses_it(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Statement] = []
    commit = Partitions.commit
    every = Wire.all

    def keep_data(self: Wire, statements: list[Statement]) -> list[list[Any]]:
        late.extend(one for one in statements if is_data(one))
        return every(self, [one for one in statements if not is_data(one)])

    def commit_first(self: Partitions, lease: Lease, one: Commit, position: str | None) -> None:
        commit(self, lease, one, position)
        data = list(late)
        late[:] = []
        every(self._wire, data)

    monkeypatch.setattr(Wire, "all", keep_data)
    monkeypatch.setattr(Partitions, "commit", commit_first)
    wrong, _ = crash_after(keyspace, [4])
    assert any("is not shown" in one for one in wrong)


# --- writes that arrive late ----------------------------------------------------------------------


def tail_under_delays(keyspace: Keyspace, clock: ManualClock) -> tuple[list[str], int]:
    """Two writers with writes of up to half a second, and a reader; faults and late writes."""
    sources = [Source(one, n_sessions=4, n_chunks=3) for one in (1, 2)]
    writers = [
        keyspace.open(clock, between=lambda send: Delay(send, most_s=0.5, seed=5)) for _ in sources
    ]
    threads = [
        threading.Thread(target=source.drain, args=(store, 3))
        for source, store in zip(sources, writers, strict=True)
    ]
    with keyspace.open(clock) as reader:
        for thread in threads:
            thread.start()
        items: list[Stored | Forgotten] = []
        cursor: Cursor | None = None
        while any(thread.is_alive() for thread in threads):
            page = reader.tail(cursor, max_items=2, wait_s=0.2)
            items += page.items
            cursor = page.cursor
        while page := reader.tail(cursor, max_items=50, wait_s=1.5):
            items += page.items
            cursor = page.cursor
            if not page.items:
                break
        wrong = faults_in(reader, *sources)
    shown = Counter(
        item.chunk.meta.id for item in items if isinstance(item, Stored) and item.chunk is not None
    )
    wrong += [
        f"{key} was shown {shown[key]} times"
        for one in sources
        for key in one.keys
        if shown[key] != 1
    ]
    wrong += [f"{item} was shown as gone" for item in items if isinstance(item, Forgotten)]
    delayed = sum(store.wire.send.delayed for store in writers)  # type: ignore[attr-defined]
    for store in writers:
        store.close()
    return wrong, delayed


def test_a_tail_during_late_writes_shows_everything_once(keyspace: Keyspace) -> None:
    wrong, delayed = tail_under_delays(keyspace, ManualClock())
    assert delayed > 50
    assert wrong == []


def test_control_a_tail_that_passes_the_committed_position_goes_wrong(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Tailer.heads

    def too_far(self: Tailer, *, look: bool = False) -> dict[str, int]:
        found = heads(self, look=look)
        rows = keyspace.rows("SELECT partition, commit_no FROM commits")
        return found | {
            row.partition: max(found.get(row.partition, 0), row.commit_no) for row in rows
        }

    monkeypatch.setattr(Tailer, "heads", too_far)
    wrong, _ = tail_under_delays(keyspace, ManualClock())
    assert wrong != []


# --- an owner that comes back from the dead -------------------------------------------------------


def late_write(store: Any, batch: WriteBatch) -> tuple[threading.Thread, list[bool]]:
    """A thread that writes a batch, and whether it was told that the claim is lost."""
    lost: list[bool] = []

    def write() -> None:
        try:
            store.write(batch)
        except ClaimLost:
            lost.append(True)

    return threading.Thread(target=write), lost


def zombie(keyspace: Keyspace, clock: ManualClock) -> list[str]:
    """A writer is held mid-batch; another takes over; then the first one's writes land."""
    source = Source(1, n_sessions=2, n_chunks=6)
    first = keyspace.open(clock)
    claim = first.claim(source.name, owner="test", ttl_s=60.0)
    batch = source.batch(claim.epoch, None, 3)
    first.write(batch)
    hold = Hold(first.wire.send)
    first.wire.send = hold
    thread, lost = late_write(first, source.batch(claim.epoch, batch.position, 4))
    thread.start()
    assert hold.seen.wait(20.0)
    with keyspace.open(clock) as second:
        source.drain(second, 5)
        hold.let_go()
        thread.join(60.0)
        first.close()
        wrong = [] if lost else ["the zombie was not told"]
        return wrong + faults_in(second, source)


def test_late_writes_of_a_stale_owner_change_nothing(keyspace: Keyspace) -> None:
    assert zombie(keyspace, ManualClock()) == []


def test_an_attempt_made_while_another_claims_stays_below_its_claim(keyspace: Keyspace) -> None:
    """The first owner decides after the second began to claim; its writes land later."""
    clock = ManualClock()
    source = Source(1, n_sessions=2, n_chunks=6)
    first = keyspace.open(clock)
    second = keyspace.open(clock)
    claim = first.claim(source.name, owner="test", ttl_s=60.0)
    batch = source.batch(claim.epoch, None, 3)
    first.write(batch)
    claiming = Hold(second.wire.send, only=is_claim)
    writing = Hold(first.wire.send, only=is_row)
    second.wire.send = claiming
    first.wire.send = writing
    taker = threading.Thread(target=source.drain, args=(second, 5))
    taker.start()
    assert claiming.seen.wait(20.0)
    writer, lost = late_write(first, source.batch(claim.epoch, batch.position, 4))
    writer.start()
    assert writing.seen.wait(20.0)
    claiming.let_go()
    taker.join(60.0)
    writing.let_go()
    writer.join(60.0)
    assert lost == [True]
    assert faults_in(second, source) == []
    first.close()
    second.close()


def test_control_commits_that_do_not_follow_claims_let_a_zombie_do_harm(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timestamps that fall from one epoch to the next: the first claim wins."""
    monkeypatch.setattr(Lease, "next_attempt", lambda self: (1 << 60) - self.epoch)
    assert zombie(keyspace, ManualClock()) != []


# --- the server dies ------------------------------------------------------------------------------


def test_cassandra_killed_mid_write_loses_and_duplicates_nothing(
    cassandra_server: Any,
) -> None:
    if not cassandra_server.pid:
        cassandra_server.kill()  # skips: it is somebody else's
    keyspace = Keyspace(cassandra_server, cassandra_server.credentials_file, "killed")
    sources = [Source(one, n_sessions=6, n_chunks=8) for one in (1, 2, 3)]
    acked: list[Key] = []
    begun = threading.Event()

    threads = [
        threading.Thread(target=insist, args=(source, keyspace, acked, begun)) for source in sources
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60.0)
    cassandra_server.kill()
    assert any(thread.is_alive() for thread in threads), "it died in mid-write"
    cassandra_server.restart()
    for thread in threads:
        thread.join(180.0)
        assert not thread.is_alive()
    with keyspace.open() as reader:
        # A commit whose answer was lost counts without having been acknowledged: then the next
        # claim goes on behind it.
        assert faults_in(reader, *sources) == []
        assert len(acked) == len(set(acked)) > 100
    keyspace.close()


def test_control_a_write_that_is_acknowledged_without_an_answer_is_lost(keyspace: Keyspace) -> None:
    source = Source(1)
    store = keyspace.open(options="&retry_s=0.1", between=lambda send: _Deaf(send))
    claim = store.claim(source.name, owner="test", ttl_s=60.0)
    store.wire.send.is_deaf = True  # type: ignore[attr-defined]
    with pytest.raises(Unreachable):
        store.write(source.batch(claim.epoch, None, 12))
    store.wire.close()
    with keyspace.open() as reader:
        assert faults_in(reader, source) != [], "had it been acknowledged, it would be lost"


class _Deaf:
    """A server that has stopped to answer."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.is_deaf = False

    def __call__(self, statement: Any, done: Any) -> None:
        if self.is_deaf:
            from cassandra import OperationTimedOut

            done(None, OperationTimedOut())
        else:
            self._send(statement, done)
