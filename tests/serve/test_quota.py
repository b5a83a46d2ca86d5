"""With more players the recording rate of each falls, and the total stays at the target."""

import random

import pytest

from tests.card import Card
from understudy.core.errors import ConfigError
from understudy.serve.state import Quota
from understudy.testing.clock import ManualClock

STEPS_S = 20
TARGET = 400.0


def play(
    quota: Quota, clock: ManualClock, players: int, seconds: int, rng: random.Random
) -> tuple[float, float]:
    """Kept steps a second in the second half, and each player's share; clients as ours are:
    whole episodes, or none."""
    shares = [1.0] * players
    left = [0] * players
    keeps = [True] * players
    skipped = [0] * players
    kept_late = 0
    for second in range(seconds):
        clock.advance(1.0)
        for one in range(players):
            if left[one] <= 0:
                left[one] = rng.randint(5, 40)
                keeps[one] = rng.random() < shares[one]
            left[one] -= 1
            if not keeps[one]:
                skipped[one] += STEPS_S
                if second % 5 != one % 5:
                    continue
            kept = STEPS_S if keeps[one] else 0
            shares[one] = quota.count_steps(kept, skipped[one])
            skipped[one] = 0
            kept_late += kept if second >= seconds // 2 else 0
    return kept_late / (seconds - seconds // 2), shares[0]


@pytest.mark.parametrize("players", [10, 100, 1_000])
def test_the_total_stays_within_a_tenth_of_the_target_and_the_share_falls_as_one_over_n(
    players: int, card: Card
):
    clock = ManualClock()
    total, share = play(Quota(TARGET, clock), clock, players, 400, random.Random(players))
    wanted = min(TARGET, players * STEPS_S)
    assert total == pytest.approx(wanted, rel=0.1)
    assert share == pytest.approx(wanted / (players * STEPS_S), rel=0.1)
    card.line("players under a quota: the total within 10 %", tried=players, held=players)


def test_without_a_target_the_recording_rate_is_1():
    clock = ManualClock()
    assert play(Quota(None, clock), clock, 50, 20, random.Random(0)) == (50 * STEPS_S, 1.0)


@pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf")])
def test_an_invalid_target_is_rejected(target: float):
    with pytest.raises(ConfigError, match="above 0"):
        Quota(target, ManualClock())
