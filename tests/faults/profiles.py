"""Two sizes of one test: short in `make test` and `make card`, full in `make card PROFILE=full`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings


def sizes(name: str, *, short: int, full: int, timeout_s: int = 1800) -> pytest.MarkDecorator:
    """Run a test with `name` = `short`, and with `full` where slow tests are asked for."""
    marks = [pytest.mark.slow, pytest.mark.timeout(timeout_s)]
    return pytest.mark.parametrize(
        name, [pytest.param(short, id="short"), pytest.param(full, id="full", marks=marks)]
    )


def property_of(*, short: int, full: int, **arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Hypothesis's `given` with two numbers of examples; the test takes no fixtures."""

    def decorate(holds: Callable[..., None]) -> Any:
        @sizes("examples", short=short, full=full)
        def test(examples: int) -> None:
            settings(max_examples=examples, deadline=None)(given(**arguments)(holds))()

        test.__doc__ = holds.__doc__
        return test

    return decorate
