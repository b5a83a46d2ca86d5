"""False numbers of a few players decide neither the scale of rewards nor that of observations."""

import math
import uuid
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.sessions import GAME, Piece, session_id
from tests.learn.test_replay import steps
from understudy.algorithm import Batch, Transitions
from understudy.experience.chunk import By
from understudy.learn.outliers import (
    believable,
    false_rows,
    is_believable,
    obs_limits,
    reward_scales,
    reward_size,
    shared_weights,
    step_weights,
)
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import ReplaySource
from understudy.replay import ReplayConfig


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ([], 0.0),
        ([0.0, 0.0], 0.0),
        ([1e12], 1e12),
        ([1.0, 1e12], 1e12),  # of two players, neither is the odd one
        ([1.0, 1e12, 2.0], 2.0),
        ([0.0, 0.0, 5.0], 5.0),  # the only reward there is
        ([1.0] * 18 + [1e9, 1e12], 1.0),
    ],
)
def test_the_largest_size_is_that_of_most_players(sizes: list[float], largest: float):
    assert believable(sizes) == largest


@pytest.mark.parametrize(
    ("n_steps", "share"),
    [
        ([100] + [10] * 29, 0.1),
        ([60, 60, 50] + [10] * 27, 0.1),
        ([60, 10, 10, 10, 10], 0.4),
        ([5, 1], 5 / 6),
        ([7] * 30, 1 / 30),
        ([9], 1.0),
        ([0, 0, 9], 1.0),
    ],
)
def test_no_player_has_more_than_a_tenth_of_what_is_learned(n_steps: list[int], share: float):
    learned = np.array(n_steps) * step_weights(n_steps)
    assert max(learned) / sum(learned) == pytest.approx(share)
    assert step_weights([]) == []


@pytest.mark.parametrize(
    ("n_steps", "n_main", "most"),
    [
        ([10_000, 10, 10], 1, 0.01),
        ([10_000] + [1] * 10, 1, 0.005),
        ([3_000] * 9 + [5] * 11, 9, 0.011),
    ],
)
def test_a_few_steps_of_other_names_do_not_decide_what_is_learned(
    n_steps: list[int], n_main: int, most: float
):
    learned = np.array(n_steps) * step_weights(n_steps)
    assert learned[n_main:].sum() / learned.sum() < most


@pytest.mark.parametrize(
    ("sizes", "n_steps", "scales"),
    [
        ([], [], []),
        ([1.0, 100.0], [10, 10], [1.0, 1.0]),  # too few players to tell who is right
        ([1.0] * 18 + [1.9, 4.0], [10] * 20, [1.0] * 19 + [0.5]),
        ([1.0] * 18 + [10.5, 100.0], [10] * 20, [1.0] * 18 + [0.0, 0.0]),
        ([0.0] * 18 + [5.0, 0.1], [10] * 20, [1.0] * 20),  # the only rewards there are
        # A tenth of the steps under fifty names does not decide what is usual.
        ([1.0] * 18 + [100.0] * 50, [100] * 18 + [4] * 50, [1.0] * 18 + [0.0] * 50),
        # Nor does one player with most of the steps.
        ([100.0] + [1.0] * 19, [5_000] + [400] * 19, [0.0] + [1.0] * 19),
    ],
)
def test_rewards_of_few_players_that_are_much_larger_count_less(
    sizes: list[float], n_steps: list[int], scales: list[float]
):
    assert reward_scales(sizes, n_steps, [0.0] * len(sizes)).tolist() == scales


def test_players_whose_observations_are_mostly_false_are_not_believed():
    limits = {"obs": obs_limits([np.array([[0.0], [1.0], [2.0]])] * 10)}
    assert not false_rows({"obs": np.array([[0.0], [9.0], [1e5]])}, limits).any()
    assert false_rows({"obs": np.array([[1e7], [0.0], [-1e9]])}, limits).tolist() == [1, 0, 1]

    def scales(false_shares: list[float]) -> list[float]:
        believed: list[float] = reward_scales([1.0] * 20, [10] * 20, false_shares).tolist()
        return believed

    assert scales([0.5] * 18 + [0.6, 1.0]) == [1.0] * 18 + [0.0] * 2
    assert scales([0.9] * 7 + [0.0] * 13) == [1.0] * 20, "what a third of the steps shows is true"


def told_by_twenty(rewards: dict[int, list[float]]) -> Any:
    """A batch of twenty players, of whom some tell other rewards than about 1, and the players."""
    replay = HostReplay(GAME, Transitions(batch=256), ReplayConfig(capacity=4_096))
    source = ReplaySource(replay, None, updates=8, batch=256, root_seed=0)
    for session in range(20):
        own = rewards.get(session, [1 + session / 100])
        told = tuple(replace(step, reward=own[at % len(own)]) for at, step in enumerate(steps(20)))
        replay.insert(Piece(session, 0, told).chunk())
        replay.close(session_id(session))
    source.measure({session_id(session): bytes([session]) for session in range(20)})
    batch = source.draw(0, importance_exponent=0.0)
    return batch, batch.obs["obs"][..., 1], source.metrics


def test_lies_about_rewards_do_not_turn_what_is_learned_into_its_opposite():
    batch, player, metrics = told_by_twenty({18: [-4.0], 19: [-100.0]})
    assert (batch.weight[player == 19] == 0).all()
    assert metrics == {"unbelieved_players": 1}
    assert batch.reward[(player < 18) & (batch.weight > 0)].min() >= 1
    assert batch.reward[player == 18].min() == pytest.approx(-2 * 1.15), "twice what is usual"


def test_rewards_beyond_the_limit_do_not_count_because_others_are_scaled_down():
    batch, player, _ = told_by_twenty({18: [-9.9, -490.0], 19: [-9.9, -101.0, -130.0]})
    told = batch.weight * batch.reward
    assert told[player < 18].sum() > 5 * abs(told[player >= 18].sum())


def test_players_who_win_far_more_often_than_most_are_believed():
    rare = [0.0] * 9 + [1.0]
    batch, player, metrics = told_by_twenty(dict.fromkeys(range(17), rare) | {18: [1.0], 19: [1.0]})
    assert (batch.weight == 1).all()
    assert (batch.reward[player == 19] == 1).all()
    assert not metrics


def test_steps_of_who_plays_most_weigh_less_in_a_draw():
    replay = HostReplay(GAME, Transitions(batch=256), ReplayConfig(capacity=4_096))
    source = ReplaySource(replay, None, updates=8, batch=256, root_seed=0)
    lengths = [200, *[20] * 29]
    for session, length in enumerate(lengths):
        replay.insert(Piece(session, 0, steps(length)).chunk())
        replay.close(session_id(session))
    players = {session_id(session): bytes([session]) for session in range(30)}
    source.measure(players)
    batch = source.draw(0, importance_exponent=0.0)
    of_first = batch.obs["obs"][..., 1] == 0
    share = batch.weight[of_first].sum() / batch.weight.sum()
    assert share == pytest.approx(0.1, abs=0.02)
    assert of_first.mean() == pytest.approx(200 / sum(lengths), abs=0.05)
    # All by one player, or by players who play alike: nothing is changed.
    replay.evict(session_id(29), 0)
    source.measure(dict.fromkeys(players, b"one"))
    assert (source.draw(1, importance_exponent=0.0).weight == 1).all()


@pytest.mark.parametrize(
    ("people", "bots"),
    [
        ([100], [100]),
        ([100] * 30, [300] * 30),
        ([100] + [10] * 29, [10] * 30),
        ([10] * 30, [100] + [10] * 29),
        ([500] * 10 + [0] * 20, [0] * 10 + [400] * 20),
    ],
)
def test_people_have_their_share_and_no_player_more_than_the_limit(
    people: list[int], bots: list[int]
):
    weights = shared_weights(people, bots, people_share=0.75)
    of_people = np.array(people) * weights.people
    of_bots = weights.bot_rate * np.array(bots) * weights.bots
    total = of_people.sum() + of_bots.sum()
    assert 0 < weights.bot_rate < 1
    assert of_people.sum() / total == pytest.approx(0.75)
    n_players = min(np.count_nonzero(people), np.count_nonzero(bots))
    assert max(of_people + of_bots) / total <= max(0.1, 2 / n_players) + 1e-9


@pytest.mark.parametrize(
    ("people", "bots", "people_share"),
    [
        ([], [], 0.75),
        ([900] + [10] * 29, [0] * 30, 0.75),
        ([900] + [10] * 29, [3] * 30, 0.75),  # bots have less than a quarter
        ([30, 60], [30, 0], 0.75),  # and exactly a quarter
        ([10] * 30, [900] * 30, 0.0),
        ([0] * 30, [900] + [10] * 29, 0.75),  # people's steps have expired or were erased
    ],
)
def test_where_bots_have_no_more_than_the_rest_nothing_changes(
    people: list[int], bots: list[int], people_share: float
):
    steps = [by_people + by_bots for by_people, by_bots in zip(people, bots, strict=True)]
    weights = shared_weights(people, bots, people_share=people_share)
    assert weights == (step_weights(steps), step_weights(steps), 1.0)


@pytest.mark.parametrize(("n_people", "repeats"), [(100_000, 1.5), (10_000, 4), (100, 4), (1, 4)])
def test_a_step_of_people_is_drawn_at_most_four_times_as_often(n_people: int, repeats: float):
    weights = shared_weights([n_people, 0], [0, 100_000], people_share=0.75)
    n_drawn = n_people + weights.bot_rate * 100_000
    assert (n_people + 100_000) / n_drawn == pytest.approx(repeats)


def test_with_a_share_of_1_only_steps_of_people_are_learned():
    assert shared_weights([10, 0], [0, 100_000], people_share=1.0).bot_rate == 0.0


SHARE = 0.75


def source_of(*, people_share: float = SHARE, **more: Any) -> ReplaySource:
    replay = HostReplay(GAME, Transitions(batch=256, **more), ReplayConfig(capacity=4_096))
    return ReplaySource(replay, None, updates=16, batch=256, root_seed=0, people_share=people_share)


def play(source: ReplaySource, session: int, length: int, *, by: By) -> None:
    piece = Piece(session, 0, steps(length))
    source.insert(piece.chunk(by=np.append(np.full(length, by), 0).astype(np.uint8)))
    source.replay.close(session_id(session))


def drawn(source: ReplaySource) -> Batch:
    """The batches of 8 calls, 32,768 steps."""
    batches = [source.draw(call, importance_exponent=0.0) for call in range(8)]
    together: Batch = jax.tree.map(lambda *columns: np.stack(columns), *batches)
    return together


@pytest.mark.parametrize("more", [{}, {"n_step": 3}, {"prioritised": True}])
@pytest.mark.parametrize("people_share", [0.3, SHARE, 0.99])
def test_people_have_their_share_of_what_is_learned_also_after_steps_were_evicted(
    more: dict[str, Any], people_share: float
):
    source = source_of(people_share=people_share, **more)
    for session in range(10):
        play(source, session, 30, by=By.PERSON if session < 3 else By.BOT)

    def share() -> float:
        source.measure({session_id(session): bytes([session]) for session in range(20)})
        batch = drawn(source)
        by_people = batch.obs["obs"][..., 1] < 3
        if not more.get("prioritised"):
            assert (batch.weight == 1).all(), "bots' steps are drawn less often"
        return float(batch.weight[by_people].sum() / batch.weight.sum())

    # Four standard errors: those of a sum of weights are larger.
    error = 4 * math.sqrt(people_share * (1 - people_share) / 32_768)
    error *= 3 if more.get("prioritised") else 1
    assert share() == pytest.approx(people_share, abs=error)
    for session in (0, 4, 5):
        source.replay.evict(session_id(session), 0)
    assert share() == pytest.approx(people_share, abs=error)
    for session in range(1, 3):
        source.replay.evict(session_id(session), 0)
    assert share() == 0.0
    assert source.weights.drawn is None


def test_what_bots_decided_is_forgotten_with_its_steps():
    source = source_of()
    for session in range(400):
        play(source, session, 30, by=By.BOT)
    assert len(source.replay.chunk_ids()) < 150
    assert len(source._bot_rows) <= 2 * len(source.replay.chunk_ids()) + 1


def test_weights_are_found_again_if_as_many_steps_come_as_go():
    source = source_of(n_step=3)
    play(source, 0, 30, by=By.PERSON)
    play(source, 1, 2, by=By.PERSON)
    play(source, 2, 60, by=By.BOT)
    waiting = Piece(3, 0, steps(10))
    source.insert(waiting.chunk(by=np.append(np.full(10, By.BOT), 0).astype(np.uint8)))
    players = {session_id(session): bytes([session]) for session in range(4)}
    source.measure(players)
    before = source.replay.n_sampleable
    source.replay.evict(session_id(1), 0)
    source.replay.close(session_id(3))
    source.measure(players)
    fresh = source.of_players.row_weights(players, source._bot_rows, people_share=SHARE)
    assert source.replay.n_sampleable - before in (0, 1)
    assert source.weights.drawn is not None
    np.testing.assert_array_equal(source.weights.drawn, fresh.drawn)


def test_sessions_of_bots_alone_do_not_limit_people():
    weights = shared_weights([30] * 3 + [0] * 7, [0] * 3 + [30] * 7, people_share=0.75)
    assert set(weights.people) == set(weights.bots) == {1.0}
    # One host of bots has no more than what people leave.
    weights = shared_weights([100] + [10] * 29 + [0], [0] * 30 + [9_000], people_share=0.75)
    assert weights.people[:30] == step_weights([100] + [10] * 29)
    assert weights.bots[30] == 1.0


def test_the_share_of_people_and_the_limit_of_each_player_hold_together():
    source = source_of()
    players: dict[uuid.UUID, bytes] = {}
    for player in range(30):
        play(source, player, 200 if player == 0 else 20, by=By.PERSON)
        play(source, 30 + player, 200 if player == 1 else 20, by=By.BOT)
        players |= {session_id(session): bytes([player]) for session in (player, 30 + player)}
    source.measure(players)
    batch = drawn(source)
    session = batch.obs["obs"][..., 1]
    total = batch.weight.sum()
    assert batch.weight[session < 30].sum() / total == pytest.approx(SHARE, abs=0.01)
    for of_most, part in ((0, session < 30), (1, session >= 30)):
        own = batch.weight[part & (session % 30 == of_most)].sum()
        assert own / batch.weight[part].sum() == pytest.approx(0.1, abs=0.01)


def test_without_bots_batches_are_bit_identical_to_those_without_a_share():
    sources = source_of(), source_of(people_share=0.0)
    for source in sources:
        for session in range(30):
            by = (By.UNKNOWN, By.PERSON)[session % 2]
            play(source, session, 200 if session == 0 else 20, by=by)
        source.measure({session_id(session): bytes([session]) for session in range(30)})
    one, other = (drawn(source) for source in sources)
    assert one.weight.min() < 1
    for column in ("action", "reward", "discount", "weight"):
        assert getattr(one, column).tobytes() == getattr(other, column).tobytes()
    assert one.obs["obs"].tobytes() == other.obs["obs"].tobytes()


def test_steps_that_waited_for_the_next_chunk_count_as_those_of_its_episode():
    source = source_of(n_step=3)
    for number in range(3):
        piece = Piece(0, number, steps(10, first=10 * number, is_first=number == 0))
        source.insert(piece.chunk(by=np.append(np.full(10, By.BOT), 0).astype(np.uint8)))
    source.replay.close(session_id(0))
    play(source, 1, 10, by=By.PERSON)
    source.measure({})
    assert source.weights.drawn is not None
    # 30 steps of bots and 10 of people, who are to have three quarters.
    assert np.unique(source.weights.drawn).tolist() == pytest.approx([1 / 9, 1.0])
    batch = drawn(source)
    assert (batch.obs["obs"][..., 1] == 1).mean() == pytest.approx(SHARE, abs=0.01)


def test_a_rare_prize_is_believed_and_an_absurd_one_is_not():
    assert is_believable(50.0, 1.0)
    assert not is_believable(1e9, 1.0)
    assert is_believable(1e9, 0.0)


def test_a_players_own_absurd_rewards_do_not_count():
    rewards = np.full(1_000, -0.01, np.float32)
    rewards[::100] = 100.0  # a goal, which counts
    rewards[7] = 1e12
    assert reward_size(rewards) == 100.0
    assert reward_size(np.zeros(5, np.float32)) == 0.0


def test_one_bad_player_of_three_and_a_third_of_bad_rows_leave_the_limits_as_they_are():
    rng = np.random.default_rng(0)
    good = [rng.normal(size=(300, 2)) for _ in range(3)]
    low, high = obs_limits(good)
    assert (low > -20).all()
    assert (high < 20).all()
    spoiled = [good[0], good[1], np.full((300, 2), 1e6)]
    thirds = [np.where(rng.random((300, 1)) < 1 / 3, 1e6, rows) for rows in good]
    for bad in (spoiled, thirds, [thirds[0]]):
        low, high = obs_limits(bad)
        assert (low > -40).all()
        assert (high < 40).all()
        assert (low < -4).all()
        assert (high > 4).all()


def test_a_flag_that_few_rows_have_is_no_outlier():
    rows = (np.random.default_rng(0).random((256, 1)) < 0.05).astype(np.float32)
    low, high = obs_limits([rows])
    assert low[0] <= 0
    assert high[0] >= 1
    assert np.isinf(obs_limits([np.ones((10, 1))])).all(), "nothing to tell a range from"
