"""A store on Apache Cassandra: many writers, each with its own partitions, and many readers."""

from understudy.stores.cassandra.keyspace import init, migrate
from understudy.stores.cassandra.store import CassandraStore, open_cassandra

__all__ = ["CassandraStore", "init", "migrate", "open_cassandra"]
