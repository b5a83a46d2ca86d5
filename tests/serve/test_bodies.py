"""Bodies are limited while they stream: by size, by time, compressed or not, and all together."""

import asyncio
import contextlib
import gzip
import http.client
import json
import random
import resource
import select
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.gateways import Running, as_columns, frames_of, played, running
from understudy.core.errors import Refused
from understudy.core.names import player_name
from understudy.experience.frame import MAX_FRAME_BATCH_BYTES, encode_frame_batch
from understudy.experience.game import game_spec
from understudy.models.keys import Key
from understudy.serve import api, routes
from understudy.serve.api import Call, read_body
from understudy.serve.routes import ROUTES
from understudy.serve.state import GatewayConfig, HeldMemory, Limits, MemoryBudget
from understudy.testing.clock import ManualClock

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


@pytest.mark.parametrize("is_chunked", [False, True], ids=["announced", "chunked"])
@pytest.mark.parametrize("path", ["/v1/games/cart/tickets", "/v1/games/cart/close"])
def test_a_client_that_closes_its_connection_can_read_why_a_large_body_was_rejected(
    gateway: Running, key: str, path: str, is_chunked: bool
):
    """It sends all of it first, as urllib does, and says that it sends nothing else."""
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    parts = [b" " * 1_000_000] * 20
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, iter(parts) if is_chunked else b"".join(parts), headers)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("connection")) == (413, "close")
        assert json.loads(answer.read())["error"]["code"] == "too_large"


def test_a_connection_that_the_client_wants_closed_ends_with_its_request(gateway: Running):
    with socket.create_connection(("127.0.0.1", gateway.server.port), timeout=60) as connection:
        head = b"POST /v1/games HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        connection.sendall(head + b"Content-Length: 3\r\n\r\n12")
        with connection.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 401")
            connection.sendall(b"3")
            assert answer.read().endswith(b"}")


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


def test_a_body_that_decompresses_beyond_the_limit_is_charged(tmp_path: Path):
    with running(tmp_path) as gateway:
        gateway.register()
        for path, size in (("act", 2_000_000), ("frames", 34_000_000), ("frames", 40_000_000)):
            key = gateway.key("play", bytes_s=10_000.0)
            packed = gzip.compress(bytes(size))
            first = gateway.ask("POST", f"/v1/games/cart/{path}", key, packed, headers=PACKED)
            assert first.code == "too_large"
            second = gateway.ask("POST", f"/v1/games/cart/{path}", key, packed, headers=PACKED)
            assert second.code == "too_many"


class Reading:
    """Reads compressed bodies of one key, which may send 1,000 bytes a second."""

    def __init__(self, *, room_bytes: int = 1 << 30) -> None:
        self.key = Key(id="a", hash="", scopes=("play",), requests_s=1e6, bytes_s=1_000)
        self.limits = Limits(ManualClock())
        self.room = MemoryBudget(room_bytes, ManualClock())
        assert self.limits.take(self.key, 0) == 0

    def body(self, raw: bytes, *, max_bytes: int = 8_000_000) -> bytes:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def read() -> bytes:
            state = SimpleNamespace(limits=self.limits)
            head = {"content-encoding": "deflate"}
            call = Call(
                {"type": "http", "head": head, "gateway_state": state, "key": self.key}, receive
            )
            with self.room.hold(self.key, "") as held:
                body = await read_body(call, max_bytes=max_bytes, timeout_s=1, held=held)
                assert held.size_bytes == len(raw) + len(body)
                return body

        before_bytes = self.room.left_bytes
        try:
            return asyncio.run(read())
        finally:
            assert self.room.left_bytes == before_bytes

    def charged_bytes(self) -> float:
        return 2_000 + 1_000 * self.limits.take(self.key, 0)


@pytest.mark.parametrize("size", [10_000, 32_768, 32_769, 262_144 + 32_768, 3_000_000, 7_900_000])
@pytest.mark.parametrize("kind", ["zeros", "noise"])
def test_a_body_is_charged_by_the_larger_of_its_two_sizes(size: int, kind: str):
    reading = Reading()
    body = bytes(size) if kind == "zeros" else random.Random(0).randbytes(size)
    raw = zlib.compress(body)
    assert reading.body(raw) == body
    assert reading.charged_bytes() == pytest.approx(max(len(body), len(raw)), abs=2)


def test_a_key_that_owes_too_much_has_nothing_decompressed():
    reading = Reading()
    while not reading.limits.owe(reading.key, 20_000):
        pass
    with pytest.raises(Refused) as refused:
        reading.body(b"invalid")
    assert refused.value.reason == "too_many"


def test_decompressing_stops_where_the_key_or_the_memory_ends():
    raw = zlib.compress(bytes(8_000_000))
    with pytest.raises(Refused, match="too many large requests"):
        Reading(room_bytes=1_000_000).body(raw)
    reading = Reading()
    for _ in range(4):
        reading.body(raw)
    with pytest.raises(Refused) as refused:
        reading.body(raw)
    assert refused.value.reason == "too_many"
    owed_bytes = reading.charged_bytes() - 2_000
    assert MAX_FRAME_BATCH_BYTES - 300_000 < owed_bytes < MAX_FRAME_BATCH_BYTES + 2


@pytest.mark.parametrize("size", [1_000, 32_768, 40_000, 7_900_000])
@pytest.mark.parametrize("kind", ["zeros", "noise", "too many zeros"])
def test_bodies_are_decompressed_in_small_steps_and_the_first_only_on_the_event_loop(
    size: int, kind: str, monkeypatch: pytest.MonkeyPatch
):
    steps = []

    class Recorder:
        def __init__(self, **options: Any) -> None:
            self._inner = zlib.decompressobj(**options)

        def decompress(self, packed: bytes, most: int) -> bytes:
            part = self._inner.decompress(packed, most)
            is_on_loop = threading.current_thread() is threading.main_thread()
            steps.append((is_on_loop, max(len(packed), len(part))))
            return part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(api, "zlib", SimpleNamespace(decompressobj=Recorder, error=zlib.error))
    raw = zlib.compress(random.Random(0).randbytes(size) if kind == "noise" else bytes(size))
    if kind == "too many zeros":
        with pytest.raises(Refused, match="the decompressed body has more"):
            Reading().body(raw, max_bytes=size - 1)
    else:
        Reading().body(raw)
    assert max(step_bytes for _, step_bytes in steps) <= 262_144
    on_loop = [step_bytes for is_on_loop, step_bytes in steps if is_on_loop]
    assert sum(on_loop) <= 32_768
    if size == 1_000:
        assert len(steps) == len(on_loop) == 1, "no thread for a small body"


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
    room = MemoryBudget(100, ManualClock())

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def parts() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    async def try_it() -> None:
        for receive, reason in ((gone, "gone"), (parts, "busy")):
            call = Call({"type": "http", "head": {}, "gateway_state": None, "key": None}, receive)
            with pytest.raises(Refused) as refused, room.hold(None, "") as held:
                await read_body(call, max_bytes=1000, timeout_s=1, held=held)
            assert refused.value.reason == reason
            assert room.left_bytes == 100

    asyncio.run(try_it())


def key_of(name: str) -> Key:
    return Key(id=name, hash="", scopes=("play",))


class Evicted(list[str]):
    """The names of evicted requests, and a budget of 100 bytes that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.room = MemoryBudget(100, self.clock)
        self.requests = contextlib.ExitStack()

    def holds(self, key: str, address: str, size_bytes: int, *, may_go: bool = True) -> HeldMemory:
        held = self.requests.enter_context(self.room.hold(key_of(key), address))
        if may_go:
            held.evict = lambda: self.append(f"{key} {address} {size_bytes}")
        held.take(size_bytes)
        return held


def test_a_stalled_body_gives_way_first():
    evicted = Evicted()
    evicted.holds("a", "1", 10)
    evicted.clock.advance(0.5)
    active = evicted.holds("a", "2", 60)
    evicted.clock.advance(0.6)
    active.take(5)
    evicted.holds("b", "3", 30)
    assert evicted == ["a 1 10"], "1.1 s without a byte"
    assert active.size_bytes == 65


def test_without_a_stalled_body_the_largest_address_of_the_largest_key_gives_way():
    evicted = Evicted()
    evicted.holds("a", "1", 20)
    evicted.holds("a", "2", 15)
    evicted.holds("a", "2", 15)
    evicted.holds("b", "3", 40)
    evicted.holds("c", "4", 20)
    assert evicted == ["a 2 15"], "key a holds most, and its address 2"
    evicted.holds("a", "5", 10)
    assert evicted[1:] == ["a 1 20"]


def test_a_client_that_holds_the_most_is_refused_instead_of_others():
    evicted = Evicted()
    first = evicted.holds("a", "1", 60)
    evicted.holds("a", "2", 20)
    evicted.holds("b", "1", 20)
    for _ in range(2):
        with pytest.raises(Refused, match="too many large requests"):
            first.take(10)
        with pytest.raises(Refused, match="too many large requests"):
            evicted.holds("a", "1", 10)
    assert evicted == []
    evicted.requests.close()
    assert evicted.room.left_bytes == 100


def test_a_body_that_has_arrived_is_not_evicted():
    evicted = Evicted()
    evicted.holds("a", "1", 90, may_go=False)
    evicted.clock.advance(60)
    with pytest.raises(Refused, match="too many large requests"):
        evicted.holds("b", "2", 20)


def stalled_body(gateway: Running, key: str, size_bytes: int, source: str) -> socket.socket:
    """A connection that has sent this much of a body, and no more."""
    connection = socket.create_connection(("127.0.0.1", gateway.server.port), 10, (source, 0))
    head = (
        f"POST /v1/games/cart/frames HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}"
        f"\r\nContent-Length: {size_bytes + 1}\r\n\r\n"
    )
    connection.sendall(head.encode() + bytes(size_bytes))
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses")
@pytest.mark.parametrize("is_same_key", [True, False])
def test_stalled_bodies_of_one_address_do_not_lock_out_others(tmp_path: Path, is_same_key: bool):
    """Players of one game share a key: neither the key nor the room belongs to one of them."""
    with running(tmp_path, GatewayConfig(max_bodies_bytes=800_000)) as gateway:
        gateway.register()
        attacker = gateway.key("play")
        key = attacker if is_same_key else gateway.key("play")
        stalled = [stalled_body(gateway, attacker, 100_000, "127.0.0.2") for _ in range(8)]
        for _ in range(20):
            reply = gateway.ask("POST", "/v1/games/cart/frames", key, bytes(300_000))
            assert (reply.status, reply.code) == (400, "bad_frame_batch")
        answered, _, _ = select.select(stalled, [], [], 0)
        assert answered, "those gave way"
        for connection in answered:
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        for connection in stalled:
            connection.close()


def test_announced_bytes_do_not_count_until_they_arrive(tmp_path: Path):
    """A head of 200 bytes must not use up the rate of everyone who shares the key."""
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play", bytes_s=1e6)
        announced = []
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=10)
            connection.putrequest("POST", "/v1/games/cart/frames")
            connection.putheader("Authorization", f"Bearer {key}")
            connection.putheader("Content-Length", str(30_000_000))
            connection.endheaders()
            announced.append(connection)
        for _ in range(5):
            assert gateway.send(key, frames_of(played(n_chunks=1))).status == 200
        for connection in announced:
            connection.close()


def test_bytes_that_arrived_count_even_if_the_body_does_not_end(tmp_path: Path):
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play", bytes_s=10_000.0)
        stalled_body(gateway, key, 500_000, "127.0.0.1").close()
        deadline_s = time.monotonic() + 20
        while gateway.ask("GET", "/v1/games/cart", key).status != 429:
            assert time.monotonic() < deadline_s


def test_an_unread_policy_counts_as_memory_and_gives_way(tmp_path: Path):
    """An old model's policy is read for each request, so its memory is limited too."""
    with running(tmp_path, GatewayConfig(max_bodies_bytes=3_000_000)) as gateway:
        spec = gateway.register(game_spec("large", obs=60_000, actions=2))
        for _ in range(2):
            gateway.release(spec)
        key = gateway.key("play")
        head = (
            "GET /v1/games/large/models/1/policy HTTP/1.1\r\nHost: localhost\r\nAuthorization: "
            f"Bearer {key}\r\n\r\n"
        )
        unread = socket.socket()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", gateway.server.port))
        unread.sendall(head.encode() * 5)  # more than the system buffers
        for expected in (503, 200):
            # No memory for a second one of 1.9 MB; after a second, the first has stalled.
            until_s = time.monotonic() + 20
            path = "/v1/games/large/models/1/policy"
            while gateway.ask("GET", path, key).status != expected:
                assert time.monotonic() < until_s
        unread.close()


def test_a_lack_of_memory_is_a_reason_to_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play")
        sent = as_columns(played(n_chunks=1)[0])
        assert gateway.ask("GET", "/v1/games/cart", key).status == 200

        def full(*_: Any, **__: Any) -> Any:
            raise MemoryError

        for name in ("frame_of", "spec_from_json"):
            monkeypatch.setattr(routes, name, full)
        for method, path, body in (
            ("POST", "/v1/games/cart/columns", sent),
            ("PUT", "/v1/games/cart", {}),
        ):
            reply = gateway.ask(method, path, key, body)
            assert (reply.status, reply.code) == (503, "busy")
            assert reply.headers["retry-after"] == "1"
        monkeypatch.undo()
        assert gateway.ask("POST", "/v1/games/cart/columns", key, sent).json["acks"][0]["accepted"]


def test_the_largest_frame_batch_is_accepted(gateway: Running, key: str):
    reply = gateway.ask(
        "POST", "/v1/games/cart/frames", key, b"UNPA" + bytes(MAX_FRAME_BATCH_BYTES - 4)
    )
    assert reply.code != "too_large"
    assert reply.status == 400
