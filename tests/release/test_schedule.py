"""The schedule decides from where a game stands alone: clones first, then candidates, never
ahead of the data."""

from dataclasses import replace

import pytest

from understudy.core.errors import ConfigError
from understudy.release.schedule import (
    LearnerStatus,
    LearningSchedule,
    algorithm_for,
    next_action,
    schedule_text,
)

SCHEDULE = LearningSchedule(dqn_updates=4_096, updates_per_step=4.0)
NEW = LearnerStatus(algorithm="bc", has_champion=False, has_canary=False)
DQN = LearnerStatus(
    algorithm="dqn", has_champion=True, has_canary=False, usable_steps=5_000, steps=5_000
)


def action(now: LearnerStatus, **changes: object) -> str:
    return next_action(replace(now, **changes), SCHEDULE).action  # type: ignore[arg-type]


def test_nothing_is_trained_below_a_thousand_steps_of_people_with_consent():
    found = next_action(replace(NEW, usable_steps=999), SCHEDULE)
    assert (found.action, found.why) == (
        "wait",
        "999 of 1000 steps of people with consent, then a clone is trained",
    )
    assert action(NEW, usable_steps=1_000) == "train"


def test_a_clone_is_released_when_it_is_trained():
    assert action(NEW, usable_steps=1_000, updates=2_047) == "train"
    assert action(NEW, usable_steps=1_000, updates=2_048) == "release"


def test_a_game_with_a_champion_and_a_discrete_action_learns_with_dqn_and_others_with_bc():
    assert algorithm_for(is_discrete=True, has_champion=False) == "bc"
    assert algorithm_for(is_discrete=True, has_champion=True) == "dqn"
    assert algorithm_for(is_discrete=False, has_champion=True) == "bc"


def test_a_game_with_clones_only_gets_the_next_when_people_have_played_half_as_much_again():
    later = replace(
        NEW, has_champion=True, released_steps=2_000, released_updates=2_048, updates=2_048
    )
    assert action(later, usable_steps=2_999) == "wait"
    assert action(later, usable_steps=3_000) == "train"
    assert action(later, usable_steps=3_000, updates=4_096) == "release"
    assert action(later, usable_steps=3_000, updates=4_096, has_canary=True) == "wait"


def test_a_candidate_needs_updates_and_new_steps_and_no_canary_before_it():
    due = {"updates": 4_096, "steps": 2_000}
    assert action(DQN, **due) == "release"
    assert action(DQN, updates=4_095) == "train"
    assert action(DQN, **due, has_canary=True) == "train"
    assert action(DQN, **due, released_steps=1) == "train"
    assert action(DQN, **due, released_updates=1) == "train"


def test_training_waits_at_the_limit_of_updates_per_step():
    found = next_action(replace(DQN, updates=20_000, released_updates=18_000), SCHEDULE)
    assert found.action == "wait"
    assert found.why.startswith("waiting for new steps")
    assert action(DQN, usable_steps=0) == "wait"  # all who played were forgotten


def test_the_schedule_is_shown_as_text():
    assert "dqn" in schedule_text(SCHEDULE, is_discrete=True)[1]
    assert "bc again" in schedule_text(SCHEDULE, is_discrete=False)[1]


@pytest.mark.parametrize(
    "wrong", [{"first_steps": 0}, {"bc_growth": 1.0}, {"updates_per_step": 0.0}]
)
def test_an_invalid_schedule_is_rejected(wrong: dict[str, float]):
    with pytest.raises(ConfigError):
        LearningSchedule(**wrong)  # type: ignore[arg-type]
