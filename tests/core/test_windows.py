"""Windows against plain loops over the true trajectory, for random episodes, chunk cuts and gaps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trajectories import Step, Trajectory, rows_of, trajectories
from understudy.core.errors import ConfigError
from understudy.core.windows import ChunkTable, Joined, join, link, n_step, stack

DISCOUNT = 0.9


@dataclass(frozen=True)
class Window:
    """What a loop finds for one start; moments stand for observations."""

    steps: int
    returns: float
    bootstrap: int
    factor: float
    terminated: bool
    truncated: bool
    waiting: bool


def true_window(steps: list[Step], at: int, *, n: int, open_end: bool) -> Window:
    """The window that starts at `steps[at]`, walked one step at a time; `steps` are those of one gapless run."""
    returns, m = 0.0, 0
    while True:
        step = steps[at + m]
        returns += DISCOUNT**m * step.reward
        m += 1
        if m == n or step.end or at + m == len(steps):
            break
    ran_out = m < n and at + m == len(steps) and step.end in (None, "cut")
    terminated = step.end == "terminated"
    return Window(
        m, returns, step.after, 0.0 if terminated else DISCOUNT**m, terminated, step.end == "truncated",
        ran_out and open_end,
    )  # fmt: skip


def true_stack(steps: list[Step], moment: int, *, k: int) -> list[int] | None:
    """The moments a stack shows, oldest first, or None where frames are missing."""
    of_after = {step.after: step for step in steps}
    first = {step.moment: step.is_first for step in steps}
    moments = [moment]
    while len(moments) < k:
        if first.get(moments[0]):
            moments.insert(0, moments[0])
        elif moments[0] in of_after:
            moments.insert(0, of_after[moments[0]].moment)
        else:
            return None
    return moments


def moments(joined: Joined, chunks: list[dict[str, Any]]) -> list[int]:
    return [int(chunks[c]["obs"][r]) for c, r in zip(joined.chunk, joined.source_row, strict=True)]


runs = st.tuples(trajectories(), st.integers(0, 3), st.integers(0, 3))
"""A trajectory of which some first and last chunks are missing."""


def run_of(case: tuple[Trajectory, int, int]) -> list[list[Step]]:
    trajectory, skip, drop = case
    chunks = trajectory.chunk_steps()
    return chunks[min(skip, len(chunks) - 1) :][: max(1, len(chunks) - skip - drop)]


@given(runs, st.integers(1, 6), st.booleans())
def test_n_step_windows_equal_a_plain_walk(case: tuple[Trajectory, int, int], n: int, session_open: bool) -> None:
    chunk_steps = run_of(case)
    steps = [step for chunk in chunk_steps for step in chunk]
    chunks = [rows_of(chunk) for chunk in chunk_steps]
    joined = join(chunks)
    seen = moments(joined, chunks)
    found = n_step(joined, n=n, discount=DISCOUNT, session_open=session_open)
    assert [seen[i] for i in found.start] == [step.moment for step in steps]
    for i in range(len(steps)):
        want = true_window(steps, i, n=n, open_end=session_open)
        got = Window(
            int(found.n_steps[i]), float(found.returns[i]), seen[found.bootstrap[i]], float(found.factor[i]),
            bool(found.terminated[i]), bool(found.truncated[i]), bool(found.waiting[i]),
        )  # fmt: skip
        assert got.returns == pytest.approx(want.returns, abs=1e-5)
        assert got.factor == pytest.approx(want.factor, abs=1e-6)
        assert (got.steps, got.bootstrap) == (want.steps, want.bootstrap)
        assert (got.terminated, got.truncated, got.waiting) == (want.terminated, want.truncated, want.waiting)


@given(runs, st.integers(1, 5))
def test_stacks_equal_a_plain_walk(case: tuple[Trajectory, int, int], k: int) -> None:
    chunk_steps = run_of(case)
    steps = [step for chunk in chunk_steps for step in chunk]
    chunks = [rows_of(chunk) for chunk in chunk_steps]
    joined = join(chunks)
    seen = moments(joined, chunks)
    found = stack(joined, k=k)
    for i, moment in enumerate(seen):
        want = true_stack(steps, moment, k=k)
        assert bool(found.may_sample[i]) == (want is not None)
        if want is not None:
            assert [seen[j] for j in found.rows[i]] == want


@dataclass(frozen=True)
class Shelf:
    """Chunks of several sessions in one table of row ids, as a store holds them."""

    table: ChunkTable
    columns: dict[str, Any]
    runs: list[list[Step]]
    """Each gapless run of steps, sessions told apart by their moments."""

    def gather(self, name: str, ids: Any) -> Any:
        return self.columns[name][ids]


@st.composite
def shelves(draw: st.DrawFn) -> Shelf:
    """Interleaved sessions with missing chunks, laid down in random order."""
    kept: list[tuple[int, int, list[Step]]] = []
    runs: list[list[Step]] = []
    for session in range(draw(st.integers(1, 3))):
        chunk_steps = draw(trajectories(max_episodes=3)).chunk_steps()
        missing = draw(st.sets(st.integers(0, len(chunk_steps) - 1), max_size=len(chunk_steps) - 1))
        last = -2
        for number, steps in enumerate(chunk_steps):
            if number in missing:
                continue
            shifted = [
                Step(s.moment + 1000 * session, s.after + 1000 * session, s.reward, s.episode, s.is_first, s.end)
                for s in steps
            ]
            if number != last + 1:
                runs.append([])
            runs[-1].extend(shifted)
            kept.append((session, number, shifted))
            last = number
    kept = draw(st.permutations(kept))
    rows = [rows_of(steps) for _, _, steps in kept]
    n_rows = np.array([len(part["row"]) for part in rows])
    session_of, chunk_no = np.array([s for s, _, _ in kept]), np.array([no for _, no, _ in kept])
    continues_in, continued_from = link(
        session=session_of,
        chunk_no=chunk_no,
        starts_episode=np.array([part["is_first"][0] for part in rows]),
        ends_open=np.array([part["row"][-1] == 2 for part in rows]),
    )
    # A hole of 7 ids between chunks: the table must not need ids to be dense.
    start = np.cumsum(n_rows + 7) - n_rows
    columns = {name: np.zeros(start[-1] + n_rows[-1], rows[0][name].dtype) for name in rows[0]}
    for at, part in zip(start, rows, strict=True):
        for name, column in part.items():
            columns[name][at : at + len(column)] = column
    may_continue = np.array(draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept))))
    return Shelf(ChunkTable(start, n_rows, continues_in, continued_from, may_continue), columns, runs)


@given(shelves(), st.integers(1, 6))
def test_windows_over_a_table_equal_a_plain_walk(shelf: Shelf, n: int) -> None:
    place = {step.moment: (run, at) for run in shelf.runs for at, step in enumerate(run)}
    table, obs = shelf.table, shelf.columns["obs"]
    inside = np.concatenate([np.arange(s, s + k) for s, k in zip(table.start, table.n_rows, strict=True)])
    ids = inside[shelf.columns["row"][inside] == 0]
    found = table.n_step(ids, shelf.gather, n=n, discount=DISCOUNT)
    assert table.may_continue is not None
    for i, start in enumerate(ids):
        run, at = place[int(obs[start])]
        assert found.start[i] == start
        last_chunk = int(table.chunk_of(found.bootstrap[i : i + 1])[0])
        want = true_window(run, at, n=n, open_end=bool(table.may_continue[last_chunk]))
        assert found.n_steps[i] == want.steps
        assert found.returns[i] == pytest.approx(want.returns, abs=1e-5)
        assert found.factor[i] == pytest.approx(want.factor, abs=1e-6)
        assert obs[found.bootstrap[i]] == want.bootstrap
        assert (found.terminated[i], found.truncated[i]) == (want.terminated, want.truncated)
        # The table is told chunk by chunk what may go on; a cut inside a run is then a case of its own.
        if want.steps == n or run[at + want.steps - 1].end in ("terminated", "truncated"):
            assert not found.waiting[i]
        elif at + want.steps == len(run):
            assert found.waiting[i] == want.waiting


@given(shelves(), st.integers(1, 5))
def test_stacks_over_a_table_equal_a_plain_walk(shelf: Shelf, k: int) -> None:
    run_by_moment = {m: run for run in shelf.runs for step in run for m in (step.moment, step.after)}
    table, obs = shelf.table, shelf.columns["obs"]
    ids = np.concatenate([np.arange(s, s + n) for s, n in zip(table.start, table.n_rows, strict=True)])
    found = table.stack(ids, shelf.gather, k=k)
    for i, at in enumerate(ids):
        # A moment between two runs (a gap) stands in both; only the run whose rows hold it counts.
        moment = int(obs[at])
        chunk = int(table.chunk_of(ids[i : i + 1])[0])
        first = int(obs[table.start[chunk]])
        want = true_stack(run_by_moment_of(shelf, first, run_by_moment), moment, k=k)
        assert bool(found.may_sample[i]) == (want is not None)
        if want is not None:
            assert obs[found.rows[i]].tolist() == want


def run_by_moment_of(shelf: Shelf, first: int, fallback: dict[int, list[Step]]) -> list[Step]:
    """The run in which a step was decided at this moment."""
    for run in shelf.runs:
        if any(step.moment == first for step in run):
            return run
    return fallback[first]


@given(shelves(), st.integers(0, 12))
def test_going_on_and_back_again_ends_where_it_began(shelf: Shelf, steps: int) -> None:
    table = shelf.table
    ids = np.concatenate([np.arange(s, s + n) for s, n in zip(table.start, table.n_rows, strict=True)])
    there = table.advance(ids, steps)
    home = table.back(there.ids, steps - there.short)
    same = table.advance(ids, 0).ids  # a continued bootstrap row goes by its other name
    assert (table.advance(home.ids, 0).ids == same).all()
    assert not home.short.any()
    assert (there.short >= 0).all()
    assert (there.short <= steps).all()


def test_a_cut_episode_keeps_its_bootstrap_row_as_the_end() -> None:
    steps = [Step(0, 1, 1.0, 0, True, None), Step(1, 2, 1.0, 0, False, "cut"), Step(3, 4, 1.0, 1, True, "terminated")]
    chunks = [rows_of(steps[:2]), rows_of(steps[2:])]
    joined = join(chunks)
    assert joined.row.tolist() == [0, 0, 2, 0, 1]
    found = n_step(joined, n=3, discount=0.5, session_open=True)
    assert found.bootstrap.tolist() == [2, 2, 4]
    assert found.factor.tolist() == [0.25, 0.5, 0.0]
    assert not found.waiting.any()


def test_a_bootstrap_row_is_skipped_where_the_next_chunk_goes_on() -> None:
    steps = [Step(0, 1, 1.0, 0, True, None), Step(1, 2, 2.0, 0, False, None)]
    joined = join([rows_of(steps[:1]), rows_of(steps[1:])])
    assert joined.chunk.tolist() == [0, 1, 1]
    assert joined.source_row.tolist() == [0, 0, 1]
    assert n_step(joined, n=2, discount=0.5, session_open=True).returns.tolist() == [2.0, 2.0]
    assert n_step(joined, n=2, discount=0.5, session_open=True).waiting.tolist() == [False, True]
    assert n_step(joined, n=2, discount=0.5, session_open=False).waiting.tolist() == [False, False]


def test_chunks_that_contradict_each_other_are_not_joined_into_one_episode() -> None:
    ended = rows_of([Step(0, 1, 1.0, 0, True, "truncated")])
    middle = rows_of([Step(2, 3, 1.0, 0, False, "terminated")])
    joined = join([ended, middle])
    assert n_step(joined, n=5, discount=1.0, session_open=True).n_steps.tolist() == [1, 1]
    assert stack(joined, k=2).may_sample.tolist() == [True, True, False, True]
    flags = {"starts_episode": np.array([True, False]), "ends_open": np.array([False, False])}
    links = link(session=np.zeros(2, np.int64), chunk_no=np.arange(2), **flags)
    assert [found.tolist() for found in links] == [[-1, -1], [-1, -1]]


def test_no_chunks_give_no_windows() -> None:
    joined = join([])
    assert len(joined) == 0
    assert len(n_step(joined, n=3, discount=0.9, session_open=True).start) == 0
    assert len(stack(joined, k=4).rows) == 0
    nothing = np.empty(0, np.int64)
    flags = np.empty(0, np.bool_)
    assert len(link(session=nothing, chunk_no=nothing, starts_episode=flags, ends_open=flags)[0]) == 0


def test_without_word_about_sessions_nothing_waits() -> None:
    part = rows_of([Step(0, 1, 1.0, 0, True, None)])
    none = np.array([-1])
    table = ChunkTable(np.array([0]), np.array([2]), none, none)
    found = table.n_step(np.array([0]), lambda name, ids: part[name][ids], n=3, discount=0.9)
    assert (found.n_steps.tolist(), found.waiting.tolist()) == ([1], [False])


@pytest.mark.parametrize("n", [0, -1])
def test_an_empty_window_is_a_config_error(n: int) -> None:
    joined = join([rows_of([Step(0, 1, 1.0, 0, True, None)])])
    with pytest.raises(ConfigError, match="give a number from 1"):
        n_step(joined, n=n, discount=0.9, session_open=False)
    with pytest.raises(ConfigError, match="give a number from 1"):
        stack(joined, k=n)
