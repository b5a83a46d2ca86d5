"""Two sizes of one test: short in `make test` and `make card`, full in `make card PROFILE=full`."""

import pytest


def sizes(name: str, *, short: int, full: int, timeout_s: int = 1800) -> pytest.MarkDecorator:
    """Run a test with `name` = `short`, and with `full` where slow tests are asked for."""
    marks = [pytest.mark.slow, pytest.mark.timeout(timeout_s)]
    return pytest.mark.parametrize(
        name, [pytest.param(short, id="short"), pytest.param(full, id="full", marks=marks)]
    )
