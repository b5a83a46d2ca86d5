"""The ingest service: reads every partition of a stream, checks, and writes what is new with its position."""

import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, fields
from threading import Event

import structlog

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, ConfigError, PositionGone, StorageFull
from understudy.core.frame import FrameKind
from understudy.core.ports import (
    Candidate,
    ExperienceStore,
    Position,
    Read,
    Receipt,
    RefusedFrame,
    Specs,
    Stream,
    WriteBatch,
)
from understudy.ingest.check import check

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
    """How long to wait when the disk is full."""

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field_.name} is {value}; give a number above 0, such as {field_.default}")


@dataclass(slots=True)
class IngestStats:
    """What a service has done since it started."""

    frames: int = 0
    steps: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0


@dataclass(slots=True)
class _Lane:
    """A partition this service holds."""

    epoch: int
    position: Position | None
    ended: bool = False


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
        self._stream, self._store, self._specs = stream, store, specs
        self._owner = owner
        self._config = config or IngestConfig()
        self._clock = clock or SystemClock()
        self._lanes: dict[str, _Lane] = {}
        self.stats = IngestStats()

    def step(self) -> int:
        """Read each partition once and store what came; how many records that were."""
        return sum(len(read.records) for _, read in self._round(without=()))

    def run(self, stop: Event) -> None:
        """Repeat `step` until told to stop, waiting a little when nothing comes and longer when the disk is full."""
        while not stop.is_set():
            try:
                moved = self.step()
            except StorageFull as error:
                _log.warning("store_full", error=str(error), retry_in_s=self._config.full_pause_s)
                self._clock.wait(stop, self._config.full_pause_s)
                continue
            if not moved:
                self._clock.wait(stop, _IDLE_S)

    def drain(self) -> None:
        """Store everything that was in the stream when this was called; it ends however fast more comes.

        Partitions that another owner holds are left to them.
        """
        called_s = self._clock.now()
        caught_up: set[str] = set()
        moved = True
        while moved:
            moved = False
            for partition, read in self._round(without=caught_up):
                # Also an empty read is news: it may have ended a parent, whose children come next.
                moved = True
                if not read.records or read.records[-1].time_s > called_s:
                    caught_up.add(partition)

    def positions(self) -> dict[str, Position | None]:
        """How far each partition that is ours is stored."""
        return {name: lane.position for name, lane in self._lanes.items()}

    def _round(self, *, without: Container[str]) -> Iterator[tuple[str, Read]]:
        """Each readable partition that is ours, read once and stored."""
        partitions = self._stream.partitions()
        names = {partition.id for partition in partitions}
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in names}
        for partition in partitions:
            is_readable = all(parent not in names or self._has_ended(parent) for parent in partition.parents)
            if is_readable and partition.id not in without and (read := self._advance(partition.id)) is not None:
                yield partition.id, read

    def _has_ended(self, partition: str) -> bool:
        lane = self._lanes.get(partition)
        return lane is not None and lane.ended

    def _advance(self, partition: str) -> Read | None:
        """Store what one read gives; None when there is nothing more to read, or the partition is not ours."""
        lane = self._lanes.get(partition) or self._claim(partition)
        if lane is None or lane.ended:
            return None
        read = self._read(partition, lane)
        if read.records:
            try:
                self._write(partition, lane, read)
            except ClaimLost as error:
                _log.warning("claim_lost", partition=partition, error=str(error))
                del self._lanes[partition]
                return None
        lane.position, lane.ended = read.next, read.ended
        return read

    def _claim(self, partition: str) -> _Lane | None:
        try:
            claim = self._store.claim(partition, owner=self._owner, ttl_s=self._config.claim_ttl_s)
        except ClaimLost:
            return None
        lane = _Lane(claim.epoch, claim.position)
        self._lanes[partition] = lane
        return lane

    def _read(self, partition: str, lane: _Lane) -> Read:
        try:
            return self._stream.read(partition, lane.position, max_bytes=self._config.max_read_bytes, wait_s=0.0)
        except PositionGone as error:
            _log.error("position_gone", partition=partition, position=error.position, earliest=error.earliest)
            earliest = None if error.earliest is None else Position(error.earliest)
            return self._stream.read(partition, earliest, max_bytes=self._config.max_read_bytes, wait_s=0.0)

    def _write(self, partition: str, lane: _Lane, read: Read) -> None:
        candidates: list[Candidate] = []
        refused: list[RefusedFrame] = []
        parked: list[RefusedFrame] = []
        for record in read.records:
            checked = check(record.raw, specs=self._specs, received_s=record.time_s)
            if checked.candidate is not None:
                candidates.append(checked.candidate)
            elif checked.refusal is not None:
                (parked if checked.outcome == "parked" else refused).append(checked.refusal)
        batch = WriteBatch(partition, lane.epoch, read.next, candidates, refused, parked)
        self._count(batch, self._store.write(batch))
        self.stats.lag_s = self._clock.now() - read.records[-1].time_s

    def _count(self, batch: WriteBatch, receipt: Receipt) -> None:
        stats = self.stats
        stats.frames += len(batch.candidates) + len(batch.refused) + len(batch.parked)
        stats.fates.update(receipt.fates)
        for candidate, fate in zip(batch.candidates, receipt.fates, strict=True):
            if fate == "new" and candidate.frame.kind is FrameKind.DATA and candidate.chunk is not None:
                stats.steps += candidate.chunk.meta.n_steps
        reasons = [one.reason for one in (*batch.refused, *batch.parked)]
        reasons += [
            reason
            for reason, fate in zip(receipt.reasons, receipt.fates, strict=False)
            if fate in ("refused", "conflict")
        ]
        stats.refusals.update(reasons)
        for reason, count in Counter(reasons).items():
            _log.warning("frames_refused", partition=batch.partition, reason=reason, count=count)
