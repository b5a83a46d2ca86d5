"""Erasures on Cassandra during writes and after crashes: no byte of a forgotten player returns."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.integration.between import Crash, Cut, Hold, is_commit, is_row
from tests.integration.keyspaces import Keyspace
from tests.integration.source import Source, candidate, faults_in, tailed
from understudy.core.names import new_session
from understudy.ports import Position, RefusedFrame, Stored, WriteBatch
from understudy.stores.cassandra import store as cassandra_store
from understudy.stores.cassandra.partitions import Partitions
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_chunk, random_session
from understudy.testing.store_harness import SPEC

IS_QUICK = True


def played(keyspace: Keyspace) -> list[Any]:
    """Sessions of which bytes are there; what has no readable header is of no player."""
    return [row.session for row in keyspace.rows("SELECT session FROM chunks") if row.session.int]


def test_a_write_in_flight_does_not_restore_a_forgotten_player(keyspace: Keyspace) -> None:
    clock = ManualClock()
    source = Source(1)
    writer = keyspace.open(clock)
    claim = writer.claim(source.name, owner="test", ttl_s=60.0)
    hold = Hold(writer.wire.send, only=is_commit)
    writer.wire.send = hold
    receipts: list[Any] = []
    thread = threading.Thread(
        target=lambda: receipts.append(writer.write(source.batch(claim.epoch, None, 12)))
    )
    thread.start()
    assert hold.seen.wait(20.0)
    with keyspace.open(clock) as other:
        other.forget(PLAYER)
        hold.let_go()
        thread.join(60.0)
        assert set(receipts[0].reasons) == {"forgotten"}
        assert [item for item in tailed(other) if isinstance(item, Stored)] == []
        assert played(keyspace) == [], "no byte is left"
    writer.close()


def test_a_writer_unaware_of_an_erasure_restores_no_byte(keyspace: Keyspace) -> None:
    clock = ManualClock()
    source = Source(1)
    with keyspace.open(clock) as writer, keyspace.open(clock) as other:
        claim = writer.claim(source.name, owner="test", ttl_s=60.0)
        batch = source.batch(claim.epoch, None, 6)
        writer.write(batch)
        other.forget(PLAYER)
        clock.advance(3_601.0)
        receipt = writer.write(source.batch(claim.epoch, batch.position, 6))
        assert set(receipt.reasons) == {"forgotten"}
        assert [item for item in tailed(other) if isinstance(item, Stored)] == []
        assert played(keyspace) == [], "no byte is left"


def test_a_session_that_arrives_while_its_player_is_forgotten_leaves_no_byte(
    keyspace: Keyspace,
) -> None:
    """The erasure has looked for the player's sessions before this one was written."""
    clock = ManualClock()
    source = Source(1)
    with keyspace.open(clock) as writer, keyspace.open(clock) as other:
        claim = writer.claim(source.name, owner="test", ttl_s=60.0)
        hold = Hold(writer.wire.send, only=is_row)
        writer.wire.send = hold
        raw = candidate(Source(2).chunks[0]).frame.encode()
        parked = [RefusedFrame(raw, "unknown_schema", "", START_S, SPEC.game)]
        batch = replace(source.batch(claim.epoch, None, 12), parked=parked)
        receipts: list[Any] = []
        thread = threading.Thread(target=lambda: receipts.append(writer.write(batch)))
        thread.start()
        assert hold.seen.wait(20.0)
        other.forget(PLAYER)
        hold.let_go()
        thread.join(60.0)
        assert set(receipts[0].reasons) == {"forgotten"}
        assert played(keyspace) == [], "no byte is left"
        assert SPEC.game not in [row.game for row in keyspace.rows("SELECT game FROM quarantine")]


def test_a_decision_taken_over_by_another_writes_nothing_newer(keyspace: Keyspace) -> None:
    """A process held during a decision is replaced, and restores no byte of the player."""
    clock = ManualClock()
    (chunk, *_) = Source(1).chunks
    raw = candidate(chunk).frame.encode()
    with keyspace.open(clock) as slow, keyspace.open(clock) as quick:
        claim = slow.claim("one", owner="test", ttl_s=60.0)
        parked = RefusedFrame(raw, "unknown_schema", "", START_S, SPEC.game)
        slow.write(WriteBatch("one", claim.epoch, Position("1"), [], [], [parked]))
        (waiting,) = slow.quarantined()
        hold = Hold(slow.wire.send, only=is_row)
        slow.wire.send = hold
        receipts: list[Any] = []
        thread = threading.Thread(
            target=lambda: receipts.append(slow.replay([waiting.id], [candidate(chunk)]))
        )
        thread.start()
        assert hold.seen.wait(20.0)
        quick.admin_lock.grace_s = 0.1
        quick.forget(PLAYER)
        hold.let_go()
        thread.join(60.0)
        assert list(receipts[0].reasons) == ["forgotten"]
        assert played(keyspace) == [], "no byte is left"


def test_writers_continue_after_the_deciding_process_died(keyspace: Keyspace) -> None:
    clock = ManualClock()
    source = Source(1)
    with keyspace.open(clock) as writer:
        writer.admin_lock.grace_s = 0.3
        claim = writer.claim(source.name, owner="test", ttl_s=60.0)
        dying = keyspace.open(clock)
        dying.wire.send = Cut(dying.wire.send, 2)
        with pytest.raises(Crash):
            dying.forget(OTHER_PLAYER)
        dying.wire.close()
        assert (
            keyspace.rows("SELECT events FROM partitions WHERE partition = '~admin'")[0].events == 1
        ), "it had begun"
        writer.write(source.batch(claim.epoch, None, 12))
        assert faults_in(writer, source) == []


def test_an_interrupted_erasure_is_completed_by_the_next_claim(keyspace: Keyspace) -> None:
    clock = ManualClock()
    source = Source(1)
    other = Source(2)
    with keyspace.open(clock) as writer:
        source.drain(writer, 12)
    for writes in (1, 2, 3, 4, 5, 6, 8, 12, 60):
        dying = keyspace.open(clock)
        dying.admin_lock.grace_s = 0.1
        dying.wire.send = Cut(dying.wire.send, writes)
        try:
            dying.forget(PLAYER)
        except Crash:
            dying.wire.close()
            continue
        dying.close()
        break
    with keyspace.open(clock) as writer:
        writer.admin_lock.grace_s = 0.1
        writer.claim(other.name, owner="test", ttl_s=60.0)
        assert not writer.is_erasing
        assert played(keyspace) == []
        assert [item for item in tailed(writer) if isinstance(item, Stored)] == []


def forgotten_behind_a_crash(keyspace: Keyspace) -> list[Any]:
    """A writer dies after its commit, then its player is forgotten; returns what remains."""
    clock = ManualClock()
    source = Source(1, n_sessions=2, n_chunks=3)
    writer = keyspace.open(clock)
    claim = writer.claim(source.name, owner="test", ttl_s=60.0)
    writer.wire.send = Cut(writer.wire.send, 8)  # the last of them makes the commit count
    with pytest.raises(Crash):
        writer.write(source.batch(claim.epoch, None, 4))
    writer.wire.close()
    with keyspace.open(clock) as other:
        other.forget(PLAYER)
    return played(keyspace)


def test_commits_of_a_dead_writer_are_forgotten_too(keyspace: Keyspace) -> None:
    assert forgotten_behind_a_crash(keyspace) == []


def test_control_an_erasure_that_does_not_apply_the_last_commits_leaves_bytes(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cassandra_store, "redo", lambda *_: None)
    assert forgotten_behind_a_crash(keyspace) != []


def replayed_beside_a_write(keyspace: Keyspace) -> int:
    """A frame that was too early is stored from quarantine and stream at once: how often."""
    rng = np.random.default_rng(5)
    chunks = random_session(
        SPEC, rng, session=new_session(START_S - 60.0, rng.bytes(10)), n_chunks=10
    )
    early = random_chunk(
        SPEC, rng, session=chunks[0].meta.session, chunk_no=1030, first_step=1 << 20
    )
    clock = ManualClock()
    with keyspace.open(clock) as writer, keyspace.open(clock) as other:
        epoch = writer.claim("one", owner="test", ttl_s=60.0).epoch
        batches = [[early], chunks, [early]]
        first, second, third = (
            WriteBatch("one", epoch, Position(str(at)), [candidate(chunk) for chunk in batch])
            for at, batch in enumerate(batches, 1)
        )
        assert list(writer.write(first).reasons) == ["out_of_window"]
        writer.write(second)
        hold = Hold(writer.wire.send, only=is_commit)
        writer.wire.send = hold
        thread = threading.Thread(target=writer.write, args=(third,))
        thread.start()
        assert hold.seen.wait(20.0)
        (waiting,) = other.quarantined()
        assert list(other.replay([waiting.id], [candidate(early)]).fates) == ["new"]
        hold.let_go()
        thread.join(60.0)
        shown = [
            item.chunk.meta.id
            for item in tailed(other)
            if isinstance(item, Stored) and item.chunk is not None
        ]
        return shown.count(early.meta.id)


def test_a_frame_replayed_during_its_write_is_stored_once(keyspace: Keyspace) -> None:
    assert replayed_beside_a_write(keyspace) == 1


def test_control_decisions_that_do_not_hold_writers_store_a_frame_twice(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Partitions, "fence", lambda *_: None)
    assert replayed_beside_a_write(keyspace) == 2
