"""A call of the API: who asks for what, and how an answer or a refusal leaves."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from understudy.core.errors import InvalidName, Refused, StorageFull, UnderstudyError
from understudy.serve.house import House
from understudy.serve.keys import Key, Scope
from understudy.serve.wire import Failed, Failure

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Call:
    """One request that has passed every check of key, scope, game and size."""

    key: Key | None
    game: str
    path: Mapping[str, Any]
    query: Mapping[str, str]
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def read(self, kind: type[Any]) -> Any:
        """The body as that type; Refused when it is none."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Refused("bad_body", str(error)[:200]) from None

    def whole(self, name: str, default: int = 0) -> int:
        """A whole number from 0 in the query."""
        text = self.query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise Refused("bad_query", f"{name} is {text[:20]!r}; give a whole number from 0")
        return int(text)

    def seconds(self, name: str, *, most: float) -> float:
        """A time in the query, cut at the longest that is allowed."""
        text = self.query.get(name, "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e6:
            raise Refused("bad_query", f"{name} is {text[:20]!r}; give seconds from 0")
        return min(value, most)


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: a struct as JSON, or bytes of another kind."""

    content: Any
    status: int = 200
    kind: str = JSON
    headers: Mapping[str, str] | None = None

    def body(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else msgspec.json.encode(self.content)


Handler = Callable[[House, Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One line of the API: everything a caller, the guard, the OpenAPI document and the tests must know."""

    method: str
    path: str
    scope: Scope | None
    """What a key must allow; None: open, and then it shows no data."""
    handler: Handler
    summary: str
    takes: type[Any] | str | None = None
    """The body's type, or its media type."""
    gives: type[Any] | str | None = None
    max_bytes: int = 0
    waits: bool = False
    """Whether it takes `after` and `wait_s` in the query, and answers 204 when nothing newer came."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


# --- Refusals ---------------------------------------------------------------------------------------------------------

_STATUS = {
    "no_key": 401, "wrong_key": 401, "revoked_key": 401, "expired_key": 401,
    "wrong_scope": 403, "wrong_game": 403, "wrong_origin": 403, "wrong_host": 403,
    "not_found": 404, "not_registered": 404, "no_bot": 404, "not_allowed": 405, "too_slow": 408, "too_large": 413,
    "bad_encoding": 415, "too_many": 429, "head_too_large": 431, "not_ready": 503, "busy": 503,
}  # fmt: skip
"""Every reason that is not here is 400: the request itself is wrong."""


def refusal(error: Exception) -> Answer:
    """The answer that tells a client what went wrong, and nothing about our insides."""
    code, detail, status = _facts(error)
    headers = dict[str, str]()
    retry_after_s = getattr(error, "retry_after_s", 1.0 if status == 503 else None)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 405:
        headers["allow"] = getattr(error, "allow", "")
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(retry_after_s)))
    failure = Failure(code=code, detail=detail[:400], retry_after_s=retry_after_s)
    return Answer(Failed(error=failure), status, headers=headers)


def _facts(error: Exception) -> tuple[str, str, int]:
    match error:
        case Refused():
            return error.reason, error.detail, _STATUS.get(error.reason, 400)
        case InvalidName():
            return "bad_name", str(error), 400
        case UnderstudyError(blame="caller" | "sender"):
            return "bad_request", str(error), 400
        case UnderstudyError() | OSError():
            return "not_available", not_available(error), 503
        case _:
            return "internal", "something went wrong on our side; it is in the log", 500


def not_available(error: Exception) -> str:
    """What a client is told when a disk or a store fails: that it can come back, not where anything lies."""
    return "there is no room just now" if isinstance(error, StorageFull) else "the store does not answer just now"
