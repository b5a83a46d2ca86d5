"""The gateway: the one door for games, workers and pages. Nobody passes without a key.

Host ─► Origin ─► key ─► route ─► scope ─► game ─► rate ─► body (bounded as it streams) ─► handler
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

import structlog
from starlette.routing import compile_path

from understudy.core.errors import Refused, UnderstudyError
from understudy.core.names import game_name
from understudy.serve.bodies import Receive, announced_bytes, read_body
from understudy.serve.call import Answer, Call, Route, refusal
from understudy.serve.guard import NO_KEY, check_host, check_key, cors, headers_of, key_of, own_origins
from understudy.serve.house import House
from understudy.serve.keys import Key
from understudy.serve.pages import PAGES, load_pages
from understudy.serve.routes import ROUTES

_log = structlog.get_logger("understudy.gateway")
_MAX_PATH, _MAX_QUERY = 512, 1024
_PART_BYTES = 256 * 1024

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request whose head was read and whose body was not."""

    method: str
    path: str
    """As it was sent: an encoded slash must not become part of the path."""
    query: str
    headers: Mapping[str, str]
    own_origins: tuple[str, ...]
    receive: Receive


class Gateway:
    """An ASGI application; `make_house` is called on the event loop when it starts."""

    def __init__(self, make_house: Callable[[], House], routes: tuple[Route, ...] = (*ROUTES, *PAGES)) -> None:
        self._make_house = make_house
        self._house: House | None = None
        self._routes = [(route, *compile_path(route.path)) for route in routes]
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: Exception | None = None
        """Why it could not start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    # --- Starting and stopping --------------------------------------------------------------------------------------

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            if not isinstance(error, UnderstudyError):  # those are told by whoever runs it
                _log.error("gateway_not_started", error=repr(error)[:300])
            self.failure = error
            await self.stop()
            await send({"type": "lifespan.startup.failed"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Open everything; ready when the keys are known."""
        house = self._house = self._make_house()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(house.disk, house.keys.follow)
        await loop.run_in_executor(house.disk, load_pages)
        house.appender.start()
        self._tasks = [loop.create_task(house.bots.follow()), loop.create_task(_follow_keys(house))]
        house.is_ready = True

    def drain(self) -> None:
        """Say that it stops, and answer whoever waits for news; requests that come meanwhile are still served."""
        if self._house is not None:
            self._house.is_ready = False
            self._house.bots.stop_waiting()

    async def stop(self) -> None:
        """Append what waits, close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        house, self._house = self._house, None
        if house is not None:
            await house.close()

    # --- One request ------------------------------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        house, began_s = self._house, time.perf_counter()
        if house is None:
            return await _reply(send, refusal(Refused("not_ready", "the gateway is not running")), {})
        named, allowed = "none", dict[str, str]()
        try:
            headers = headers_of(scope["headers"])
            check_host(headers.get("host", ""), house.config.hosts)
            origin, is_options = headers.get("origin"), scope["method"] == "OPTIONS"
            allowed = cors(origin, house.keys, is_preflight=is_options and origin is not None)
            if is_options and origin is not None:
                answer = Answer(b"", 204)
            else:
                asked = _asked(scope, headers, receive, house.config.hosts)
                key = key_of(headers, house.keys)
                route, path = self._route(asked, is_known=key is not None)
                named = route.name
                check_key(key, route, origin, asked.own_origins)
                answer = await _answer(house, asked, route, key, path)
                if route.waits:
                    key_of(headers, house.keys)  # it may have been revoked meanwhile
        except Exception as error:
            answer = refusal(error)
            if answer.status in (500, 503) and not isinstance(error, Refused):
                _log.error("request_failed", route=named, status=answer.status, error=repr(error)[:300])
        house.metrics.requests.labels(named, str(answer.status)).inc()
        house.metrics.seconds.labels(named).observe(time.perf_counter() - began_s)
        return await _reply(send, answer, allowed)

    def _route(self, asked: _Asked, *, is_known: bool) -> tuple[Route, Mapping[str, Any]]:
        """What an address means; strangers do not learn which addresses exist."""
        method, methods = "GET" if asked.method == "HEAD" else asked.method, []
        for route, pattern, _, convertors in self._routes:
            found = pattern.match(asked.path)
            if found and route.method == method:
                return route, {
                    name: convertors[name].convert(text) if name == "model_no" else unquote(text)
                    for name, text in found.groupdict().items()
                }
            methods += [route.method] if found else []
        if not is_known:
            raise Refused("no_key", NO_KEY)
        if methods:
            raise _NotAllowed(asked.method, methods)
        raise Refused("not_found", "there is nothing at this address; see /v1/openapi.json")


class _NotAllowed(Refused):
    """A method that an address does not take, and those it takes."""

    def __init__(self, method: str, methods: list[str]) -> None:
        self.allow = ", ".join(methods)
        super().__init__("not_allowed", f"{method[:20]} is not for this address; it takes {self.allow}")


class _TooMany(Refused):
    """A key that asks too often, and when it may come back."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("too_many", f"this key asks too often or sends too much; come back in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


def _asked(scope: Scope, headers: Mapping[str, str], receive: Receive, hosts: Sequence[str]) -> _Asked:
    path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
    if len(path) > _MAX_PATH or len(query) > _MAX_QUERY:
        raise Refused("too_large", f"an address has at most {_MAX_PATH} letters, its query {_MAX_QUERY}")
    own = own_origins(scope.get("scheme", "http"), headers.get("host", ""), hosts)
    return _Asked(scope["method"], path.decode("latin-1"), query.decode("latin-1"), headers, own, receive)


async def _answer(house: House, asked: _Asked, route: Route, key: Key | None, path: Mapping[str, Any]) -> Answer:
    game = str(game_name(path["game"])) if "game" in path else ""
    announced = announced_bytes(asked.headers)
    if key is not None:
        if game and not key.is_for(game):
            raise Refused("wrong_game", f"key {key.id} is for {key.game} only")
        # What is too large is refused before a byte of it is read, so it costs the key a request and no bytes.
        wait_s = house.limits.take(key, announced if announced <= route.max_bytes else 0)
        if wait_s > 0:
            raise _TooMany(wait_s)
    with house.room.hold() as held:
        body = await read_body(
            asked.receive, asked.headers, max_bytes=route.max_bytes, timeout_s=house.config.body_timeout_s, held=held
        )
        if key is not None:
            # A chunked body announces nothing, a packed one less than it is.
            house.limits.owe(key, len(body) - announced)
            key_of(asked.headers, house.keys)  # a body may take so long that the key was revoked meanwhile
        return await route.handler(house, Call(key, game, path, _query(asked.query), body, asked.headers))


def _query(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, max_num_fields=20))
    except ValueError:
        raise Refused("bad_query", "a query has at most 20 fields") from None


async def _follow_keys(house: House) -> None:
    """Keep the keys fresh; while they cannot be read the old ones stay in force, which is told once, as is its end."""
    loop, is_failing = asyncio.get_running_loop(), False
    while True:
        await asyncio.sleep(house.config.keys_every_s)
        try:
            await loop.run_in_executor(house.disk, house.keys.follow)
        except Exception as error:
            if not is_failing:
                _log.warning("keys_not_readable", error=str(error)[:300], next="the keys known so far stay in force")
            is_failing = True
        else:
            if is_failing:
                _log.info("keys_readable_again")
            is_failing = False


async def _reply(send: Send, answer: Answer, cors_headers: Mapping[str, str]) -> None:
    body = answer.body()
    headers = {
        "content-type": answer.kind, "content-length": str(len(body)), "x-content-type-options": "nosniff",
        "cache-control": "no-store", **(answer.headers or {}), **cors_headers,
    }  # fmt: skip
    if answer.status in (204, 304):
        del headers["content-type"], headers["content-length"]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    # In parts, so that whoever does not read holds up a part, not the whole.
    last = max(0, (len(body) - 1) // _PART_BYTES * _PART_BYTES)
    for at in range(0, last, _PART_BYTES):
        await send({"type": "http.response.body", "body": body[at : at + _PART_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})
