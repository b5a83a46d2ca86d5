"""Runs scripts in Node, to compare the JavaScript client with Python; skipped without Node."""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "js"
OLDEST = 20
_NODE = shutil.which("node")


@functools.cache
def why_not() -> str:
    """Why Node cannot be used here; empty when it can."""
    if _NODE is None:
        return (
            "node is missing: install Node.js 20 or newer to run the tests of the JavaScript client"
        )
    major = int(
        subprocess.run([_NODE, "--version"], capture_output=True, text=True, check=True)
        .stdout[1:]
        .split(".")[0]
    )
    return (
        ""
        if major >= OLDEST
        else f"node {major} is too old: the JavaScript client needs {OLDEST} or newer"
    )


needs_node = pytest.mark.skipif(bool(why_not()), reason=why_not())


def run_script(script: str, request: Any = None, *, timeout_s: float = 120.0) -> Any:
    """Run a script of this folder with a JSON request; returns the JSON it printed."""
    done = subprocess.run(
        [_NODE or "node", HERE / script],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


class NodeServer:
    """A script of this folder that answers each line of JSON with one, until the block ends.

    Starting Node costs more than most requests.
    """

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            [_NODE or "node", HERE / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the script failed; see its errors above"
        return json.loads(answer)

    def __enter__(self) -> "NodeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
