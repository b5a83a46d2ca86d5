"""The contract of the Stream port, as tests to subclass.

Define `make` and, if the stream supports them, `reopen`, `end` and `trim`; tests whose hook is
missing are skipped.
"""

import json
import threading
import unittest
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from understudy.core.errors import Closed, PositionGone
from understudy.experience.frame import MAX_BODY_BYTES, Frame, FrameKind
from understudy.ports import Position, Record, Stream
from understudy.testing.samples import cart_spec, random_session, stamped


def sample_frames(count: int, *, seed: int = 0) -> list[Frame]:
    """Stamped frames of one session."""
    rng = np.random.default_rng(seed)
    return list(stamped(random_session(cart_spec(), rng, n_chunks=count)))


def read_all(stream: Stream, *, max_bytes: int = 1 << 20) -> dict[str, list[Record]]:
    """Every record of every partition, parents first."""
    by_partition: dict[str, list[Record]] = {}
    for partition in stream.partitions():
        records: list[Record] = []
        position: Position | None = None
        while (
            read := stream.read(partition.id, position, max_bytes=max_bytes, wait_s=0.0)
        ).records:
            records += read.records
            position = read.next
        by_partition[partition.id] = records
    return by_partition


def _raws(by_partition: dict[str, list[Record]]) -> Counter[bytes]:
    return Counter(record.raw for records in by_partition.values() for record in records)


def _gone(stream: Stream, partition: str, position: Position) -> PositionGone | None:
    try:
        stream.read(partition, position, max_bytes=1 << 20, wait_s=0.0)
    except PositionGone as error:
        return error
    return None


class StreamContract:
    """Tests of a Stream: subclass, define `make`, and run with pytest."""

    timeout_s = 20.0
    """Long enough for everything that a test waits for."""

    def make(self) -> Stream:
        """Create an empty stream."""
        raise NotImplementedError(
            "a subclass of StreamContract must define make(): the stream under test"
        )

    def reopen(self, stream: Stream) -> Stream:
        """Open a new stream over the data of a closed one."""
        raise unittest.SkipTest("this stream does not survive close")

    def end(self, stream: Stream) -> Stream:
        """End every existing partition (reshard, or close); returns the stream to continue with."""
        raise unittest.SkipTest("a test cannot end this stream's partitions")

    def trim(self, stream: Stream, partition: str) -> Stream:
        """Trim at least a partition's first record but not its last; returns the stream to use."""
        raise unittest.SkipTest("a test cannot trim this stream")

    # --- append -----------------------------------------------------------------------------------

    def test_appended_frames_are_read_as_the_same_bytes(self) -> None:
        stream = self.make()
        frames = sample_frames(5)
        acks = [*stream.append(frames[:2]), *stream.append(frames[2:])]
        assert [ack.accepted for ack in acks] == [True] * 5
        assert _raws(read_all(stream)) == Counter(frame.encode() for frame in frames)
        stream.close()

    def test_appending_nothing_returns_no_acks(self) -> None:
        stream = self.make()
        assert list(stream.append([])) == []
        stream.close()

    def test_accepted_frames_survive_reopening(self) -> None:
        stream = self.make()
        frames = sample_frames(6)
        assert all(ack.accepted for ack in stream.append(frames))
        stream.close()
        stream = self.reopen(stream)
        assert _raws(read_all(stream)) == Counter(frame.encode() for frame in frames)
        stream.close()

    def test_a_frame_that_is_too_large_is_refused_alone(self) -> None:
        stream = self.make()
        frames = sample_frames(2)
        large = replace(frames[0], body=bytes(MAX_BODY_BYTES + 1))
        acks = stream.append([frames[0], large, frames[1]])
        assert [ack.accepted for ack in acks] == [True, False, True]
        assert acks[1].refused
        assert _raws(read_all(stream)) == Counter(frame.encode() for frame in frames)
        stream.close()

    def test_an_invalid_frame_does_not_block_others(self) -> None:
        stream = self.make()
        frames = sample_frames(2)
        odd = [
            replace(frames[0], kind=FrameKind.LATE_REWARD),
            replace(frames[0], chunk_no=(1 << 64) - 1),
            replace(frames[0], flags=7),
            replace(frames[0], body_crc=0),
            replace(frames[0], body=b""),
        ]
        stream.append([frames[0], *odd, frames[1]])
        assert set(_raws(read_all(stream))) >= {frame.encode() for frame in frames}
        stream.close()

    def test_many_threads_append_at_once(self) -> None:
        stream = self.make()
        lots = [sample_frames(12, seed=seed) for seed in range(8)]

        def append(frames: Sequence[Frame]) -> list[bool]:
            starts = range(0, len(frames), 3)
            return [
                ack.accepted for start in starts for ack in stream.append(frames[start : start + 3])
            ]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(append, lots)) == [[True] * 12] * 8
        assert _raws(read_all(stream)) == Counter(
            frame.encode() for frames in lots for frame in frames
        )
        stream.close()

    # --- read -------------------------------------------------------------------------------------

    def test_every_read_can_be_repeated(self) -> None:
        stream = self.make()
        stream.append(sample_frames(8))
        assert read_all(stream) == read_all(stream)
        stream.close()

    def test_reading_continues_after_any_record(self) -> None:
        stream = self.make()
        for frame in sample_frames(7):
            stream.append([frame])
        for partition, records in read_all(stream).items():
            for index, record in enumerate(records):
                read = stream.read(partition, record.position, max_bytes=1 << 20, wait_s=0.0)
                assert list(read.records) == records[index + 1 :]
        stream.close()

    def test_max_bytes_limits_a_read_but_one_record_is_always_returned(self) -> None:
        stream = self.make()
        stream.append(sample_frames(9))
        partition, records = max(read_all(stream).items(), key=lambda item: len(item[1]))
        largest = max(len(record.raw) for record in records)
        position: Position | None = None
        received: list[Record] = []
        while (read := stream.read(partition, position, max_bytes=2 * largest, wait_s=0.0)).records:
            assert sum(len(record.raw) for record in read.records) <= 2 * largest
            received = [*received, *read.records]
            position = read.next
        assert received == records
        assert list(stream.read(partition, None, max_bytes=1, wait_s=0.0).records) == records[:1]
        stream.close()

    def test_a_read_at_the_end_returns_nothing(self) -> None:
        stream = self.make()
        stream.append(sample_frames(1))
        for partition, records in read_all(stream).items():
            position = records[-1].position if records else None
            read = stream.read(partition, position, max_bytes=1 << 20, wait_s=0.0)
            assert (list(read.records), read.next, read.ended) == ([], position, False)
        stream.close()

    def test_a_read_waits_for_the_first_record(self) -> None:
        stream = self.make()
        (first, second) = sample_frames(2)
        stream.append([first])
        partition, records = next(
            (name, records) for name, records in read_all(stream).items() if records
        )
        received: list[Record] = []

        def wait() -> None:
            received.extend(
                stream.read(
                    partition, records[-1].position, max_bytes=1 << 20, wait_s=self.timeout_s
                ).records
            )

        reader = threading.Thread(target=wait)
        reader.start()
        stream.append([second])
        reader.join(self.timeout_s)
        assert [record.raw for record in received] == [second.encode()]
        stream.close()

    def test_positions_survive_json(self) -> None:
        stream = self.make()
        stream.append(sample_frames(4))
        for partition, records in read_all(stream).items():
            for index, record in enumerate(records):
                position = json.loads(json.dumps(record.position))
                assert isinstance(position, str)
                read = stream.read(partition, Position(position), max_bytes=1 << 20, wait_s=0.0)
                assert list(read.records) == records[index + 1 :]
        stream.close()

    def test_positions_stay_valid_after_reopening(self) -> None:
        stream = self.make()
        stream.append(sample_frames(6))
        before = read_all(stream)
        stream.close()
        stream = self.reopen(stream)
        for partition, records in before.items():
            for index, record in enumerate(records):
                read = stream.read(partition, record.position, max_bytes=1 << 20, wait_s=0.0)
                assert [record.raw for record in read.records] == [
                    record.raw for record in records[index + 1 :]
                ]
        stream.close()

    def test_a_trimmed_position_is_gone_and_the_earliest_can_be_read(self) -> None:
        stream = self.make()
        for frame in sample_frames(6):
            stream.append([frame])
        partition, records = max(read_all(stream).items(), key=lambda item: len(item[1]))
        stream = self.trim(stream, partition)
        remaining = list(stream.read(partition, None, max_bytes=1 << 20, wait_s=0.0).records)
        assert 0 < len(remaining) < len(records)
        assert remaining == records[-len(remaining) :]
        error = _gone(stream, partition, records[0].position)
        assert error is not None, "a trimmed position was read as if nothing were missing"
        assert error.position == records[0].position
        earliest = None if error.earliest is None else Position(error.earliest)
        assert (
            list(stream.read(partition, earliest, max_bytes=1 << 20, wait_s=0.0).records)
            == remaining
        )
        stream.close()

    # --- partitions -------------------------------------------------------------------------------

    def test_an_ended_partition_reports_its_end_once_it_is_read(self) -> None:
        stream = self.make()
        frames = sample_frames(5)
        stream.append(frames)
        before = [partition.id for partition in stream.partitions()]
        stream = self.end(stream)
        raws: Counter[bytes] = Counter()
        for partition in before:
            position = None
            ended = False
            while not ended:
                read = stream.read(partition, position, max_bytes=1, wait_s=0.0)
                assert read.records or read.ended
                raws.update(record.raw for record in read.records)
                position = read.next
                ended = read.ended
            assert stream.read(partition, position, max_bytes=1, wait_s=0.0).ended
        assert raws == Counter(frame.encode() for frame in frames)
        stream.close()

    def test_children_name_their_parents_and_are_listed_after_them(self) -> None:
        stream = self.make()
        stream.append(sample_frames(3))
        stream = self.end(stream)
        stream.append(sample_frames(3, seed=1))
        names = [partition.id for partition in stream.partitions()]
        assert len(set(names)) == len(names)
        for index, partition in enumerate(stream.partitions()):
            assert all(
                names.index(parent) < index for parent in partition.parents if parent in names
            )
        assert sum(_raws(read_all(stream)).values()) == 6
        stream.close()

    # --- close ------------------------------------------------------------------------------------

    def test_close_may_be_called_twice_and_ends_appending(self) -> None:
        stream = self.make()
        stream.append(sample_frames(1))
        stream.close()
        stream.close()
        try:
            stream.append(sample_frames(1))
        except Closed:
            return
        raise AssertionError("a closed stream accepted a frame")
