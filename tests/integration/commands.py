"""Our commands as processes; none outlives the block that started it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

_END_S = 200.0
"""How long commands may take that run at once: a loaded machine starts four interpreters slowly."""


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A running command; its whole output is on one pipe."""
    command = [sys.executable, "-m", "understudy.cli.main", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # one that has ended stays as it is


def four_at_once(*words: str) -> Sequence[tuple[int, str]]:
    """The exit code of each of four that do the same at the same time, and all that it said."""
    with ExitStack() as stack:
        running = [stack.enter_context(started(*words)) for _ in range(4)]
        said = [process.communicate(timeout=_END_S)[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]
