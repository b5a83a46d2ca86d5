"""The learner benchmark: ratios, order, guard, clock and evaluator, without peer environments."""

import argparse
import base64
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench import evaluator, guard, learning, run, table
from bench.against import link, payload
from bench.bootstrap import times_better
from bench.contest import (
    Outcome,
    compare_all,
    disagreements,
    in_order,
    learning_gate,
    on_cores,
    solve_all,
)
from bench.contestants import REQUIREMENTS, Contestant, ContestantError, Process
from bench.figures import Gate
from bench.measures import MEASURES, OURS, TRAINING, Goal, Measure
from bench.tasks import TASKS
from scripts import figures
from understudy.core.errors import ConfigError
from understudy.games import cartpole

PASSED = Gate(True, "solved")
REFERENCE = {"gemm_gflops": 100.0, "memcpy_gbs": 10.0}


def quiet(**kernels: float) -> guard.Reading:
    return guard.Reading(load=0.1, kernels=REFERENCE | kernels)


# --- Ratios ---------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_medians_and_within_its_interval():
    rng = np.random.default_rng(1)
    ours = rng.normal(1.0, 0.1, 10).tolist()
    theirs = rng.normal(10.0, 1.0, 10).tolist()
    times = times_better(ours, theirs, more_is_better=False)
    assert times.ratio == pytest.approx(np.median(theirs) / np.median(ours))
    assert times.low < times.ratio < times.high
    assert times == times_better(ours, theirs, more_is_better=False)


def test_the_ratio_is_inverted_when_more_is_better():
    assert times_better([30.0], [10.0], more_is_better=True).ratio == 3.0
    assert times_better([30.0], [10.0], more_is_better=False).ratio == pytest.approx(1 / 3)


def test_a_bootstrap_interval_has_about_its_nominal_coverage():
    rng = np.random.default_rng(2)
    trials = [
        times_better(
            rng.lognormal(0, 0.3, 10).tolist(),
            rng.lognormal(1, 0.3, 10).tolist(),
            more_is_better=False,
        )
        for _ in range(60)
    ]
    assert sum(times.low <= math.e <= times.high for times in trials) >= 51


def test_a_goal_is_met_only_by_the_lower_end():
    times = times_better([1.0, 2.0], [10.0, 20.0], more_is_better=False)
    assert times.ratio == 10.0
    assert not times.meets(10.0)
    assert times_better([1.0, 1.0], [10.0, 10.0], more_is_better=False).meets(10.0)


def test_an_unsolved_training_of_ours_counts_as_infinitely_slow():
    times = times_better([math.inf] * 3, [10.0, 11.0, 12.0], more_is_better=False)
    assert (times.ratio, times.low) == (0.0, 0.0)
    with pytest.raises(ConfigError, match="at least once"):
        times_better([], [1.0], more_is_better=True)


# --- Order ----------------------------------------------------------------------------------------


def test_contestants_run_in_turn_always_in_the_same_order():
    found = Outcome()
    order = list[str]()
    in_order(3, ["a", "b"], lambda at, name: order.append(f"{name}{at}"), found)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found.order == ["a", "b"] * 3


def test_a_failed_contestant_is_skipped_with_the_reason_and_the_others_continue():
    found = Outcome()

    def work(at: int, name: str) -> None:
        if name == "b" and at == 1:
            raise ContestantError("ended: no such module")

    in_order(3, ["a", "b"], work, found)
    assert found.order == ["a", "b", "a", "b", "a"]
    assert found.skipped == {"b": "ended: no such module"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a process to cores")
def test_a_measure_is_pinned_to_its_cores_and_restores_them():
    import os

    before = os.sched_getaffinity(0)
    with on_cores(1) as cores:
        assert os.sched_getaffinity(0) == set(cores) == {min(before)}
    assert os.sched_getaffinity(0) == before


# --- Guard ----------------------------------------------------------------------------------------


def test_a_quiet_machine_at_its_stored_speed_has_no_complaints():
    assert guard.complaints(quiet(gemm_gflops=95.0, memcpy_gbs=10.9), REFERENCE) == []


def test_a_high_load_and_changed_kernels_are_reported():
    assert "load average is 2.00" in guard.complaints(guard.Reading(load=2.0), REFERENCE)[0]
    assert "gemm_gflops" in guard.complaints(quiet(gemm_gflops=85.0), REFERENCE)[0]
    assert "memcpy_gbs" in guard.complaints(quiet(memcpy_gbs=11.5), REFERENCE)[0]
    assert "--calibrate" in guard.complaints(quiet(), None)[0]


def test_waiting_for_a_quiet_machine_times_out():
    pauses: list[float] = []
    looks = iter([["busy"], ["busy"], []])
    assert (
        guard.wait_until_quiet(lambda: next(looks), timeout_s=60, pause=pauses.append, every_s=5)
        == []
    )
    assert pauses == [5, 5]
    assert guard.wait_until_quiet(
        lambda: ["busy"], timeout_s=12, pause=pauses.append, every_s=5
    ) == ["busy"]
    assert len(pauses) == 5


def test_a_calibrated_reference_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "kernels", lambda: REFERENCE)
    path = tmp_path / "results" / "reference.json"
    assert guard.stored(path) is None
    guard.calibrate(path)
    assert guard.stored(path) == REFERENCE


def test_a_busy_machine_records_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.setattr(guard, "read", lambda: guard.Reading(load=9.0))
    monkeypatch.setattr(guard, "stored", lambda: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "inference", "--out", str(tmp_path)])
    assert run.main() == 2
    assert "--force" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_measure_is_rejected_with_the_list_of_measures(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    for words in ([], ["replays"]):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        with pytest.raises(SystemExit):
            run.main()
        assert "replay, inference, or all" in capsys.readouterr().err


# --- Clock and evaluator --------------------------------------------------------------------------


def test_nested_compilations_are_counted_once():
    assert link.union_s([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]) == 6.0
    assert link.union_s([]) == 0.0


def test_the_evaluator_distinguishes_a_good_player_from_a_bad_one():
    lean = [
        (
            np.array([[0.0, 0.0], [-0.5, 0.5], [-2.0, 2.0], [-1.5, 1.5]], np.float32),
            np.zeros(2, np.float32),
        )
    ]
    first, second = evaluator.judge(evaluator.dense_act(lean, "linear"))
    assert first == second == cartpole.MAX_EPISODE_STEPS
    first, second = evaluator.judge(lambda obs: np.zeros(len(obs), np.int64))
    assert first < 12
    assert second is None


def test_returns_equal_those_of_gymnasium_with_the_same_seeds():
    import gymnasium

    rng = np.random.default_rng(3)
    sizes = [(4, 8), (8, 2)]
    act = evaluator.dense_act(
        [(rng.normal(size=s).astype("f4"), rng.normal(size=s[1]).astype("f4")) for s in sizes],
        "tanh",
    )
    env = gymnasium.make("CartPole-v1")
    returns = []
    for seed in range(10):
        obs = env.reset(seed=seed)[0]
        total = 0
        is_over = False
        while not is_over:
            obs, _, terminated, truncated, _ = env.step(int(act(obs[None])[0]))
            total = total + 1
            is_over = terminated or truncated
        returns.append(total)
    env.close()
    assert evaluator.mean_return(act, range(10)) == np.mean(returns)


def test_layers_survive_their_json_line():
    layers = payload.weights("64-64")[1]
    obs = payload.questions("64-64")
    line = json.loads(json.dumps(link.dense(layers, "relu")))
    assert (evaluator.act_of(line)(obs) == evaluator.dense_act(layers, "relu")(obs)).all()


# --- Measures -------------------------------------------------------------------------------------


def test_every_measure_has_pinned_peers_and_goals_that_name_them():
    assert list(MEASURES) == ["solve-dqn", "solve-ppo", "collect", "replay", "inference"]
    for measure in MEASURES.values():
        names = [who.name for who in measure.contestants]
        assert names[0] == OURS
        assert {goal.peer for goal in measure.goals} <= set(names)
        for who in measure.contestants:
            if not who.is_ours:
                pins = (REQUIREMENTS / f"{who.environment}.txt").read_text().split()
                assert all("==" in pin for pin in pins)


def test_rows_drawn_from_a_replay_are_checked():
    block = payload.block("frames", 512)
    weight = np.linspace(0.1, 1.0, payload.BLOCK)
    assert payload.is_right(block["obs"], block["next_obs"], block["reward"], weight)
    assert not payload.is_right(block["obs"], block["obs"], block["reward"], weight)
    assert not payload.is_right(block["obs"], block["next_obs"], block["reward"], weight * 3)


def test_policies_that_decide_differently_are_named():
    answers = {
        "ours": {"64-64": [0] * 64},
        "peer": {"64-64": [0] * 63 + [1]},
        "other": {"64-64": [1] * 64},
    }
    assert disagreements(answers) == ["other and ours decide differently on 64-64"]


def test_the_learning_gate_needs_nine_of_ten_seeds():
    def gate(solved: int, seeds: int) -> bool:
        return learning_gate(
            "solve-dqn", Outcome(runs={OURS: [{"solved": at < solved} for at in range(seeds)]})
        ).passed

    assert gate(9, 10)
    assert gate(1, 1)
    assert not gate(8, 10)
    assert not gate(0, 0)


CONTESTANT = """
from bench.against.link import Training, dense, serve
def solve(link, request):
    training = Training(link)
    def run():
        for steps in range(256, 7681, 256):
            lean = request["settings"]["leans_at"] <= steps
            layers = [([[0, 0], [-.5, .5], [-2, 2], [-1.5, 1.5]] if lean else [[0, 0]] * 4, [0, 0])]
            print("a library prints what it likes")
            if not training.goes_on(steps, lambda: dense(layers, "linear")):
                break
        return {"steps": steps}
    return run
serve(["numpy"], {"solve-dqn": solve})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contestants that learn nothing, then everything at once."""
    (tmp_path / "fake_contestant.py").write_text(CONTESTANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, leans_at: Contestant(
        name=name, module="fake_contestant", settings={"leans_at": leans_at}
    )


def test_a_training_ends_when_its_weights_are_good_enough_and_excludes_evaluation_time(fake):
    measure = MEASURES["solve-dqn"]
    began_s = time.monotonic()
    found = solve_all(measure, [fake(OURS, 5000), fake("late", 9999)], seeds=1, quick=False)
    took_s = time.monotonic() - began_s
    ours = found.runs[OURS][0]
    late = found.runs["late"][0]
    assert (ours["solved"], ours["steps"], ours["held_out"]) == (True, 5120, 500.0)
    assert [look[0] for look in ours["curve"]] == [2560, 5120]
    assert (late["solved"], late["steps"], len(late["curve"])) == (False, 7680, 3)
    assert found.values[TRAINING][OURS][0] < took_s / 2
    assert learning_gate("solve-dqn", found).passed


def test_the_error_of_a_contestant_that_dies_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "fake_contestant.py").write_text("raise ImportError('no wheel for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ContestantError, match="no wheel for this machine"):
        Process(Contestant(name="x", module="fake_contestant"), {"do": "solve-dqn"})


def test_a_row_has_medians_interval_and_verdict(capsys):
    measure = Measure(
        name="replay",
        title="Replay",
        unit="µs",
        more_is_better=False,
        cores=1,
        parts={"p": {}},
        contestants=(
            Contestant(name=OURS, module="x"),
            Contestant(name="peer", module="x", environment="cpprb"),
        ),
        goals=(Goal("p: cycle", "peer", 5),),
    )
    found = Outcome(values={"p: cycle": {OURS: [1.0, 1.1, math.inf], "peer": [10.0, 10.0, 11.0]}})
    (row,) = run._rows(measure, found, PASSED)
    assert row["values"][OURS] == [1.0, 1.1, None]
    assert row["ratios"][0]["verdict"] == "missed"
    assert run._rows(measure, found, Gate(False, "not solved"))[0]["ratios"][0]["verdict"] == "void"
    result = {
        "title": "Replay",
        "scale": "full",
        "cores": [0],
        "rows": [row],
        "runs": {},
        "skipped": {"x": "no wheel"},
        "failed": [],
        "remarks": [],
        "notes": [],
        "gate": {"passed": True, "says": "solved"},
    }
    table.show(result)
    said = capsys.readouterr().out
    assert "9.09x" in said
    assert "skipped: x: no wheel" in said
    json.dumps(row, allow_nan=False)


def test_skipped_contestants_are_named_in_the_result_the_table_and_the_readme(
    monkeypatch: pytest.MonkeyPatch,
):
    measure = MEASURES["replay"]
    contestants, left_out = run._selected(measure, "torch")
    assert [who.name for who in contestants] == [OURS, "torchrl"]
    assert left_out == {"cpprb": "left out by --peers torch"}
    assert run._selected(measure, None) == (list(measure.contestants), {})

    monkeypatch.setattr(
        run, "compare_all", lambda *_, **__: Outcome(threads={OURS: 1, "torchrl": 1})
    )
    options = argparse.Namespace(peers="torch", quick=True, seeds=1, rounds=1)
    result = run._measure(measure, options, [], [PASSED])
    assert result["skipped"] == left_out
    assert "skipped: cpprb: left out by --peers torch" in table.remarks(result)
    result["rows"] = [{"values": {OURS: [1.0]}}]
    told = [
        "**left out**: cpprb (left out by --peers torch)",
        "**left out**: torchrl (not asked for)",
    ]
    assert figures._left_out(result) == told


def test_a_contestant_that_failed_in_one_part_is_not_started_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    (tmp_path / "fake_contestant.py").write_text("raise ImportError('no wheel for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = compare_all(
        MEASURES["replay"], [Contestant(name="x", module="fake_contestant")], rounds=1, quick=True
    )
    assert "no wheel for this machine" in found.skipped["x"]
    assert capsys.readouterr().out.count("not ready") == 1


def test_our_policies_have_the_same_weights_as_the_peers():
    from bench import ours
    from understudy.experience.game import game_spec

    net = "64-64"
    policy = ours._policy(game_spec("bench-test", obs=4, actions=2), net, kind="argmax")
    line = {"policy": base64.b64encode(policy.encode()).decode()}
    obs = payload.questions(net)
    assert (
        evaluator.act_of(line)(obs) == evaluator.dense_act(payload.weights(net)[1], "relu")(obs)
    ).all()


@pytest.mark.parametrize("kind", ["vector", "frames"])
def test_our_replay_receives_the_peers_blocks_as_chunks(kind):
    from bench import ours
    from understudy.core.names import new_session
    from understudy.core.tensors import DTYPES
    from understudy.experience.game import game_spec
    from understudy.experience.spaces import Box

    obs = 4 if kind == "vector" else Box(payload.FRAME, DTYPES["U8"])
    chunk = ours._chunk(
        game_spec("bench-test", obs=obs, actions=2), kind, 512, new_session(time.time())
    )
    assert (payload.numbers_of(chunk.columns["obs"]) == np.arange(512, 1025)).all()
    assert chunk.meta.chunk_no == 1


# --- Learning over seeds --------------------------------------------------------------------------


@pytest.mark.parametrize("unjudged", [0, 1, 2, 10])
def test_a_run_without_an_evaluation_counts_as_not_solved_and_is_reported(
    unjudged: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    runs = [
        {
            "solved": True,
            "return_mean": None if at < unjudged else 500.0,
            "env_steps": 10,
            "updates": 1,
            "seed": at,
        }
        for at in range(10)
    ]
    row = learning._row(TASKS[0], runs)
    assert (row["solved"], row["judged"], row["seeds"]) == (10 - unjudged, 10 - unjudged, 10)
    assert row["learned"] == (unjudged <= 1)
    assert row["iqm"] == (500.0 if unjudged < 10 else None)
    learning._show([json.loads(json.dumps(row))])
    assert (f"{unjudged} without evaluation" in capsys.readouterr().out) == (unjudged > 0)
