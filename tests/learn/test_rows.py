"""Windows of a span, in both implementations, against a walk over the rows one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experience.trajectories import Trajectory, rows_of, stacked, trajectories, walked
from understudy.algorithm import Transitions
from understudy.learn.rows import stack_rows, windows_of
from understudy.learn.sum_tree import compiled_windows_of

DISCOUNT = 0.9
FORMS = [windows_of, compiled_windows_of]

shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
"""Steps of a window, observations of a stack, lead-in rows."""


def weighed_rows_of(trajectory: Trajectory) -> dict[str, Any]:
    columns = rows_of(list(trajectory.steps))
    return columns | {"weight": np.linspace(1, 2, len(columns["row"]), dtype=np.float32)}


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None)
@given(trajectories(), shapes)
def test_windows_and_stacks_equal_a_plain_walk(
    form: Any, trajectory: Trajectory, shape: tuple[int, int, int]
) -> None:
    n, k, lead = shape
    columns = weighed_rows_of(trajectory)
    found = form(columns, lead, needs=Transitions(batch=1, n_step=n, stack=k, discount=DISCOUNT))
    rows = np.arange(len(columns["row"]))
    stacks = stack_rows(rows, found.behind, k)
    for row in rows.tolist():
        frames = stacked(columns, row, k=k)
        if frames is not None:
            assert stacks[row].tolist() == frames
        is_step = columns["row"][row] == 0
        # Lead-in rows whose windows were whole where they came from are not sampled a second time.
        may_sample = is_step and frames is not None and row >= lead - (n - 1)
        assert found.weight[row] == (columns["weight"][row] if may_sample else 0.0)
        if is_step:
            returns, discount, bootstrap = walked(columns, row, n=n, discount=DISCOUNT)
            assert found.returns[row] == pytest.approx(returns, rel=1e-6, abs=1e-6)
            assert found.discount[row] == np.float32(discount)
            assert row + found.ahead[row] == bootstrap
    is_open = columns["row"][-1] == 2
    begin = max((row + 1 for row in rows[:-1] if columns["row"][row] != 0), default=0)
    assert found.n_open == (len(rows) - 1 - begin if is_open else 0)


def test_the_compiled_form_takes_columns_of_any_strides_alignment_and_permission() -> None:
    row = np.array([0, 0, 1], np.uint8)
    needs = Transitions(batch=1)
    spread = np.zeros((3, 2), np.bool_)[:, 0]
    raw = np.frombuffer(b"." + np.arange(3, dtype=np.float32).tobytes(), np.uint8)[1:].view(
        np.float32
    )
    assert not raw.flags.aligned
    assert not raw.flags.writeable
    columns = {"row": row, "is_first": spread, "terminated": spread, "reward": raw, "weight": raw}
    found = compiled_windows_of(columns, 0, needs=needs)
    np.testing.assert_array_equal(found.returns[:2], [0, 1])
    np.testing.assert_array_equal(found.weight, [0, 1, 0])
