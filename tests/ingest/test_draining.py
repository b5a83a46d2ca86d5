"""A stop while something cannot be stored: what the next start mends by itself is left to it,
and told."""

import pytest
from structlog.testing import capture_logs

from understudy.core.errors import (
    ClaimLost,
    ConfigError,
    Corrupt,
    StorageFailed,
    StorageFull,
    Unreachable,
)
from understudy.ingest.service import log_undrained_on_stop


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [StorageFull("why"), Unreachable("why"), ClaimLost("why")])
def test_a_temporary_error_during_a_stop_is_left_to_the_next_start(
    error: Exception,
):
    with capture_logs() as logs, log_undrained_on_stop():
        fail(error)
    assert [(one["event"], one["error"]) for one in logs] == [("not_drained", "why")]
    with capture_logs() as logs, pytest.raises(type(error)), log_undrained_on_stop(lambda: False):
        fail(error)
    assert logs == []


@pytest.mark.parametrize("error", [StorageFailed("why"), ConfigError("why"), Corrupt("why")])
def test_a_permanent_error_is_raised_even_during_a_stop(error: Exception):
    with capture_logs() as logs, pytest.raises(type(error), match="why"), log_undrained_on_stop():
        fail(error)
    assert logs == []
