"""Programs of this machine that servers are made or run with, and what to do where one is missing."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_NEXT = {
    "java": "install a Java runtime 17 (Debian: apt install openjdk-17-jre-headless), or name one in JAVA_HOME",
    "mvn": "install Maven (Debian: apt install maven)",
    "node": "install Node.js 18 or newer (Debian: apt install nodejs)",
    "npm": "install npm (Debian: apt install npm)",
    "go": "install Go 1.24 or newer",
}
_CLIENTS = {
    "cassandra": ("cassandra", "cassandra"),
    "confluent_kafka": ("confluent-kafka", "kafka"),
    "boto3": ("boto3", "aws"),
    "moto": ("moto", "servers"),
}
_VERSION_S = 30.0


def find(tool: str) -> Path | None:
    """Where a program is; Java is looked for in JAVA_HOME first."""
    home = os.environ.get("JAVA_HOME")
    if tool == "java" and home and (found := shutil.which("java", path=str(Path(home) / "bin"))):
        return Path(found)
    where = shutil.which(tool)
    return Path(where) if where else None


def must_find(tool: str) -> Path:
    """Where a program is that somebody has looked for before."""
    where = find(tool)
    if where is None:
        raise FileNotFoundError(missing(tool))
    return where


def missing(tool: str) -> str:
    """One sentence for a program that is not there, with the next step."""
    return f"{tool} is not installed; {_NEXT[tool]}"


def java_trouble(wanted: range) -> str | None:
    """Why the Java of this machine cannot run a server that wants a release of this range."""
    where = find("java")
    if where is None:
        return missing("java")
    release = _java_release(where)
    if release is None:
        return f"{where} does not tell its version; {_NEXT['java']}"
    if release not in wanted:
        spoken = f"{wanted.start}" if len(wanted) == 1 else f"{wanted.start} or newer"
        return f"{where} is Java {release}, wanted is {spoken}; {_NEXT['java']}"
    return None


@cache
def _java_release(where: Path) -> int | None:
    try:
        said = subprocess.run([where, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else None


def client_trouble(module: str) -> str | None:
    """Why a server cannot be spoken to: the package of its client is not installed."""
    from importlib.util import find_spec

    package, extra = _CLIENTS[module]
    return None if find_spec(module) else f"needs the package {package}; pip install 'understudy[{extra}]'"


def plain_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: ours, without what would change a JVM or a Node behind our back."""
    dropped = ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "NODE_OPTIONS", "CLASSPATH")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **(more or {})}
