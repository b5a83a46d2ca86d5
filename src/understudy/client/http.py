"""HttpLink: reaches a platform's gateway over two open connections, to send and to poll.

urllib3 is imported by the first request, in the thread that sends it.
"""

import contextlib
import logging  # noqa: F401, before `_LOADING`: a fork acquires locks in the reverse order
import math
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import understudy
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, LinkFailed, Refused
from understudy.core.location import is_loopback, without_secrets
from understudy.core.names import PlayerName
from understudy.experience.frame import CONTENT_TYPE, Frame, encode_frame_batch
from understudy.experience.game import GameSpec
from understudy.experience.ticket import MAX_TICKET_CHARS
from understudy.ports import Ack, DrawnTicket, LiveModels, TicketBatch

if TYPE_CHECKING:
    from understudy.client.connect import Address

TIMEOUT_S = 10.0
"""The timeout for connecting, and then for each read of a response."""
_MAX_RESPONSE_BYTES = 1024 * 1024
_TOO_LARGE = 413
_TEXTS = (
    "champion",
    "champion_release",
    "canary",
    "canary_release",
    "control_release",
    "noise",
)
_LOADING = threading.RLock()
"""Held during imports: if two threads import urllib3 at once, one may see half of it. A fork
waits for it, because the child could never finish an import that another thread has begun."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_LOADING.acquire,
        after_in_parent=_LOADING.release,
        after_in_child=_LOADING.release,
    )


class HttpLink:
    """Link over a gateway's HTTP API; thread-safe. A request that fails raises LinkFailed."""

    def __init__(
        self,
        destination: "Address",
        game: str,
        *,
        insecure: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.address, host, port, is_tls = parse_url(destination.url, insecure=insecure)
        self._path = urlsplit(self.address).path + f"/v1/games/{game}"
        # A poll waits for long on purpose and must not delay sending.
        self._sending, self._polling = (
            Connection(
                self.address, host, port, is_tls=is_tls, key=destination.key, timeout_s=timeout_s
            )
            for _ in range(2)
        )
        self.recording_rate = 1.0

    def register(self, spec: GameSpec) -> None:
        """Register a spec with the gateway; registering the same spec again is fine."""
        self._sending.request("PUT", self._path, spec.to_json(), kind="application/json")

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """Send one frame batch; an accepted frame is durable in the platform's stream."""
        body = encode_frame_batch(frames, players, skipped_steps)
        try:
            raw = self._sending.request("POST", f"{self._path}/frames", body, kind=CONTENT_TYPE)[1]
            response = _object(raw)
        except _TooLarge:
            if len(frames) < 2:
                raise
            # A proxy in front of the gateway accepts smaller bodies than the gateway does.
            half = len(frames) // 2
            return [
                *self.send(frames[:half], players, skipped_steps=skipped_steps),
                *self.send(frames[half:], players),
            ]
        rate = response.get("recording_rate")
        acks = response.get("acks")
        if not isinstance(rate, int | float) or not 0 <= rate <= 1 or not isinstance(acks, list):
            raise _unexpected(
                f"acks is {str(acks)[:40]} and not a list, or recording_rate is {str(rate)[:20]} "
                "and not a number from 0 to 1"
            )
        self.recording_rate = float(rate)
        try:
            return [
                Ack(
                    bool(ack["accepted"]),
                    ack["refused"],
                    float(ack["retry_after_s"]),
                    str(ack["error"]),
                )
                for ack in acks
            ]
        except (KeyError, TypeError, ValueError):
            raise _unexpected(f"an ack of {_printable(acks, 60)}") from None

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        """Return live models newer than `after`, by long poll; None if there are none in time."""
        path = f"{self._path}/bot?after={after}&wait_s={wait_s:g}"
        if schema is not None:
            path += f"&schema={schema}"
        status, body = self._polling.request("GET", path, wait_s=wait_s)
        if status == 204:
            return None
        response = _object(body)
        values = {
            field.name: response[field.name]
            for field in fields(LiveModels)
            if field.name in response
        }
        trust = values.get("trust", [])
        share = values.get("canary_share", 0.0)
        number = values.get("number")
        is_valid = (
            type(number) is int
            and number >= 0
            and isinstance(share, int | float)
            and 0 <= share <= 1
            and isinstance(trust, list)
            and all(isinstance(text, str) for text in trust)
            and all(values.get(name) is None or isinstance(values[name], str) for name in _TEXTS)
        )
        if not is_valid:
            raise _unexpected(f"invalid live models {_printable(response, 80)}")
        return LiveModels(**values | {"trust": tuple(trust), "canary_share": float(share)})

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        """Return the bots of the next `n` episodes, as the gateway drew them."""
        # Not over the connection that polls, which may wait for long.
        body = canonical_json({"schema": schema, "n": n, "control": with_control})
        path = f"{self._path}/tickets"
        response = _object(self._sending.request("POST", path, body, kind="application/json")[1])
        try:
            batch = TicketBatch(
                entry=response["entry"],
                models=tuple(response["models"]),
                valid_s=float(response["valid_s"]),
                tickets=tuple(
                    DrawnTicket(model_no=drawn["model_no"], ticket=drawn["ticket"])
                    for drawn in response["tickets"]
                ),
            )
            is_valid = (
                type(batch.entry) is int
                and isinstance(response["models"], list)
                and all(type(model_no) is int for model_no in batch.models)
                and isinstance(response["tickets"], list)
                and all(
                    type(drawn.model_no) is int
                    and isinstance(drawn.ticket, str)
                    and len(drawn.ticket) <= MAX_TICKET_CHARS
                    for drawn in batch.tickets
                )
            )
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise _unexpected(f"invalid tickets {_printable(response, 80)}")
        return batch

    def policy(self, model_no: int) -> bytes:
        """Return the bytes of a model's policy, not checked."""
        from understudy.models.manifest import MAX_POLICY_BYTES

        path = f"{self._path}/models/{model_no}/policy"
        return self._polling.request("GET", path, max_bytes=MAX_POLICY_BYTES)[1]

    def close(self) -> None:
        """Close both connections; a waiting request fails at once."""
        self._sending.close()
        self._polling.close()


class _TooLarge(LinkFailed):
    """The request's body was too large for the gateway, or for a proxy in front of it."""


class Connection:
    """One persistent connection, for one request at a time."""

    def __init__(
        self, address: str, host: str, port: int, *, is_tls: bool, key: str, timeout_s: float
    ) -> None:
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(
                "the key contains characters that keys do not have; copy it again as it was printed"
            )
        self._address = address
        self._host = host
        self._port = port
        self._is_tls = is_tls
        self._timeout_s = timeout_s
        self._headers = {
            "authorization": f"Bearer {key}",
            "accept-encoding": "identity",
            "user-agent": f"understudy/{understudy.__version__}",
        }
        self._lock = threading.Lock()
        self._connection: Any = None
        self._closed = threading.Event()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "",
        wait_s: float = 0.0,
        max_bytes: int = _MAX_RESPONSE_BYTES,
    ) -> tuple[int, bytes]:
        """Return status and body of a success; LinkFailed with the gateway's message otherwise."""
        with _LOADING:
            from http.client import HTTPException

            from urllib3.exceptions import HTTPError

        headers = self._headers | ({"content-type": kind} if kind else {})
        with self._lock:
            if self._closed.is_set():
                raise LinkFailed("closed", "the link was closed; connect again")
            try:
                connection = self._open(wait_s)
                connection.request(method, path, body=body, headers=headers, preload_content=False)
                response = connection.getresponse()
                raw = response.read(max_bytes + 1)
                length = response.headers.get("content-length")
                is_whole = length is None or response.status == 204 or length == str(len(raw))
                if len(raw) > max_bytes or not is_whole:
                    raise _unexpected(f"{len(raw)} bytes, incomplete or more than {max_bytes}")
            except (HTTPError, HTTPException, OSError, ValueError) as error:
                self._drop()
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                hint = _hint(reason, is_tls=self._is_tls)
                raise LinkFailed(
                    "unreachable", f"{self._address} did not respond ({reason}); {hint}"
                ) from None
            except BaseException:
                self._drop()
                raise
            finally:
                if self._closed.is_set():
                    self._drop()
        if response.status in (200, 204):
            return response.status, raw
        raise _failure(self._address, response.status, response.headers.get("retry-after"), raw)

    def _open(self, wait_s: float) -> Any:
        connection = self._connection
        if connection is not None and connection.sock is not None and not connection.is_connected:
            self._drop()  # the server has closed it meanwhile
            connection = None
        if connection is None:
            with _LOADING:
                import encodings.idna  # noqa: F401, otherwise imported by the first connection
                import ssl

                from urllib3.connection import HTTPConnection, HTTPSConnection

            if self._is_tls:
                connection = HTTPSConnection(
                    self._host, self._port, ssl_context=ssl.create_default_context()
                )
            else:
                connection = HTTPConnection(self._host, self._port)
            self._connection = connection
        connection.timeout = self._timeout_s + wait_s
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        return connection

    def _drop(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._closed.set()
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            # A request that waits in another thread fails with an error.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Otherwise that request drops the connection when it ends.
        if self._lock.acquire(timeout=0.1):
            self._drop()
            self._lock.release()


def parse_url(
    url: str, *, insecure: bool, how_insecure: str = "config=ClientConfig(insecure=True)"
) -> tuple[str, str, int, bool]:
    """Return address, host, port and whether it uses TLS; ConfigError if the URL is invalid."""
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        port = parts.port
        if port == 0:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"url={shown!r} is not a valid URL; use one such as https://HOST, with a port from 1 "
            "to 65535 if it has one"
        ) from None
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not is_plain
        or not url.isprintable()
    ):
        raise ConfigError(
            f"url={shown!r} is not a platform's URL; use https://HOST, or http://127.0.0.1:PORT, "
            "without a user, a password or a query"
        )
    is_tls = parts.scheme == "https"
    host = parts.hostname
    if not is_tls and not insecure and not is_loopback(host):
        raise ConfigError(
            f"url={shown!r} would send your key unencrypted; use https://, or connect with "
            f"{how_insecure} on a network you trust"
        )
    return url.rstrip("/"), host, port or (443 if is_tls else 80), is_tls


# --- Responses of a gateway -----------------------------------------------------------------------


def _hint(reason: str, *, is_tls: bool) -> str:
    """What to do about a failed connection."""
    if "certificate has expired" in reason:
        return "renew the platform's certificate"
    if is_tls and ("WRONG_VERSION_NUMBER" in reason or "record layer failure" in reason):
        return "the platform uses no TLS there: use http:// in the address"
    if not is_tls and "closed connection without response" in reason:
        return "check that the platform is running, and use https:// in the address if it uses TLS"
    return "check that the platform is running and that the address is right"


def _failure(address: str, status: int, retry_after: str | None, raw: bytes) -> LinkFailed:
    """Return the gateway's error; a response of a proxy in front of it has only a status."""
    code = f"status_{status}"
    detail = "the response is not from an understudy platform; check the address"
    wait_s = (
        float(retry_after)
        if retry_after and retry_after.isascii() and retry_after.isdigit()
        else 0.0
    )
    with contextlib.suppress(LinkFailed):
        error = _object(raw).get("error")
        if isinstance(error, dict):
            code = _printable(error.get("code"), 40)
            detail = _printable(error.get("detail"), 300)
            retry_after_s = error.get("retry_after_s")
            if isinstance(retry_after_s, int | float) and math.isfinite(retry_after_s):
                wait_s = float(retry_after_s)
    kind = _TooLarge if status == _TOO_LARGE else LinkFailed
    return kind(code, f"{detail} ({address} returned {status})", retry_after_s=max(wait_s, 0.0))


def _printable(text: Any, max_length: int) -> str:
    return "".join(char if char.isprintable() else " " for char in str(text)[:max_length])


def _object(raw: bytes) -> dict[str, Any]:
    try:
        response = strict_json(raw)
    except Refused:
        response = None
    if not isinstance(response, dict):
        raise _unexpected(_printable(raw[:40], 60))
    return response


def _unexpected(what: str) -> LinkFailed:
    return LinkFailed(
        "strange_answer",
        f"the platform sent a response that this version of understudy does not understand: {what}"
        "; check the address, and install the platform's version here",
    )
