"""A platform in its own processes, and a client that counts acknowledged steps."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from understudy.core.names import new_session, player_name
from understudy.experience.frame import encode_frame_batch
from understudy.testing.samples import cart_spec, random_session

SPEC = cart_spec()


class Up:
    """`understudy up` on a free port; a context manager that leaves no process behind."""

    def __init__(self, data: Path, *arguments: str, **environment: str) -> None:
        self.data = data
        command = [
            sys.executable,
            "-m",
            "understudy.cli.main",
            "up",
            "--data",
            str(data),
            "--port",
            "0",
            "--json-ready",
        ]
        self._errors = (data.parent / f"{data.name}.err").open("w+")
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text()

    def status(self, role: str) -> dict[str, Any]:
        fields = json.loads((self.data / "roles" / f"{role}.json").read_text())
        assert isinstance(fields, dict)
        return fields

    def is_back(self, role: str) -> bool:
        """Whether a role was restarted once and is running again."""
        status = self.status(role)
        return bool(status["restarts"] == 1 and status["state"] == "running")

    def kill(self, role: str) -> int:
        pid = int(self.status(role)["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


class Sender:
    """Sends sessions, each chunk until it is acknowledged, like a client with a spool."""

    def __init__(self, url: str, key: str, *, seed: int = 0, pause_s: float = 0.0) -> None:
        self._http = urllib3.PoolManager(retries=False, timeout=60.0)
        self._url = f"{url}/v1/games/{SPEC.game}"
        self._headers = {"authorization": f"Bearer {key}"}
        self._rng = np.random.default_rng(seed)
        self.acked_steps = 0
        self.failures = 0
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def register(self) -> None:
        answer = self._http.request("PUT", self._url, body=SPEC.to_json(), headers=self._headers)
        assert answer.status == 200, answer.data

    def send_session(self) -> None:
        chunks = random_session(
            SPEC, self._rng, session=new_session(time.time(), self._rng.bytes(10))
        )
        for chunk in chunks:
            frame = chunk.frame()
            body = encode_frame_batch([frame], {frame.session: player_name("ada")})
            while not self._post(body):
                self.failures += 1
                time.sleep(0.05)
            self.acked_steps += chunk.meta.n_steps

    def _post(self, body: bytes) -> bool:
        try:
            answer = self._http.request(
                "POST", f"{self._url}/frames", body=body, headers=self._headers
            )
        except urllib3.exceptions.HTTPError:
            return False
        return answer.status == 200 and all(
            ack["accepted"] for ack in json.loads(answer.data)["acks"]
        )

    def sends_on(self, steps: int = 20) -> None:
        """Wait until some more steps are acknowledged."""
        acked = self.acked_steps
        wait_for(lambda: self.acked_steps > acked + steps)

    def status(self) -> int:
        """The HTTP status that the gateway returns for this key."""
        return self._http.request("GET", self._url, headers=self._headers).status

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            self.send_session()

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._http.clear()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Processes of our roles in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline") if Path("/proc").is_dir() else ():
        try:
            text = path.read_text()
        except OSError:
            continue
        if str(folder) in text and "understudy.platform" in text:
            found.append(int(path.parent.name))
    return found
