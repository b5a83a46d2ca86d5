"""Filtered cloning: only the best recorded episodes are learned from."""

import math
import uuid
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.learn.sessions import GAME, Piece, deliveries, session_id
from tests.learn.test_replay import steps
from tests.learn.worlds import chunk_of, episode
from understudy.algorithm import Batch, Transitions
from understudy.core.errors import ConfigError
from understudy.experience.game import game_spec
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.best_episodes import least_return, pieces_of, returns_of, rows_from
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import ReplaySource
from understudy.replay import ReplayConfig

LINE = game_spec("line", obs=2, actions=2)


def whole_episodes(delivered: list[Piece]) -> list[tuple[float, set[int]]]:
    """Return and moments of each whole episode, found by a plain walk from step to step."""
    found = []
    by_episode = defaultdict(list)
    for piece in delivered:
        for step in piece.steps:
            by_episode[piece.session, step.episode].append(step)
    for played in by_episode.values():
        played.sort(key=lambda step: step.moment)
        is_gapless = all(step.after == later.moment for step, later in pairwise(played))
        if played[0].is_first and is_gapless and played[-1].end in ("terminated", "truncated"):
            own = math.fsum(np.float32(step.reward) for step in played)
            found.append((own, {step.moment for step in played}))
    return found


@given(delivered=deliveries(), share=st.sampled_from([0.1, 0.2, 0.5, 0.9, 1.0]))
def test_the_rows_of_the_best_whole_episodes_are_kept(delivered: list[Piece], share: float):
    chunks = {piece.chunk().meta.id: piece.chunk() for piece in delivered}
    pieces = {key: pieces_of(chunk) for key, chunk in chunks.items()}
    returns = returns_of(pieces, max_reward=math.inf)
    best = rows_from(pieces, returns, least_return(pieces, returns, share))
    kept = {
        int(moment)
        for key, chunk in chunks.items()
        for moment in chunk.columns["obs"][best[key] & (chunk.columns["row"] == 0), 0]
    }
    whole = whole_episodes(delivered)
    ordered = sorted((own for own, _ in whole), reverse=True)
    n_best = next(n for n in range(len(whole) + 1) if n >= share * len(whole) - 1e-9)
    expected = [moments for own, moments in whole if own >= ordered[max(1, n_best) - 1]]
    assert kept == set().union(*expected)


def source_of(best_share: float, *, capacity: int = 4_096, **more: Any) -> ReplaySource:
    needs = Transitions(batch=64, is_cloning=True, best_share=best_share, **more)
    replay = HostReplay(LINE, needs, ReplayConfig(capacity=capacity))
    return ReplaySource(replay, None, updates=8, batch=64, root_seed=0)


def play(
    source: ReplaySource,
    session: int,
    rewards: list[float],
    *,
    chunk_no: int = 0,
    end: str | None = "terminated",
    is_first: bool = True,
) -> None:
    """Insert an episode, or a part of it; observations show session and chunk."""
    seen = [[session, chunk_no]] * (len(rewards) + 1)
    moves = episode(seen, [session % 2] * len(rewards), rewards, end)
    if not is_first:
        moves[0] = replace(moves[0], is_first=False)
    source.insert(chunk_of(LINE, moves, session=session, chunk_no=chunk_no))


def drawn(source: ReplaySource, players: dict[uuid.UUID, bytes] | None = None) -> set[Any]:
    """(session, chunk_no) of 512 drawn steps."""
    source.measure(players or {})
    batch = source.draw(0, importance_exponent=0.0)
    obs = batch.obs["obs"].reshape(-1, 2)
    return {(int(session), int(number)) for session, number in obs}


def test_only_whole_episodes_count_and_those_of_several_chunks_with_all_their_rewards():
    source = source_of(0.5)
    play(source, 0, [1.0, 1.0])
    play(source, 1, [1.5, 0.0], end=None)
    play(source, 1, [0.0, 1.5], chunk_no=1, is_first=False)
    play(source, 2, [9.0], end=None)  # still open
    play(source, 3, [9.0], chunk_no=4, is_first=False)  # its start is missing
    play(source, 4, [9.0], end="cut")
    play(source, 5, [0.0])
    play(source, 6, [0.5])
    assert drawn(source) == {(0, 0), (1, 0), (1, 1)}
    assert source.metrics == {"best_episodes": 2, "known_episodes": 4}
    play(source, 2, [0.0], chunk_no=1, is_first=False)
    assert drawn(source) == {(1, 0), (1, 1), (2, 0), (2, 1), (0, 0)}


@pytest.mark.parametrize("stack", [1, 3])
def test_an_episode_that_loses_a_chunk_is_not_drawn_and_the_next_best_is(stack: int):
    source = source_of(0.3, stack=stack)
    play(source, 0, [5.0, 5.0, 5.0], end=None)
    play(source, 0, [5.0, 5.0, 5.0], chunk_no=1, is_first=False)
    for session in range(1, 4):
        play(source, session, [float(session)] * 3)
    assert drawn_sessions(source) == {0, 3}
    source.replay.evict(session_id(0), 0)
    assert drawn_sessions(source) == {3}
    source.replay.evict(session_id(3), 0)
    assert drawn_sessions(source) == {2}


def drawn_sessions(source: ReplaySource) -> set[int]:
    source.measure({})
    obs = source.draw(0, importance_exponent=0.0).obs["obs"]
    return set(obs[..., 0].astype(int).ravel().tolist())


def test_what_is_known_about_chunks_is_forgotten_when_they_leave_a_full_replay():
    source = source_of(0.5, capacity=256)
    for session in range(100):
        play(source, session, [100.0 - session] * 3)
    kept = [int(key[0]) - int(session_id(0)) for key in source.replay.chunk_ids()]
    assert len(kept) == 16
    assert drawn_sessions(source) == set(kept[:8]), "the best of those that are left"
    assert set(source._pieces) == set(source.replay.chunk_ids())


def test_episodes_that_are_as_good_as_the_last_of_the_best_count_too():
    source = source_of(0.2)
    for session in range(10):
        play(source, session, [float(session >= 4)])
    assert drawn_sessions(source) == set(range(4, 10))


def test_false_rewards_do_not_make_an_episode_one_of_the_best():
    source = source_of(0.2)
    for session in range(10):
        play(source, session, [1.0 + session / 10, 1e9 if session == 3 else 0.0])
    assert drawn_sessions(source) == {8, 9}


def test_lies_of_many_names_do_not_make_their_episodes_the_best():
    source = source_of(0.2)
    for session in range(18):
        play(source, session, [1.0 + session / 100] * 10)
    for session in range(18, 38):
        play(source, session, [50.0])
    assert drawn_sessions(source) == {14, 15, 16, 17}


@pytest.mark.parametrize(
    ("n_episodes", "n_cloned"), [(10, 5), (40, 20), (60, 20), (100, 20), (200, 40)]
)
def test_of_few_steps_a_larger_share_is_cloned(n_episodes: int, n_cloned: int):
    source = source_of(0.2, best_steps=60)
    for session in range(n_episodes):
        play(source, session, [session / 100] * 3)
    assert drawn_sessions(source) == set(range(n_episodes - n_cloned, n_episodes))


def test_where_most_steps_are_of_open_episodes_all_are_cloned():
    source = source_of(0.2, best_steps=60)
    play(source, 0, [9.0])
    play(source, 1, [1.0] * 30, end=None)
    assert drawn_sessions(source) == {0, 1}
    for session in range(2, 12):
        play(source, session, [float(session)] * 10)
    assert drawn_sessions(source) == set(range(6, 12)), "60 steps, more than half of those known"


def test_the_limit_of_a_player_holds_among_the_players_of_the_best_episodes():
    source = source_of(0.5)
    players = {}
    for session in range(60):
        play(source, session, [float(session < 30)] * (40 if session == 0 else 4))
        players[session_id(session)] = bytes([session])
    source.measure(players)
    batch = source.draw(0, importance_exponent=0.0)
    session = batch.obs["obs"][..., 0]
    assert set(session.ravel().tolist()) <= set(range(30))
    assert batch.weight[session == 0].max() < 1
    # One player has all of the best episodes: its steps are all that is learned from.
    source = source_of(0.5)
    for session in range(60):
        play(source, session, [float(session < 30)] * 4)
    source.measure({session_id(each): bytes([max(29, each)]) for each in range(60)})
    assert (source.draw(0, importance_exponent=0.0).weight == 1).all()


def test_without_a_whole_episode_nothing_is_learned():
    source = source_of(0.5)
    play(source, 0, [1.0, 1.0], end=None)
    with pytest.raises(ConfigError, match="no recorded episode is whole"):
        source.measure({})


def test_with_a_share_of_1_batches_are_the_same_bits_as_without_a_choice():
    def batch_of(**share: Any) -> Batch:
        needs = Transitions(batch=64, is_cloning=True, **share)
        replay = HostReplay(GAME, needs, ReplayConfig(capacity=4_096))
        source = ReplaySource(replay, None, updates=8, batch=64, root_seed=0)
        for session in range(20):
            source.insert(Piece(session, 0, steps(200 if session == 0 else 10)).chunk())
        source.measure({session_id(session): bytes([session]) for session in range(20)})
        assert source.weights.drawn is None
        assert not source._pieces
        batch: Batch = source.draw(3, importance_exponent=0.0)
        return batch

    one = batch_of()
    other = batch_of(best_share=1.0)
    assert one.obs["obs"].tobytes() == other.obs["obs"].tobytes()
    assert one.weight.tobytes() == other.weight.tobytes()


@pytest.mark.parametrize("best_share", [0.0, -0.5, 1.01, math.nan])
def test_a_share_that_is_none_is_rejected(best_share: float):
    with pytest.raises(ConfigError, match=r"best_share is .*; give a number above 0, up to 1"):
        assert Bc(LINE, BcConfig(best_share=best_share)).needs


@pytest.mark.parametrize(("best_share", "best_play"), [(1.0, 0.3), (0.25, 0.95)])
def test_a_clone_of_the_best_plays_like_them_where_most_people_play_badly(
    best_share: float, best_play: float
):
    """Action 1 is worth a point where x is above 0, action 0 elsewhere; few people know it."""
    rng = np.random.default_rng(0)
    algorithm = Bc(LINE, BcConfig(widths=(16,), batch=64, best_share=best_share))
    config = LearnerConfig(limiter=None, updates_per_call=50)
    knobs = BcKnobs(learning_rate=0.02, weight_decay=0.0)
    learner = Learner(algorithm, knobs, root_seed=0, config=config)
    for session in range(40):
        obs = rng.normal(size=(17, 2)).astype(np.float32)
        good = (obs[:-1, 0] > 0).astype(int)
        errs = rng.random(16) < (0.05 if session % 4 == 0 else 0.9)
        actions = np.where(errs, 1 - good, good)
        rewards = (actions == good).astype(float)
        moves = episode(obs.tolist(), actions.tolist(), rewards.tolist(), "terminated")
        learner.insert(chunk_of(LINE, moves, session=session))
    assert isinstance(learner.source, ReplaySource)
    learner.source.measure({})
    for call in range(6):
        learner.step(call / 6)
    policy = learner.current()
    obs = rng.normal(size=(400, 2)).astype(np.float32)
    right = np.mean([policy.act(each) == (each[0] > 0) for each in obs])
    assert right <= best_play if best_share == 1 else right >= best_play
