"""Which frames of a session count, compared with a model that keeps plain sets."""

import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.experience import session
from understudy.experience.session import (
    MAX_AHEAD,
    MAX_DROPPED,
    MAX_RANGES,
    MAX_REPORT_AHEAD,
    Arrival,
    SessionState,
    admit,
    readmit,
    unpack_state,
    withdraw,
)

ME = b"m" * 16
OTHER = b"o" * 16


def data(number: int, first_step: int = -2, n_steps: int = 5, player: bytes = ME) -> Arrival:
    first = number * 5 if first_step == -2 else first_step
    return Arrival(
        number=number, player=player, received_s=7, kind="data", first_step=first, n_steps=n_steps
    )


def drop(number: int, *ranges: tuple[int, int], n_steps: int = 0) -> Arrival:
    return Arrival(
        number=number, player=ME, received_s=7, kind="drop", dropped=ranges, n_steps=n_steps
    )


def close(number: int) -> Arrival:
    return Arrival(number=number, player=ME, received_s=7, kind="close")


def refused(number: int, player: bytes = ME) -> Arrival:
    return Arrival(number=number, player=player, received_s=7, kind="refused")


def after(*arrivals: Arrival) -> SessionState:
    state = None
    for arrival in arrivals:
        state, rejection = admit(state, arrival)
        assert rejection == ""
    assert state is not None
    return state


class Model:
    """Sets of numbers, and the steps of each data frame."""

    def __init__(self, player: bytes) -> None:
        self.player = player
        self.seen: set[int] = set()
        self.steps: dict[int, tuple[int, int]] = {}
        self.closed_at = -1
        self.dropped_steps = 0

    def runs(self, seen: set[int]) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for number in sorted(seen):
            if runs and runs[-1][1] == number - 1:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def admit(self, arrival: Arrival, *, ahead: int, report_ahead: int, most: int) -> str:
        number = arrival.number
        if arrival.player != self.player:
            return "other_player"
        if number in self.seen:
            return "seen"
        if 0 <= self.closed_at < number:
            return "after_close"
        seen = self.seen | {n for first, last in arrival.dropped for n in range(first, last + 1)}
        high = next(n for n in range(len(seen) + 1) if n not in seen)
        if number > high + (ahead if arrival.kind in ("data", "refused") else report_ahead):
            return "out_of_window"
        if arrival.kind == "close" and seen and max(seen) > number:
            return "bad_report"
        if arrival.kind == "data" and self._contradicts(arrival):
            return "step_mismatch"
        seen |= {number}
        if len(self.runs(seen)) > most:
            return "out_of_window"
        self.seen = seen
        if arrival.kind == "data":
            self.steps[number] = (arrival.first_step, arrival.first_step + arrival.n_steps)
        self.closed_at = number if arrival.kind == "close" else self.closed_at
        self.dropped_steps += arrival.n_steps if arrival.kind == "drop" else 0
        return ""

    def _contradicts(self, arrival: Arrival) -> bool:
        number = arrival.number
        first = arrival.first_step
        end = arrival.first_step + arrival.n_steps
        before = [steps for n, steps in self.steps.items() if n < number]
        # After the number, only the first frame of each run is remembered, if it is data.
        behind = {
            start: self.steps[start]
            for start, _ in self.runs(self.seen)
            if start > number and start in self.steps
        }
        return (
            any(steps[1] > first for steps in before)
            or any(steps[0] < end for steps in behind.values())
            or (number - 1 in self.steps and self.steps[number - 1][1] != first)
            or (number + 1 in behind and behind[number + 1][0] != end)
        )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    number = draw(st.integers(0, 24))
    player = draw(st.sampled_from([ME] * 12 + [OTHER]))
    kind = draw(st.sampled_from(["data"] * 8 + ["drop", "close", "refused"]))
    if kind == "data":
        first = number * 5 + draw(st.sampled_from([0] * 8 + [-5, 1, 40]))
        return data(number, max(0, first), draw(st.sampled_from([5] * 6 + [1, 9])), player)
    if kind == "close":
        return close(draw(st.integers(15, 30)))
    if kind == "refused" or number == 0:
        return refused(number, player)
    cuts = sorted(draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=4)))
    ranges = [
        (cut, min(cut + draw(st.integers(0, 2)), nxt - 1))
        for cut, nxt in zip(cuts, [*cuts[1:], number], strict=True)
    ]
    return drop(number, *ranges, n_steps=draw(st.integers(0, 30)))


@settings(max_examples=600, deadline=None)
@given(sequence=st.lists(arrivals(), max_size=60))
def test_admit_agrees_with_sets(sequence: list[Arrival]):
    with mock.patch.multiple(session, MAX_AHEAD=8, MAX_REPORT_AHEAD=12, MAX_RANGES=4):
        state: SessionState | None = None
        model: Model | None = None
        for arrival in sequence:
            model = model or Model(arrival.player)
            expected = model.admit(arrival, ahead=8, report_ahead=12, most=4)
            before = state
            (state, rejection) = admit(state, arrival)
            assert rejection == expected, arrival
            assert rejection == "" or before is None or state == before
            ranges = [(seen.first, seen.last) for seen in state.ranges]
            assert {n for first, last in ranges for n in range(first, last + 1)} == model.seen
            assert ranges == model.runs(model.seen)
            assert len(state.ranges) <= 4
            assert (state.n_chunks, state.n_steps) == (
                len(model.steps),
                sum(end - first for first, end in model.steps.values()),
            )
            assert (state.closed_at, state.dropped_steps) == (model.closed_at, model.dropped_steps)
            assert unpack_state(state.pack()) == state


@settings(max_examples=100, deadline=None)
@given(order=st.permutations(range(40)))
def test_any_order_ends_in_one_range(order: list[int]):
    state = after(*(data(number) for number in order))
    assert (len(state.ranges), state.high, state.n_chunks, state.n_steps, state.missing()) == (
        1,
        40,
        40,
        200,
        (),
    )
    for number in order:
        assert admit(state, data(number)) == (state, "seen")


def test_missing_numbers_are_named():
    state = after(data(0), data(3), data(4), data(9))
    assert (state.high, state.missing()) == (1, ((1, 2), (5, 8)))
    assert after(data(2)).missing() == ((0, 1),)
    assert after(data(2)).high == 0


def test_the_window_moves_with_the_first_missing_number():
    state = after(data(0))
    assert admit(state, data(MAX_AHEAD + 1))[1] == ""
    assert admit(state, data(MAX_AHEAD + 2))[1] == "out_of_window"
    assert admit(state, refused(MAX_AHEAD + 2))[1] == "out_of_window"
    assert admit(state, close(MAX_REPORT_AHEAD + 1))[1] == ""
    assert admit(state, close(MAX_REPORT_AHEAD + 2))[1] == "out_of_window"


def test_the_state_stays_small_for_any_arrivals():
    state = after(data(0))
    for number in range(2, 3 * MAX_AHEAD, 2):
        state, _ = admit(state, data(number))
    assert len(state.ranges) <= MAX_RANGES
    assert len(state.pack()) < 40 * MAX_RANGES


def test_dropped_steps_do_not_grow_without_bound():
    state = after(data(0))
    for number in range(1, 70_000, 7_000):
        state, _ = admit(state, drop(number, (number - 1, number - 1), n_steps=MAX_DROPPED))
    assert state.dropped_steps == MAX_DROPPED
    assert unpack_state(state.pack()) == state


def test_a_huge_drop_costs_one_range():
    state = after(data(0), drop(1 << 40, (1, (1 << 40) - 1), n_steps=3))
    assert (state.high, len(state.ranges)) == ((1 << 40) + 1, 1)


@given(st.sets(st.integers(0, 60)), st.lists(st.integers(0, 60), unique=True))
def test_one_pass_over_all_ranges_equals_one_pass_for_each(seen: set[int], bounds: list[int]):
    state = after(data(200), *(refused(number) for number in sorted(seen)), data(100))
    cuts = sorted(bounds)
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    one_by_one = state.ranges
    for span in spans:
        one_by_one = session._cover(one_by_one, [span])
    covered = session._cover(state.ranges, spans)
    assert covered == one_by_one
    numbers = seen | {n for first, last in spans for n in range(first, last + 1)}
    result = SessionState(player=ME, ranges=covered)
    assert {n for n in range(100) if result.has_seen(n)} == numbers


def test_the_cost_of_a_drop_report_grows_with_its_ranges_not_with_their_square():
    def cost_s(count: int) -> float:
        even = tuple((2 * n, 2 * n) for n in range(count))
        odd = tuple((2 * n + 1, 2 * n + 1) for n in range(count))
        state = after(drop(2 * count + 1, *even))
        times_s = []
        for _ in range(7):
            began_s = time.process_time()
            assert admit(state, drop(2 * count + 2, *odd))[1] == ""
            times_s.append(time.process_time() - began_s)
        return min(times_s)

    # Eight times as many ranges: the square would be 64 times the cost.
    assert cost_s(1020) < 24 * cost_s(127)


@pytest.mark.parametrize(
    ("known", "arrival"),
    [
        ((data(0), data(1)), data(2, 9)),
        ((data(0), data(1)), data(2, 11)),
        ((data(0), data(2)), data(1, 4)),
        ((data(0), data(2)), data(1, 5, 6)),
        ((data(0), data(2)), data(1, 5, 4)),
        ((data(3),), data(1, 100)),
        ((data(1),), data(3, 3)),
        ((drop(5, (4, 4)), data(2, 100)), data(7, 50)),
    ],
)
def test_steps_that_contradict_a_neighbour_are_a_mismatch(
    known: tuple[Arrival, ...], arrival: Arrival
):
    state = after(*known)
    assert admit(state, arrival) == (state, "step_mismatch")


def test_steps_may_jump_where_frames_were_dropped_or_refused():
    assert admit(after(data(0), drop(3, (1, 2))), data(4, 500))[1] == ""
    assert admit(after(data(0), refused(1)), data(2, 12))[1] == ""


def test_a_close_has_the_last_number():
    state = after(data(0), data(3))
    assert admit(state, close(2))[1] == "bad_report"
    closed = after(data(0), data(3), close(5))
    assert closed.closed
    assert admit(closed, data(4))[1] == ""
    assert admit(closed, data(6))[1] == "after_close"
    assert admit(closed, close(5))[1] == "seen"


def test_a_session_belongs_to_its_first_player():
    state = after(data(0))
    assert admit(state, data(1, player=OTHER)) == (state, "other_player")
    assert admit(state, data(0, player=OTHER)) == (state, "other_player")


def test_a_forgotten_session_accepts_nothing():
    state = SessionState(player=ME, forgotten=True)
    assert admit(state, data(0)) == (state, "forgotten")
    assert admit(state, data(0, player=OTHER)) == (state, "forgotten"), "from any player"
    assert unpack_state(state.pack()) == state


def test_a_withdrawn_and_readmitted_chunk_is_counted_again():
    state = after(data(0), data(1))
    out = withdraw(state, 5)
    assert (out.n_chunks, out.n_steps, out.high) == (1, 5, 2)
    assert readmit(out, data(1)) == state
