"""Slow clients: each stage of a request has a timeout, and other clients are not delayed."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.serve.gateways import Running, running
from understudy.experience.game import game_spec
from understudy.serve.server import Listen
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


def connect(gateway: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.server.port), 10)


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


def test_large_heads_and_invalid_requests_get_the_usual_error_body(
    gateway: Running,
):
    for sent, status, code in (
        (
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
            431,
            "head_too_large",
        ),
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
