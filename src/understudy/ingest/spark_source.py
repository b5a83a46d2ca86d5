"""A stream as a source of Spark's Structured Streaming, in Python alone: no connector on the Java side.

It is the simple kind of source, which reads on the driver: the end of a batch is the last record that was read, since
Kinesis cannot say where an open shard ends. What a batch held can be read again between its two offsets.
Workers are other processes, so a stream is named by text: an opener (`module:function`) and what it is called with.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

from understudy.core.import_path import load
from understudy.core.ports import Position, Stream
from understudy.ingest.offsets import Offset, Passed, Place, complete_of, offset_of, places_of, read_between, read_on

NAME = "understudy"
SCHEMA = "partition string, after string, position string, time_s double, frame binary, complete map<string, double>"
_IDLE_S = 0.05
"""How long to wait when nothing came: Spark asks again at once."""

Row = tuple[Any, ...]


class FrameSource(DataSource):
    """Frames as rows: partition, the position they stand behind, their own, when they came in, and their bytes.

    The first row of what was read now also tells how complete that is, see `complete_of`: the clock is that of the
    machine on which Spark's driver runs. What is read again tells nothing of it.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def simpleStreamReader(self, schema: StructType) -> "FrameReader":  # noqa: N802
        return FrameReader(dict(self.options))


class FrameReader(SimpleDataSourceStreamReader):
    """Reads a stream for Spark; its options are texts.

    opener, address: the stream is what the opener gives for the address
    stream:          the stream's name, by which a checkpoint is known to belong to it
    start:           positions from which a job without a checkpoint begins, as a JSON object
    max_bytes:       how much one batch covers at most
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._name, self._max_bytes = options["stream"], int(options["max_bytes"])
        self._stream: Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Workers get a copy of this reader, and open the stream for themselves.
        return {**self.__dict__, "_stream": None}

    def initialOffset(self) -> Offset:  # noqa: N802
        start: dict[str, Position | None] = json.loads(self._options["start"])
        return offset_of(self._name, {name: Place(position) for name, position in start.items()})

    def read(self, start: Offset) -> tuple[Iterator[Row], Offset]:
        places = places_of(start, self._name)
        records, end = read_on(self._opened(), places, max_bytes=self._max_bytes)
        if not records:
            time.sleep(_IDLE_S)
        complete = [complete_of(places, end), *itertools.repeat(None, len(records))]
        rows = [_row(one, told) for one, told in zip(records, complete, strict=False)]
        return iter(rows), offset_of(self._name, end)

    def readBetweenOffsets(self, start: Offset, end: Offset) -> Iterator[Row]:  # noqa: N802
        first, last = (places_of(offset, self._name) for offset in (start, end))
        yield from map(_row, read_between(self._opened(), first, last, max_bytes=self._max_bytes))

    def commit(self, end: Offset) -> None:
        """Nothing: positions are stored together with the data they cover."""

    def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = _open(self._options["opener"], self._options["address"])
        return self._stream


def open_once(opener: str, address: str) -> None:
    """Open a stream and close it: whether a worker could read it."""
    _open(opener, address).close()


def _open(opener: str, address: str) -> Stream:
    stream: Stream = load(opener, what="opener")(address)
    return stream


def _row(one: Passed, complete: Mapping[str, float] | None = None) -> Row:
    return (*astuple(one), complete)
