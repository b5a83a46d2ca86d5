"""Work at the gateway is bounded: bytes held and CPU used, per request and per connection.

The bounds are absolute, and those on CPU generous, so that they hold on a busy machine. Each fault
that they exclude cost hundreds of times as much.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.card import Card
from tests.faults.amplification import KIB, MAX_BODIES_BYTES, MIB, Cost, measured
from tests.faults.processes import start, wait_until
from tests.faults.profiles import sizes
from understudy.core.names import new_session
from understudy.platform.children import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")

REQUEST_BYTES = 96 * MIB
"""Bound per request; the largest JSON body has 4 MiB, each of its numbers is an object of 32."""
REQUEST_CPU_S = 2.0
RELEASED_CPU_S = 2.5
RELEASED_DELAY_S = 2.0
CONNECTION_BYTES = 512 * KIB
CONNECTION_CPU_S = 0.05


def head(method: str, path: str, key: str = "", *, more: str = "") -> bytes:
    """The head of a request; `more` has further lines."""
    more += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


@dataclass(frozen=True)
class Served:
    """A gateway in another process."""

    child: Child
    port: int
    key: str
    limited_key: str
    """A key with the usual rate of bytes; that of `key` has no limit."""

    @contextlib.contextmanager
    def measured(self) -> Iterator[Cost]:
        """Measure the gateway, after it has returned its free memory."""
        n_trims = self.child.latest["n_trims"]
        os.kill(self.child.pid, signal.SIGUSR1)
        wait_until(
            lambda: self.child.latest["n_trims"] > n_trims, timeout_s=120, what="a collection"
        )
        with measured(self.child.pid) as cost:
            yield cost

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 30, (source, 0))

    def ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a body compressed; return the status of the answer, whose body must be JSON."""
        packed = gzip.compress(body, 6) if body else b""
        more = f"Content-Length: {len(packed)}\r\nConnection: close\r\n"
        if body:
            more += "Content-Encoding: gzip\r\n"
        received = b""
        with self.connect() as connection:
            connection.sendall(head(method, path, self.key, more=more) + packed)
            while part := connection.recv(65536):
                received += part
        json.loads(received.partition(b"\r\n\r\n")[2])
        return int(received.split(b" ")[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    child = start("tests.faults.amplification", str(tmp_path_factory.mktemp("served")))
    try:
        wait_until(
            lambda: bool(child.latest) or child.exit_code is not None,
            timeout_s=120,
            what="the start of the gateway",
        )
        assert child.latest, child.errors
        latest = child.latest
        yield Served(child, latest["port"], latest["key"], latest["limited_key"])
    finally:
        child.kill()
        child.wait(10)


# --- Requests -------------------------------------------------------------------------------------

WIDE_TEXT = "A" * 40_000


def columns_of(columns: dict[str, Any] | str, **more: Any) -> bytes:
    """A chunk with these columns, or with their JSON."""
    session = str(new_session())
    sent = {"player": "ada", "session": session, "chunk_no": 0, "columns": "HERE", **more}
    text = columns if isinstance(columns, str) else json.dumps(columns)
    return json.dumps(sent).replace('"HERE"', text).encode()


def one_column(name: str, text: str) -> bytes:
    """A chunk of `cart` in which one column is this JSON, and the others are short."""
    columns = {
        "obs": "[[0,0,0,0],[0,0,0,0]]",
        "action": "[0,0]",
        "reward": "[0,0]",
        "row": "[0,1]",
        "is_first": "[true,false]",
        "terminated": "[true,false]",
        "truncated": "[false,false]",
    }
    parts = [f'"{column}":{values}' for column, values in {**columns, name: text}.items()]
    return columns_of("{" + ",".join(parts) + "}")


def obs_of(text: str) -> bytes:
    """A request for a decision on this JSON."""
    return f'{{"obs":{text}}}'.encode()


def mixed() -> str:
    return json.dumps([WIDE_TEXT] + [0] * 9_000)


def mixed_rows() -> str:
    return json.dumps([[WIDE_TEXT, 0, 0, 0]] + [[0] * 4] * 1_000)


def with_episodes(episodes: str) -> bytes:
    return columns_of("{}").replace(b'"columns"', f'"episodes":{episodes},"columns"'.encode())


HOSTILE_BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a text among numbers": ("large/act", lambda: obs_of(mixed())),
    "a text in a longer list": ("cart/act", lambda: obs_of(mixed())),
    "a text in nested lists": ("grid/act", lambda: obs_of(mixed_rows())),
    "a text in a part": ("parts/act", lambda: obs_of(f'{{"part0":{{"x":{mixed()}}}}}')),
    "a text in advice": ("large/advise", lambda: obs_of(mixed())),
    "a text in a column": ("cart/columns", lambda: one_column("reward", mixed())),
    "a text in rows": ("cart/columns", lambda: one_column("obs", mixed_rows())),
    "a text in a mask": ("grid/act", lambda: b'{"obs":0,"action_mask":["a"]}'),
    "empty lists": ("cart/act", lambda: obs_of("[" + "[]," * 300_000 + "[]]")),
    "empty objects": ("cart/act", lambda: obs_of("[" + "{}," * 300_000 + "{}]")),
    "short texts": ("cart/act", lambda: obs_of("[" + '"ab",' * 200_000 + "0]")),
    "a deep list": ("cart/act", lambda: obs_of("[" * 500_000)),
    "a long number": ("cart/act", lambda: obs_of("1" * 1_000_000)),
    "many flags": ("grid/act", lambda: b'{"obs":0,"action_mask":[' + b"true," * 200_000 + b"1]}"),
    "empty lists in a column": (
        "cart/columns",
        lambda: one_column("obs", "[" + "[]," * 1_300_000 + "[]]"),
    ),
    "objects in a column": (
        "cart/columns",
        lambda: one_column("obs", "[" + "{}," * 1_300_000 + "{}]"),
    ),
    "many numbers": (
        "cart/columns",
        lambda: one_column("reward", "[" + "0," * 2_000_000 + "0]"),
    ),
    "many fractions": (
        "large/columns",
        lambda: one_column("obs", "[" + "0.5," * 1_000_000 + "0]"),
    ),
    "many columns": (
        "cart/columns",
        lambda: columns_of("{" + ",".join(f'"{at:x}":0' for at in range(350_000)) + "}"),
    ),
    "many episodes": ("cart/columns", lambda: with_episodes("[" + "{}," * 1_300_000 + "{}]")),
    "many opponents": (
        "cart/columns",
        lambda: with_episodes('[{"opponents":[' + '"a",' * 1_000_000 + '"a"]}]'),
    ),
    "zeros as frames": ("cart/frames", lambda: bytes(32 * MIB)),
    "a large preamble": (
        "cart/frames",
        lambda: b"UNPA" + (60_000).to_bytes(4, "little") + b"[" + b"[]," * 20_000,
    ),
}
"""By name: the path after the game's, and a body that is small when compressed."""


@pytest.mark.parametrize("case", HOSTILE_BODIES)
def test_a_hostile_body_costs_little(served: Served, card: Card, case: str):
    path, body = HOSTILE_BODIES[case]
    with served.measured() as cost:
        status = served.ask("POST", f"/v1/games/{path}", body())
    assert status in (400, 413), status
    assert cost.peak_bytes < REQUEST_BYTES, f"{cost.peak_bytes / MIB:.0f} MiB"
    assert cost.cpu_s < REQUEST_CPU_S, f"{cost.cpu_s:.2f} s"
    card.line("amplification at the gateway: a hostile body", tried=1, held=1)


def random_value(rng: random.Random, depth: int) -> str:
    """JSON that repeats its parts, so that it is large, or small when compressed."""
    n = rng.choice([0, 1, 3, 50, 4_000])
    match rng.randrange(8 if depth else 6):
        case 0:
            return rng.choice(["0", "-1.5", "1e308", "true", "null", "9" * 300])
        case 1:
            return json.dumps(rng.choice(["", "a", "\u0000", "ab" * n, "\U0001f600" * n]))
        case 2:
            return f"[{','.join(['0.25'] * n)}]"
        case 3:
            return f"[{','.join(['[]', '{}', '[0]', 'true'][rng.randrange(4)] for _ in range(n))}]"
        case 4:
            return f"{{{','.join(f'{json.dumps(str(at))}:0' for at in range(n))}}}"
        case 5:
            return "[" * n
        case _:
            part = random_value(rng, depth - 1)
            n = min(n, 2 * MIB // (len(part) + 1))
            return f"[{','.join([part] * n)}]"


@sizes("bodies", short=2, full=8)
def test_random_bodies_cost_little(served: Served, card: Card, seed: int, bodies: int):
    rng = random.Random(seed)
    n_tried = 0
    for path in ("cart/act", "large/act", "grid/act", "parts/act", "parts/advise"):
        for _ in range(bodies):
            body = b'{"obs":' + random_value(rng, 3).encode()[:MIB] + b"}"
            n_tried += check_random(served, path, body)
    for name in ("obs", "action", "reward", "is_first"):
        for _ in range(bodies):
            body = one_column(name, random_value(rng, 3)[: 3 * MIB])
            n_tried += check_random(served, "cart/columns", body)
    card.line("amplification at the gateway: a random body", tried=n_tried, held=n_tried)


def check_random(served: Served, path: str, body: bytes) -> int:
    with served.measured() as cost:
        status = served.ask("POST", f"/v1/games/{path}", body)
    assert status in (200, 400, 413), (path, body[:200], status)
    assert cost.peak_bytes < REQUEST_BYTES, (path, body[:200], cost)
    assert cost.cpu_s < REQUEST_CPU_S, (path, body[:200], cost)
    return 1


# --- Connections ----------------------------------------------------------------------------------


def hostile_connections(key: str) -> dict[str, bytes]:
    """By name: what a client sends before it falls silent and reads nothing."""
    page = head("GET", "/healthz")
    poll = head("GET", "/v1/games/cart/bot?after=99&wait_s=30", key)
    body = head("POST", "/v1/games/cart/frames", key, more=f"Content-Length: {250_000}\r\n")
    policy = head("GET", "/v1/games/wide/models/2/policy", key)
    padded = head("GET", "/healthz", more=f"X: {'y' * 8_000}\r\n")
    chunked = head("POST", "/healthz", more="Transfer-Encoding: chunked\r\n")
    return {
        "silence": b"",
        "an idle connection": page,
        "half a head": page[:-2],
        "a large head": page[:-2] + b"X: " + b"y" * 60_000,
        "many headers": page[:-2] + b"".join(b"%d:\r\n" % at for at in range(8_000)),
        "a whole head of many headers": page[:-2] + b"a:\r\n" * 15_000 + b"\r\n",
        "trailers": chunked + b"0\r\n" + b"a:b\r\n" * 800_000,
        "a large trailer": chunked + b"0\r\na:" + b"b" * 4_000_000,
        "chunk extensions": chunked + (b"1;" + b"x" * 60_000 + b"\r\na\r\n") * 60,
        "tiny chunks": chunked + b"1\r\na\r\n" * 600_000,
        "empty lines": page + b"\r\n" * 2_000_000,
        "pipelined requests": b"GET / HTTP/1.1\r\n\r\n" * 12_000,
        "requests behind a poll": poll + b"GET / HTTP/1.1\r\n\r\n" * 10_000,
        "large heads behind a poll": poll + padded * 30,
        "a body behind a poll": poll + body + bytes(240_000),
        "an unread answer": policy,
        "unread answers": policy * 50,
    }


@pytest.mark.parametrize("case", hostile_connections(""))
@sizes("n_connections", short=25, full=100)
def test_a_hostile_connection_costs_little(
    served: Served, card: Card, case: str, n_connections: int
):
    sent = hostile_connections(served.key)[case]
    connections = []
    with served.measured() as cost:
        for _ in range(n_connections):
            connection = served.connect()
            connections.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(sent)  # until the gateway reads no more
            assert served.ask("GET", "/healthz") == 200
    for connection in connections:
        connection.close()
    per_bytes = cost.peak_bytes / n_connections
    per_s = cost.cpu_s / n_connections
    assert per_bytes < CONNECTION_BYTES, f"{per_bytes / KIB:.0f} KiB per connection"
    assert per_s < CONNECTION_CPU_S, f"{per_s * 1e3:.0f} ms per connection"
    tried = n_connections
    card.line("amplification at the gateway: a hostile connection", tried=tried, held=tried)


def test_bodies_that_stall_hold_no_more_than_their_budget(served: Served, card: Card):
    """And the players of the same key, at another address, are served meanwhile."""
    size = 16 * MIB
    stalled = []
    with served.measured() as cost:
        for _ in range(8):
            connection = served.connect("127.0.0.2")
            stalled.append(connection)
            more = f"Content-Length: {size + 1}\r\n"
            connection.sendall(head("POST", "/v1/games/cart/frames", served.key, more=more))
            connection.sendall(bytes(size))
        for _ in range(5):
            assert served.ask("POST", "/v1/games/cart/frames", bytes(size)) == 400
    for connection in stalled:
        connection.close()
    # The last bodies, their joined parts, and what the allocator keeps.
    assert cost.peak_bytes < MAX_BODIES_BYTES + 6 * size, f"{cost.peak_bytes / MIB:.0f} MiB"
    card.line("amplification at the gateway: stalled bodies", tried=8, held=8)


@pytest.mark.parametrize("size", [30 * MIB, 33_620_000, 40_000_000], ids=["loop", "413", "thread"])
@pytest.mark.parametrize("is_limited", [True, False])
def test_bodies_that_are_decompressed_at_once_cost_no_more_than_their_key_may_send(
    served: Served, card: Card, bar: Callable[[float], float], size: int, is_limited: bool
):
    """All but the last byte of each was sent before; honest requests are answered meanwhile."""
    n_bodies = 100 if is_limited else 20
    packed = zlib.compress(bytes(size), 9)
    key = served.limited_key if is_limited else served.key
    more = f"Content-Encoding: deflate\r\nContent-Length: {len(packed)}\r\nConnection: close\r\n"
    sent = head("POST", "/v1/games/cart/frames", key, more=more) + packed
    connections = []
    statuses = []
    delays_s = []
    with served.measured() as cost:
        for _ in range(n_bodies):
            connection = served.connect()
            connections.append(connection)
            connection.sendall(sent[:-1])
        for connection in connections:
            connection.sendall(sent[-1:])
        for _ in range(10):
            began_s = time.monotonic()
            assert served.ask("GET", "/healthz") == 200
            delays_s.append(time.monotonic() - began_s)
        for connection in connections:
            with connection, connection.makefile("rb") as answer:
                statuses.append(int(answer.read().split(b" ")[1]))
    assert set(statuses) <= {400, 413, 429, 503}, statuses
    if is_limited:
        assert statuses.count(429) > n_bodies - 3
    assert cost.cpu_s < RELEASED_CPU_S, f"{cost.cpu_s:.2f} s"
    # And what is decoded, or joined, at the moment.
    assert cost.peak_bytes < MAX_BODIES_BYTES + REQUEST_BYTES, f"{cost.peak_bytes / MIB:.0f} MiB"
    assert max(delays_s) < bar(RELEASED_DELAY_S), delays_s
    card.line("amplification at the gateway: bodies at once", tried=n_bodies, held=n_bodies)
