"""What a Spark source reads: offsets of records that were really read, and the same records again between two."""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import pytest
from structlog.testing import capture_logs

from understudy.core.errors import ConfigError, PositionGone, Unreachable
from understudy.core.frame import Frame
from understudy.core.ports import Partition, Position, Read, Record
from understudy.ingest.offsets import Passed, Place, first_left_out, offset_of, places_of, read_between, read_on
from understudy.streams.memory import MemoryStream
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec, random_session, stamped
from understudy.testing.streams import read_all

SPEC = cart_spec()
START: Mapping[str, Place] = {}


class Lane:
    """A stream in memory and somebody who fills it."""

    def __init__(self, partitions: int = 2) -> None:
        self.stream: MemoryStream = MemoryStream(partitions, clock=ManualClock())
        self._rng = np.random.default_rng(8)

    def send(self, n_sessions: int = 6, n_chunks: int = 4) -> list[Frame]:
        frames = [
            one for _ in range(n_sessions) for one in stamped(random_session(SPEC, self._rng, n_chunks=n_chunks))
        ]  # fmt: skip
        self.stream.append(frames)
        return frames

    def batches(self, places: Mapping[str, Place] = START, *, max_bytes: int = 1 << 12):
        """Batches until nothing more comes: where each began, its records, where it ended."""
        while True:
            records, end = read_on(self.stream, places, max_bytes=max_bytes)
            if not records and end == places:
                return
            yield places, records, end
            places = end


def raws(records: list[Passed]) -> list[bytes]:
    return [one.raw for one in records]


def test_batches_cover_every_record_once_and_in_order():
    lane = Lane()
    lane.send()
    batches = list(lane.batches())
    assert len(batches) > 5
    for name, records in read_all(lane.stream).items():
        seen = [one for _, found, _ in batches for one in found if one.partition == name]
        assert [one.position for one in seen] == [one.position for one in records]
        assert [one.after for one in seen] == [None, *(one.position for one in records[:-1])]


def test_what_lies_between_two_offsets_is_read_again_byte_for_byte():
    lane = Lane()
    lane.send()
    batches = list(lane.batches())
    lane.send()
    lane.stream.split("p0")
    lane.send()
    for start, records, end in batches:
        for max_bytes in (1, 1 << 20):
            again = list(read_between(lane.stream, start, end, max_bytes=max_bytes))
            assert sorted(again, key=str) == sorted(records, key=str)
    whole = list(read_between(lane.stream, START, batches[-1][2], max_bytes=1))
    assert len(whole) == sum(len(records) for _, records, _ in batches)


def test_children_are_read_when_their_parents_have_ended():
    lane = Lane(1)
    lane.send()
    (parent,) = [one.id for one in lane.stream.partitions()]
    lane.stream.split(parent)
    lane.send()
    order = [one.partition for _, records, _ in lane.batches() for one in records]
    last_of_parent = max(index for index, name in enumerate(order) if name == parent)
    assert set(order[: last_of_parent + 1]) == {parent}
    assert len(set(order)) > 1
    start, end = START, list(lane.batches())[-1][2]
    again = [one.partition for one in read_between(lane.stream, start, end, max_bytes=1)]
    assert again.index(next(name for name in again if name != parent)) == last_of_parent + 1


def test_a_large_record_comes_alone_and_a_small_budget_still_moves_on():
    lane = Lane()
    frames = lane.send()
    seen = [raw for _, records, _ in lane.batches(max_bytes=1) for raw in raws(records)]
    assert sorted(seen) == sorted(frame.encode() for frame in frames)


def test_an_offset_survives_json_and_equal_ones_are_equal_texts():
    places = {"b": Place(Position("7"), True), "a": Place()}
    offset = offset_of("kafka://k/t", places)
    assert places_of(json.loads(json.dumps(offset)), "kafka://k/t") == places
    assert json.dumps(offset) == json.dumps(offset_of("kafka://k/t", dict(reversed(places.items()))))


def test_a_checkpoint_of_another_stream_is_refused():
    offset = offset_of("kafka://k/old", {})
    with pytest.raises(ConfigError, match="is of kafka://k/old, not of kafka://k/new; name another folder"):
        places_of(offset, "kafka://k/new")


def test_a_trimmed_position_is_told_of_and_read_on_from_the_earliest():
    lane = Lane(1)
    lane.send(2)
    _, _, place = next(iter(lane.batches(max_bytes=1)))
    lane.stream.trim("p0", keep_last=3)
    with capture_logs() as logs:
        records, _ = read_on(lane.stream, place, max_bytes=1 << 20)
    assert [one["event"] for one in logs] == ["position_gone"]
    assert len(records) == 3
    assert records[0].after is None, "there is nothing before it any more"


def test_a_replay_of_what_was_trimmed_says_so_and_gives_what_is_left_of_it():
    lane = Lane(1)
    lane.send(2)
    batches = list(lane.batches(max_bytes=1))
    lane.stream.trim("p0", keep_last=2)
    with capture_logs() as logs:
        assert list(read_between(lane.stream, batches[2][0], batches[2][2], max_bytes=1)) == []
    assert [one["event"] for one in logs] == ["position_gone", "batch_gone"]
    with capture_logs() as logs:
        left = list(read_between(lane.stream, batches[2][0], batches[6][2], max_bytes=1))
    assert [one["event"] for one in logs] == ["position_gone"]
    assert raws(left) == raws(batches[6][1])


class Throttled(MemoryStream):
    """A stream that cannot be read for a while, or gives nothing though nothing was trimmed."""

    trouble = ""

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        if self.trouble:
            raise Unreachable(self.trouble)
        return super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)


def test_a_replay_that_cannot_be_read_now_is_an_error_that_a_retry_mends_and_nothing_is_called_gone():
    lane = Lane(1)
    stream = lane.stream = Throttled(1, clock=ManualClock())
    lane.send(2)
    batches = list(lane.batches(max_bytes=1))
    start, records, end = batches[2]
    stream.trouble = "takes no more calls now"
    with capture_logs() as logs, pytest.raises(Unreachable, match="no more calls"):
        list(read_between(stream, start, end, max_bytes=1))
    assert logs == []
    stream.trouble = ""
    assert list(read_between(stream, start, end, max_bytes=1)) == records


def test_a_record_that_does_not_come_though_nothing_was_trimmed_is_asked_for_again():
    lane = Lane(1)
    lane.send(2)
    start, _, _ = list(lane.batches(max_bytes=1))[2]
    with capture_logs() as logs, pytest.raises(Unreachable, match="does not give it now, though nothing was trimmed"):
        list(read_between(lane.stream, start, {"p0": Place(Position("999"))}, max_bytes=1))
    assert logs == []


def test_partitions_that_the_stream_has_forgotten_leave_the_offset():
    lane = Lane()
    lane.send()
    _, end = read_on(lane.stream, {"gone": Place(Position("3"))}, max_bytes=1 << 20)
    assert set(end) == {"p0", "p1"}
    with capture_logs() as logs:
        between = read_between(lane.stream, START, {"gone": Place(Position("3"))}, max_bytes=1)
        assert list(between) == []
    assert [one["event"] for one in logs] == ["partition_gone"]


def test_what_was_read_to_its_end_and_is_not_stored_is_left_out():
    lane = Lane(2)
    lane.send()
    *_, (_, _, end) = lane.batches()
    stored = {name: place.position for name, place in end.items()}
    assert first_left_out(lane.stream, end, stored) is None
    first = read_all(lane.stream)["p1"][0].position
    for behind in (None, first):
        assert first_left_out(lane.stream, end, stored | {"p1": behind}) == ("p1", end["p1"].position)
    # Of what the stream or the offset does not know, and of what a batch will show, nothing is said.
    assert first_left_out(lane.stream, end, stored | {"gone": None}) is None
    assert first_left_out(lane.stream, {"p0": end["p0"]}, stored | {"p1": None}) is None
    assert first_left_out(lane.stream, end | {"p1": Place(first)}, stored | {"p1": None}) is None


class Endless:
    """A stream to which more comes than anybody reads; its records before a position were trimmed."""

    def __init__(self, earliest: int) -> None:
        self._earliest, self.reads = earliest, 0

    def partitions(self) -> list[Partition]:
        return [Partition("p0")]

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        self.reads += 1
        number = self._earliest if after is None else int(after) + 1
        if number < self._earliest:
            raise PositionGone(str(after), earliest=str(self._earliest - 1))
        return Read([Record(Position(str(number)), 0.0, BODY)], Position(str(number)), False)

    def append(self, frames: Sequence[Frame]) -> NoReturn:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


BODY = bytes(1 << 20)


@pytest.mark.parametrize("start", [{}, {"p0": Place(Position("3"))}])
def test_a_replay_of_what_was_trimmed_ends_although_more_comes_all_the_time(start: Mapping[str, Place]):
    stream = Endless(100)
    with capture_logs() as logs:
        assert list(read_between(stream, start, {"p0": Place(Position("7"))}, max_bytes=1 << 20)) == []
    assert logs[-1]["event"] == "batch_gone"
    assert 16 < stream.reads < 100, "no more than a batch may cover, and a batch that is there is found"


def test_a_record_that_does_not_come_although_more_comes_is_asked_for_again():
    start = {"p0": Place(Position("100"))}
    with pytest.raises(Unreachable, match="does not give it now, though nothing was trimmed"):
        list(read_between(Endless(100), start, {"p0": Place(Position("7"))}, max_bytes=1 << 20))
