"""One client's connection: uvicorn's own, with an end to its patience at every stage.

    connected ─ head ─► head complete ─ body ─► complete ─► answered ─ idle ─► next head …

uvicorn bounds only the idle time. Here a head and a body must come in their time, a head has a size, and an answer must
be read in time; whoever is late or sends too much is cut off.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from understudy.serve.wire import MAX_HEAD_BYTES, Failed, Failure

_GOODBYE_S = 1.0


class PatientConnection(HttpToolsProtocol):
    """An HTTP connection that waits for its client, but not for ever; times are set by subclassing."""

    head_timeout_s = 10.0
    body_timeout_s = 20.0
    """Longer than a handler waits for a body, so that it can still say so; then for the rest of a refused one."""
    read_timeout_s = 30.0
    """How long an answer may wait for its reader."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_arriving = self._is_last = False
        self._head_bytes = 0

    # --- Time -------------------------------------------------------------------------------------------------------

    def _within(self, timeout_s: float | None) -> None:
        """Give the next stage its time; none: it is our turn."""
        self._deadline_s = None if timeout_s is None else self.loop.time() + timeout_s
        if self._deadline_s is not None and self._timer is None:
            self._timer = self.loop.call_at(self._deadline_s, self._look)

    def _look(self) -> None:
        # One timer for many deadlines: most of them are met, so it rarely has to be set anew.
        self._timer = None
        if self._deadline_s is None or self.transport.is_closing():
            return
        if self.loop.time() >= self._deadline_s:
            self.transport.abort()
        else:
            self._timer = self.loop.call_at(self._deadline_s, self._look)

    # --- What the transport says ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._within(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._timer = self._stalled = self._deadline_s = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._head_bytes = self._head_bytes + len(data) if was_in_head and self._is_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "head_too_large", f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
        elif not self._is_arriving and self._deadline_s is None and self._is_answered():
            # Bytes that are no request, such as empty lines, ended uvicorn's idle time.
            self._within(self.timeout_keep_alive)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        # With something unread, close() would wait for the reader.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The server stops: end at once when nothing is under way, else after the answer."""
        super().shutdown()
        if self.transport.is_closing():
            self._end_soon()
        else:
            self._is_last = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_last:
            self._end_soon()

    def _end_soon(self) -> None:
        # close() alone waits for the other side: for its goodbye under TLS, or for it to read.
        self.loop.call_later(0.0 if not self.transport.get_write_buffer_size() else _GOODBYE_S, self.transport.abort)

    # --- What the parser says ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_head = self._is_arriving = True
        self._within(self.head_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._within(self.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_arriving = False
        # A body that was refused may end after its answer, and then uvicorn has stopped counting the idle time.
        self._within(self.timeout_keep_alive if self._is_answered() else None)
        super().on_message_complete()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other refusal."""
        self._refuse(400, "bad_http", "this is no HTTP/1.1 request")

    def _refuse(self, status: int, code: str, detail: str) -> None:
        body = msgspec.json.encode(Failed(error=Failure(code=code, detail=detail)))
        self.transport.write(
            STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()
