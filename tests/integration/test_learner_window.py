"""A learner with a real Cassandra: it waits while the server is down, reports it, and resumes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.keyspaces import Keyspace
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.platform.children import FAILED, Child, python_module
from understudy.platform.config import Config, StoreSection, write_config
from understudy.testing.clock import ManualClock
from understudy.testing.samples import random_session
from understudy.testing.store_harness import SPEC, StoreHarness


@contextmanager
def learner(folder: Path, keyspace: Keyspace) -> Iterator[Child]:
    """The learner's process."""
    data = DataFolder(folder / "D")
    config = folder / "config.json"
    open_deployment(data).registry.register(SPEC)
    write_config(
        Config(data=str(data.root), store=StoreSection(url=f"{keyspace.url}&retry_s=2")), config
    )
    child = Child(
        "learner", python_module("understudy.platform.learner_process", str(data.root), str(config))
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(10.0)


def window(child: Child, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the learner reports of its window, once that is so."""
    deadline_s = time.monotonic() + 90
    found: dict[str, Any] = {}
    while time.monotonic() < deadline_s and child.exit_code is None:
        found = child.latest.get("window", {})
        if found and is_so(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{child.exit_code} {found} {child.errors}")


def test_a_learner_waits_for_a_killed_server_and_resumes(
    keyspace: Keyspace, cassandra_server: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    clock = ManualClock()
    with keyspace.open(clock) as store:
        StoreHarness(store, clock, lambda one: one).put(*random_session(SPEC, rng, n_chunks=3))
    with learner(tmp_path, keyspace) as child:
        assert window(child, lambda one: one["items"] == 3)["error"] == ""
        cassandra_server.kill()
        assert window(child, lambda one: bool(one["error"]))["items"] == 3
        cassandra_server.restart()
        window(child, lambda one: not one["error"])
        with keyspace.open(clock) as store:
            StoreHarness(store, clock, lambda one: one).put(*random_session(SPEC, rng, n_chunks=2))
        assert window(child, lambda one: one["items"] == 5)["error"] == ""
        child.stop()
        assert child.wait(60.0) == 0, child.errors


def test_a_learner_with_an_unreadable_store_ends_with_one_line(
    cassandra_server: Any, tmp_path: Path
) -> None:
    keyspace = Keyspace(cassandra_server, cassandra_server.credentials_file, "lost")
    with learner(tmp_path, keyspace) as child:
        window(child, lambda one: not one["error"])
        keyspace.rows("DROP TABLE registry")
        assert child.wait(60.0) == FAILED, child.errors
    keyspace.rows("DROP KEYSPACE lost")
    keyspace.close()
    assert "Traceback" not in child.errors
    assert "registry" in child.errors.splitlines()[-1]
