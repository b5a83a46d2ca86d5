"""Held-out episodes judge where the recorded game is installed, and nobody misses them where it
is not."""

import gymnasium
import pytest

from tests.simulation.recordings import GAME, balancing_policy
from understudy.experience.game import spec_from_gymnasium
from understudy.release.gatekeeper import held_out_play


def test_the_recorded_game_is_played_on_the_same_seeds_by_everybody():
    spec = spec_from_gymnasium(gymnasium.make("CartPole-v1"))
    with held_out_play("CartPole-v1", spec, attempt=2, max_steps=1000) as play:
        assert play is not None
        weak, again, strong = (play(balancing_policy(spin=spin), 40) for spin in (0.0, 0.0, 0.5))
    assert weak.tolist() == again.tolist()
    assert weak.mean() < 60
    assert strong.mean() == 500
    with held_out_play("CartPole-v1", spec, attempt=3, max_steps=1000) as play:
        assert play is not None
        assert play(balancing_policy(), 40).tolist() != weak.tolist()


@pytest.mark.parametrize("env_id", [None, "", "No-Such-Game-v0", "CartPole-v1"])
def test_a_game_that_is_missing_or_differs_is_not_played(env_id: str | None):
    with held_out_play(env_id, GAME, attempt=1, max_steps=1000) as play:
        assert play is None
