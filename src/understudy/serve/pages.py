"""The play page: a handful of files, read once when the gateway starts and served from memory to
anybody.

They hold no data: the page gets its key from the person who opens it, and asks the API like any
other game. What is not named in `FILES` is not served, so there is no path to play tricks with.
"""

import contextlib
import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog

from understudy.core.errors import Refused
from understudy.serve.api import Answer, ApiRoute, Call

FILES = {
    "/play": "play.html",
    "/static/play.css": "play.css",
    "/static/icon.svg": "icon.svg",
    "/static/play.js": "play.js",
    "/static/inputs.js": "inputs.js",
    "/static/panel.js": "panel.js",
    "/static/platform.js": "platform.js",
    "/static/consent.js": "consent.js",
    "/static/opponents.js": "opponents.js",
    "/static/match.js": "match.js",
    "/static/cartpole.js": "cartpole.js",
    "/static/rally.js": "rally.js",
    "/static/understudy.js": "understudy.js",
    "/static/offline.js": "offline.js",
}
"""Address to file."""

_KEEPER = "offline.js"
_NOTHING_KEPT = b'{"version": "", "pages": []}'
_log = structlog.get_logger("understudy.gateway")
_MEND = "install understudy again, or restore it in the checkout"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STATIC = Path(__file__).parent / "static"
_CLIENTS = Path(__file__).parents[3] / "clients" / "js"
"""In a checkout the client and the game lie here; a wheel has them beside the page."""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    # Asked for again every time, answered with 304 while it is the same: a new release is never
    # half old.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A file as it is served: plain, or packed for those who can unpack it."""

    kind: str
    raw: bytes
    packed: bytes
    serves: str = ""
    """The address for which a script that keeps pages may answer in the gateway's place."""

    def answer(self, headers: Mapping[str, str]) -> Answer:
        """The file, or that it has not changed since the reader got it."""
        is_packed = "gzip" in {
            part.partition(";")[0].strip() for part in headers.get("accept-encoding", "").split(",")
        }
        body = self.packed if is_packed else self.raw
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        sent = {**_HEADERS, "etag": etag, **({"content-encoding": "gzip"} if is_packed else {})}
        if self.serves:
            sent["service-worker-allowed"] = self.serves
        known = {
            tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")
        }
        if known & {etag, "*"}:
            return Answer(b"", 304, kind=self.kind, headers=sent)
        return Answer(body, kind=self.kind, headers=sent)


@cache
def load_pages() -> dict[str, Page]:
    """Every file by its name, from the disk the first time; those that are missing are left out."""
    found: dict[str, Page] = {}
    for name in FILES.values():
        raw = source_of(name)
        if raw is not None and name.endswith(".js"):
            raw = without_comments(raw.decode()).encode()
        if raw is not None:
            found[name] = _page(name, raw)
    if missing := sorted(set(FILES.values()) - found.keys()):
        # Games must be able to send their steps all the same.
        _log.warning("page_files_missing", files=missing, next=_MEND)
    if keeper := found.pop(_KEEPER, None):
        found[_KEEPER] = _page(_KEEPER, keeper.raw.replace(_NOTHING_KEPT, _kept(found), 1))
    return found


def _kept(pages: Mapping[str, Page]) -> bytes:
    """What a browser keeps of the page, under a name that changes with any byte of it."""
    whole = hashlib.sha256()
    for name in sorted(pages):
        whole.update(f"{name} {hashlib.sha256(pages[name].raw).hexdigest()}\n".encode())
    addresses = [address for address, name in FILES.items() if name in pages]
    return json.dumps({"version": whole.hexdigest()[:16], "pages": addresses}).encode()


def _page(name: str, raw: bytes) -> Page:
    return Page(
        _KINDS[Path(name).suffix],
        raw,
        gzip.compress(raw, mtime=0),
        "/play" if name == _KEEPER else "",
    )


def source_of(name: str) -> bytes | None:
    """A file as it was written, before it is made ready to travel; None when it is missing."""
    for folder in (_STATIC, _CLIENTS):
        with contextlib.suppress(OSError):
            return (folder / name).read_bytes()
    return None


def without_comments(script: str) -> str:
    """A script without the comments that fill whole lines, which stay as empty ones: a third
    less travels."""
    lines = []
    is_inside = False
    for line in script.splitlines():
        bare = line.strip()
        if is_inside:
            is_inside = "*/" not in bare
            keeps = False
        elif bare.startswith("/*"):
            is_inside = "*/" not in bare
            keeps = not is_inside and not bare.endswith("*/")  # such as a type before an expression
        else:
            keeps = not bare.startswith("//")
        lines.append(line if keeps else "")
    return "\n".join(lines) + "\n"


def _shows(name: str) -> Callable[[Call], Awaitable[Answer]]:
    async def show(call: Call) -> Answer:
        page = load_pages().get(name)
        if page is None:
            raise Refused("not_found", f"this installation lacks {name}; {_MEND}")
        return page.answer(call.head)

    show.__name__ = f"show_{name.replace('.', '_')}"
    return show


PAGES = tuple(
    ApiRoute(
        "GET", path, None, _shows(name), f"The play page: {name}", gives=_KINDS[Path(name).suffix]
    )
    for path, name in FILES.items()
)
"""Open to anybody, and no part of the API."""
