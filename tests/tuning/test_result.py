from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy
from tests.tuning.cheap import Quadratic, study
from understudy.arena.statistics import compare
from understudy.core.errors import ConfigError
from understudy.tuning.journal import Row, read_journal
from understudy.tuning.result import compare_studies, load_study, ranked, winner_test
from understudy.tuning.study import StudyEvent, StudyStarted, TrialEnded
from understudy.tuning.trial import Metric, Trial, TrialResult
from understudy.tuning.tune import tune

RNG = np.random.default_rng(3)
GOOD = (10 + RNG.normal(size=10)).tolist()
BAD = (5 + RNG.normal(size=10)).tolist()


def finalist(trial_no: int, tuned: float) -> Row:
    trial = Trial(trial_no=trial_no, values={"x": trial_no / 10}, seed=trial_no)
    return Row(trial, result(trial_no, tuned))


def result(trial_no: int, value: float | None) -> TrialResult:
    if value is None:
        return TrialResult(trial_no=trial_no, state="failed", error="it diverged")
    return TrialResult(trial_no=trial_no, state="done", metrics={"reward": value})


def outcome(first: Any, second: Any, criteria: Any = "max") -> Any:
    metric = Metric(criteria=criteria)
    results = [[result(no, value) for no, value in enumerate(own)] for own in (first, second)]
    return winner_test(metric, [finalist(4, 12.0), finalist(7, 11.0)], results)


def test_finalists_are_trained_on_seeds_that_the_search_never_used(tmp_path: Path):
    names: list[str] = []

    def on_event(event: StudyEvent) -> None:
        if isinstance(event, StudyStarted):
            names.append(event.name)

    found = tune(study(tmp_path / "s", test_seeds=6), on_event=on_event)
    assert names == ["cheap", "cheap on held-out seeds"]
    assert len(found.trials) == 12
    finalists = ranked(found.config, found.trials)[:2]
    numbers = [row.trial.trial_no for row in finalists]
    journal = tmp_path / "s" / f"test-{numbers[0]}-{numbers[1]}" / "journal.jsonl"
    rows = read_journal(journal).state.rows()
    assert [row.trial.values for row in rows] == [row.trial.values for row in finalists] * 6
    seeds = {row.trial.seed for row in rows}
    assert len(seeds) == 12
    assert not seeds & {row.trial.seed for row in found.trials}
    assert found.test is not None
    for index, each in enumerate(found.test.finalists):
        assert each.trial == finalists[index].trial
        assert each.scores == [row.result.metrics["reward"] for row in rows[index::2]]
    assert load_study(tmp_path / "s") == found
    assert found.is_finished


def test_a_stopped_test_is_resumed_and_ends_as_an_undisturbed_one(tmp_path: Path):
    quiet = tune(study(tmp_path / "quiet", test_seeds=5))
    n_ended = 0

    def stop_in_the_test(event: StudyEvent) -> Any:
        nonlocal n_ended
        n_ended += isinstance(event, TrialEnded)
        return understudy.Stop if n_ended == 15 else None

    stopped = tune(study(tmp_path / "s", test_seeds=5), on_event=stop_in_the_test)
    assert (stopped.ended, stopped.test, stopped.is_finished) == ("all 12 trials", None, False)
    resumed = tune(out=tmp_path / "s", resume=True)
    assert resumed.test == quiet.test
    assert tune(out=tmp_path / "s", resume=True).test == quiet.test


def test_an_extended_study_tests_its_new_finalists(tmp_path: Path):
    before = tune(study(tmp_path / "s", max_trials=2, test_seeds=5))
    after = tune(out=tmp_path / "s", resume=True, trials=20)
    assert before.test is not None
    assert after.test is not None
    tests = [[each.trial.trial_no for each in test.finalists] for test in (before.test, after.test)]
    assert sorted(tests[0]) == [0, 1]
    assert tests[1] == [row.trial.trial_no for row in ranked(after.config, after.trials)[:2]]
    assert {f"test-{a}-{b}" for a, b in tests} == {
        path.name for path in (tmp_path / "s").glob("test-*")
    }


def test_no_test_where_none_is_wanted_or_no_trial_can_be_the_best(tmp_path: Path):
    assert tune(study(tmp_path / "none")).is_finished
    found = tune(study(tmp_path / "broken", config={"reports": 0}, max_trials=1, test_seeds=5))
    assert found.test is not None  # one finalist has no rival
    assert found.test.verdict == "trial 0 has no rival"
    assert found.test.probability is None


def test_the_winners_curse_is_named():
    test = outcome(GOOD, BAD)
    assert test.gap == pytest.approx(12.0 - np.mean(GOOD))
    assert test.finalists[0].estimate.low < np.mean(GOOD) < test.finalists[0].estimate.high


def test_a_verdict_needs_an_interval_that_excludes_one_half():
    test = outcome(GOOD, BAD)
    assert test.probability == compare(GOOD, BAD, np.random.default_rng(0))
    assert test.is_decided
    assert test.verdict == "trial 4 is better than trial 7"
    assert outcome(BAD, GOOD).verdict == "trial 7 is better than trial 4"
    assert outcome(BAD, GOOD, "min").verdict == "trial 4 is better than trial 7"
    same = outcome(GOOD, GOOD[::-1])
    assert not same.is_decided
    assert same.verdict == "no winner yet: these seeds cannot tell trial 4 from trial 7"
    few = outcome(GOOD[:4], BAD[:4])
    assert "no winner yet: 4 seeds" in few.verdict
    assert "5 or more" in few.verdict


def test_a_training_that_failed_counts_as_the_worst():
    test = outcome([*GOOD[:4], *[None] * 6], BAD)
    assert (len(test.finalists[0].scores), test.finalists[0].n_failed) == (4, 6)
    assert test.probability.value == pytest.approx(0.4)
    nothing = outcome([None] * 10, [None] * 10)
    assert nothing.verdict == "trial 4 failed with every held-out seed"
    assert (nothing.gap, nothing.is_decided) == (None, False)


class Lucky(Quadratic):
    """Trial 0 is excellent in the search, and poor with other seeds."""

    def run(self, trial: Trial, report: Any) -> Any:
        is_test = Path(self._config["folder"]).name.startswith("test-")
        if not is_test and trial.trial_no == 0:
            return {"reward": 100.0, "cost": 1.0}
        return {"reward": float(trial.trial_no % 2) + 1e-3 * trial.trial_no, "cost": 1.0}


def test_a_runner_up_that_is_proven_better_is_the_best(tmp_path: Path):
    config = study(tmp_path / "s", max_trials=3, test_seeds=5)
    path = f"{__name__}:Lucky"
    found = tune(replace(config, trainable=replace(config.trainable, path=path)))
    assert found.test is not None
    assert [each.trial.trial_no for each in found.test.finalists] == [0, 1]
    assert found.best is not None
    assert found.best.trial.trial_no == 1
    assert found.tested.trial.trial_no == 1
    assert found.test.gap == pytest.approx(100.0 - np.mean(found.test.finalists[0].scores))


def test_studies_are_compared_by_their_tests(tmp_path: Path):
    one = tune(study(tmp_path / "one", test_seeds=5))
    two = tune(study(tmp_path / "two", max_trials=1, seed=9, test_seeds=5))
    expected = compare(one.tested.scores, two.tested.scores, np.random.default_rng(0))
    assert compare_studies(one, two) == expected
    assert one.test is not None
    finalists = [each._replace(scores=[], n_failed=5) for each in one.test.finalists]
    failed = replace(one, test=replace(one.test, finalists=finalists, probability=None))
    with pytest.raises(ConfigError, match="failed with every held-out seed"):
        compare_studies(failed, failed)
    none = tune(study(tmp_path / "none", max_trials=1))
    with pytest.raises(ConfigError, match="has no trainings on held-out seeds; finish it"):
        compare_studies(one, none)
    cost = tune(study(tmp_path / "cost", metric=Metric(name="cost", criteria="min"), test_seeds=5))
    with pytest.raises(ConfigError, match=r"metric reward \(max\), and .* cost \(min\)"):
        compare_studies(one, cost)


def test_trials_without_an_update_are_named(tmp_path: Path):
    study_of = load_study(tune(study(tmp_path / "s", max_trials=2)).folder)
    assert study_of.warnings == []
    rows = [
        Row(row.trial, replace(row.result, metrics={**row.result.metrics, "updates": updates}))
        for row, updates in zip(study_of.trials, (0.0, 3.0), strict=True)
    ]
    (warning,) = replace(study_of, trials=rows).warnings
    assert warning.startswith("1 of 2 trials ended before their first update")
