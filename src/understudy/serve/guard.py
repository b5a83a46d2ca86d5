"""The guard: who may pass, decided from a request's head alone."""

from collections.abc import Mapping, Sequence

from understudy.core.errors import Refused
from understudy.serve.call import Route
from understudy.serve.keys import Key, Keys
from understudy.serve.wire import MAX_HEAD_BYTES

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ONCE = {"host", "origin", "authorization", "content-length", "content-encoding", "content-type"}
NO_KEY = "this needs a key; send it as 'Authorization: Bearer KEY'"


def headers_of(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; Refused when one that decides something stands twice, since others might read the other one."""
    if sum(len(name) + len(value) + 4 for name, value in raw) > MAX_HEAD_BYTES:
        # A head that arrives in one piece is whole before the connection can count it.
        raise Refused("head_too_large", f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
    headers: dict[str, str] = {}
    for name, value in raw:
        text = name.decode("latin-1").lower()
        if text in headers and text in _ONCE:
            raise Refused("bad_headers", f"{text} stands twice; send it once")
        headers[text] = value.decode("latin-1")
    return headers


def check_host(host: str, hosts: Sequence[str]) -> None:
    """A page that made its name point to this machine sends its own name: nobody here is called that."""
    name, colon, port = host.rpartition(":")
    is_port = port.isascii() and port.isdigit()
    if (name if colon and is_port else host).lower() not in (*_LOOPBACK, *hosts):
        raise Refused("wrong_host", f"nobody here is called {host[:60]!r}; name it in the gateway's hosts")


def own_origins(scheme: str, host: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Origins of pages that this gateway itself shows to whoever calls it `host`.

    Under a name of its own it may stand behind something that speaks TLS for it, which it cannot see.
    """
    name = host.rpartition(":")[0] or host
    return (f"{scheme}://{host}", f"https://{host}") if name.lower() in hosts else (f"{scheme}://{host}",)


def key_of(headers: Mapping[str, str], keys: Keys) -> Key | None:
    """The caller's key; None when none was sent. A wrong one is refused everywhere, on open addresses too."""
    given = headers.get("authorization")
    if given is None:
        return None
    kind, _, text = given.partition(" ")
    return keys.check(text.strip() if kind.lower() == "bearer" else "-")


def check_key(key: Key | None, route: Route, origin: str | None, own_origins: Sequence[str]) -> None:
    """Refused unless this key opens this route to a page of this origin."""
    if route.scope is None:
        return
    if key is None:
        raise Refused("no_key", NO_KEY)
    if not key.may(route.scope):
        raise Refused("wrong_scope", f"key {key.id} has scopes {', '.join(key.scopes)}; this needs {route.scope}")
    if origin is not None and origin not in own_origins and origin not in key.origins:
        raise Refused("wrong_origin", f"key {key.id} may not be used by pages of {origin[:60]!r}")


def cors(origin: str | None, keys: Keys, *, is_preflight: bool) -> dict[str, str]:
    """What tells a browser that a page of this origin may read the answer; nothing where no key names the origin."""
    if origin is None or not keys.knows_origin(origin):
        if is_preflight:
            raise Refused("wrong_origin", f"no key may be used by pages of {(origin or '')[:60]!r}")
        return {}
    found = {
        "access-control-allow-origin": origin, "vary": "origin",
        "access-control-expose-headers": "retry-after, x-understudy-number, x-understudy-model",
    }  # fmt: skip
    return found if not is_preflight else found | {
        "access-control-allow-methods": "GET, POST, PUT",
        "access-control-allow-headers": "authorization, content-type, content-encoding",
        "access-control-max-age": "600",
    }  # fmt: skip
