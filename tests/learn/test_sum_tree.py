"""The sum tree: a pure function of its leaves, and rows found in proportion to their masses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core.errors import ConfigError
from understudy.learn.sum_tree import SumTree


def fresh(tree: SumTree) -> SumTree:
    """A tree that only ever saw the leaves as they are now."""
    again = SumTree(tree.capacity)
    again.set_range(0, tree.leaves.copy())
    return again


def test_nothing_drifts_over_ten_million_updates():
    tree = SumTree(1_000_000)
    rng = np.random.default_rng(0)
    for _ in range(1_221):
        rows = rng.integers(0, 1_000_000, 8_192)
        tree.set(rows, 10.0 ** rng.uniform(-6, 6, 8_192))
    assert tree.total == fresh(tree).total
    for part, same in zip(tree.parts, fresh(tree).parts, strict=True):
        np.testing.assert_array_equal(part, same)
    assert tree.total == pytest.approx(tree.leaves.sum(), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5_000),
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.integers(1, 300), st.booleans(), st.booleans()),
        max_size=8,
    ),
)
def test_any_history_ends_in_the_tree_of_its_leaves(capacity, history):
    tree = SumTree(capacity)
    rng = np.random.default_rng(7)
    mirror = np.zeros(capacity)
    for at, n, in_a_row, to_zero in history:
        start = at % capacity
        n = min(n, capacity - at % capacity)
        masses = np.zeros(n) if to_zero else rng.random(n)
        rows = np.arange(start, start + n) if in_a_row else rng.permutation(capacity)[:n]
        mirror[rows] = masses
        if in_a_row:
            tree.set_range(start, masses)
        else:
            tree.set(rows, masses)
    np.testing.assert_array_equal(tree.leaves, mirror)
    for part, same in zip(tree.parts, fresh(tree).parts, strict=True):
        np.testing.assert_array_equal(part, same)
    assert len(tree) == np.count_nonzero(mirror)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-9, 1.0, 3.0, 1e9]), min_size=1, max_size=600),
    st.integers(0, 99),
)
def test_find_agrees_with_a_running_sum_and_never_meets_a_zero(masses, seed):
    leaves = np.array(masses)
    tree = SumTree(len(leaves))
    tree.set_range(0, leaves)
    if tree.total == 0:
        return
    values = (
        np.r_[np.random.default_rng(seed).random(50), 0.0, 1.0, np.nextafter(1.0, 2.0)] * tree.total
    )
    rows = tree.find(values.reshape(1, -1))[0]
    assert (leaves[rows] > 0).all()
    ends = np.cumsum(leaves)
    slack = 1e-12 * tree.total
    assert (values <= ends[rows] + slack).all()
    assert (values >= ends[rows] - leaves[rows] - slack).all()


def test_repeated_rows_keep_the_last_mass():
    tree = SumTree(100)
    tree.set(np.array([7, 8, 7]), np.array([1.0, 2.0, 3.0]))
    assert (tree.total, len(tree)) == (5.0, 2)
    tree.set_range(0, np.zeros(8))
    assert (tree.total, len(tree)) == (2.0, 1)
    tree.set_range(50, np.empty(0))
    with pytest.raises(ConfigError, match="at least 1"):
        SumTree(0)
