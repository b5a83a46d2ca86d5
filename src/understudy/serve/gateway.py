"""The gateway: the entry point for games, workers and pages; every request for data needs a key.

Host ─► Origin ─► key ─► route ─► the route's own checks (`api.py`) ─► endpoint
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from understudy.core.errors import ConfigError, Corrupt, Refused, UnderstudyError
from understudy.serve.api import (
    STATUS,
    Answer,
    ApiKeys,
    ApiRoute,
    ApiState,
    error_answer,
    key_of,
    not_found,
)
from understudy.serve.pages import PAGES, load_pages
from understudy.serve.routes import ROUTES
from understudy.serve.state import GatewayState
from understudy.serve.wire import HEAD_TOO_LARGE, MAX_HEAD_BYTES, MAX_HEADERS

_log = structlog.get_logger("understudy.gateway")
_MAX_PATH = 512
_MAX_QUERY = 1024
_MAX_QUERY_FIELDS = 20
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ONCE = {"host", "origin", "authorization", "content-length", "content-encoding", "content-type"}


class Gateway:
    """An ASGI application around Starlette's router; it serves requests only inside `opened`."""

    def __init__(
        self,
        create_state: Callable[[], GatewayState],
        routes: Sequence[ApiRoute] = (*ROUTES, *PAGES),
    ) -> None:
        self._create_state = create_state
        self._state: GatewayState | None = None
        self._router = Router(routes, redirect_slashes=False, default=not_found)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve inside the block, on the running event loop; at its end, append pending frames."""
        state, tasks = await self._open()
        self._state = state
        try:
            yield
        finally:
            self._state = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await state.close()

    async def _open(self) -> tuple[GatewayState, list[asyncio.Task[None]]]:
        loop = asyncio.get_running_loop()
        state = None
        try:
            state = self._create_state()
            await loop.run_in_executor(state.disk, state.keys.follow)
            await loop.run_in_executor(state.disk, load_pages)
        except Exception as error:
            if state is not None:
                await state.close()
            if isinstance(error, UnderstudyError):
                raise
            reason = repr(error)[:300]
            _log.error("gateway_not_started", error=reason)
            raise ConfigError(f"the gateway could not start: {reason}") from error
        state.appender.start()
        state.is_ready = True
        return state, [loop.create_task(state.bots.follow()), loop.create_task(follow_keys(state))]

    def drain(self) -> None:
        """End all long polls, because the gateway will stop; later requests are still served."""
        if self._state is not None:
            self._state.is_ready = False
            self._state.bots.stop_waiting()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: check its head, then route it; every error gets an answer."""
        await serve_request(self._router, self._state, scope, receive, send)


async def serve_request(
    router: Router,
    state: ApiState | None,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    statuses: Mapping[str, int] = STATUS,
) -> None:
    """Check a request's head, then route it; every error gets an answer.

    Without a state, the API is not ready. A state without hosts accepts any Host header.
    `statuses`: the HTTP status by the reason of a Refused; all other reasons are 400.
    """
    began_s = time.perf_counter()
    if state is None:
        stopped = error_answer(
            Refused("not_ready", "the gateway is starting or stopping; try again")
        )
        return await stopped(scope, receive, send)
    scope.update(gateway_state=state, key=None, route="none")
    allowed: dict[str, str] = {}
    is_answered = False

    async def answer(message: Message) -> None:
        nonlocal is_answered
        if message["type"] == "http.response.start":
            is_answered = True
            state.metrics.requests.labels(scope["route"], str(message["status"])).inc()
            state.metrics.seconds.labels(scope["route"]).observe(time.perf_counter() - began_s)
            for name, value in allowed.items():
                message["headers"].append((name.encode(), value.encode("latin-1")))
        await send(message)

    try:
        head = scope["head"] = read_head(scope)
        host = head.get("host", "")
        hosts = state.config.hosts
        if hosts is not None:
            check_host(host, hosts)
        origin = head.get("origin")
        is_preflight = scope["method"] == "OPTIONS" and origin is not None
        allowed = cors(origin, state.keys, is_preflight=is_preflight)
        if is_preflight:
            return await Answer(b"", 204)(scope, receive, answer)
        scope["own_origins"] = own_origins(scope["scheme"], host, hosts or ())
        scope["key"] = key_of(head, state.keys)
        if scope["key"] is not None:
            scope["connection"].show_key()
        # The undecoded path, since an encoded slash must not separate parts of it.
        scope["path"] = scope["raw_path"].decode("latin-1")
        return await router(scope, receive, answer)
    except Exception as error:
        if is_answered:
            raise
        refused = error_answer(error, statuses)
        if refused.status_code in (500, 503) and not isinstance(error, Refused):
            _log.error(
                "request_failed",
                route=scope["route"],
                status=refused.status_code,
                error=repr(error)[:300],
            )
        return await refused(scope, receive, answer)


async def follow_keys(state: GatewayState) -> None:
    """Read the keys regularly; if that fails, log it once and keep the known keys valid.

    If the stored keys are damaged so that a revocation may be lost, no key is valid.
    """
    loop = asyncio.get_running_loop()
    is_failing = False
    while True:
        await asyncio.sleep(state.config.keys_every_s)
        try:
            await loop.run_in_executor(state.disk, state.keys.follow)
        except Exception as error:
            if not is_failing:
                _log.warning(
                    "keys_not_readable",
                    error=str(error)[:300],
                    next="no key is accepted until the keys are repaired"
                    if isinstance(error, Corrupt)
                    else "the known keys stay valid",
                )
            is_failing = True
        else:
            if is_failing:
                _log.info("keys_readable_again")
            is_failing = False


# --- The head of a request ------------------------------------------------------------------------


def read_head(scope: Scope) -> dict[str, str]:
    """Return headers by name; Refused if the head is too large or a critical header is repeated."""
    path = scope["raw_path"]
    query = scope["query_string"]
    if len(path) > _MAX_PATH or len(query) > _MAX_QUERY:
        raise Refused(
            "too_large",
            f"the path has {len(path)} bytes and the query {len(query)}; at most {_MAX_PATH} and "
            f"{_MAX_QUERY} are allowed",
        )
    if query.count(b"&") >= _MAX_QUERY_FIELDS:
        raise Refused(
            "bad_query", f"the query has more than {_MAX_QUERY_FIELDS} fields; send fewer"
        )
    head: dict[str, str] = {}
    size_bytes = 0
    for raw_name, raw_value in scope["headers"]:
        size_bytes += len(raw_name) + len(raw_value) + 4
        name = raw_name.decode("latin-1")
        if name in head and name in _ONCE:
            # A proxy in front of the gateway might use the other value.
            raise Refused("bad_headers", f"the header {name} is repeated; send it once")
        head[name] = raw_value.decode("latin-1")
    if size_bytes > MAX_HEAD_BYTES or len(scope["headers"]) > MAX_HEADERS:
        # Checked here too: `server.py` does not count bytes of a head that arrives in one piece.
        raise Refused("head_too_large", HEAD_TOO_LARGE)
    return head


def check_host(host: str, hosts: Sequence[str]) -> None:
    """Reject a Host that this gateway does not serve, which prevents DNS rebinding."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit()
    if (name if colon and is_port else host).lower() not in (*_LOOPBACK, *hosts):
        raise Refused(
            "wrong_host",
            f"this gateway does not serve the host {host[:60]!r}; add it to gateway.hosts in "
            "the config",
        )


def own_origins(scheme: str, host: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the origins of this gateway's own pages for the host name `host`.

    For a configured host name, https is included: the gateway cannot detect a TLS proxy in front.
    """
    name = host.rpartition(":")[0] or host
    return (
        (f"{scheme}://{host}", f"https://{host}")
        if name.lower() in hosts
        else (f"{scheme}://{host}",)
    )


def cors(origin: str | None, keys: ApiKeys, *, is_preflight: bool) -> dict[str, str]:
    """Return the CORS headers for a page of this origin; none if no key allows the origin."""
    if origin is None or not keys.allows_origin(origin):
        if is_preflight:
            raise Refused(
                "wrong_origin",
                f"no key allows pages of {(origin or '')[:60]!r}; create one with 'understudy keys "
                "create --origin'",
            )
        return {}
    headers = {
        "access-control-allow-origin": origin,
        "vary": "origin",
        "access-control-expose-headers": "retry-after, x-understudy-number, x-understudy-model",
    }
    if is_preflight:
        headers |= {
            "access-control-allow-methods": "GET, POST, PUT",
            "access-control-allow-headers": "authorization, content-type, content-encoding",
            "access-control-max-age": "600",
        }
    return headers
