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
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import Location
from understudy.stores.cassandra.failures import is_unknown_table
from understudy.stores.cassandra.keeping import Keeping, read_keeping, write_keeping
from understudy.stores.cassandra.keyspace import (
    Keyspace,
    check_asked,
    check_columns,
    check_copies,
    check_held,
    look,
    replication,
)
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

_SETTLE_S = (0.1, 0.2, 0.4, 0.8)
_KEPT_LONGER = ("commits", "sessions", "players")
"""Tables that must know of a chunk for as long as it can be sent again."""


def init(location: Location) -> None:
    """Make the keyspace and its tables where they are not there yet; what is there stays as it is.

    ConfigError when the address asks for something else than is there; older tables are left to `migrate`.
    """
    options = read_options(location)
    wire = Wire(options)
    try:
        found, nodes = look(wire), wire.nodes()
        if found is None:
            check_asked(options, nodes)
            wire.define(f'CREATE KEYSPACE IF NOT EXISTS "{options.keyspace}" WITH replication = {replication(options)}')
            _make(wire, Keyspace({}, {}, {}))
            return
        if "replication" in location.options:
            check_copies(found, options, nodes)
        check_held(found, options, nodes)
        version = _version(wire, found)
        if version is None:
            _make(wire, found)
        elif version < VERSION:
            raise _older(options, version)
        elif options.ttl_s is not None and options.ttl_s != (kept_s := read_keeping(wire).ttl_s):
            raise ConfigError(
                f"keyspace {options.keyspace} has ttl_s={kept_s} and the address asks for ttl_s={options.ttl_s}, which "
                "init does not change; run `understudy store migrate` with this address, or leave ttl_s out"
            )
    finally:
        wire.close()


def _make(wire: Wire, found: Keyspace) -> None:
    """Make what is not there of a store that was never whole; the version comes last."""
    keep_s = wire.options.ttl_s or 0
    for name, columns in TABLES.items():
        if name not in found.columns:
            wire.define(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITH {settings(name, keep_s)}")
        elif found.lasting_s.get(name) != default_s(name, keep_s):
            # An init that was cut off began it with another time to live.
            wire.define(f"ALTER TABLE {name} WITH {settings(name, keep_s)}")
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('stamp', 0) IF NOT EXISTS"))
    wire.one(wire.bind("INSERT INTO meta (name, value) VALUES ('id', ?) IF NOT EXISTS", uuid.uuid4().hex))
    write_keeping(wire, Keeping(keep_s))
    wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))


def migrate(location: Location) -> tuple[int, int, int]:
    """Bring the tables to this release's version, and to the address's ttl_s if it has one.

    The version before and after, and how long new chunks are kept (0: for ever).
    """
    options = read_options(location)
    wire = Wire(options)
    try:
        found = check(wire, may_be_older=True)
        before = read_keeping(wire)
        keep_s = before.ttl_s if options.ttl_s is None else options.ttl_s
        for name in TABLES:
            wire.define(f"ALTER TABLE {name} WITH {settings(name, keep_s)}")
        if found < 2:
            wire.define("DROP TABLE IF EXISTS specs")
        write_keeping(wire, before.changed_to(keep_s, now_s=SystemClock().now()))
        wire.one(wire.bind("INSERT INTO meta (name, number) VALUES ('schema_version', ?)", VERSION))
        return found, VERSION, keep_s
    finally:
        wire.close()


def check(wire: Wire, *, may_be_older: bool = False) -> int:
    """The version of the keyspace of an address; ConfigError or StorageFailed when it holds no store to be used."""
    options = wire.options
    if (found := look(wire)) is None:
        raise ConfigError(
            f"there is no keyspace {options.keyspace} in this Cassandra; make it with `understudy store init "
            f"cassandra://.../{options.keyspace}`"
        )
    if (version := _version(wire, found)) is None:
        raise ConfigError(
            f"keyspace {options.keyspace} holds no whole store; run `understudy store init cassandra://.../"
            f"{options.keyspace}`"
        )
    if version < VERSION and not may_be_older:
        raise _older(options, version)
    return version


def identity(wire: Wire) -> str:
    """What tells this store from every other one, wherever its servers are."""
    row = wire.one(wire.bind("SELECT value FROM meta WHERE name = 'id'"))
    return "" if row is None else str(row.value)


def _version(wire: Wire, found: Keyspace) -> int | None:
    """The version of the tables that were found, ours and whole; None where no store was ever made to its end."""
    for pause_s in _SETTLE_S:
        try:
            return _version_now(wire, found)
        except StorageFailed as error:
            if not is_unknown_table(error.__cause__):
                raise
            wire.wait(pause_s)  # another process is making it
    return _version_now(wire, found)


def _version_now(wire: Wire, found: Keyspace) -> int | None:
    name = wire.options.keyspace
    is_used = _is_used(wire, found)
    facts = _facts(wire, found)
    version = facts.get("schema_version")
    if version is not None and version > VERSION:
        raise StorageFailed(
            f"keyspace {name} has tables of version {version}, newer than this release's {VERSION}; install the "
            "release that made them"
        )
    for table, definition in TABLES.items():
        check_columns(found, name, table, definition)
    if version is not None or is_used:
        if not TABLES.keys() <= found.columns.keys():
            # What another process was making when we looked is whole by now.
            found = look(wire) or found
        lost = [f"table {table}" for table in TABLES if table not in found.columns]
        lost += [f"row {fact} of table meta" for fact in ("schema_version", "stamp") if facts.get(fact) is None]
        if lost:
            raise StorageFailed(
                f"keyspace {name} has lost its {lost[0]}; restore that from a backup, or name another keyspace: where "
                "experience was stored, init makes nothing anew"
            )
    return version


def _is_used(wire: Wire, found: Keyspace) -> bool:
    """Whether a partition was ever claimed, which a store allows once it is whole."""
    if "partition" not in found.columns.get("lanes", {}):
        return False
    return wire.one(wire.bind("SELECT partition FROM lanes LIMIT 1")) is not None


def _facts(wire: Wire, found: Keyspace) -> dict[str, int | None]:
    """The numbers in `meta`."""
    check_columns(found, wire.options.keyspace, "meta", TABLES["meta"])
    if "meta" not in found.columns:
        return {}
    return {row.name: row.number for row in wire.scan(wire.bind("SELECT name, number FROM meta"))}


def _older(options: Options, version: int) -> ConfigError:
    return ConfigError(
        f"keyspace {options.keyspace} has tables of version {version}, this release wants {VERSION}; run `understudy "
        "store migrate`"
    )


def settings(name: str, keep_s: int) -> str:
    """How a table is kept, in a store that keeps chunks for this long (0: for ever)."""
    parts = []
    if lasting := default_s(name, keep_s):
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


def default_s(name: str, keep_s: int) -> int:
    """The time to live that a table gives its rows; 0: none."""
    return lasting_s(name, keep_s) if keep_s and name in (*_KEPT_LONGER, "chunks", "quarantine") else 0


def lasting_s(name: str, keep_s: int) -> int:
    """How long rows of a table last in a store that keeps chunks for this long."""
    return keep_s + int(REMEMBER_S) if name in _KEPT_LONGER else keep_s


def _map(fields: dict[str, str]) -> str:
    return json.dumps(fields).replace('"', "'")
