"""Partitions over time: unclaimed ones cost no requests and lose nothing."""

from collections import Counter
from typing import Any

import pytest

from tests.integration.between import Crash, Cut
from tests.integration.keyspaces import Keyspace
from tests.integration.source import Source, faults_in, tailed
from understudy.ports import Stored
from understudy.stores.cassandra import tailing
from understudy.stores.cassandra.wire import Done, Send
from understudy.testing.clock import ManualClock

IS_QUICK = True

N_OLD = 12


class Counting:
    """Counts requests by the table they ask."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.seen = Counter[str]()

    def __call__(self, statement: Any, done: Done) -> None:
        text = statement.prepared_statement.query_string
        self.seen["partition" if ".partitions WHERE" in text else "other"] += 1
        self._send(statement, done)


def idle_requests(keyspace: Keyspace) -> tuple[Counter[str], list[str]]:
    """The requests of an idle reader with released partitions, and what it shows wrongly."""
    clock = ManualClock()
    sources = [Source(one, n_sessions=1) for one in range(N_OLD)]
    with keyspace.open(clock) as store:
        for source in sources:
            source.drain(store, 4)
    with keyspace.open(clock) as reader:
        wrong = faults_in(reader, *sources)
        cursor = reader.tail(None, max_items=1000, wait_s=0.0).cursor
        counting = Counting(reader.wire.send)
        reader.wire.send = counting
        assert reader.tail(cursor, max_items=1000, wait_s=1.0).items == []
        return counting.seen, wrong


def test_idle_partitions_are_no_longer_polled_and_still_read(
    keyspace: Keyspace,
) -> None:
    seen, wrong = idle_requests(keyspace)
    assert (seen["partition"], wrong) == (0, [])


def test_control_a_reader_that_polls_every_partition_polls_forever(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailing, "LOOK_S", 0.0)
    seen, _ = idle_requests(keyspace)
    assert seen["partition"] > N_OLD


def test_a_released_partition_resumes_at_its_position(keyspace: Keyspace) -> None:
    clock = ManualClock()
    first = Source(1)
    other = Source(2)
    with keyspace.open(clock) as store, keyspace.open(clock) as reader:
        claim = store.claim(first.name, owner="test", ttl_s=60.0)
        store.write(first.batch(claim.epoch, None, 6))
        items = reader.tail(None, max_items=100, wait_s=0.0)
        clock.advance(30 * 86_400.0)
        with keyspace.open(clock) as busy:
            other.drain(busy, 12)
            first.drain(busy, 6)
        rest = reader.tail(items.cursor, max_items=100, wait_s=2.0).items
        shown = [one.frame.session for one in (*items.items, *rest) if isinstance(one, Stored)]
        assert len(shown) == len(first.chunks) + len(other.chunks), (
            "a tail that had begun shows each once"
        )
        assert faults_in(reader, first, other) == []


def test_a_commit_whose_writer_died_before_notifying_readers_is_visible(
    keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that run find it within a minute, new ones at once, without a new claim."""
    clock = ManualClock()
    source = Source(1, n_sessions=2, n_chunks=3)
    with keyspace.open(clock) as reader:
        assert tailed(reader) == []
        store = keyspace.open(clock)
        claim = store.claim(source.name, owner="test", ttl_s=60.0)
        store.wire.send = Cut(store.wire.send, 8)  # the last of them makes the commit count
        with pytest.raises(Crash):
            store.write(source.batch(claim.epoch, None, 4))
        store.wire.close()
        assert tailed(reader) == [], "readers are told behind the commit"
        with keyspace.open(clock) as late:
            assert len(tailed(late)) == 4
        monkeypatch.setattr(tailing, "LOOK_S", 0.0)
        assert len(tailed(reader)) == 4
