"""Bodies: read while they are small enough, quick enough, and while there is room for them."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from understudy.core.errors import Refused

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_INLINE_BYTES = 32 * 1024
"""What is packed larger is unpacked in a thread, so that nobody else waits for it."""


class Room:
    """How much memory the bodies of all requests may take together; for the event loop alone."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes

    @contextmanager
    def hold(self) -> Iterator["Held"]:
        """Room for one request, given back at its end."""
        held = Held(self)
        try:
            yield held
        finally:
            self.left_bytes += held.size_bytes


class Held:
    """What one request takes of the room."""

    def __init__(self, room: Room) -> None:
        self._room, self.size_bytes = room, 0

    def take(self, size_bytes: int) -> None:
        """Hold more; Refused when others hold too much, which a retry helps against."""
        if size_bytes > self._room.left_bytes:
            raise Refused("busy", "too many large requests at once; try again")
        self._room.left_bytes -= size_bytes
        self.size_bytes += size_bytes


def announced_bytes(headers: Mapping[str, str]) -> int:
    """What Content-Length says; 0 when it says nothing, as with chunked bodies."""
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise Refused("bad_headers", f"content-length is {text[:20]!r}")
    return int(text)


async def read_body(
    receive: Receive, headers: Mapping[str, str], *, max_bytes: int, timeout_s: float, held: Held
) -> bytes:
    """A request's body, unpacked; Refused when it is too large before or after, too slow, or not readable."""
    if (announced := announced_bytes(headers)) > max_bytes:
        raise Refused("too_large", f"{announced} bytes; at most {max_bytes} are taken here")
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(receive, max_bytes, held)
    except TimeoutError:
        raise Refused("too_slow", f"the body did not come within {timeout_s:.3g} s") from None
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return raw
    if encoding not in ("gzip", "deflate"):
        raise Refused("bad_encoding", f"content-encoding {encoding[:20]!r}; send gzip, deflate or none")
    if len(raw) <= _INLINE_BYTES:
        body = _inflated(raw, max_bytes)
    else:
        body = await asyncio.to_thread(_inflated, raw, max_bytes)
    held.take(len(body))
    return body


async def _read(receive: Receive, max_bytes: int, held: Held) -> bytes:
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("gone", "the client went away")
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise Refused("too_large", f"more than the {max_bytes} bytes that are taken here")
        held.take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _inflated(raw: bytes, max_bytes: int) -> bytes:
    machine = zlib.decompressobj(wbits=47)  # gzip or zlib, by its first bytes
    try:
        # One byte more than allowed, so that a larger body is seen without being unpacked.
        found = machine.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise Refused("bad_encoding", f"the packed body cannot be read: {error}") from None
    if len(found) > max_bytes:
        raise Refused("too_large", f"more than {max_bytes} bytes when unpacked")
    if not machine.eof or machine.unused_data:
        raise Refused("bad_encoding", "the packed body is cut off, or something follows it")
    return found
