"""A real Spark cluster on loopback: a standalone master and workers, each in its own process."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.integration.spark import MARK, marked, wait_until

_MEMORY = {
    "SPARK_DAEMON_MEMORY": "192m",
    "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """A master, and workers that come and go; all end with it, and what they started too."""

    def __init__(self, folder: Path, mark: str) -> None:
        self._folder = folder
        self._mark = mark
        self._port = _free_port()
        self._page = _free_port()
        self.url = f"spark://127.0.0.1:{self._port}"
        self._started: list[subprocess.Popen[bytes]] = []
        page = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", str(self._page)]
        self._start("master.Master", *page)
        wait_until(lambda: self._asked() is not None)

    def add_worker(self) -> None:
        """A worker with one core for one executor, in its own folder."""
        before = self._alive()
        name = f"worker-{len(self._started)}"
        (self._folder / name).mkdir(parents=True)
        self._start(
            "worker.Worker",
            "--host",
            "127.0.0.1",
            "--cores",
            "1",
            "--memory",
            "1g",
            "--webui-port",
            "0",
            "--work-dir",
            str(self._folder / name),
            self.url,
        )
        wait_until(lambda: self._alive() > before)

    def kill_worker(self) -> None:
        """The last one, and its executors with it."""
        self._started[-1].kill()
        self._started[-1].wait()
        self.kill_executors()

    def kill_executors(self) -> int:
        """End what carries out tasks, as a crash would; how many that were."""
        found = [
            pid for pid in marked(self._mark) if b"CoarseGrainedExecutorBackend" in _command_of(pid)
        ]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def close(self) -> None:
        for one in self._started:
            one.kill()
            one.wait()
        for pid in marked(self._mark):
            os.kill(pid, signal.SIGKILL)

    def _start(self, what: str, *arguments: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            **_MEMORY,
            MARK: self._mark,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(home),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{what}.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    [
                        str(home / "bin" / "spark-class"),
                        f"org.apache.spark.deploy.{what}",
                        *arguments,
                    ],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    cwd=self._folder,
                )
            )

    def _alive(self) -> int:
        return int((self._asked() or {})["aliveworkers"])

    def _asked(self) -> dict[str, Any] | None:
        """The master's report of its state."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/json/", timeout=5.0
            ) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            assert self._started[0].poll() is None, "the master ended"
            return None


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
