"""What each server is resolved from, by the ordinary clients of its world: Maven, npm, Go; all with fixed versions."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import ServerFailed
from understudy.dev.tools import find, missing, must_find, plain_environment

_FETCH_S = 1800.0
_TAIL = 2000
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>understudy.dev</groupId> <artifactId>server</artifactId> <version>1</version> <packaging>pom</packaging>
  <dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


@dataclass(frozen=True, slots=True)
class Package:
    """One server as it is resolved: a version, a tool, and names that the tool knows."""

    version: str
    tool: str
    names: Sequence[str]
    size_mib: int

    def trouble(self) -> str | None:
        """Why it cannot be resolved here; None when the tool is there."""
        return None if find(self.tool) else missing(self.tool)

    def resolve(self, into: Path) -> None:
        """Download it into an empty folder; ServerFailed shows what the tool said."""
        if self.tool == "mvn":
            dependencies = "".join(_DEPENDENCY.format(*name.split(":")) for name in self.names)
            (into / "pom.xml").write_text(_POM.format(dependencies=dependencies))
            self._call(
                into, "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=lib"
            )
        elif self.tool == "npm":
            (into / "package.json").write_text('{"private": true}\n')
            # Nobody's install scripts run here: what is needed comes built.
            self._call(into, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save", *self.names)
        else:
            self._call(into, "install", *self.names)

    def _call(self, into: Path, *words: str) -> None:
        env = plain_environment({"GOBIN": str(into)} if self.tool == "go" else None)
        with subprocess.Popen(
            [must_find(self.tool), *words], cwd=into, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as child:  # fmt: skip
            try:
                said = child.communicate(timeout=_FETCH_S)[0].decode(errors="replace").strip()[-_TAIL:]
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise ServerFailed(f"{self.tool} did not end in {_FETCH_S / 60:.0f} minutes; try later") from None
                raise
        if child.returncode != 0:
            raise ServerFailed(f"{self.tool} failed with {child.returncode}; is there a network? It said:\n{said}")


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
