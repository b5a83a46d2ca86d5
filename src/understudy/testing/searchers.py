"""The contract of the Searcher interface, as tests to subclass.

class TestMine(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        return MySearcher(plan)

A searcher that ends, as a grid does, sets `n_trials` to at most the number of its points.
"""

from collections.abc import Mapping
from dataclasses import replace

from understudy.tuning.search import SearchPlan, trial_seed
from understudy.tuning.space import read_space
from understudy.tuning.trial import Metric, Searcher, Trial, TrialResult, Values

LAG = 4
PLAN = SearchPlan(
    space=read_space(
        {
            "learning_rate": {"min": 1e-4, "max": 1e-1, "scale": "log"},
            "batch": {"min": 8, "max": 64, "step": 8},
            "depth": {"min": 1, "max": 3},
            "activation": ["relu", "tanh"],
        }
    ),
    seed=3,
    metric=Metric(name="reward"),
    points=3,
)


class SearcherContract:
    """Tests of a Searcher: subclass, define `make`, and run with pytest."""

    n_trials = 24
    is_random = True
    """Whether another seed gives other points."""

    def make(self, plan: SearchPlan) -> Searcher:
        """Create a searcher that was asked nothing yet."""
        raise NotImplementedError(
            "a subclass of SearcherContract must define make(): the searcher under test"
        )

    def test_every_point_is_in_the_space(self) -> None:
        for values in self._search(PLAN):
            assert PLAN.space.contains(values), f"{values} is no point of the space"

    def test_the_same_seed_and_results_give_the_same_points(self) -> None:
        assert self._search(PLAN) == self._search(PLAN)

    def test_another_seed_gives_other_points(self) -> None:
        is_equal = self._search(PLAN) == self._search(replace(PLAN, seed=4))
        assert is_equal != self.is_random

    def test_a_searcher_that_is_asked_again_continues_as_before(self) -> None:
        """As when a study is resumed."""
        points = self._search(PLAN)
        half = self.n_trials // 2
        assert self._search(PLAN, n_trials=half) == points[:half]

    def test_failed_and_stopped_trials_are_accepted(self) -> None:
        states: Mapping[int, TrialResult] = {
            0: TrialResult(trial_no=0, state="failed", error="the game ended"),
            1: TrialResult(
                trial_no=1, state="stopped", metrics={"reward": 0.1}, reports=((1, 0.0), (2, 0.1))
            ),
        }
        assert len(self._search(PLAN, results=states)) == self.n_trials

    def test_a_metric_to_minimize_is_accepted(self) -> None:
        plan = replace(PLAN, metric=Metric(name="reward", criteria="min"))
        assert len(self._search(plan)) == self.n_trials

    def _search(
        self,
        plan: SearchPlan,
        *,
        n_trials: int | None = None,
        results: Mapping[int, TrialResult] | None = None,
    ) -> list[Values]:
        """Ask and tell as a study does: a trial is told when the one LAG later is asked."""
        searcher = self.make(plan)
        trials: list[Trial] = []
        for trial_no in range(n_trials or self.n_trials):
            if trial_no >= LAG:
                told = trials[trial_no - LAG]
                reward = -abs(told.values["learning_rate"] - 0.01)
                result = TrialResult(
                    trial_no=told.trial_no, state="done", metrics={"reward": reward}
                )
                searcher.tell(told, (results or {}).get(told.trial_no, result))
            values = searcher.ask(trial_no)
            if values is None:
                break
            seed = trial_seed(plan.seed, trial_no)
            trials.append(Trial(trial_no=trial_no, values=values, seed=seed))
        return [trial.values for trial in trials]
