"""Erasures in a store on Cassandra beside writers and after crashes: no byte of a forgotten player comes back."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.backends.between import Crash, Cut, Hold, is_commit, is_draw, is_row
from tests.backends.keyspaces import Keyspace
from tests.backends.source import Source, candidate, faults_in, tailed
from understudy.core.ports import Position, RefusedFrame, Stored, WriteBatch
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.desk import SPEC
from understudy.testing.samples import OTHER_PLAYER, PLAYER


def test_a_write_under_way_does_not_bring_back_a_forgotten_player(keyspace: Keyspace) -> None:
    clock, source = ManualClock(), Source(1)
    writer = keyspace.open(clock)
    claim = writer.claim(source.name, owner="test", ttl_s=60.0)
    hold = Hold(writer.wire.send, only=is_commit)
    writer.wire.send = hold
    receipts: list[Any] = []
    thread = threading.Thread(target=lambda: receipts.append(writer.write(source.batch(claim.epoch, None, 12))))
    thread.start()
    assert hold.seen.wait(20.0)
    with keyspace.open(clock) as other:
        other.forget(PLAYER)
        hold.let_go()
        thread.join(60.0)
        assert set(receipts[0].reasons) == {"forgotten"}
        assert [item for item in tailed(other) if isinstance(item, Stored)] == []
        assert keyspace.rows("SELECT session FROM chunks") == [], "no byte is left"
    writer.close()


def test_stamps_drawn_after_an_erasure_bring_no_byte_back(keyspace: Keyspace) -> None:
    """A writer that has not heard of an erasure draws stamps above it."""
    clock, source = ManualClock(), Source(1)
    with keyspace.open(clock) as writer, keyspace.open(clock) as other:
        claim = writer.claim(source.name, owner="test", ttl_s=60.0)
        batch = source.batch(claim.epoch, None, 6)
        writer.write(batch)
        other.forget(PLAYER)
        clock.advance(3_601.0)
        receipt = writer.write(source.batch(claim.epoch, batch.position, 6))
        assert set(receipt.reasons) == {"forgotten"}
        assert [item for item in tailed(other) if isinstance(item, Stored)] == []
        assert keyspace.rows("SELECT session FROM chunks") == [], "no byte is left"


def test_a_session_that_first_comes_while_its_player_is_forgotten_leaves_no_byte(keyspace: Keyspace) -> None:
    """The erasure has looked for the player's sessions before this one was written."""
    clock, source = ManualClock(), Source(1)
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
        assert keyspace.rows("SELECT session FROM chunks") == [], "no byte is left"
        assert raw not in [row.raw for row in keyspace.rows("SELECT raw FROM quarantine")]


def test_a_decision_that_another_took_over_writes_nothing_above_it(keyspace: Keyspace) -> None:
    """Whoever was held while it drew its stamp finds its turn gone, and brings back no byte of a forgotten player."""
    clock, (chunk, *_) = ManualClock(), Source(1).chunks
    raw = candidate(chunk).frame.encode()
    with keyspace.open(clock) as slow, keyspace.open(clock) as quick:
        claim = slow.claim("one", owner="test", ttl_s=60.0)
        parked = RefusedFrame(raw, "unknown_schema", "", START_S, SPEC.game)
        slow.write(WriteBatch("one", claim.epoch, Position("1"), [], [], [parked]))
        (waiting,) = slow.quarantined()
        draws = itertools.count(1)
        hold = Hold(slow.wire.send, only=lambda one: is_draw(one) and next(draws) == 2)
        slow.wire.send = hold
        receipts: list[Any] = []
        thread = threading.Thread(target=lambda: receipts.append(slow.replay([waiting.id], [candidate(chunk)])))
        thread.start()
        assert hold.seen.wait(20.0)
        quick.turns.grace_s = 0.1
        quick.forget(PLAYER)
        hold.let_go()
        thread.join(60.0)
        assert list(receipts[0].reasons) == ["forgotten"]
        assert keyspace.rows("SELECT session FROM chunks") == [], "no byte is left"


def test_writers_go_on_when_whoever_decides_died(keyspace: Keyspace) -> None:
    clock, source = ManualClock(), Source(1)
    with keyspace.open(clock) as writer:
        writer.turns.grace_s = 0.3
        claim = writer.claim(source.name, owner="test", ttl_s=60.0)
        dying = keyspace.open(clock)
        dying.wire.send = Cut(dying.wire.send, 4)
        with pytest.raises(Crash):
            dying.forget(OTHER_PLAYER)
        dying.wire.close()
        assert keyspace.rows("SELECT events FROM lanes WHERE partition = '~admin'")[0].events == 1, "it had begun"
        writer.write(source.batch(claim.epoch, None, 12))
        assert faults_in(writer, source) == []


def test_an_erasure_that_was_cut_off_is_ended_by_the_next_claim(keyspace: Keyspace) -> None:
    clock, source, other = ManualClock(), Source(1), Source(2)
    with keyspace.open(clock) as writer:
        source.drain(writer, 12)
    for writes in (4, 6, 7, 9, 14, 60):
        dying = keyspace.open(clock)
        dying.turns.grace_s = 0.1
        dying.wire.send = Cut(dying.wire.send, writes)
        try:
            dying.forget(PLAYER)
        except Crash:
            dying.wire.close()
            continue
        dying.close()
        break
    with keyspace.open(clock) as writer:
        writer.turns.grace_s = 0.1
        writer.claim(other.name, owner="test", ttl_s=60.0)
        assert not writer.is_erasing
        assert keyspace.rows("SELECT session FROM chunks") == []
        assert [item for item in tailed(writer) if isinstance(item, Stored)] == []
