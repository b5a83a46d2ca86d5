"""Seeds, noise and sessions are functions of the root seed."""

import numpy as np

from understudy.act.chance import actor_session, episode_seeds, noise_rng
from understudy.core.names import session_time_s


def test_an_episodes_seed_needs_no_episode_before_it():
    whole = episode_seeds(3, env=2, first=0, n=50)
    assert whole.dtype == np.uint32
    assert episode_seeds(3, env=2, first=20, n=5).tolist() == whole[20:25].tolist()


def test_seeds_hardly_ever_meet():
    seeds = np.concatenate([episode_seeds(root, env=env, first=0, n=100) for root in range(5) for env in range(20)])
    assert len(np.unique(seeds)) > len(seeds) - 5
    assert 0.45 < (seeds / 2**32).mean() < 0.55


def test_noise_differs_by_root_env_and_round_only():
    first = noise_rng(1, env=0, round_no=0).random(4).tolist()
    assert noise_rng(1, env=0, round_no=0).random(4).tolist() == first
    for other in (noise_rng(2, env=0, round_no=0), noise_rng(1, env=1, round_no=0), noise_rng(1, env=0, round_no=1)):
        assert other.random(4).tolist() != first


def test_sessions_are_dated_and_differ_by_incarnation():
    sessions = [
        actor_session(1_700_000_000_123, root_seed=root, env=env, incarnation=incarnation)
        for root in (1, 2) for env in (0, 1) for incarnation in (0, 1)
    ]  # fmt: skip
    assert len(set(sessions)) == 8
    assert {session.version for session in sessions} == {7}
    assert {session_time_s(session) for session in sessions} == {1_700_000_000.123}
