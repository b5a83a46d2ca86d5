"""Which policy is best and when a run is solved, on which seeds; engine and evaluator are fakes."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from understudy.act.evaluate import Evaluated
from understudy.cli.training_view import format_return
from understudy.core.tensors import Array
from understudy.learn.learner import LearnerCounts
from understudy.training.evaluation import AT_THE_END, CONFIRMING, WHILE_TRAINING
from understudy.training.events import CheckpointSaved, Evaluation, Event, Guarded
from understudy.training.folder import RunFolder, draw_curve
from understudy.training.settings import RunPart
from understudy.training.sinks import numbers_of
from understudy.training.training import Training

GOAL = 9.0
ONE_GOOD = np.array([500.0] + [math.nan] * 99)


class Rounds:
    """An engine of ten rounds that learns nothing."""

    def __init__(self, size: int = 1) -> None:
        self.steps = 0
        self._size = size
        self.learner: Any = SimpleNamespace(compile_s=0.0, counts=LearnerCounts())
        self.policy: Any = SimpleNamespace(encode=lambda: b"policy")

    @property
    def env_steps(self) -> int:
        return self.steps

    @property
    def is_done(self) -> bool:
        return self.steps == 10 * self._size

    def step(self) -> bool:
        self.steps += self._size
        return True

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return {}, {"steps": self.steps}

    def restore(self, arrays: Any, facts: Any) -> None:
        self.steps = facts["steps"]

    def close(self) -> None: ...


@dataclass
class Says:
    """An evaluator with fixed returns for each series."""

    answers: dict[int, Array]
    asked: list[tuple[int, int]] = field(default_factory=list)
    n_cut: int = 0

    def play(self, policy: Any, *, episodes: int, series: int, attempt: int = 0) -> Evaluated:
        self.asked.append((series, attempt))
        return Evaluated(self.answers[series], self.n_cut)


def training(
    folder: Path, evaluator: Says, heard: list[Event] | None = None, *, extensions: int = 0
) -> Training:
    part = RunPart(eval_every=1, checkpoint_every=1)
    run = RunFolder(folder)
    run.cut_curve(100)
    run.policy = lambda name="best": None  # type: ignore[assignment, method-assign, return-value]
    return Training(
        Rounds(),
        run,
        part,
        evaluator=evaluator,  # type: ignore[arg-type]
        until=GOAL,
        on_event=None if heard is None else heard.append,
        extensions=extensions,
    )


@pytest.mark.parametrize(
    ("interval", "saved"),
    [
        (300, [256 * n for n in range(1, 11)]),
        (512, [256, 768, 1_280, 1_792, 2_304, 2_560]),
        (700, [256, 768, 1_280, 1_792, 2_304, 2_560]),
        (100, [256 * n for n in range(1, 11)]),
    ],
)
def test_no_more_than_an_interval_is_repeated_whatever_the_size_of_a_round(
    interval: int, saved: list[int], tmp_path: Path
):
    run = RunFolder(tmp_path)
    heard = list[Event]()
    run.cut_curve(100)
    part = RunPart(eval_every=10**6, checkpoint_every=interval)
    evaluator: Any = Says({WHILE_TRAINING: every(1.0)})
    Training(Rounds(256), run, part, evaluator=evaluator, until=None, on_event=heard.append).run()
    at = [event.env_steps for event in heard if isinstance(event, CheckpointSaved)]
    assert sorted(set(at)) == saved
    assert max(np.diff(at)) <= max(interval, 256)


def every(value: float) -> Array:
    return np.full(100, value)


def test_every_confirmation_and_the_last_hundred_have_seeds_of_their_own_also_after_a_resume(
    tmp_path: Path,
):
    evaluator = Says({WHILE_TRAINING: every(10.0), CONFIRMING: every(8.0), AT_THE_END: every(8.5)})
    first = training(tmp_path, evaluator)
    for _ in range(4):
        first.step()
    second = training(tmp_path, evaluator)
    assert second.resume()
    second.run()
    assert [attempt for series, attempt in evaluator.asked if series == CONFIRMING] == list(
        range(10)
    )
    assert (AT_THE_END, 0) not in evaluator.asked
    assert second.final_returns() is not None
    assert evaluator.asked[-1] == (AT_THE_END, 0)
    assert not second.is_solved


@pytest.mark.parametrize(("episodes", "has_interval"), [(4, False), (5, True)])
def test_below_five_episodes_there_is_no_interval(
    episodes: int, has_interval: bool, tmp_path: Path
):
    heard = list[Event]()
    one = training(tmp_path, Says({WHILE_TRAINING: np.arange(episodes) / 10}), heard)
    one.run()
    told = next(event for event in heard if isinstance(event, Evaluation))
    assert (told.low is not None, told.high is not None) == (has_interval, has_interval)
    row = (tmp_path / "curve.csv").read_text().splitlines()[1].split(",")
    assert ([cell != "" for cell in row[4:6]], row[6]) == ([has_interval] * 2, "nan")
    rows = RunFolder(tmp_path).cut_curve(100)
    assert len(rows) == len(RunFolder(tmp_path).curve_rows()) == 10
    assert math.isnan(rows[0]["return_low"]) is not has_interval
    draw_curve(RunFolder(tmp_path), title="", goal=None)
    assert numbers_of(told).keys() == {"evaluation/return"} | (
        {"evaluation/low", "evaluation/high"} if has_interval else set()
    )
    assert ("(" in format_return(told)) is has_interval


def test_a_confirmed_run_ends_with_the_returns_that_confirmed_it(tmp_path: Path):
    evaluator = Says({WHILE_TRAINING: every(10.0), CONFIRMING: every(9.5)}, n_cut=3)
    one = training(tmp_path, evaluator)
    one.run()
    assert (one.engine.steps, one.is_solved) == (1, True)
    assert one.final_returns() is evaluator.answers[CONFIRMING]
    assert one.final_cut == 3
    resumed = training(tmp_path, Says({}))
    assert resumed.resume()
    assert (resumed.is_solved, resumed.final_cut) == (True, 3)


@pytest.mark.parametrize(("later", "attempt"), [(8.0, 0), (8.7, 1)])
def test_a_run_that_is_extended_tests_the_same_policy_on_the_same_seeds(
    later: float, attempt: int, tmp_path: Path
):
    evaluator = Says({WHILE_TRAINING: every(8.5), CONFIRMING: every(8.0), AT_THE_END: every(8.0)})
    training(tmp_path, evaluator).run()
    evaluator.answers[WHILE_TRAINING] = every(later)
    longer = training(tmp_path, evaluator, extensions=1)
    assert longer.resume()
    longer.engine.steps = longer.evaluated_steps = 5  # type: ignore[misc]
    longer.run()
    longer.final_returns()
    assert evaluator.asked[-1] == (AT_THE_END, attempt)


def test_time_spent_compiling_and_confirmations_are_counted_over_resumes(tmp_path: Path):
    evaluator = Says({WHILE_TRAINING: every(10.0), CONFIRMING: every(8.0)})
    first = training(tmp_path, evaluator)
    first.clocks.compile_s = 2.5
    first.step()
    second = training(tmp_path, evaluator)
    assert second.resume()
    assert (second.clocks.compile_s, second.confirmations) == (2.5, 1)


@pytest.mark.parametrize(
    ("while_training", "at_the_end", "is_solved"), [(10.0, 9.0, True), (8.9, 10.0, False)]
)
def test_the_goal_must_be_reached_in_an_evaluation_and_at_the_end(
    while_training: float, at_the_end: float, is_solved: bool, tmp_path: Path
):
    evaluator = Says(
        {
            WHILE_TRAINING: every(while_training),
            CONFIRMING: every(0.0),
            AT_THE_END: every(at_the_end),
        }
    )
    one = training(tmp_path, evaluator)
    one.run()
    assert not one.is_solved
    one.final_returns()
    assert one.is_solved is is_solved


def test_one_good_return_among_many_that_are_not_finite_is_no_best_and_no_goal(tmp_path: Path):
    evaluator = Says({WHILE_TRAINING: ONE_GOOD, AT_THE_END: ONE_GOOD})
    heard = list[Event]()
    one = training(tmp_path, evaluator, heard)
    one.run()
    assert one.final_returns() is None
    assert (one.is_solved, one.best_mean) == (False, -math.inf)
    assert not (tmp_path / "best.safetensors").exists()
    assert [row["return_mean"] for row in RunFolder(tmp_path).curve_rows()] == [500.0] * 10
    assert {event.mean for event in heard if isinstance(event, Evaluation)} == {500.0}
    assert not any(event.is_best for event in heard if isinstance(event, Evaluation))
    assert any("99 of 100" in event.what for event in heard if isinstance(event, Guarded))


@dataclass
class InterruptedOnce(Says):
    """Is interrupted in the first episodes of a series."""

    series: int = CONFIRMING

    def play(self, policy: Any, *, episodes: int, series: int, attempt: int = 0) -> Evaluated:
        played = super().play(policy, episodes=episodes, series=series, attempt=attempt)
        if series == self.series:
            self.series = -1
            raise KeyboardInterrupt
        return played


def test_an_evaluation_that_was_interrupted_is_repeated_as_if_it_had_not_begun(tmp_path: Path):
    evaluator = InterruptedOnce({WHILE_TRAINING: every(10.0), CONFIRMING: every(8.0)})
    first = training(tmp_path, evaluator)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    heard = list[Event]()
    second = training(tmp_path, evaluator, heard)
    assert second.resume()
    RunFolder(tmp_path).cut_curve(second.evaluated_steps)
    second.run()
    evaluations = [event for event in heard if isinstance(event, Evaluation)]
    assert [event.is_best for event in evaluations] == [True] + [False] * 9
    confirmed = [attempt for series, attempt in evaluator.asked if series == CONFIRMING]
    assert confirmed == [0, *range(10)]


def test_an_interrupt_loses_no_row_of_the_curve(tmp_path: Path):
    first = training(tmp_path, Says({WHILE_TRAINING: every(1.0)}))

    def interrupt(row: Any) -> None:
        raise KeyboardInterrupt

    first.folder.add_to_curve = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = training(tmp_path, Says({WHILE_TRAINING: every(1.0)}))
    assert second.resume()
    RunFolder(tmp_path).cut_curve(second.evaluated_steps)
    second.run()
    assert [row["env_steps"] for row in RunFolder(tmp_path).curve_rows()] == list(range(1, 11))


def test_a_confirmation_needs_every_return_finite(tmp_path: Path):
    one = training(
        tmp_path, Says({WHILE_TRAINING: every(10.0), CONFIRMING: ONE_GOOD, AT_THE_END: ONE_GOOD})
    )
    one.run()
    assert one.final_returns() is None
    assert not one.is_solved
