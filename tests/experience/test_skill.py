"""What a game may ask of its bot."""

import math
from typing import Any

import pytest

from understudy.core.errors import Refused
from understudy.experience.skill import DEFAULT_NOISE, BotSkill, bot_skill, checked_noise


def test_hard_and_nothing_are_the_bot_as_released():
    assert bot_skill(None, None) is None
    assert bot_skill("hard", None) is None


def test_a_skill_gets_its_noise_and_a_temperature_has_none():
    even = bot_skill("even", None)
    assert even == BotSkill("even")
    assert even is not None
    assert even.with_noise(DEFAULT_NOISE) == BotSkill("even", 0.25)
    warm = bot_skill(None, 2)
    assert warm is not None
    assert warm.with_noise(DEFAULT_NOISE) == BotSkill(temperature=2.0)


@pytest.mark.parametrize(
    ("skill", "temperature", "reason", "text"),
    [
        ("medium", None, "bad_skill", "skill is 'medium'; give one of easy, even, hard"),
        (["easy"], None, "bad_skill", "give one of easy, even, hard"),
        ("", None, "bad_skill", "give one of easy, even, hard"),
        ("easy", 2.0, "bad_skill", "give one of the two"),
        ("hard", 2.0, "bad_skill", "give one of the two"),
        (None, 0, "bad_temperature", "temperature is 0; give a number from 0.01 to 100"),
        (None, -1.0, "bad_temperature", "give a number from 0.01 to 100"),
        (None, 101, "bad_temperature", "give a number from 0.01 to 100"),
        (None, math.nan, "bad_temperature", "give a number from 0.01 to 100"),
        (None, True, "bad_temperature", "give a number from 0.01 to 100"),
        (None, "hot", "bad_temperature", "temperature is 'hot'; give a number from 0.01 to 100"),
    ],
)
def test_bad_values_are_refused_with_what_to_give(
    skill: Any, temperature: Any, reason: str, text: str
):
    with pytest.raises(Refused) as caught:
        bot_skill(skill, temperature)
    assert caught.value.reason == reason
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "noise",
    [None, [], {}, {"easy": 0.5}, {"easy": 0.5, "even": 2}, {"easy": "1", "even": 0},
     {"easy": 1, "even": 0, "hard": 0}, {"easy": math.nan, "even": 0}, {"easy": True, "even": 0}],
)  # fmt: skip
def test_an_invalid_noise_of_the_skills_is_refused(noise: Any):
    with pytest.raises(Refused, match="the noise of the skills"):
        checked_noise(noise)
    assert checked_noise({"even": 0, "easy": 1}) == {"easy": 1.0, "even": 0.0}
