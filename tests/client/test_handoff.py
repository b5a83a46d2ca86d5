"""The handoff is bounded, keeps each session in order, and reports every block it drops."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.client.session import Handoff
from understudy.core.names import new_session
from understudy.experience.builder import ChunkBuilder, RowLayout
from understudy.experience.chunk import EpisodeNote
from understudy.experience.game import game_spec

SPEC = game_spec("my-game", obs=1, actions=2)


LAYOUT = RowLayout(SPEC)


def block_of(n_steps):
    one = ChunkBuilder(SPEC, session=new_session(0.0), layout=LAYOUT)
    one.begin(EpisodeNote(row=0))
    for _ in range(n_steps + 1):
        one.decide(np.zeros(1, np.float32), 0)
    block = one.take()
    assert block is not None
    return block


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(st.sampled_from(["put a", "put b", "put c", "take"]), max_size=60))
def test_blocks_and_losses_add_up_in_order(calls):
    handoff: Handoff[str] = Handoff(max_bytes=3 * block_of(1).size_bytes)
    put: dict[str, int] = {}
    seen: dict[str, int] = {}
    for at, call in enumerate([*calls, *["take"] * 10]):
        if call != "take":
            owner = call[-1]
            handoff.put(owner, block_of(1 + at % 3))
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


def test_the_queue_is_bounded_in_bytes_and_drops_its_oldest_blocks():
    small = block_of(1)
    large = block_of(400)
    handoff: Handoff[str] = Handoff(max_bytes=large.size_bytes + 4 * small.size_bytes)
    for _ in range(4):
        handoff.put("a", small)
    handoff.put("b", large)
    assert handoff.waiting_bytes == large.size_bytes + 4 * small.size_bytes
    handoff.put("a", small)
    assert handoff.waiting_bytes == large.size_bytes + 4 * small.size_bytes
    items = list(iter(handoff.take, None))
    assert [(item.owner, item.lost_blocks, item.lost_steps) for item in items] == [
        ("a", 1, 1),
        ("a", 0, 0),
        ("a", 0, 0),
        ("b", 0, 0),
        ("a", 0, 0),
    ]
    assert handoff.waiting_bytes == 0


def test_a_block_larger_than_the_bound_is_kept_alone():
    handoff: Handoff[str] = Handoff(max_bytes=10)
    handoff.put("a", block_of(1))
    handoff.put("a", block_of(2))
    (item,) = iter(handoff.take, None)
    assert item.block is not None
    assert (item.block.n_steps, item.lost_steps) == (2, 1)
    assert handoff.filled.is_set()
