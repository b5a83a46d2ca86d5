"""A gateway starts only where keys are safe, and stops without losing acked frames."""

import asyncio
import contextlib
import datetime
import http.client
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from structlog.testing import capture_logs

from tests.serve.gateways import as_columns, frames_of, played, running
from understudy.client.connect import Address
from understudy.client.http import HttpLink
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, LinkFailed, StorageFailed, Unreachable
from understudy.core.location import is_loopback
from understudy.core.names import player_name
from understudy.experience.frame import encode_frame_batch
from understudy.models.objects import FolderObjects
from understudy.serve.gateway import Gateway, follow_keys
from understudy.serve.server import GatewayServer, Listen
from understudy.serve.state import GatewayConfig


def certificate(folder: Path, *, days: float = 1) -> tuple[Path, Path]:
    """A self-signed one for localhost, valid for this time from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"host": "192.168.1.2"},
        {"host": "::"},
        {"host": "play.example"},
        {"port": -1},
        {"port": 70_000},
        {"certificate": Path("x")},
        {"certificate_key": Path("x")},
        {"head_timeout_s": 0},
        {"max_connections": 0},
        {"max_keyless_connections": 0},
        {"trusted_proxies": ("proxy.example",)},
        {"trusted_proxies": ("10.0.0.1/8",)},
    ],
)
def test_plain_http_off_loopback_is_rejected(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        Listen(**wrong)


def test_plain_http_off_loopback_needs_insecure():
    assert Listen(host="0.0.0.0", insecure=True).insecure
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "localhost.evil.example", "::", ""))


def test_an_encrypted_key_is_refused_instead_of_asking_for_its_passphrase(tmp_path: Path):
    from cryptography.hazmat.primitives import serialization as pem

    crt, key_file = certificate(tmp_path)
    key = pem.load_pem_private_key(key_file.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret")
        )
    )
    with pytest.raises(ConfigError, match="the key without a passphrase"):
        GatewayServer(Gateway(lambda: None), Listen(certificate=crt, certificate_key=encrypted))  # type: ignore[arg-type, return-value]


def test_a_port_in_use_and_an_invalid_certificate_are_reported(tmp_path: Path):
    with running(tmp_path) as gateway, pytest.raises(ConfigError, match="pass another port"):
        GatewayServer(Gateway(lambda: None), Listen(port=gateway.server.port))  # type: ignore[arg-type, return-value]
    (tmp_path / "x").write_text("no certificate")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(ConfigError, match="not a certificate"):
            GatewayServer(Gateway(lambda: None), Listen(certificate=path, certificate_key=path))  # type: ignore[arg-type, return-value]


def test_a_gateway_that_cannot_start_reports_it_and_leaves_nothing_open():
    def broken() -> Any:
        raise RuntimeError("no disk")

    server = GatewayServer(Gateway(broken), Listen())
    with pytest.raises(ConfigError, match=r"could not start: RuntimeError\('no disk'\)"):
        server.run()


def test_a_stream_that_is_unreachable_at_the_start_is_reported_once(
    caplog: pytest.LogCaptureFixture,
):
    def away() -> Any:
        raise Unreachable("no broker; start one")

    server = GatewayServer(Gateway(away), Listen())
    with capture_logs() as logs, pytest.raises(Unreachable, match="no broker; start one"):
        server.run()
    assert (logs, caplog.records) == ([], [])


def test_unreadable_keys_are_logged_once_and_so_is_the_recovery():
    answers = iter(
        [None, *[Unreachable("no answer")] * 4, None, None, Unreachable("no answer"), None]
    )

    def follow() -> None:
        answer = next(answers, GeneratorExit)
        if answer is not None:
            raise answer

    state = SimpleNamespace(
        config=SimpleNamespace(keys_every_s=0.001), disk=None, keys=SimpleNamespace(follow=follow)
    )
    with capture_logs() as logs, pytest.raises(GeneratorExit):
        asyncio.run(follow_keys(state))  # type: ignore[arg-type]
    assert [line["event"] for line in logs] == ["keys_not_readable", "keys_readable_again"] * 2


def test_tls_is_served_and_checked(tmp_path: Path):
    crt, key_file = certificate(tmp_path)
    listen = Listen(host="127.0.0.1", certificate=crt, certificate_key=key_file)
    with running(tmp_path, listen=listen) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        address = f"https://localhost:{gateway.server.port}/healthz"
        trusting = urllib3.PoolManager(ca_certs=str(crt), retries=False)
        assert trusting.request("GET", address).json() == {"status": "ok"}
        with pytest.raises(urllib3.exceptions.SSLError):
            urllib3.PoolManager(retries=False, ssl_context=ssl.create_default_context()).request(
                "GET", address
            )
        with pytest.raises(urllib3.exceptions.HTTPError):
            urllib3.PoolManager(retries=False).request(
                "GET", f"http://localhost:{gateway.server.port}/healthz"
            )
        plain = HttpLink(Address(f"http://localhost:{gateway.server.port}", "key"), "pong")
        with contextlib.closing(plain), pytest.raises(LinkFailed, match="use https://"):
            plain.bot(0, wait_s=0.0)
    with running(tmp_path / "plain") as gateway:
        secure = HttpLink(Address(f"https://localhost:{gateway.server.port}", "key"), "pong")
        with contextlib.closing(secure), pytest.raises(LinkFailed, match="use http://"):
            secure.bot(0, wait_s=0.0)


def test_connections_count_before_their_tls_handshake(tmp_path: Path):
    """Clients that say nothing do not lock out those that do."""
    crt, key_file = certificate(tmp_path)
    listen = Listen(certificate=crt, certificate_key=key_file, max_keyless_connections=20)
    trusting = ssl.create_default_context(cafile=str(crt))
    with running(tmp_path, listen=listen) as gateway:
        silent = []
        for _ in range(60):
            silent.append(socket.create_connection(("127.0.0.1", gateway.server.port), 10))
        for _ in range(3):
            address = f"https://localhost:{gateway.server.port}/healthz"
            reply = urllib3.PoolManager(ssl_context=trusting, retries=False).request("GET", address)
            assert reply.json() == {"status": "ok"}
        for connection in silent[:40]:
            assert connection.recv(1) == b"", "closed, since 20 came later"
        for connection in silent:
            connection.close()
        assert trusting_answer(gateway.server.port, trusting) == b"HTTP/1.1 200"


def trusting_answer(port: int, context: ssl.SSLContext) -> bytes:
    """The first bytes of an answer on a connection of its own."""
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(12)


def test_ipv6_works_if_available(tmp_path: Path):
    try:
        with running(tmp_path, listen=Listen(host="::1")) as gateway:
            assert gateway.url.startswith("http://[::1]:")
            assert gateway.ask("GET", "/healthz").status == 200
    except ConfigError:
        pytest.skip("this machine has no IPv6")


def test_a_stop_completes_the_requests_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A send whose append is under way gets its ack, a long poll its 204, and then everything is
    closed."""
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play")
        frames = frames_of(played(n_chunks=4))
        entered = threading.Event()
        go_on = threading.Event()
        real = gateway.stream.append

        def slow(given: Any) -> Any:
            entered.set()
            assert go_on.wait(10)
            return real(given)

        monkeypatch.setattr(gateway.stream, "append", slow)
        with ThreadPoolExecutor(3) as pool:
            sending = [
                pool.submit(gateway.send, key, frames[at * 2 : at * 2 + 2]) for at in range(2)
            ]
            polling = pool.submit(gateway.ask, "GET", "/v1/games/cart/bot?after=5&wait_s=30", key)
            assert entered.wait(10)
            time.sleep(0.2)
            began_s = time.monotonic()
            gateway.server.stop()
            assert polling.result(15).status == 204
            assert time.monotonic() - began_s < 8
            assert not any(one.done() for one in sending)
            go_on.set()
            for one in sending:
                assert [ack["accepted"] for ack in one.result(10).json["acks"]] == [True, True]
        gateway.thread.join(10)
        assert not gateway.thread.is_alive()
        assert {frame.body for frame in gateway.streamed()} == {frame.body for frame in frames}
        with pytest.raises(urllib3.exceptions.HTTPError):
            gateway.ask("GET", "/healthz")
        gateway.server.stop()


def test_frames_acked_before_a_stop_are_in_the_stream_of_the_next_gateway(tmp_path: Path):
    acked: list[bytes] = []
    for turn in range(3):
        with running(tmp_path) as gateway:
            gateway.register()
            key = gateway.key("play")
            stop = threading.Event()

            def send(seed: int, gateway: Any = gateway, key: str = key, stop: Any = stop) -> None:
                while not stop.is_set():
                    frames = frames_of(played(n_chunks=2, seed=seed))
                    try:
                        reply = gateway.send(key, frames)
                    except urllib3.exceptions.HTTPError:
                        return
                    if reply.status == 200:
                        acks = reply.json["acks"]
                        acked.extend(
                            f.body for f, ack in zip(frames, acks, strict=True) if ack["accepted"]
                        )

            with ThreadPoolExecutor(4) as pool:
                work = [pool.submit(send, turn * 10 + seed) for seed in range(4)]
                time.sleep(0.4)
                gateway.server.stop()
                time.sleep(0.3)
                stop.set()
                for one in work:
                    one.result()
    with running(tmp_path) as gateway:
        found = {frame.body for frame in gateway.streamed()}
    assert len(acked) > 20
    assert set(acked) <= found


def test_two_gateways_on_one_store_apply_a_revocation_within_two_seconds(
    tmp_path: Path, bar: Callable[[float], float]
):
    one_folder = tmp_path / "one"
    other_folder = tmp_path / "other"
    models = tmp_path / "models"
    for folder in (one_folder, other_folder):
        folder.mkdir()
        (folder / "models").symlink_to(models)
    models.mkdir()
    with running(one_folder) as one, running(other_folder) as other:
        one.register()
        key = one.key("play")
        until_s = time.monotonic() + bar(2.0)
        while other.ask("GET", "/v1/games", key).status != 200:
            assert time.monotonic() < until_s, "a new key is known everywhere"
        columns = as_columns(played(n_chunks=1)[0])
        assert other.ask("POST", "/v1/games/cart/columns", key, columns).status == 200, (
            "and so is a game"
        )
        one.keys.revoke(key.split("_")[1])
        at_s = time.monotonic()
        assert one.ask("GET", "/v1/games", key).code == "revoked_key"
        while other.ask("GET", "/v1/games", key).status == 200:
            assert time.monotonic() - at_s < bar(2.0)
        assert other.ask("GET", "/v1/games", key).code == "revoked_key"


def test_a_key_revoked_while_its_request_waits_gets_no_data(tmp_path: Path):
    """Neither a bot that comes later, nor a body that was still on its way."""
    with running(tmp_path) as gateway, ThreadPoolExecutor(2) as pool:
        spec = gateway.register()
        key = gateway.key("play")
        frames = frames_of(played(n_chunks=1))
        polling = pool.submit(gateway.ask, "GET", "/v1/games/cart/bot?after=0&wait_s=10", key)
        body = encode_frame_batch(frames, {frames[0].session: player_name("ada")})
        connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=60)
        connection.putrequest("POST", "/v1/games/cart/frames")
        connection.putheader("Authorization", f"Bearer {key}")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        connection.send(body[:50])
        time.sleep(0.3)
        gateway.keys.revoke(key.split("_")[1])
        gateway.release(spec)
        connection.send(body[50:])
        assert connection.getresponse().status == 401
        connection.close()
        reply = polling.result()
        assert (reply.status, reply.code) == (401, "revoked_key")
        assert gateway.streamed() == []


def test_an_unreachable_registry_stops_no_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was known stays in force: keys, specs and the bot; what must be read is answered with
    503."""
    clock = ShiftedClock()
    with running(tmp_path, GatewayConfig(decide_within_s=10.0), clock=clock) as gateway:
        gateway.release(gateway.register())
        key = gateway.key("play", "admin")
        assert gateway.ask("GET", "/v1/games/cart/bot", key).json["champion"]

        def away(*_: Any) -> Any:
            raise StorageFailed("no such host: models.internal.example")

        monkeypatch.setattr(FolderObjects, "get", away)
        monkeypatch.setattr(FolderObjects, "list", away)
        clock.shift_s = 60.0
        time.sleep(0.3)
        assert gateway.send(key, frames_of(played(n_chunks=1))).json["acks"][0]["accepted"]
        assert gateway.ask("GET", "/v1/games/cart/bot", key).json["champion"]
        assert (
            gateway.ask("POST", "/v1/games/cart/act", key, {"obs": [0, 0, 0, 0]}).json["model_no"]
            == 1
        )
        for path in ("/v1/games", "/v1/games/unknown"):
            reply = gateway.ask("GET", path, key)
            assert (reply.status, reply.code) == (503, "not_available")
            assert "internal" not in reply.raw.decode()
        monkeypatch.undo()
        assert gateway.ask("GET", "/v1/games", key).json == {"games": ["cart"]}


class ShiftedClock(SystemClock):
    """A clock that a test sets ahead."""

    shift_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.shift_s


def test_a_process_stops_on_a_signal_with_exit_code_zero(tmp_path: Path):
    """The caller owns the signals: `stop` in a handler is all it takes."""
    code = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from tests.serve.gateways import *\n"
        "objects = FolderObjects(Path(sys.argv[1]) / 'models')\n"
        "keys = Keys(objects, trusted=TRUSTED, signer=SIGNER, clock=SystemClock())\n"
        "registry = Registry(objects, trusted=TRUSTED)\n"
        "def create_state():\n"
        "    stream = FileStream(Path(sys.argv[1]) / 'stream')\n"
        "    return GatewayState(config=GatewayConfig(), stream=stream, registry=registry,\n"
        "                 keys=keys, trusted=TRUSTED, deployment_key=bytes(32), "
        "clock=SystemClock())\n"
        "server = GatewayServer(Gateway(create_state), Listen())\n"
        "signal.signal(signal.SIGTERM, lambda *_: server.stop())\n"
        "server.run(lambda: print(server.url, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert urllib3.PoolManager().request("GET", f"{url}/readyz").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys_every_s": 1.5},
        {"follow_every_s": 0.0},
        {"max_poll_s": float("nan")},
        {"body_timeout_s": -1.0},
        {"max_bodies_bytes": 0},
    ],
)
def test_invalid_configs_are_rejected(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        GatewayConfig(**wrong)
