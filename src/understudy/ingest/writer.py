"""The writer: claims partitions for one owner, checks what was read of them, and stores it with its position."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from understudy.core.clock import Clock
from understudy.core.errors import ClaimLost
from understudy.core.frame import FrameKind
from understudy.core.ports import (
    Candidate,
    ExperienceStore,
    Position,
    Receipt,
    Record,
    RefusedFrame,
    Specs,
    WriteBatch,
)
from understudy.ingest.check import check

_log = structlog.get_logger("understudy.ingest")


@dataclass(slots=True)
class IngestStats:
    """What a writer has done since it started."""

    frames: int = 0
    steps: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0
    trouble: str = ""
    """Why nothing can be read or stored just now; empty while it can."""


@dataclass(slots=True)
class Held:
    """A partition this owner has claimed."""

    epoch: int
    position: Position | None
    """How far it is stored."""
    ended: bool = False


class Writer:
    """Stores what any reader of a stream hands it; every frame of a partition goes through here, in order."""

    def __init__(
        self, store: ExperienceStore, specs: Specs, *, owner: str, claim_ttl_s: float, clock: Clock
    ) -> None:  # fmt: skip
        self._store, self._specs = store, specs
        self._owner, self._claim_ttl_s, self._clock = owner, claim_ttl_s, clock
        self.held: dict[str, Held] = {}
        self.stats = IngestStats()

    def claim(self, partition: str) -> Held:
        """The claim of a partition, a new one where there is none; ClaimLost while another owner's is fresh."""
        if partition not in self.held:
            claim = self._store.claim(partition, owner=self._owner, ttl_s=self._claim_ttl_s)
            self.held[partition] = Held(claim.epoch, claim.position)
        return self.held[partition]

    def write(self, partition: str, records: Sequence[Record], position: Position | None) -> None:
        """Check records of a claimed partition and store them with the position behind them.

        ClaimLost when the partition is another owner's by now; it has to be claimed again then.
        """
        held = self.held[partition]
        try:
            batch = self._checked(partition, held.epoch, records, position)
            self._count(batch, self._store.write(batch))
        except ClaimLost as error:
            _log.warning("claim_lost", partition=partition, error=str(error))
            del self.held[partition]
            raise
        held.position = position
        # The stream's clock may be ahead of ours.
        self.stats.lag_s = max(0.0, self._clock.now() - records[-1].time_s)

    def _checked(
        self, partition: str, epoch: int, records: Sequence[Record], position: Position | None
    ) -> WriteBatch:  # fmt: skip
        candidates: list[Candidate] = []
        refused: list[RefusedFrame] = []
        parked: list[RefusedFrame] = []
        for record in records:
            checked = check(record.raw, specs=self._specs, received_s=record.time_s)
            if checked.candidate is not None:
                candidates.append(checked.candidate)
            elif checked.refusal is not None:
                (parked if checked.outcome == "parked" else refused).append(checked.refusal)
        return WriteBatch(partition, epoch, position, candidates, refused, parked)

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
