"""The tables of a store, how they are made, and how older ones are brought forward.

meta       what holds for the whole store; its row `stamp` only by compare-and-set
lanes      one row per partition: who may write it, how far it is committed; only by compare-and-set
registry   one row per partition: a head that readers may trust, though it may be late
commits    what arrived, one row per commit of a partition
chunks     the frames themselves
sessions   what is known of a session, and a row per number: stored under it, or quarantined
players    the sessions of a player
quarantine refused, parked and withdrawn frames
"""

import json
import uuid

from understudy.core.ages import REMEMBER_S
from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import Location
from understudy.stores.cassandra.options import Options, read_options
from understudy.stores.cassandra.wire import Wire

VERSION = 2
"""2: lanes that nobody has claimed for long are listed apart, and no copies of specs are kept."""
CHUNK_BUCKET, COMMIT_BUCKET, QUARANTINE_BUCKET = 6, 10, 36
"""How many low bits of a number one Cassandra partition covers."""

TABLES = {
    "meta": "name text PRIMARY KEY, number bigint, value text",
    "lanes": (
        "partition text PRIMARY KEY, epoch bigint, owner text, ttl_s double, expires_s double, position text, "
        "commit_no bigint, attempt bigint, arrivals bigint, events bigint"
    ),
    "registry": "kind text, name text, number bigint, PRIMARY KEY ((kind), name)",
    "commits": (
        "partition text, bucket bigint, commit_no bigint, attempt bigint, events bigint, at_s double, before bigint, "
        "facts blob, PRIMARY KEY ((partition, bucket), commit_no)"
    ),
    "chunks": (
        "session uuid, bucket bigint, chunk_no bigint, attempt bigint, frame blob, "
        "PRIMARY KEY ((session, bucket), chunk_no)"
    ),
    "sessions": (
        "session uuid, chunk_no bigint, what tinyint, crc bigint, length int, kind tinyint, n_steps bigint, "
        "received_s bigint, events bigint, partition text, commit_no bigint, attempt bigint, "
        "game text static, player blob static, state blob static, state_events bigint static, "
        "state_partition text static, state_commit bigint static, state_attempt bigint static, "
        "previous blob static, previous_game text static, previous_events bigint static, "
        "PRIMARY KEY ((session), chunk_no, what, crc)"
    ),
    "players": "player blob, session uuid, PRIMARY KEY ((player), session)",
    "quarantine": (
        "bucket bigint, id bigint, reason text, detail text, parked boolean, received_s double, game text, "
        "session blob, chunk_no bigint, crc bigint, player blob, events bigint, partition text, commit_no bigint, "
        "attempt bigint, raw blob, PRIMARY KEY ((bucket), id)"
    ),
}

_KEPT_LONGER = ("commits", "sessions", "players")
"""Tables that must know of a chunk for as long as it can be sent again."""


def init(location: Location) -> None:
    """Make the keyspace and its tables where they are not there yet; older ones are left to `migrate`."""
    options = read_options(location)
    wire = Wire(options)
    try:
        _check_nodes(wire)
        wire.define(f"CREATE KEYSPACE IF NOT EXISTS {options.keyspace} WITH replication = {_replication(options)}")
        for name, columns in TABLES.items():
            wire.define(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITH {settings(name, options.ttl_s or 0)}")
        found = _version(wire)
        if found not in (None, VERSION):
            raise _other_version(options, found)
        if found is None:
            wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('stamp', 0) IF NOT EXISTS"))
            wire.one(wire.bind("INSERT INTO meta (name, value) VALUES ('id', ?) IF NOT EXISTS", uuid.uuid4().hex))
            wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ttl_s', ?)", options.ttl_s or 0))
            wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))
    finally:
        wire.close()


def migrate(location: Location) -> tuple[int, int]:
    """Bring the tables to this release's version, and to the address's ttl_s if it has one; version before, after."""
    options = read_options(location)
    wire = Wire(options)
    try:
        found = check(wire, any_version=True)
        if found > VERSION:
            raise _other_version(options, found)
        keep_s = ttl_s(wire) if options.ttl_s is None else options.ttl_s
        for name in TABLES:
            wire.define(f"ALTER TABLE {name} WITH {settings(name, keep_s)}")
        wire.define("DROP TABLE IF EXISTS specs")
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('ttl_s', ?)", keep_s))
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))
        return found, VERSION
    finally:
        wire.close()


def check(wire: Wire, *, any_version: bool = False) -> int:
    """The version of the keyspace of an address; ConfigError when it is not there, or of another one."""
    options = wire.options
    cql = "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = ?"
    if wire.one(wire.bind(cql, options.keyspace)) is None:
        raise ConfigError(
            f"there is no keyspace {options.keyspace} in this Cassandra; make it with `understudy store init "
            f"cassandra://.../{options.keyspace}`"
        )
    tables = wire.scan(
        wire.bind("SELECT table_name FROM system_schema.tables WHERE keyspace_name = ?", options.keyspace)
    )
    if "meta" not in {row.table_name for row in tables} or (found := _version(wire)) is None:
        raise ConfigError(
            f"keyspace {options.keyspace} holds no whole store; run `understudy store init cassandra://.../"
            f"{options.keyspace}`"
        )
    if not any_version and found != VERSION:
        raise _other_version(options, found)
    return found


def ttl_s(wire: Wire) -> int:
    """How long this store keeps chunks; 0: for ever."""
    row = wire.one(wire.bind("SELECT number FROM meta WHERE name = 'ttl_s'"))
    return 0 if row is None else int(row.number)


def identity(wire: Wire) -> str:
    """What tells this store from every other one, wherever its servers are."""
    row = wire.one(wire.bind("SELECT value FROM meta WHERE name = 'id'"))
    return "" if row is None else str(row.value)


def _version(wire: Wire) -> int | None:
    row = wire.one(wire.bind("SELECT number FROM meta WHERE name = 'schema_version'"))
    return None if row is None else int(row.number)


def _other_version(options: Options, found: int | None) -> Exception:
    if found is not None and found < VERSION:
        return ConfigError(
            f"keyspace {options.keyspace} has tables of version {found}, this release wants {VERSION}; "
            "run `understudy store migrate`"
        )
    return StorageFailed(
        f"keyspace {options.keyspace} has tables of version {found}, newer than this release's {VERSION}; "
        "install the release that made them"
    )


def _check_nodes(wire: Wire) -> None:
    """Refuse copies that the nodes of this cluster cannot hold: not one request of the store would be answered."""
    nodes, wanted = wire.nodes(), wire.options.replication
    if isinstance(wanted, int):
        wanted = {wire.options.datacenter: wanted}
    there = ", ".join(f"{count} in {name}" for name, count in sorted(nodes.items()))
    for name, copies in wanted.items():
        if name and name not in nodes:
            raise ConfigError(f"this cluster has no datacenter {name!r}, its nodes are {there}; name one of those")
        if (has := nodes[name] if name else sum(nodes.values())) < copies // 2 + 1:
            raise ConfigError(
                f"replication={copies} needs {copies // 2 + 1} nodes at least and this cluster has {has}; "
                f"add nodes, or give &replication={has}"
            )


def _replication(options: Options) -> str:
    wanted = options.replication
    if isinstance(wanted, int):
        if options.datacenter:
            wanted = {options.datacenter: wanted}
        else:
            return f"{{'class': 'SimpleStrategy', 'replication_factor': {wanted}}}"
    copies = ", ".join(f"'{name}': {count}" for name, count in wanted.items())
    return f"{{'class': 'NetworkTopologyStrategy', {copies}}}"


def settings(name: str, keep_s: int) -> str:
    """How a table is kept, in a store that keeps chunks for this long (0: for ever)."""
    parts = []
    lasting = lasting_s(name, keep_s)
    if keep_s and name in (*_KEPT_LONGER, "chunks", "quarantine"):
        window_s = max(60, lasting // 30)
        compaction = {
            "class": "TimeWindowCompactionStrategy", "compaction_window_unit": "MINUTES",
            "compaction_window_size": str(max(1, window_s // 60)),
        }  # fmt: skip
        parts += [f"default_time_to_live = {lasting}", f"compaction = {_map(compaction)}"]
    else:
        parts += ["default_time_to_live = 0", f"compaction = {_map({'class': 'UnifiedCompactionStrategy'})}"]
    if name in ("chunks", "quarantine"):
        # Bodies are compressed by whoever made them, where that helps.
        parts.append(f"compression = {_map({'enabled': 'false'})}")
    return " AND ".join(parts)


def lasting_s(name: str, keep_s: int) -> int:
    """How long rows of a table last in a store that keeps chunks for this long."""
    return keep_s + int(REMEMBER_S) if name in _KEPT_LONGER else keep_s


def _map(fields: dict[str, str]) -> str:
    return json.dumps(fields).replace('"', "'")
