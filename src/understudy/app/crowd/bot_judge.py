"""BotJudge: plays every champion in the same held-out episodes, so that the first and the last can be compared.

Only whoever watches has the game; the learner has not.
"""

import numpy as np

from understudy.act.evaluate import evaluate
from understudy.act.vector import make_envs
from understudy.core.policy import Policy
from understudy.core.statistics import Estimate, mean
from understudy.games.rally import GAME_ID, OPPONENT

SERVES = 400
"""On how many champions of rally are judged, against one scripted opponent."""
EPISODES = 100


class BotJudge:
    """What champions return on the same seeds, in the order they came."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.is_match = env_id == GAME_ID
        self.episodes = SERVES if self.is_match else EPISODES
        self.told = f"{SERVES} serves against a {OPPONENT} scripted opponent" if self.is_match else (
            f"{EPISODES} held-out seeds"
        )  # fmt: skip
        kwargs = {"opponent": OPPONENT} if self.is_match else {}
        self._envs = make_envs(env_id, self.episodes, env_kwargs=kwargs)
        self._seeds = [(1 << 31) + 1_000 * seed + at for at in range(self.episodes)]
        self._found: dict[int, Estimate] = {}

    def look(self, model_no: int, policy: Policy) -> Estimate:
        """The mean return of a champion, with its interval."""
        self._found[model_no] = mean(np.asarray(evaluate(policy, self._envs, seeds=self._seeds)))
        return self._found[model_no]

    def words(self, found: Estimate) -> str:
        """A mean return for people: in a match as the share of points."""
        if not self.is_match:
            return f"returns {found.value:.0f} ({found.low:.0f} to {found.high:.0f}) on {self.told}"
        won = shares(found)
        return f"wins {won.value:.0%} ({won.low:.0%} to {won.high:.0%}) of {self.told}"

    @property
    def models(self) -> list[int]:
        return list(self._found)

    @property
    def first(self) -> Estimate:
        return next(iter(self._found.values()))

    @property
    def last(self) -> Estimate:
        return next(reversed(self._found.values()))

    @property
    def has_improved(self) -> bool:
        """Whether the newest champion's interval lies above the first one's."""
        if len(self._found) < 2 or self.last.low is None or self.first.high is None:
            return False
        return self.last.low > self.first.high


def shares(found: Estimate) -> Estimate:
    """A mean return of 1 for a point and -1 for one lost, as the share of points."""
    return Estimate(*(None if end is None else (1 + end) / 2 for end in (found.value, found.low, found.high)))  # type: ignore[arg-type]
