"""A gateway on a socket: TLS or loopback, bounded connections, a stop that answers the requests
in flight."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from understudy.core.errors import ConfigError
from understudy.core.location import is_loopback
from understudy.serve.gateway import Gateway
from understudy.serve.wire import MAX_HEAD_BYTES, Failed, Failure

_BACKLOG = 2048
_OTHER_FILES = 256
_GOODBYE_S = 1.0
"""How long a connection that is being closed may take to read what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a gateway listens, and how patient it is."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one; `GatewayServer.url` says which."""
    certificate: Path | None = None
    """A PEM file, with `certificate_key` for its private key: then it speaks TLS."""
    certificate_key: Path | None = None
    insecure: bool = False
    """Plain HTTP for other machines too; for networks where something else encrypts."""
    max_connections: int = 8192
    """Beyond these, requests are answered with 503."""
    head_timeout_s: float = 10.0
    """How long a client may take to send a request's head."""
    body_timeout_s: float = 20.0
    """The same for a body; longer than the gateway's own time, which answers before this cuts
    off."""
    read_timeout_s: float = 30.0
    """How long an answer may wait for its reader."""
    idle_timeout_s: int = 75
    """How long a connection may stay without a request; longer than clients and balancers keep
    theirs."""
    drain_s: int = 10
    """How long a stop waits for requests that are being served."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError(
                "TLS needs certificate and certificate_key; give both, or none of them"
            )
        if self.certificate is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"plain HTTP on {self.host} would show every key to the network; give certificate "
                "and certificate_key, "
                "listen on 127.0.0.1 behind a proxy, or say insecure where something else encrypts"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        times = (
            self.head_timeout_s,
            self.body_timeout_s,
            self.read_timeout_s,
            self.idle_timeout_s,
            self.drain_s,
        )
        if self.max_connections < 1 or not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError(
                "max_connections is a whole number from 1, times are numbers of seconds above 0"
            )


class GatewayServer:
    """Serves a gateway until it is told to stop; the address is bound, and `url` known, once
    this is made."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway = gateway
        self._uvicorn = _Uvicorn(gateway, listen)
        self._socket = _bound(listen)
        self._max_connections = listen.max_connections
        self.port: int = self._socket.getsockname()[1]
        name = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.url = f"{'https' if listen.certificate else 'http'}://{name}:{self.port}"

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve; returns when `stop` was called and the requests in flight have their answers."""
        _allow_files(self._max_connections)
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._serve(on_ready))
        finally:
            self._socket.close()

    async def _serve(self, on_ready: Callable[[], None] | None) -> None:
        async with self._gateway.opened():
            if on_ready is not None:
                on_ready()  # the socket listens since it was bound
            await self._uvicorn.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Accept no more and drain; from any thread or a signal's handler, any number of times."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's server; signals are left to the caller, and the gateway ends its long polls at
    the stop."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway = gateway
        self._connections: set[Connection] = set()
        facts = {"listen": listen, "others": self._connections}
        # uvicorn's messages about what strangers send are not worth a line each.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            gateway,
            http=type("Connection", (Connection,), facts),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            limit_concurrency=listen.max_connections,
            timeout_keep_alive=listen.idle_timeout_s,
            timeout_graceful_shutdown=listen.drain_s,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.certificate_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{listen.certificate} and {listen.certificate_key} are no certificate and its "
                f"key: {error}"
            ) from None
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.drain()
        await super().shutdown(sockets)
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)


class Connection(HttpToolsProtocol):
    """One client's connection: uvicorn's own, with a time limit at every stage.

        connected ─ head ─► head complete ─ body ─► complete ─► answered ─ idle ─► next head …

    uvicorn bounds only the idle time. Here a head and a body must come in their time, a head has a
    size, and an answer must be read in time; a connection that is late or sends too much is cut
    off. What is overridden are the callbacks of asyncio (`connection_made` …) and of httptools
    (`on_message_begin` …), and three of uvicorn's.
    """

    listen: Listen
    others: "set[Connection]"
    """Every open connection of the server; this and `listen` are set by subclassing."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._deadline_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._stalled: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_arriving = False
        self._is_last = False
        self._head_bytes = 0
        self._unanswered = 0

    # --- Time -------------------------------------------------------------------------------------

    def _within(self, timeout_s: float) -> None:
        """Give the next stage its time; infinite while it is our turn."""
        self._deadline_s = self.loop.time() + timeout_s
        # One timer for many deadlines: most of them are met, so it rarely has to be set anew.
        if self._deadline_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = self._deadline_s
            self._timer = self.loop.call_at(self._timer_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._timer_s = float("inf")
        left_s = self._deadline_s - self.loop.time()
        if left_s <= 0:
            self.transport.abort()
        elif left_s < float("inf"):
            self._within(left_s)

    def _idle(self) -> None:
        # uvicorn closes after its idle time; what is still unread then, or was no request, ends
        # here.
        self._within(self.listen.idle_timeout_s + _GOODBYE_S)

    def _end_soon(self) -> None:
        # close() alone waits for the other side: for its goodbye under TLS, or for it to read.
        self.loop.call_later(
            0.0 if not self.transport.get_write_buffer_size() else _GOODBYE_S, self.transport.abort
        )

    # --- What the transport says ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.others.add(self)
        self._within(self.listen.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.discard(self)
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if was_in_head and self._is_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "head_too_large",
                (f"the head of a request has at most {MAX_HEAD_BYTES} bytes"),
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.listen.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    # --- What the parser says ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._is_arriving = True
        self._within(self.listen.head_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._unanswered += 1
        self._within(self.listen.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_arriving = False
        if self._unanswered:
            self._within(float("inf"))
        else:  # a body that was refused may end after its answer
            self._idle()
        super().on_message_complete()

    # --- What uvicorn says ------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unanswered -= 1
        if self._is_last:
            self._end_soon()
        elif not self._is_arriving and not self._unanswered:
            self._idle()

    def shutdown(self) -> None:
        """The server stops: end at once when nothing is under way, else after the answer."""
        super().shutdown()
        self._is_last = True
        if not self._unanswered:
            self._end_soon()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other refusal."""
        self._refuse(HTTPStatus.BAD_REQUEST, "bad_http", "this is no HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        body = msgspec.json.encode(Failed(error=Failure(code=code, detail=detail)))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _allow_files(n_connections: int) -> None:
    """Let this process open as many files as it takes connections, where the system allows that."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen.host} port {listen.port}: {error.strerror}; give another "
            "port, or 0 for any"
        ) from None
