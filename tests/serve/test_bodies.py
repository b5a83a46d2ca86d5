"""Bodies are limited while they stream: by size, by time, compressed or not, and all together."""

import asyncio
import gzip
import http.client
import json
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.gateways import Running, as_columns, frames_of, played, running
from understudy.core.errors import Refused
from understudy.core.names import player_name
from understudy.experience.frame import MAX_FRAME_BATCH_BYTES, encode_frame_batch
from understudy.serve.api import Call, read_body
from understudy.serve.routes import ROUTES
from understudy.serve.state import GatewayConfig, MemoryBudget

PACKED = {"Content-Encoding": "gzip"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("bodies"), GatewayConfig(body_timeout_s=1.0)) as found:
        found.register()
        yield found


@pytest.fixture(scope="module")
def key(gateway: Running) -> str:
    return gateway.key("admin")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_compressed_bodies_are_decompressed(gateway: Running, key: str):
    frames = frames_of(played(n_chunks=6, max_steps=200))
    body = encode_frame_batch(frames, {frames[0].session: player_name("ada")})
    for pack, name in (
        (gzip.compress, "gzip"),
        (zlib.compress, "deflate"),
        (bytes, "identity"),
        (bytes, "IDENTITY"),
    ):
        headers = {"Content-Encoding": name}
        reply = gateway.ask("POST", "/v1/games/cart/frames", key, pack(body), headers=headers)
        assert [ack["accepted"] for ack in reply.json["acks"]] == [True] * 6
    columns = json.dumps(as_columns(played(n_chunks=1, max_steps=400)[0])).encode()
    reply = gateway.ask(
        "POST", "/v1/games/cart/columns", key, gzip.compress(columns), headers=PACKED
    )
    assert reply.json["acks"][0]["accepted"]


def test_invalid_compressed_bodies_are_rejected(gateway: Running, key: str):
    whole = gzip.compress(b"x" * 10_000)
    wrong = [
        whole[:-1],
        whole[: len(whole) // 2],
        whole + b"x",
        whole + whole,
        b"",
        b"x",
        b"\x1f\x8b",
        whole[1:],
    ]
    for body in wrong:
        reply = gateway.ask("POST", "/v1/games/cart/frames", key, body, headers=PACKED)
        assert (reply.status, reply.code) == (415, "bad_encoding")
    for name in ("br", "zstd", "gzip, gzip", "", "x" * 5000):
        reply = gateway.ask(
            "POST", "/v1/games/cart/frames", key, b"x", headers={"Content-Encoding": name}
        )
        assert (reply.status, reply.code) == (415, "bad_encoding")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_bodies_above_the_limit_are_rejected_unread(gateway: Running, key: str, route: Any):
    """By what was announced, before a byte of it came."""
    path = (
        route.path.replace("{game}", "cart")
        .replace("{model_no:int}", "1")
        .replace("{schema}", "0" * 64)
    )
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=60)
    began_s = time.monotonic()
    connection.putrequest(route.method, path)
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader("Content-Length", str(route.max_bytes + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    assert time.monotonic() - began_s < 3
    connection.close()


def test_a_body_that_is_too_large_costs_the_key_no_bytes(tmp_path: Path):
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play", bytes_s=10_000.0)
        for _ in range(5):
            assert (
                gateway.ask("POST", "/v1/games/cart/close", key, b" " * 20_000).code == "too_large"
            )
        assert gateway.ask("GET", "/v1/games/cart", key).status == 200


def test_chunked_bodies_are_counted_while_they_arrive(gateway: Running, key: str):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=60)
    connection.putrequest("POST", "/v1/games/cart/act")
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    part = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
    for _ in range(110):  # 1.1 MB of at most 1 MiB
        connection.send(part)
    assert connection.getresponse().status == 413
    connection.close()


def test_zip_bombs_are_not_decompressed(gateway: Running, key: str, bar: Callable[[float], float]):
    bomb = gzip.compress(bytes(100_000_000))
    double = gzip.compress(bomb)
    before = peak_bytes()
    times_s = []
    for at in range(50):
        path = ("frames", "columns", "act", "close")[at % 4]
        began_s = time.monotonic()
        reply = gateway.ask("POST", f"/v1/games/cart/{path}", key, bomb, headers=PACKED)
        assert reply.status == 413
        times_s.append(time.monotonic() - began_s)
    assert sorted(times_s)[25] < bar(1.0)
    assert gateway.ask("POST", "/v1/games/cart/frames", key, double, headers=PACKED).status == 400
    assert peak_bytes() - before < 128 * 1024 * 1024, (
        "the memory of one full batch, and what a test needs"
    )


def test_a_slow_body_times_out(gateway: Running, key: str):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=60)
    began_s = time.monotonic()
    connection.putrequest("POST", "/v1/games/cart/frames")
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b"UNPA")
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())["error"]["code"]) == (408, "too_slow")
    assert 0.9 < time.monotonic() - began_s < 5
    connection.close()


def test_bodies_of_all_requests_share_a_memory_budget(tmp_path: Path):
    with running(tmp_path, GatewayConfig(max_bodies_bytes=300_000)) as gateway:
        gateway.register()
        key = gateway.key("play")
        reply = gateway.ask("POST", "/v1/games/cart/frames", key, b"x" * 301_000)
        assert (reply.status, reply.code) == (503, "busy")
        assert reply.headers["retry-after"] == "1"
        for _ in range(5):  # given back each time
            reply = gateway.ask("POST", "/v1/games/cart/frames", key, b"x" * 299_000)
            assert (reply.status, reply.code) == (400, "bad_frame_batch")
        packed = gzip.compress(b"x" * 299_900)
        reply = gateway.ask("POST", "/v1/games/cart/frames", key, packed, headers=PACKED)
        assert reply.code == "busy", "packed and unpacked lie in memory together"


def test_memory_is_released_whatever_happens():
    room = MemoryBudget(100)

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def parts() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    async def try_it() -> None:
        for receive, reason in ((gone, "gone"), (parts, "busy")):
            call = Call({"type": "http", "head": {}, "gateway_state": None, "key": None}, receive)
            with pytest.raises(Refused) as refused, room.hold() as take:
                await read_body(call, max_bytes=1000, timeout_s=1, take=take)
            assert refused.value.reason == reason
            assert room.left_bytes == 100

    asyncio.run(try_it())


def test_the_largest_frame_batch_is_accepted(gateway: Running, key: str):
    reply = gateway.ask(
        "POST", "/v1/games/cart/frames", key, b"UNPA" + bytes(MAX_FRAME_BATCH_BYTES - 4)
    )
    assert reply.code != "too_large"
    assert reply.status == 400
