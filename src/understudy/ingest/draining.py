"""Draining: when it is done, how long it may take, and what is said when that was not enough."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import structlog

from understudy.core.errors import ClaimLost, StorageFull, Unreachable

_log = structlog.get_logger("understudy.ingest")
DRAIN_S = 15.0
"""How long storing what is left may take when somebody waits for ingest to stop."""
TOO_MUCH = "there is more in the stream than can be stored now"


def tell_not_drained(error: object) -> None:
    """Say why something is left, and that nothing of it is lost."""
    _log.warning("not_drained", error=str(error), next="it is in the stream, and stored at the next start")


@contextlib.contextmanager
def leaving_the_rest(is_asked: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """End well, and say what is left, where nothing can be read or stored now and somebody asked to stop.

    Whatever the next start would not mend by itself is raised: a disk that refuses, a setting that cannot work.
    """
    try:
        yield
    except (StorageFull, Unreachable, ClaimLost) as error:
        if not is_asked():
            raise
        tell_not_drained(error)


class Drain:
    """Knows when all is stored that was in a stream when draining began, however fast more comes."""

    def __init__(self, since_s: float) -> None:
        """`since_s`: the beginning, by the monotonic clock of whoever reads."""
        self._since_s = since_s
        self._caught_up: set[str] = set()
        self.is_done = False

    def note(self, complete: Mapping[str, float]) -> None:
        """A batch was stored, and each partition that may hold more was read to such a time; empty: nobody knows."""
        self._caught_up |= {name for name, to_s in complete.items() if to_s >= self._since_s}
        self.is_done = bool(complete) and complete.keys() <= self._caught_up
