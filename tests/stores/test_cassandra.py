"""The Cassandra store without a server: addresses, cursors, commits and erasures."""

import socketserver
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cassandra.cluster import NoHostAvailable

from understudy.core.errors import ConfigError, Unreachable
from understudy.core.location import parse_location
from understudy.experience.frame import FrameKind
from understudy.experience.session import Arrival, SessionState, admit
from understudy.ports import Cursor, Forgotten, Stored
from understudy.stores.cassandra import open_cassandra, tailing
from understudy.stores.cassandra.commits import (
    ADMIN,
    Arrived,
    Commit,
    CommitFacts,
    Event,
    digest_of,
    frame_key,
    record_ttl_s,
)
from understudy.stores.cassandra.keyspace import (
    TABLES,
    Keyspace,
    check_columns,
    check_copies,
    columns_of,
    current_replication,
    settings,
)
from understudy.stores.cassandra.lookup import AdminJournal, CommittedState
from understudy.stores.cassandra.partitions import Lease, Partitions
from understudy.stores.cassandra.store import version_after
from understudy.stores.cassandra.tailing import (
    SLACK_S,
    TailCursor,
    Tailer,
    TailPosition,
    read_cursor,
)
from understudy.stores.cassandra.wire import Options, Wire, connection_error, read_options
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.samples import (
    OTHER_PLAYER,
    PLAYER,
    cart_spec,
    random_session,
    stamped,
)

SESSION = uuid.UUID(int=7)


def options_of(text: str) -> Options:
    return read_options(parse_location(text))


# --- addresses ------------------------------------------------------------------------------------


def test_an_address_has_hosts_keyspace_and_safe_defaults() -> None:
    options = options_of("cassandra://one:9043,two/Games")
    assert options.hosts == (("one", 9043), ("two", 9042))
    assert (options.keyspace, options.consistency, options.replication) == (
        "games",
        "LOCAL_QUORUM",
        3,
    )
    assert (options.tls, options.check_hostname, options.ttl_s) == (False, True, None)


def test_host_names_are_checked_unless_disabled() -> None:
    assert options_of("cassandra://h/k?tls=true").check_hostname
    assert not options_of("cassandra://h/k?tls=true&check_hostname=false").check_hostname


def test_options_of_an_address_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text('username = "ada"\npassword = "secret"\n')
    options = options_of(
        f"cassandra://h/k?credentials={file}&datacenter=dc1&consistency=quorum&ttl_s=86400&replication=dc1:3,dc2:2"
        "&in_flight=8&tls=true"
    )
    assert options.credentials is not None
    assert (options.credentials.username, options.datacenter, options.consistency) == (
        "ada",
        "dc1",
        "QUORUM",
    )
    assert (options.ttl_s, options.replication, options.in_flight) == (
        86400,
        {"dc1": 3, "dc2": 2},
        8,
    )
    assert options.tls
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("cassandra:///k", "has no host"),
        ("cassandra://h/", "'' is not a valid keyspace name"),
        ("cassandra://h/a-b", "'a-b' is not a valid keyspace name"),
        ("cassandra://h/spielé", "'spielé' is not a valid keyspace name"),
        (f"cassandra://h/{'a' * 49}", f"'{'a' * 49}' is not a valid keyspace name"),
        (f"cassandra://h/{'a' * 4900}", f"'{'a' * 80}' is not a valid keyspace name"),
        (
            "cassandra://h/system",
            "keyspace system is a system keyspace of Cassandra; use another name",
        ),
        ("cassandra://h/System_Auth", "keyspace System_Auth is a system keyspace of Cassandra"),
        ("cassandra://h:0/k", "port 0 of h:0 is not valid"),
        ("cassandra://h:99999/k", "'h:99999' is not a host"),
        ("cassandra://h/k?key=FILE", "has a key but no certificate"),
        ("cassandra://h/k?consistency=most", "consistency 'MOST' is unknown"),
        ("cassandra://h/k?replication=0", "replication '0' is not valid"),
        ("cassandra://h/k?replication=dc1", "replication 'dc1' is not valid"),
        ("cassandra://h/k?replication=²", "replication '²' is not valid"),
        ("cassandra://h/k?replication=99999999999", "replication '99999999999' is not valid"),
        ("cassandra://h/k?replication=dc1:1,dc1:2", "has a datacenter twice"),
        (
            "cassandra://h/k?ttl_s=-1",
            "ttl_s of cassandra:// is '-1'; give a whole number from 0 to 630000000, such as",
        ),
        ("cassandra://h/k?ttl_s=1.5", "ttl_s of cassandra:// is '1.5'; give a whole number"),
        ("cassandra://h/k?retry_s=nan", "retry_s of cassandra:// is 'nan'"),
        ("cassandra://h/k?ttl=5", "did you mean ttl_s"),
        ("cassandra://h/k?in_flight=0", "in_flight of cassandra:// is '0'"),
        ("cassandra://h/k?protocol=3", "protocol of cassandra:// is '3'"),
    ],
)
def test_an_invalid_address_is_rejected_in_one_line(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        options_of(address)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


class _NoSpecs:
    def spec(self, game: str, schema: str) -> None:
        return None

    def has_game(self, game: str) -> bool:
        return False


def test_a_refused_connection_is_reported_in_one_line() -> None:
    with pytest.raises(Unreachable, match="cannot connect to Cassandra") as caught:
        open_cassandra(parse_location("cassandra://127.0.0.1:1/k?retry_s=0"), specs=_NoSpecs())
    assert "\n" not in str(caught.value)
    assert caught.value.retry_helps


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_port_of_another_service_is_unreachable(answer: bytes) -> None:
    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(64)
            self.request.sendall(answer)
            self.request.recv(64)  # until the other side gives up

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"cassandra://127.0.0.1:{server.server_address[1]}/k?retry_s=0&timeout_s=0.2"
        try:
            with pytest.raises(
                Unreachable,
                match="check host and port, that the server is running, and the options tls",
            ) as caught:
                open_cassandra(parse_location(address), specs=_NoSpecs())
        finally:
            server.shutdown()
    assert "\n" not in str(caught.value)


def test_an_unknown_host_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="check host and port"):
        open_cassandra(parse_location("cassandra://nowhere.invalid/k?retry_s=0"), specs=_NoSpecs())


def test_a_driver_error_without_reasons_is_reported_in_one_line() -> None:
    options = options_of("cassandra://h/k?datacenter=moon")
    error = NoHostAvailable("Unable to connect to any servers", ["h"])
    assert "cannot connect to Cassandra at h:9042 (NoHostAvailable" in str(
        connection_error(error, options, {})
    )
    told = connection_error(error, options, {"dc1": 2, "dc2": 1})
    assert (
        str(told)
        == "this cluster has no datacenter 'moon', its nodes are 2 in dc1, 1 in dc2; use one of "
        "those datacenters"
    )
    assert isinstance(told, ConfigError)


def test_columns_of_a_definition_are_parsed() -> None:
    assert columns_of(TABLES["meta"]) == {"name": "text", "number": "bigint", "value": "text"}
    assert columns_of(TABLES["players"]) == {"player": "blob", "session": "uuid"}
    assert columns_of(TABLES["sessions"])["version"] == "bigint"
    for name, definition in TABLES.items():
        here = Keyspace({}, {name: columns_of(definition)})
        check_columns(here, "games", name, definition)


def test_equal_replications_match_in_any_notation() -> None:
    one = {"dc1": 3}
    two = {"dc1": 3, "dc2": 3}
    simple = Keyspace(
        {"class": "org.apache.cassandra.locator.SimpleStrategy", "replication_factor": "3"}, {}
    )
    named = Keyspace({"class": "NetworkTopologyStrategy", "dc1": "3"}, {})
    odd = Keyspace({"class": "LocalStrategy"}, {})
    assert (
        current_replication(simple, one),
        current_replication(named, one),
        current_replication(odd, one),
    ) == ({"dc1": 3}, {"dc1": 3}, None)
    assert (current_replication(simple, two), current_replication(named, two)) == (
        {"": 3},
        {"dc1": 3},
    )
    for keyspace, address in (
        (simple, "replication=3"),
        (named, "replication=3"),
        (simple, "replication=dc1:3"),
    ):
        check_copies(keyspace, options_of(f"cassandra://h/k?{address}"), one)
    check_copies(named, options_of("cassandra://h/k?datacenter=dc1"), two)
    with pytest.raises(
        ConfigError, match="has replication=3, but the address has replication=dc1:3,dc2:3"
    ):
        check_copies(simple, options_of("cassandra://h/k?replication=dc1:3,dc2:3"), two)
    with pytest.raises(
        ConfigError, match=r"has {'class': 'LocalStrategy'}, but the address has replication=dc1:3"
    ):
        check_copies(odd, options_of("cassandra://h/k"), one)


def test_an_unreadable_ca_file_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot read a TLS file of cassandra://"):
        open_cassandra(
            parse_location("cassandra://127.0.0.1:1/k?ca=/nowhere.pem&retry_s=0"),
            specs=_NoSpecs(),
        )


def test_chunks_with_a_time_to_live_are_compacted_in_windows_of_a_thirtieth() -> None:
    assert "'compaction_window_size': '48'" in settings("chunks", 86_400)
    assert record_ttl_s(86_400) > 86_400, (
        "that a chunk was there is known for longer than its bytes"
    )
    assert record_ttl_s(0) == 0
    for name in TABLES:
        assert "UnifiedCompactionStrategy" in settings(name, 0)
        assert name == "chunks" or settings(name, 86_400) == settings(name, 0)


# --- cursors, keys, versions ------------------------------------------------------------------


def test_a_cursor_survives_a_round_trip() -> None:
    places = TailCursor(12, {"p": TailPosition(3, 1, 9), ADMIN: TailPosition(1, 0, 1)})
    assert read_cursor(places.text()) == places
    assert read_cursor(None) == TailCursor()


@pytest.mark.parametrize("text", ["17", "", "[1]", '{"a": 1}', '[1,{"p":[1]},2]', '[1,{"p":"x"}]'])
def test_a_cursor_of_another_store_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="not a cursor of a Cassandra store"):
        read_cursor(Cursor(text))


def arrived(number: int = 0, **more: Any) -> Arrived:
    fields: dict[str, Any] = {
        "session": SESSION.bytes,
        "chunk_no": number,
        "kind": int(FrameKind.DATA),
        "crc": 5,
        "length": 9,
        "player": PLAYER,
        "received_s": int(START_S),
        "first_step": 6 * number,
        "n_steps": 6,
        "game": "cart",
        "schema": "s",
        "digest": bytes(16),
    }
    return Arrived(**(fields | more))


def commit(number: int, facts: CommitFacts, *, keep_s: int = 0) -> Commit:
    return Commit(
        partition=ADMIN,
        number=number,
        events=number,
        at_s=START_S,
        keep_s=keep_s,
        before=0,
        facts=facts,
    )


def test_a_commit_counts_its_arrivals() -> None:
    facts = CommitFacts(
        [arrived(dropped=[(1, 2)])],
        [],
        [(b"s", b"p")],
        Event("quarantine", 1.5, b"", [(b"s", 1, 6)]),
    )
    assert facts.n_arrivals == 2


def test_equal_bytes_have_equal_keys_and_other_bytes_other_keys() -> None:
    one, other = (frame_key(SESSION.bytes, 130, digest_of(raw)) for raw in (b"one", b"other"))
    assert one == frame_key(SESSION.bytes, 130, digest_of(b"one"))
    assert one[:3] == other[:3] == (SESSION, 2, 130)
    assert one != other
    nameless = [frame_key(bytes(16), 0, digest_of(raw)) for raw in (b"one", b"other")]
    assert nameless[0][1] != nameless[1][1], "they do not grow one Cassandra partition"


def test_attempts_are_between_their_epoch_and_the_next() -> None:
    lease = Lease("p", 1 << 32, 60.0, 0, 0, 0)
    assert [lease.next_attempt(), lease.next_attempt()] == [(1 << 32) + 1, (1 << 32) + 2]


def test_a_new_version_beats_an_expired_state() -> None:
    before = CommittedState("cart", SessionState(player=PLAYER), 0, 900)
    assert (version_after(None, 500), version_after(before, 500), version_after(before, 1000)) == (
        500,
        901,
        1000,
    )


# --- what ran out by itself ---------------------------------------------------------------------


def tailer(clock: ManualClock, *, has_ttl: bool) -> Tailer:
    wire: Any = _NoWire()
    return Tailer(
        wire=wire,
        partitions=Partitions(wire, clock),
        journal=AdminJournal(wire),
        clock=clock,
        has_ttl=has_ttl,
    )


@pytest.mark.parametrize("bound", ["TAIL_BYTES", "_READ_BYTES"])
def test_a_page_of_large_chunks_ends_early_and_the_next_one_continues(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = random_session(cart_spec(), np.random.default_rng(3), n_chunks=12)
    frames = list(stamped(chunks))
    arrivals = [
        arrived(
            frame.chunk_no,
            session=frame.session.bytes,
            length=len(frame.body),
            digest=digest_of(frame.encode()),
        )
        for frame in frames
    ]
    commits = [
        Commit(
            partition="p",
            number=at // 3 + 1,
            events=0,
            at_s=START_S + at,
            keep_s=0,
            before=at,
            facts=CommitFacts(arrivals[at : at + 3]),
        )
        for at in range(0, 12, 3)
    ]

    def fill(_: Tailer, sources: Any, places: TailCursor) -> None:
        for name, source in sources.items():
            at = places.at.get(name, TailPosition()).commit_no
            source.commits = source.commits or [one for one in commits if one.number > at]

    keys = [one.frame_key for one in arrivals]
    monkeypatch.setattr(Tailer, "heads", lambda _: {"p": 4})
    monkeypatch.setattr(Tailer, "_fill", fill)
    monkeypatch.setattr(Tailer, "frames", lambda *_: dict(zip(keys, frames, strict=True)))
    reader = tailer(ManualClock(), has_ttl=False)
    whole = reader.tail(None, max_items=100, wait_s=0.0)
    assert ([item.arrival_no for item in whole.items], whole.is_cut) == ([*range(1, 13)], False)
    monkeypatch.setattr(tailing, bound, 1200)
    items: list[Stored | Forgotten] = []
    cursor = None
    while (page := reader.tail(cursor, max_items=100, wait_s=0.0)).items:
        cursor = page.cursor
        items += page.items
        assert len(page.items) < 9
        assert page.is_cut or len(items) == 12
    assert items == whole.items


def test_each_commit_has_its_own_time_to_live() -> None:
    clock = ManualClock()
    reader = tailer(clock, has_ttl=True)
    brief = commit(1, CommitFacts(), keep_s=4)
    long = commit(2, CommitFacts())
    clock.advance(2 * SLACK_S)
    assert (reader.lost(brief), reader.lost(long)) == ("expired", "damaged")


def test_missing_commits_are_damage_only_when_they_cannot_have_expired() -> None:
    clock = ManualClock()
    assert not tailer(clock, has_ttl=False).may_have_expired(None)
    reader = tailer(clock, has_ttl=True)
    assert reader.may_have_expired(None), "the first ones may be gone"
    day = commit(1, CommitFacts(), keep_s=86_400)
    assert not reader.may_have_expired(day), "what came behind lasts longer"
    clock.advance(record_ttl_s(86_400))
    assert reader.may_have_expired(day)
    assert reader.may_have_expired(commit(2, CommitFacts())), "a later one may have been brief"


# --- the journal ----------------------------------------------------------------------------------


class _NoWire:
    """Nothing is read."""


def journal(*commits: CommitFacts) -> AdminJournal:
    made = AdminJournal(_NoWire())  # type: ignore[arg-type]
    for number, facts in enumerate(commits, 1):
        made.apply(commit(number, facts))
        made.head = number
    return made


def test_frames_before_an_erasure_are_gone_and_later_ones_are_not() -> None:
    forget = CommitFacts(event=Event("forget", START_S, PLAYER))
    withdraw = CommitFacts(event=Event("quarantine", START_S, b"", [(SESSION.bytes, 1, 6)]))
    known = journal(forget, withdraw)
    other = arrived(1, player=OTHER_PLAYER)
    assert known.arrival_removal_reason(arrived(), 0) == "forgotten"
    assert known.arrival_removal_reason(arrived(), 1) is None
    assert (known.arrival_removal_reason(other, 1), known.arrival_removal_reason(other, 2)) == (
        "quarantined",
        None,
    )
    known.expired_before_s = int(START_S) + 1
    assert known.arrival_removal_reason(other, 2) == "expired"
    assert known.arrival_removal_reason(arrived(kind=int(FrameKind.CLOSE)), 1) is None, (
        "only data ages"
    )


def test_a_session_state_includes_later_admin_commits() -> None:
    state, _ = admit(None, arrived(0).arrival())
    state, _ = admit(state, arrived(1).arrival())
    state, _ = admit(
        state, Arrival(number=2, player=PLAYER, received_s=int(START_S), kind="refused")
    )
    withdraw = CommitFacts(event=Event("quarantine", START_S, b"", [(SESSION.bytes, 1, 6)]))
    replay = CommitFacts([arrived(2, replays=77)])
    known = journal(withdraw, replay)
    assert known.replayed == {77}
    fresh = known.up_to_date(SESSION, CommittedState("cart", state, 0, 1))
    assert fresh is not None
    assert (fresh.state.n_chunks, fresh.state.n_steps, fresh.state.high, fresh.events) == (
        2,
        12,
        3,
        2,
    )
    again = known.up_to_date(SESSION, fresh)
    assert again == fresh, "each decision is taken in once"
    assert known.up_to_date(SESSION, None) is None


def test_a_forgotten_players_sessions_are_forgotten_and_new_ones_are_not() -> None:
    known = journal(CommitFacts(event=Event("forget", START_S, PLAYER)))
    old, new = (
        known.up_to_date(SESSION, CommittedState("", SessionState(player=PLAYER), events, 1))
        for events in (0, 1)
    )
    assert old is not None
    assert new is not None
    assert (old.state.forgotten, new.state.forgotten) == (True, False)
    assert known.is_forgotten(PLAYER, SESSION, START_S)
    assert not known.is_forgotten(OTHER_PLAYER, SESSION, START_S)


def test_a_posted_request_raises_nothing_without_a_host() -> None:
    def send(statement: Any, done: Any) -> None:
        raise NoHostAvailable("no host", {})

    wire = Wire.__new__(Wire)
    wire._slots = threading.BoundedSemaphore(1)
    wire.send = send
    wire.post("INSERT")
    assert wire._slots.acquire(blocking=False)


def test_every_table_is_qualified_with_the_keyspace() -> None:
    class Somewhere:
        options = options_of("cassandra://h/games")

    def qualified(cql: str) -> str:
        return Wire.qualified(Somewhere(), cql)  # type: ignore[arg-type]

    assert (
        qualified("SELECT a FROM partitions WHERE b = ?")
        == 'SELECT a FROM "games".partitions WHERE b = ?'
    )
    assert (
        qualified("INSERT INTO chunks (a) VALUES (?)")
        == 'INSERT INTO "games".chunks (a) VALUES (?)'
    )
    assert qualified("UPDATE partitions SET a = ?") == 'UPDATE "games".partitions SET a = ?'
    assert (
        qualified("DELETE raw FROM quarantine USING TIMESTAMP ?")
        == 'DELETE raw FROM "games".quarantine USING TIMESTAMP ?'
    )
    assert (
        qualified("CREATE TABLE IF NOT EXISTS meta (a text)")
        == 'CREATE TABLE IF NOT EXISTS "games".meta (a text)'
    )
