"""The host replay against a plain walk over the true steps; refusals, eviction, feedback."""

import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experience.trajectories import Step
from tests.learn.sessions import DISCOUNT, GAME, Piece, Window, deliveries, session_id, true_windows
from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn.device_replay import DeviceReplay
from understudy.learn.replay import HostReplay
from understudy.replay import ReplayConfig


def needs(**more: Any) -> Transitions:
    return Transitions(**{"batch": 8, "discount": DISCOUNT, **more})


def replay(wanted: Transitions | None = None, **config: Any) -> HostReplay:
    return HostReplay(GAME, wanted or needs(), ReplayConfig(**{"capacity": 4_096, **config}))


def contents(held: HostReplay) -> dict[int, Window]:
    """Every start that can be drawn, by moment, as drawn batches show it; fails when a start is
    there twice."""
    if held.n_sampleable == 0:
        return {}
    rng = np.random.default_rng(0)
    found: dict[int, tuple[int, Window]] = {}
    for _ in range(200):
        drawn = held.draw(4, rng=rng, batch=max(8, 2 * held.n_sampleable))
        for index in np.ndindex(drawn.rows.shape):
            window = shown(drawn.batches, index)
            row, before = found.setdefault(window.stack[-1], (int(drawn.rows[index]), window))
            assert (row, before) == (int(drawn.rows[index]), window)
        if len(found) >= held.n_sampleable:
            break
    assert len(found) == held.n_sampleable
    return {moment: window for moment, (_, window) in found.items()}


def shown(batch: Any, index: tuple[int, ...]) -> Window:
    def moments(obs: Any) -> tuple[int, ...]:
        return tuple(int(moment) for moment in obs[index].reshape(-1, 2)[:, 0])

    stack = moments(batch.obs["obs"])
    discount = float(batch.discount[index])
    assert batch.action[index] == stack[-1] % 3
    return Window(
        stack,
        float(batch.reward[index]),
        discount,
        moments(batch.next_obs["obs"]) if discount else None,
    )


def assert_same(found: dict[int, Window], wanted: dict[int, Window]) -> None:
    assert found.keys() == wanted.keys()
    for moment, window in wanted.items():
        assert (found[moment].stack, found[moment].next_stack) == (window.stack, window.next_stack)
        assert found[moment].returns == pytest.approx(window.returns, rel=1e-6)
        assert found[moment].discount == pytest.approx(window.discount, rel=1e-6)


shapes = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.booleans())


@settings(max_examples=100, deadline=None)
@given(deliveries(), shapes)
def test_what_is_drawn_equals_a_plain_walk_over_interleaved_sessions(order, shape):
    wanted = needs(n_step=shape[0], stack=shape[1], prioritised=shape[2])
    held = replay(wanted)
    became = sum(held.insert(piece.chunk()) for piece in order)
    became += sum(held.close(session_id(number)) for number in range(3))
    truth = true_windows(order, wanted)
    assert became == held.n_sampleable == len(truth)
    assert held.n_steps_inserted == sum(len(piece.steps) for piece in order)
    assert_same(contents(held), truth)


@settings(max_examples=100, deadline=None)
@given(deliveries(), shapes, st.integers(2, 6))
def test_a_ring_that_wraps_shows_only_true_windows_and_those_of_the_newest_chunk(
    order, shape, n_blocks
):
    wanted = needs(n_step=shape[0], stack=shape[1], prioritised=shape[2])
    held = replay(wanted, capacity=n_blocks * 32)
    delivered = []
    for piece in order:
        try:
            held.insert(piece.chunk())
        except ConfigError:  # longer than the whole ring
            return
        delivered.append(piece)
    held.close(session_id(order[-1].session))
    found = contents(held)
    truth = true_windows(delivered, wanted)
    newest = {step.moment for step in order[-1].steps[shape[1] - 1 :]} & truth.keys()
    assert newest <= found.keys() <= truth.keys()
    assert_same(found, {moment: truth[moment] for moment in found})


def steps(
    n: int, *, first: int = 0, is_first: bool = True, end: str | None = None
) -> tuple[Step, ...]:
    return tuple(
        Step(first + i, first + i + 1, 1.0, 0, is_first and i == 0, end if i == n - 1 else None)
        for i in range(n)
    )


def test_the_last_starts_wait_for_the_next_chunk():
    held = replay(needs(n_step=3))
    assert held.insert(Piece(0, 0, steps(5)).chunk()) == 3
    assert held.insert(Piece(0, 1, steps(5, first=5, is_first=False)).chunk()) == 5
    assert held.close(session_id(0)) == 2
    assert held.close(session_id(0)) == 0
    assert {moment: window.returns for moment, window in contents(held).items()}[9] == 1.0


def test_a_gap_releases_what_waited_and_starts_without_a_past():
    held = replay(needs(n_step=3, stack=2))
    held.insert(Piece(0, 0, steps(5)).chunk())
    assert held.insert(Piece(0, 2, steps(5, first=9, is_first=False)).chunk()) == 2 + 2
    assert 9 not in contents(held)


def test_a_late_chunk_is_inserted_by_itself():
    held = replay(needs(n_step=3))
    held.insert(Piece(0, 1, steps(5, first=5, is_first=False)).chunk())
    assert held.insert(Piece(0, 0, steps(5)).chunk()) == 5
    assert held.insert(Piece(0, 2, steps(5, first=10, is_first=False)).chunk()) == 5


def test_uneven_chunks_of_one_step_carry_their_lead_in_on():
    wanted = needs(n_step=4, stack=3)
    held = replay(wanted)
    order = [Piece(0, n, steps(1, first=n, is_first=n == 0)) for n in range(12)]
    for piece in order:
        held.insert(piece.chunk())
    assert held.n_sampleable == 9
    held.close(session_id(0))
    assert_same(contents(held), true_windows(order, wanted))


# --- What may not enter ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("name", ["obs", "reward"])
def test_invalid_numbers_are_rejected_and_change_nothing(bad, name):
    held = replay(needs(n_step=3))
    piece = Piece(0, 1, steps(5, first=5, is_first=False))
    held.insert(Piece(0, 0, steps(5)).chunk())
    spoiled = piece.chunk()
    spoiled.columns[name][2] = bad
    with pytest.raises(Refused, match=f"not_finite: '{name}'"):
        held.insert(spoiled)
    assert (held.n_sampleable, held.n_steps_inserted) == (3, 5)
    assert held.insert(piece.chunk()) == 5


def test_a_chunk_is_inserted_once():
    held = replay()
    piece = Piece(0, 0, steps(5))
    held.insert(piece.chunk())
    with pytest.raises(Refused, match="duplicate"):
        held.insert(piece.chunk())
    assert held.n_sampleable == 5


def test_chunks_of_another_game_or_with_other_columns_are_rejected():
    other = game_spec("rally", obs=3, actions=3)
    with pytest.raises(Refused, match="wrong_game"):
        replay().insert(Piece(0, 0, steps(5)).chunk(game=other))
    with pytest.raises(Refused, match="'obs' has"):
        replay().insert(Piece(0, 0, steps(5)).chunk(obs=np.zeros((6, 3), np.float32)))
    with pytest.raises(Refused, match="'action' is float32"):
        replay().insert(Piece(0, 0, steps(5)).chunk(action=np.zeros(6, np.float32)))
    with pytest.raises(Refused, match="'logp' is missing"):
        replay(needs(extras=("logp",))).insert(Piece(0, 0, steps(5)).chunk())


def test_settings_that_cannot_work_are_refused():
    for settings_ in (
        {"capacity": 0},
        {"alpha": 2.0},
        {"min_priority": 0.0},
        {"max_priority": 1e-9},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings_))):
            ReplayConfig(**settings_)
    with pytest.raises(ConfigError, match="weight is nan"):
        replay().insert(Piece(0, 0, steps(5)).chunk(), weight=float("nan"))
    with pytest.raises(ConfigError, match="capacity to at least 32"):
        replay(capacity=16).insert(Piece(0, 0, steps(20)).chunk())
    with pytest.raises(ConfigError, match="n_sampleable"):
        replay().draw(1, rng=np.random.default_rng(0))
    with pytest.raises(ConfigError, match="not an optional column"):
        replay(needs(extras=("log_p",)))
    with pytest.raises(ConfigError, match="2 action parts"):
        HostReplay(game_spec("rally", obs=2, actions={"a": Discrete(2), "b": Discrete(2)}), needs())


# --- Masks, extras, continuous actions ------------------------------------------------------------


def test_masks_extras_and_shifted_actions_come_with_their_rows():
    game = game_spec("rally", obs=2, actions=Discrete(3, start=5), has_action_mask=True)
    held = HostReplay(game, needs(n_step=2, extras=("logp",)), ReplayConfig(capacity=64))
    action_mask = np.eye(3, dtype=np.bool_)[[0, 1, 2, 0, 1, 2]]
    logp = np.arange(6, dtype=np.float32)
    action = (np.arange(6) % 3 + 5).astype(np.int32)
    held.insert(
        Piece(0, 0, steps(5, end="truncated")).chunk(
            game=game, action_mask=action_mask, logp=logp, action=action
        )
    )
    batch = held.draw(2, rng=np.random.default_rng(0)).batches
    at = batch.obs["obs"][..., 0].astype(int)
    assert batch.action.dtype == np.int32
    assert (batch.action == at % 3).all()
    assert (batch.extras["logp"] == at).all()
    assert (batch.action_mask == action_mask[at]).all()
    assert (batch.next_action_mask == action_mask[np.minimum(at + 2, 5)]).all()


def test_continuous_actions_are_flat_floats_and_missing_masks_mean_all_valid():
    game = game_spec("rally", obs=2, actions=Box((2, 2), DTYPES["F64"]))
    held = HostReplay(game, needs(extras=("raw_action",)), ReplayConfig(capacity=64))
    action = np.arange(24.0).reshape(6, 2, 2)
    held.insert(
        Piece(0, 0, steps(5)).chunk(game=game, action=action, raw_action=action.astype(np.float32))
    )
    batch = held.draw(1, rng=np.random.default_rng(0)).batches
    wanted = action.reshape(6, 4)[batch.obs["obs"][..., 0].astype(int)]
    assert batch.action.dtype == np.float32
    assert (batch.action == wanted).all()
    assert (batch.extras["raw_action"] == wanted).all()
    assert batch.action_mask is None
    masked = game_spec("rally", obs=2, actions=3, has_action_mask=True)
    held = HostReplay(masked, needs(), ReplayConfig(capacity=64))
    held.insert(Piece(0, 0, steps(5)).chunk(game=masked))
    assert held.draw(1, rng=np.random.default_rng(0)).batches.action_mask.all()


# --- Eviction -------------------------------------------------------------------------------------


def test_an_evicted_chunk_leaves_with_what_the_next_one_repeats_of_it():
    held = replay(needs(n_step=3, stack=2, prioritised=True))
    for number in range(3):
        held.insert(Piece(0, number, steps(5, first=5 * number, is_first=number == 0)).chunk())
    assert held.evict(session_id(0), 1)
    assert not held.evict(session_id(0), 1)
    # 3 and 4 are in chunk 1's span; 8 and 9 in chunk 2's, and the stack of 10 reaches back to 9.
    assert contents(held).keys() == {0, 1, 2, 11, 12}
    assert held.insert(Piece(0, 3, steps(5, first=15, is_first=False)).chunk()) == 5


def test_after_evicting_the_newest_chunk_the_next_has_no_lead_in():
    held = replay(needs(n_step=3))
    held.insert(Piece(0, 0, steps(5)).chunk())
    assert held.evict(session_id(0), 0)
    assert held.n_sampleable == 0
    assert held.insert(Piece(0, 1, steps(5, first=5, is_first=False)).chunk()) == 3
    assert not held.evict(uuid.uuid4(), 0)


def test_starts_that_wait_on_an_evicted_past_are_not_released():
    held = replay(needs(n_step=4, stack=3))
    for number in range(3):
        held.insert(Piece(0, number, steps(1, first=number, is_first=number == 0)).chunk())
    held.evict(session_id(0), 0)
    held.close(session_id(0))
    assert contents(held).keys() == set()


def test_rows_name_the_chunks_their_windows_touch():
    held = replay(needs(n_step=3, stack=2))
    for number in range(2):
        held.insert(Piece(0, number, steps(5, first=5 * number, is_first=number == 0)).chunk())
    drawn = held.draw(1, rng=np.random.default_rng(0), batch=200)
    row_of = dict(
        zip(
            drawn.batches.obs["obs"][0, :, -1, 0].astype(int).tolist(),
            drawn.rows[0].tolist(),
            strict=True,
        )
    )
    first = (session_id(0), 0)
    second = (session_id(0), 1)
    assert held.chunks_of(np.array([row_of[0]])) == [first]
    assert held.chunks_of(np.array([row_of[4]])) == [first, second]
    assert held.chunks_of(np.array([row_of[7], row_of[6]])) == [second]
    held.evict(*second)
    assert held.chunks_of(np.array([row_of[7]])) == []


# --- Priorities -----------------------------------------------------------------------------------


def test_actors_priorities_and_weights_make_the_mass():
    held = replay(needs(prioritised=True), alpha=0.5)
    held.insert(Piece(0, 0, steps(2)).chunk(priority=np.array([4, 16, 0], np.float32)))
    held.insert(Piece(1, 0, steps(2, first=10)).chunk(), weight=0.5)  # the largest seen: 16
    held.insert(Piece(2, 0, steps(2, first=20)).chunk(), weight=0.0)
    drawn = held.draw(1, rng=np.random.default_rng(0), batch=10_000)
    moments, counts = np.unique(drawn.batches.obs["obs"][..., 0], return_counts=True)
    assert moments.tolist() == [0, 1, 10, 11]
    assert counts == pytest.approx(np.array([2, 4, 2, 2]) * 1_000, abs=2)
    weight_of = dict(
        zip(
            drawn.batches.obs["obs"][0, :, 0].tolist(),
            drawn.batches.weight[0].tolist(),
            strict=True,
        )
    )
    # Importance undoes what priorities do: row 10 has the priority of row 1, however seldom it is
    # meant to be drawn.
    assert weight_of == pytest.approx({0: 1.0, 1: 2**-0.4, 10: 2**-0.4, 11: 2**-0.4})


@pytest.mark.parametrize("make", [HostReplay, DeviceReplay])
def test_importance_weights_do_not_undo_chunk_weights(make):
    """At beta 1 every step counts by its weight alone, whatever its priority."""
    held = make(GAME, needs(prioritised=True, batch=4_096), ReplayConfig(capacity=64, alpha=0.7))
    rng = np.random.default_rng(0)
    weights = (1.0, 3.0, 0.25)
    for number, weight in enumerate(weights):
        priority = rng.uniform(0.5, 2.0, size=5).astype(np.float32)
        held.insert(
            Piece(number, 0, steps(4, first=10 * number)).chunk(priority=priority), weight=weight
        )
    drawn = held.draw(16, rng=rng, beta=1.0)
    moments = np.asarray(drawn.batches.obs["obs"][..., 0], np.int64)
    counted = np.bincount(
        moments.ravel(), np.asarray(drawn.batches.weight, np.float64).ravel(), minlength=30
    )
    counted = counted.reshape(3, 10)[:, :4]
    due = np.repeat(np.array(weights) / (4 * sum(weights)), 4).reshape(3, 4)
    np.testing.assert_allclose(counted / counted.sum(), due, rtol=0.05)


@pytest.mark.parametrize("make", [HostReplay, DeviceReplay])
def test_a_uniform_replay_refuses_weights_it_would_ignore(make):
    held = make(GAME, needs(), ReplayConfig(capacity=64))
    for weight in (0.5, 2.0):
        with pytest.raises(ConfigError, match="is uniform; give 0 or 1"):
            held.insert(Piece(0, 0, steps(4)).chunk(), weight=weight)
    assert held.insert(Piece(0, 0, steps(4)).chunk(), weight=0.0) == 0
    assert held.insert(Piece(1, 0, steps(4)).chunk(), weight=1.0) == 4
    assert (np.asarray(held.draw(2, rng=np.random.default_rng(0)).batches.weight) == 1.0).all()


def test_feedback_moves_the_mass_and_ignores_rows_that_left():
    held = replay(needs(prioritised=True), capacity=32, alpha=1.0)
    held.insert(Piece(0, 0, steps(10)).chunk())
    stale = held.draw(1, rng=np.random.default_rng(0), batch=20)
    held.feedback(
        stale.rows, stale.stamps, np.where(stale.batches.obs["obs"][..., 0] == 3, 91.0, 1.0)
    )
    share = (
        held.draw(1, rng=np.random.default_rng(0), batch=1_000).batches.obs["obs"][..., 0] == 3
    ).mean()
    assert share == pytest.approx(0.91, abs=0.002)
    for number in (1, 2):
        held.insert(Piece(number, 0, steps(10, first=100)).chunk(priority=np.ones(11, np.float32)))
    held.feedback(stale.rows, stale.stamps, np.full(20, 1e5))
    moments = held.draw(1, rng=np.random.default_rng(0), batch=1_000).batches.obs["obs"][..., 0]
    assert np.unique(moments, return_counts=True)[1] == pytest.approx(np.full(10, 100), abs=2)


def test_feedback_does_not_restore_evicted_rows():
    held = replay(needs(prioritised=True))
    held.insert(Piece(0, 0, steps(5)).chunk())
    drawn = held.draw(1, rng=np.random.default_rng(0))
    held.evict(session_id(0), 0)
    held.feedback(drawn.rows, drawn.stamps, np.ones(8))
    held.feedback(drawn.rows[:0].astype(np.int32), drawn.stamps[:0], np.ones(0, np.float32))
    assert held.n_sampleable == 0


def test_invalid_priorities_are_counted_and_ignored():
    held = replay(needs(prioritised=True), max_priority=100.0, alpha=1.0)
    held.insert(Piece(0, 0, steps(5)).chunk())
    rows = np.unique(held.draw(1, rng=np.random.default_rng(0), batch=50).rows)
    stamps = np.ones(5, np.int32)
    held.feedback(rows, stamps, np.array([np.nan, np.inf, -1.0, 0.0, 1e30]))
    assert held.n_bad_priorities == 3
    drawn = held.draw(1, rng=np.random.default_rng(0), batch=10_300)
    _, counts = np.unique(drawn.rows, return_counts=True)
    assert drawn.batches.weight.max() == 1.0
    assert sorted(counts.tolist()) == pytest.approx(
        [100, 100, 100, 10_000], abs=2
    )  # 0 became the smallest allowed


def test_feedback_to_a_uniform_replay_is_ignored():
    held = replay()
    held.insert(Piece(0, 0, steps(5)).chunk())
    drawn = held.draw(3, rng=np.random.default_rng(0))
    held.feedback(drawn.rows, drawn.stamps, np.full(drawn.rows.shape, np.nan))
    assert (drawn.batches.weight == 1.0).all()
    assert drawn.batches.obs["obs"].shape == (3, 8, 2)


@pytest.mark.parametrize("make", [HostReplay, DeviceReplay])
def test_one_huge_priority_does_not_lift_later_rows_for_ever(make):
    held = make(GAME, needs(prioritised=True), ReplayConfig(capacity=64, alpha=1.0))

    def priorities_of_new_rows(session: int) -> list[float]:
        piece = Piece(session, 0, steps(4, first=10 * session)).chunk()
        held.insert(piece)
        at = 16 * session
        return list(held.state()[0]["masses"][at : at + 4])

    assert priorities_of_new_rows(0) == [1.0] * 4
    rows = np.arange(4)
    stamps = np.ones(4, np.int32)
    held.feedback(rows, stamps, np.array([1e6, 0.25, 0.25, 0.25], np.float32))
    assert priorities_of_new_rows(1) == [1e6] * 4
    for _ in range(2 * held.capacity // 4):
        held.feedback(rows, stamps, np.full(4, 0.5, np.float32))
        held.feedback(rows, np.zeros(4, np.int32), np.full(4, 1e6, np.float32))  # of evicted rows
    assert priorities_of_new_rows(2) == [0.5] * 4
    for _ in range(4 * held.capacity):  # priorities that are not believed change nothing
        held.feedback(rows, stamps, np.full(4, np.nan, np.float32))
    assert priorities_of_new_rows(3) == [0.5] * 4


@pytest.mark.parametrize("make", [HostReplay, DeviceReplay])
def test_a_huge_priority_of_an_actor_is_as_short_lived(make):
    held = make(GAME, needs(prioritised=True), ReplayConfig(capacity=64, alpha=1.0))
    held.insert(Piece(0, 0, steps(4)).chunk(priority=np.full(5, 1e6, np.float32)))
    assert max(held.state()[0]["masses"]) == 1e6
    for number in range(1, 72):
        more: dict[str, Any] = {} if number % 2 else {"priority": np.full(5, 0.5, np.float32)}
        held.insert(Piece(number, 0, steps(4)).chunk(**more))
    assert sorted(set(held.state()[0]["masses"].tolist())) == [0.0, 0.5]
