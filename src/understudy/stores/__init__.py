"""Stores: durable experience, each step once, in SQLite or Cassandra."""
