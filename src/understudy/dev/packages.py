"""What servers are resolved from and run by, with fixed versions, and the cache of those that were
resolved.

Servers come by the ordinary clients of their worlds: Maven, npm, Go. Each is resolved in a folder
beside its place and renamed when it is complete; `files.json` in it lists every file with size and
SHA-256. Sizes are compared before every start, digests by `fetch`.
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
    "java": "install a Java runtime 17 (Debian: apt install openjdk-17-jre-headless), or name one "
    "in JAVA_HOME",
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
"""A line that says what went wrong, among those that do not."""
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
"""What each tool does not run without."""
_PARTS = {
    "mvn": re.compile(r"Downloaded from \S+ \S*/(\S+)"),
    "npm": re.compile(r"http fetch GET 200 \S*/(\S+)"),
    "go": re.compile(r"(?:go: downloading )?([a-z0-9.-]+/\S+)"),
}
"""How each tool says that it has one more part."""

Tell = Callable[[str], None]


def find(tool: str) -> Path | None:
    """Where a program is; Java is looked for in JAVA_HOME first."""
    home = os.environ.get("JAVA_HOME") if tool == "java" else None
    where = (home and shutil.which("java", path=str(Path(home) / "bin"))) or shutil.which(tool)
    return Path(where) if where else None


def must_find(tool: str) -> Path:
    """Where a program is that was found before."""
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
        said = subprocess.run(
            [where, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else None


def client_trouble(module: str) -> str | None:
    """Why a server cannot be spoken to: the package of its client is not installed."""
    package, extra = _CLIENTS[module]
    return (
        None
        if find_spec(module)
        else f"needs the package {package}; pip install 'understudy[{extra}]'"
    )


def plain_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: ours, without what would change a JVM or a Node behind our
    back."""
    dropped = (
        "JAVA_TOOL_OPTIONS",
        "_JAVA_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "NODE_OPTIONS",
        "CLASSPATH",
    )
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **(more or {})}


@dataclass(frozen=True, slots=True)
class Package:
    """One server as it is resolved: a version, a tool, and names that the tool knows."""

    version: str
    tool: str
    names: Sequence[str]
    size_mib: int

    def trouble(self) -> str | None:
        """Why it cannot be resolved here; None when the tool is there."""
        return next((missing(tool) for tool in _NEEDS[self.tool] if not find(tool)), None)

    def resolve(self, into: Path, tell: Tell) -> None:
        """Download it into an empty folder, naming each part; ServerFailed shows what the tool
        said.

        The tools keep what they have downloaded in caches of their own: one that is tried again
        goes on from there.
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
            # No install script is run: what is needed comes built.
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
        said = deque[str](maxlen=_SHOWN_LINES)
        late = threading.Event()
        env = plain_environment({"GOBIN": str(into)} if self.tool == "go" else None)
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
                late.set()
                end()

            timer = threading.Timer(_FETCH_S, give_up)
            timer.daemon = True
            timer.start()
            try:
                assert child.stdout is not None
                for raw in child.stdout:
                    line = raw.decode(errors="replace").rstrip()
                    said.append(line)
                    errors += [line] if _ERROR.match(line) and len(errors) < _SHOWN_LINES else []
                    if part := _PARTS[self.tool].search(line):
                        tell(part[1])
                child.wait()  # the timer ends it
            except BaseException:
                end()
                raise
            finally:
                timer.cancel()
        if child.returncode != 0:
            text = "\n".join(errors or said).strip()
            what = (
                f"{self.tool} did not end within {_FETCH_S / 60:g} minutes and was stopped; is the "
                "network slow?"
                if late.is_set()
                else f"{self.tool} failed with {child.returncode}; is there a network?"
            )
            raise ServerFailed(
                f"{what} What it has is kept: try again. It said:\n{text or 'nothing'}"
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
    """Where resolved servers are kept: UNDERSTUDY_SERVERS_CACHE, else a folder of the user's
    cache."""
    if given := os.environ.get("UNDERSTUDY_SERVERS_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy" / "servers"


def place_of(name: str) -> Path:
    """The folder where this server is, or will be."""
    return cache_root() / f"{name}-{PACKAGES[name].version}"


def cached(name: str) -> Path | None:
    """The folder of a resolved server; None when it is missing or incomplete."""
    place = place_of(name)
    listed = _listed(place)
    try:
        is_complete = bool(listed) and all(
            os.stat(place / path).st_size == facts[0] for path, facts in listed.items()
        )
    except OSError:
        return None
    return place if is_complete else None


def fetch(name: str, *, package: Package | None = None, tell: Tell = lambda part: None) -> bool:
    """Resolve a server into the cache, naming each part; False when it was there and every byte
    is right."""
    package = package or PACKAGES[name]
    place = place_of(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.parent / f".{place.name}.lock"
        with FileLock(lock, what=f"the download of {name}", patience_s=_OTHER_FETCH_S):
            if cached(name) and all(
                _digest(place / path) == facts[1] for path, facts in _listed(place).items()
            ):
                return False
            if trouble := package.trouble():
                raise ServerFailed(f"{name} {package.version} cannot be fetched: {trouble}")
            _make(place, package, tell)
            return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no room for {name} ({package.size_mib} MiB) in {place.parent}: {error}; free "
                "some, or name another "
                "folder in UNDERSTUDY_SERVERS_CACHE"
            ) from None
        raise


def _make(place: Path, package: Package, tell: Tell) -> None:
    for path in place.parent.glob(
        f".{place.name}.*"
    ):  # left by a fetch that was killed; the lock is ours
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        package.resolve(draft, tell)
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
    """Each file with size and digest; empty where there is no list that can be read."""
    with contextlib.suppress(OSError, ValueError):
        listed = json.loads((place / _LIST).read_bytes())
        if isinstance(listed, dict):
            return listed
    return {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
