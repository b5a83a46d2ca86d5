"""Harnesses over local stores, and the contents of their folders."""

import atexit
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from understudy.experience.chunk import Chunk
from understudy.stores import database
from understudy.stores.local import LocalStore
from understudy.testing.clock import ManualClock
from understudy.testing.samples import random_session
from understudy.testing.store_harness import SPEC, StoreHarness


def local_harness(
    folder: Path, *, clock: ManualClock | None = None, **settings: Any
) -> StoreHarness:
    """A harness over the local store in a folder, new or existing."""
    clock = clock or ManualClock()
    return StoreHarness(
        LocalStore(folder, clock=clock, **settings),
        clock,
        lambda _: LocalStore(folder, clock=clock, **settings),
    )


def local(harness: StoreHarness) -> LocalStore:
    return cast(LocalStore, harness.store)


def sessions(count: int, n_chunks: int, *, seed: int = 0, max_steps: int = 6) -> list[list[Chunk]]:
    """Sessions of the small game."""
    rng = np.random.default_rng(seed)
    return [random_session(SPEC, rng, n_chunks=n_chunks, max_steps=max_steps) for _ in range(count)]


_SEARCH = """
import pathlib, sys
for line in sys.stdin:
    folder, *texts = line.split()
    needles = [bytes.fromhex(text) for text in texts]
    names = []
    for path in sorted(pathlib.Path(bytes.fromhex(folder).decode()).rglob("*")):
        if path.is_file():
            raw = path.read_bytes()
            names += [path.name for needle in needles if needle in raw]
    print(*names, flush=True)
"""


@cache
def _searcher() -> "subprocess.Popen[str]":
    """A process that lives as long as this one: most tests search several times."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SEARCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """Files under a folder that contain any of these bytes, one line for each.

    Looked for in another process: one that has a database open must not open its file by path.
    """
    process = _searcher()
    assert process.stdin is not None
    assert process.stdout is not None
    print(str(folder).encode().hex(), *(needle.hex() for needle in needles), file=process.stdin)
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the search failed"
    return answer.split()


def fork() -> int:
    """os.fork, whose warning about other threads does not matter for a child that only touches
    files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def dies_in_a_child(work: Callable[[], None], *, at: int) -> bool:
    """Run `work` in a forked process that dies at its `at`th disk step; whether it got there."""
    child = fork()
    if child == 0:
        try:
            _die_at(at)
            work()
            os._exit(0)
        except BaseException:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), f"the child failed with {code} instead of dying or finishing"
    return code == 9


def _die_at(at: int) -> None:
    """Count every SQL statement and every other disk call, and die before the `at`th."""
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1
        if count == at:
            os._exit(9)

    def counted(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            step()
            return real(*args, **more)

        return call

    for name in ("fsync", "fdatasync", "rename", "replace", "unlink", "posix_fallocate"):
        if hasattr(os, name):
            setattr(os, name, counted(getattr(os, name)))
    connect = database._connect

    def traced(path: Path, how: str) -> Any:
        db = connect(path, how)
        if not how:
            db.set_trace_callback(step)
        return db

    database._connect = traced
