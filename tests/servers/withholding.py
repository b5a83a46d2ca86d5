"""A proxy that withholds a server's responses once the client has sent certain bytes."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SOME_BYTES = 1 << 16


class Withholding:
    """A client uses `address` as the server's; `is_heard` is set once responses are withheld."""

    def __init__(self, upstream: tuple[str, int], words: bytes) -> None:
        self.is_heard = threading.Event()
        self.address = ""
        self._upstream = upstream
        self._words = words

    def pass_on(self, client: socket.socket) -> None:
        """Forward everything between a client and the server until one of them disconnects."""
        with socket.create_connection(self._upstream) as server:
            answers = threading.Thread(target=self._answers, args=(server, client), daemon=True)
            answers.start()
            with contextlib.suppress(OSError):
                while request := client.recv(_SOME_BYTES):
                    if self._words in request:
                        self.is_heard.set()
                    server.sendall(request)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            answers.join()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while response := server.recv(_SOME_BYTES):
                if not self.is_heard.is_set():
                    client.sendall(response)
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def withholding(upstream: tuple[str, int], words: bytes) -> Iterator[Withholding]:
    """A proxy on a free loopback port for the server at `upstream`."""
    between = Withholding(upstream, words)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            between.pass_on(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        between.address = f"127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield between
        finally:
            listener.shutdown()
            thread.join(10.0)
