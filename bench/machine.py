"""Machine and versions of a result, without names of persons or paths."""

import importlib.metadata
import os
import platform
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """The machine, described so that results can be compared."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "architecture": platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("understudy", "numpy", "msgspec", "redis", "lmdb")
        }
        | {"sqlite": sqlite3.sqlite_version, "redis-server": redis_server_version()},
    }


def load_average() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def commit(folder: Path = ROOT) -> str:
    """The commit that is checked out around a folder, marked if shipped code differs from it."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    is_changed = bool(_git(folder, "status", "--porcelain", "--", ":/src", ":/bench/*.py"))
    return f"{head or 'unknown'}{' (changed)' if is_changed else ''}"


def redis_server_version() -> str | None:
    try:
        words = subprocess.run(
            ["redis-server", "--version"], capture_output=True, text=True, check=False
        ).stdout.split()
    except OSError:
        return None
    return next((word.removeprefix("v=") for word in words if word.startswith("v=")), None)


def _git(folder: Path, *words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
