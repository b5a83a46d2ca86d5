"""A store on Apache Cassandra: any number of writers, each with partitions of its own, and any number of readers."""

from understudy.stores.cassandra.store import CassandraStore, open_cassandra
from understudy.stores.cassandra.tables import init, migrate

__all__ = ["CassandraStore", "init", "migrate", "open_cassandra"]
