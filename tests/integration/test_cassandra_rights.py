"""The rights that docs/cassandra.md lists are sufficient, and none is unnecessary."""

import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.keyspaces import Keyspace, OneSpec, elsewhere
from understudy.core.errors import ConfigError
from understudy.core.location import parse_location
from understudy.ports import SessionFilter
from understudy.stores.cassandra import init, migrate, open_cassandra
from understudy.testing.clock import ManualClock
from understudy.testing.samples import PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness

IS_QUICK = True

As = Callable[..., str]


@pytest.fixture
def allowed(keyspace: Keyspace, tmp_path: Path) -> As:
    """The address of a keyspace, for a role that has these rights and no others."""

    def allowed(name: str, *rights: str) -> str:
        role = f"somebody_{uuid.uuid4().hex}"  # the server keeps what a role may do for a while
        keyspace.run(f"CREATE ROLE {role} WITH LOGIN = true AND PASSWORD = 'sesame'")
        for right in rights:
            keyspace.run(f"GRANT {right} TO {role}")
        file = tmp_path / f"{role}.toml"
        file.write_text(f'username = "{role}"\npassword = "sesame"\n')
        return elsewhere(f"{keyspace.place}?credentials={file}&replication=1", name)

    return allowed


def refused(call: Callable[[], object], right: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"user lacks permission: User somebody_[0-9a-f]+ has no {right} permission",
    ) as it:
        call()
    assert "\n" not in str(it.value)
    assert "; grant it, or use other credentials" in str(it.value)


def use(url: str) -> None:
    """Whatever a process does that writes, reads and erases."""
    clock = ManualClock()
    store = open_cassandra(parse_location(url), specs=OneSpec(), clock=clock)
    harness = StoreHarness(store, clock, lambda one: one)
    try:
        (first, *_) = chunks = random_session(SPEC, np.random.default_rng(7))
        assert set(harness.put(*chunks)) == {"new"}
        store.quarantine([(first.meta.session, 1)], reason="guard")
        store.forget(PLAYER)
        store.expire(clock.now())
        read(url)
    finally:
        store.close()


def read(url: str) -> None:
    """Whatever a process does that only reads."""
    with open_cassandra(parse_location(url), specs=OneSpec()) as store:
        store.tail(None, max_items=100, wait_s=0.0)
        list(store.sessions(SessionFilter()))
        store.quarantined()
        assert store.audit().corrupt == ()


def test_a_new_keyspace_needs_create_on_all_keyspaces_and_its_creator_has_all_rights(
    keyspace: Keyspace, allowed: As
) -> None:
    keyspace.run("DROP KEYSPACE IF EXISTS rights")
    url = allowed("rights")
    refused(lambda: init(parse_location(url)), "CREATE")
    try:
        url = allowed("rights", "CREATE ON ALL KEYSPACES")
        init(parse_location(url))
        use(url)
        assert migrate(parse_location(url)) == 0
    finally:
        keyspace.run("DROP KEYSPACE IF EXISTS rights")


def test_an_existing_keyspace_needs_create_within_it(keyspace: Keyspace, allowed: As) -> None:
    keyspace.run("DROP KEYSPACE IF EXISTS rights")
    keyspace.run(
        "CREATE KEYSPACE rights WITH replication = {'class': 'SimpleStrategy', "
        "'replication_factor': 1}"
    )
    try:
        url = allowed("rights")
        refused(lambda: init(parse_location(url)), "CREATE")
        url = allowed("rights", "CREATE ON KEYSPACE rights")
        init(parse_location(url))
        use(url)
    finally:
        keyspace.run("DROP KEYSPACE IF EXISTS rights")


def test_migrate_needs_select_modify_and_alter(keyspace: Keyspace, allowed: As) -> None:
    name = keyspace.location.path
    rights = [f"{right} ON KEYSPACE {name}" for right in ("SELECT", "ALTER", "MODIFY")]
    for count, missing in enumerate(("SELECT", "ALTER", "MODIFY")):
        url = allowed(name, *rights[:count])
        refused(lambda url=url: migrate(parse_location(url)), missing)  # type: ignore[misc]
    assert migrate(parse_location(allowed(name, *rights))) == 0


def test_reading_needs_select_and_everything_else_modify_too(
    keyspace: Keyspace, allowed: As
) -> None:
    name = keyspace.location.path
    url = allowed(name)
    refused(lambda: read(url), "SELECT")
    url = allowed(name, f"SELECT ON KEYSPACE {name}")
    init(parse_location(url))
    read(url)
    refused(lambda: use(url), "MODIFY")
    use(allowed(name, f"SELECT ON KEYSPACE {name}", f"MODIFY ON KEYSPACE {name}"))
