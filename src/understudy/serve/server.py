"""Serves an API on a socket: TLS or loopback, bounded connections, and a graceful stop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from understudy.core.errors import ConfigError
from understudy.core.location import is_loopback
from understudy.core.wording import joined
from understudy.serve.wire import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    Failed,
    Failure,
)

_BACKLOG = 2048
_OTHER_FILES = 256
_MAX_PIPELINED = 64
_MAX_PIPELINED_BYTES = 64 * 1024
"""Requests of a connection, and their bytes, that may wait for the answer to an earlier one."""
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes that may arrive after an answer; some clients send all of a body before they read it."""
_DISCARDED: Any = deque(maxlen=0)
"""The headers of a request whose head is complete: trailer fields are appended, and not kept."""
_MAX_PROXIES = 16
_GOODBYE_S = 1.0
"""How long a client may take to read the rest of an answer on a closing connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The address, TLS files and timeouts of a server."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port; `GatewayServer.port` has the actual one."""
    certificate: Path | None = None
    """The TLS certificate, a PEM file; needs `certificate_key`, its private key."""
    certificate_key: Path | None = None
    insecure: bool = False
    """Whether to allow plain HTTP from other machines, where something else encrypts."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies, whose X-Forwarded-For header names the client."""
    max_connections: int = 8192
    """Maximum number of connections; beyond it, the address with the most loses one."""
    max_keyless_connections: int = 1024
    """Maximum number of connections of one address that have not sent a valid key."""
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
        most = (self.max_connections, self.max_keyless_connections)
        if min(most) < 1 or not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError(
                f"max_connections and max_keyless_connections are {joined(most)}, and the timeouts "
                f"{joined(times)} s; pass at least 1 connection, and timeouts above 0 and below 1e6"
            )
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"trusted_proxies has {proxy[:60]!r}: {error}; pass addresses or networks, "
                    "such as 10.0.0.7 or 10.0.0.0/8"
                ) from None

    def check_key_pair(self) -> None:
        """Raise ConfigError if the TLS files, if there are any, are no certificate and its key."""
        if self.certificate is None:
            return
        try:
            # With a passphrase, so that OpenSSL does not ask for that of an encrypted key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.certificate_key, password=""
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.certificate} and {self.certificate_key} are not a certificate and its "
                f"key: {error}; pass both as PEM files, the key without a passphrase"
            ) from None


class Api(Protocol):
    """What a server serves: the gateway, or the API of a learner for its workers."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Requests are served inside this context."""
        ...

    def drain(self) -> None:
        """End all requests that wait, because the server will stop."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class GatewayServer:
    """Serves an API until `stop`; the constructor binds the socket and sets `url`."""

    def __init__(self, gateway: Api, listen: Listen) -> None:
        self._gateway = gateway
        self._uvicorn = _Uvicorn(gateway, listen)
        self._socket = _bound(listen)
        self.port: int = self._socket.getsockname()[1]
        name = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.url = f"{'https' if listen.certificate else 'http'}://{name}:{self.port}"

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called and all requests in progress are answered."""
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
    """uvicorn's server without signal handlers; when it stops, it ends the gateway's long polls.

    With TLS it accepts connections itself, since they must be counted before their handshake.
    """

    def __init__(self, gateway: Api, listen: Listen) -> None:
        self._gateway = gateway
        self._listen = listen
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = Connections(listen)
        facts = {"listen": listen, "others": self.connections}
        self._protocol: Any = type("Connection", (Connection,), facts)
        # uvicorn's warnings about invalid requests would flood the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            gateway,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=listen.idle_timeout_s,
            timeout_graceful_shutdown=listen.drain_s,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.certificate_key,
        )
        listen.check_key_pair()
        config.load()
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            return await super().startup(sockets)
        assert sockets is not None
        self.servers = []
        self._start(self._accept(sockets[0]))
        self.started = True
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            try:
                accepted, peer = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # the client has gone, or no descriptor is left
                await asyncio.sleep(_GOODBYE_S / 10)
            else:
                self._start(self._secure(accepted, peer[0]))

    async def _secure(self, accepted: socket.socket, peer: str) -> None:
        """Complete the TLS handshake in time, as a connection without a key."""
        handshake = Handshake()
        is_proxy = self.connections.is_trusted(peer)
        self.connections.use(handshake, "" if is_proxy else client_address(peer))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(
                    config=self.config,
                    server_state=self.server_state,
                    app_state=self.lifespan.state,
                ),
                accepted,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._listen.head_timeout_s,
            )
        except OSError:  # includes TLS errors
            accepted.close()
        finally:
            self.connections.discard(handshake)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.drain()
        for task in list(self._tasks):
            task.cancel()
        await super().shutdown(sockets)
        for connection in self.connections.all():
            connection.abort()
        await asyncio.sleep(0)


class Handshake:
    """A connection whose TLS handshake is in progress."""

    def __init__(self) -> None:
        self.address = ""
        self.has_key = False
        self.is_gone = False
        self._task = asyncio.current_task()

    def abort(self) -> None:
        assert self._task is not None
        self._task.cancel()


@dataclass(slots=True)
class _Client:
    """The connections of one address, in order of last use."""

    connections: dict["Connection | Handshake", None] = field(default_factory=dict)
    keyless: dict["Connection | Handshake", None] = field(default_factory=dict)
    """Those that have not sent a valid key yet."""


class Connections:
    """All connections of a server by address; closes one when there are too many.

    An address with too many connections without a key loses one of these. When the server has too
    many, the address with the most loses one. Either way it is the one that was used longest ago,
    so a new connection always gets in, and one address cannot lock out the others.
    """

    def __init__(self, listen: Listen) -> None:
        self._max_connections = _allow_files(listen.max_connections)
        self._max_keyless = listen.max_keyless_connections
        self._trusted = [ip_network(proxy) for proxy in listen.trusted_proxies]
        self._clients: dict[str, _Client] = {}
        self._n_connections = 0

    def all(self) -> list["Connection | Handshake"]:
        return [each for client in self._clients.values() for each in client.connections]

    def is_trusted(self, text: str) -> bool:
        """Whether this is the address of a trusted proxy."""
        address = _ip(text) if self._trusted else None
        return address is not None and any(address in network for network in self._trusted)

    def forwarded(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The client of a request from a trusted proxy: the last address that is not a proxy's."""
        value = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        for text in reversed(value.decode("latin-1").split(",")[-_MAX_PROXIES:]):
            if text.strip() and not self.is_trusted(text.strip()):
                return client_address(text.strip())
        return client_address(peer)

    def use(self, connection: "Connection | Handshake", address: str) -> None:
        """Add a connection, or make it the last used one; close another if there are too many.

        The address is empty for a connection of a proxy that has not sent a request yet.
        """
        if connection.is_gone:
            return
        if address != connection.address:
            self.discard(connection)
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _Client()
        if client.connections.pop(connection, _ABSENT) is _ABSENT:
            self._n_connections += 1
        client.connections[connection] = None
        client.keyless.pop(connection, None)
        if not connection.has_key:
            client.keyless[connection] = None
        connection.address = address
        if address and len(client.keyless) > self._max_keyless:
            self._close(next(iter(client.keyless)))
        elif self._n_connections > self._max_connections:
            busiest = max(self._clients.values(), key=lambda client: len(client.connections))
            self._close(next(iter(busiest.connections)))

    def discard(self, connection: "Connection | Handshake") -> None:
        client = self._clients.get(connection.address)
        if client is not None and connection in client.connections:
            del client.connections[connection]
            client.keyless.pop(connection, None)
            self._n_connections -= 1
            if not client.connections:
                del self._clients[connection.address]

    def _close(self, connection: "Connection | Handshake") -> None:
        self.discard(connection)
        connection.is_gone = True
        connection.abort()


_ABSENT = object()


@lru_cache(4096)
def client_address(text: str) -> str:
    """The address that a client is counted by: of IPv6 the /64, since one client has all of it."""
    address = _ip(text)
    if address is None:
        return text[:64]
    return (
        str(address) if address.version == 4 else str(IPv6Network((int(address) >> 64 << 64, 64)))
    )


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address, which may have a port or a zone; None if it is not an address."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class Connection(HttpToolsProtocol):
    """A client's connection: uvicorn's class, with a timeout for every stage of a request.

        connected ─ head ─► head complete ─ body ─► complete ─► answered ─ idle ─► next head …

    uvicorn limits only the idle time. Here head and body must arrive in time; the size of a head,
    the requests that wait behind another, and what arrives after an answer are limited, and an
    answer must be read in time; a connection that exceeds a limit is aborted. All that is not body
    counts as head: sizes and extensions of chunks, and trailer fields, which are ignored. A byte of
    a body makes up for one of them, so that a large body may have many chunks. The class overrides
    callbacks of asyncio (`connection_made` …) and of httptools (`on_message_begin` …), and three of
    uvicorn's.
    """

    listen: Listen
    others: Connections
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
        self._closes_after_request = False
        self._head_bytes = 0
        self._discarded_bytes = 0
        self._pipelined_bytes = 0
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The requests that have arrived and are not answered yet, in order."""
        self._peer = ""
        self._is_from_proxy = False
        self.address = ""
        """The client's address; behind a proxy, of the client that sent the last request."""
        self.has_key = False
        """Whether a request with a valid key has been received."""
        self.is_gone = False

    def abort(self) -> None:
        self._drop_answers()
        self.transport.abort()

    def _drop_answers(self) -> None:
        # uvicorn does this for the last request only; the others would raise when they answer.
        for request in self._unanswered:
            request.disconnected = True
            request.message_event.set()

    def close_after_request(self) -> None:
        """Close the connection as soon as the request has arrived, whose answer was sent."""
        if self._is_arriving:
            self._closes_after_request = True
        else:
            self.transport.close()

    def show_key(self) -> None:
        """Count this connection as one with a key from now on."""
        if not self.has_key:
            self.has_key = True
            self.others.use(self, self.address)

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
            self.abort()
        elif remaining_s < float("inf"):
            self._within(remaining_s)

    def _idle(self) -> None:
        # uvicorn closes idle connections; this aborts those with unread data or without a request.
        self._within(self.listen.idle_timeout_s + _GOODBYE_S)

    def _end_soon(self) -> None:
        # close() alone would wait for the client: for its TLS close_notify, or for it to read.
        self.loop.call_later(
            0.0 if not self.transport.get_write_buffer_size() else _GOODBYE_S, self.abort
        )

    # --- Callbacks of the transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self._is_from_proxy = self.others.is_trusted(self._peer)
        self.others.use(self, "" if self._is_from_proxy else client_address(self._peer))
        self._within(self.listen.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.discard(self)
        self.is_gone = True
        self._drop_answers()
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # with TLS, some event loops still deliver data
            return
        self._head_bytes += len(data)  # `on_body` subtracts its part
        super().data_received(data)
        self._check_head()
        is_discarded = self._is_arriving and not self._unanswered
        self._discarded_bytes = self._discarded_bytes + len(data) if is_discarded else 0
        self._pipelined_bytes = self._pipelined_bytes + len(data) if self.pipeline else 0
        if (
            self._discarded_bytes > _MAX_DISCARDED_BYTES
            or self._pipelined_bytes > _MAX_PIPELINED_BYTES
        ):
            self.abort()

    def _check_head(self) -> None:
        has_many = self._is_in_head and len(self.headers) > MAX_HEADERS
        if (self._head_bytes <= MAX_HEAD_BYTES and not has_many) or self.transport.is_closing():
            return
        if not self._is_in_head and self.cycle is not None and self.cycle.response_started:
            self.abort()
        else:
            self._refuse_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.listen.read_timeout_s, self.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    # --- Callbacks of the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self._unanswered) >= _MAX_PIPELINED:
            self.abort()
            raise ConnectionAbortedError  # stops the parser
        self._is_in_head = True
        self._is_arriving = True
        self._within(self.listen.head_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            raise ConnectionAbortedError  # stops the parser
        self._is_in_head = False
        address = self.address
        if self._is_from_proxy:
            address = self.others.forwarded(self._peer, self.headers)
        self.others.use(self, address)
        self.scope.update(address=address, connection=self)  # type: ignore[call-arg]
        self._within(self.listen.body_timeout_s)
        super().on_headers_complete()
        self.headers = _DISCARDED
        self._unanswered.append(self.cycle)
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # a body, or another protocol, would be read as requests
        if not self.cycle.keep_alive:
            self.cycle.transport = _Lingering(self)

    def on_body(self, body: bytes) -> None:
        # Twice: once since it was counted with the rest, and once to make up for other bytes.
        self._head_bytes = max(0, self._head_bytes - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_arriving = False
        self._head_bytes = 0
        if self._unanswered:
            self._within(float("inf"))
        else:  # a rejected body may end after its answer
            self._idle()
        super().on_message_complete()
        if self._closes_after_request:
            self.transport.close()

    # --- Callbacks of uvicorn ---------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unanswered.popleft()
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
        if self.transport.is_closing():  # the parser was stopped by a limit
            return
        self._refuse(HTTPStatus.BAD_REQUEST, "bad_http", "this is not a valid HTTP/1.1 request")

    def _refuse_head(self) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", HEAD_TOO_LARGE)

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        if len(self._unanswered) > (self._is_arriving and not self._is_in_head):
            # The answer would be taken for that of an earlier request.
            self.abort()
            return
        body = msgspec.json.encode(Failed(error=Failure(code=code, detail=detail)))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self._drop_answers()
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Lingering(asyncio.Transport):
    """The transport of a request after which the client wants the connection closed.

    If that were done while a rejected body still arrives, the connection would be reset, and a
    client that sends all of it first could not read the answer.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_after_request()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _allow_files(n_connections: int) -> int:
    """Raise the limit of open files for this many connections; return how many it allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return n_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return n_connections
    most = max(soft, needed if hard == resource.RLIM_INFINITY else min(needed, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # Without descriptors left, new connections could not even be accepted.
    return max(1, min(n_connections, most - min(_OTHER_FILES, most // 2)))


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen.host} port {listen.port}: {error.strerror}; pass another "
            "port, or 0 for any free one"
        ) from None
