"""Server packages with pinned versions, the tools that they need, and the cache of downloads.

Servers are downloaded by the package managers of their ecosystems: Maven, npm, Go. Each goes into a
temporary folder, which is renamed when it is complete; its `files.json` lists every file with size
and SHA-256. Sizes are compared before every start, digests by `fetch`.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from understudy.core.errors import ServerFailed, StorageFull
from understudy.core.log import FileLock

_NEXT = {
    "java": "install a Java 17 runtime (Debian: apt install openjdk-17-jre-headless), or set "
    "JAVA_HOME to one",
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
_OTHER_FETCH_S = 1800.0
_LIST = "files.json"
_FETCH_S = 1800.0
_SHOWN_LINES = 8
_ERROR = re.compile(
    r"\[ERROR\] (?!To see|Re-run|For more|\[Help)\S"
    r"|npm (?:error|ERR!) (?! *at |A complete log)\S"
    r"|go: "
)
"""A line of a tool's output that states the error."""
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>understudy.dev</groupId> <artifactId>server</artifactId> <version>1</version>
  <packaging>pom</packaging>
  <dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)
_NEEDS = {"mvn": ("mvn", "java"), "npm": ("npm", "node"), "go": ("go",)}
"""The programs that each tool needs."""
_PARTS = {
    "mvn": re.compile(r"Downloaded from \S+ \S*/(\S+)"),
    "npm": re.compile(r"http fetch GET 200 \S*/(\S+)"),
    "go": re.compile(r"(?:go: downloading )?([a-z0-9.-]+/\S+)"),
}
"""Pattern of the lines in which each tool reports a downloaded file."""

OnPart = Callable[[str], None]


def find(tool: str) -> Path | None:
    """The path of a program, or None; for Java, JAVA_HOME is tried first."""
    home = os.environ.get("JAVA_HOME") if tool == "java" else None
    path = (home and shutil.which("java", path=str(Path(home) / "bin"))) or shutil.which(tool)
    return Path(path) if path else None


def must_find(tool: str) -> Path:
    """The path of an installed program; FileNotFoundError with the next step if it is missing."""
    path = find(tool)
    if path is None:
        raise FileNotFoundError(missing(tool))
    return path


def missing(tool: str) -> str:
    """The error for a program that is not installed, with the next step."""
    return f"{tool} is not installed; {_NEXT[tool]}"


def java_problem(supported: range) -> str | None:
    """Why this machine's Java cannot run a server that needs one of these releases; None if ok."""
    path = find("java")
    if path is None:
        return missing("java")
    release = _java_release(path)
    if release is None:
        return f"{path} does not report its version; {_NEXT['java']}"
    if release not in supported:
        needed = f"{supported.start}" if len(supported) == 1 else f"{supported.start} or newer"
        return f"{path} is Java {release}, but Java {needed} is needed; {_NEXT['java']}"
    return None


@cache
def _java_release(path: Path) -> int | None:
    try:
        process = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', process.stderr + process.stdout)
    return int(version[1]) if version else None


def client_problem(module: str) -> str | None:
    """The missing client package of a server and how to install it; None if it is installed."""
    package, extra = _CLIENTS[module]
    return (
        None
        if find_spec(module)
        else f"needs the package {package}; pip install 'understudy[{extra}]'"
    )


def server_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: ours, without variables that change how a JVM or Node runs."""
    dropped = (
        "JAVA_TOOL_OPTIONS",
        "_JAVA_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "NODE_OPTIONS",
        "CLASSPATH",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, **(more or {})}


@dataclass(frozen=True, slots=True)
class Package:
    """A downloadable server: its version, the tool that downloads it, and its package names."""

    version: str
    tool: str
    names: Sequence[str]
    size_mib: int

    def problem(self) -> str | None:
        """Why the package cannot be downloaded on this machine; None if its tools are installed."""
        return next((missing(tool) for tool in _NEEDS[self.tool] if not find(tool)), None)

    def resolve(self, into: Path, on_part: OnPart) -> None:
        """Download the package into an empty folder; `on_part` is called with each file's name.

        ServerFailed contains the tool's output. The tools cache what they have downloaded, so
        another attempt resumes from there.
        """
        if self.tool == "mvn":
            dependencies = "".join(_DEPENDENCY.format(*name.split(":")) for name in self.names)
            (into / "pom.xml").write_text(_POM.format(dependencies=dependencies))
            words = [
                "-B",
                "dependency:copy-dependencies",
                "-DincludeScope=runtime",
                "-DoutputDirectory=lib",
            ]
        elif self.tool == "npm":
            (into / "package.json").write_text('{"private": true}\n')
            # Install scripts are not run: the packages are already built.
            words = [
                "install",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--no-save",
                "--loglevel=http",
            ]
            words += self.names
        else:
            words = ["install", "-v", *self.names]
        errors: list[str] = []
        last_lines = deque[str](maxlen=_SHOWN_LINES)
        timed_out = threading.Event()
        env = server_environment({"GOBIN": str(into)} if self.tool == "go" else None)
        with subprocess.Popen(
            [must_find(self.tool), *words],
            cwd=into,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child:

            def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

            def give_up() -> None:
                timed_out.set()
                end()

            timer = threading.Timer(_FETCH_S, give_up)
            timer.daemon = True
            timer.start()
            try:
                assert child.stdout is not None
                for raw in child.stdout:
                    line = raw.decode(errors="replace").rstrip()
                    last_lines.append(line)
                    errors += [line] if _ERROR.match(line) and len(errors) < _SHOWN_LINES else []
                    if part := _PARTS[self.tool].search(line):
                        on_part(part[1])
                child.wait()  # the timer kills a process that hangs
            except BaseException:
                end()
                raise
            finally:
                timer.cancel()
        if child.returncode != 0:
            output = "\n".join(errors or last_lines).strip()
            error = (
                f"{self.tool} did not finish within {_FETCH_S / 60:g} minutes and was stopped"
                if timed_out.is_set()
                else f"{self.tool} failed with exit code {child.returncode}"
            )
            raise ServerFailed(
                f"{error}; check the network and try again: finished downloads are cached. "
                f"Output:\n{output or 'none'}"
            )


PACKAGES = {
    "cassandra": Package("5.0.9", "mvn", ["org.apache.cassandra:cassandra-all:5.0.9"], 67),
    "kafka": Package(
        "4.3.1",
        "mvn",
        ["org.apache.kafka:kafka_2.13:4.3.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"],
        44,
    ),
    "kinesis": Package("0.6.2", "npm", ["kinesis-local@0.6.2"], 16),
    "kinesalite": Package("3.3.3", "npm", ["kinesalite@3.3.3"], 15),
    "s3": Package("1.8.0", "go", ["github.com/versity/versitygw/cmd/versitygw@v1.8.0"], 80),
}


def cache_root() -> Path:
    """The cache folder: UNDERSTUDY_SERVERS_CACHE, else a folder in the user's cache folder."""
    if folder := os.environ.get("UNDERSTUDY_SERVERS_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy" / "servers"


def cache_folder(name: str) -> Path:
    """The folder of this server in the cache, whether it exists or not."""
    return cache_root() / f"{name}-{PACKAGES[name].version}"


def cached(name: str) -> Path | None:
    """The folder of a cached server; None if it is missing or incomplete."""
    place = cache_folder(name)
    listed = _listed(place)
    try:
        is_complete = bool(listed) and all(
            os.stat(place / path).st_size == facts[0] for path, facts in listed.items()
        )
    except OSError:
        return None
    return place if is_complete else None


def fetch(
    name: str, *, package: Package | None = None, on_part: OnPart = lambda part: None
) -> bool:
    """Download a server into the cache; False if it is already there and every byte is correct."""
    package = package or PACKAGES[name]
    place = cache_folder(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.parent / f".{place.name}.lock"
        with FileLock(lock, what=f"the download of {name}", timeout_s=_OTHER_FETCH_S):
            if cached(name) and all(
                _digest(place / path) == facts[1] for path, facts in _listed(place).items()
            ):
                return False
            if problem := package.problem():
                raise ServerFailed(f"{name} {package.version} cannot be fetched: {problem}")
            _resolve(place, package, on_part)
            return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no disk space for {name} ({package.size_mib} MiB) in {place.parent}: {error}; "
                "free some space, or set UNDERSTUDY_SERVERS_CACHE to another folder"
            ) from None
        raise


def _resolve(place: Path, package: Package, on_part: OnPart) -> None:
    # Remove what a killed fetch left; this process holds the lock.
    for path in place.parent.glob(f".{place.name}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        package.resolve(draft, on_part)
        files = sorted(
            path for path in draft.rglob("*") if path.is_file() and not path.is_symlink()
        )
        listed = {
            str(path.relative_to(draft)): [path.stat().st_size, _digest(path)] for path in files
        }
        (draft / _LIST).write_text(json.dumps(listed))
        draft.chmod(0o755)
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _listed(place: Path) -> Mapping[str, Any]:
    """Each file with size and digest; empty if the list is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError):
        listed = json.loads((place / _LIST).read_bytes())
        if isinstance(listed, dict):
            return listed
    return {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
