"""A batch that Spark hands over: records of each partition, and how complete they were when they were read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.ingest.offsets import Passed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Batch:
    """Records in the order in which they were read; parents before their children."""

    parts: Mapping[str, Sequence[Passed]]
    complete: Mapping[str, float]
    """As `complete_of` says; empty where a batch was read again."""


def batch_of(frames: "DataFrame") -> Batch:
    """The rows of a batch, taken to the driver."""
    table = frames.toArrow()
    names = ("partition", "after", "position", "time_s", "frame")
    columns = [table.column(name).to_pylist() for name in names]
    parts: dict[str, list[Passed]] = {}
    for row in zip(*columns, strict=True):
        one = Passed(*row)
        parts.setdefault(one.partition, []).append(one)
    told = (one for one in table.column("complete").to_pylist() if one is not None)
    return Batch(parts, dict(next(told, ())))
