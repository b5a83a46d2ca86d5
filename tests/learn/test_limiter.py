"""The limiter's arithmetic, and the settings it refuses."""

import pytest

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
    limits.inserted(3)
    assert limits.updates_due(8) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"samples_per_insert": 0},
        {"samples_per_insert": float("nan")},
        {"min_inserts": -1},
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
