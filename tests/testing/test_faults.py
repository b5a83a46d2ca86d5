"""The faulty parts fail as documented, and in no other way."""

import errno
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from tests.streams.memory import MemoryStream
from understudy.core.errors import StorageFailed
from understudy.core.names import PlayerName, player_name
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ports import Ack, LiveModels, TicketBatch
from understudy.testing import Faults, FaultyLink, FaultyStream, FaultySync, ManualClock
from understudy.testing.streams import read_all, sample_frames

FRAMES = sample_frames(20)
RNG = np.random.default_rng(0)


class RecordingLink:
    """Accepts and remembers everything."""

    recording_rate = 1.0

    def __init__(self) -> None:
        self.taken: list[Frame] = []
        self.specs: list[GameSpec] = []
        self.is_closed = False

    def register(self, spec: GameSpec) -> None:
        self.specs.append(spec)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        self.taken += frames
        return [Ack(True)] * len(frames)

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        return None

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        return TicketBatch(entry=0)

    def policy(self, model_no: int) -> bytes:
        raise KeyError(model_no)

    def close(self) -> None:
        self.is_closed = True


def raws(stream: MemoryStream) -> list[bytes]:
    return [record.raw for records in read_all(stream).values() for record in records]


def test_without_faults_nothing_changes():
    inner = MemoryStream()
    stream = FaultyStream(inner, Faults(), RNG)
    assert all(ack.accepted for ack in stream.append(FRAMES))
    assert raws(inner) == [frame.encode() for frame in FRAMES]
    assert stream.partitions() == inner.partitions()
    assert stream.read("p0", None, max_bytes=1, wait_s=0.0) == inner.read(
        "p0", None, max_bytes=1, wait_s=0.0
    )
    stream.close()


def test_duplicates_and_reorders_reach_the_stream():
    inner = MemoryStream()
    assert all(
        ack.accepted
        for ack in FaultyStream(inner, Faults(duplicate=1.0, reorder=1.0), RNG).append(FRAMES)
    )
    stored = raws(inner)
    assert sorted(stored) == sorted([frame.encode() for frame in FRAMES] * 2)
    assert stored != [frame.encode() for frame in FRAMES for _ in range(2)]


def test_failed_frames_are_not_stored_and_frames_of_lost_responses_are():
    inner = MemoryStream()
    acks = FaultyStream(inner, Faults(fail=0.5), RNG).append(FRAMES)
    durable = [frame.encode() for frame, ack in zip(FRAMES, acks, strict=True) if ack.accepted]
    assert 0 < len(durable) < 20
    assert raws(inner) == durable
    inner = MemoryStream()
    with pytest.raises(StorageFailed):
        FaultyStream(inner, Faults(lose_answer=1.0), RNG).append(FRAMES)
    assert len(raws(inner)) == 20


def test_a_faulty_link_acknowledges_what_was_really_accepted():
    inner = RecordingLink()
    link = FaultyLink(inner, Faults(duplicate=0.5, reorder=0.5, fail=0.3), np.random.default_rng(1))
    players = {FRAMES[0].session: player_name("ada")}
    acks = link.send(FRAMES, players)
    accepted = [frame for frame, ack in zip(FRAMES, acks, strict=True) if ack.accepted]
    assert 0 < len(accepted) < 20
    assert {frame.chunk_no for frame in inner.taken} == {frame.chunk_no for frame in accepted}
    assert len(inner.taken) > len(accepted)
    assert all(ack.retry_after_s > 0 for ack in acks if not ack.accepted)
    with pytest.raises(TimeoutError):
        FaultyLink(inner, Faults(lose_answer=1.0), RNG).send(FRAMES[:1], players)
    link.close()
    assert inner.is_closed


def test_a_faulty_sync_fails_at_the_chosen_calls(tmp_path: Path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    sync = FaultySync(eio_at=[2], full_at=range(4, 6))
    codes = []
    for _ in range(6):
        try:
            sync(descriptor)
            codes.append(0)
        except OSError as error:
            codes.append(error.errno or -1)
    os.close(descriptor)
    assert codes == [0, errno.EIO, 0, errno.ENOSPC, errno.ENOSPC, 0]
    assert sync.calls == 6


def test_a_manual_clock_moves_by_advance_and_by_waiting():
    clock = ManualClock(100.0)
    event = Event()
    assert not clock.wait(event, 5.0)
    assert (clock.now(), clock.monotonic()) == (105.0, 105.0)
    event.set()
    assert clock.wait(event, 5.0)
    clock.advance(-5.0)
    assert clock.now() == 100.0
