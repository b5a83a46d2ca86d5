"""Host names, origins and repeated headers: a foreign page cannot use a key."""

import socket
from collections.abc import Iterator

import pytest

from tests.serve.gateways import Running, running
from understudy.serve.state import GatewayConfig

GAME_PAGE = "https://game.example"
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("guard"), GatewayConfig(hosts=("Play.Example",))) as found:
        found.register()
        yield found


def raw(gateway: Running, *lines: str, body: bytes = b"") -> bytes:
    """What comes back for exactly these lines."""
    with socket.create_connection(("127.0.0.1", gateway.server.port), 10) as connection:
        connection.sendall(
            "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body
        )
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# --- Host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LocalHost:80",
        "[::1]",
        "[::1]:8080",
        "play.example",
        "PLAY.example:443",
    ],
)
def test_requests_for_its_own_host_names_are_accepted(gateway: Running, host: str):
    assert gateway.ask("GET", "/healthz", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil@localhost",
        "localhost:80:80",
        "localhost:",
        "localhost:x",
        "localhost,evil.example",
        "",
        "0.0.0.0",
        "127.0.0.2",
        "::1",
        "play.example.",
        "localhost\xb2",
        "localhost:\xb2",
    ],
)
def test_dns_rebinding_is_rejected_even_with_a_key(gateway: Running, host: str):
    key = gateway.key("admin")
    for path in ("/healthz", "/v1/games", "/nothing"):
        answer = raw(
            gateway, f"GET {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}"
        )
        assert status(answer) == 403
        assert b"wrong_host" in answer


def test_a_request_without_a_host_is_rejected(gateway: Running):
    assert status(raw(gateway, "GET /healthz HTTP/1.0")) == 403


# --- Origin ---------------------------------------------------------------------------------------


def test_a_page_can_use_only_keys_that_allow_its_origin(gateway: Running):
    plain = gateway.key("play")
    named = gateway.key("play", origins=(GAME_PAGE,))
    assert gateway.ask("GET", "/v1/games", plain).status == 200, "no page at all"
    for key, origin in (
        (plain, GAME_PAGE),
        (plain, EVIL),
        (named, EVIL),
        (named, "null"),
        (named, f"{GAME_PAGE}:8"),
    ):
        reply = gateway.ask("GET", "/v1/games", key, headers={"Origin": origin})
        assert (reply.status, reply.code) == (403, "wrong_origin")
    reply = gateway.ask("GET", "/v1/games", named, headers={"Origin": GAME_PAGE})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == GAME_PAGE
    assert reply.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in reply.headers
    own = gateway.ask("GET", "/v1/games", plain, headers={"Origin": gateway.url})
    assert own.status == 200, "pages of the gateway itself"


def test_its_own_page_may_use_any_key_also_behind_a_tls_proxy(gateway: Running):
    key = gateway.key("play")
    for host, origin, is_own in (
        ("play.example", "https://play.example", True),
        ("play.example:8443", "https://play.example:8443", True),
        ("play.example", "http://play.example", True),
        ("play.example", "https://play.example:8443", False),
        ("play.example", "https://other.example", False),
        ("localhost", "https://localhost", False),
    ):
        reply = gateway.ask("GET", "/v1/games", key, headers={"Host": host, "Origin": origin})
        assert (reply.status == 200) == is_own, (host, origin)


def test_a_foreign_page_can_read_nothing_not_even_health(gateway: Running):
    gateway.key("play", origins=(GAME_PAGE,))
    for path in ("/healthz", "/v1/games", "/nothing"):
        reply = gateway.ask("GET", path, headers={"Origin": EVIL})
        assert "access-control-allow-origin" not in reply.headers
    reply = gateway.ask("GET", "/v1/games", headers={"Origin": GAME_PAGE})
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == GAME_PAGE, (
        "a known page may read why it was refused"
    )


def test_a_preflight_request_is_answered_before_a_key_is_sent(gateway: Running):
    key = gateway.key("play", origins=("https://pre.example",))
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    good = gateway.ask(
        "OPTIONS", "/v1/games/cart/frames", headers={"Origin": "https://pre.example"} | asked
    )
    assert (good.status, good.raw) == (204, b"")
    assert good.headers["access-control-allow-origin"] == "https://pre.example"
    assert "authorization" in good.headers["access-control-allow-headers"]
    assert "POST" in good.headers["access-control-allow-methods"]
    bad = gateway.ask("OPTIONS", "/v1/games/cart/frames", headers={"Origin": EVIL} | asked)
    assert (bad.status, bad.code) == (403, "wrong_origin")
    assert "access-control-allow-origin" not in bad.headers
    gateway.keys.revoke(key.split("_")[1])
    gateway.keys.follow()
    gone = gateway.ask("OPTIONS", "/v1/games", headers={"Origin": "https://pre.example"} | asked)
    assert gone.status == 403, "with its last key an origin is forgotten"


# --- Headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Host", "Origin", "Authorization", "Content-Encoding", "Content-Type"]
)
def test_a_repeated_critical_header_is_rejected(gateway: Running, name: str):
    value = {"Host": "127.0.0.1", "Authorization": f"Bearer {gateway.key('play')}"}.get(name, "x")
    lines = [f"{name}: {value}", f"{name}: {value}"]
    if name != "Host":
        lines.append("Host: 127.0.0.1")
    answer = raw(gateway, "GET /v1/games HTTP/1.1", *lines)
    assert status(answer) == 400
    assert b"bad_headers" in answer


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 1", "Content-Length: 2"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Content-Length: -1"],
        ["Content-Length: x"],
        ["Content-Length: 1e3"],
        ["Transfer-Encoding: x"],
        ["Bad Name: x"],
        ["X: a\x00b"],
        [": x"],
        ["Content-Length: 99999999999999999999999"],
        ["Content-Length: \xb2"],
    ],
)
def test_ambiguous_heads_are_rejected(gateway: Running, lines: list[str]):
    answer = raw(
        gateway, "POST /v1/games/cart/close HTTP/1.1", "Host: 127.0.0.1", *lines, body=b"0\r\n\r\n"
    )
    assert status(answer) in (400, 401), answer


@pytest.mark.parametrize(
    "line",
    [
        "GET / HTTP/9.9",
        "GET  / HTTP/1.1",
        "get / HTTP/1.1",
        "GET /\x00 HTTP/1.1",
        "GET /\xff HTTP/1.1",
        "GET http://evil.example/healthz HTTP/1.1",
        "CONNECT evil.example:80 HTTP/1.1",
        "PRI * HTTP/2.0",
        "* / *",
        "\x16\x03\x01",
        "OPTIONS * HTTP/1.1",
        "GET ?x HTTP/1.1",
    ],
)
def test_invalid_request_lines_end_only_their_connection(gateway: Running, line: str):
    answer = raw(gateway, line, "Host: 127.0.0.1")
    assert not answer or status(answer) < 500 or status(answer) == 505, answer
    assert gateway.ask("GET", "/healthz").status == 200


def test_upgrades_are_rejected(gateway: Running):
    lines = [
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    answer = raw(gateway, "GET /v1/games HTTP/1.1", "Host: 127.0.0.1", *lines)
    assert status(answer) == 401
