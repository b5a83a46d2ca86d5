"""Two replays behind one contract."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.learn.sessions import GAME, session_id
from tests.learn.test_replay_state import Stored, assert_equal, piece, through_a_file
from understudy.core.algorithm import Transitions
from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError
from understudy.learn.mixed import MixedReplay
from understudy.learn.replay import HostReplay, ReplayConfig

NEEDS = Transitions(batch=8, prioritised=True)


def mixed(**more: Any) -> MixedReplay:
    parts = [HostReplay(GAME, NEEDS, ReplayConfig(capacity=capacity)) for capacity in (64, 1_024)]
    return MixedReplay(*parts, **{"player_rows": 3, **more})


def chunk(number: int, *, kind: str) -> Chunk:
    made = piece(number, session=kind == "player").chunk()
    return replace(made, meta=replace(made.meta, kind=kind))


def test_every_batch_takes_its_rows_from_each_part():
    held = mixed()
    held.insert(chunk(0, kind="player"))
    for number in range(40):
        held.insert(chunk(number, kind="actor"))
    drawn = held.draw(50, rng=np.random.default_rng(0))
    is_player = drawn.batches.obs["obs"][..., 1] == 1
    assert (is_player.sum(axis=1) == 3).all()
    assert drawn.batches.legal is None
    assert (held.n_sampleable, held.n_steps_inserted) == (205, 205)


@pytest.mark.parametrize("kind", ["player", "actor"])
def test_one_part_fills_the_batch_while_the_other_is_empty(kind):
    held = mixed()
    held.insert(chunk(0, kind=kind))
    assert held.draw(2, rng=np.random.default_rng(0)).rows.shape == (2, 8)


def test_feedback_eviction_and_names_reach_the_right_part():
    held = mixed()
    for kind in ("player", "actor"):
        held.insert(chunk(0, kind=kind))
    drawn = held.draw(10, rng=np.random.default_rng(0))
    is_player = drawn.batches.obs["obs"][..., 1] == 1
    assert held.chunks_of(drawn.rows[is_player]) == [(session_id(1), 0)]
    assert held.chunks_of(drawn.rows) == [(session_id(1), 0), (session_id(0), 0)]
    held.feedback(drawn.rows, drawn.stamps, np.where(is_player, np.nan, 2.0))
    assert held.n_bad_priorities == 30
    assert held.evict(session_id(1), 0)
    assert not held.evict(session_id(1), 0)
    assert held.close(session_id(0)) == 0
    assert held.n_sampleable == 5


def test_a_restored_mixture_draws_the_same_bits():
    held, again, stored = mixed(), mixed(), Stored()
    for number in range(5):
        for kind in ("player", "actor"):
            held.insert(stored.keep(chunk(number, kind=kind)))
    again.restore(*through_a_file(held.state()), stored.read)
    assert_equal(held, again)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="player_rows is 9"):
        mixed(player_rows=9)
    other = HostReplay(GAME, replace(NEEDS, n_step=2))
    with pytest.raises(ConfigError, match="same needs"):
        MixedReplay(other, HostReplay(GAME, NEEDS), player_rows=1)
