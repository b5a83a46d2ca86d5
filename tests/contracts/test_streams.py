"""The in-memory and file streams pass the Stream contract."""

import os
from pathlib import Path

import pytest

from tests.streams.memory import MemoryStream
from understudy.ports import Stream
from understudy.streams.file import FileStream
from understudy.testing.streams import StreamContract, read_all


class TestMemoryStream(StreamContract):
    def make(self) -> Stream:
        return MemoryStream(num_partitions=1)

    def end(self, stream: Stream) -> Stream:
        assert isinstance(stream, MemoryStream)
        for partition in stream.partitions():
            stream.split(partition.id)
        return stream

    def trim(self, stream: Stream, partition: str) -> Stream:
        assert isinstance(stream, MemoryStream)
        stream.trim(partition, keep_last=2)
        return stream


class TestMemoryStreamOfThreePartitions(TestMemoryStream):
    def make(self) -> Stream:
        return MemoryStream(num_partitions=3)


class TestFileStream(StreamContract):
    roll_bytes = 32 << 20

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "stream"

    def make(self) -> Stream:
        return FileStream(self.path, roll_bytes=self.roll_bytes)

    def reopen(self, stream: Stream) -> Stream:
        return FileStream(self.path, roll_bytes=self.roll_bytes)

    def end(self, stream: Stream) -> Stream:
        stream.close()
        return FileStream(self.path, roll_bytes=self.roll_bytes)


class TestFileStreamThatRolls(TestFileStream):
    """A new file for every append, so that reads cross files and old ones can be trimmed."""

    roll_bytes = 1

    def trim(self, stream: Stream, partition: str) -> Stream:
        assert isinstance(stream, FileStream)
        records = read_all(stream)[partition]
        for path in (self.path / partition).glob("*.log"):
            os.utime(path, (1.0, 1.0))
        assert stream.trim({partition: records[-2].position}, before_s=2.0) > 0
        return stream
