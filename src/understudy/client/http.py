"""HttpLink: the way to a platform's gateway, over one kept connection for sending and one for
asking.

urllib3 is loaded by the first request, in the thread that makes it.
"""

import contextlib
import math
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import understudy
from understudy.core.canonical import strict_json
from understudy.core.errors import ConfigError, LinkFailed, Refused
from understudy.core.location import is_loopback
from understudy.core.names import PlayerName
from understudy.experience.frame import CONTENT_TYPE, Frame, encode_frame_batch
from understudy.experience.game import GameSpec
from understudy.ports import Ack, LiveModels

if TYPE_CHECKING:
    from understudy.client.connect import Address

TIMEOUT_S = 10.0
"""How long connecting, and then each part of an answer, may take."""
_MAX_ANSWER_BYTES = 1024 * 1024
_TOO_LARGE = 413
_TEXTS = ("champion", "champion_release", "canary", "canary_release")
_LOADING = threading.Lock()
"""The sender and the bots begin together: two threads that load urllib3 at once may each find
half of it."""


class HttpLink:
    """Link over a gateway's HTTP API; thread-safe. Whatever goes wrong with a whole request is a
    LinkFailed."""

    def __init__(
        self, place: "Address", game: str, *, insecure: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.address, host, port, is_tls = _parts(place.url, insecure=insecure)
        if not (place.key.isascii() and place.key.isprintable() and " " not in place.key):
            raise ConfigError(
                "the key holds letters that no key has; copy it again, as `understudy up` printed "
                "it"
            )
        self._path = urlsplit(self.address).path + f"/v1/games/{game}"
        # Asking waits for long on purpose, and must not hold up what is sent.
        self._sending, self._asking = (
            _Line(self.address, host, port, is_tls=is_tls, key=place.key, timeout_s=timeout_s)
            for _ in range(2)
        )
        self.recording_rate = 1.0

    def register(self, spec: GameSpec) -> None:
        """Tell the gateway of a spec; it answers alike when it knows it."""
        self._sending.ask("PUT", self._path, spec.to_json(), kind="application/json")

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """One parcel; accepted means durable in the platform's stream."""
        body = encode_frame_batch(frames, players, skipped_steps)
        try:
            found = _object(
                self._sending.ask("POST", f"{self._path}/frames", body, kind=CONTENT_TYPE)[1]
            )
        except _TooLarge:
            if len(frames) < 2:
                raise
            # Something on the way takes less at once than a gateway does.
            half = len(frames) // 2
            return [
                *self.send(frames[:half], players, skipped_steps=skipped_steps),
                *self.send(frames[half:], players),
            ]
        share = found.get("recording_rate")
        acks = found.get("acks")
        if not isinstance(share, int | float) or not 0 <= share <= 1 or not isinstance(acks, list):
            raise _strange(f"acks {str(acks)[:40]} and keep_share {str(share)[:20]}")
        self.recording_rate = float(share)
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
            raise _strange(f"an ack of {_words(acks, 60)}") from None

    def bot(self, after: int, *, wait_s: float) -> LiveModels | None:
        """Who plays, by long poll."""
        path = f"{self._path}/bot?after={after}&wait_s={wait_s:g}"
        status, body = self._asking.ask("GET", path, wait_s=wait_s)
        if status == 204:
            return None
        found = _object(body)
        known = {
            field.name: found[field.name] for field in fields(LiveModels) if field.name in found
        }
        trust = known.get("trust", [])
        share = known.get("canary_share", 0.0)
        number = known.get("number")
        is_fine = (
            type(number) is int
            and number >= 0
            and isinstance(share, int | float)
            and 0 <= share <= 1
            and isinstance(trust, list)
            and all(isinstance(text, str) for text in trust)
            and all(known.get(name) is None or isinstance(known[name], str) for name in _TEXTS)
        )
        if not is_fine:
            raise _strange(f"a bot {_words(found, 80)}")
        return LiveModels(**known | {"trust": tuple(trust), "canary_share": float(share)})

    def policy(self, model_no: int) -> bytes:
        """A model's policy as the gateway has it, not checked."""
        from understudy.models.manifest import MAX_POLICY_BYTES

        return self._asking.ask(
            "GET", f"{self._path}/models/{model_no}/policy", max_bytes=MAX_POLICY_BYTES
        )[1]

    def close(self) -> None:
        """Let go of both connections; a request that waits fails now."""
        self._sending.close()
        self._asking.close()


class _TooLarge(LinkFailed):
    """The request's body was too large for somebody on the way."""


class _Line:
    """One kept connection; a request at a time."""

    def __init__(
        self, address: str, host: str, port: int, *, is_tls: bool, key: str, timeout_s: float
    ) -> None:
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
        self._is_closed = False

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "",
        wait_s: float = 0.0,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> tuple[int, bytes]:
        """The status and body of a success; LinkFailed with the gateway's own words otherwise."""
        from http.client import HTTPException

        with _LOADING:
            from urllib3.exceptions import HTTPError

        headers = self._headers | ({"content-type": kind} if kind else {})
        with self._lock:
            if self._is_closed:
                raise LinkFailed("closed", "the link was closed")
            try:
                connection = self._open(wait_s)
                connection.request(method, path, body=body, headers=headers, preload_content=False)
                answer = connection.getresponse()
                raw = answer.read(max_bytes + 1)
                announced = answer.headers.get("content-length")
                is_whole = announced is None or answer.status == 204 or announced == str(len(raw))
                if len(raw) > max_bytes or not is_whole:
                    raise _strange(f"{len(raw)} bytes, cut off or more than {max_bytes}")
            except (HTTPError, HTTPException, OSError, ValueError) as error:
                self._drop()
                why = " ".join(str(error).split())[:200] or type(error).__name__
                raise LinkFailed(
                    "unreachable", f"{self._address} gave no answer ({why}); does it run there?"
                ) from None
            except BaseException:
                self._drop()
                raise
        if answer.status in (200, 204):
            return answer.status, raw
        raise _failure(self._address, answer.status, answer.headers.get("retry-after"), raw)

    def _open(self, wait_s: float) -> Any:
        connection = self._connection
        if connection is not None and connection.sock is not None and not connection.is_connected:
            self._drop()  # the other side has closed it meanwhile
            connection = None
        if connection is None:
            with _LOADING:
                from urllib3.connection import HTTPConnection, HTTPSConnection

            if self._is_tls:
                import ssl

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
        self._is_closed = True
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            # Whoever waits for an answer in another thread wakes up with an error.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=1.0):
            self._drop()
            self._lock.release()


def _parts(url: str, *, insecure: bool) -> tuple[str, str, int, bool]:
    """The address itself, host, port and whether it is encrypted; ConfigError when it is no
    address of a gateway."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"url={url[:80]!r} is no address: {error}; give one such as https://HOST"
        ) from None
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not is_plain
        or not url.isprintable()
    ):
        raise ConfigError(
            f"url={url[:80]!r} is no gateway's address; give https://HOST, or http://127.0.0.1:PORT"
        )
    is_tls = parts.scheme == "https"
    host = parts.hostname
    if not is_tls and not insecure and not is_loopback(host):
        raise ConfigError(
            f"url={url[:80]!r} would send your key in the open; use https://, or insecure=True on "
            "a network you trust"
        )
    return url.rstrip("/"), host, port or (443 if is_tls else 80), is_tls


# --- What a gateway answers -----------------------------------------------------------------------


def _failure(address: str, status: int, retry_after: str | None, raw: bytes) -> LinkFailed:
    """The gateway's own words where it has any; a proxy in front of it has not."""
    code = f"status_{status}"
    detail = "that is no answer of a gateway; is the address right?"
    wait_s = (
        float(retry_after)
        if retry_after and retry_after.isascii() and retry_after.isdigit()
        else 0.0
    )
    with contextlib.suppress(LinkFailed):
        error = _object(raw).get("error")
        if isinstance(error, dict):
            code = _words(error.get("code"), 40)
            detail = _words(error.get("detail"), 300)
            given = error.get("retry_after_s")
            wait_s = (
                float(given) if isinstance(given, int | float) and math.isfinite(given) else wait_s
            )
    kind = _TooLarge if status == _TOO_LARGE else LinkFailed
    return kind(code, f"{detail} ({address} answered {status})", retry_after_s=max(wait_s, 0.0))


def _words(text: Any, most: int) -> str:
    return "".join(one if one.isprintable() else " " for one in str(text)[:most])


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = strict_json(raw)
    except Refused:
        found = None
    if not isinstance(found, dict):
        raise _strange(_words(raw[:40], 60))
    return found


def _strange(what: str) -> LinkFailed:
    return LinkFailed(
        "strange_answer", f"the platform answered what this build does not read: {what}"
    )
