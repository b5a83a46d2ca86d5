"""A small S3 in memory, over real HTTP: what CloudObjects needs of one, and the ways in which it
is away."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

Trouble = int | Literal["", "cut", "half", "proxy"]
"""A status to answer with; hang up without a word, or in the middle of an object; a proxy
answers 404 for it."""


class SmallS3:
    """One bucket on a free port of loopback, until closed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.trouble: Trouble = ""
        self.calls: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"s3://models/deployment?endpoint={self.endpoint}&region=us-east-1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10.0)
        self._server.server_close()


@contextmanager
def small_s3(patch: Any) -> Iterator[SmallS3]:
    """A server, keys for it, and calls with short retries."""
    patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    patch.setattr("understudy.models.cloud._RETRY_S", 0.05)
    server = SmallS3()
    try:
        yield server
    finally:
        server.close()


def _listing(names: list[str]) -> bytes:
    found = "".join(
        f"<Contents><Key>{name}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


def _handler(s3: SmallS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            key = unquote(split.path).removeprefix("/models").lstrip("/")
            s3.calls.append(f"GET {key or 'list'}")
            if s3.trouble:
                self._fail()
            elif not key:
                prefix = parse_qs(split.query)["prefix"][0]
                self._answer(
                    200, _listing(sorted(name for name in s3.objects if name.startswith(prefix)))
                )
            elif key in s3.objects:
                self._answer(200, s3.objects[key])
            else:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

        def do_PUT(self) -> None:
            key = unquote(self.path).removeprefix("/models/")
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            s3.calls.append(f"PUT {key}")
            if s3.trouble:
                self._fail()
            elif key in s3.objects and self.headers.get("If-None-Match") == "*":
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            else:
                s3.objects[key] = raw
                self._answer(200, b"")

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"])).decode()
            s3.calls.append("POST delete")
            if s3.trouble:
                self._fail()
                return
            keys = re.findall(r"<Key>([^<]+)</Key>", raw)
            for key in keys:
                s3.objects.pop(key, None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

        def _fail(self) -> None:
            if isinstance(s3.trouble, int):
                self._answer(s3.trouble, b"<Error><Code>NotNow</Code></Error>")
                return
            if s3.trouble == "proxy":
                self._answer(404, b"default backend - 404")
                return
            self.close_connection = True
            if s3.trouble == "half" and not self.headers.get("Range"):
                self._answer(200, b"half of it", claimed=1000)

        def _answer(self, status: int, body: bytes, *, claimed: int = 0) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(claimed or len(body)))
            self.send_header("ETag", f'"{md5(body).hexdigest()}"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent."""

    return Handler
