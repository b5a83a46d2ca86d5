"""The gate lets better models out and worse ones never, whatever the noise of a few episodes."""

import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.models.gate import Bounds, Evidence, GateDecision, ModelCheck, decision, looks

SOUND = (ModelCheck("finite", True), ModelCheck("golden", True))
BOUNDS = Bounds()


def judge(candidate: np.ndarray, champion: np.ndarray, bounds: Bounds = BOUNDS) -> GateDecision:
    """Live play as it arrives: compared at the looks of the bounds until there is a decision."""
    for count in looks(bounds):
        found = decision(
            Evidence(
                checks=SOUND,
                has_champion=True,
                candidate=candidate[:count],
                champion=champion[:count],
            ),
            bounds,
        )
        if found.decision != "wait":
            return found
    raise AssertionError("the last look decides")


def test_a_failed_check_rejects_with_any_returns():
    checks = (*SOUND, ModelCheck("latency", False, "90 ms, at most 5 are allowed"))
    found = decision(
        Evidence(checks=checks, has_champion=True, candidate=[9e9] * 99, champion=[0.0] * 99),
        BOUNDS,
    )
    assert found == GateDecision("reject", "latency: 90 ms, at most 5 are allowed")


def test_the_first_bot_needs_only_the_checks():
    assert decision(Evidence(checks=SOUND, has_champion=False), BOUNDS).decision == "promote"


def test_too_few_episodes_wait():
    found = decision(
        Evidence(checks=SOUND, has_champion=True, candidate=[1.0] * 29, champion=[0.0] * 500),
        BOUNDS,
    )
    assert (found.decision, found.why) == ("wait", "29 of 30 episodes of each bot")


def test_returns_that_are_not_finite_are_rejected():
    for bad in (np.nan, np.inf):
        found = decision(
            Evidence(checks=SOUND, has_champion=True, candidate=[bad], champion=[1.0]), BOUNDS
        )
        assert found.decision == "reject"


def test_of_a_thousand_worse_candidates_at_most_the_allowed_share_passes():
    """Right at the bound, with every look: the hardest case must keep the allowed error."""
    rng = np.random.default_rng(0)
    promoted = 0
    for _ in range(1_000):
        champion = rng.normal(100, 40, 480)
        candidate = rng.normal(100 - 5, 40, 480)
        promoted += judge(candidate, champion).decision == "promote"
    assert promoted <= 20  # 1 % of 1,000 is 10; 20 is above what chance does to that


def test_of_a_hundred_truly_better_candidates_at_least_ninety_five_pass():
    rng = np.random.default_rng(1)
    passed = sum(
        judge(rng.gamma(4, 50, 480), rng.gamma(4, 25, 480)).decision == "promote"
        for _ in range(100)
    )
    assert passed >= 95


def test_negative_returns_are_compared_alike():
    rng = np.random.default_rng(2)
    assert judge(rng.normal(-80, 10, 480), rng.normal(-200, 10, 480)).decision == "promote"
    assert judge(rng.normal(-300, 10, 480), rng.normal(-200, 10, 480)).decision == "reject"


def test_constant_returns_are_compared_too():
    assert judge(np.full(480, 500.0), np.full(480, 500.0)).decision == "promote"
    assert judge(np.full(480, 9.0), np.full(480, 500.0)).decision == "reject"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_episodes": 1},
        {"max_episodes": 10},
        {"worse_by": 1.0},
        {"error": 0.0},
        {"worse_by": -0.1},
    ],
)
def test_bounds_that_prove_nothing_are_rejected(wrong: dict[str, float]):
    with pytest.raises(ConfigError):
        Bounds(**wrong)  # type: ignore[arg-type]
