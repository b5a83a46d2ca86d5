"""The limiter's arithmetic, and the settings it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import ConfigError
from understudy.learn.replay_source import Limiter, LimiterConfig


def limiter(**settings) -> Limiter:
    return Limiter(LimiterConfig(**settings))


def test_256_steps_at_32_samples_each_pay_for_exactly_128_updates_of_64():
    limits = limiter(samples_per_insert=32, min_inserts=1_000)
    limits.inserted(1_000)
    for _ in range(50):
        assert limits.updates_due(64) == 0
        limits.inserted(256)
        assert limits.updates_due(64) == 128
        limits.sampled(128 * 64)


def test_steps_before_min_inserts_owe_no_samples():
    limits = limiter(samples_per_insert=8, min_inserts=100)
    limits.inserted(99)
    assert limits.updates_due(8) == 0
    assert limits.may_insert
    limits.inserted(3)
    assert limits.updates_due(8) == 2


def test_actors_wait_when_the_learner_is_slack_steps_behind():
    limits = limiter(samples_per_insert=2, min_inserts=0, slack=10)
    seen = []
    for count in (
        lambda: limits.inserted(9),
        lambda: limits.inserted(1),
        lambda: limits.sampled(2),
    ):
        count()
        seen.append(limits.may_insert)
    assert seen == [True, False, True]


@given(st.floats(0.01, 64), st.integers(0, 50), st.integers(1, 64), st.integers(1, 64))
def test_learner_or_actors_may_always_continue(samples_per_insert, min_inserts, slack, batch):
    config = LimiterConfig(
        samples_per_insert=samples_per_insert, min_inserts=min_inserts, slack=slack
    )
    try:
        limits = Limiter(config, batch=batch)
    except ConfigError:
        return
    for _ in range(100):
        due = limits.updates_due(batch)
        assert limits.may_insert or due > 0
        if due:
            limits.sampled(batch)
        else:
            limits.inserted(1)


def test_a_deadlock_is_rejected_with_the_slack_that_would_work():
    config = LimiterConfig(samples_per_insert=0.1, slack=100)
    with pytest.raises(ConfigError, match="slack of at least 640"):
        Limiter(config, batch=64)
    with pytest.raises(ConfigError, match="wait for each other"):
        Limiter(config).updates_due(64)


@pytest.mark.parametrize(
    "settings",
    [
        {"samples_per_insert": 0},
        {"samples_per_insert": float("nan")},
        {"min_inserts": -1},
        {"slack": 0},
    ],
)
def test_invalid_limits_are_rejected(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LimiterConfig(**settings)


def test_a_restored_limiter_continues_where_it_was():
    first = limiter()
    second = limiter()
    first.inserted(5_000)
    first.sampled(1_234)
    second.restore(first.state())
    assert second.updates_due(64) == first.updates_due(64) > 0
