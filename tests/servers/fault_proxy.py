"""A Kinesis server with faults: a proxy between an SDK and a local server, with the faults of AWS.

Every fault has a rate and a seeded random generator; `fired` counts. A test calls `assert_fired`,
which fails if a requested fault never happened.
"""

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_PREFIX = "Kinesis_20131202."
_UPSTREAM_S = 20.0
_DROPPED = ("connection", "content-length", "transfer-encoding", "date", "server", "keep-alive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often each fault happens, from 0 to 1: per call, `partial` per record."""

    throttle: float = 0.0
    """A call that reads or writes is throttled."""
    partial: float = 0.0
    """A record of a successful call is not accepted."""
    cut: float = 0.0
    """The server stores the records, and its response is lost with the connection."""
    twice: float = 0.0
    """The server receives the same records twice, and responds once."""
    expired: float = 0.0
    """An iterator has expired."""
    repeat: float = 0.0
    """A response has its records twice."""
    empty: float = 0.0
    """A response has no records although there are some, and the same iterator."""
    delay: float = 0.0
    """A response is `DELAY_S` late."""


DELAY_S = 0.05


class _Cut(Exception):
    """There is no response: the connection is closed."""


class FaultProxy:
    """Serves on a free loopback port until closed; a client uses `url` as the server's."""

    def __init__(self, upstream: str, rates: Rates | None = None, *, seed: int = 0) -> None:
        self.rates = rates or Rates()
        self.fired: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.hidden: set[str] = set()
        """Trimmed sequence numbers: their records are hidden, and reading continues at the oldest
        record left."""
        self.only_key = ""
        """The only accepted access key; empty accepts any, as local servers do."""
        self._upstream = urlsplit(upstream)
        # One generator per fault: the calls that a fault hits do not depend on other faults.
        self._chances = {
            fault.name: random.Random(f"{seed} {fault.name}") for fault in fields(Rates)
        }
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more calls, also on open connections; may be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.shutdown()
        self._thread.join(10.0)
        self._server.server_close()

    def assert_fired(self) -> None:
        """Raise AssertionError with every requested fault that never happened."""
        idle = [
            fault.name
            for fault in fields(Rates)
            if getattr(self.rates, fault.name) > 0 and not self.fired[fault.name]
        ]
        assert not idle, (
            f"these requested faults never happened: {', '.join(idle)}; fired: {dict(self.fired)}"
        )

    def _hits(self, fault: str) -> bool:
        with self._lock:
            rate: float = getattr(self.rates, fault)
            is_hit = self._chances[fault].random() < rate
            self.fired[fault] += is_hit
            return is_hit

    # --- one call ---------------------------------------------------------------------------------

    def answer(self, operation: str, asked: dict[str, Any], send: "_Send") -> "_Answer":
        """The response to a call; _Cut if there is none."""
        if self._closed.is_set():
            raise _Cut
        with self._lock:
            self.calls[operation] += 1
        if self._hits("delay"):
            self._closed.wait(DELAY_S)
        if operation in ("PutRecords", "GetRecords") and self._hits("throttle"):
            return _refusal(
                "ProvisionedThroughputExceededException",
                "Rate exceeded for a shard (by the fault proxy).",
            )
        match operation:
            case "PutRecords":
                return self._put(asked, send)
            case "GetRecords":
                return self._get(asked, send)
            case "GetShardIterator" if asked.get("StartingSequenceNumber") in self.hidden:
                # As AWS does: a trimmed position silently becomes the oldest available one.
                del asked["StartingSequenceNumber"]
                return send({**asked, "ShardIteratorType": "TRIM_HORIZON"})
        return send(asked)

    def _put(self, asked: dict[str, Any], send: "_Send") -> "_Answer":
        records: Sequence[Mapping[str, Any]] = asked["Records"]
        refused = [self._hits("partial") for _ in records]
        accepted = [
            record for record, is_refused in zip(records, refused, strict=True) if not is_refused
        ]
        answers: list[Mapping[str, Any]] = []
        if accepted:
            status, body = send({**asked, "Records": accepted})
            if status != 200:
                return status, body
            answers = body["Records"]
            if self._hits("twice"):
                send({**asked, "Records": accepted})
        if self._hits("cut"):
            raise _Cut
        taken = iter(answers)
        error = {
            "ErrorCode": "ProvisionedThroughputExceededException",
            "ErrorMessage": "Rate exceeded (by the proxy).",
        }
        merged = [error if is_refused else next(taken) for is_refused in refused]
        failed = sum("ErrorCode" in result for result in merged)
        return 200, {"FailedRecordCount": failed, "Records": merged}

    def _get(self, asked: dict[str, Any], send: "_Send") -> "_Answer":
        if self._hits("expired"):
            return _refusal("ExpiredIteratorException", "Iterator expired (by the fault proxy).")
        status, body = send(asked)
        if status != 200:
            return status, body
        records = [
            record for record in body["Records"] if record["SequenceNumber"] not in self.hidden
        ]
        if records and self._hits("empty"):
            return 200, {
                **body,
                "Records": [],
                "NextShardIterator": asked["ShardIterator"],
                "MillisBehindLatest": 1000,
            }
        if records and self._hits("repeat"):
            records = [*records, *records]
        return 200, {**body, "Records": records}

    def forward(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """The real server's response; _Cut if there is none."""
        connection = HTTPConnection(
            str(self._upstream.hostname), self._upstream.port, timeout=_UPSTREAM_S
        )
        try:
            connection.request("POST", "/", body=body, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, HTTPException):
            raise _Cut from None
        finally:
            connection.close()


_Answer = tuple[int, dict[str, Any]]


class _Send:
    """Sends a client's call to the real server, once or more often."""

    def __init__(self, proxy: FaultProxy, headers: Mapping[str, str]) -> None:
        self._proxy = proxy
        self._headers = headers

    def __call__(self, asked: Mapping[str, Any]) -> _Answer:
        status, raw = self._proxy.forward(self._headers, json.dumps(asked).encode())
        return status, json.loads(raw) if raw else {}


def _refusal(code: str, message: str) -> _Answer:
    return 400, {"__type": code, "message": message}


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in (*_DROPPED, "host")
            }
            operation = self.headers.get("X-Amz-Target", "").removeprefix(_PREFIX)
            try:
                if f"Credential={proxy.only_key}" in self.headers.get("Authorization", ""):
                    status, body = proxy.answer(
                        operation, json.loads(raw or b"{}"), _Send(proxy, headers)
                    )
                else:
                    status, body = _refusal(
                        "UnrecognizedClientException",
                        "The security token is invalid (by the proxy).",
                    )
            except _Cut:
                self.close_connection = True
                return
            answer = json.dumps(body).encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Silent."""

    return Handler
