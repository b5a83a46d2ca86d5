"""Ranks candidates of bc and iql at several temperatures on recorded steps.

Only the best is released, so that players do not meet a bot whose training failed.

Games with few discrete actions only, and without grids and images: a Q network for each candidate
would take longer there than the training itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from understudy.algorithm import Batch
from understudy.experience.game import GameSpec
from understudy.learn.architecture import image_channels
from understudy.learn.centre import may_have_centre
from understudy.learn.ranking import Ranking, RankingConfig, best_of, choices_of
from understudy.nn.policy import Policy

TEMPERATURES = (0.05, 0.25, 0.5, 1.0)
"""The first is as good as greedy."""
MAX_ACTIONS = 32
"""With more, the choices of all candidates need much memory, and each one is rare."""
MAX_STEPS = 32_768
"""Recorded steps that candidates are ranked on; more cost memory."""


def may_rank(spec: GameSpec, *, stack: int) -> bool:
    """Whether candidates of a game are ranked; `stack`: observations per input."""
    has_images = any(image_channels(space) is not None for space in spec.obs_columns.values())
    is_small = stack == 1 and not has_images and not may_have_centre(spec)
    return spec.discrete is not None and spec.discrete.n <= MAX_ACTIONS and is_small


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy as it would be released."""

    algorithm: str
    temperature: float
    policy: Policy


class CandidateRanking:
    """Ranks the policies of bc and iql, each at several temperatures."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        steps: Batch,
        *,
        temperature: float,
        updates: int,
        seed: int,
    ) -> None:
        """`policies`: by algorithm, at a temperature of 1. `temperature`: another one to rank."""
        self.candidates = [
            Candidate(algorithm, value, policy.at_temperature(value))
            for algorithm, policy in sorted(policies.items())
            for value in sorted({*TEMPERATURES, temperature})
        ]
        choices = choices_of([candidate.policy for candidate in self.candidates], steps)
        clone = next(
            index
            for index, candidate in enumerate(self.candidates)
            if (candidate.algorithm, candidate.temperature) == ("bc", 1.0)
        )
        self._ranking = Ranking(
            self.candidates[0].policy.game,
            steps,
            choices,
            recorded=choices.now[clone],
            config=RankingConfig(updates=updates),
            seed=seed,
        )

    def step(self) -> bool:
        """Run one compiled call of updates; False if all were made before."""
        return self._ranking.step()

    def best(self) -> Candidate | None:
        """The supported candidate with the highest estimate; None if there is none."""
        index = best_of(self._ranking.estimates())
        return None if index is None else self.candidates[index]

    def facts(self) -> list[dict[str, Any]]:
        """The estimates of all candidates as plain values, for a manifest."""
        return [
            {
                "algorithm": candidate.algorithm,
                "temperature": candidate.temperature,
                "value": estimate.value,
                "support": estimate.support,
            }
            for candidate, estimate in zip(self.candidates, self._ranking.estimates(), strict=True)
        ]
