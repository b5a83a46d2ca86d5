"""Backends: opens the stream or the store that a URL names, with the adapter for its scheme."""

from collections.abc import Mapping

from understudy.backends.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError
from understudy.core.location import Location, parse_location
from understudy.core.settings import load_object
from understudy.ports import FullStore, Specs, Stream

STREAMS = {
    "kafka": "understudy.streams.kafka:open_kafka",
    "kinesis": "understudy.streams.kinesis:open_kinesis",
}
STORES = {"cassandra": "understudy.stores.cassandra:open_cassandra"}
_STREAM_FORM = "kinesis://STREAM or kafka://HOST:PORT/TOPIC"
_STORE_FORM = "cassandra://HOST:PORT/KEYSPACE"


def open_stream(url: str, data: DataFolder) -> Stream:
    """Return the stream that a URL names, or the data folder's own if the URL is empty."""
    if not url:
        from understudy.streams.file import FileStream

        return FileStream(data.stream)
    location = _location(url, STREAMS, "stream", _STREAM_FORM)
    stream: Stream = load_object(STREAMS[location.scheme], what="stream")(location)
    return stream


def open_store(url: str, *, specs: Specs, clock: Clock | None = None) -> FullStore:
    """Return the remote store that a URL names; `open_local_store` opens a local one."""
    location = _location(url, STORES, "store", _STORE_FORM)
    store: FullStore = load_object(STORES[location.scheme], what="store")(
        location, specs=specs, clock=clock
    )
    return store


def create_stream(url: str, *, partitions: int | None = None) -> int:
    """Create the stream that a URL names unless it exists; return its number of partitions.

    With None, an existing stream is accepted as it is, and a new one gets the number in its URL
    (Kafka only), else 4. Raises ConfigError if the stream exists with another number than
    requested.
    """
    location = _location(url, STREAMS, "stream", _STREAM_FORM)
    if location.scheme == "kinesis":
        count: int = load_object("understudy.streams.kinesis:create_kinesis", what="stream")(
            location, shards=partitions
        )
    else:
        count = load_object("understudy.streams.kafka:create_kafka", what="stream")(
            location, partitions=partitions
        )
    return count


def init_store(url: str) -> None:
    """Create the tables of the store that a URL names, unless they exist."""
    location = _location(url, STORES, "store", _STORE_FORM)
    load_object("understudy.stores.cassandra:init", what="store")(location)


def migrate_store(url: str) -> int:
    """Apply the URL's ttl_s, if it has one, to new chunks; return the ttl_s of the store."""
    location = _location(url, STORES, "store", _STORE_FORM)
    ttl_s: int = load_object("understudy.stores.cassandra:migrate", what="store")(location)
    return ttl_s


def check_backends(*, stream: str, store: str) -> None:
    """Raise ConfigError for an unsupported URL, without using the network."""
    if stream:
        _location(stream, STREAMS, "stream", _STREAM_FORM)
    if store:
        _location(store, STORES, "store", _STORE_FORM)


def _location(url: str, backends: Mapping[str, str], what: str, form: str) -> Location:
    location = parse_location(url)
    if location.scheme not in backends:
        raise ConfigError(
            f"{what}.url starts with {location.scheme}://, which is not a supported {what}; "
            f"use {form}"
        )
    return location
