"""Makes a server hang."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def hanging(server: Any) -> Iterator[None]:
    """A server that accepts connections and bytes, and never responds."""
    if not server.pid:
        pytest.skip("the server is somebody else's: tests may not stop it")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
