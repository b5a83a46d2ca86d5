"""Runs commands and Python of a page in order, all in one process that imports JAX once.

    python tests/docs/one_process.py    answers each line of its input with a line, both JSON

Their output, results, arguments and current folder are those that each would have in a process of
its own. tests/cli starts the installed command.
"""

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class OneProcess:
    """The process; a context manager."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        environment.pop("UNDERSTUDY_DATA", None)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "OneProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, command: list[str], folder: Path) -> str:
        """The output of a command, or of `python -c TEXT`, which must succeed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, str(folder)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{command} ended the process: {self._process.wait()}"
        code, out, err = json.loads(line)
        assert code == 0, f"{command}\n{out}\n{err}"
        return str(out)


# --- The process ----------------------------------------------------------------------------------


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    modules = sys.path[1:]
    for line in sys.stdin:
        command, folder = json.loads(line)
        os.chdir(folder)
        # A console script starts with its own folder, so that the command adds the current one.
        first = "" if command[0] == sys.executable else str(Path(sys.executable).parent)
        sys.path[:] = [first, *modules]
        answers.write(json.dumps(captured(command)) + "\n")
        answers.flush()
        forget_modules_in(Path.cwd())


def forget_modules_in(folder: Path) -> None:
    """The next command imports the page's own files anew."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and folder in Path(file).parents:
            del sys.modules[name]
    importlib.invalidate_caches()


def captured(command: list[str]) -> tuple[int, str, str]:
    """The exit code, output and errors of a command."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with replaced(out.fileno(), err.fileno()):
            try:
                code = execute(command)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


@contextlib.contextmanager
def replaced(*files: int) -> Iterator[None]:
    """Standard output and errors go to these files, also those of child processes."""
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(1), os.dup(2)]
    for target, file in enumerate(files, start=1):
        os.dup2(file, target)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for target, file in enumerate(kept, start=1):
            streams[target - 1].flush()
            os.dup2(file, target)
            os.close(file)


def execute(command: list[str]) -> int:
    program, *words = command
    if program == "understudy":
        from understudy.cli.main import main as understudy

        return called(understudy, command)
    if program == "pytest":
        import pytest

        return int(called(lambda: pytest.main(words), command))
    if program == sys.executable and words[0] == "-c":
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(words[1])
            file.flush()
            runpy.run_path(file.name, run_name="__main__")
        return 0
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def called(program: Callable[[], Any], words: list[str]) -> int:
    sys.argv = words
    return int(program())


if __name__ == "__main__":
    main()
