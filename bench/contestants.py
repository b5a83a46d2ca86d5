"""Contestants as processes in environments of their own, made on demand; one JSON line at a
time."""

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
    """A contestant could not run; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Who takes part: a module that speaks the link's language, where it is installed, and what
    it is told."""

    name: str
    module: str
    environment: str = ""
    """A file of bench/against without its .txt; empty means the environment of this process."""
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    tries_threads: bool = False
    """Whether one and two threads are tried first, to keep the better."""

    @property
    def is_ours(self) -> bool:
        return not self.environment


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which is installed first where it is missing or its
    pins have changed."""
    if not environment:
        return Path(sys.executable)
    folder = ENVIRONMENTS / environment
    pins = REQUIREMENTS / f"{environment}.txt"
    stamp = folder / "installed"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
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
                f"does not install: {str(error).strip().splitlines()[-1]}"
            ) from error
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def _install(uv: Path, folder: Path, pins: Path) -> None:
    call(uv, "venv", "--python", sys.executable, folder)
    call(uv, "pip", "install", "--python", folder, "-r", pins)


class Process:
    """A contestant at work: ready once made; `ask` starts a round, `line` and `answer` go on
    inside one."""

    def __init__(
        self, who: Contestant, request: dict[str, Any], *, threads: int | None = None
    ) -> None:
        threads = threads or who.threads
        environment = {
            name: value for name, value in os.environ.items() if who.is_ours or name != "PYTHONPATH"
        }
        environment |= {f"{name}_NUM_THREADS": str(threads) for name in _THREADS}
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
        }
        # Everybody compiles anew: no program of an earlier run is found on the disk.
        environment |= {"UNDERSTUDY_COMPILE_CACHE": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        command = [str(python_of(who.environment)), "-m", who.module]
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
            self.answer(request | {"settings": who.settings, "threads": threads})
            self.versions: dict[str, str] = self.line(READY_S)["versions"]
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began_s

    def ask(self) -> dict[str, Any]:
        """One round, and what it found."""
        self.answer({})
        return self.line()

    def answer(self, fields: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next line will say why it has gone
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()

    def line(self, timeout_s: float = LINE_S) -> dict[str, Any]:
        """The next thing it says."""
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ContestantError(f"said nothing for {timeout_s:.0f} s")
            some = os.read(self._process.stdout.fileno(), 1 << 20)
            if not some:
                raise ContestantError(f"ended: {self._last_words()}")
            self._unread += some
        line, self._unread = self._unread.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        words = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        # A path would name this machine in the result file.
        return (words[-1] if words else f"with code {code}").replace(str(ROOT), "")[:300]

    def close(self) -> None:
        """End it; asked first, by closing what it listens to."""
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
