"""Serves a gateway on a socket: TLS or loopback, bounded connections, and a graceful stop."""

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
"""How long a client may take to read the rest of an answer on a closing connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The address, TLS files and timeouts of a gateway."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port; `GatewayServer.port` has the actual one."""
    certificate: Path | None = None
    """The TLS certificate, a PEM file; needs `certificate_key`, its private key."""
    certificate_key: Path | None = None
    insecure: bool = False
    """Whether to allow plain HTTP from other machines, where something else encrypts."""
    max_connections: int = 8192
    """Maximum number of connections; requests beyond it are answered with 503."""
    head_timeout_s: float = 10.0
    """How long a client may take to send a request's head."""
    body_timeout_s: float = 20.0
    """How long a body may take; above `GatewayConfig.body_timeout_s`, which sends an error."""
    read_timeout_s: float = 30.0
    """How long a client may take to continue reading an answer."""
    idle_timeout_s: int = 75
    """How long a connection may be idle; longer than the timeouts of clients and load balancers."""
    drain_s: int = 10
    """How long a stop waits for requests in progress."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("TLS needs certificate and certificate_key; set both, or neither")
        if self.certificate is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"plain HTTP on {self.host} would reveal every key to the network; set certificate "
                "and certificate_key, listen on 127.0.0.1 behind a proxy, or set insecure if "
                "something else encrypts"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port}; pass a number from 0 to 65535")
        times = (
            self.head_timeout_s,
            self.body_timeout_s,
            self.read_timeout_s,
            self.idle_timeout_s,
            self.drain_s,
        )
        if self.max_connections < 1 or not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError(
                f"max_connections is {self.max_connections} and the timeouts are {times} s; pass "
                "at least 1 connection, and timeouts above 0 and below 1e6"
            )


class GatewayServer:
    """Serves a gateway until `stop`; the constructor binds the socket and sets `url`."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway = gateway
        self._uvicorn = _Uvicorn(gateway, listen)
        self._socket = _bound(listen)
        self._max_connections = listen.max_connections
        self.port: int = self._socket.getsockname()[1]
        name = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.url = f"{'https' if listen.certificate else 'http'}://{name}:{self.port}"

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called and all requests in progress are answered."""
        _allow_files(self._max_connections)
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._serve(on_ready))
        finally:
            self._socket.close()

    async def _serve(self, on_ready: Callable[[], None] | None) -> None:
        async with self._gateway.opened():
            if on_ready is not None:
                on_ready()  # the socket has been listening since it was bound
            await self._uvicorn.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Stop accepting requests and let `run` return; safe from any thread or signal handler."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers; when it stops, it ends the gateway's long polls."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway = gateway
        self._connections: set[Connection] = set()
        facts = {"listen": listen, "others": self._connections}
        # uvicorn's warnings about invalid requests would flood the log.
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
                f"{listen.certificate} and {listen.certificate_key} are not a certificate and its "
                f"key: {error}; pass both as PEM files"
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
    """A client's connection: uvicorn's class, with a timeout for every stage of a request.

        connected ─ head ─► head complete ─ body ─► complete ─► answered ─ idle ─► next head …

    uvicorn limits only the idle time. Here head and body must arrive in time, the size of a head is
    limited, and an answer must be read in time; a connection that exceeds a limit is aborted. The
    class overrides callbacks of asyncio (`connection_made` …) and of httptools (`on_message_begin`
    …), and three of uvicorn's.
    """

    listen: Listen
    others: "set[Connection]"
    """Every open connection of the server; this and `listen` are set in a subclass."""

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
        """Set the timeout of the next stage; infinite while the gateway works on a request."""
        self._deadline_s = self.loop.time() + timeout_s
        # One timer for many deadlines: most of them are met, so it is rarely reset.
        if self._deadline_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = self._deadline_s
            self._timer = self.loop.call_at(self._timer_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._timer_s = float("inf")
        remaining_s = self._deadline_s - self.loop.time()
        if remaining_s <= 0:
            self.transport.abort()
        elif remaining_s < float("inf"):
            self._within(remaining_s)

    def _idle(self) -> None:
        # uvicorn closes idle connections; this aborts those with unread data or without a request.
        self._within(self.listen.idle_timeout_s + _GOODBYE_S)

    def _end_soon(self) -> None:
        # close() alone would wait for the client: for its TLS close_notify, or for it to read.
        self.loop.call_later(
            0.0 if not self.transport.get_write_buffer_size() else _GOODBYE_S, self.transport.abort
        )

    # --- Callbacks of the transport ---------------------------------------------------------------

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
                f"the head of a request has more than {MAX_HEAD_BYTES} bytes; send smaller headers",
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.listen.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    # --- Callbacks of the parser ------------------------------------------------------------------

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
        else:  # a rejected body may end after its answer
            self._idle()
        super().on_message_complete()

    # --- Callbacks of uvicorn ---------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unanswered -= 1
        if self._is_last:
            self._end_soon()
        elif not self._is_arriving and not self._unanswered:
            self._idle()

    def shutdown(self) -> None:
        """Close the connection because the server stops: at once if idle, else after the answer."""
        super().shutdown()
        self._is_last = True
        if not self._unanswered:
            self._end_soon()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP in the same form as every other error."""
        self._refuse(HTTPStatus.BAD_REQUEST, "bad_http", "this is not a valid HTTP/1.1 request")

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
    """Raise the limit of open files to what the connections need, as far as the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen.host} port {listen.port}: {error.strerror}; pass another "
            "port, or 0 for any free one"
        ) from None
