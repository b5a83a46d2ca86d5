"""Delays each fsync and fdatasync of Python, SQLite, LMDB and Redis by 10 ms.

A small preloaded library does this. Without a C compiler, or outside Linux, only Python's calls are
delayed, by replacing os.fsync and os.fdatasync; the calls of SQLite and of the peers then stay
unchanged, and the result states it.
"""

import ctypes
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ADDED_MS = 10.0
_PYTHON_ONLY = "UNDERSTUDY_BENCH_SLOW_SYNC"

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static int later(const char *name, int descriptor) {
    struct timespec added = {0, %d};
    nanosleep(&added, 0);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}
int fsync(int descriptor) { return later("fsync", descriptor); }
int fdatasync(int descriptor) { return later("fdatasync", descriptor); }
"""


def environment(folder: Path) -> dict[str, str]:
    """Environment variables that delay the syncs of a process and its children."""
    library = _library(folder)
    if library is not None:
        return {"LD_PRELOAD": " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}
    return {_PYTHON_ONLY: "1"}


def reaches(environment: dict[str, str]) -> str:
    """A description of what is delayed in a process with this environment."""
    if _PYTHON_ONLY in environment:
        return (
            "10 ms before each os.fsync and os.fdatasync of Python; SQLite, LMDB and Redis are not "
            "delayed"
        )
    return (
        "10 ms before each fsync and fdatasync of every process: our logs and folders, SQLite in "
        "our store and as a peer, LMDB's data pages (its meta page is written through an O_DSYNC "
        "descriptor and is not delayed), Redis"
    )


def _library(folder: Path) -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    source = folder / "slow_sync.c"
    library = folder / "slow_sync.so"
    source.write_text(_SOURCE % int(ADDED_MS * 1e6))
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, check=False, timeout=60)
    if built.returncode:
        return None
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return None
    return library


def obey() -> None:
    """Delay Python's sync calls in this process if the environment asks for it."""
    if os.environ.get(_PYTHON_ONLY):
        for name in ("fsync", "fdatasync"):
            setattr(os, name, _later(getattr(os, name)))


def _later(sync: Callable[[int], None]) -> Callable[[int], None]:
    def call(descriptor: int) -> None:
        time.sleep(ADDED_MS / 1000)
        sync(descriptor)

    return call


def reach(folder: Path) -> dict[str, float]:
    """Milliseconds of a sync, the fastest of five, for Python's calls and for a SQLite commit."""
    path = folder / "sync-probe"
    with path.open("wb") as file:

        def write_and(sync: Callable[[int], None]) -> float:
            file.write(b"x" * 4096)
            file.flush()
            began = time.perf_counter()
            sync(file.fileno())
            return (time.perf_counter() - began) * 1000

        fastest = {
            name: min(write_and(sync) for _ in range(5))
            for name, sync in (("fsync", os.fsync), ("fdatasync", os.fdatasync))
        }
    database = sqlite3.connect(folder / "sync-probe.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE probe (x)")

    def commit() -> float:
        began = time.perf_counter()
        database.execute("INSERT INTO probe VALUES (1)")
        return (time.perf_counter() - began) * 1000

    fastest["sqlite_commit"] = min(commit() for _ in range(5))
    database.close()
    return {name: round(value, 3) for name, value in fastest.items()}
