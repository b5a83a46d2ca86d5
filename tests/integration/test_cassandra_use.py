"""The Cassandra store in operation: errors, time to live, specs, threads, a window."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.keyspaces import Keyspace, OneSpec, elsewhere
from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError
from understudy.core.location import parse_location
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.ports import (
    Candidate,
    Cursor,
    ExperienceStore,
    Forgotten,
    Position,
    SessionFilter,
    Stored,
    WriteBatch,
)
from understudy.stores.cassandra import commits, init, migrate
from understudy.stores.cassandra import store as cassandra_store
from understudy.stores.cassandra.keyspace import VERSION
from understudy.stores.cassandra.tailing import SLACK_S
from understudy.stores.cassandra.wire import Wire, read_options
from understudy.stores.window import Window
from understudy.testing.clock import ManualClock
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness

IS_QUICK = True


def refusal(url: str, kind: type[UnderstudyError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        Keyspace.open_at(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def chunks_in(store: ExperienceStore) -> list[Chunk]:
    found: list[Chunk] = []
    cursor: Cursor | None = None
    while items := (page := store.tail(cursor, max_items=100, wait_s=0.0)).items:
        found += [
            item.chunk for item in items if isinstance(item, Stored) and item.chunk is not None
        ]
        cursor = page.cursor
    return found


def test_a_wrong_password_is_reported_and_not_shown(keyspace: Keyspace, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('username = "cassandra"\npassword = "open-sesame"\n')
    told = refusal(f"{keyspace.place}?credentials={file}")
    assert "password are incorrect); check credentials=FILE" in told
    assert "open-sesame" not in told
    assert "requires authentication); check credentials=FILE" in refusal(keyspace.place)


def test_a_missing_keyspace_is_reported_with_the_next_step(keyspace: Keyspace) -> None:
    told = refusal(elsewhere(keyspace.url, "nowhere"))
    assert "keyspace nowhere does not exist" in told
    assert "understudy store init" in told


def refused_init(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        init(parse_location(url))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_replication_above_the_cluster_size_is_rejected_before_anything_is_created(
    keyspace: Keyspace,
) -> None:
    url = elsewhere(keyspace.url, "copies")
    assert "needs at least 3 nodes, but this cluster has 1" in refused_init(
        url.replace("ion=1", "ion=5")
    )
    assert "no datacenter 'moon'" in refused_init(url.replace("ion=1", "ion=moon:1"))
    assert (
        keyspace.rows("SELECT * FROM system_schema.keyspaces WHERE keyspace_name = 'copies'") == []
    )


def test_a_definition_rejected_by_cassandra_is_reported_with_the_next_step(
    keyspace: Keyspace,
) -> None:
    wire = Wire(read_options(keyspace.location))
    try:
        with pytest.raises(ConfigError, match="check replication, datacenter and ttl_s") as caught:
            wire.define(
                "CREATE TABLE IF NOT EXISTS odd (name text PRIMARY KEY) WITH compaction = "
                "{'class': 'Odd'}"
            )
        assert "\n" not in str(caught.value)
    finally:
        wire.close()


def test_a_user_without_rights_is_reported_immediately(keyspace: Keyspace, tmp_path: Path) -> None:
    file = tmp_path / "guest.toml"
    file.write_text('username = "guest"\npassword = "guest"\n')
    keyspace.rows("CREATE ROLE IF NOT EXISTS guest WITH LOGIN = true AND PASSWORD = 'guest'")
    as_guest = f"{keyspace.place}?credentials={file}&replication=1"
    assert "user lacks permission" in refused_init(elsewhere(as_guest, "theirs"))
    assert "user lacks permission" in refusal(as_guest)
    with pytest.raises(ConfigError, match="user lacks permission"):
        migrate(parse_location(as_guest))


@pytest.mark.parametrize(
    ("version", "kind", "told"),
    [
        (VERSION + 1, StorageFailed, "newer than this release's"),
        (VERSION - 1, ConfigError, "use another keyspace"),
    ],
)
def test_tables_of_another_version_are_reported_with_the_next_step(
    keyspace: Keyspace, version: int, kind: type[UnderstudyError], told: str
) -> None:
    try:
        keyspace.rows(f"UPDATE meta SET number = {version} WHERE name = 'schema_version'")
        assert told in refusal(keyspace.url, kind)
        for call in (init, migrate):
            with pytest.raises(kind, match=told):
                call(keyspace.location)
    finally:
        keyspace.rows(f"UPDATE meta SET number = {VERSION} WHERE name = 'schema_version'")


def test_migrate_changes_the_ttl_only_if_one_is_given(keyspace: Keyspace) -> None:
    def compaction() -> str:
        cql = (
            "SELECT compaction FROM system_schema.tables WHERE keyspace_name = "
            f"'{keyspace.location.path}'"
        )
        (table,) = keyspace.rows(f"{cql} AND table_name = 'chunks'")
        return str(table.compaction["class"]).rpartition(".")[2]

    for options, wanted, by in (
        ("&ttl_s=86400", 86_400, "TimeWindowCompactionStrategy"),
        ("", 86_400, "TimeWindowCompactionStrategy"),
        ("&ttl_s=0", 0, "UnifiedCompactionStrategy"),
    ):
        assert migrate(parse_location(keyspace.url + options)) == wanted
        assert keyspace.rows("SELECT number FROM meta WHERE name = 'ttl_s'")[0].number == wanted
        assert compaction() == by


def test_a_second_init_changes_nothing(keyspace: Keyspace, rng: np.random.Generator) -> None:
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda _: keyspace.open(clock))
    harness.put(*random_session(SPEC, rng))
    init(keyspace.location)
    assert len(harness.chunks()) == 4
    harness.store.close()


def test_no_thread_is_left_when_a_store_is_closed(
    keyspace: Keyspace, rng: np.random.Generator
) -> None:
    before = set(threading.enumerate())
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    harness.store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    assert set(threading.enumerate()) <= before


def test_a_waiting_tail_is_woken_by_new_items(keyspace: Keyspace, rng: np.random.Generator) -> None:
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    with keyspace.open(clock) as reader:
        started = time.monotonic()
        assert reader.tail(None, max_items=9, wait_s=0.2).items == []
        assert time.monotonic() - started < 10.0
        timer = threading.Timer(0.3, harness.put, random_session(SPEC, rng))
        timer.start()
        assert len(reader.tail(None, max_items=9, wait_s=30.0).items) == 4
        timer.join()
    harness.store.close()


@pytest.fixture
def brief(keyspace: Keyspace) -> Iterator[Keyspace]:
    """The same, which keeps chunks for 4 seconds."""
    keyspace.keep(4)
    yield keyspace
    keyspace.keep(0)


def test_chunks_past_their_ttl_are_shown_as_expired(
    brief: Keyspace, rng: np.random.Generator
) -> None:
    clock = ManualClock()
    harness = StoreHarness(brief.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    deadline = time.monotonic() + 60.0
    while harness.chunks() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert [item.reason for item in harness.everything() if isinstance(item, Forgotten)] == [
        "expired"
    ] * 4
    audit = harness.store.audit()
    assert (audit.chunks, audit.expired_chunks, audit.gap_chunks, list(audit.corrupt)) == (
        0,
        4,
        0,
        [],
    )
    harness.store.close()


def test_expired_commits_are_no_damage(
    brief: Keyspace, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "REMEMBER_S", 0.0)  # else it takes 16 days
    clock = ManualClock()
    harness = StoreHarness(brief.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    deadline = time.monotonic() + 60.0
    while brief.rows("SELECT commit_no FROM commits") and time.monotonic() < deadline:
        time.sleep(0.5)
    audit = harness.store.audit()
    assert (audit.chunks, list(audit.corrupt)) == (0, [])
    harness.put(*random_session(SPEC, rng))
    assert list(harness.store.audit().corrupt) == []
    harness.store.close()


def test_expiry_before_a_ttl_change_is_no_damage_and_a_later_loss_is(
    brief: Keyspace, rng: np.random.Generator
) -> None:
    clock = ManualClock(time.time())
    harness = StoreHarness(brief.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    deadline = time.monotonic() + 60.0
    while brief.rows("SELECT chunk_no FROM chunks") and time.monotonic() < deadline:
        time.sleep(0.5)
    harness.store.close()
    migrate(parse_location(brief.url + "&ttl_s=0"))
    clock.advance(2 * SLACK_S)
    harness = StoreHarness(brief.open(clock), clock, lambda one: one)
    assert list(harness.store.audit().corrupt) == []
    later = random_session(SPEC, rng)
    harness.put(*later)
    (session,) = {chunk.meta.session for chunk in later}
    brief.rows(f"DELETE FROM chunks WHERE session = {session} AND bucket = 0")
    assert len(harness.store.audit().corrupt) == len(later)
    harness.store.close()


def test_an_erasure_is_remembered_longer_than_the_erased_data(
    keyspace: Keyspace, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written when chunks were kept for ever, forgotten when they are kept for seconds."""
    monkeypatch.setattr(commits, "REMEMBER_S", 0.0)  # else it takes 16 days
    clock = ManualClock(time.time())
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    harness.store.close()
    keyspace.keep(4)
    with keyspace.open(clock) as store:
        assert store.forget(PLAYER) > 0
    time.sleep(6.0)
    clock.advance(2 * SLACK_S)
    with keyspace.open(clock) as store:
        audit = store.audit()
        assert (list(audit.corrupt), audit.forgotten_chunks > 0) == ([], True)
    keyspace.keep(0)


def test_a_partition_whose_row_is_lost_is_damage(
    keyspace: Keyspace, rng: np.random.Generator
) -> None:
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    (lane,) = {row.partition for row in keyspace.rows("SELECT partition FROM commits")}
    keyspace.rows(f"DELETE FROM partitions WHERE partition = '{lane}' IF EXISTS")
    assert list(harness.store.audit().corrupt) == [
        f"the row of partition {lane}, which has commits up to 1, is missing"
    ]
    harness.store.close()


@pytest.mark.parametrize("ttl_s", [0, 86_400])
def test_commits_lost_before_their_ttl_are_damage(
    keyspace: Keyspace, rng: np.random.Generator, ttl_s: int
) -> None:
    keyspace.keep(ttl_s)
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng))
    harness.put(*random_session(SPEC, rng))
    assert list(harness.store.audit().corrupt) == []
    (lane,) = {row.partition for row in keyspace.rows("SELECT partition FROM commits")}
    gone = (
        f"DELETE FROM commits USING TIMESTAMP {1 << 62} WHERE partition = '{lane}' AND bucket = 0"
    )
    keyspace.rows(f"{gone} AND commit_no = 1")
    assert [one.split(" of ")[0] for one in harness.store.audit().corrupt] == (
        ["4 arrivals before commit 2"] if not ttl_s else []
    ), "with a time to live, the first ones may be gone"
    keyspace.rows(f"{gone} AND commit_no = 2")
    assert "commits 1 to 2 of" in harness.store.audit().corrupt[0]
    harness.store.close()
    keyspace.keep(0)


def test_a_damaged_or_lost_frame_is_detected(keyspace: Keyspace, rng: np.random.Generator) -> None:
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    chunks = random_session(SPEC, rng)
    harness.put(*chunks)
    session = chunks[0].meta.session
    there = f"session = {session} AND bucket = 0 AND chunk_no ="
    keyspace.rows(f"DELETE FROM chunks WHERE {there} 1")
    (row,) = keyspace.rows(f"SELECT digest FROM chunks WHERE {there} 2")
    keyspace.rows(
        f"UPDATE chunks SET frame = 0x00ff WHERE {there} 2 AND digest = 0x{row.digest.hex()}"
    )
    gone = [item for item in harness.everything() if isinstance(item, Forgotten)]
    assert [(item.reason, item.chunks) for item in gone] == [
        ("damaged", ((session, 1),)),
        ("damaged", ((session, 2),)),
    ]
    audit = harness.store.audit()
    assert (audit.chunks, len(audit.corrupt), audit.gap_chunks) == (2, 2, 2)
    harness.store.close()


def test_a_window_follows_a_cassandra_store(
    keyspace: Keyspace, rng: np.random.Generator, tmp_path: Path
) -> None:
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    mine = random_session(SPEC, rng, n_chunks=3)
    theirs = random_session(SPEC, rng, n_chunks=3)
    harness.put(*mine)
    harness.put(*theirs, player=OTHER_PLAYER)
    for turn in range(2):
        with Window(harness.store, tmp_path / "window", specs=OneSpec(), clock=clock) as window:
            while window.step():
                pass
            if turn == 0:
                assert chunks_in(window.local) == [*mine, *theirs]
                harness.store.forget(PLAYER)
                harness.store.quarantine([(theirs[0].meta.session, 1)], reason="guard")
            else:
                assert chunks_in(window.local) == [theirs[0], theirs[2]]
                assert {one.player for one in window.local.sessions(SessionFilter())} == {
                    OTHER_PLAYER
                }
                assert window.items == 2, "two decisions, and nothing a second time"
    harness.store.close()


def across_partitions(keyspace: Keyspace, rng: np.random.Generator) -> tuple[list[str], int]:
    """A session that moves to another partition: fates on redelivery, and its counts."""
    clock = ManualClock()
    chunks = random_session(SPEC, rng, n_chunks=4)
    other = random_session(SPEC, rng, n_chunks=1)
    with keyspace.open(clock) as store:
        child = store.claim("child", owner="a", ttl_s=60.0).epoch
        parent = store.claim("parent", owner="a", ttl_s=60.0).epoch
        first, *stamped = [
            Candidate(chunk.frame().stamped(PLAYER, int(clock.now())), chunk)
            for chunk in (*other, *chunks)
        ]
        store.write(WriteBatch("child", child, Position("0"), [first]))
        store.write(WriteBatch("parent", parent, Position("1"), stamped[:2]))
        store.write(WriteBatch("child", child, Position("1"), stamped[2:]))
    with keyspace.open(clock) as store:
        child = store.claim("child", owner="a", ttl_s=60.0).epoch
        fates = list(store.write(WriteBatch("child", child, Position("2"), stamped)).fates)
        (info,) = [
            one for one in store.sessions(SessionFilter()) if one.session == chunks[0].meta.session
        ]
        return [str(fate) for fate in fates], info.n_chunks


def test_a_session_may_continue_in_another_partition(
    keyspace: Keyspace, rng: np.random.Generator
) -> None:
    assert across_partitions(keyspace, rng) == (["duplicate"] * 4, 4)


def test_control_versions_that_fall_lose_a_session(
    keyspace: Keyspace, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cassandra_store,
        "version_after",
        lambda before, now_us: before.version - 1 if before else now_us,
    )
    fates, _ = across_partitions(keyspace, rng)
    assert fates != ["duplicate"] * 4


def test_a_tail_of_many_partitions_shows_each_item_once_and_decisions_in_time(
    keyspace: Keyspace, rng: np.random.Generator
) -> None:
    clock = ManualClock()
    with keyspace.open(clock) as store:
        epochs = {
            name: store.claim(name, owner="a", ttl_s=60.0).epoch for name in ("one", "two", "three")
        }
        sent: list[Chunk] = []
        for turn in range(6):
            if turn == 3:
                store.forget(PLAYER)
                clock.advance(10.0)
            for name in ("two", "three", "one"):
                began_s = clock.now() if turn >= 3 else clock.now() - 5.0
                chunks = random_session(
                    SPEC, rng, session=new_session(began_s, rng.bytes(10)), n_chunks=2
                )
                frames = [chunk.frame().stamped(PLAYER, int(clock.now())) for chunk in chunks]
                candidates = [
                    Candidate(frame, chunk) for frame, chunk in zip(frames, chunks, strict=True)
                ]
                store.write(WriteBatch(name, epochs[name], Position(str(turn)), candidates))
                sent += chunks
            clock.advance(1.0)
        for page in (1, 5, 100):
            cursor: Cursor | None = None
            items: list[Stored | Forgotten] = []
            while found := (tail := store.tail(cursor, max_items=page, wait_s=0.0)).items:
                items += found
                cursor = tail.cursor
            assert [item.arrival_no for item in items] == list(range(1, 38))
            shown = [item.chunk for item in items if isinstance(item, Stored)]
            assert {chunk.meta.id for chunk in shown if chunk} == {
                chunk.meta.id for chunk in sent[18:]
            }
            (told,) = [
                item
                for item in items
                if isinstance(item, Forgotten) and item.player is not None and not item.chunks
            ]
            after = [item.arrival_no for item in items if isinstance(item, Stored)]
            assert told.arrival_no < min(after), "what was played since then comes behind"
            assert told.at_s > 0
