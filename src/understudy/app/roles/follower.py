"""Follower: a thread that fills a window beside a role, and never dies unnoticed."""

import threading
from typing import Any

from understudy.stores.window import Window


class Follower:
    """Fills a window until told to stop; a context manager that raises what the thread died of, behind the role's end.

    A learner must not go on with old data: what ends the thread sets `stop` as well, and whoever runs the role starts
    it again. A store that is away for a while ends nothing; `fields` tells.
    """

    def __init__(self, window: Window, stop: threading.Event) -> None:
        self._window, self._stop = window, stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        try:
            self._window.run(self._stop)
        except BaseException as error:
            self._error = error
            self._stop.set()

    def fields(self) -> dict[str, Any]:
        """What a role reports about it: how much was copied, and why nothing is at present, if so."""
        return {"window": {"items": self._window.items, "error": self._window.trouble}}

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
