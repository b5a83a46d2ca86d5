"""The ingest service: reads every partition of a stream, checks, and writes what is new with its position."""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields
from threading import Event

import structlog

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, ConfigError, PositionGone, StorageFull, Unreachable
from understudy.core.ports import ExperienceStore, Position, Read, Specs, Stream
from understudy.ingest.writer import Held, IngestStats, Writer

_log = structlog.get_logger("understudy.ingest")
_IDLE_S = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """How ingest reads."""

    max_read_bytes: int = 8 * 1024 * 1024
    """How much one commit covers at most."""
    claim_ttl_s: float = 30.0
    """How long a partition stays ours after we fall silent."""
    full_pause_s: float = 1.0
    """How long to wait when the disk is full, or a server does not answer."""

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field_.name} is {value}; give a number above 0, such as {field_.default}")


class IngestService:
    """Moves a stream into a store; may be killed at any moment and started again."""

    def __init__(
        self,
        stream: Stream,
        store: ExperienceStore,
        specs: Specs,
        *,
        owner: str,
        config: IngestConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._stream = stream
        self._config = config or IngestConfig()
        self._clock = clock or SystemClock()
        self._writer = Writer(store, specs, owner=owner, claim_ttl_s=self._config.claim_ttl_s, clock=self._clock)
        self._silent = ""
        """The partition that could not be read or stored last."""

    @property
    def stats(self) -> IngestStats:
        return self._writer.stats

    def step(self) -> int:
        """Read each partition once and store what came; how many records that were."""
        try:
            moved = sum(len(read.records) for _, read in self._round(without=()))
        except (StorageFull, Unreachable) as error:
            self.stats.trouble = str(error)
            raise
        self.stats.trouble = ""
        return moved

    def run(self, stop: Event) -> None:
        """Repeat `step` until told to stop, waiting a little when nothing comes and longer while nothing works."""
        while not stop.is_set():
            try:
                moved = self.step()
            except StorageFull as error:
                _log.warning("store_full", error=str(error), retry_in_s=self._config.full_pause_s)
                self._clock.wait(stop, self._config.full_pause_s)
                continue
            except Unreachable as error:
                _log.warning("unreachable", error=str(error), retry_in_s=self._config.full_pause_s)
                self._clock.wait(stop, self._config.full_pause_s)
                continue
            if not moved:
                self._clock.wait(stop, _IDLE_S)

    def drain(self, *, within_s: float = math.inf) -> bool:
        """Store everything that was in the stream when this was called; it ends however fast more comes.

        Whether there was time for that; it is looked at between two reads. Partitions that another owner holds are
        left to them.
        """
        called_s, called_at_s = self._clock.monotonic(), self._clock.now()
        caught_up: set[str] = set()
        moved = True
        while moved:
            moved = False
            for partition, read in self._round(without=caught_up):
                # Also an empty read is news: it may have ended a parent, whose children come next.
                moved = True
                if _is_past(read, called_s, called_at_s):
                    caught_up.add(partition)
                if self._clock.monotonic() - called_s >= within_s:
                    return False
        return True

    def positions(self) -> dict[str, Position | None]:
        """How far each partition that is ours is stored."""
        return {name: held.position for name, held in self._writer.held.items()}

    def _round(self, *, without: Container[str]) -> Iterator[tuple[str, Read]]:
        """Each readable partition that is ours, read once and stored."""
        partitions = self._stream.partitions()
        names = {partition.id for partition in partitions}
        for gone in self._writer.held.keys() - names:
            del self._writer.held[gone]
        # The one that did not answer comes last, so that the others need not wait for it.
        last = next((number for number, one in enumerate(partitions) if one.id == self._silent), -1) + 1
        for partition in [*partitions[last:], *partitions[:last]]:
            is_readable = all(parent not in names or self._has_ended(parent) for parent in partition.parents)
            if is_readable and partition.id not in without and (read := self._advance(partition.id)) is not None:
                yield partition.id, read

    def _has_ended(self, partition: str) -> bool:
        held = self._writer.held.get(partition)
        return held is not None and held.ended

    def _advance(self, partition: str) -> Read | None:
        """Store what one read gives; None when there is nothing more to read, or the partition is not ours."""
        try:
            held = self._writer.claim(partition)
            if held.ended:
                return None
            read = self._read(partition, held)
            if read.records:
                self._writer.write(partition, read.records, read.next)
        except ClaimLost:
            return None
        except Unreachable:
            self._silent = partition
            raise
        held.position, held.ended = read.next, read.ended
        return read

    def _read(self, partition: str, held: Held) -> Read:
        try:
            return self._stream.read(partition, held.position, max_bytes=self._config.max_read_bytes, wait_s=0.0)
        except PositionGone as error:
            _log.error("position_gone", partition=partition, position=error.position, earliest=error.earliest)
            earliest = None if error.earliest is None else Position(error.earliest)
            return self._stream.read(partition, earliest, max_bytes=self._config.max_read_bytes, wait_s=0.0)


def _is_past(read: Read, called_s: float, called_at_s: float) -> bool:
    """Whether all was read that was there when our monotonic clock and this machine's clock stood so."""
    if not read.records:
        return True
    if read.complete_to_s is not None:
        return read.complete_to_s >= called_s
    return read.records[-1].time_s > called_at_s
