"""Windows of a stretch: both forms against each other, and against `core.windows`."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.trajectories import Trajectory, rows_of, trajectories
from understudy.core.algorithm import Transitions
from understudy.core.windows import join, n_step, stack
from understudy.learn.compiled_rows import compiled_windows_of
from understudy.learn.stretch import windows_of


def weighed_rows_of(trajectory: Trajectory) -> dict[str, Any]:
    columns = rows_of(list(trajectory.steps))
    return columns | {"weight": np.linspace(1, 2, len(columns["row"]), dtype=np.float32)}


shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))


@settings(deadline=None)
@given(trajectories(), shapes)
def test_the_compiled_form_answers_the_same(trajectory: Trajectory, shape: tuple[int, int, int]) -> None:
    needs = Transitions(batch=1, n_step=shape[0], stack=shape[1], discount=0.9)
    columns = weighed_rows_of(trajectory)
    one, other = (form(columns, shape[2], needs=needs) for form in (windows_of, compiled_windows_of))
    is_step = columns["row"] == 0
    np.testing.assert_allclose(one.returns[is_step], other.returns[is_step], rtol=1e-6, atol=1e-6)
    for name in ("factor", "ahead"):
        np.testing.assert_array_equal(getattr(one, name)[is_step], getattr(other, name)[is_step])
    np.testing.assert_array_equal(one.behind, other.behind)
    np.testing.assert_array_equal(one.weight, other.weight)
    assert one.n_open == other.n_open


def test_the_compiled_form_takes_columns_of_any_strides_alignment_and_permission() -> None:
    row, needs = np.array([0, 0, 1], np.uint8), Transitions(batch=1)
    spread = np.zeros((3, 2), np.bool_)[:, 0]
    raw = np.frombuffer(b"." + np.arange(3, dtype=np.float32).tobytes(), np.uint8)[1:].view(np.float32)
    assert not raw.flags.aligned
    assert not raw.flags.writeable
    columns = {"row": row, "is_first": spread, "terminated": spread, "reward": raw, "weight": raw}
    found = compiled_windows_of(columns, 0, needs=needs)
    np.testing.assert_array_equal(found.returns[:2], [0, 1])
    np.testing.assert_array_equal(found.weight, [0, 1, 0])


@settings(deadline=None)
@given(trajectories(), shapes)
def test_windows_are_those_of_the_shared_rules(trajectory: Trajectory, shape: tuple[int, int, int]) -> None:
    needs = Transitions(batch=1, n_step=shape[0], stack=shape[1], discount=0.9)
    columns = weighed_rows_of(trajectory)
    joined, found = join([columns]), windows_of(columns, 0, needs=needs)
    wanted = n_step(joined, n=shape[0], discount=0.9, session_open=False)
    np.testing.assert_allclose(found.returns[wanted.start], wanted.returns, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.factor[wanted.start], wanted.factor)
    np.testing.assert_array_equal(wanted.start + found.ahead[wanted.start], wanted.bootstrap)
    stacks = stack(joined, k=shape[1])
    np.testing.assert_array_equal(found.weight > 0, stacks.may_sample & (joined.row == 0))
    oldest = np.arange(len(joined)) - found.behind
    np.testing.assert_array_equal(oldest, stacks.rows[:, 0])
