"""Calibration: the noise at which scripted bots score like people, from their play alone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from understudy.experience.skill import DEFAULT_NOISE
from understudy.models.calibration import (
    MIN_EPISODES,
    SkillPlayed,
    calibrate,
    has_moved,
    is_due,
    measured,
    targets,
)
from understudy.models.gate import Played

Score = Callable[[float], float]


def people(*means: float, episodes: int = 20, spread: float = 0.0, seed: int = 0) -> list[Played]:
    """Episodes of people with these mean returns."""
    rng = np.random.default_rng(seed)
    return [
        Played(at, 0.0, mean + float(spread * rng.normal()), f"player {number}")
        for at in range(episodes)
        for number, mean in enumerate(means)
    ]


@dataclass
class Simulated:
    """A bot whose mean score falls with its noise, played by many at both skills."""

    score: Score
    spread: float
    people: list[Played]
    is_win_or_loss: bool = False
    released: int = 50
    seed: int = 0

    def play(self, episodes: int) -> tuple[dict[str, float], int]:
        """The noise after so many episodes, and how often it was published."""
        rng = np.random.default_rng(self.seed)

        def returned(noise: float) -> float:
            mean = self.score(noise)
            if self.is_win_or_loss:
                return 1.0 if rng.random() < (1 + mean) / 2 else -1.0
            return mean + float(self.spread * rng.normal())

        released = [Played(at, 0.0, returned(0.0)) for at in range(self.released)]
        skilled: list[SkillPlayed] = []
        noise = dict(DEFAULT_NOISE)
        last = n_published = 0
        for _ in range(episodes):
            skill = "even" if rng.random() < 0.6 else "easy"
            skilled.append(SkillPlayed(skill, noise[skill], returned(noise[skill])))
            if is_due(len(skilled), last):
                last = len(skilled)
                found = calibrate(noise, self.people, released, skilled[-1024:])
                if has_moved(found, noise):
                    noise = found
                    n_published += 1
        return noise, n_published


BOTS: dict[str, Simulated] = {
    "linear": Simulated(lambda noise: 10 * (1 - noise), 3.0, people(3.0, 5.0, 7.0)),
    "one mistake is fatal": Simulated(lambda noise: 10 * float(np.exp(-8 * noise)), 3.0,
                                      people(2.0, 4.0, 6.0)),
    "most noise is harmless": Simulated(lambda noise: 10 * (1 - noise**4), 3.0,
                                        people(3.0, 5.0, 7.0)),
    "wins and losses": Simulated(lambda noise: 0.9 - 1.6 * noise, 1.0,
                                 people(-0.4, 0.0, 0.4), is_win_or_loss=True),
    "never played as released": Simulated(lambda noise: 10 * (1 - noise), 3.0,
                                          people(3.0, 5.0, 7.0), released=0),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTS)
def test_even_and_easy_converge_to_their_targets(name: str):
    bot = BOTS[name]
    goals = targets(bot.people)
    errors = []
    for seed in range(10):
        bot.seed = seed
        noise, n_published = bot.play(1_000)
        assert n_published < 25
        assert noise["easy"] >= noise["even"]
        errors.append([bot.score(noise[skill]) - goals[skill] for skill in ("even", "easy")])
    # A few standard errors of the mean over the newest half of a skill's episodes.
    assert np.abs(errors).max() < 0.35 * bot.spread
    assert np.sqrt(np.mean(np.square(errors))) < 0.15 * bot.spread


def test_a_bot_that_is_no_better_than_people_gets_no_noise():
    weak = Simulated(lambda noise: 3 * (1 - noise), 1.0, people(6.0, 8.0))
    assert weak.play(100)[0] == {"easy": 0.0, "even": 0.0}
    weak.released = 0
    assert weak.play(400)[0] == {"easy": 0.0, "even": 0.0}


def test_a_bot_that_became_weaker_than_people_thought_regains_its_noise():
    # All recent play was without noise, and above the target.
    skilled = [SkillPlayed("even", 0.0, 9.0)] * 30
    found = calibrate({"easy": 0.0, "even": 0.0}, people(4.0, 6.0), [], skilled)
    assert 0 < found["even"] <= 0.5


def test_noise_never_exceeds_random_play():
    strong = Simulated(lambda noise: 10 - noise, 0.5, people(1.0, 2.0))
    assert strong.play(500)[0] == {"easy": 1.0, "even": 1.0}


def test_each_person_counts_once_and_the_lower_half_is_easy():
    busy = people(10.0, episodes=500) + [
        Played(0, 0.0, 2.0, f"casual {number}") for number in range(3)
    ]
    assert targets(busy) == {"even": pytest.approx(4.0), "easy": pytest.approx(2.0)}
    alone = targets(people(5.0))
    assert alone == {"even": 5.0}
    skilled = [SkillPlayed("even", 0.25, 5.0)] * 30
    assert calibrate(DEFAULT_NOISE, people(5.0), [], skilled) == {"even": 0.25, "easy": 0.625}


def test_a_few_false_returns_cannot_decide():
    honest = [SkillPlayed("even", 0.25, 5.0 + at % 3) for at in range(200)]
    false = [SkillPlayed("even", 0.25, 1e20)]
    lying = [*people(*range(1, 10)), Played(0, 0.0, 1e20, "liar")]
    found = calibrate(DEFAULT_NOISE, lying, [], honest + false)
    assert targets(lying)["even"] == pytest.approx(5.5)
    assert found["even"] == pytest.approx(0.5, abs=0.13)


def test_too_little_play_changes_nothing():
    skilled = [SkillPlayed("even", 0.25, 100.0)] * MIN_EPISODES
    few = people(1.0, episodes=9)
    assert calibrate(DEFAULT_NOISE, few, [], skilled) == DEFAULT_NOISE
    assert calibrate(DEFAULT_NOISE, people(1.0, 2.0), [], [])["even"] == 0.25
    assert not is_due(MIN_EPISODES - 1, 0)
    assert is_due(MIN_EPISODES, 0)
    assert not is_due(124, 100)
    assert is_due(125, 100)


def test_the_newest_half_of_a_skill_is_shown():
    skilled = [SkillPlayed("even", 0.25, 1.0)] * 10 + [SkillPlayed("even", 0.4, 3.0)] * 10
    rows = measured({"easy": 0.5, "even": 0.4}, people(3.0), skilled)
    assert rows["even"] == {"noise": 0.4, "target": 3.0, "episodes": 10, "mean": 3.0}
    assert rows["easy"] == {"noise": 0.5, "target": None, "episodes": 0, "mean": None}


def test_in_a_game_against_the_bot_even_means_that_both_win_equally_often():
    # What the bot wins, people lose: so the target moves with the bot.
    for seed in range(10):
        rng = np.random.default_rng(seed)
        skilled: list[SkillPlayed] = []
        theirs: list[Played] = [Played(0, 0.0, -1.0, f"player {at % 5}") for at in range(20)]
        noise = dict(DEFAULT_NOISE)
        last = 0
        for at in range(1_000):
            won = 1.0 if rng.random() < 0.95 - 0.8 * noise["even"] else -1.0
            skilled.append(SkillPlayed("even", noise["even"], won))
            theirs.append(Played(at, 0.0, -won, f"player {at % 5}"))
            if is_due(len(skilled), last):
                last = len(skilled)
                noise = calibrate(noise, theirs[-1024:], [], skilled[-1024:])
        assert 0.95 - 0.8 * noise["even"] == pytest.approx(0.5, abs=0.1)
