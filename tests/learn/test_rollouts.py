"""Rollouts against the true steps: chunk cuts, episode ends, frame stacks, chunks that are left
out, resume."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learn.sessions import session_id
from tests.learn.worlds import Move, chunk_of
from understudy.algorithm import Rollout, Rollouts
from understudy.core import tensors
from understudy.core.errors import Refused
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import Chunk
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn.rollouts import RolloutQueue

GAME = game_spec("line", obs=1, actions=Discrete(3, 5, DTYPES["I32"]))
MASKED = game_spec("line", obs=1, actions=3, has_action_mask=True)
STEPS = 12
FAR = 1_000.0

cuts = st.sampled_from([(12,), (5, 7), (4, 4, 4), (1, 10, 1), (1,) * 12])
ends = st.lists(
    st.sampled_from([None, None, None, "terminated", "truncated", "cut"]), min_size=48, max_size=48
)


def played(how: list[Any], *, env: int = 0) -> list[Move]:
    """One env's steps; each observation is a number of its own, the last one of an episode too."""
    moves: list[Move] = []
    at = FAR * env
    is_first = True
    for number, end in enumerate(how):
        moves.append(Move([at], 5 + number % 3, float(number), [at + 1], end, is_first))
        at = at + (2 if end else 1)
        is_first = end is not None
    return moves


def chunks_of(
    moves: list[Move], lengths: tuple[int, ...], *, env: int = 0, first_no: int = 0
) -> list[Chunk]:
    chunks = []
    at = 0
    for number, length in enumerate(lengths):
        part = moves[at : at + length]
        logp = [-move.obs[0] / FAR for move in part]
        chunks.append(
            chunk_of(GAME, part, session=env, chunk_no=first_no + number, version=1, logp=logp)
        )
        at += length
    return chunks


def queue(*, envs: int = 1, stack: int = 1, steps: int = STEPS) -> RolloutQueue:
    return RolloutQueue(GAME, Rollouts(steps=steps, envs=envs, stack=stack))


def frames(moves: list[Move], at: int, k: int, *, after: bool = False) -> list[float]:
    """The last k observations that the player had seen, the episode's first repeated."""
    begin = max(number for number in range(at + 1) if moves[number].is_first)
    seen = [move.obs[0] for move in moves[begin : at + 1]] + ([moves[at].after[0]] if after else [])
    return ([seen[0]] * k + seen)[-k:]


def assert_true(rollout: Rollout, moves: list[Move], *, first: int, env: int, stack: int) -> None:
    """The env's steps are the true ones from the given one on."""
    for t in range(len(rollout.reward)):
        at = first + t
        move = moves[at]
        assert np.ravel(rollout.obs["obs"][t, env]).tolist() == frames(moves, at, stack)
        assert np.ravel(rollout.next_obs["obs"][t, env]).tolist() == frames(
            moves, at, stack, after=True
        )
        assert rollout.action[t, env] == move.action - 5
        assert rollout.reward[t, env] == move.reward
        assert rollout.terminated[t, env] == (move.end == "terminated")
        is_last = t + 1 == len(rollout.reward)
        assert rollout.truncated[t, env] == (
            move.end == "truncated" or (move.end == "cut" and not is_last)
        )
        assert rollout.logp[t, env] == np.float32(-move.obs[0] / FAR)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(ends, ends),
    st.lists(cuts, min_size=4, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_rollouts_are_the_true_steps_whatever_the_cuts_and_ends(how, lengths, stack, is_resumed):
    envs = [played(one, env=env) for env, one in enumerate(how)]
    held = queue(envs=2, stack=stack)
    next_no = 0
    for round_no in range(4):
        first = STEPS * round_no
        for env, moves in enumerate(envs):
            assert not held.may_update
            for chunk in chunks_of(
                moves[first : first + STEPS], lengths[round_no], env=env, first_no=next_no
            ):
                held.insert(chunk)
        next_no += len(lengths[round_no])
        assert held.may_update
        rollout = held.take()
        assert rollout.obs["obs"].shape == ((STEPS, 2, stack, 1) if stack > 1 else (STEPS, 2, 1))
        for env, moves in enumerate(envs):
            assert_true(rollout, moves, first=first, env=env, stack=stack)
        if is_resumed:
            held, before = queue(envs=2, stack=stack), held
            held.restore(tensors.decode(tensors.encode(before.state()[0], {}))[0], {}, None)


def test_an_episode_that_ends_with_its_chunk_leaves_no_lead_in():
    how = [None] * 11 + ["terminated"] + [None] * 36
    held = queue(stack=4)
    moves = played(how)
    for chunk in chunks_of(moves[:24], (12, 12)):
        held.insert(chunk)
        rollout = held.take()
    assert np.ravel(rollout.obs["obs"][0, 0]).tolist() == [13.0] * 4


def test_the_order_of_arrival_does_not_matter():
    envs = [played([None] * 48, env=env) for env in range(3)]
    rollouts = []
    for order in ((0, 1, 2), (2, 0, 1)):
        held = queue(envs=3)
        for env in order:
            held.insert(chunks_of(envs[env], (12,), env=env)[0])
        rollouts.append(held.take())
    np.testing.assert_array_equal(rollouts[0].obs["obs"], rollouts[1].obs["obs"])


def test_waiting_names_the_chunks_of_each_env():
    held = queue(envs=2)
    for env in (1, 0):
        for chunk in chunks_of(played([None] * 48, env=env), (5, 7), env=env):
            held.insert(chunk)
    assert held.waiting() == [[(session_id(env), 0), (session_id(env), 1)] for env in (0, 1)]


# --- What is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["obs", "reward", "logp"])
def test_after_a_chunk_that_is_not_finite_all_envs_continue_with_the_next_round(name, bad):
    envs = [played([None] * 48, env=env) for env in range(2)]
    held = queue(envs=2, stack=1)
    for round_no in range(3):
        for env in range(2):
            moves = envs[env][STEPS * round_no : STEPS * (round_no + 1)]
            chunk = chunks_of(moves, (12,), env=env, first_no=round_no)[0]
            if (round_no, env) == (1, 0):
                chunk.columns[name][3] = bad
                with pytest.raises(Refused, match=f"not_finite.*{name}"):
                    held.insert(chunk)
            else:
                assert held.insert(chunk) == STEPS
        assert held.may_update == (round_no != 1)
        if held.may_update:
            rollout = held.take()
    for env in range(2):
        assert_true(rollout, envs[env], first=2 * STEPS, env=env, stack=1)


def test_a_round_that_lost_a_chunk_in_the_middle_has_no_hole():
    moves = played([None] * 48)
    held = queue()
    first, lost, third = chunks_of(moves[:12], (4, 4, 4))
    lost.columns["reward"][0] = np.nan
    held.insert(first)
    with pytest.raises(Refused):
        held.insert(lost)
    held.insert(third)
    assert not held.may_update
    for chunk in chunks_of(moves[12:24], (4, 4, 4), first_no=3):
        held.insert(chunk)
    assert_true(held.take(), moves, first=12, env=0, stack=1)


@pytest.mark.parametrize("is_told", [True, False])
def test_stacks_reach_back_to_a_chunk_that_was_passed_over_but_not_across_a_gap(is_told):
    moves = played([None] * 48)
    held = queue(stack=4)
    chunks = chunks_of(moves, (12, 12, 12, 12))
    held.insert(chunks[0])
    held.take()
    if is_told:
        held.skip_chunk(chunks[1])
        held.insert(chunks[2])
        assert_true(held.take(), moves, first=24, env=0, stack=4)
    else:
        with pytest.raises(Refused, match="starts inside an episode"):
            held.insert(chunks[2])
    held.insert(chunks[3])
    assert_true(held.take(), moves, first=36, env=0, stack=4)


def test_what_other_weights_have_played_is_dropped():
    moves = played([None] * 48)
    held = queue(stack=2)
    chunks = chunks_of(moves, (12, 12, 12, 12))
    held.insert(chunks[0])
    held.on_weights_restored()
    assert not held.may_update
    held.insert(chunks[1])
    assert_true(held.take(), moves, first=12, env=0, stack=2)


def test_sessions_beyond_the_number_of_envs_are_dropped_with_the_round():
    held = queue(envs=1)
    for env in range(2):
        held.insert(chunks_of(played([None] * 48, env=env), (12,), env=env)[0])
    held.take()
    assert not held.may_update


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda chunk: replace(chunk, meta=replace(chunk.meta, schema="0" * 64)), "wrong_schema"),
        (
            lambda chunk: replace(
                chunk, columns={k: v for k, v in chunk.columns.items() if k != "logp"}
            ),
            "lacks the column 'logp'",
        ),
    ],
)
def test_chunks_that_do_not_fit_a_rollout_are_rejected(change, reason):
    held = queue()
    chunk = chunks_of(played([None] * 48), (12,))[0]
    with pytest.raises(Refused, match=reason):
        held.insert(change(chunk))
    assert held.insert(chunk) == STEPS


def test_a_chunk_longer_than_a_rollout_and_a_duplicate_are_rejected():
    held = queue(steps=11)
    chunk = chunks_of(played([None] * 48), (12,))[0]
    with pytest.raises(Refused, match="a rollout has only 11"):
        held.insert(chunk)
    with pytest.raises(Refused, match="duplicate"):
        held.insert(chunk)


# --- Other games ----------------------------------------------------------------------------------


def test_masks_come_along_and_where_they_are_missing_everything_is_legal():
    action_mask = np.eye(3, dtype=bool)[np.arange(12) % 3]
    moves = [replace(move, action=at % 3) for at, move in enumerate(played([None] * 12))]
    held = RolloutQueue(MASKED, Rollouts(steps=12, envs=2))
    held.insert(chunk_of(MASKED, moves, session=0, logp=[0.0] * 12, action_mask=action_mask))
    held.insert(chunk_of(MASKED, moves, session=1, logp=[0.0] * 12))
    rollout = held.take()
    np.testing.assert_array_equal(rollout.action_mask[:, 0], action_mask)
    assert rollout.action_mask[:, 1].all()


def test_continuous_actions_are_the_raw_ones():
    game = game_spec("pull", obs=1, actions=Box((1, 2), DTYPES["F32"], -1.0, 1.0))
    raw = np.random.default_rng(0).normal(size=(12, 1, 2)).astype(np.float32)
    moves = [
        replace(move, action=np.clip(raw[at], -1, 1)) for at, move in enumerate(played([None] * 12))
    ]
    held = RolloutQueue(game, Rollouts(steps=12, envs=1))
    held.insert(chunk_of(game, moves, logp=[0.0] * 12, raw_action=raw))
    np.testing.assert_array_equal(held.take().action[:, 0], raw.reshape(12, 2))
