"""Skill: how well a bot plays an episode, as the game asks for: as released, or easier.

An easier bot is the released one with *noise*, a number from 0 (as released) to 1 (a random valid
action each time). For discrete actions, noise is the probability of a random valid action; for a
Box, actions are moved towards random ones by this share. So no skill plays worse than at random.
The learner service calibrates the noise of each skill on play; a temperature is the game's choice.

A bot that *explores*, in a few episodes, plays more randomly than as released, so that learners see
what else works.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from understudy.core.errors import Refused

SKILLS = ("easy", "even", "hard")
DEFAULT_NOISE: Mapping[str, float] = MappingProxyType({"easy": 0.5, "even": 0.25})
"""Noise of the skills below `hard`, until the learner service has calibrated them."""
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MAX_EXPLORE_SHARE = 0.5
_EXPLORING_NOISE = 0.1


@dataclass(frozen=True, slots=True)
class BotSkill:
    """How a bot plays an episode if not as released: a skill with its noise, or a temperature."""

    name: str | None = None
    noise: float | None = None
    """None: not known yet, since no bot has decided; or a temperature was chosen."""
    temperature: float | None = None

    def with_noise(self, noise: Mapping[str, float]) -> "BotSkill":
        """The same skill with its noise, of a mapping from skills."""
        return self if self.name is None else replace(self, noise=noise[self.name])

    def to_note(self) -> dict[str, Any]:
        """The fields of the episode's note."""
        return {"skill": self.name, "noise": self.noise, "temperature": self.temperature}


def bot_skill(skill: str | None, temperature: float | None) -> BotSkill | None:
    """Return the skill that a game asks for; None: as released. Refused if it is not valid."""
    if temperature is not None:
        if skill is not None:
            raise Refused(
                "bad_skill",
                f"skill is {str(skill)[:40]!r} and temperature is {str(temperature)[:40]}; give "
                "one of the two",
            )
        is_number = isinstance(temperature, int | float) and type(temperature) is not bool
        if not is_number or not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise Refused(
                "bad_temperature",
                f"temperature is {repr(temperature)[:40]}; give a number from {MIN_TEMPERATURE:g} "
                f"to {MAX_TEMPERATURE:g}, where 1 is as released and more is more random",
            )
        return BotSkill(temperature=float(temperature))
    if skill is not None and skill not in SKILLS:
        raise Refused("bad_skill", f"skill is {repr(skill)[:40]}; give one of {', '.join(SKILLS)}")
    return None if skill in (None, "hard") else BotSkill(skill)


def exploring_skill(released_temperature: Any) -> BotSkill:
    """How a bot explores: as at a temperature of 1, if it was released at a lower one.

    Otherwise, as bots of dqn, it plays with a little noise.
    """
    is_number = isinstance(released_temperature, int | float)
    if is_number and MIN_TEMPERATURE <= released_temperature < 1:
        return BotSkill(temperature=1 / released_temperature)
    return BotSkill(noise=_EXPLORING_NOISE)


def checked_noise(noise: Any) -> dict[str, float]:
    """The noise by skill of a document; Refused unless each skill below `hard` has a valid one."""
    if (
        not isinstance(noise, dict)
        or noise.keys() != DEFAULT_NOISE.keys()
        or not all(is_noise(value) for value in noise.values())
    ):
        raise Refused(
            "bad_entry",
            f"the noise of the skills is {str(noise)[:80]}; expected a number from 0 to 1 for each "
            f"of {', '.join(DEFAULT_NOISE)}",
        )
    return {skill: float(noise[skill]) for skill in DEFAULT_NOISE}


def is_noise(value: Any) -> bool:
    """Whether a value is a valid noise."""
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1
