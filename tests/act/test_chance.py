"""Seeds, noise and sessions are functions of the root seed."""

import numpy as np
import pytest

from understudy.act.chance import (
    EpisodeSeeds,
    RoundNoise,
    actor_session,
    episode_seeds,
    episode_starts,
)
from understudy.core.names import session_time_s
from understudy.nn.heads import Head


def test_an_episodes_seed_needs_no_episode_before_it():
    starts = episode_starts(3, first_env=1, num_envs=3)
    whole = episode_seeds(starts, np.zeros(3, np.int64), n=50)
    assert whole.dtype == np.uint32
    later = episode_seeds(starts, np.array([20, 0, 44]), n=5)
    assert later.tolist() == [
        whole[0, 20:25].tolist(),
        whole[1, :5].tolist(),
        whole[2, 44:49].tolist(),
    ]
    assert episode_starts(3, first_env=3, num_envs=1)[0] == starts[2]


def test_seeds_rarely_collide():
    starts = np.concatenate([episode_starts(root, first_env=0, num_envs=20) for root in range(5)])
    seeds = episode_seeds(starts, np.zeros(100, np.int64), n=100)
    assert len(np.unique(seeds)) > seeds.size - 5
    assert 0.45 < (seeds / 2**31).mean() < 0.55
    assert seeds.max() < 2**31, "seeds from 2^31 on are held out"


def test_seeds_are_in_order_however_many_are_computed_ahead():
    heard: list[int] = []
    seeds = EpisodeSeeds(
        7, first_env=0, num_envs=2, prepare=lambda some: heard.extend(some.tolist())
    )
    wanted = episode_seeds(
        episode_starts(7, first_env=0, num_envs=2), np.zeros(2, np.int64), n=1200
    )
    first = [int(seeds.take(np.array([0]))[0]) for _ in range(1100)]
    both = seeds.take(np.array([0, 1])).tolist()
    assert first == wanted[0, :1100].tolist()
    assert both == [wanted[0, 1100], wanted[1, 0]]
    assert seeds.n_begun.tolist() == [1101, 1]
    assert {*first, *both} <= {*heard}


def test_noise_differs_by_root_env_and_round_only():
    head = Head(kind="categorical", size=3)

    def drawn(root_seed: int = 1, *, first_env: int = 0, num_envs: int = 1, round_no: int = 0):
        noise = RoundNoise(root_seed, first_env=first_env, num_envs=num_envs)
        noise.draw(head, 5, round_no=7)  # has no effect on other rounds
        return np.asarray(noise.draw(head, 4, round_no=round_no)).tolist()

    assert drawn() == drawn()
    for other in (drawn(2), drawn(first_env=1), drawn(round_no=1)):
        assert other != drawn()


@pytest.mark.parametrize("kind", ["epsilon_greedy", "categorical", "gaussian_tanh"])
def test_envs_draw_the_same_noise_however_they_are_divided_among_actors(kind: str):
    bounds = {"low": (-1.0, -1.0), "high": (1.0, 1.0)} if kind == "gaussian_tanh" else {}
    head = Head(kind=kind, size=2, **bounds)

    def drawn(first_env: int, num_envs: int) -> np.ndarray:
        noise = RoundNoise(3, first_env=first_env, num_envs=num_envs)
        return np.asarray(noise.draw(head, 9, round_no=2))

    whole = drawn(0, 6)
    assert whole.shape[:2] == (9, 6)
    assert np.concatenate([drawn(0, 4), drawn(4, 2)], axis=1).tobytes() == whole.tobytes()


def test_sessions_are_dated_and_differ_by_incarnation():
    sessions = [
        actor_session(1_700_000_000_123, root_seed=root, env=env, incarnation=incarnation)
        for root in (1, 2)
        for env in (0, 1)
        for incarnation in (0, 1)
    ]
    assert len(set(sessions)) == 8
    assert {session.version for session in sessions} == {7}
    assert {session_time_s(session) for session in sessions} == {1_700_000_000.123}
