import hashlib
import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from tests.tuning.cheap import space
from understudy.core.errors import ConfigError, MissingExtra
from understudy.tuning.search import (
    Asha,
    MedianStop,
    SearchPlan,
    has_converged,
    make_rule,
    make_searcher,
    trial_seed,
)
from understudy.tuning.space import read_space
from understudy.tuning.study_config import Constraint, ConvergenceConfig, StoppingConfig
from understudy.tuning.trial import Metric, Trial, TrialResult

PLAN = SearchPlan(space=space(), seed=5)
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the extra `optuna` is not installed"
)


def test_a_trial_does_not_depend_on_how_many_were_asked_before():
    for method in ("random", "sobol"):
        plan = replace(PLAN, method=method)
        in_order = make_searcher(plan)
        points = [in_order.ask(number) for number in range(300)]
        assert make_searcher(plan).ask(200) == points[200]
        assert make_searcher(plan).ask(7) == points[7]


def test_seeds_of_trials_differ_and_do_not_change_with_the_release():
    seeds = [trial_seed(0, number) for number in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds[:3] == [trial_seed(0, 0), trial_seed(0, 1), trial_seed(0, 2)]
    assert trial_seed(1, 0) != seeds[0]


def test_a_grid_has_each_combination_once_and_then_ends():
    searcher = make_searcher(replace(PLAN, method="grid", points=3))
    points = [searcher.ask(number) for number in range(10)]
    assert points[9] is None
    assert [(point["x"], point["width"]) for point in points[:4] if point] == [
        (0.0, 16),
        (0.0, 32),
        (0.0, 64),
        (0.5, 16),
    ]
    with pytest.raises(ConfigError, match="x: it is an interval"):
        make_searcher(replace(PLAN, method="grid"))


def test_sobol_points_are_spread_evenly():
    plan = replace(PLAN, space=read_space({name: {"min": 0.0, "max": 1.0} for name in "abcd"}))
    searcher = make_searcher(replace(plan, method="sobol"))
    points = np.array([list((searcher.ask(number) or {}).values()) for number in range(64)])
    for column in points.T:
        assert sorted((column * 64).astype(int)) == list(range(64))  # one in each 64th
    halves = (points[:, :2] * 8).astype(int)
    assert len({tuple(cell) for cell in halves}) == 64  # one in each cell of 8 times 8


def test_sobol_points_are_those_of_scipy_but_for_the_shift():
    names = [f"x{number}" for number in range(21)]
    plan = replace(PLAN, space=read_space({name: {"min": 0.0, "max": 1.0} for name in names}))
    searcher = make_searcher(replace(plan, method="sobol"))
    points = np.array([list((searcher.ask(number) or {}).values()) for number in range(256)])
    bits = (points * 2.0**32).astype("<i8")
    assert len(set(bits[0].tolist())) == 21  # each dimension has its own shift
    # Of qmc.Sobol(21, scramble=False, bits=32).random_base2(8), which takes a second to import.
    assert hashlib.sha256((bits ^ bits[0]).tobytes()).hexdigest() == (
        "5ea79a5c04407fee706a286be9c844bec58a82a3432f9d160ef58827124fdbaa"
    )


def test_an_unknown_method_or_rule_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'sobol'"):
        make_searcher(replace(PLAN, method="sobel"))
    with pytest.raises(ConfigError, match="did you mean 'asha'"):
        make_rule(replace_rule("ashaa"))


def replace_rule(rule: str) -> StoppingConfig:
    config = StoppingConfig()
    object.__setattr__(config, "rule", rule)
    return config


@pytest.mark.skipif(
    importlib.util.find_spec("optuna") is not None, reason="the extra `optuna` is installed"
)
def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(MissingExtra, match=r"pip install 'understudy\[optuna\]'"):
        make_searcher(replace(PLAN, method="tpe"))


@needs_optuna
def test_optuna_learns_from_results_and_keeps_to_constraints():
    constraint = Constraint(metric="cost", high=40)
    metric = Metric(name="loss", criteria="min")
    plan = replace(PLAN, method="tpe", metric=metric, constraints=[constraint])
    searcher = make_searcher(plan)
    late = []
    for number in range(60):
        values = searcher.ask(number)
        assert values is not None
        late.append(values)
        metrics = {"loss": (values["x"] - 0.3) ** 2, "cost": values["width"]}
        result = TrialResult(trial_no=number, state="done", metrics=metrics)
        searcher.tell(Trial(trial_no=number, values=values, seed=0), result)
    last = late[-20:]
    assert np.median([abs(values["x"] - 0.3) for values in last]) < 0.1
    assert sum(values["width"] <= 40 for values in last) >= 14


# --- Stopping rules -------------------------------------------------------------------------------


def test_asha_continues_the_best_share_at_each_rung():
    rule = Asha(StoppingConfig(rule="asha", min_reports=2, reduction=3))
    earlier = [[0.0, float(value), 0.0, 0.0, 0.0, float(value)] for value in range(5)]
    assert not rule.must_stop([9.0], earlier)  # no rung
    assert rule.must_stop([0.0, 2.5], earlier)
    assert not rule.must_stop([0.0, 3.5], earlier)
    assert not rule.must_stop([0.0, 0.0, 0.0], earlier)  # between two rungs
    assert rule.must_stop([9.0, 9.0, 9.0, 9.0, 9.0, 2.5], earlier)


def test_asha_stops_nothing_before_enough_trials_reached_the_rung():
    rule = Asha(StoppingConfig(rule="asha", min_reports=1, reduction=3))
    assert not rule.must_stop([0.0], [[1.0]])
    assert rule.must_stop([0.0], [[1.0], [2.0]])
    assert not rule.must_stop([2.0], [[2.0], [2.0]])  # as good as the best
    assert not rule.must_stop([0.0], [[], [], [1.0]])  # failed trials do not count


def test_the_median_rule_compares_the_best_report_with_the_mean_reports_of_others():
    rule = MedianStop(StoppingConfig(rule="median", min_reports=2))
    earlier = [[value - 1.0, value + 1.0] for value in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert rule.must_stop([2.9, 0.0], earlier)
    assert not rule.must_stop([3.1, 0.0], earlier)
    assert not rule.must_stop([0.0], earlier)
    assert not rule.must_stop([0.0, 0.0], earlier[:4])


# --- Convergence ----------------------------------------------------------------------------------


def test_a_study_converges_when_its_best_value_did_not_improve_for_long_enough():
    config = ConvergenceConfig(threshold=0.1, patience=3)
    assert not has_converged([1.0, 0.0, 0.0], config)
    assert has_converged([1.0, 0.0, 0.0, 0.0], config)
    assert has_converged([1.0, 0.0, None, 1.1], config)  # not by more than the threshold
    assert not has_converged([1.0, 0.0, None, 1.2], config)
    assert not has_converged([None, 0.0, 0.0, 0.0], config)  # nothing to improve
    assert not has_converged([1.0] * 9, ConvergenceConfig())


def test_the_legacy_rule_compares_the_last_two_trials_of_a_batch_from_the_third_batch_on():
    serial = ConvergenceConfig(threshold=0.1, is_legacy=True)
    assert not has_converged([1.0, 1.0], serial)
    assert has_converged([0.0, 1.0, 1.05], serial)
    assert not has_converged([1.0, 1.0, 2.0], serial)
    assert not has_converged([1.0, 1.0, None], serial)
    pairs = ConvergenceConfig(threshold=0.1, is_legacy=True, legacy_batch=2)
    assert not has_converged([1.0, 1.0, 1.0, 1.0], pairs)
    assert not has_converged([1.0, 1.0, 1.0, 1.0, 1.0], pairs)
    assert has_converged([0.0, 9.0, 0.0, 9.0, 1.0, 1.0], pairs)
    assert not has_converged([0.0, 9.0, 0.0, 9.0, 9.0, 1.0], pairs)
