"""A web server that responds to every request with one page and 200, as on a mistaken port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PAGE = b"<!DOCTYPE html>\n<html>\n<body>Welcome</body>\n</html>\n"


class _Handler(BaseHTTPRequestHandler):
    def _page(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(_PAGE)))
        self.end_headers()
        self.wfile.write(_PAGE)

    do_GET = do_PUT = do_POST = do_DELETE = _page  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def web_page() -> Iterator[str]:
    """The URL of the server, on a free loopback port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10.0)
