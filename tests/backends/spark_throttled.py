"""A stream whose reads are refused a few times, as one that is throttled is; in whatever process it is read."""

import json
from pathlib import Path
from typing import Any

from understudy.app.roles import spark_stream
from understudy.core.errors import Unreachable
from understudy.core.ports import Partition, Read, Stream

_TIMES = 3


class Throttled:
    """Refuses its first reads; how many there were stands in a file, since those who read are started anew."""

    def __init__(self, inner: Stream, refusals: Path) -> None:
        self._inner, self._refusals, self.close = inner, refusals, inner.close

    def partitions(self) -> list[Partition]:
        return list(self._inner.partitions())

    def read(self, *of: Any, **how: Any) -> Read:
        so_far = self._refusals.read_text() if self._refusals.exists() else ""
        if len(so_far) < _TIMES:
            self._refusals.write_text(so_far + ".")
            raise Unreachable("too many requests")
        return self._inner.read(*of, **how)


def open_from_text(text: str) -> Throttled:
    return Throttled(spark_stream.open_from_text(text), Path(json.loads(text)["data"]) / "refusals")
