"""The shared seed of fault tests."""

import os

import pytest


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of everything random here; `scripts/card.py --seed` sets it."""
    return int(os.environ.get("UNDERSTUDY_FAULT_SEED", "1"))
