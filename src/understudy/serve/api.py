"""Building blocks of the API, on Starlette: calls, routes with their checks, answers, errors.

key ─► scope ─► Origin ─► game ─► rate ─► body (bounded as it streams) ─► endpoint
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from understudy.core.errors import InvalidName, Refused, StorageFull, UnderstudyError
from understudy.core.names import game_name
from understudy.core.wording import shortened
from understudy.models import keys
from understudy.models.keys import NO_KEY, Key
from understudy.serve.state import GatewayState, HeldMemory, Limits, MemoryBudget
from understudy.serve.wire import Failed, Failure, read_json

JSON = "application/json"
_PART_BYTES = 64 * 1024
_INLINE_BYTES = 32 * 1024
"""Bytes, compressed or not, that are decompressed on the event loop; beyond, in a thread."""
_STEP_BYTES = 256 * 1024
"""Bytes, compressed or not, that are decompressed at a time, once they are reserved and charged."""


class ApiKeys(Protocol):
    """The keys of an API."""

    def check(self, text: str | None) -> Key:
        """Return the key with this text; Refused if there is no such valid key."""
        ...

    def allows_origin(self, origin: str) -> bool:
        """Whether some key allows pages of this origin."""
        ...


class ApiConfig(Protocol):
    """The settings of an API that concern every request."""

    @property
    def hosts(self) -> Sequence[str] | None:
        """Host names that are served besides loopback; None: any."""
        ...

    @property
    def body_timeout_s(self) -> float: ...


class ApiMetrics(Protocol):
    """The metrics of every request."""

    @property
    def requests(self) -> Any: ...
    @property
    def seconds(self) -> Any: ...


class ApiState(Protocol):
    """What serving any request needs; a GatewayState has it."""

    @property
    def config(self) -> ApiConfig: ...
    @property
    def keys(self) -> ApiKeys: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def memory_budget(self) -> MemoryBudget: ...
    @property
    def metrics(self) -> ApiMetrics: ...


def key_of(head: Mapping[str, str], keys: ApiKeys) -> Key | None:
    """Return the caller's key; None if none was sent, Refused if it is invalid, on any route."""
    authorization = head.get("authorization")
    if authorization is None:
        return None
    kind, _, text = authorization.partition(" ")
    return keys.check(text.strip() if kind.lower() == "bearer" else "-")


class Call(Request):
    """A request; the endpoint gets it after all checks of key, scope, game and size."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.gateway_state: GatewayState = scope["gateway_state"]
        """In the API of another server, only what `api_state` has."""
        self.api_state: ApiState = scope["gateway_state"]
        self.head: dict[str, str] = scope["head"]
        """Headers by name; a lookup costs a tenth of Starlette's."""
        self.key: Key | None = scope["key"]
        self.address: str = scope.get("address", "")
        """The client's address, by which connections and memory are counted."""
        self.game = ""
        self.content = b""
        """The complete body, decompressed."""

    def announced_bytes(self) -> int:
        """Return Content-Length; 0 without one, as for chunked bodies."""
        text = self.head.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise Refused(
                "bad_headers", f"content-length is {text[:20]!r}; expected a number of bytes"
            )
        return int(text)

    def read(self, kind: type[Any]) -> Any:
        """Decode the body as that type; Refused if it is invalid."""
        return read_json(self.content, kind)

    def integer(self, name: str) -> int:
        """Return a non-negative integer from the query; 0 if it is missing."""
        text = self.query_params.get(name, "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise Refused("bad_query", f"{name} is {text[:20]!r}; pass an integer of at least 0")
        return int(text)

    def seconds(self, name: str, *, most: float) -> float:
        """Return a time from the query, limited to `most`; 0 if it is missing."""
        text = self.query_params.get(name, "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e6:
            raise Refused("bad_query", f"{name} is {text[:20]!r}; pass seconds, at least 0")
        return min(value, most)


class Answer(Response):
    """A struct as JSON, or bytes of another media type; not cacheable unless its headers say so."""

    def __init__(
        self,
        content: Any,
        status: int = 200,
        *,
        kind: str = JSON,
        headers: Mapping[str, str] | None = None,
        own_bytes: int = 0,
    ) -> None:
        """`own_bytes` is the size of content that no other answer shares, if it may be large."""
        self.own_bytes = own_bytes
        always = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        media_type = None if status in (204, 304) else kind
        super().__init__(content, status, always | dict(headers or {}), media_type)

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        # Sent in parts, so that at most one part is buffered for a client that does not read.
        last = max(0, (len(self.body) - 1) // _PART_BYTES * _PART_BYTES)
        for at in range(0, last, _PART_BYTES):
            part = self.body[at : at + _PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": self.body[last:]})


class ApiRoute(Route):
    """A route of the API, with what its checks, the OpenAPI document and the tests need."""

    def __init__(
        self,
        method: str,
        path: str,
        scope: keys.Scope | None,
        endpoint: Callable[[Call], Awaitable[Answer]],
        summary: str,
        *,
        takes: type[Any] | str | None = None,
        gives: type[Any] | str | None = None,
        max_bytes: int = 0,
        waits: bool = False,
        has_schema: bool = False,
    ) -> None:
        super().__init__(path, endpoint, methods=[method], name=f"{method} {path}")
        self.method = method
        self.scope = scope
        """The scope that a key needs; None: no key is needed, and the answer holds no data."""
        self.summary = summary
        self.takes = takes
        """The body's type, or its media type."""
        self.gives = gives
        self.max_bytes = max_bytes
        self.waits = waits
        """Whether the route accepts `after` and `wait_s`, and returns 204 if nothing is newer."""
        self.has_schema = has_schema
        """Whether the route accepts `schema`; by default the newest with a champion."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the call against this route, read its body, and answer it."""
        scope["route"] = "none"  # Starlette put this object there, which is no label for metrics
        if self.methods is not None and scope["method"] not in self.methods:
            raise _not_allowed(scope)
        scope["route"] = self.name
        call = Call(scope, receive)
        self._check(call)
        answer = await self._answer(call)
        if self.waits:
            key_of(call.head, call.api_state.keys)  # the key may have been revoked meanwhile
        if answer.own_bytes:
            await self._send_own(call, answer, send)
        else:
            await answer(scope, receive, send)

    async def _send_own(self, call: Call, answer: Answer, send: Send) -> None:
        with call.api_state.memory_budget.hold(call.key, call.address) as held:
            held.take(answer.own_bytes)
            held.evict = call.scope["connection"].abort
            await answer(call.scope, call.receive, send)

    def _check(self, call: Call) -> None:
        if self.scope is not None:
            key = call.key
            if key is None:
                raise Refused("no_key", NO_KEY)
            if not key.may(self.scope):
                has = ", ".join(key.scopes)
                raise Refused(
                    "wrong_scope",
                    f"key {key.id} has scopes {has}; use a key with scope {self.scope}",
                )
            origin = call.head.get("origin")
            if origin is not None and origin not in (*call.scope["own_origins"], *key.origins):
                raise Refused(
                    "wrong_origin",
                    f"key {key.id} does not allow pages of {origin[:60]!r}; create one with "
                    "'understudy keys create --origin'",
                )
        if "game" in call.path_params:
            call.game = str(game_name(unquote(call.path_params["game"])))
            if call.key is not None and not call.key.is_for(call.game):
                raise Refused(
                    "wrong_game",
                    f"key {call.key.id} is for {call.key.game} only; use one for {call.game}",
                )

    async def _answer(self, call: Call) -> Answer:
        state = call.api_state
        if call.key is not None:
            # Its bytes are charged as they arrive: the key's other players must not wait for bytes
            # that were only announced.
            wait_s = state.limits.take(call.key, 0)
            if wait_s > 0:
                raise _too_many(wait_s)
        with state.memory_budget.hold(call.key, call.address) as held:
            call.content = await read_body(
                call, max_bytes=self.max_bytes, timeout_s=state.config.body_timeout_s, held=held
            )
            if call.key is not None:
                # The key may have been revoked while a slow body arrived.
                key_of(call.head, state.keys)
            answer: Answer = await self.endpoint(call)
            call.content = b""  # released before the answer waits for its reader
            return answer


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Reject a path without a route; without a key, callers do not learn which paths exist."""
    if scope["key"] is None:
        raise Refused("no_key", NO_KEY)
    raise Refused(
        "not_found", "this path does not exist; those of the gateway are in /v1/openapi.json"
    )


def _not_allowed(scope: Scope) -> Refused:
    if scope["key"] is None:
        return Refused("no_key", NO_KEY)
    routes: list[ApiRoute] = scope["router"].routes
    allow = ", ".join(route.method for route in routes if route.matches(scope)[0] is not Match.NONE)
    what = f"{scope['method'][:20]} is not allowed for this path; use {allow}"
    return Denied("not_allowed", what, allow=allow)


# --- Bodies ---------------------------------------------------------------------------------------


async def read_body(call: Call, *, max_bytes: int, timeout_s: float, held: HeldMemory) -> bytes:
    """Return a request's body, decompressed; Refused if it is too large, too slow or unreadable.

    The size limit applies before and after decompression. Memory is reserved, and the key charged,
    for every part before the next is read.
    """
    announced = call.announced_bytes()
    if "upgrade" in call.head and (announced or "transfer-encoding" in call.head):
        # The parser takes what follows for another protocol, so the body is lost.
        raise Refused(
            "bad_headers",
            "a request with a body asks to upgrade the connection; send it as plain HTTP/1.1 (with "
            "Java's HttpClient: version(HttpClient.Version.HTTP_1_1))",
        )
    if announced > max_bytes:
        raise Refused(
            "too_large", f"the body has {announced} bytes; at most {max_bytes} are allowed"
        )
    parts = []
    size_bytes = 0
    message: Message = {"more_body": True}
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            held.evict = lambda: None if timeout.expired() else timeout.reschedule(0)
            while message.get("more_body", False):
                message = await call.receive()
                if message["type"] == "http.disconnect":
                    raise Refused("gone", "the client disconnected")
                part = message.get("body", b"")
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    raise Refused(
                        "too_large", f"the body has more than the {max_bytes} bytes allowed"
                    )
                held.take(len(part))
                _charge(call, len(part))
                parts.append(part)
    except TimeoutError:
        if held.is_evicted:
            raise Refused(
                "busy",
                "the memory for bodies is full, and this one was still arriving; send it again",
            ) from None
        raise Refused("too_slow", f"the body did not arrive within {timeout_s:.3g} s") from None
    finally:
        held.evict = None
    raw = b"".join(parts)
    parts.clear()
    encoding = call.head.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return raw
    if encoding not in ("gzip", "deflate"):
        raise Refused(
            "bad_encoding",
            f"content-encoding is {encoding[:20]!r}; use gzip or deflate, or omit the header",
        )
    return await _decompressed(call, raw, max_bytes=max_bytes, held=held)


async def _decompressed(call: Call, raw: bytes, *, max_bytes: int, held: HeldMemory) -> bytes:
    """Return the decompressed body; Refused if it is too large or invalid.

    It may be a thousand times as large as `raw`, so memory is reserved, and the key charged, before
    each step; what the last step did not need is returned. A body is charged by the larger of its
    two sizes.
    """
    decompressor = zlib.decompressobj(wbits=47)  # gzip or zlib, by its first bytes
    most_bytes = _INLINE_BYTES if len(raw) <= _INLINE_BYTES else _STEP_BYTES
    parts = []
    size_bytes = 0
    charged_bytes = len(raw)
    at = 0
    while not decompressor.eof:
        packed = decompressor.unconsumed_tail
        if not packed:
            packed = raw[at : at + most_bytes]
            at += len(packed)
        # One byte more than allowed detects a larger body without decompressing all of it.
        wanted_bytes = min(most_bytes, max_bytes + 1 - size_bytes)
        held.take(wanted_bytes)
        uncharged_bytes = max(0, size_bytes + wanted_bytes - charged_bytes)
        _charge(call, uncharged_bytes)
        charged_bytes += uncharged_bytes
        try:
            if most_bytes == _INLINE_BYTES:
                part = decompressor.decompress(packed, wanted_bytes)
            else:
                part = await asyncio.to_thread(decompressor.decompress, packed, wanted_bytes)
        except zlib.error as error:
            raise Refused("bad_encoding", f"the compressed body is invalid: {error}") from None
        held.take(len(part) - wanted_bytes)
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise Refused("too_large", f"the decompressed body has more than {max_bytes} bytes")
        if not packed and not part:
            raise Refused("bad_encoding", "the compressed body is truncated")
        parts.append(part)
        most_bytes = _STEP_BYTES
    if decompressor.unused_data or at < len(raw):
        raise Refused("bad_encoding", "the compressed body has trailing data")
    _charge(call, max(size_bytes, len(raw)) - charged_bytes)
    return b"".join(parts)


def _charge(call: Call, size_bytes: int) -> None:
    if call.key is not None:
        wait_s = call.api_state.limits.owe(call.key, size_bytes)
        if wait_s > 0:
            raise _too_many(wait_s)


def _too_many(wait_s: float) -> Refused:
    what = "this key exceeds its limit of requests or bytes"
    return Denied("too_many", f"{what}; retry in {wait_s:.2f} s", retry_after_s=wait_s)


# --- Errors ---------------------------------------------------------------------------------------

STATUS = {
    "no_key": 401,
    "wrong_key": 401,
    "revoked_key": 401,
    "expired_key": 401,
    "wrong_scope": 403,
    "wrong_game": 403,
    "wrong_origin": 403,
    "wrong_host": 403,
    "not_found": 404,
    "not_registered": 404,
    "no_bot": 404,
    "not_allowed": 405,
    "too_slow": 408,
    "too_large": 413,
    "bad_encoding": 415,
    "too_many": 429,
    "head_too_large": 431,
    "keys_damaged": 503,
    "not_ready": 503,
    "busy": 503,
}
"""HTTP status by the reason of a Refused; all other reasons are 400, an invalid request."""


class Denied(Refused):
    """A Refused whose answer states when to retry, or which methods a path allows."""

    def __init__(
        self, reason: str, detail: str, *, retry_after_s: float | None = None, allow: str = ""
    ) -> None:
        super().__init__(reason, detail, retry_after_s=retry_after_s)
        self.allow = allow


def error_answer(error: Exception, statuses: Mapping[str, int] = STATUS) -> Answer:
    """Return the answer for an error, without internal details."""
    match error:
        case Refused():
            code = error.reason
            detail = error.detail
            status = statuses.get(error.reason, 400)
        case InvalidName():
            code = "bad_name"
            detail = str(error)
            status = 400
        case UnderstudyError(blame="caller" | "sender"):
            code = "bad_request"
            detail = str(error)
            status = 400
        case StorageFull():
            code = "not_available"
            detail = "the storage is full at the moment"
            status = 503
        case MemoryError():
            code = "busy"
            detail = "the gateway has no memory left at the moment; try again"
            status = 503
        case UnderstudyError() | OSError():
            # The client learns that it can retry, but nothing about the storage.
            code = "not_available"
            detail = "the storage is not available at the moment"
            status = 503
        case _:
            code = "internal"
            status = 500
            detail = "internal error; the gateway's log has the details"
    headers = dict[str, str]()
    retry_after_s = error.retry_after_s if isinstance(error, Denied) else None
    if status == 503:
        retry_after_s = 1.0
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Denied) and error.allow:
        headers["allow"] = error.allow
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(retry_after_s)))
    failure = Failure(code=code, detail=shortened(detail, 400), retry_after_s=retry_after_s)
    return Answer(Failed(error=failure), status, headers=headers)
