"""A gateway on a socket: TLS or loopback, bounded connections, a stop that answers whoever is being served."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from understudy.core.errors import ConfigError, UnderstudyError
from understudy.serve.connection import PatientConnection
from understudy.serve.gateway import Gateway

_BACKLOG = 2048
_OTHER_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a gateway listens, and how patient it is."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one; `Server.url` says which."""
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
    """The same for a body; longer than the gateway's own time, which answers before this cuts off."""
    read_timeout_s: float = 30.0
    """How long an answer may wait for its reader."""
    idle_timeout_s: int = 75
    """How long a connection may stay without a request; longer than clients and balancers keep theirs."""
    drain_s: int = 10
    """How long a stop waits for requests that are being served."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("TLS needs certificate and certificate_key; give both, or none of them")
        if self.certificate is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"plain HTTP on {self.host} would show every key to the network; give certificate and certificate_key, "
                "listen on 127.0.0.1 behind a proxy, or say insecure where something else encrypts"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        times = (self.head_timeout_s, self.body_timeout_s, self.read_timeout_s, self.idle_timeout_s, self.drain_s)
        if self.max_connections < 1 or not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError("max_connections is a whole number from 1, times are numbers of seconds above 0")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Server:
    """Serves a gateway until it is told to stop; the address is bound, and `url` known, once this is made."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway, self._uvicorn = gateway, _Uvicorn(gateway, _config(gateway, listen))
        self._socket = _bound(listen)
        self.port: int = self._socket.getsockname()[1]
        name = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.url = f"{'https' if listen.certificate else 'http'}://{name}:{self.port}"

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve; returns when `stop` was called and whoever was being served has their answer."""
        self._uvicorn.on_ready = on_ready
        _allow_files(self._uvicorn.config.limit_concurrency or 0)
        try:
            self._uvicorn.run(sockets=[self._socket])
        except SystemExit:
            failure = self._gateway.failure
            if isinstance(failure, UnderstudyError):
                raise failure from None
            raise ConfigError("the gateway could not start; its log says why") from None
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Take no more and drain; from any thread or a signal's handler, and as often as one likes."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which leaves signals to whoever runs it and lets the gateway end its long polls."""

    def __init__(self, gateway: Gateway, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._gateway = gateway
        self.on_ready: Callable[[], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        log = logging.getLogger("uvicorn.error")
        log.disabled = True  # that it did not start, and why, is said once, by the gateway
        try:
            await super().startup(sockets)
        finally:
            log.disabled = False
        if self.on_ready is not None:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.drain()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


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
            f"cannot listen on {listen.host} port {listen.port}: {error.strerror}; give another port, or 0 for any"
        ) from None


def _config(gateway: Gateway, listen: Listen) -> uvicorn.Config:
    class Connection(PatientConnection):
        head_timeout_s, body_timeout_s = listen.head_timeout_s, listen.body_timeout_s
        read_timeout_s = listen.read_timeout_s

    # What strangers send is not worth a line each; what the gateway logs goes its own way.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        gateway, http=Connection, ws="none", lifespan="on", log_config=None, access_log=False, proxy_headers=False,
        server_header=False, backlog=_BACKLOG, limit_concurrency=listen.max_connections,
        timeout_keep_alive=listen.idle_timeout_s, timeout_graceful_shutdown=listen.drain_s,
        ssl_certfile=listen.certificate, ssl_keyfile=listen.certificate_key,
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{listen.certificate} and {listen.certificate_key} are no certificate and its key: {error}"
        ) from None
    return config
