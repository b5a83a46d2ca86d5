"""Ports on loopback that nobody uses, outside the range from which the system gives ports to clients.

A client that connects again and again to a port of that range while its server is away can meet itself, and then
holds the port when the server comes back.
"""

import random
import socket
from collections.abc import Sequence

from understudy.core.errors import ConfigError

HOST = "127.0.0.1"
_RANGE = range(20_000, 32_000)
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(names: Sequence[str], *, rng: random.Random | None = None) -> dict[str, int]:
    """A free port for each name, all different."""
    rng = rng or random.SystemRandom()
    found: dict[str, int] = {}
    for _ in range(_TRIES):
        if len(found) == len(names):
            return found
        port = rng.choice(_RANGE)
        if port not in found.values() and is_free(port):
            found[names[len(found)]] = port
    raise ConfigError(f"no {len(names)} free ports were found on {HOST} between {_RANGE.start} and {_RANGE.stop}")


def listens(port: int, *, timeout_s: float = 0.5) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as one:
        one.settimeout(timeout_s)
        return one.connect_ex((HOST, port)) == 0
