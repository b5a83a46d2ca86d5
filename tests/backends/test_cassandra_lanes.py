"""Partitions that come and go: those that nobody claims any more cost nothing, and lose nothing."""

import threading
from collections import Counter
from typing import Any

import pytest

from tests.backends.between import Hold, is_claim, is_retirement
from tests.backends.keyspaces import Keyspace
from tests.backends.source import Source, faults_in, tailed
from understudy.core.errors import ClaimLost
from understudy.core.ports import Stored
from understudy.stores.cassandra import retiring
from understudy.stores.cassandra.wire import Done, Send
from understudy.testing.clock import ManualClock

N_OLD = 12


class Counting:
    """Counts requests by what they ask for."""

    def __init__(self, send: Send) -> None:
        self._send, self.seen = send, Counter[str]()

    def __call__(self, statement: Any, done: Done) -> None:
        text = statement.prepared_statement.query_string
        self.seen["lane" if ".lanes WHERE" in text else "fence" if "SET events" in text else "other"] += 1
        self._send(statement, done)


def grown(keyspace: Keyspace, clock: ManualClock) -> tuple[list[Source], list[Source]]:
    """Partitions that were written and left a month ago, and two that are new."""
    old, new = [Source(one, n_sessions=1) for one in range(N_OLD)], [Source(one) for one in (101, 102)]
    with keyspace.open(clock) as store:
        for source in old:
            source.drain(store, 3)
    clock.advance(30 * 86_400.0)
    with keyspace.open(clock) as store:
        for source in new:
            source.drain(store, 6)
    return old, new


def test_lanes_that_nobody_claims_are_asked_no_more_and_read_as_before(keyspace: Keyspace) -> None:
    clock = ManualClock()
    old, new = grown(keyspace, clock)
    assert {row.name for row in keyspace.rows("SELECT name FROM registry WHERE kind = 'head'")} == {
        source.name for source in new
    }
    with keyspace.open(clock) as reader:
        assert faults_in(reader, *old, *new) == []
        cursor = reader.tail(None, max_items=1000, wait_s=0.0).cursor
        counting = Counting(reader.wire.send)
        reader.wire.send = counting
        assert reader.tail(cursor, max_items=1000, wait_s=1.2).items == []
        assert 0 < counting.seen["lane"] <= 2 * (len(new) + 1), "two looks at most"
        counting.seen.clear()
        reader.forget(b"nobody".ljust(16, b"\0"))
        assert counting.seen["fence"] <= len(new)


def test_control_lanes_that_are_never_retired_are_asked_for_ever(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "IDLE_S", float("inf"))
    clock = ManualClock()
    grown(keyspace, clock)
    with keyspace.open(clock) as reader:
        counting = Counting(reader.wire.send)
        reader.wire.send = counting
        reader.tail(None, max_items=1000, wait_s=0.0)
        assert counting.seen["lane"] > N_OLD


def test_a_retired_lane_that_is_claimed_goes_on_where_it_was(keyspace: Keyspace) -> None:
    clock = ManualClock()
    first, other = Source(1), Source(2)
    with keyspace.open(clock) as store, keyspace.open(clock) as reader:
        claim = store.claim(first.name, owner="test", ttl_s=60.0)
        batch = first.batch(claim.epoch, None, 6)
        store.write(batch)
        items = reader.tail(None, max_items=100, wait_s=0.0)
        clock.advance(30 * 86_400.0)
        with keyspace.open(clock) as busy:
            other.drain(busy, 12)
        with pytest.raises(ClaimLost):
            store.write(first.batch(claim.epoch, batch.position, 6))
        first.drain(store, 6)
        assert faults_in(store, first, other) == []
        rest = reader.tail(items.cursor, max_items=100, wait_s=2.0).items
        shown = [one.frame.session for one in (*items.items, *rest) if isinstance(one, Stored)]
        assert len(shown) == len(first.chunks) + len(other.chunks), "a tail that had begun shows each once"


def test_a_lane_that_is_written_while_it_is_retired_stays(keyspace: Keyspace) -> None:
    """Its owner's commit comes between the look and the end."""
    clock = ManualClock()
    first, other = Source(1), Source(2)
    with keyspace.open(clock) as store, keyspace.open(clock) as busy:
        claim = store.claim(first.name, owner="test", ttl_s=60.0)
        clock.advance(30 * 86_400.0)
        hold = Hold(busy.wire.send, only=is_retirement)
        busy.wire.send = hold
        thread = threading.Thread(target=other.drain, args=(busy, 12))
        thread.start()
        assert hold.seen.wait(20.0)
        store.write(first.batch(claim.epoch, None, 6))
        hold.let_go()
        thread.join(60.0)
        store.write(first.batch(claim.epoch, first.batch(claim.epoch, None, 6).position, 6))
        assert {row.name for row in keyspace.rows("SELECT name FROM registry WHERE kind = 'ended'")} == set()
        assert faults_in(store, first, other) == []


def test_a_lane_that_is_claimed_while_it_is_retired_is_not_lost_from_sight(keyspace: Keyspace) -> None:
    """It is retired between the draw and the compare-and-set of a claim."""
    clock = ManualClock()
    first, other = Source(1), Source(2)
    with keyspace.open(clock) as store:
        first.drain(store, 12)
    clock.advance(30 * 86_400.0)
    more = Source(3)
    more.name = first.name
    with keyspace.open(clock) as store, keyspace.open(clock) as busy:
        hold = Hold(store.wire.send, only=is_claim)
        store.wire.send = hold
        claims: list[Any] = []
        thread = threading.Thread(target=lambda: claims.append(store.claim(first.name, owner="b", ttl_s=60.0)))
        thread.start()
        assert hold.seen.wait(20.0)
        other.drain(busy, 12)
        assert {row.name for row in keyspace.rows("SELECT name FROM registry WHERE kind = 'ended'")} == {first.name}
        hold.let_go()
        thread.join(60.0)
        store.write(more.batch(claims[0].epoch, None, 12))
        with keyspace.open(clock) as reader:
            shown = [one.chunk.meta.id for one in tailed(reader) if isinstance(one, Stored) and one.chunk is not None]
            assert sorted(shown) == sorted([*first.keys, *more.keys, *other.keys])
