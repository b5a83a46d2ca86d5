"""Backends: which stream and which store stand behind an address; the one place that knows their
adapters."""

from collections.abc import Mapping

from understudy.backends.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError
from understudy.core.location import Location, parse_location
from understudy.core.settings import load
from understudy.ports import FullStore, Specs, Stream

STREAMS = {
    "kafka": "understudy.streams.kafka:open_kafka",
    "kinesis": "understudy.streams.kinesis:open_kinesis",
}
STORES = {"cassandra": "understudy.stores.cassandra:open_cassandra"}
_STREAM_FORM = "kinesis://STREAM or kafka://HOST:PORT/TOPIC"
_STORE_FORM = "cassandra://HOST:PORT/KEYSPACE"


def open_stream(url: str, data: DataFolder) -> Stream:
    """The stream of an address, or of the data folder where there is none."""
    if not url:
        from understudy.streams.file import FileStream

        return FileStream(data.stream)
    location = _location(url, STREAMS, "stream", _STREAM_FORM)
    stream: Stream = load(STREAMS[location.scheme], what="stream")(location)
    return stream


def open_store(url: str, *, specs: Specs, clock: Clock | None = None) -> FullStore:
    """The store of an address; the data folder's own is opened by its one writer."""
    location = _location(url, STORES, "store", _STORE_FORM)
    store: FullStore = load(STORES[location.scheme], what="store")(
        location, specs=specs, clock=clock
    )
    return store


def create_stream(url: str, *, partitions: int | None = None) -> int:
    """Make the stream of an address where it is not there yet; over how many partitions sessions
    are spread.

    None: as many as there are, or as the address says, or 4. ConfigError when a stream is there
    with another number.
    """
    location = _location(url, STREAMS, "stream", _STREAM_FORM)
    if location.scheme == "kinesis":
        count: int = load("understudy.streams.kinesis:create_kinesis", what="stream")(
            location, shards=partitions
        )
    else:
        count = load("understudy.streams.kafka:create_kafka", what="stream")(
            location, partitions=partitions
        )
    return count


def init_store(url: str) -> None:
    """Make the tables of an address where they are not there yet."""
    location = _location(url, STORES, "store", _STORE_FORM)
    load("understudy.stores.cassandra:init", what="store")(location)


def migrate_store(url: str) -> tuple[int, int, int]:
    """Give new chunks the ttl_s of the address; the tables' version before and after, and how
    long chunks are kept."""
    location = _location(url, STORES, "store", _STORE_FORM)
    before, after, ttl_s = load("understudy.stores.cassandra:migrate", what="store")(location)
    return before, after, ttl_s


def check_backends(*, stream: str, store: str) -> None:
    """ConfigError for an address that cannot be meant; nothing is asked of the network."""
    if stream:
        _location(stream, STREAMS, "stream", _STREAM_FORM)
    if store:
        _location(store, STORES, "store", _STORE_FORM)


def _location(url: str, known: Mapping[str, str], what: str, wanted: str) -> Location:
    location = parse_location(url)
    if location.scheme not in known:
        raise ConfigError(
            f"{what}.url begins with {location.scheme}://, which is no {what}; give {wanted}"
        )
    return location
