"""Training from a store: the same bits whenever it begins, also while sessions are open."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.worlds import Move, chunk_of
from understudy.core.chunk import Chunk
from understudy.core.events import Event, Update
from understudy.core.game import game_spec
from understudy.engines.from_store import IDLE_S, FromStore
from understudy.engines.history import History
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay import ReplayConfig
from understudy.testing.clock import ManualClock

GAME = game_spec("line", obs=3, actions=2)
N = 12
PROGRAMS: dict[str, Any] = {}


def played(number: int, *, env: int = 0) -> Chunk:
    """The chunk of a number, of an episode that goes on for ever."""
    steps = range(N * number, N * number + N)
    moves = [Move([at, env, 1], at % 2, float(at % 3), [at + 1, env, 1], None, at == 0) for at in steps]
    made = chunk_of(GAME, moves, session=env, chunk_no=number, version=0)
    return replace(made, meta=replace(made.meta, first_step=N * number))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two sessions that nobody has closed."""
    with contextlib.closing(History(tmp_path / "store", GAME, clock=ManualClock())) as history:
        history.add([played(number, env=env) for number in range(3) for env in range(2)])
        history.flush()
    return tmp_path / "store"


def engine(store: Path, *, later_s: float = 0.0, heard: list[Event] | None = None) -> FromStore:
    clock = ManualClock()
    clock.advance(later_s)
    config = LearnerConfig(limiter=None, updates_per_call=4, replay=ReplayConfig(capacity=512))
    learner = Learner(Dqn(GAME, DqnConfig(widths=(8,), batch=16, n_step=3)), DqnKnobs(), root_seed=5, config=config)
    learner._call = PROGRAMS.setdefault("dqn", learner._call)  # one compilation for all
    events = [] if heard is None else heard
    return FromStore(learner, store, steps=64, clock=clock, on_event=events.append)


def bits(one: FromStore) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one.learner.state)]


def test_open_sessions_are_learned_from_to_their_last_step_whenever_the_training_begins(store: Path):
    ends = []
    for later_s in (0.0, IDLE_S - 1, IDLE_S + 1, 1e6):
        with contextlib.closing(engine(store, later_s=later_s)) as one:
            for _ in range(3):
                assert one.step()
            assert one._replay.n_sampleable == 2 * 3 * N
            ends.append(bits(one))
    assert ends[0] == ends[1] == ends[2] == ends[3]


def test_a_session_that_goes_on_after_the_start_is_followed_and_ends_when_it_falls_silent(store: Path):
    with contextlib.closing(engine(store)) as one:
        one.follow()
        with contextlib.closing(History(store, GAME, clock=ManualClock())) as history:
            history.add([played(3)])
            history.flush()
        one.follow()
        assert one._replay.n_sampleable == 2 * 3 * N + N - 2  # the last starts wait for the next chunk
        one._clock.advance(IDLE_S + 1)  # type: ignore[attr-defined]
        one.follow()
        assert one._replay.n_sampleable == 2 * 3 * N + N


def test_a_training_that_is_resumed_does_not_end_sessions_again(store: Path):
    with contextlib.closing(engine(store)) as one, contextlib.closing(engine(store, later_s=IDLE_S / 2)) as other:
        one.step()
        with contextlib.closing(History(store, GAME, clock=ManualClock())) as history:
            history.add([played(3)])
            history.flush()
        one.step()
        other.restore(*one.checkpoint())
        for each in (one, other):
            each.step()
        assert other._replay.n_sampleable == one._replay.n_sampleable == 2 * 3 * N + N - 2
        assert bits(one) == bits(other)


def test_every_call_is_told_and_gives_a_version(store: Path):
    heard: list[Event] = []
    with contextlib.closing(engine(store, heard=heard)) as one:
        for _ in range(3):
            assert one.step()
        assert [type(event).__name__ for event in heard] == ["Compiling", "Update", "Update", "Update"]
        assert [event.version for event in heard if isinstance(event, Update)] == [2, 3, 4]
        assert one.policy.version == 4
