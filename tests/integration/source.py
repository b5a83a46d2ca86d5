"""Partitions of a stream for tests of the Cassandra store, and checks of their stored chunks."""

import threading
import uuid
from collections import Counter

import numpy as np

from tests.integration.keyspaces import Keyspace
from understudy.core.errors import ClaimLost, Unreachable
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.ports import (
    Candidate,
    Cursor,
    Forgotten,
    Position,
    RefusedFrame,
    SessionFilter,
    Stored,
    WriteBatch,
)
from understudy.stores.cassandra import CassandraStore
from understudy.testing.clock import START_S
from understudy.testing.samples import PLAYER, random_session
from understudy.testing.store_harness import SPEC

Key = tuple[uuid.UUID, int]


class Source:
    """A partition of a stream: chunks of a few sessions, readable from any position."""

    def __init__(self, seed: int, *, n_sessions: int = 3, n_chunks: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.name = f"source-{seed}"
        sessions = [
            random_session(
                SPEC, rng, session=new_session(START_S - 60.0, rng.bytes(10)), n_chunks=n_chunks
            )
            for _ in range(n_sessions)
        ]
        self.chunks = [chunk for turn in zip(*sessions, strict=True) for chunk in turn]
        self.keys = [chunk.meta.id for chunk in self.chunks]

    def batch(self, epoch: int, position: Position | None, count: int) -> WriteBatch:
        """What a reader gets behind a position."""
        start = int(position or 0)
        chunks = self.chunks[start : start + count]
        refused = [RefusedFrame(b"garbage %d" % start, "truncated", "", START_S)] if chunks else []
        end = Position(str(start + len(chunks)))
        return WriteBatch(self.name, epoch, end, [candidate(chunk) for chunk in chunks], refused)

    def drain(self, store: CassandraStore, count: int) -> None:
        """Store all that is left, from the position of the store."""
        claim = store.claim(self.name, owner="test", ttl_s=60.0)
        position = claim.position
        while int(position or 0) < len(self.chunks):
            batch = self.batch(claim.epoch, position, count)
            store.write(batch)
            position = batch.position


def insist(source: Source, keyspace: Keyspace, acked: list[Key], begun: threading.Event) -> None:
    """Store a whole source despite outages; records acks, and when 8 chunks were stored."""
    store = keyspace.open(options="&retry_s=5&timeout_s=3")
    position: Position | None = None
    epoch: int | None = None
    while int(position or 0) < len(source.chunks):
        try:
            if epoch is None:
                claim = store.claim(source.name, owner=source.name, ttl_s=60.0)
                epoch = claim.epoch
                position = claim.position
                continue
            batch = source.batch(epoch, position, 2)
            store.write(batch)
        except ClaimLost:
            epoch = None
            continue
        except Unreachable:
            continue
        acked.extend(one.chunk.meta.id for one in batch.candidates if one.chunk is not None)
        position = batch.position
        if int(position or 0) >= 8:
            begun.set()
    store.close()


def candidate(chunk: Chunk, player: bytes = PLAYER) -> Candidate:
    return Candidate(chunk.frame().stamped(player, int(START_S)), chunk)


def tailed(store: CassandraStore) -> list[Stored | Forgotten]:
    found: list[Stored | Forgotten] = []
    cursor: Cursor | None = None
    while items := (page := store.tail(cursor, max_items=7, wait_s=0.0)).items:
        found += items
        cursor = page.cursor
    return found


def faults_in(store: CassandraStore, *sources: Source) -> list[str]:
    """The errors of a store into which these sources were drained; empty if none."""
    wrong: list[str] = []
    items = tailed(store)
    audit = store.audit()
    shown = Counter(
        item.chunk.meta.id for item in items if isinstance(item, Stored) and item.chunk is not None
    )
    wanted = [key for source in sources for key in source.keys]
    wrong += [f"{key} is not shown" for key in wanted if not shown[key]]
    wrong += [f"{key} is shown {count} times" for key, count in shown.items() if count > 1]
    wrong += [f"{item} is shown as gone" for item in items if isinstance(item, Forgotten)]
    if [item.arrival_no for item in items] != list(range(1, len(items) + 1)):
        wrong.append("numbers are not dense")
    if (audit.chunks, audit.duplicate_chunks, audit.gap_chunks, list(audit.corrupt)) != (
        len(wanted),
        0,
        0,
        [],
    ):
        wrong.append(f"audit: {audit}")
    per_session = Counter(session for session, _ in wanted)
    infos = {one.session: one for one in store.sessions(SessionFilter())}
    wrong += [
        f"session {session} counts {infos[session].n_chunks if session in infos else 0} of {count}"
        for session, count in per_session.items()
        if session not in infos or infos[session].n_chunks != count
    ]
    return wrong
