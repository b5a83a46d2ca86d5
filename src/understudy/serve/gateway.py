"""The gateway: the one door for games, workers and pages; every request needs a key.

Host ─► Origin ─► key ─► route ─► the route's own checks (`api.py`) ─► endpoint
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from understudy.core.errors import ConfigError, Refused, UnderstudyError
from understudy.models.keys import Keys
from understudy.serve.api import Answer, ApiRoute, key_of, not_found, refusal
from understudy.serve.pages import PAGES, load_pages
from understudy.serve.routes import ROUTES
from understudy.serve.state import GatewayState
from understudy.serve.wire import MAX_HEAD_BYTES

_log = structlog.get_logger("understudy.gateway")
_MAX_PATH = 512
_MAX_QUERY = 1024
_MAX_QUERY_FIELDS = 20
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ONCE = {"host", "origin", "authorization", "content-length", "content-encoding", "content-type"}


class Gateway:
    """An ASGI application around Starlette's router; serves while it is `opened`."""

    def __init__(
        self, make_house: Callable[[], GatewayState], routes: Sequence[ApiRoute] = (*ROUTES, *PAGES)
    ) -> None:
        self._make_house = make_house
        self._house: GatewayState | None = None
        self._router = Router(routes, redirect_slashes=False, default=not_found)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open everything on the running event loop; at the end, append what waits and close it."""
        house, tasks = await self._open()
        self._house = house
        try:
            yield
        finally:
            self._house = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await house.close()

    async def _open(self) -> tuple[GatewayState, list[asyncio.Task[None]]]:
        loop = asyncio.get_running_loop()
        house = None
        try:
            house = self._make_house()
            await loop.run_in_executor(house.disk, house.keys.follow)
            await loop.run_in_executor(house.disk, load_pages)
        except Exception as error:
            if house is not None:
                await house.close()
            if isinstance(error, UnderstudyError):
                raise
            _log.error("gateway_not_started", error=repr(error)[:300])
            raise ConfigError("the gateway could not start; its log says why") from error
        house.appender.start()
        house.is_ready = True
        return house, [loop.create_task(house.bots.follow()), loop.create_task(follow_keys(house))]

    def drain(self) -> None:
        """Answer the requests that wait for news; those that come meanwhile are still served."""
        if self._house is not None:
            self._house.is_ready = False
            self._house.bots.stop_waiting()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: the checks of its head, then the router; whatever fails is
        answered."""
        began_s = time.perf_counter()
        house = self._house
        if house is None:
            stopped = refusal(Refused("not_ready", "the gateway is not running"))
            return await stopped(scope, receive, send)
        scope.update(house=house, key=None, route="none")
        allowed: dict[str, str] = {}
        is_answered = False

        async def answer(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                house.metrics.requests.labels(scope["route"], str(message["status"])).inc()
                house.metrics.seconds.labels(scope["route"]).observe(time.perf_counter() - began_s)
                for name, value in allowed.items():
                    message["headers"].append((name.encode(), value.encode("latin-1")))
            await send(message)

        try:
            head = scope["head"] = read_head(scope)
            host = head.get("host", "")
            check_host(host, house.config.hosts)
            origin = head.get("origin")
            is_preflight = scope["method"] == "OPTIONS" and origin is not None
            allowed = cors(origin, house.keys, is_preflight=is_preflight)
            if is_preflight:
                return await Answer(b"", 204)(scope, receive, answer)
            scope["own_origins"] = own_origins(scope["scheme"], host, house.config.hosts)
            scope["key"] = key_of(head, house.keys)
            # As it was sent: an encoded slash must not become part of the path.
            scope["path"] = scope["raw_path"].decode("latin-1")
            return await self._router(scope, receive, answer)
        except Exception as error:
            if is_answered:
                raise
            refused = refusal(error)
            if refused.status_code in (500, 503) and not isinstance(error, Refused):
                _log.error(
                    "request_failed",
                    route=scope["route"],
                    status=refused.status_code,
                    error=repr(error)[:300],
                )
            return await refused(scope, receive, answer)


async def follow_keys(house: GatewayState) -> None:
    """Keep the keys fresh; while they cannot be read the known ones stay in force, which is
    logged once."""
    loop = asyncio.get_running_loop()
    is_failing = False
    while True:
        await asyncio.sleep(house.config.keys_every_s)
        try:
            await loop.run_in_executor(house.disk, house.keys.follow)
        except Exception as error:
            if not is_failing:
                _log.warning(
                    "keys_not_readable",
                    error=str(error)[:300],
                    next="the keys known so far stay in force",
                )
            is_failing = True
        else:
            if is_failing:
                _log.info("keys_readable_again")
            is_failing = False


# --- The head of a request ------------------------------------------------------------------------


def read_head(scope: Scope) -> dict[str, str]:
    """Headers by name; Refused when the head is too large, or a header that decides something
    stands twice."""
    path = scope["raw_path"]
    query = scope["query_string"]
    if len(path) > _MAX_PATH or len(query) > _MAX_QUERY:
        raise Refused(
            "too_large", f"an address has at most {_MAX_PATH} letters, its query {_MAX_QUERY}"
        )
    if query.count(b"&") >= _MAX_QUERY_FIELDS:
        raise Refused("bad_query", f"a query has at most {_MAX_QUERY_FIELDS} fields")
    head: dict[str, str] = {}
    size_bytes = 0
    for raw_name, raw_value in scope["headers"]:
        size_bytes += len(raw_name) + len(raw_value) + 4
        name = raw_name.decode("latin-1")
        if name in head and name in _ONCE:
            # Whoever else reads this head might take the other one.
            raise Refused("bad_headers", f"{name} stands twice; send it once")
        head[name] = raw_value.decode("latin-1")
    if size_bytes > MAX_HEAD_BYTES:
        # A head that arrives in one piece is whole before the connection can count it.
        raise Refused("head_too_large", f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
    return head


def check_host(host: str, hosts: Sequence[str]) -> None:
    """A page that made its name point to this machine sends its own name, which is no name of
    ours."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit()
    if (name if colon and is_port else host).lower() not in (*_LOOPBACK, *hosts):
        raise Refused(
            "wrong_host", f"nobody here is called {host[:60]!r}; name it in the gateway's hosts"
        )


def own_origins(scheme: str, host: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Origins of the pages that this gateway itself serves under the name `host`.

    Under a name of its own it may stand behind something that speaks TLS for it, which it cannot
    see.
    """
    name = host.rpartition(":")[0] or host
    return (
        (f"{scheme}://{host}", f"https://{host}")
        if name.lower() in hosts
        else (f"{scheme}://{host}",)
    )


def cors(origin: str | None, keys: Keys, *, is_preflight: bool) -> dict[str, str]:
    """What tells a browser that a page of this origin may read the answer; nothing where no key
    names the origin."""
    if origin is None or not keys.knows_origin(origin):
        if is_preflight:
            raise Refused("wrong_origin", f"no key may be used by pages of {(origin or '')[:60]!r}")
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
