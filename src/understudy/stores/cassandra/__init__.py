"""A store on Apache Cassandra: any number of writers, each with partitions of its own, and any
number of readers."""

from understudy.stores.cassandra.keyspace import init, migrate
from understudy.stores.cassandra.store import CassandraStore, open_cassandra

__all__ = ["CassandraStore", "init", "migrate", "open_cassandra"]
