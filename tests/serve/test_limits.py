"""A key has a rate and a short burst, and gets a time to retry."""

import pytest

from understudy.experience.frame import MAX_FRAME_BATCH_BYTES
from understudy.models.keys import Key
from understudy.serve.state import BURST_S, Limits
from understudy.testing.clock import ManualClock

KEY = Key(id="a", hash="", scopes=("play",), requests_s=10, bytes_s=1_000)
OTHER = Key(id="b", hash="", scopes=("play",), requests_s=10, bytes_s=1_000)


def test_requests_above_the_rate_are_delayed_and_pass_on_retry():
    clock = ManualClock()
    limits = Limits(clock)
    passed = sum(limits.take(KEY, 0) == 0 for _ in range(100))
    assert passed == 10 * BURST_S
    wait_s = limits.take(KEY, 0)
    assert 0 < wait_s <= 0.11
    assert limits.take(OTHER, 0) == 0, "one key's rush is not another's"
    clock.advance(wait_s)
    assert limits.take(KEY, 0) == 0


def test_the_rate_holds_over_a_long_time():
    clock = ManualClock()
    limits = Limits(clock)
    sent = 0
    for _ in range(10_000):
        clock.advance(0.01)
        sent += 500 if limits.take(KEY, 500) == 0 else 0
    assert sent == pytest.approx(1_000 * 100, rel=0.05)


def test_a_large_request_delays_later_ones():
    clock = ManualClock()
    limits = Limits(clock)
    assert limits.take(KEY, 50_000) == 0
    assert limits.take(KEY, 1) == pytest.approx(48, abs=0.1)


def test_parallel_bodies_overdraw_a_key_by_one_large_body_at_most():
    clock = ManualClock()
    limits = Limits(clock)
    fast = Key(id="c", hash="", scopes=("play",), requests_s=400, bytes_s=16_000_000)
    assert [limits.take(fast, 0) for _ in range(200)] == [0.0] * 200
    received = 0
    while not (wait_s := limits.owe(fast, 1_000_000)):
        received += 1_000_000
    assert received <= BURST_S * fast.bytes_s + MAX_FRAME_BATCH_BYTES
    assert received > MAX_FRAME_BATCH_BYTES, "a key that owes nothing may send the largest body"
    assert wait_s < MAX_FRAME_BATCH_BYTES / fast.bytes_s + 1
    clock.advance(wait_s + 0.001)
    assert limits.take(fast, 0) == 0


def test_a_clock_that_goes_back_adds_no_allowance():
    clock = ManualClock()
    limits = Limits(clock)
    while limits.take(KEY, 0) == 0:
        pass
    clock.advance(-3600)
    assert limits.take(KEY, 0) > 0
