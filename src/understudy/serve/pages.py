"""The play page: a few files, read once when the gateway starts and served from memory to anyone.

The files hold no data: the page gets its key from the address that a person opens, and uses the API
like any other game. Only files listed in `FILES` are served, so path traversal is not possible.
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
"""The file that is served at each path."""

_SERVICE_WORKER = "offline.js"
_EMPTY_CACHE = b'{"version": "", "pages": []}'
_log = structlog.get_logger("understudy.gateway")
_NEXT_STEP = "reinstall understudy, or restore the file in the checkout"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STATIC = Path(__file__).parent / "static"
_CLIENTS = Path(__file__).parents[3] / "clients" / "js"
"""The folder of understudy.js and rally.js in a checkout; in a wheel they are in `static`."""
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
    # Revalidated every time, with 304 if unchanged, so that files of two releases never mix.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A file as served: plain, or compressed for clients that accept gzip."""

    kind: str
    raw: bytes
    packed: bytes
    serves: str = ""
    """For a service worker, the path that it may control; otherwise empty."""

    def answer(self, headers: Mapping[str, str]) -> Answer:
        """Return the file, or 304 if the client has the current version."""
        is_packed = "gzip" in {
            part.partition(";")[0].strip() for part in headers.get("accept-encoding", "").split(",")
        }
        body = self.packed if is_packed else self.raw
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        sent = {**_HEADERS, "etag": etag, **({"content-encoding": "gzip"} if is_packed else {})}
        if self.serves:
            sent["service-worker-allowed"] = self.serves
        client_etags = {
            tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")
        }
        if client_etags & {etag, "*"}:
            return Answer(b"", 304, kind=self.kind, headers=sent)
        return Answer(body, kind=self.kind, headers=sent)


@cache
def load_pages() -> dict[str, Page]:
    """Return every page by file name, read from disk the first time; missing files are left out."""
    pages: dict[str, Page] = {}
    for name in FILES.values():
        raw = source_of(name)
        if raw is not None and name.endswith(".js"):
            raw = without_comments(raw.decode()).encode()
        if raw is not None:
            pages[name] = _page(name, raw)
    if missing := sorted(set(FILES.values()) - pages.keys()):
        # Not an error, since games must be able to send their steps anyway.
        _log.warning("page_files_missing", files=missing, next=_NEXT_STEP)
    if worker := pages.pop(_SERVICE_WORKER, None):
        raw = worker.raw.replace(_EMPTY_CACHE, _cached(pages), 1)
        pages[_SERVICE_WORKER] = _page(_SERVICE_WORKER, raw)
    return pages


def _cached(pages: Mapping[str, Page]) -> bytes:
    """Return the pages that a browser caches, as JSON, with a hash of all of them as version."""
    digest = hashlib.sha256()
    for name in sorted(pages):
        digest.update(f"{name} {hashlib.sha256(pages[name].raw).hexdigest()}\n".encode())
    addresses = [address for address, name in FILES.items() if name in pages]
    return json.dumps({"version": digest.hexdigest()[:16], "pages": addresses}).encode()


def _page(name: str, raw: bytes) -> Page:
    return Page(
        _KINDS[Path(name).suffix],
        raw,
        gzip.compress(raw, mtime=0),
        "/play" if name == _SERVICE_WORKER else "",
    )


def source_of(name: str) -> bytes | None:
    """Return a file as written, before comments are removed; None if it is missing."""
    for folder in (_STATIC, _CLIENTS):
        with contextlib.suppress(OSError):
            return (folder / name).read_bytes()
    return None


def without_comments(script: str) -> str:
    """Replace comments that fill whole lines by empty lines, which saves a third of the bytes."""
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
            raise Refused("not_found", f"this installation lacks {name}; {_NEXT_STEP}")
        return page.answer(call.head)

    show.__name__ = f"show_{name.replace('.', '_')}"
    return show


PAGES = tuple(
    ApiRoute(
        "GET", path, None, _shows(name), f"The play page: {name}", gives=_KINDS[Path(name).suffix]
    )
    for path, name in FILES.items()
)
"""The routes of the play page; they need no key and are not part of the API."""
