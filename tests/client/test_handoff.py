"""The handoff is bounded, keeps each session in order, and reports every block it drops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.fakes import FakeClock
from understudy.client.session import Handoff
from understudy.core.names import new_session
from understudy.experience.builder import BlockPool, ChunkBuilder
from understudy.experience.chunk import EpisodeNote
from understudy.experience.game import game_spec

SPEC = game_spec("my-game", obs=1, actions=2)


def blocks(pool, n_steps):
    one = ChunkBuilder(SPEC, session=new_session(0.0), pool=pool)
    one.begin(EpisodeNote(row=0))
    for _ in range(n_steps + 1):
        one.decide(np.zeros(1, np.float32), 0)
    block = one.take()
    assert block is not None
    return block


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(st.sampled_from(["put a", "put b", "put c", "take"]), max_size=60))
def test_blocks_and_losses_add_up_in_order(calls):
    pool = BlockPool(SPEC, max_steps=4)
    handoff: Handoff[str] = Handoff(pool, clock=FakeClock(), max_blocks=3)
    put: dict[str, int] = {}
    seen: dict[str, int] = {}
    for at, call in enumerate([*calls, *["take"] * 10]):
        if call != "take":
            owner = call[-1]
            handoff.put(owner, blocks(pool, 1 + at % 3))
            put[owner] = put.get(owner, 0) + 1 + at % 3
            continue
        item = handoff.take()
        if item is not None:
            steps = item.lost_steps + (item.block.n_steps if item.block else 0)
            assert (item.lost_steps > 0) == (item.lost_blocks > 0)
            seen[item.owner] = seen.get(item.owner, 0) + steps
    assert seen == put
    assert handoff.put_steps == sum(put.values())
    assert handoff.take() is None


def test_large_blocks_lower_the_bound():
    pool = BlockPool(game_spec("x", obs=10_000, actions=2))
    handoff: Handoff[str] = Handoff(pool, clock=FakeClock(), max_bytes=3 * pool.set_bytes)
    for _ in range(5):
        handoff.put("a", blocks(BlockPool(SPEC), 1))
    items = [item for item in iter(handoff.take, None) if item.block]
    assert len(items) == 3


class Counting(FakeClock):
    waited_s = 0.0

    def wait(self, event, timeout_s):
        self.waited_s += timeout_s
        return False


def test_put_sleeps_when_the_queue_is_half_full():
    clock = Counting()
    pool = BlockPool(SPEC)
    handoff: Handoff[str] = Handoff(pool, clock=clock, max_blocks=4)
    for _ in range(2):
        handoff.put("a", blocks(pool, 1))
    assert clock.waited_s == 0.0
    handoff.put("a", blocks(pool, 1))
    assert clock.waited_s == pytest.approx(0.0005)
    assert handoff.filled.is_set()
