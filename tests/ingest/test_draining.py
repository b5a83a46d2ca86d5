"""When a drain is done: all that was there is stored, whatever clocks say and however fast more comes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from understudy.core.errors import ClaimLost, ConfigError, Corrupt, StorageFailed, StorageFull, Unreachable
from understudy.core.ports import Partition, Position, Read
from understudy.ingest.draining import Drain, leaving_the_rest
from understudy.ingest.offsets import Place, complete_of, read_on
from understudy.streams.memory import MemoryStream
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec, random_session, stamped

SPEC = cart_spec()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


class Told(MemoryStream):
    """A stream that says for itself how complete a read was, with records of a clock that is set wrong."""

    def __init__(self, clock: ManualClock, *, ahead_s: float, partitions: int = 2) -> None:
        self.time = clock
        super().__init__(partitions, clock=ManualClock(clock.now() + ahead_s))

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        asked_s = self.time.monotonic()
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        more = super().read(partition, read.next, max_bytes=1, wait_s=0.0).records
        return replace(read, complete_to_s=-math.inf if more else asked_s)


def send(stream: MemoryStream, rng: np.random.Generator, n_sessions: int = 6, n_chunks: int = 4) -> int:
    """Append the frames of some sessions; how many these were."""
    sessions = [random_session(SPEC, rng, n_chunks=n_chunks) for _ in range(n_sessions)]
    stream.append([frame for chunks in sessions for frame in stamped(chunks)])
    return n_sessions * n_chunks


def drained(stream: MemoryStream, rng: np.random.Generator, clock: ManualClock) -> tuple[int, bool]:
    """How many records are stored when a drain says it is done, with players who never pause; whether it said so."""
    drain, places, stored = Drain(clock.monotonic()), dict[str, Place](), 0
    for _ in range(200):
        before = places
        records, places = read_on(stream, before, max_bytes=1 << 12, clock=clock)
        stored += len(records)
        if records:
            drain.note(complete_of(before, places))
        if drain.is_done or (not records and places == before):
            return stored, True
        clock.advance(1.0)
        send(stream, rng, 1, 1)
    return stored, False


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_drain_is_done_when_all_was_read_whatever_the_clock_of_the_gateway_says(
    rng: np.random.Generator, ahead_s: float
):
    clock = ManualClock()
    stream = Told(clock, ahead_s=ahead_s)
    before = send(stream, rng)
    stored, is_done = drained(stream, rng, clock)
    assert is_done
    assert before <= stored < before + 100


def test_a_drain_goes_by_the_times_of_records_where_the_stream_is_of_this_machine(rng: np.random.Generator):
    clock = ManualClock()
    stream = MemoryStream(2, clock=clock)
    before = send(stream, rng)
    clock.advance(1.0)
    stored, is_done = drained(stream, rng, clock)
    assert is_done
    assert before <= stored < before + 100


class Hidden(Told):
    """A stream that tells of children when their parent was read to its end, as Kinesis may."""

    seen = False

    def partitions(self) -> Sequence[Partition]:
        return [one for one in super().partitions() if self.seen or not one.parents]

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        self.seen |= read.ended
        return read


def test_a_drain_is_not_done_before_the_children_of_what_ended_were_read(rng: np.random.Generator):
    clock = ManualClock()
    stream = Hidden(clock, ahead_s=3600.0, partitions=1)
    before = send(stream, rng)
    stream.split("p0")
    before += send(stream, rng)
    stored, is_done = drained(stream, rng, clock)
    assert is_done
    assert stored >= before


def test_a_batch_that_was_read_again_says_nothing_about_a_drain():
    drain = Drain(5.0)
    drain.note({})
    assert not drain.is_done
    drain.note({"a": 6.0, "b": 4.0})
    drain.note({})
    assert not drain.is_done
    drain.note({"a": -math.inf, "b": 5.0})
    assert drain.is_done, "each was read far enough at some time"


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [StorageFull("why"), Unreachable("why"), ClaimLost("why")])
def test_what_passes_by_itself_is_left_to_the_next_start_when_somebody_asked_to_stop(error: Exception):
    with capture_logs() as logs, leaving_the_rest():
        fail(error)
    assert [(one["event"], one["error"]) for one in logs] == [("not_drained", "why")]
    with capture_logs() as logs, pytest.raises(type(error)), leaving_the_rest(lambda: False):
        fail(error)
    assert logs == []


@pytest.mark.parametrize("error", [StorageFailed("why"), ConfigError("why"), Corrupt("why")])
def test_what_the_next_start_meets_again_is_raised_whoever_asked(error: Exception):
    with capture_logs() as logs, pytest.raises(type(error), match="why"), leaving_the_rest():
        fail(error)
    assert logs == []
