"""Trials in lanes: what they report, how they end, and what they do not depend on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import understudy
from understudy.algorithm import Schedule
from understudy.learn.algorithms.dqn import DqnKnobs
from understudy.learn.learner import Learner
from understudy.learn.replay_source import Limiter
from understudy.training.env_info import GameChoice, inspect_env
from understudy.tuning import lanes as lanes_module
from understudy.tuning.lanes import Lanes
from understudy.tuning.trial import Report, Trial, TrialResult

SETTINGS = {
    "steps": 96,
    "envs": 2,
    "collect": 4,
    "updates_per_call": 1,
    "samples_per_insert": 8.0,
    "min_inserts": 16,
    "capacity": 512,
    "batch": 32,
    "widths": [8],
    "n_step": 2,
    "eval_every": 40,
    "eval_episodes": 5,
    "learning_rate": {"start": 1e-3, "end": 1e-4},
    "epsilon": {"start": 1.0, "end": 0.1, "until": 0.5},
}
CONFIG: dict[str, Any] = {
    "game": "CartPole-v1",
    "algorithm": "dqn",
    "preset": None,
    "settings": SETTINGS,
    "lanes": 3,
}
PROGRAMS: dict[str, Any] = {}


def lanes_of(**config: Any) -> Lanes:
    """Lanes that share their compiled programs with those of other tests."""
    lanes = Lanes(CONFIG | config)
    create = lanes._new_program

    def shared(settings: Any) -> Any:
        program = create(settings)
        program._call = PROGRAMS.setdefault(lanes._bucket(settings), program._call)
        return program

    lanes._new_program = shared  # type: ignore[method-assign]
    return lanes


def trial(trial_no: int, **values: Any) -> Trial:
    return Trial(trial_no=trial_no, values=values, seed=trial_no)


def run_all(lanes: Lanes, trials: Sequence[Trial], stop: Any = ()) -> dict[int, TrialResult]:
    """Results by number; trials whose number is in `stop` end at their first report."""
    queue = list(trials)
    results: dict[int, TrialResult] = {}
    n_running = 0
    for _ in range(200):
        while queue and n_running < lanes.lanes:
            lanes.start(queue.pop(0))
            n_running += 1
        for told in lanes.step():
            if isinstance(told, Report):
                lanes.answer(told.trial_no, must_stop=told.trial_no in stop)
            else:
                results[told.trial_no] = told
                n_running -= 1
        if not queue and not n_running:
            return results
    raise AssertionError(f"only {sorted(results)} ended")


def test_trials_end_with_metrics_and_reports():
    results = run_all(lanes_of(), [trial(number) for number in range(5)])
    assert sorted(results) == [0, 1, 2, 3, 4]
    for result in results.values():
        assert result.state == "done"
        assert [step for step, _ in result.reports] == [40, 80, 96]
        assert result.metrics["env_steps"] == 96
        assert result.metrics["updates"] == (96 - 16) * 8 // 32
        assert 5 < result.metrics["reward"] <= 500
        assert result.metrics.keys() == set(Lanes.metrics)


def test_a_trial_does_not_depend_on_its_lane_or_the_other_trials():
    values: list[dict[str, Any]] = [
        {"discount": 0.9},
        {"learning_rate": 1e-2},
        {"target_period": 3},
        {"steps": 48},
    ]
    trials = [trial(number, **own) for number, own in enumerate(values)]
    together = run_all(lanes_of(), trials)
    backwards = run_all(lanes_of(), trials[::-1])
    single = {
        number: result for own in trials for number, result in run_all(lanes_of(), [own]).items()
    }
    for number, result in together.items():
        for other in (backwards[number], single[number]):
            assert (other.metrics, other.reports) == (result.metrics, result.reports)


def test_a_stopped_trial_ends_with_its_last_report():
    results = run_all(lanes_of(), [trial(number) for number in range(4)], stop={1})
    stopped = results[1]
    assert stopped.state == "stopped"
    assert [step for step, _ in stopped.reports] == [40]
    assert stopped.metrics["reward"] == stopped.reports[0][1]
    assert stopped.metrics["env_steps"] == 40
    assert [results[number].state for number in (0, 2, 3)] == ["done"] * 3


def test_a_trial_that_waits_for_an_answer_trains_no_further():
    lanes = lanes_of()
    lanes.start(trial(0))
    lanes.start(trial(1, eval_every=1_000))
    told: list[Any] = []
    while not told:
        told += lanes.step()
    assert told == [Report(0, 40, told[0].value)]
    ended = [result for _ in range(8) for result in lanes.step()]
    assert [result.trial_no for result in ended] == [1]
    lanes.answer(0, must_stop=False)
    assert run_all(lanes_of(), [trial(0)])[0].metrics == run_on(lanes).metrics


def run_on(lanes: Lanes) -> TrialResult:
    """The result of the only trial in the lanes."""
    while True:
        for told in lanes.step():
            if isinstance(told, TrialResult):
                return told
            lanes.answer(told.trial_no, must_stop=False)


def test_invalid_values_and_updates_that_are_not_finite_fail_one_trial_only():
    trials = [
        trial(0),
        trial(1, learning_rate=-1.0),
        trial(2, prioritised=True),
        trial(3, max_gradient=1e6, learning_rate=1.0),
        trial(4),
    ]
    usual = run_all(lanes_of(), [trials[0], trials[4]])
    results = run_all(lanes_of(), trials)
    assert results[1].state == results[2].state == "failed"
    assert "learning_rate is -1.0" in results[1].error
    assert "prioritised=false" in results[2].error
    assert results[3].state == "done"  # large steps alone are finite
    for number in (0, 4):
        assert results[number].metrics == usual[number].metrics


def test_a_trial_whose_updates_stay_not_finite_fails(monkeypatch):
    lanes = lanes_of()
    knob = lanes_module._Training.knob

    def broken(own: Any, name: str, rounds: Any) -> Any:
        values = knob(own, name, rounds)
        return values * np.nan if name == "learning_rate" and own.trial.trial_no == 1 else values

    monkeypatch.setattr(lanes_module._Training, "knob", broken)
    results = run_all(lanes, [trial(number, steps=200, eval_every=1_000) for number in range(3)])
    assert results[1].state == "failed"
    assert "not finite; lower its learning rate" in results[1].error
    assert results[0].state == results[2].state == "done"
    assert results[0].metrics == run_all(lanes_of(), [trial(0, steps=200)])[0].metrics


def test_only_the_program_of_the_running_trials_has_memory_for_lanes(monkeypatch):
    monkeypatch.setattr("understudy.tuning.lanes._MAX_PROGRAMS", 2)
    lanes = lanes_of()
    batches = (32, 8, 32)
    rewards = []
    for number, batch in enumerate(batches):
        (result,) = run_all(lanes, [trial(0, batch=batch, steps=40)]).values()
        rewards.append(result.metrics["reward"])
        assert len(lanes._programs) <= 2
        assert [program._ring is not None for program in lanes._programs.values()] == (
            [False, True] if number else [True]
        )
    assert rewards[0] == rewards[2]
    lanes.start(trial(0, batch=16))  # a third program, which is compiled in its first step
    assert [program._ring is not None for program in lanes._programs.values()] == [False, True]
    assert list(lanes._programs) == [lanes.bucket(trial(0, batch=batch)) for batch in (32, 16)]


def test_buckets_differ_in_shapes_only():
    lanes = lanes_of()
    usual = lanes.bucket(trial(0))
    alike = {"discount": 0.5, "target_period": 7, "steps": 9, "samples_per_insert": 2}
    for name, value in alike.items():
        assert lanes.bucket(trial(1, **{name: value})) == usual
    others = {"widths": [9], "batch": 16, "capacity": 1_024, "double": False, "envs": 4}
    buckets = {lanes.bucket(trial(1, **{name: value})) for name, value in others.items()}
    assert len({usual, *buckets}) == 6


@pytest.mark.parametrize(
    "values", [{}, {"samples_per_insert": 0.3}, {"updates_per_call": 3, "min_inserts": 5}]
)
def test_updates_and_knobs_follow_the_learner(values):
    settings = lanes_of()._settings(trial(0, **values))
    own = lanes_module._Training(trial(0), settings, 0.0)
    config = settings.learner_config()
    assert config.limiter is not None
    limiter = Limiter(config.limiter)
    made = 0
    game = inspect_env(GameChoice(game="CartPole-v1")).spec
    algorithm = settings.algorithm_type(game, settings.config)
    learner = Learner(algorithm, settings.knobs, root_seed=0, config=config)
    for after in range(1, own.n_rounds + 1):
        limiter.inserted(own.steps_per_round)
        while limiter.updates_due(32) >= config.updates_per_call:
            limiter.sampled(32 * config.updates_per_call)
            made += config.updates_per_call
        assert own.updates(after) == made
        expected = learner.knobs_at(min(1.0, after * 8 / (settings.run.horizon or 96)))
        for name, value in expected.items():
            assert own.knob(name, np.array([after]))[0] == value
    assert isinstance(DqnKnobs().epsilon, Schedule)


@pytest.mark.parametrize(
    ("config", "values", "why"),
    [
        ({}, {"asynchronous": True}, "lock-step"),
        ({"game": "Acrobot-v1"}, {}, "Acrobot-v1"),
        ({"algorithm": "ppo", "settings": {}}, {}, "on-policy"),
    ],
)
def test_a_trial_that_lanes_cannot_train_fails_with_the_reason(config, values, why):
    result = run_all(lanes_of(**config), [trial(0, **values)])[0]
    assert result.state == "failed"
    assert why in result.error
    assert "set lanes=0" in result.error


def test_a_study_in_lanes_equals_itself_on_any_number_of_slots(tmp_path):
    settings = "\n".join(f"{name} = {value}" for name, value in SETTINGS.items() if name[0] != "l")
    settings = settings.replace("{'start': 1.0, 'end': 0.1, 'until': 0.5}", "0.1")
    (tmp_path / "study.toml").write_text(
        '[study]\ngame = "CartPole-v1"\nalgorithm = "dqn"\nmax_trials = 5\n'
        f"[settings]\n{settings.replace('False', 'false')}\n"
        "[space]\nlearning_rate = { min = 1e-4, max = 1e-2 }\n[slots]\nlanes = 2\n"
    )
    tables = [
        [
            (row.trial, row.result.state, row.result.metrics, row.result.reports)
            for row in understudy.tune(
                tmp_path / "study.toml",
                out=tmp_path / str(slots),
                slots=slots,
                settings={"lag": 4},
                oversubscribe=True,
            ).trials
        ]
        for slots in (1, 2)
    ]
    assert [state for _, state, _, _ in tables[0]] == ["done"] * 5
    assert tables[0] == tables[1]
