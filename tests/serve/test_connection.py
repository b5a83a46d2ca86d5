"""Slow clients: each stage of a request has a timeout, and other clients are not delayed."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.gateways import Running, running
from understudy.experience.game import game_spec
from understudy.serve.server import Listen, client_address
from understudy.serve.state import GatewayConfig

HEAD_S = 0.5
BODY_S = 1.5
READ_S = 0.7
IDLE_S = 1
LATE_S = 4.0
"""How late a busy machine may be; without an end these connections would stay for ever."""
OK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    listen = Listen(
        head_timeout_s=HEAD_S, body_timeout_s=BODY_S, read_timeout_s=READ_S, idle_timeout_s=IDLE_S
    )
    with running(
        tmp_path_factory.mktemp("slow"), GatewayConfig(body_timeout_s=0.4), listen
    ) as found:
        found.register()
        yield found


def connect(gateway: Running, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.server.port), 10, (source, 0))


def until_closed(connection: socket.socket) -> tuple[bytes, float]:
    """What still came, and after how many seconds the other side ended it."""
    began_s = time.monotonic()
    received = b""
    try:
        while part := connection.recv(1 << 20):
            received += part
    except ConnectionError:
        pass
    connection.close()
    return received, time.monotonic() - began_s


def answer(connection: socket.socket, end: bytes = b"}") -> bytes:
    received = b""
    while end not in received:
        part = connection.recv(65536)
        assert part
        received += part
    return received


def drip(connection: socket.socket, parts: list[bytes]) -> float:
    """Send parts slowly; after how many seconds the other side had enough."""
    began_s = time.monotonic()
    with connection, contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        raise AssertionError("all of it was taken")
    return time.monotonic() - began_s


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nHost: loc", OK[:-2], b"\r\n\r\n"])
def test_a_head_that_does_not_arrive_times_out(gateway: Running, begun: bytes):
    began_s = time.monotonic()
    connection = connect(gateway)
    connection.sendall(begun)
    received, _ = until_closed(connection)
    after_s = time.monotonic() - began_s
    assert received == b""
    assert HEAD_S * 0.8 < after_s < HEAD_S + LATE_S


def test_a_slow_head_does_not_extend_its_timeout(gateway: Running):
    connection = connect(gateway)
    assert (
        drip(connection, [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: ", *[b"x"] * 500])
        < HEAD_S + LATE_S
    )


def test_the_second_head_of_a_connection_has_a_timeout_too(gateway: Running):
    connection = connect(gateway)
    for _ in range(3):
        connection.sendall(OK)
        assert b"200 OK" in answer(connection)
        time.sleep(HEAD_S * 0.6)
    connection.sendall(OK[:10])
    _, after_s = until_closed(connection)
    assert after_s < HEAD_S + LATE_S


@pytest.mark.parametrize("noise", [b"", b"\r\n", b"\r\n\r\n"])
def test_an_idle_connection_is_closed(gateway: Running, noise: bytes):
    connection = connect(gateway)
    began_s = time.monotonic()
    connection.sendall(OK)
    assert b"200 OK" in answer(connection)
    connection.sendall(noise)
    received, _ = until_closed(connection)
    after_s = time.monotonic() - began_s
    assert received == b""
    assert IDLE_S * 0.8 < after_s < IDLE_S + LATE_S


def test_a_rejected_body_has_a_timeout_and_the_connection_stays_usable(gateway: Running):
    connection = connect(gateway)
    connection.sendall(
        b"POST /v1/games/cart/frames HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    )
    assert b"401 Unauthorized" in answer(connection)
    connection.sendall(b"x" * 100)
    connection.sendall(OK)
    assert b"200 OK" in answer(connection)
    connection.close()
    connection = connect(gateway)
    connection.sendall(
        b"POST /v1/games/cart/frames HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    assert b"401 Unauthorized" in answer(connection)
    assert drip(connection, [b"1\r\nx\r\n"] * 500) < BODY_S + LATE_S


def test_an_endless_head_is_aborted(gateway: Running):
    for piece in (b"X-%d: " + b"y" * 100 + b"\r\n", b"z" * 100):
        connection = connect(gateway)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        try:
            while sent < 4_000_000:
                connection.sendall(piece.replace(b"%d", str(sent).encode()) * 100)
                sent += len(piece) * 100
        except ConnectionError:
            pass
        assert sent < 4_000_000
        connection.close()
    assert gateway.ask("GET", "/healthz").status == 200


LAST = OK[:-2] + b"Connection: close\r\n\r\n"
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n"


def n_taken(connection: socket.socket, piece: bytes, most: int) -> int:
    """How many bytes of endless repetitions the other side takes before it ends the connection."""
    sent = 0
    with connection, contextlib.suppress(ConnectionError):
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (CHUNKED + b"0\r\n", b"a:b\r\n" * 1_000),
        (CHUNKED + b"0\r\na:", b"b" * 10_000),
        (CHUNKED + b"0\r\n", b"a" * 10_000),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"a:b\r\n" * 1_000),
        (CHUNKED + b"0;", b"x" * 10_000),
        (CHUNKED + b"0", b"0" * 10_000),
        (CHUNKED, b"1\r\nx\r\n" * 1_000),
        (CHUNKED, b"9;%s\r\n123456789\r\n" % (b"x" * 1_000)),
        (CHUNKED.replace(b"POST /healthz", b"GET /play") + b"0\r\n", b"a:b\r\n" * 1_000),
        (OK[:-2] + b"%s\r\n", b"\r\n" * 5_000),
    ],
    ids=[
        "trailers",
        "a trailer value",
        "a trailer name",
        "trailers of a rejected body",
        "a chunk extension",
        "a chunk size",
        "tiny chunks",
        "chunk extensions",
        "trailers of a page",
        "empty lines",
    ],
)
def test_endless_framing_is_aborted(gateway: Running, begun: bytes, piece: bytes, has_key: bool):
    key = f"Authorization: Bearer {gateway.key('play')}\r\n" if has_key else ""
    connection = connect(gateway)
    connection.sendall(begun % key.encode())
    most = 40_000_000
    assert n_taken(connection, piece, most) < most
    assert gateway.ask("GET", "/healthz").status == 200


def test_a_body_that_goes_on_after_its_answer_is_aborted(gateway: Running):
    most = 200_000_000
    for more in (b"Content-Length: 1000000000000\r\n", b"Transfer-Encoding: chunked\r\n"):
        connection = connect(gateway)
        connection.sendall(b"POST /v1/games HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % more)
        chunk = b"f4240\r\n" + bytes(1_000_000) + b"\r\n"
        if more.startswith(b"T"):
            connection.sendall(chunk)
        assert b"401 Unauthorized" in answer(connection)
        assert n_taken(connection, chunk, most) < most


def test_a_long_body_may_have_many_chunks(gateway: Running):
    connection = connect(gateway)
    key = f"Authorization: Bearer {gateway.key('play')}\r\n"
    head = CHUNKED.replace(b"/healthz", b"/v1/games/cart/act") % key.encode()
    connection.sendall(head + b"a\r\n" + b" " * 10 + b"\r\n")
    for _ in range(20):
        connection.sendall((b"a\r\n" + b" " * 10 + b"\r\n") * 1_000)
    connection.sendall(b"0\r\nDigest: x\r\n\r\n")
    assert b"400 Bad Request" in answer(connection, b"}}")
    assert is_served(connection)
    connection.close()


def test_trailer_fields_are_no_headers(gateway: Running):
    key = gateway.key("play")
    connection = connect(gateway)
    head = CHUNKED.replace(b"POST /healthz", b"GET /v1/games") % b""
    connection.sendall(head + f"0\r\nAuthorization: Bearer {key}\r\n\r\n".encode() + LAST)
    received, _ = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 401 Unauthorized")
    assert received.count(b"200 OK") == 1


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_connection_is_not_used_after_a_request_to_upgrade_it(gateway: Running, protocol: bytes):
    """Its body would be read as requests."""
    connection = connect(gateway)
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: %s\r\n"
    connection.sendall(head % protocol + b"Content-Length: %d\r\n\r\n" % len(OK))
    assert b"connection: close" in answer(connection)
    with contextlib.suppress(ConnectionError):
        connection.sendall(OK)
    received, _ = until_closed(connection)
    assert b"HTTP/1.1" not in received


def test_a_body_behind_a_request_to_upgrade_is_refused_with_the_reason(gateway: Running):
    """Java's HttpClient asks for h2c by default, and its body does not reach the parser."""
    head = (
        f"%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gateway.key('play')}\r\n"
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    )
    connection = connect(gateway)
    posted = head % "POST /v1/games/cart/columns" + f"Content-Length: {len(OK)}\r\n\r\n"
    connection.sendall(posted.encode() + OK)
    received = until_closed(connection)[0]
    assert b" 400 " in received
    assert b"version(HttpClient.Version.HTTP_1_1)" in received
    connection = connect(gateway)
    connection.sendall((head % "GET /v1/games" + "\r\n").encode())
    assert b" 200 " in until_closed(connection)[0]


def test_large_heads_and_invalid_requests_get_the_usual_error_body(
    gateway: Running,
):
    for sent, status, code in (
        (
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
            431,
            "head_too_large",
        ),
        (OK[:-2] + b"X: y\r\n" * 200 + b"\r\n", 431, "head_too_large"),
        (b"HELO there\r\n\r\n", 400, "bad_http"),
    ):
        connection = connect(gateway)
        connection.sendall(sent)
        head, _, body = answer(connection, b"}}").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), head
        assert json.loads(body)["error"]["code"] == code
        connection.close()


def test_an_answer_that_is_not_read_is_dropped(gateway: Running):
    """A policy of some megabytes to a client that never reads: the connection ends, and its
    memory with it."""
    spec = gateway.register(game_spec("large", obs=60_000, actions=2))
    gateway.release(spec)
    key = gateway.key("play")
    request = (
        "GET /v1/games/large/models/1/policy HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{key}\r\n\r\n"
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", gateway.server.port))
    connection.sendall(request * 8)
    time.sleep(READ_S + 1.0)
    received, after_s = until_closed(connection)
    assert len(received) < 8 * 1_900_000
    assert after_s < 8
    reply = gateway.ask("GET", "/v1/games/large/models/1/policy", key)
    assert len(reply.raw) > 1_900_000, "whoever reads gets all of it"


def test_three_hundred_slow_clients_do_not_delay_others(
    gateway: Running, bar: Callable[[float], float]
):
    slow = [connect(gateway) for _ in range(300)]
    for connection in slow:
        connection.sendall(OK[:-5])
    times = []
    for _ in range(40):
        began_s = time.monotonic()
        assert gateway.ask("GET", "/healthz").status == 200
        times.append(time.monotonic() - began_s)
    assert sorted(times)[20] < bar(0.25)
    for connection in slow:
        assert until_closed(connection)[1] < HEAD_S + LATE_S


def test_pipelined_requests_are_answered_in_order(gateway: Running):
    connection = connect(gateway)
    connection.sendall(
        OK * 50 + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    received, _ = until_closed(connection)
    assert received.count(b"200 OK") == 50
    assert received.rindex(b"200 OK") < received.index(b"401 Unauthorized")


def test_requests_that_wait_behind_another_are_limited(gateway: Running):
    """Each needs a hundred times its bytes, and 200 KB of them come at once."""
    poll = (
        "GET /v1/games/cart/bot?after=9&wait_s=5 HTTP/1.1\r\nHost: localhost\r\nAuthorization: "
        f"Bearer {gateway.key('play')}\r\n\r\n"
    ).encode()
    body = b"POST /v1/games/cart/act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
    for behind in (OK * 3_000, body + bytes(200_000)):
        connection = connect(gateway)
        with contextlib.suppress(ConnectionError):
            connection.sendall(poll + behind)
        received, after_s = until_closed(connection)
        assert received == b""
        assert after_s < LATE_S


@pytest.mark.parametrize(
    ("repeats", "rest"),
    [(2, bytes(50)), (3, b"HELO there\r\n\r\n"), (70, b"")],
    ids=["bytes", "method", "many"],
)
def test_a_connection_that_ends_before_its_answers_gets_none_and_logs_nothing(
    gateway: Running, repeats: int, rest: bytes, caplog: pytest.LogCaptureFixture
):
    request = (
        "GET /v1/games HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{gateway.key('play')}\r\n\r\n"
    ).encode()
    for _ in range(5):
        connection = connect(gateway)
        connection.sendall(request * repeats + rest)
        assert until_closed(connection)[0] == b""
    assert gateway.ask("GET", "/healthz").status == 200
    assert [record.getMessage()[:200] for record in caplog.records] == []


# --- Too many connections -------------------------------------------------------------------------


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Running]:
    """A gateway that is full with 60 connections, 20 of them of one address without a key."""
    listen = Listen(
        max_connections=60, max_keyless_connections=20, trusted_proxies=("127.0.0.9/32",)
    )
    with running(tmp_path, listen=listen) as found:
        found.register()
        yield found


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses")


def is_served(connection: socket.socket, head: bytes = OK) -> bool:
    """Whether a request on this connection is still answered."""
    try:
        connection.sendall(head)
        return b"200 OK" in answer(connection)
    except (ConnectionError, AssertionError):
        return False


def with_key(key: str, forwarded: str = "") -> bytes:
    more = f"X-Forwarded-For: {forwarded}\r\n" if forwarded else ""
    more += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


def opened(gateway: Running, n: int, head: bytes, source: str = "127.0.0.1") -> list[socket.socket]:
    """This many connections; each has had its answer, and is idle."""
    connections = []
    for _ in range(n):
        connections.append(connect(gateway, source))
        assert is_served(connections[-1], head)
    return connections


def test_of_too_many_connections_without_a_key_the_longest_idle_is_closed(crowded: Running):
    key = crowded.key("play")
    keyed = opened(crowded, 10, with_key(key))
    idle = opened(crowded, 20, OK)
    assert is_served(idle[0])
    late = opened(crowded, 5, OK)
    assert [is_served(connection) for connection in (*idle[:7], *late)] == [
        True,
        *[False] * 5,
        True,
        *[True] * 5,
    ], "the first was used again, so the next five were idle longest"
    assert all(is_served(connection) for connection in keyed), "a key keeps a connection open"
    for connection in (*keyed, *idle, *late):
        connection.close()


@linux
@pytest.mark.parametrize("has_key", [False, True])
def test_idle_connections_of_one_address_do_not_lock_out_others(crowded: Running, has_key: bool):
    key = crowded.key("play")
    other = opened(crowded, 1, with_key(key), "127.0.0.3")
    idle = opened(crowded, 80, with_key(key) if has_key else OK, "127.0.0.2")
    new = opened(crowded, 10, with_key(key), "127.0.0.4")
    assert all(is_served(connection) for connection in (*other, *new))
    n_open = sum(is_served(connection) for connection in idle)
    assert n_open == (60 - 11 if has_key else 20)
    for connection in (*idle, *other, *new):
        connection.close()


@linux
def test_a_forwarded_address_is_believed_only_from_a_trusted_proxy(crowded: Running):
    def n_open(source: str, addresses: list[str]) -> int:
        connections = []
        for address in addresses:
            connections += opened(crowded, 1, with_key("", address), source)
        count = sum(
            is_served(connection, with_key("", address))
            for connection, address in zip(connections, addresses, strict=True)
        )
        for connection in connections:
            connection.close()
        return count

    many = [f"10.0.0.{at}" for at in range(30)]
    assert n_open("127.0.0.9", many) == 30, "thirty clients of a proxy"
    assert n_open("127.0.0.9", ["1.2.3.4"] * 30) == 20, "one client of a proxy"
    assert n_open("127.0.0.9", [f"{one}, 5.6.7.8, 127.0.0.9" for one in many]) == 20, (
        "the last address before the proxies counts; a client can write the others itself"
    )
    assert n_open("127.0.0.2", many) == 20, "one client that claims to be thirty"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("1.2.3.4:5678", "1.2.3.4"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("[2001:db8:0:1::9]:443", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("unknown", "unknown"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_clients_are_counted_by_address_and_ipv6_network(text: str, address: str):
    assert client_address(text) == address


def test_a_limit_of_open_files_limits_the_connections(tmp_path: Path):
    """Connections that are all idle do not use up the descriptors: new ones are still served."""
    code = (
        "import json, resource, sys\n"
        "from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from tests.serve.gateways import *\n"
        "with running(Path(sys.argv[1])) as gateway:\n"
        "    print(gateway.server.port, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        connections = []
        for _ in range(300):
            connections.append(socket.create_connection(("127.0.0.1", port), 10))
            assert is_served(connections[-1])
        for connection in connections:
            connection.close()
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()
