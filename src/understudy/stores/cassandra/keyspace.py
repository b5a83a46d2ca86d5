"""The keyspace of a store: its tables, how they are created, and whether they match the address.

meta        facts of the whole store; its row `quarantine_id` changes only by compare-and-set
partitions  per stream partition, its owner and last commit; changes only by compare-and-set
registry    numbers that only increase, by kind and name, such as how far a partition is readable
commits     one row per commit of a partition: the frames that arrived with it
chunks      the bytes of frames, stored or quarantined, by their hash
sessions    the state of a session, and a row per stored or quarantined chunk number
players     the sessions of each player
quarantine  refused, parked and withdrawn frames, without their bytes
"""

import json
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import Location
from understudy.stores.cassandra.wire import (
    REFUSED,
    Options,
    Wire,
    read_options,
    unknown_datacenter_error,
)

VERSION = 1
"""The version of the tables."""

TABLES = {
    "meta": "name text PRIMARY KEY, number bigint, value text",
    "partitions": (
        "partition text PRIMARY KEY, epoch bigint, lease text, owner text, expires_s double, "
        "position text, commit_no bigint, at_s double, keep_s bigint, arrivals bigint, "
        "events bigint"
    ),
    "registry": "kind text, name text, number bigint, PRIMARY KEY ((kind), name)",
    "commits": (
        "partition text, bucket bigint, commit_no bigint, events bigint, at_s double, "
        "keep_s bigint, before bigint, facts blob, states blob, "
        "PRIMARY KEY ((partition, bucket), commit_no)"
    ),
    "chunks": (
        "session uuid, bucket bigint, chunk_no bigint, digest blob, frame blob, "
        "PRIMARY KEY ((session, bucket), chunk_no, digest)"
    ),
    "sessions": (
        "session uuid, chunk_no bigint, what tinyint, crc bigint, quarantine_id bigint, "
        "digest blob, length int, kind tinyint, n_steps bigint, received_s bigint, "
        "events bigint, game text static, state blob static, state_events bigint static, "
        "version bigint static, PRIMARY KEY ((session), chunk_no, what, crc, quarantine_id)"
    ),
    "players": "player blob, session uuid, PRIMARY KEY ((player), session)",
    "quarantine": (
        "bucket bigint, id bigint, reason text, detail text, parked boolean, received_s double, "
        "game text, session blob, chunk_no bigint, crc bigint, player blob, digest blob, "
        "events bigint, PRIMARY KEY ((bucket), id)"
    ),
}
_SETTLE_S = (0.1, 0.2, 0.4, 0.8, 0.0)
Copies = Mapping[str, int]
"""Replication factor by datacenter; the name '' stands for all datacenters together."""


@dataclass(frozen=True, slots=True)
class Keyspace:
    """A keyspace as the server describes it; every Cassandra role may read this."""

    replication: Mapping[str, str]
    columns: Mapping[str, Mapping[str, str]]
    """The type of each column, by table and column."""


def read_keyspace(wire: Wire) -> Keyspace | None:
    """The keyspace of an address; None when it does not exist."""
    name = wire.options.keyspace
    row = wire.one(
        wire.bind("SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = ?", name)
    )
    if row is None:
        return None
    columns: dict[str, dict[str, str]] = defaultdict(dict)
    cql = "SELECT table_name, column_name, type FROM system_schema.columns WHERE keyspace_name = ?"
    for column in wire.scan(wire.bind(cql, name)):
        columns[column.table_name][column.column_name] = column.type
    return Keyspace(dict(row.replication), dict(columns))


# --- creating and changing ----------------------------------------------------------------------


def init(location: Location) -> None:
    """Create a missing keyspace and missing tables; existing ones are not changed.

    ConfigError when an existing keyspace does not match the address.
    """
    options = read_options(location)
    with Wire(options) as wire:
        keyspace = read_keyspace(wire)
        nodes = wire.nodes()
        if keyspace is None:
            check_nodes(requested_copies(options, nodes), nodes, fix="add nodes, or use ")
            wire.define(
                f'CREATE KEYSPACE IF NOT EXISTS "{options.keyspace}" WITH replication = '
                f"{replication(options)}"
            )
            _create(wire, Keyspace({}, {}))
            return
        if "replication" in location.options:
            check_copies(keyspace, options, nodes)
        datacenter = options.datacenter or _only(nodes)
        copies = (
            {datacenter: (current_replication(keyspace, nodes) or {}).get(datacenter, 0)}
            if datacenter
            else {}
        )
        check_nodes(
            copies, nodes, fix="add nodes, use ALTER KEYSPACE, or choose another keyspace and "
        )
        if _version(wire, keyspace) is None:
            _create(wire, keyspace)
        elif options.ttl_s not in (None, ttl_s := read_meta(wire)["ttl_s"]):
            raise ConfigError(
                f"keyspace {options.keyspace} has ttl_s={ttl_s}, but the address has "
                f"ttl_s={options.ttl_s}, and init does not change it; run `understudy store "
                "migrate` with this address, or omit ttl_s"
            )


def _create(wire: Wire, keyspace: Keyspace) -> None:
    """Create the missing parts of a new or incomplete store; its version is written last."""
    keep_s = wire.options.ttl_s or 0
    for name, columns in TABLES.items():
        wire.define(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITH {settings(name, keep_s)}")
    if "chunks" in keyspace.columns:
        # An earlier init may have had another ttl_s.
        wire.define(f"ALTER TABLE chunks WITH {settings('chunks', keep_s)}")
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('quarantine_id', 1) IF NOT EXISTS"))
    wire.one(
        wire.bind("INSERT INTO meta (name, value) VALUES ('id', ?) IF NOT EXISTS", uuid.uuid4().hex)
    )
    _keep(wire, keep_s)
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))


def _keep(wire: Wire, keep_s: int) -> None:
    """Set how long new chunks are kept, and note whether chunks ever had a limit."""
    if keep_s:
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ever_had_ttl', 1)"))
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ttl_s', ?)", keep_s))


def migrate(location: Location) -> int:
    """Apply the address's ttl_s, if it has one, to new chunks; return their ttl_s (0: forever)."""
    options = read_options(location)
    with Wire(options) as wire:
        check(wire)
        keep_s = read_meta(wire)["ttl_s"] if options.ttl_s is None else options.ttl_s
        wire.define(f"ALTER TABLE chunks WITH {settings('chunks', keep_s)}")
        _keep(wire, keep_s)
        return keep_s


def settings(name: str, keep_s: int) -> str:
    """A table's compaction and compression in CQL; chunks are kept for `keep_s` (0: forever)."""
    strategy = {"class": "UnifiedCompactionStrategy"}
    if keep_s and name == "chunks":
        minutes = max(1, keep_s // 30 // 60)
        strategy = {
            "class": "TimeWindowCompactionStrategy",
            "compaction_window_unit": "MINUTES",
            "compaction_window_size": str(minutes),
        }
    parts = [f"compaction = {_map(strategy)}"]
    if name == "chunks":
        # Clients already compress bodies where that helps.
        parts.append(f"compression = {_map({'enabled': 'false'})}")
    return " AND ".join(parts)


def _map(fields: dict[str, str]) -> str:
    return json.dumps(fields).replace('"', "'")


# --- checking -----------------------------------------------------------------------------------


def check(wire: Wire) -> None:
    """Raise ConfigError or StorageFailed unless the keyspace has a complete, readable store."""
    name = wire.options.keyspace
    keyspace = read_keyspace(wire)
    if keyspace is None:
        raise ConfigError(
            f"keyspace {name} does not exist in this cluster; create it with `understudy store "
            f"init cassandra://.../{name}`"
        )
    if _version(wire, keyspace) is None:
        raise ConfigError(
            f"keyspace {name} does not contain a complete store; run `understudy store init "
            f"cassandra://.../{name}`"
        )


def read_meta(wire: Wire) -> dict[str, int]:
    """The numbers in `meta`."""
    rows = wire.scan(wire.bind("SELECT name, number FROM meta"))
    return {row.name: row.number for row in rows if row.number is not None}


def identity(wire: Wire) -> str:
    """The unique id of this store, independent of its address."""
    row = wire.one(wire.bind("SELECT value FROM meta WHERE name = 'id'"))
    return "" if row is None else str(row.value)


def _version(wire: Wire, keyspace: Keyspace) -> int | None:
    """The version of the tables, all of which must exist; None when no `init` has finished."""
    for pause_s in _SETTLE_S:
        try:
            return _version_now(wire, keyspace)
        except StorageFailed as error:
            # Another process is creating a table: a server lists it shortly before it serves it.
            is_new = isinstance(error.__cause__, REFUSED) and "does not exist" in str(
                error.__cause__
            )
            if not is_new or not pause_s:
                raise
            wire.wait(pause_s)
    return None


def _version_now(wire: Wire, keyspace: Keyspace) -> int | None:
    name = wire.options.keyspace
    check_columns(keyspace, name, "meta", TABLES["meta"])
    facts = read_meta(wire) if "meta" in keyspace.columns else {}
    version = facts.get("schema_version")
    if version is not None and version > VERSION:
        raise StorageFailed(
            f"keyspace {name} has tables of version {version}, newer than this release's "
            f"{VERSION}; install the release that created them"
        )
    if version is not None and version < VERSION:
        raise ConfigError(
            f"keyspace {name} has tables of version {version}, which was never released and cannot "
            "be read; use another keyspace"
        )
    for table, definition in TABLES.items():
        check_columns(keyspace, name, table, definition)
    is_used = (
        "partitions" in keyspace.columns
        and wire.one(wire.bind("SELECT partition FROM partitions LIMIT 1")) is not None
    )
    if version is not None or is_used:
        if not TABLES.keys() <= keyspace.columns.keys():
            # Another process may have created the missing tables in the meantime.
            keyspace = read_keyspace(wire) or keyspace
        missing = [f"table {table}" for table in TABLES if table not in keyspace.columns]
        missing += [
            f"row {row} of table meta"
            for row in ("schema_version", "quarantine_id", "ttl_s")
            if row not in facts
        ]
        if missing:
            raise StorageFailed(
                f"keyspace {name} has lost its {missing[0]}; restore it from a backup, or use "
                "another keyspace: init does not recreate parts of a store that was in use"
            )
    return version


def check_columns(keyspace: Keyspace, name: str, table: str, definition: str) -> None:
    """Reject an existing table of the same name with other columns; a missing one is fine."""
    columns = keyspace.columns.get(table)
    if columns is None:
        return
    for column, kind in columns_of(definition).items():
        if (actual := columns.get(column)) != kind:
            raise ConfigError(
                f"keyspace {name} has a table {table} that does not belong to an understudy store "
                f"(its column {column} is {actual or 'missing'}, expected {kind}); use another "
                "keyspace, or restore this one from a backup"
            )


def columns_of(definition: str) -> dict[str, str]:
    """The type of each column in a table's CQL definition."""
    parts = (part.split() for part in definition.partition(", PRIMARY KEY (")[0].split(", "))
    return {column: kind for column, kind, *_ in parts}


# --- copies -------------------------------------------------------------------------------------


def requested_copies(options: Options, nodes: Mapping[str, int]) -> Copies:
    """The replication that an address requests, by datacenter."""
    copies = options.replication
    return {options.datacenter or _only(nodes): copies} if isinstance(copies, int) else copies


def current_replication(keyspace: Keyspace, nodes: Mapping[str, int]) -> Copies | None:
    """The replication of a keyspace; None when its strategy states no counts."""
    fields = dict(keyspace.replication)
    strategy = fields.pop("class", "").rpartition(".")[2]
    try:
        if strategy == "SimpleStrategy":
            return {_only(nodes): int(fields["replication_factor"])}
        return (
            {name: int(count) for name, count in fields.items()}
            if strategy == "NetworkTopologyStrategy"
            else None
        )
    except (KeyError, ValueError):
        return None


def _only(nodes: Mapping[str, int]) -> str:
    return next(iter(nodes)) if len(nodes) == 1 else ""


def check_nodes(copies: Copies, nodes: Mapping[str, int], *, fix: str) -> None:
    """Reject a replication whose quorum needs more nodes than the cluster has."""
    for name, count in copies.items():
        if name and name not in nodes:
            raise unknown_datacenter_error(name, nodes)
        has = nodes[name] if name else sum(nodes.values())
        if has < (quorum := count // 2 + 1):
            raise ConfigError(
                f"replication={count} needs at least {quorum} nodes, but this cluster has {has}; "
                f"{fix}&replication={has}"
            )


def check_copies(keyspace: Keyspace, options: Options, nodes: Mapping[str, int]) -> None:
    """Reject a replication that differs from that of an existing keyspace."""
    has = current_replication(keyspace, nodes)
    requested = requested_copies(options, nodes)
    if has == requested:
        return
    current = str(dict(keyspace.replication)) if has is None else f"replication={_written(has)}"
    raise ConfigError(
        f"keyspace {options.keyspace} has {current}, but the address has "
        f"replication={_written(requested)}, and init does not change it; omit replication, use "
        "another keyspace, or use ALTER KEYSPACE and `nodetool repair -full`"
    )


def _written(copies: Copies) -> str:
    return ",".join(
        f"{name}:{count}" if name else str(count) for name, count in sorted(copies.items())
    )


def replication(options: Options) -> str:
    """The replication of an address as CQL."""
    copies = options.replication
    if isinstance(copies, int):
        if not options.datacenter:
            return f"{{'class': 'SimpleStrategy', 'replication_factor': {copies}}}"
        copies = {options.datacenter: copies}
    factors = ", ".join(f"'{name}': {count}" for name, count in copies.items())
    return f"{{'class': 'NetworkTopologyStrategy', {factors}}}"
