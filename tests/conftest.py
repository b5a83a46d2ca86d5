import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import schedule
from tests.card import Card
from tests.stores.local_stores import local_harness
from understudy.learn.compile_cache import delete_truncated_entries
from understudy.testing.store_harness import StoreHarness

# Without keys, botocore would request the role of the machine over the network.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"

# Property tests check values, not the load of the machine: no example is too slow.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the reliability card: faults, `card` lines and bars. Long files first."""
    for item in items:
        if "/faults/" in item.path.as_posix() or {"card", "bar"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("card")
    items.sort(key=lambda item: schedule.rank(item.nodeid))


def pytest_collection_finish() -> None:
    """Cache on disk what tests compile in this process: most of their time is compilation.

    The folder is not that of other processes: tests kill these, also while they write an entry.
    """
    # Thousands of tests and the modules they import stay to the end: no collection visits them.
    gc.freeze()
    jax = sys.modules.get("jax")
    if jax is not None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        folder = cache / "understudy" / "jax-tests"
        delete_truncated_entries(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.by_work_unit(config, log)


@pytest.fixture
def sighup() -> Iterator[None]:
    """SIGHUP has its default action, also if nohup started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def card(record_property: Callable[[str, object], None]) -> Card:
    return Card(record_property)


@pytest.fixture
def bar() -> Callable[[float], float]:
    """A limit in seconds of wall-clock time; at least a minute, except in the full card."""
    return (
        (lambda bar_s: bar_s)
        if "UNDERSTUDY_BARS" in os.environ
        else (lambda bar_s: max(60.0, bar_s))
    )


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """Reset logging, since a command inside a test logs to a file that closes with the test."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory if available, for tests that open hundreds of stores."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StoreHarness]:
    """A local store in `remote` of the test's folder, used as a remote one."""
    local = local_harness(tmp_path / "remote")
    yield local
    local.store.close()
