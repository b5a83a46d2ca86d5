"""A replay restored from its state and the stored chunks draws the same bits as the one that was
never stopped."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experience.trajectories import Step
from tests.learn.sessions import DISCOUNT, GAME, Piece, deliveries, session_id
from understudy.algorithm import Transitions
from understudy.core import tensors
from understudy.core.errors import ConfigError
from understudy.experience.chunk import Chunk, ChunkId
from understudy.learn.device_replay import DeviceReplay
from understudy.learn.replay import HostReplay
from understudy.replay import ReplayConfig


class Stored:
    """What a run's store would read again."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkId, Chunk] = {}

    def keep(self, chunk: Chunk) -> Chunk:
        self.chunks[chunk.meta.session, chunk.meta.chunk_no] = chunk
        return chunk

    def read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        assert len(set(ids)) == len(ids)
        return (self.chunks[one] for one in ids if one in self.chunks)


def through_a_file(state: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
    arrays, facts = state
    columns, _ = tensors.decode(tensors.encode(arrays, {}))
    return columns, json.loads(json.dumps(facts))


def restored(held: HostReplay, stored: Stored) -> HostReplay:
    again = HostReplay(GAME, held.needs, held.config)
    again.restore(*through_a_file(held.state()), stored.read)
    return again


def assert_equal(one: Any, other: Any) -> None:
    assert one.n_sampleable == other.n_sampleable
    if one.n_sampleable == 0:
        return
    first, second = (held.draw(3, rng=np.random.default_rng(1), beta=0.7) for held in (one, other))
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.stamps, second.stamps)
    for a, b in zip(first.batches[:6], second.batches[:6], strict=True):
        for name in a if isinstance(a, dict) else (...,):
            np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]))


def piece(number: int, *, session: int = 0, n: int = 5) -> Piece:
    steps = tuple(
        Step(n * number + i, n * number + i + 1, 1.0, 0, number == 0 and i == 0, None)
        for i in range(n)
    )
    return Piece(session, number, steps)


@settings(max_examples=120, deadline=None)
@given(
    deliveries(),
    st.tuples(st.integers(1, 5), st.sampled_from([1, 4]), st.booleans()),
    st.sampled_from([96, 192, 4_096]),
    st.data(),
)
def test_every_draw_after_a_restore_has_the_same_bits(order, shape, capacity, data):
    wanted = Transitions(
        batch=8, discount=DISCOUNT, n_step=shape[0], stack=shape[1], prioritised=shape[2]
    )
    held = HostReplay(GAME, wanted, ReplayConfig(capacity=capacity))
    stored = Stored()
    stop = data.draw(st.integers(0, len(order)))
    doomed = data.draw(st.integers(0, len(order) - 1))
    twins = [held]
    for number, one in enumerate(order):
        if number == stop:
            twins.append(restored(held, stored))
        try:
            became = {
                twin.insert(stored.keep(one.chunk()), weight=1 + number % 2 * shape[2])
                for twin in twins
            }
        except ConfigError:  # longer than the whole ring
            return
        assert len(became) == 1
        if number == doomed:
            for twin in twins:
                twin.evict(session_id(one.session), one.chunk_no)
        if held.n_sampleable:
            drawn = held.draw(1, rng=np.random.default_rng(number))
            for twin in twins:
                twin.feedback(drawn.rows, drawn.stamps, np.arange(8.0))
    if len(twins) == 1:
        twins.append(restored(held, stored))
    for number in range(3):
        assert len({twin.close(session_id(number)) for twin in twins}) == 1
    assert_equal(*twins)


def test_chunks_that_are_gone_leave_with_what_was_made_of_them():
    wanted = Transitions(batch=8, n_step=3, stack=2, prioritised=True)
    held = HostReplay(GAME, wanted, ReplayConfig(capacity=256))
    stored = Stored()
    for number in range(3):
        held.insert(stored.keep(piece(number).chunk()))
        held.insert(stored.keep(piece(number, session=1).chunk()))
    del stored.chunks[session_id(0), 1]
    again = restored(held, stored)
    # Chunk 0 keeps its three starts; chunk 2 repeats rows of the one that is gone.
    assert again.n_sampleable == held.n_sampleable - 10
    for twin in (held, again):
        twin.evict(session_id(0), 1)
        twin.evict(session_id(0), 2)
    assert_equal(held, again)


def test_a_replay_that_is_in_use_can_go_back():
    wanted = Transitions(batch=8, n_step=3)
    held = HostReplay(GAME, wanted, ReplayConfig(capacity=64))
    stored = Stored()
    held.insert(stored.keep(piece(0).chunk()))
    saved = held.state()
    before = held.draw(1, rng=np.random.default_rng(0))
    for number in range(1, 9):
        held.insert(stored.keep(piece(number).chunk()))
    held.restore(*saved, stored.read)
    np.testing.assert_array_equal(
        held.draw(1, rng=np.random.default_rng(0)).batches.reward, before.batches.reward
    )
    assert held.n_steps_inserted == 5
    assert held.insert(piece(1).chunk()) == 5


def test_a_state_of_other_settings_is_rejected_by_name():
    held = HostReplay(GAME, Transitions(batch=8, n_step=3), ReplayConfig(capacity=64))
    other = HostReplay(GAME, Transitions(batch=8, n_step=2), ReplayConfig(capacity=128))
    with pytest.raises(ConfigError, match=r"n_step was 3, now 2.* capacity was 64, now 128"):
        other.restore(*held.state(), Stored().read)


@pytest.mark.parametrize("make", [HostReplay, DeviceReplay])
def test_a_restored_replay_forgets_a_huge_priority_when_the_saved_one_does(make):
    wanted = Transitions(batch=8, prioritised=True)
    held, again = (make(GAME, wanted, ReplayConfig(capacity=64, alpha=0.7)) for _ in range(2))
    stored = Stored()
    held.insert(stored.keep(piece(0, n=8).chunk()))
    rows = np.arange(8)
    held.feedback(rows, np.ones(8, np.int32), np.geomspace(1e-3, 1e6, 8, dtype=np.float32))
    for _ in range(9):  # the first period ends, the second begins
        held.feedback(rows, np.ones(8, np.int32), np.full(8, 0.3, np.float32))
    again.restore(*through_a_file(held.state()), stored.read)
    for number in range(1, 12):
        for twin in (held, again):
            twin.insert(stored.keep(piece(0, session=number, n=4).chunk()))
            if number < 8:
                drawn = twin.draw(1, rng=np.random.default_rng(number))
                twin.feedback(drawn.rows, drawn.stamps, np.full((1, 8), 0.3, np.float32))
        np.testing.assert_array_equal(held.state()[0]["masses"], again.state()[0]["masses"])
    assert max(held.state()[0]["masses"]) < 1


def test_a_state_of_an_earlier_version_with_one_largest_priority_is_restored():
    wanted = Transitions(batch=8, prioritised=True)
    held, again = (HostReplay(GAME, wanted, ReplayConfig(capacity=64)) for _ in range(2))
    stored = Stored()
    held.insert(stored.keep(piece(0).chunk()))
    arrays, facts = held.state()
    del facts["priorities"]
    again.restore(arrays, facts | {"largest": 32.0}, stored.read)
    again.insert(piece(1).chunk())
    assert max(again.state()[0]["masses"]) == pytest.approx(32.0**0.6)
