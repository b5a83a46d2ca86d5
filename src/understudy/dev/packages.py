"""What each server is resolved from, by the ordinary clients of its world: Maven, npm, Go; all with fixed versions."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import ServerFailed
from understudy.dev.tools import find, missing, must_find, plain_environment

_FETCH_S = 1800.0
_SHOWN_LINES = 8
_ERROR = re.compile(r"\[ERROR\] (?!To see|Re-run|For more|\[Help)\S|npm (?:error|ERR!) (?! *at |A complete log)\S|go: ")
"""A line that says what went wrong, among those that do not."""
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>understudy.dev</groupId> <artifactId>server</artifactId> <version>1</version> <packaging>pom</packaging>
  <dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_NEEDS = {"mvn": ("mvn", "java"), "npm": ("npm", "node"), "go": ("go",)}
"""What each tool does not run without."""
_PARTS = {
    "mvn": re.compile(r"Downloaded from \S+ \S*/(\S+)"),
    "npm": re.compile(r"http fetch GET 200 \S*/(\S+)"),
    "go": re.compile(r"(?:go: downloading )?([a-z0-9.-]+/\S+)"),
}
"""How each tool says that it has one more part."""

Tell = Callable[[str], None]


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
        """Download it into an empty folder, naming each part; ServerFailed shows what the tool said.

        The tools keep what they have downloaded in caches of their own: one that is tried again goes on from there.
        """
        if self.tool == "mvn":
            dependencies = "".join(_DEPENDENCY.format(*name.split(":")) for name in self.names)
            (into / "pom.xml").write_text(_POM.format(dependencies=dependencies))
            words = ["-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=lib"]
        elif self.tool == "npm":
            (into / "package.json").write_text('{"private": true}\n')
            # Nobody's install scripts run here: what is needed comes built.
            words = [
                "install",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--no-save",
                "--loglevel=http",
                *self.names,
            ]
        else:
            words = ["install", "-v", *self.names]
        errors, said = list[str](), deque[str](maxlen=_SHOWN_LINES)
        late = threading.Event()
        with self._running(into, words, late) as child:
            assert child.stdout is not None
            for raw in child.stdout:
                line = raw.decode(errors="replace").rstrip()
                said.append(line)
                errors += [line] if _ERROR.match(line) and len(errors) < _SHOWN_LINES else []
                if part := _PARTS[self.tool].search(line):
                    tell(part[1])
        if child.returncode != 0:
            text = "\n".join(errors or said).strip()
            what = (
                f"{self.tool} did not end within {_FETCH_S / 60:g} minutes and was stopped; is the network slow?"
                if late.is_set()
                else f"{self.tool} failed with {child.returncode}; is there a network?"
            )
            raise ServerFailed(f"{what} What it has is kept: try again. It said:\n{text or 'nothing'}")

    @contextlib.contextmanager
    def _running(self, into: Path, words: Sequence[str], late: threading.Event) -> Iterator[subprocess.Popen[bytes]]:
        """The tool at work; it ends with us, and when it takes too long, which sets `late`."""
        env = plain_environment({"GOBIN": str(into)} if self.tool == "go" else None)
        with subprocess.Popen(
            [must_find(self.tool), *words], cwd=into, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as child:  # fmt: skip

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
                yield child
                child.wait()  # the timer ends it
            except BaseException:
                end()
                raise
            finally:
                timer.cancel()


PACKAGES = {
    "cassandra": Package("5.0.9", "mvn", ["org.apache.cassandra:cassandra-all:5.0.9"], 67),
    "kafka": Package(
        "4.3.1", "mvn",
        ["org.apache.kafka:kafka_2.13:4.3.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"], 44,
    ),
    "kinesis": Package("0.6.2", "npm", ["kinesis-local@0.6.2"], 16),
    "kinesalite": Package("3.3.3", "npm", ["kinesalite@3.3.3"], 15),
    "s3": Package("1.8.0", "go", ["github.com/versity/versitygw/cmd/versitygw@v1.8.0"], 80),
}  # fmt: skip


def cache_root() -> Path:
    """Where resolved servers are kept: UNDERSTUDY_SERVERS_CACHE, else a folder of the user's cache."""
    if given := os.environ.get("UNDERSTUDY_SERVERS_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy" / "servers"
