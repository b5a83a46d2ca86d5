"""What a keyspace holds, and whether that fits what an address asks for."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from understudy.core.errors import ConfigError
from understudy.stores.cassandra.failures import listed, no_datacenter
from understudy.stores.cassandra.options import Options
from understudy.stores.cassandra.wire import Wire

Copies = Mapping[str, int]
"""Copies by datacenter; with the name '' over all of several."""


@dataclass(frozen=True, slots=True)
class Keyspace:
    """A keyspace as the server describes it; whoever may log in may read that."""

    replication: Mapping[str, str]
    columns: Mapping[str, Mapping[str, str]]
    """The type of each column, by table and column."""
    lasting_s: Mapping[str, int]
    """How long rows of a table last; 0: for ever."""


def look(wire: Wire) -> Keyspace | None:
    """The keyspace of an address; None when there is none."""
    name = wire.options.keyspace
    row = wire.one(wire.bind("SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = ?", name))
    if row is None:
        return None
    columns: dict[str, dict[str, str]] = defaultdict(dict)
    cql = "SELECT table_name, column_name, type FROM system_schema.columns WHERE keyspace_name = ?"
    for one in wire.scan(wire.bind(cql, name)):
        columns[one.table_name][one.column_name] = one.type
    cql = "SELECT table_name, default_time_to_live FROM system_schema.tables WHERE keyspace_name = ?"
    lasting_s = {one.table_name: one.default_time_to_live for one in wire.scan(wire.bind(cql, name))}
    return Keyspace(dict(row.replication), dict(columns), lasting_s)


# --- copies -----------------------------------------------------------------------------------------------------------


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
        return {name: int(count) for name, count in fields.items()} if strategy == "NetworkTopologyStrategy" else None
    except (KeyError, ValueError):
        return None


def _only(nodes: Mapping[str, int]) -> str:
    return next(iter(nodes)) if len(nodes) == 1 else ""


def check_asked(options: Options, nodes: Mapping[str, int]) -> None:
    """Refuse copies that the nodes of this cluster cannot hold: not one request of the store would be answered."""
    for name, count in asked(options, nodes).items():
        if name and name not in nodes:
            raise no_datacenter(name, nodes)
        if (has := _nodes_in(name, nodes)) < _quorum(count):
            raise ConfigError(
                f"replication={count} needs {_quorum(count)} nodes at least and this cluster has {has}; add nodes, or "
                f"give &replication={has}"
            )


def check_held(keyspace: Keyspace, options: Options, nodes: Mapping[str, int]) -> None:
    """Refuse the same of a keyspace that somebody has made, where its datacenter is known."""
    name = options.datacenter or _only(nodes)
    count = (held(keyspace, nodes) or {}).get(name, 0)
    if name and (has := nodes[name]) < _quorum(count):
        raise ConfigError(
            f"keyspace {options.keyspace} has replication={count}, which needs {_quorum(count)} nodes at least, and "
            f"this cluster has {has}; add nodes, or change it with ALTER KEYSPACE, or name another keyspace and "
            f"&replication={has}"
        )


def check_copies(keyspace: Keyspace, options: Options, nodes: Mapping[str, int]) -> None:
    """Refuse other copies than a keyspace has: a keyspace that is there keeps its own."""
    name, has, wanted = options.keyspace, held(keyspace, nodes), asked(options, nodes)
    if has == wanted:
        return
    shown = str(dict(keyspace.replication)) if has is None else f"replication={_written(has)}"
    can_be = all(_nodes_in(place, nodes) >= _quorum(count) for place, count in wanted.items())
    steps = (
        f"run ALTER KEYSPACE {name} WITH replication = {replication(options)} and then `nodetool repair -full {name}` "
        "on every node"
        if can_be
        else f"add nodes first, since there are {listed(nodes)}"
    )
    raise ConfigError(
        f"keyspace {name} has {shown} and the address asks for {_written(wanted)}, which init does not change; leave "
        f"replication out, or name another keyspace, or {steps}"
    )


def _nodes_in(datacenter: str, nodes: Mapping[str, int]) -> int:
    return nodes.get(datacenter, 0) if datacenter else sum(nodes.values())


def _quorum(copies: int) -> int:
    return copies // 2 + 1


def _written(copies: Copies) -> str:
    return ",".join(f"{name}:{count}" if name else str(count) for name, count in sorted(copies.items()))


def replication(options: Options) -> str:
    """The copies of an address as CQL."""
    wanted = options.replication
    if isinstance(wanted, int):
        if not options.datacenter:
            return f"{{'class': 'SimpleStrategy', 'replication_factor': {wanted}}}"
        wanted = {options.datacenter: wanted}
    copies = ", ".join(f"'{name}': {count}" for name, count in wanted.items())
    return f"{{'class': 'NetworkTopologyStrategy', {copies}}}"


# --- tables -----------------------------------------------------------------------------------------------------------


def check_columns(keyspace: Keyspace, name: str, table: str, definition: str) -> None:
    """Refuse a table of our name that is not ours; one that is not there is none of them."""
    if (there := keyspace.columns.get(table)) is None:
        return
    for column, kind in columns_of(definition).items():
        if (found := there.get(column)) != kind:
            is_so = f"{found} there" if found else "not there"
            raise ConfigError(
                f"keyspace {name} has a table {table} that is not of a store (its column {column} is {is_so}, "
                f"{kind} wanted); name another keyspace, or restore this one from a backup"
            )


def columns_of(definition: str) -> dict[str, str]:
    """The type of each column of a definition."""
    parts = (part.split() for part in definition.partition(", PRIMARY KEY (")[0].split(", "))
    return {column: kind for column, kind, *_ in parts}
