"""Backends: which stream and which store stand behind an address; the one place that knows their adapters."""

from collections.abc import Mapping

from understudy.app.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError
from understudy.core.import_path import load
from understudy.core.location import Location, parse_location
from understudy.core.ports import FullStore, Specs, Stream

STREAMS = {
    "kafka": "understudy.streams.kafka:open_kafka",
    "kinesis": "understudy.streams.kinesis:open_kinesis",
}
STORES = {"cassandra": "understudy.stores.cassandra:open_cassandra"}


def open_stream(url: str, data: DataFolder) -> Stream:
    """The stream of an address, or of the data folder where there is none."""
    if not url:
        from understudy.streams.file import FileStream

        return FileStream(data.stream)
    location = _location(url, STREAMS, "stream", "kinesis://STREAM or kafka://HOST:PORT/TOPIC")
    stream: Stream = load(STREAMS[location.scheme], what="stream")(location)
    return stream


def open_store(url: str, *, specs: Specs, clock: Clock | None = None) -> FullStore:
    """The store of an address; the data folder's own is opened by its one writer."""
    location = _location(url, STORES, "store", "cassandra://HOST:PORT/KEYSPACE")
    store: FullStore = load(STORES[location.scheme], what="store")(location, specs=specs, clock=clock)
    return store


def check_backends(*, stream: str, store: str) -> None:
    """ConfigError for an address that cannot be meant; nothing is asked of the network."""
    if stream:
        _location(stream, STREAMS, "stream", "kinesis://STREAM or kafka://HOST:PORT/TOPIC")
    if store:
        _location(store, STORES, "store", "cassandra://HOST:PORT/KEYSPACE")


def _location(url: str, known: Mapping[str, str], what: str, wanted: str) -> Location:
    location = parse_location(url)
    if location.scheme not in known:
        raise ConfigError(f"{what}.url begins with {location.scheme}://, which is no {what}; give {wanted}")
    return location
