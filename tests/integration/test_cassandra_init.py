"""`understudy store init` and `migrate` on keyspaces that were changed, or are not ours."""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.commands import four_at_once, started
from tests.integration.keyspaces import Keyspace, elsewhere
from tests.servers.withholding import withholding
from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError
from understudy.core.location import parse_location
from understudy.stores.cassandra import init, migrate
from understudy.stores.cassandra import keyspace as keyspaces
from understudy.stores.cassandra.keyspace import TABLES, VERSION
from understudy.testing.clock import ManualClock
from understudy.testing.samples import random_session
from understudy.testing.store_harness import SPEC, StoreHarness

IS_QUICK = True

ONE_COPY = "WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
WAIT_TIMEOUT_S = 120.0
"""Of the addresses here: what no waiting mends is told long before that."""


def told(
    call: Callable[[str], object],
    url: str,
    kind: type[UnderstudyError] = ConfigError,
    *,
    wanted: str = "",
) -> str:
    """The error of a rejected call: one line, immediately."""
    start_s = time.monotonic()
    with pytest.raises(kind) as caught:
        call(f"{url}&retry_s={WAIT_TIMEOUT_S}")
    assert time.monotonic() - start_s < WAIT_TIMEOUT_S / 2
    assert "\n" not in str(caught.value)
    assert wanted in str(caught.value)
    return str(caught.value)


def init_at(url: str) -> None:
    init(parse_location(url))


def migrate_at(url: str) -> object:
    return migrate(parse_location(url))


EVERY_WAY: tuple[Callable[[str], object], ...] = (init_at, migrate_at, Keyspace.open_at)


@pytest.fixture
def scratch(keyspace: Keyspace) -> Iterator[str]:
    """The name of a keyspace that is not there, and is gone afterwards."""
    keyspace.run("DROP KEYSPACE IF EXISTS scratch")
    yield "scratch"
    keyspace.run("DROP KEYSPACE IF EXISTS scratch")


def columns(keyspace: Keyspace, name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in keyspace.run(f"SELECT * FROM system_schema.columns WHERE keyspace_name = '{name}'"):
        found.setdefault(row.table_name, set()).add(row.column_name)
    return found


# --- asked for something else than is there -------------------------------------------------------


def test_init_of_a_complete_store_needs_only_its_name(keyspace: Keyspace) -> None:
    init_at(keyspace.url.replace("&replication=1", ""))
    init_at(keyspace.url.replace("&replication=1", "&replication=datacenter1:1&ttl_s=0"))
    init_at(keyspace.url + "&datacenter=datacenter1")


def test_init_reports_the_existing_replication_if_another_one_is_requested(
    keyspace: Keyspace, scratch: str
) -> None:
    said = told(init_at, keyspace.url.replace("replication=1", "replication=3"))
    assert "has replication=datacenter1:1, but the address has replication=datacenter1:3" in said
    assert "omit replication, use another keyspace, or use ALTER KEYSPACE" in said
    keyspace.run(f"CREATE KEYSPACE {scratch} {ONE_COPY.replace('1', '2')}")
    said = told(init_at, elsewhere(keyspace.url, scratch))
    assert "has replication=datacenter1:2, but the address has replication=datacenter1:1" in said


def test_init_reports_the_existing_ttl_if_another_one_is_requested(
    keyspace: Keyspace,
) -> None:
    said = told(init_at, keyspace.url + "&ttl_s=86400")
    assert "has ttl_s=0, but the address has ttl_s=86400" in said
    assert "run `understudy store migrate` with this address, or omit ttl_s" in said
    with started("store", "migrate", keyspace.url + "&ttl_s=86400") as process:
        said, _ = process.communicate(timeout=120)
    try:
        assert said.endswith(" keeps new chunks for 86400 s\n")
        init_at(keyspace.url + "&ttl_s=86400")
        init_at(keyspace.url)
    finally:
        migrate_at(keyspace.url + "&ttl_s=0")


def test_a_replication_above_the_cluster_size_is_reported_immediately(
    keyspace: Keyspace, scratch: str
) -> None:
    keyspace.run(f"CREATE KEYSPACE {scratch} {ONE_COPY.replace('1', '3')}")
    url = elsewhere(keyspace.url, scratch).replace("&replication=1", "")
    assert (
        "replication=3 needs at least 2 nodes, but this cluster has 1; add nodes, use ALTER "
        "KEYSPACE" in told(init_at, url)
    )
    assert columns(keyspace, scratch) == {}


def test_the_default_replication_on_one_node_is_reported_with_the_next_step(
    keyspace: Keyspace, scratch: str
) -> None:
    url = elsewhere(keyspace.url, scratch).replace("&replication=1", "")
    assert "this cluster has 1; add nodes, or use &replication=1" in told(init_at, url)


def test_an_unknown_datacenter_is_reported_with_the_known_ones(keyspace: Keyspace) -> None:
    for call in EVERY_WAY:
        said = told(call, keyspace.url + "&datacenter=nowhere")
        assert "no datacenter 'nowhere', its nodes are 1 in datacenter1; use one of those" in said


def test_a_keyspace_may_have_the_name_of_a_cql_keyword(keyspace: Keyspace) -> None:
    try:
        init_at(elsewhere(keyspace.url, "select"))
        Keyspace.open_at(elsewhere(keyspace.url, "select")).close()
    finally:
        keyspace.run('DROP KEYSPACE IF EXISTS "select"')


def test_the_url_in_docs_servers_works_unchanged(keyspace: Keyspace, scratch: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "servers.md"
    (address,) = re.findall(r"understudy store init '(.*)'", page.read_text())
    assert "/games?credentials=servers/cassandra/credentials&" in address
    place = keyspace.location.hosts[0]
    credentials = keyspace.location.options["credentials"]
    address = address.replace("127.0.0.1:PORT/games", f"{place[0]}:{place[1]}/{scratch}")
    init_at(address.replace("servers/cassandra/credentials", credentials))


# --- not ours, or not whole -----------------------------------------------------------------------


@pytest.mark.parametrize("table", ["meta", "sessions", "partitions"])
def test_a_foreign_keyspace_is_reported_and_left_unchanged(
    keyspace: Keyspace, scratch: str, table: str
) -> None:
    keyspace.run(f"CREATE KEYSPACE {scratch} {ONE_COPY}")
    keyspace.run(f"CREATE TABLE {scratch}.{table} (key int PRIMARY KEY, number text)")
    for call in EVERY_WAY:
        told(
            call,
            elsewhere(keyspace.url, scratch),
            wanted=f"keyspace {scratch} has a table {table} that does not belong to an understudy ",
        )
    assert columns(keyspace, scratch) == {table: {"key", "number"}}


def test_foreign_tables_in_the_keyspace_are_left_unchanged(
    keyspace: Keyspace, scratch: str
) -> None:
    keyspace.run(f"CREATE KEYSPACE {scratch} {ONE_COPY}")
    keyspace.run(f"CREATE TABLE {scratch}.specs (key int PRIMARY KEY)")
    init_at(elsewhere(keyspace.url, scratch))
    assert migrate_at(elsewhere(keyspace.url, scratch)) == 0
    assert columns(keyspace, scratch).keys() == {"specs", *TABLES}


def test_tables_of_a_newer_release_may_have_any_columns(keyspace: Keyspace, scratch: str) -> None:
    url = elsewhere(keyspace.url, scratch)
    init_at(url)
    keyspace.run(f"ALTER TABLE {scratch}.partitions DROP owner")
    keyspace.run(f"DROP TABLE {scratch}.players")
    keyspace.run(f"UPDATE {scratch}.meta SET number = 99 WHERE name = 'schema_version'")
    for call in EVERY_WAY:
        told(
            call,
            url,
            StorageFailed,
            wanted=f"of version 99, newer than this release's {VERSION}; install the release",
        )


def test_a_store_with_lost_tables_is_reported_and_not_recreated(
    keyspace: Keyspace, scratch: str
) -> None:
    url = elsewhere(keyspace.url, scratch)
    init_at(url)
    with Keyspace.open_at(url) as store:
        store.claim("one", owner="a", ttl_s=60.0)
    losses = [
        (
            "DELETE FROM scratch.meta WHERE name = 'quarantine_id' IF EXISTS",
            "row quarantine_id of table meta",
        ),
        (
            "UPDATE scratch.meta SET number = null WHERE name = 'schema_version'",
            "row schema_version of table meta",
        ),
        ("DROP TABLE scratch.chunks", "table chunks"),
        ("DROP TABLE scratch.meta", "table meta"),
    ]
    for cql, lost in losses:
        keyspace.run(cql)
        for call in EVERY_WAY:
            told(
                call,
                url,
                StorageFailed,
                wanted=f"keyspace {scratch} has lost its {lost}; restore it from a backup",
            )


def test_an_interrupted_init_resumes_with_the_current_options(
    keyspace: Keyspace, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = elsewhere(keyspace.url, scratch)
    half = dict(list(TABLES.items())[:5])
    with monkeypatch.context() as patch:
        patch.setattr(keyspaces, "TABLES", half)
        init_at(url)
    keyspace.run(f"DELETE FROM {scratch}.meta WHERE name = 'schema_version'")
    told(
        Keyspace.open_at,
        url,
        wanted="does not contain a complete store; run `understudy store init",
    )
    init_at(url + "&ttl_s=3600")
    found = keyspace.run(f"SELECT * FROM system_schema.tables WHERE keyspace_name = '{scratch}'")
    compaction = {row.table_name: row.compaction["class"].rpartition(".")[2] for row in found}
    assert compaction == dict.fromkeys(TABLES, "UnifiedCompactionStrategy") | {
        "chunks": "TimeWindowCompactionStrategy"
    }
    assert keyspace.run(f"SELECT number FROM {scratch}.meta WHERE name = 'ttl_s'")[0].number == 3600
    Keyspace.open_at(url).close()


# --- at the same time, and cut off ----------------------------------------------------------------


def test_four_concurrent_inits_create_one_store(keyspace: Keyspace, scratch: str) -> None:
    url = elsewhere(keyspace.url, scratch)
    for code, said in four_at_once("store", "init", url):
        assert (code, said.count("\n")) == (0, 1), said
        assert "is ready" in said
    Keyspace.open_at(url).close()
    assert len(keyspace.run(f"SELECT * FROM {scratch}.meta WHERE name = 'id'")) == 1


def test_ctrl_c_ends_an_init_and_the_next_one_resumes_it(keyspace: Keyspace, scratch: str) -> None:
    url = elsewhere(keyspace.url, scratch)
    (name, port) = keyspace.location.hosts[0]
    there = keyspace.place.rpartition("/")[0]
    words = f'CREATE TABLE IF NOT EXISTS "{scratch}".chunks '
    with (
        withholding((name, port or 9042), words.encode()) as server,
        started("store", "init", url.replace(there, f"cassandra://{server.address}")) as process,
    ):
        assert server.is_heard.wait(WAIT_TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=WAIT_TIMEOUT_S)
    assert (process.returncode, said.strip()) == (130, "interrupted")
    assert 0 < len(columns(keyspace, scratch)) < len(TABLES)
    init_at(url)
    Keyspace.open_at(url).close()


def test_a_migration_during_writes_loses_nothing(keyspace: Keyspace) -> None:
    clock = ManualClock()
    rng = np.random.default_rng(7)
    written = 0
    harness = StoreHarness(keyspace.open(clock), clock, lambda _: keyspace.open(clock))

    def turn() -> None:
        for ttl_s in (86_400, 0):
            migrate_at(f"{keyspace.url}&ttl_s={ttl_s}")

    migration = threading.Thread(target=turn)
    migration.start()
    while migration.is_alive():
        written += len(harness.put(*random_session(SPEC, rng)))
    migration.join()
    assert len(harness.chunks()) == written
    found = harness.store.audit()
    assert (found.chunks, found.duplicate_chunks, found.gap_chunks, found.corrupt) == (
        written,
        0,
        0,
        (),
    )
    harness.store.close()
