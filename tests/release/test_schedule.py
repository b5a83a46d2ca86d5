"""The schedule decides from where a game stands alone: clones first, then candidates, never
ahead of the data."""

from dataclasses import replace
from typing import Any

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


def test_the_steps_to_the_next_candidate_are_known():
    def missing(**facts: Any) -> int | None:
        return next_action(replace(NEW, **facts), LearningSchedule()).missing_steps

    assert missing(usable_steps=120) == 880
    assert missing(usable_steps=1_000) == 0
    released = {"released_steps": 1_000, "released_updates": 2_048, "updates": 2_048}
    assert missing(usable_steps=1_200, steps=1_200, **released) == 300
    assert missing(usable_steps=1_200, steps=1_200, has_canary=True, **released) == 1_050
    assert missing(algorithm="dqn", usable_steps=500, steps=500) == 1_500


def test_a_clone_is_released_when_it_is_trained():
    assert action(NEW, usable_steps=1_000, updates=2_047) == "train"
    assert action(NEW, usable_steps=1_000, updates=2_048) == "release"


def algorithm(schedule: LearningSchedule = SCHEDULE, **changes: Any) -> str:
    facts = {"is_discrete": True, "has_champion": True, "steps": 20_000} | changes
    return algorithm_for(schedule, **facts)


def test_a_game_with_a_champion_and_enough_steps_is_improved_and_others_are_cloned():
    assert algorithm() == "iql"
    assert algorithm(is_discrete=False) == "iql"
    assert algorithm(steps=19_999) == "bc"
    assert algorithm(has_champion=False) == "bc"
    with_dqn = LearningSchedule(improve_with="dqn", improve_steps=1)
    assert algorithm(with_dqn, steps=1) == "dqn"
    assert algorithm(with_dqn, is_discrete=False) == "bc"
    assert algorithm(LearningSchedule(improve_with="bc")) == "bc"


@pytest.mark.parametrize(
    ("name", "updates", "beside_canary"), [("bc", 2_048, 4_500), ("iql", 5_120, 3_000)]
)
def test_a_training_begins_anew_when_the_steps_have_grown_and_later_beside_a_canary(
    name: str, updates: int, beside_canary: int
):
    later = replace(
        NEW,
        algorithm=name,
        has_champion=True,
        usable_steps=3_000,
        released_steps=2_000,
        released_updates=updates,
        updates=updates,
    )
    assert action(later, steps=2_999) == "wait"
    assert action(later, steps=3_000) == "train"
    assert action(later, steps=beside_canary - 1, has_canary=True) == "wait"
    assert action(later, steps=beside_canary, has_canary=True) == "train"
    promising = replace(later, has_canary=True, canary_evidence=0.5)
    assert action(promising, steps=4_499) == "wait"
    assert action(promising, steps=4_500) == "train"
    untried = replace(later, has_canary=True, may_judge_canary=False)
    assert action(untried, steps=10_124) == "wait"
    assert action(untried, steps=10_125) == "train"
    assert action(replace(untried, has_canary=False), steps=3_000) == "train"
    begun = replace(later, steps=4_000, released_updates=0)
    assert action(begun, updates=0) == "train"
    assert action(begun, updates=updates - 1) == "train"
    assert action(begun) == "release"


def test_a_clone_that_failed_its_checks_is_not_trained_again_from_the_same_steps():
    failed = replace(NEW, released_steps=1_000, released_updates=2_048, updates=2_048)
    assert action(failed, usable_steps=1_000, steps=1_000) == "wait"
    assert action(failed, usable_steps=2_000, steps=2_000) == "train"


def test_a_restarted_training_does_not_wait_for_steps_that_were_forgotten():
    begun = replace(NEW, has_champion=True, released_steps=2_000, updates=128)
    assert action(begun, usable_steps=1_500, steps=1_500) == "train"


def test_the_smallest_growth_still_needs_new_steps():
    slow = replace(SCHEDULE, growth=1.001)
    done = replace(NEW, has_champion=True, usable_steps=2_000, released_updates=2_048)
    due = replace(done, released_steps=64, steps=64, updates=2_048)
    assert next_action(due, replace(slow, first_steps=10)).action == "wait"


def test_a_full_replay_does_not_end_the_learning():
    full = replace(
        NEW,
        has_champion=True,
        usable_steps=5_000,
        released_steps=8_000,
        released_updates=2_048,
        updates=2_048,
    )
    assert action(full, steps=11_999) == "wait"
    assert action(full, steps=12_000) == "train"


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
    def lines(*, is_discrete: bool = True, may_rank: bool = True, **changes: Any) -> list[str]:
        changed = replace(SCHEDULE, **changes)
        return schedule_text(changed, is_discrete=is_discrete, may_rank=may_rank)

    assert "bc again" in lines()[1]
    assert "iql" in lines(is_discrete=False, may_rank=False)[2]
    assert "dqn" in lines(improve_with="dqn")[2]
    assert len(lines(improve_with="dqn", is_discrete=False)) == 2
    assert "a clone (bc) is trained too, and 3072 updates rank both on recorded" in lines()[3]
    assert len(lines(ranking_updates=0)) == len(lines(may_rank=False)) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_steps": 0},
        {"iql_updates": 0},
        {"ranking_updates": -1},
        {"growth": 1.0},
        {"updates_per_step": 0.0},
        {"temperature": 0.0},
        {"people_share": -0.1},
        {"people_share": 1.1},
        {"people_share": float("nan")},
        {"improve_with": "ppo"},
    ],
)
def test_an_invalid_schedule_is_rejected(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        LearningSchedule(**wrong)
