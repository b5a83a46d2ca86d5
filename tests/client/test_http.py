"""The link over HTTP: responses of a gateway, messages to game developers, and no losses."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from tests.client.fakes import chunks, client
from tests.faults.profiles import sizes
from tests.serve.gateways import running
from tests.serve.test_server import certificate
from understudy.client import ClientConfig, RecordingWarning, SenderConfig, connect
from understudy.client.connect import Address
from understudy.client.http import HttpLink
from understudy.client.spool import count_spooled
from understudy.core.errors import ConfigError, Corrupt, LinkFailed
from understudy.core.names import new_session, player_name
from understudy.experience.frame import Frame, data_frame
from understudy.experience.game import game_spec
from understudy.ports import Ack, DrawnTicket, TicketBatch
from understudy.serve.server import Listen
from understudy.serve.state import GatewayConfig

SPEC = game_spec("my-game", obs=2, actions=3)
OBS = np.zeros(2, np.float32)
KEY = "uk_0123456789ab_secret"


def play(game, n_steps=5, player="ada"):
    ep = game.episode(player=player)
    for _ in range(n_steps):
        ep.acted(OBS, 0)
    ep.end(OBS)


def until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def failure(call):
    try:
        call()
    except LinkFailed as failed:
        return failed
    return None


def http_client(url, key, tmp_path, **settings):
    sender = SenderConfig(linger_s=0.05)
    config = ClientConfig(spool=tmp_path / "spool", sender=sender, **settings)
    return connect(SPEC, url=url, key=key, config=config)


# --- A real gateway -------------------------------------------------------------------------------


def test_recorded_steps_arrive_in_the_platforms_stream(tmp_path, monkeypatch):
    with running(tmp_path / "D") as gateway:
        monkeypatch.setenv("UNDERSTUDY_URL", gateway.url + "/")
        monkeypatch.setenv("UNDERSTUDY_KEY", gateway.key("play", registers=True))
        config = ClientConfig(spool=tmp_path / "spool")
        with connect("my-game", obs=2, actions=3, config=config) as game:
            for who in ("ada", "bob"):
                play(game, 600, player=who)
        assert game.stats().acked_steps == 1200
        assert game.stats().last_error == ""
        frames = gateway.streamed()
    by_session: dict[uuid.UUID, dict[int, Frame]] = {frame.session: {} for frame in frames}
    for frame in frames:
        by_session[frame.session][frame.chunk_no] = frame
    assert sorted(
        sum(chunk.meta.n_steps for chunk in chunks(found)) for found in by_session.values()
    ) == [600, 600]
    assert len({frame.player for frame in frames}) == 2


def test_a_revoked_key_keeps_everything_on_this_machine_and_warns(tmp_path):
    with running(tmp_path / "D", GatewayConfig(keys_every_s=0.05)) as gateway:
        key = gateway.key("play", registers=True)
        game = http_client(gateway.url, key, tmp_path)
        play(game)
        assert game.flush()
        gateway.keys.revoke(key.split("_")[1])
        gateway.keys.follow()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            play(game)
            until(lambda: game.stats().failed_sends > 1)
        messages = [
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, RecordingWarning)
        ]
        assert len(messages) == 1
        assert "saved on this machine" in messages[0]
        assert "revoked" in messages[0]
        assert key not in messages[0]
        stats = game.stats()
        assert "revoked_key" in stats.last_error
        assert (stats.acked_steps, stats.refused_steps, stats.dropped_steps) == (5, 0, 0)
        assert not game.close(timeout_s=0.1)
        assert count_spooled(tmp_path / "spool") == 1
        again = http_client(gateway.url, gateway.key("play"), tmp_path)
        until(lambda: again.stats().acked_steps == 5)
        assert again.close(timeout_s=30)
        assert count_spooled(tmp_path / "spool") == 0


def test_a_gateway_whose_stored_keys_were_cut_accepts_none_and_loses_nothing(tmp_path):
    with running(tmp_path / "D", GatewayConfig(keys_every_s=0.05)) as gateway:
        key = gateway.key("play", registers=True)
        gateway.key("read")
        game = http_client(gateway.url, key, tmp_path)
        play(game)
        assert game.flush()
        last = max((tmp_path / "D" / "models" / "keys").iterdir())
        last.rename(tmp_path / "kept")
        with pytest.raises(Corrupt, match="understudy keys repair"):
            gateway.keys.follow()
        play(game)
        until(lambda: "keys_damaged" in game.stats().last_error)
        assert (game.stats().acked_steps, game.stats().dropped_steps) == (5, 0)
        (tmp_path / "kept").rename(last)
        gateway.keys.follow()
        assert game.flush()
        assert game.stats().acked_steps == 10
        assert game.close()


def test_a_game_that_is_not_registered_waits_until_it_is(tmp_path):
    with running(tmp_path / "D") as gateway:
        game = http_client(gateway.url, gateway.key("play"), tmp_path)
        play(game)
        until(lambda: game.stats().failed_sends > 0)
        assert "understudy games add" in game.stats().last_error
        gateway.register(SPEC)
        assert game.flush(30)
        assert (game.stats().acked_steps, game.stats().dropped_steps) == (5, 0)
        game.close()


def test_a_client_over_its_rate_limit_waits(tmp_path):
    with running(tmp_path / "D") as gateway:
        key = gateway.key("play", registers=True, requests_s=4.0)
        link = HttpLink(Address(gateway.url, key), "my-game")
        failed = next(
            failed for failed in (failure(lambda: link.register(SPEC)) for _ in range(50)) if failed
        )
        assert failed.code == "too_many"
        assert 0 < failed.retry_after_s < 5
        link.close()


def test_a_gateway_that_comes_late_gets_everything(tmp_path):
    with running(tmp_path / "D") as gateway:
        url = gateway.url
        key = gateway.key("play", registers=True)
        port = gateway.server.port
    game = http_client(url, key, tmp_path)
    play(game)
    until(lambda: game.stats().failed_sends > 0)
    assert "unreachable" in game.stats().last_error
    with running(tmp_path / "D", listen=Listen(port=port)):
        assert game.flush(30)
        assert game.stats().acked_steps == 5
        assert game.close()


def test_the_recording_rate_of_a_gateway_is_used(tmp_path):
    with running(tmp_path / "D", GatewayConfig(target_steps_s=1.0)) as gateway:
        game = http_client(gateway.url, gateway.key("play", registers=True), tmp_path)
        for _ in range(20):
            play(game, 100)
        assert game.flush()
        assert game.stats().recording_rate < 0.05
        for _ in range(200):
            play(game)
        assert game.stats().skipped_steps > 800
        game.close()


def test_an_untrusted_certificate_is_rejected(tmp_path, monkeypatch):
    crt, key_file = certificate(tmp_path)
    with running(
        tmp_path / "D", listen=Listen(certificate=crt, certificate_key=key_file)
    ) as gateway:
        place = Address(
            f"https://localhost:{gateway.server.port}", gateway.key("play", registers=True)
        )
        link = HttpLink(place, "my-game")
        with pytest.raises(LinkFailed, match="certificate verify failed"):
            link.register(SPEC)
        link.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(crt))
        link = HttpLink(place, "my-game")
        link.register(SPEC)
        link.close()


# --- Responses of all kinds -----------------------------------------------------------------------


class Scripted:
    """A server with scripted responses that stores the requests."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[tuple[str, str, int]] = []
        self.connections: list[socket.socket] = []
        self.pause_s = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections.append(self.request)
                super().setup()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.asked.append((self.command, self.path, len(body)))
                time.sleep(outer.pause_s)
                status, headers, raw = (
                    outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                )
                self.send_response(status)
                for name, value in ({"content-length": str(len(raw))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(raw)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def say(
        self, status: int, value: object = None, raw: bytes | None = None, **headers: str
    ) -> None:
        self.answers.append((status, headers, json.dumps(value).encode() if raw is None else raw))


@contextmanager
def scripted():
    one = Scripted()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        one.server.server_close()


def sent(n_frames: int = 1):
    session = new_session(time.time())
    return [data_frame(session, at, b"body") for at in range(n_frames)], {
        session: player_name("ada")
    }


ACK = {"accepted": True, "refused": None, "retry_after_s": 0.0, "error": ""}


def test_each_frame_gets_its_own_ack():
    later = {"accepted": False, "refused": None, "retry_after_s": 3.0, "error": "busy"}
    never = {"accepted": False, "refused": "too_large: no", "retry_after_s": 0.0, "error": ""}
    with scripted() as server:
        server.say(200, {"acks": [ACK, later, never], "recording_rate": 0.25})
        link = HttpLink(Address(server.url, KEY), "my-game")
        acks = link.send(*sent(3))
        assert acks == [Ack(True), Ack(False, None, 3.0, "busy"), Ack(False, "too_large: no")]
        assert link.recording_rate == 0.25
        link.close()


@pytest.mark.parametrize(
    ("status", "value", "headers", "code", "retry_after_s"),
    [
        (
            401,
            {"error": {"code": "revoked_key", "detail": "gone", "retry_after_s": None}},
            {},
            "revoked_key",
            0.0,
        ),
        (
            429,
            {"error": {"code": "too_many", "detail": "slowly", "retry_after_s": 2.5}},
            {},
            "too_many",
            2.5,
        ),
        (
            503,
            {"error": {"code": "not_available", "detail": "disk"}},
            {"retry-after": "4"},
            "not_available",
            4.0,
        ),
        (502, "<html>", {}, "status_502", 0.0),
        (500, {"error": "?"}, {}, "status_500", 0.0),
        (301, "", {"location": "http://127.0.0.1:1/"}, "status_301", 0.0),
        (200, {"acks": [], "recording_rate": 7}, {}, "strange_answer", 0.0),
        (200, {"acks": [{"accepted": True}], "recording_rate": 1}, {}, "strange_answer", 0.0),
        (200, [], {}, "strange_answer", 0.0),
        (200, "x" * 1_100_000, {}, "strange_answer", 0.0),
        (200, {"acks": [ACK], "recording_rate": 1}, {"content-length": "400"}, "unreachable", 0.0),
        (
            503,
            {"error": {"code": "x\x1b[31m" * 99, "detail": 7, "retry_after_s": "soon"}},
            {},
            "x [31mx [31mx",
            0.0,
        ),
    ],
)
def test_a_failed_request_is_explained_and_retried(status, value, headers, code, retry_after_s):
    with scripted() as server:
        server.say(status, value, **headers)
        link = HttpLink(Address(server.url, KEY), "my-game", timeout_s=1.0)
        with pytest.raises(LinkFailed) as caught:
            link.send(*sent())
        assert caught.value.code.startswith(code)
        assert caught.value.retry_after_s == retry_after_s
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()
        server.answers.clear()
        server.say(200, {"acks": [ACK], "recording_rate": 1.0})
        assert link.send(*sent()) == [Ack(True)]
        link.close()


def test_a_server_that_does_not_speak_http_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        threading.Thread(target=talk, daemon=True).start()
        link = HttpLink(Address(f"http://127.0.0.1:{server.getsockname()[1]}", KEY), "my-game")
        with pytest.raises(LinkFailed, match="unreachable"):
            link.send(*sent())
        link.close()


def test_a_silent_platform_times_out_and_a_closed_link_fails_at_once():
    with scripted() as server:
        server.say(200, {"acks": [ACK], "recording_rate": 1.0})
        server.pause_s = 1.0
        link = HttpLink(Address(server.url, KEY), "my-game", timeout_s=0.1)
        began_s = time.monotonic()
        with pytest.raises(LinkFailed, match="unreachable"):
            link.send(*sent())
        assert time.monotonic() - began_s < 0.9
        link.close()
        with pytest.raises(LinkFailed, match="closed"):
            link.send(*sent())


def test_one_connection_is_reused_and_reopened_when_the_platform_closed_it():
    with scripted() as server:
        server.say(200, {"acks": [ACK], "recording_rate": 1.0})
        link = HttpLink(Address(server.url, KEY), "my-game")
        for _ in range(5):
            link.send(*sent())
        assert len(server.connections) == 1
        server.connections[0].shutdown(socket.SHUT_RDWR)
        until(lambda: not link._sending._connection.is_connected)
        assert link.send(*sent()) == [Ack(True)]
        assert len(server.connections) == 2
        link.close()


def test_a_batch_too_large_for_a_proxy_is_sent_in_halves():
    with scripted() as server:
        server.say(413, raw=b"<html>413</html>")
        server.say(200, {"acks": [ACK] * 4, "recording_rate": 1.0})
        server.say(200, {"acks": [ACK] * 4, "recording_rate": 0.5})
        link = HttpLink(Address(server.url, KEY), "my-game")
        assert link.send(*sent(8), skipped_steps=9) == [Ack(True)] * 8
        assert len(server.asked) == 3
        server.answers.clear()
        server.say(413, raw=b"")
        with pytest.raises(LinkFailed, match="status_413"):
            link.send(*sent(8))
        link.close()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"number": -1},
        {"number": 1, "champion": 7},
        {"number": 1, "canary_share": "a"},
        {"number": 1, "trust": "a"},
        {"number": 1, "trust": [1]},
    ],
)
def test_invalid_live_models_are_rejected(value):
    with scripted() as server:
        server.say(200, value)
        link = HttpLink(Address(server.url, KEY), "my-game")
        with pytest.raises(LinkFailed, match="strange_answer"):
            link.bot(0, wait_s=0.0)
        link.close()


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"entry": 1, "models": [1], "valid_s": 9, "tickets": {}},
        {"entry": 1, "valid_s": 9, "tickets": []},
        {"entry": 1, "models": None, "valid_s": 9, "tickets": []},
        {"entry": 1, "models": "12", "valid_s": 9, "tickets": []},
        {"entry": 1, "models": {}, "valid_s": 9, "tickets": []},
        {"entry": 1, "models": ["1"], "valid_s": 9, "tickets": []},
        {"entry": "1", "models": [1], "valid_s": 9, "tickets": []},
        {"entry": 1, "models": [1], "valid_s": None, "tickets": []},
        {"entry": 1, "models": [1], "valid_s": 9, "tickets": [None]},
        {"entry": 1, "models": [1], "valid_s": 9, "tickets": [{"model_no": 1}]},
        {"entry": 1, "models": [1], "valid_s": 9, "tickets": [{"model_no": 1, "ticket": 1}]},
        {"entry": 1, "models": [1], "valid_s": 9, "tickets": [{"model_no": "1", "ticket": "t1"}]},
        {
            "entry": 1,
            "models": [1],
            "valid_s": 9,
            "tickets": [{"model_no": 1, "ticket": "t" * 129}],
        },
    ],
)
def test_invalid_tickets_are_rejected(value):
    with scripted() as server:
        server.say(200, value)
        link = HttpLink(Address(server.url, KEY), "my-game")
        try:
            with pytest.raises(LinkFailed, match="strange_answer"):
                link.tickets(1, schema="0" * 64)
        finally:
            link.close()


def test_fields_that_a_later_gateway_adds_are_ignored():
    with scripted() as server:
        server.say(200, {"number": 3, "mood": "good", "trust": []})
        link = HttpLink(Address(server.url, KEY), "my-game")
        news = link.bot(2, wait_s=1.5)
        assert news is not None
        assert news.number == 3
        assert server.asked == [("GET", "/v1/games/my-game/bot?after=2&wait_s=1.5", 0)]
        link.close()
    with scripted() as server:
        drawn = {"model_no": 7, "ticket": "t1", "mood": "good"}
        server.say(
            200, {"entry": 3, "models": [1], "valid_s": 9, "tickets": [drawn], "mood": "good"}
        )
        link = HttpLink(Address(server.url, KEY), "my-game")
        batch = link.tickets(1, schema="0" * 64)
        assert batch == TicketBatch(
            entry=3, models=(1,), valid_s=9.0, tickets=(DrawnTicket(model_no=7, ticket="t1"),)
        )
        link.close()


def test_a_sender_counts_each_failed_request_and_warns_of_each_kind_once(tmp_path):
    from tests.client.fakes import FakeClock

    with scripted() as server:
        server.say(503, {"error": {"code": "not_available", "detail": "the disk is full"}})
        clock = FakeClock(time.time())
        game = client(HttpLink(Address(server.url, KEY), "my-game"), tmp_path, clock=clock)
        play(game)
        clock.advance(2)
        with pytest.warns(RecordingWarning, match="the disk is full"):
            game.pump()
        for _ in range(5):
            clock.advance(60)
            game.pump()
        assert game.stats().failed_sends == 6
        server.answers.clear()
        server.say(200, {"acks": [ACK], "recording_rate": 1.0})
        clock.advance(60)
        game.pump()
        assert game.stats().acked_steps == 5
        game.close()


# --- Addresses and keys ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "play.example.org",
        "ftp://a",
        "http://",
        "https://a:b@c",
        "https://a?x=1",
        "https://a#x",
        "https://a:99999",
        "http://play.example.org",
        "http://127.0.0.1.evil.example",
        "http://192.168.0.7:8080",
        "https://a\n",
    ],
)
def test_addresses_that_are_invalid_or_would_expose_the_key_are_rejected(tmp_path, url):
    with pytest.raises(ConfigError):
        connect(SPEC, url=url, key=KEY, config=ClientConfig(spool=tmp_path))


@pytest.mark.parametrize(
    "url",
    [
        "https://anna:secret@play.example.org",
        "https://anna:s@secret@play.example.org",
        "http://anna:secret@127.0.0.1:8080",
        "https://anna:secret@a:99999",
        "https://anna:secret@[a",
        "anna:secret@play.example.org",
        "ftp://anna:secret@a",
        "https://a?key=secret",
    ],
)
@pytest.mark.parametrize("more", [{}, {"key": None}, {"data": "D"}])
def test_no_error_shows_the_user_or_the_password_of_an_address(tmp_path, monkeypatch, url, more):
    monkeypatch.delenv("UNDERSTUDY_KEY", raising=False)
    given = {"url": url, "key": KEY, **more}
    with pytest.raises(ConfigError) as raised:
        connect(SPEC, config=ClientConfig(spool=tmp_path), **given)
    told = str(raised.value)
    assert "secret" not in told
    assert "anna" not in told
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "https://play.example.org",
        "https://play.example.org:8443/understudy/",
        "http://127.0.0.1:8080",
        "http://[::1]:1",
        "http://localhost",
    ],
)
def test_valid_addresses_are_accepted(url):
    link = HttpLink(Address(url, KEY), "my-game")
    assert link.address == url.rstrip("/")
    assert KEY not in repr(link) + repr(Address(url, KEY))
    link.close()


def test_plain_http_to_other_machines_needs_insecure(tmp_path):
    config = ClientConfig(spool=tmp_path, insecure=True, background=False)
    game = connect(SPEC, url="http://192.0.2.1", key=KEY, config=config)
    game.close()


def test_exactly_one_place_to_record_to_is_accepted(tmp_path, monkeypatch):
    for name in ("UNDERSTUDY_URL", "UNDERSTUDY_KEY", "UNDERSTUDY_DATA"):
        monkeypatch.delenv(name, raising=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"url": "https://a"}, "needs a key"),
        ({"key": KEY}, "no url"),
        ({"url": "https://a", "key": KEY, "data": "D"}, "both"),
        ({"url": "https://a", "key": "two words"}, "characters"),
        ({}, "UNDERSTUDY_URL"),
    ]
    for given, what in cases:
        with pytest.raises(ConfigError, match=what):
            connect(SPEC, config=ClientConfig(spool=tmp_path), **given)
    # Arguments take precedence over the environment.
    monkeypatch.setenv("UNDERSTUDY_URL", "https://a.example")
    monkeypatch.setenv("UNDERSTUDY_KEY", KEY)
    config = ClientConfig(background=False)
    with connect(SPEC, data=tmp_path / "D", config=config) as game:
        play(game)
    assert (tmp_path / "D" / "stream").exists()


def test_nothing_is_imported_or_started_before_there_is_something_to_send(tmp_path):
    script = f"""
import sys, threading, understudy
from understudy.client import ClientConfig
config = ClientConfig(spool={str(tmp_path)!r})
game = understudy.connect(
    "my-game", obs=2, actions=3, url="https://a.example", key="uk_x", config=config
)
heavy = {{"urllib3", "cryptography", "ssl", "understudy.streams"}}
print(threading.active_count(), sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.stderr) == ("1 []", "")


@sizes("times", short=1, full=5)
def test_threads_with_simultaneous_first_requests_import_urllib3_once(times: int) -> None:
    """The sender and the bots' thread start together; neither may see a partly imported library."""
    script = """
import threading
from understudy.client.http import HttpLink
from understudy.client.connect import Address
from understudy.core.errors import LinkFailed

link = HttpLink(Address("http://127.0.0.1:9", "uk_x"), "pong")
together, found = threading.Barrier(2), []

def ask(call):
    together.wait()
    try:
        call()
    except Exception as error:
        found.append(type(error).__name__)

calls = [lambda: link.bot(0, wait_s=0.0), lambda: link.send([], {})]
threads = [threading.Thread(target=ask, args=(call,)) for call in calls]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == ["LinkFailed"] * 2, found
"""
    for _ in range(times):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_during_the_first_request_or_registration_leaves_no_lock_held(tmp_path) -> None:
    script = """
import os, signal, sys, threading, time
from pathlib import Path
from understudy.client import local
from understudy.client.http import HttpLink
from understudy.client.connect import Address, local_link
from understudy.core.clock import SystemClock
from understudy.core.errors import LinkFailed
from understudy.experience.game import game_spec

spec = game_spec("pong", obs=2, actions=3)

class Slow:
    started = threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name == "urllib3.connection":
            self.started.set()
            time.sleep(0.2)

def slow_write(*arguments, **settings):
    started.set()
    time.sleep(0.2)
    return true_write(*arguments, **settings)

def send():
    try:
        HttpLink(Address("http://127.0.0.1:9", "uk_x"), "pong").send([], {})
    except LinkFailed:
        pass

def register():
    local_link(Path(sys.argv[1]), spec, SystemClock()).register(spec)

sys.meta_path.insert(0, Slow())
true_write = local.write_file
local.write_file = slow_write
started = threading.Event()
for call, is_started in ((send, Slow.started), (register, started)):
    thread = threading.Thread(target=call)
    thread.start()
    assert is_started.wait(10)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        call()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, call
    thread.join()
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
