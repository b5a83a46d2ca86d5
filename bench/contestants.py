"""Contestants as processes in their own environments, which talk in JSON lines."""

import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.setup import StageError, call, stage

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "bench" / ".peers"
REQUIREMENTS = ROOT / "bench" / "against"
READY_S = 300.0
LINE_S = 900.0
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMBA", "RAYON", "VECLIB_MAXIMUM")


class ContestantError(Exception):
    """A contestant could not run; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A module that implements the link protocol, its environment and its settings."""

    name: str
    module: str
    environment: str = ""
    """The name of a requirements file in bench/against; empty: this process's environment."""
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    tries_threads: bool = False
    """Whether to try one and two threads first and use the faster."""

    @property
    def is_ours(self) -> bool:
        return not self.environment


def are_peers_here() -> bool:
    """Whether peers run in this process's environment, as on a machine that installs nothing."""
    return os.environ.get("UNDERSTUDY_PEERS") == "here"


def python_of(environment: str) -> Path:
    """The interpreter of an environment; this one, if peers run here.

    The environment is installed if it is missing or its pins changed.
    """
    if not environment or are_peers_here():
        return Path(sys.executable)
    folder = ENVIRONMENTS / environment
    pins = REQUIREMENTS / f"{environment}.txt"
    stamp = folder / "installed"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        uv = Path(sys.executable).with_name("uv")
        try:
            stage(
                environment,
                lambda: _install(uv, folder, pins),
                note=pins.relative_to(ROOT).as_posix(),
            )
        except StageError as error:
            raise ContestantError(
                f"installation failed: {str(error).strip().splitlines()[-1]}"
            ) from error
        stamp.write_text(digest)
    return folder / "bin" / "python"


def _install(uv: Path, folder: Path, pins: Path) -> None:
    call(uv, "venv", "--python", sys.executable, folder)
    call(uv, "pip", "install", "--python", folder, "-r", pins)


def limited_environment(threads: int) -> dict[str, str]:
    """This process's environment, with the limits that hold for every contestant."""
    return {
        **os.environ,
        **{f"{name}_NUM_THREADS": str(threads) for name in _THREADS},
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        # Every contestant compiles from scratch: no compiled program of an earlier run is reused.
        "UNDERSTUDY_COMPILE_CACHE": "",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


class Process:
    """A started contestant: `ask` runs a round; `line` and `answer` exchange lines in a round."""

    def __init__(
        self, contestant: Contestant, request: dict[str, Any], *, threads: int | None = None
    ) -> None:
        threads = threads or contestant.threads
        environment = limited_environment(threads)
        if not contestant.is_ours and not are_peers_here():
            environment.pop("PYTHONPATH", None)
        command = [str(python_of(contestant.environment)), "-m", contestant.module]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._unread = b""
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.answer(request | {"settings": contestant.settings, "threads": threads})
            self.versions: dict[str, str] = self.line(READY_S)["versions"]
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began_s

    def ask(self) -> dict[str, Any]:
        """Run one round and return its result."""
        self.answer({})
        return self.line()

    def answer(self, fields: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # it has ended; the next `line` raises the reason
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()

    def line(self, timeout_s: float = LINE_S) -> dict[str, Any]:
        """The next line that the contestant sends."""
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            remaining_s = until_s - time.monotonic()
            if (
                remaining_s <= 0
                or not select.select([self._process.stdout], [], [], remaining_s)[0]
            ):
                raise ContestantError(f"no output for {timeout_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise ContestantError(f"ended: {self._last_error()}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        fields: dict[str, Any] = json.loads(line)
        return fields

    def _last_error(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        # The result file must not contain paths of this machine.
        return (lines[-1] if lines else f"with code {code}").replace(str(ROOT), "")[:300]

    def close(self) -> None:
        """Close the contestant's pipes, wait for its end, and kill it if it is still running."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
