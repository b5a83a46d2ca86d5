"""The keyspace of a store: its tables, how they are created, and whether what is there fits the
address.

meta        what holds for the whole store; its row `quarantine_id` only by compare-and-set
partitions  one row each: who may write it, how far it is committed; only by compare-and-set
registry    numbers that only rise, by kind and name, such as how far each partition may be read
commits     what arrived, one row per commit of a partition
chunks      the bytes of frames, stored or quarantined, by their hash
sessions    what is known of a session, and a row per number: stored under it, or quarantined
players     the sessions of a player
quarantine  refused, parked and withdrawn frames, without their bytes
"""

import json
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import Location
from understudy.stores.cassandra.wire import REFUSED, Options, Wire, no_datacenter, read_options

VERSION = 3
"""3: frames by their hash; sessions are written once their commit counts."""

TABLES = {
    "meta": "name text PRIMARY KEY, number bigint, value text",
    "partitions": (
        "partition text PRIMARY KEY, epoch bigint, lease text, owner text, expires_s double, "
        "position text, "
        "commit_no bigint, at_s double, keep_s bigint, arrivals bigint, events bigint"
    ),
    "registry": "kind text, name text, number bigint, PRIMARY KEY ((kind), name)",
    "commits": (
        "partition text, bucket bigint, commit_no bigint, events bigint, at_s double, keep_s "
        "bigint, before bigint, "
        "facts blob, states blob, PRIMARY KEY ((partition, bucket), commit_no)"
    ),
    "chunks": (
        "session uuid, bucket bigint, chunk_no bigint, digest blob, frame blob, "
        "PRIMARY KEY ((session, bucket), chunk_no, digest)"
    ),
    "sessions": (
        "session uuid, chunk_no bigint, what tinyint, crc bigint, quarantine_id bigint, digest "
        "blob, length int, "
        "kind tinyint, n_steps bigint, received_s bigint, events bigint, game text static, state "
        "blob static, "
        "state_events bigint static, version bigint static, "
        "PRIMARY KEY ((session), chunk_no, what, crc, quarantine_id)"
    ),
    "players": "player blob, session uuid, PRIMARY KEY ((player), session)",
    "quarantine": (
        "bucket bigint, id bigint, reason text, detail text, parked boolean, received_s double, "
        "game text, "
        "session blob, chunk_no bigint, crc bigint, player blob, digest blob, events bigint, "
        "PRIMARY KEY ((bucket), id)"
    ),
}
_SETTLE_S = (0.1, 0.2, 0.4, 0.8, 0.0)
Copies = Mapping[str, int]
"""Copies by datacenter; with the name '' over all of several."""


@dataclass(frozen=True, slots=True)
class Keyspace:
    """A keyspace as the server describes it; every role that may log in may read that."""

    replication: Mapping[str, str]
    columns: Mapping[str, Mapping[str, str]]
    """The type of each column, by table and column."""


def look(wire: Wire) -> Keyspace | None:
    """The keyspace of an address; None when there is none."""
    name = wire.options.keyspace
    row = wire.one(
        wire.bind("SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = ?", name)
    )
    if row is None:
        return None
    columns: dict[str, dict[str, str]] = defaultdict(dict)
    cql = "SELECT table_name, column_name, type FROM system_schema.columns WHERE keyspace_name = ?"
    for one in wire.scan(wire.bind(cql, name)):
        columns[one.table_name][one.column_name] = one.type
    return Keyspace(dict(row.replication), dict(columns))


# --- creating and changing ----------------------------------------------------------------------


def init(location: Location) -> None:
    """Create the keyspace and its tables where they are missing; what is there stays as it is.

    ConfigError when the address asks for something else than is there.
    """
    options = read_options(location)
    with Wire(options) as wire:
        found = look(wire)
        nodes = wire.nodes()
        if found is None:
            check_nodes(asked(options, nodes), nodes, fix="add nodes, or give ")
            wire.define(
                f'CREATE KEYSPACE IF NOT EXISTS "{options.keyspace}" WITH replication = '
                f"{replication(options)}"
            )
            _create(wire, Keyspace({}, {}))
            return
        if "replication" in location.options:
            check_copies(found, options, nodes)
        place = options.datacenter or _only(nodes)
        copies = {place: (held(found, nodes) or {}).get(place, 0)} if place else {}
        check_nodes(
            copies, nodes, fix="add nodes, or use ALTER KEYSPACE, or name another keyspace and "
        )
        if _version(wire, found) is None:
            _create(wire, found)
        elif options.ttl_s not in (None, kept_s := numbers(wire)["ttl_s"]):
            raise ConfigError(
                f"keyspace {options.keyspace} has ttl_s={kept_s} and the address asks for "
                f"ttl_s={options.ttl_s}, which "
                "init does not change; run `understudy store migrate` with this address, or leave "
                "ttl_s out"
            )


def _create(wire: Wire, found: Keyspace) -> None:
    """Create what is missing of a store that was never complete; the version comes last."""
    keep_s = wire.options.ttl_s or 0
    for name, columns in TABLES.items():
        wire.define(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITH {settings(name, keep_s)}")
    if "chunks" in found.columns:
        wire.define(
            f"ALTER TABLE chunks WITH {settings('chunks', keep_s)}"
        )  # an init before may have had another ttl_s
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('quarantine_id', 1) IF NOT EXISTS"))
    wire.one(
        wire.bind("INSERT INTO meta (name, value) VALUES ('id', ?) IF NOT EXISTS", uuid.uuid4().hex)
    )
    _keep(wire, keep_s)
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))


def _keep(wire: Wire, keep_s: int) -> None:
    """Set how long new chunks are kept; that a store ever let any run out is remembered."""
    if keep_s:
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ever_had_ttl', 1)"))
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ttl_s', ?)", keep_s))


def migrate(location: Location) -> tuple[int, int, int]:
    """Give new chunks the ttl_s of the address, if it has one.

    The version of the tables before and after, and how long new chunks are kept (0: for ever).
    """
    options = read_options(location)
    with Wire(options) as wire:
        check(wire)
        keep_s = numbers(wire)["ttl_s"] if options.ttl_s is None else options.ttl_s
        wire.define(f"ALTER TABLE chunks WITH {settings('chunks', keep_s)}")
        _keep(wire, keep_s)
        return VERSION, VERSION, keep_s


def settings(name: str, keep_s: int) -> str:
    """How a table is compacted in a store that keeps chunks for this long (0: for ever)."""
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
        # Bodies are compressed by whoever made them, where that helps.
        parts.append(f"compression = {_map({'enabled': 'false'})}")
    return " AND ".join(parts)


def _map(fields: dict[str, str]) -> str:
    return json.dumps(fields).replace('"', "'")


# --- checking -----------------------------------------------------------------------------------


def check(wire: Wire) -> None:
    """ConfigError or StorageFailed unless the keyspace of an address holds a store of this
    version."""
    name = wire.options.keyspace
    found = look(wire)
    if found is None:
        raise ConfigError(
            f"there is no keyspace {name} in this Cassandra; create it with `understudy store init "
            f"cassandra://.../{name}`"
        )
    if _version(wire, found) is None:
        raise ConfigError(
            f"keyspace {name} holds no complete store; run `understudy store init "
            f"cassandra://.../{name}`"
        )


def numbers(wire: Wire) -> dict[str, int]:
    """The numbers in `meta`."""
    rows = wire.scan(wire.bind("SELECT name, number FROM meta"))
    return {row.name: row.number for row in rows if row.number is not None}


def identity(wire: Wire) -> str:
    """What tells this store from every other one, wherever its servers are."""
    row = wire.one(wire.bind("SELECT value FROM meta WHERE name = 'id'"))
    return "" if row is None else str(row.value)


def _version(wire: Wire, found: Keyspace) -> int | None:
    """The version of the tables that were found, ours and complete; None where no init came to
    its end."""
    for pause_s in _SETTLE_S:
        try:
            return _version_now(wire, found)
        except StorageFailed as error:
            # A server lists a new table a moment before it serves it: another process is creating
            # it.
            is_new = isinstance(error.__cause__, REFUSED) and "does not exist" in str(
                error.__cause__
            )
            if not is_new or not pause_s:
                raise
            wire.wait(pause_s)
    return None


def _version_now(wire: Wire, found: Keyspace) -> int | None:
    name = wire.options.keyspace
    check_columns(found, name, "meta", TABLES["meta"])
    facts = numbers(wire) if "meta" in found.columns else {}
    version = facts.get("schema_version")
    if version is not None and version > VERSION:
        raise StorageFailed(
            f"keyspace {name} has tables of version {version}, newer than this release's "
            f"{VERSION}; install the "
            "release that made them"
        )
    if version is not None and version < VERSION:
        raise ConfigError(
            f"keyspace {name} has tables of version {version}, which was never released and cannot "
            "be read; name "
            "another keyspace"
        )
    for table, definition in TABLES.items():
        check_columns(found, name, table, definition)
    is_used = (
        "partitions" in found.columns
        and wire.one(wire.bind("SELECT partition FROM partitions LIMIT 1")) is not None
    )
    if version is not None or is_used:
        if not TABLES.keys() <= found.columns.keys():
            # What another process was creating when we looked is complete by now.
            found = look(wire) or found
        lost = [f"table {table}" for table in TABLES if table not in found.columns]
        lost += [
            f"row {row} of table meta"
            for row in ("schema_version", "quarantine_id", "ttl_s")
            if row not in facts
        ]
        if lost:
            raise StorageFailed(
                f"keyspace {name} has lost its {lost[0]}; restore that from a backup, or name "
                "another keyspace: where "
                "experience was stored, init creates nothing anew"
            )
    return version


def check_columns(keyspace: Keyspace, name: str, table: str, definition: str) -> None:
    """Reject a table of our name that is not ours; one that is missing is not."""
    there = keyspace.columns.get(table)
    if there is None:
        return
    for column, kind in columns_of(definition).items():
        if (found := there.get(column)) != kind:
            is_so = f"{found} there" if found else "not there"
            raise ConfigError(
                f"keyspace {name} has a table {table} that is not of a store (its column {column} "
                f"is {is_so}, "
                f"{kind} wanted); name another keyspace, or restore this one from a backup"
            )


def columns_of(definition: str) -> dict[str, str]:
    """The type of each column of a definition."""
    parts = (part.split() for part in definition.partition(", PRIMARY KEY (")[0].split(", "))
    return {column: kind for column, kind, *_ in parts}


# --- copies -------------------------------------------------------------------------------------


def asked(options: Options, nodes: Mapping[str, int]) -> Copies:
    """The copies that an address asks for."""
    wanted = options.replication
    return {options.datacenter or _only(nodes): wanted} if isinstance(wanted, int) else wanted


def held(keyspace: Keyspace, nodes: Mapping[str, int]) -> Copies | None:
    """The copies that a keyspace has; None when its strategy counts none."""
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
    """Reject copies that the nodes of this cluster cannot hold: no request of the store would be
    answered."""
    for name, count in copies.items():
        if name and name not in nodes:
            raise no_datacenter(name, nodes)
        has = nodes[name] if name else sum(nodes.values())
        if has < (quorum := count // 2 + 1):
            raise ConfigError(
                f"replication={count} needs {quorum} nodes at least and this cluster has {has}; "
                f"{fix}&replication={has}"
            )


def check_copies(keyspace: Keyspace, options: Options, nodes: Mapping[str, int]) -> None:
    """Reject other copies than a keyspace has: a keyspace that is there keeps its own."""
    has = held(keyspace, nodes)
    wanted = asked(options, nodes)
    if has == wanted:
        return
    shown = str(dict(keyspace.replication)) if has is None else f"replication={_written(has)}"
    raise ConfigError(
        f"keyspace {options.keyspace} has {shown} and the address asks for {_written(wanted)}, "
        "which init does not "
        "change; leave replication out, or name another keyspace, or use ALTER KEYSPACE and "
        "`nodetool repair -full`"
    )


def _written(copies: Copies) -> str:
    return ",".join(
        f"{name}:{count}" if name else str(count) for name, count in sorted(copies.items())
    )


def replication(options: Options) -> str:
    """The copies of an address as CQL."""
    wanted = options.replication
    if isinstance(wanted, int):
        if not options.datacenter:
            return f"{{'class': 'SimpleStrategy', 'replication_factor': {wanted}}}"
        wanted = {options.datacenter: wanted}
    copies = ", ".join(f"'{name}': {count}" for name, count in wanted.items())
    return f"{{'class': 'NetworkTopologyStrategy', {copies}}}"
