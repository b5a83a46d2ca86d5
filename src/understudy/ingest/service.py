"""The ingest service: stores every partition of a stream, in this process or in many.

The service decides which partitions may be read now and keeps statistics. In a turn,
`PartitionIngest.advance` claims one partition, reads some of its records, checks them and writes
them to the store. Only the store knows how far a partition is stored. If two processes work on the
same partition, the later claim has a newer epoch, and the store rejects writes of the earlier one.
"""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import structlog

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import (
    ClaimLost,
    ConfigError,
    PositionGone,
    StorageFull,
    UnderstudyError,
    Unreachable,
)
from understudy.ingest.check import check
from understudy.ports import (
    CRASHED_INGEST,
    Candidate,
    Claim,
    ExperienceStore,
    Position,
    Read,
    Receipt,
    RefusedFrame,
    Specs,
    Stream,
    WriteBatch,
)

_log = structlog.get_logger("understudy.ingest")
_IDLE_S = 0.004
_RECORD_BYTES = 2048
"""Approximate memory of a record besides its columns, so that many small frames are bounded too."""
_SHRINK = 16
"""After a crash or a lack of memory, a batch has this fraction of its records."""
MAX_CRASHES = 3
"""A frame is quarantined unchecked after this many crashes while it was checked alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """How much ingest reads at once, and how long claims and pauses last."""

    max_read_bytes: int = 8 * 1024 * 1024
    """Most bytes in one read and commit."""
    max_decoded_bytes: int = 64 * 1024 * 1024
    """A commit ends with the frame that brings it to this many decoded bytes."""
    max_check_s: float = 1.0
    """A commit ends with the frame whose check exceeds this time in total."""
    claim_ttl_s: float = 30.0
    """How long a claim lasts after it was made or last used to write."""
    full_pause_s: float = 1.0
    """Pause when the disk is full or a server does not respond."""

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if not 0 < value < math.inf:
                raise ConfigError(
                    f"{field_.name} is {value}; use a number above 0, such as {field_.default}"
                )


@dataclass(slots=True)
class IngestStats:
    """Counts since ingest started, or of one turn."""

    frames: int = 0
    steps: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0
    error: str = ""
    """Why reading or storing fails now; empty while both work."""

    def add(self, turn: "IngestStats") -> None:
        self.frames += turn.frames
        self.steps += turn.steps
        self.fates.update(turn.fates)
        self.refusals.update(turn.refusals)
        self.lag_s = turn.lag_s if turn.frames else self.lag_s


@dataclass(frozen=True, slots=True)
class Turn:
    """A partition to read and store once."""

    partition: str
    claim: Claim | None = None
    """This owner's last claim of the partition, with the position stored by now, if known."""
    draining_s: float = 0.0
    """Seconds since draining began; 0 if not draining."""
    crashes: int = 0
    """How many processes in a row crashed in this partition, if its batches have no `BatchMark`."""


@dataclass(slots=True)
class IngestProgress:
    """The result of a turn, without any frame bytes."""

    partition: str
    claim: Claim | None = None
    """The claim, with the position stored by now; None if another owner holds the partition."""
    records: int = 0
    size_bytes: int = 0
    ended: bool = False
    is_drained: bool = False
    """Whether everything that was in the partition when draining began is stored."""
    stats: IngestStats = field(default_factory=IngestStats)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Names and fields of events for the log."""

    def add(self, later: "IngestProgress") -> None:
        """Add the result of a later turn of the same partition."""
        self.claim = later.claim
        self.records += later.records
        self.size_bytes += later.size_bytes
        self.ended = later.ended
        self.is_drained = later.is_drained
        self.stats.add(later.stats)
        self.events += later.events


# --- what survives a crash ------------------------------------------------------------------------


class _Attempt(msgspec.Struct):
    """A batch that a process began to store."""

    partition: str
    position: str | None
    """The position before its first record."""
    records: int
    crashes: int = 0
    """Earlier crashes while the only record of this batch was checked."""
    is_suspect: bool = True
    """Whether a record would be the likely cause of a crash: while records are checked, and after
    an unexpected error, but not during the commit, which is long enough for unrelated kills."""


class BatchMark:
    """A small file with the batch in progress, so that the next process knows what a crash hit.

    It is never synced: it need not survive a power cut.
    """

    _BYTES = 1024

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(path, flags, 0o600)
        self.interrupted: _Attempt | None = None
        """The batch during which the last process crashed."""
        with contextlib.suppress(msgspec.MsgspecError):
            raw = os.pread(self._descriptor, self._BYTES, 0)
            self.interrupted = msgspec.json.decode(raw, type=_Attempt)

    def write(self, attempt: _Attempt | None) -> None:
        raw = b"" if attempt is None else msgspec.json.encode(attempt)
        with contextlib.suppress(OSError):  # optional; the commit reports a full disk
            os.pwrite(self._descriptor, raw.ljust(self._BYTES), 0)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(slots=True)
class _Caution:
    """Smaller batches where the last process crashed."""

    max_records: int
    records_left: int
    """Records of the crashed batch that are not stored yet."""
    crashes: int
    """Crashes while the next record was checked alone."""


def _caution_after(attempt: _Attempt) -> _Caution:
    if attempt.records > 1:
        return _Caution(attempt.records // _SHRINK or 1, attempt.records, 0)
    return _Caution(1, 1, attempt.crashes + attempt.is_suspect)


def _caution_in(turn: Turn) -> _Caution:
    """Smaller batches in a partition in which tasks crash: 256, 16, then single records."""
    return _Caution(_SHRINK ** max(0, 3 - turn.crashes), _SHRINK**3, max(0, turn.crashes - 3))


# --- one partition at a time ----------------------------------------------------------------------

Spread = Callable[[Iterable[Turn]], Iterable[IngestProgress]]
"""Runs the turns of a round, such as in Spark; raises errors after yielding all progress."""


class PartitionIngest:
    """Claims, reads, checks and writes partitions for one owner, one commit at a time."""

    def __init__(
        self,
        stream: Stream,
        store: ExperienceStore,
        specs: Specs,
        *,
        owner: str,
        config: IngestConfig,
        clock: Clock,
        mark: BatchMark | None = None,
    ) -> None:
        """`mark` has the batch that the last process was storing, if it crashed."""
        self._stream = stream
        self._store = store
        self._specs = specs
        self._owner = owner
        self._config = config
        self._clock = clock
        self._mark = mark
        self._interrupted = mark.interrupted if mark is not None else None
        self._cautions: dict[str, _Caution] = {}
        self._max_read_bytes: dict[str, int] = {}
        """Smaller reads of partitions whose last read did not fit into one commit."""
        self._epochs: dict[str, int] = {}
        """Epochs that this process claimed; another process of this owner may have newer ones."""

    def advance(self, turn: Turn) -> IngestProgress:
        """Store the records of one read; without records, the claim is not renewed."""
        progress = IngestProgress(turn.partition)
        began_s = self._clock.monotonic() - turn.draining_s
        began_at_s = self._clock.now() - turn.draining_s
        if turn.crashes:
            self._cautions[turn.partition] = _caution_in(turn)
        try:
            claim = turn.claim or self._claim(turn.partition)
            read = self._read(claim, progress)
            if read.records and self._epochs.get(turn.partition) != claim.epoch:
                stored_position = claim.position
                claim = self._claim(turn.partition)
                if claim.position != stored_position:
                    read = self._read(claim, progress)
        except ClaimLost:
            return progress
        if read.records:
            try:
                read = self._write(claim, read, progress)
            except ClaimLost as error:
                self._epochs.pop(turn.partition, None)
                event_fields = {"partition": turn.partition, "error": str(error)}
                progress.events.append(("claim_lost", event_fields))
                return progress
        progress.claim = replace(claim, position=read.next)
        progress.records = len(read.records)
        progress.size_bytes = sum(len(record.raw) for record in read.records)
        progress.ended = read.ended
        progress.is_drained = _is_past(
            read, began_s, began_at_s=began_at_s, now_s=self._clock.now()
        )
        return progress

    def _claim(self, partition: str) -> Claim:
        ttl_s = self._config.claim_ttl_s
        claim = self._store.claim(partition, owner=self._owner, ttl_s=ttl_s)
        self._epochs[partition] = claim.epoch
        return claim

    def _read(self, claim: Claim, progress: IngestProgress) -> Read:
        most = self._max_read_bytes.get(claim.partition, self._config.max_read_bytes)
        try:
            return self._stream.read(claim.partition, claim.position, max_bytes=most, wait_s=0.0)
        except PositionGone as error:
            event_fields = {"position": error.position, "earliest": error.earliest}
            progress.events.append(
                ("position_gone", {"partition": claim.partition, **event_fields})
            )
            earliest = None if error.earliest is None else Position(error.earliest)
            return self._stream.read(claim.partition, earliest, max_bytes=most, wait_s=0.0)

    def _write(self, claim: Claim, read: Read, progress: IngestProgress) -> Read:
        """Store as many records of a read as fit into one commit; return the read of only those."""
        caution = self._caution(claim, progress)
        most = len(read.records) if caution is None else caution.max_records
        attempt = _Attempt(claim.partition, claim.position, most)
        attempt.crashes = 0 if caution is None else caution.crashes
        while True:
            attempt.records = min(most, len(read.records))
            try:
                with self._marked(attempt):
                    part, batch = self._batch(claim, read, attempt)
                    self._note(attempt, is_suspect=False)
                    receipt = self._store.write(batch)
                break
            except MemoryError:
                if attempt.records == 1:
                    raise StorageFull(
                        f"no memory to store a frame of {len(read.records[0].raw)} bytes of "
                        f"partition {claim.partition}; free some memory, or raise this process's "
                        "limit; ingest tries again"
                    ) from None
                most = attempt.records // _SHRINK or 1
        if caution is not None:
            caution.records_left -= len(part.records)
            caution.crashes = 0
            if caution.records_left <= 0:
                del self._cautions[claim.partition]
        self._max_read_bytes.pop(claim.partition, None)
        if len(part.records) < attempt.records:
            size = sum(len(record.raw) for record in part.records)
            self._max_read_bytes[claim.partition] = min(2 * size, self._config.max_read_bytes)
        stats = progress.stats
        _count(batch, receipt, stats)
        # The stream's clock may be ahead of ours, and a damaged record may have no time.
        newest_s = max(record.time_s for record in part.records) or self._clock.now()
        stats.lag_s = max(0.0, self._clock.now() - newest_s)
        for reason, count in stats.refusals.items():
            refusal = {"partition": claim.partition, "reason": reason, "count": count}
            progress.events.append(("frames_refused", refusal))
        return part

    def _caution(self, claim: Claim, progress: IngestProgress) -> _Caution | None:
        """The smaller batches for a partition where the last process crashed; None for others."""
        crashed = self._interrupted
        if crashed is not None and crashed.partition == claim.partition:
            self._interrupted = None
            if crashed.position == claim.position:
                caution = _caution_after(crashed)
                self._cautions[claim.partition] = caution
                event_fields = {
                    "partition": claim.partition,
                    "records": crashed.records,
                    "next": f"retrying with batches of {caution.max_records}",
                }
                progress.events.append(("batch_crashed", event_fields))
        return self._cautions.get(claim.partition)

    @contextlib.contextmanager
    def _marked(self, attempt: _Attempt) -> Iterator[None]:
        """Mark a batch as being stored, until it is stored or fails in an expected way."""
        self._note(attempt, is_suspect=True)
        try:
            yield
        except Exception as error:
            if isinstance(error, UnderstudyError | OSError | MemoryError):
                self._note(None)
            else:
                self._note(attempt, is_suspect=True)
            raise
        except BaseException:
            self._note(None)
            raise
        self._note(None)

    def _note(self, attempt: _Attempt | None, *, is_suspect: bool = False) -> None:
        if attempt is not None:
            attempt.is_suspect = is_suspect
        if self._mark is not None:
            self._mark.write(attempt)

    def _batch(self, claim: Claim, read: Read, attempt: _Attempt) -> tuple[Read, WriteBatch]:
        """Check records until a commit is full; return the read of only those, and the commit."""
        candidates: list[Candidate] = []
        refused: list[RefusedFrame] = []
        parked: list[RefusedFrame] = []
        decoded_bytes = 0
        began_s = self._clock.monotonic()
        for record in read.records[: attempt.records]:
            if attempt.crashes >= MAX_CRASHES:
                detail = f"ingest crashed {attempt.crashes} times while it checked this frame"
                refused.append(RefusedFrame(record.raw, CRASHED_INGEST, detail, record.time_s))
                continue
            checked = check(record.raw, specs=self._specs, received_s=record.time_s)
            decoded_bytes += _RECORD_BYTES + len(record.raw)
            if checked.candidate is not None:
                candidates.append(checked.candidate)
                if checked.candidate.chunk is not None:
                    decoded_bytes += checked.candidate.chunk.size_bytes
            elif checked.refusal is not None:
                (parked if checked.outcome == "parked" else refused).append(checked.refusal)
            if (
                decoded_bytes >= self._config.max_decoded_bytes
                or self._clock.monotonic() - began_s >= self._config.max_check_s
            ):
                break
        count = len(candidates) + len(refused) + len(parked)
        if count < len(read.records):
            records = read.records[:count]
            complete_to_s = None if read.complete_to_s is None else -math.inf
            read = Read(records, records[-1].position, False, complete_to_s)
        return read, WriteBatch(
            claim.partition, claim.epoch, read.next, candidates, refused, parked
        )


def _count(batch: WriteBatch, receipt: Receipt, stats: IngestStats) -> None:
    stats.frames = len(batch.candidates) + len(batch.refused) + len(batch.parked)
    stats.fates.update(receipt.fates)
    for candidate, fate in zip(batch.candidates, receipt.fates, strict=True):
        if fate == "new" and candidate.chunk is not None:
            stats.steps += candidate.chunk.meta.n_steps
    stats.refusals.update(frame.reason for frame in (*batch.refused, *batch.parked))
    for reason, fate in zip(receipt.reasons, receipt.fates, strict=False):
        if fate in ("refused", "conflict"):
            stats.refusals[reason] += 1


class IngestService:
    """Copies a stream into a store; may be killed and restarted at any time."""

    def __init__(
        self,
        stream: Stream,
        store: ExperienceStore,
        specs: Specs,
        *,
        owner: str,
        config: IngestConfig | None = None,
        clock: Clock | None = None,
        spread: Spread | None = None,
        mark: BatchMark | None = None,
    ) -> None:
        """`spread` runs the turns elsewhere, such as in Spark; by default, they run here.

        `mark` isolates a frame that crashes this process; without it, the next process would crash
        in the same way.
        """
        self._stream = stream
        self._config = config or IngestConfig()
        self._clock = clock or SystemClock()
        self._partitions = PartitionIngest(
            stream, store, specs, owner=owner, config=self._config, clock=self._clock, mark=mark
        )
        self._spread: Spread = spread or self._one_by_one
        self._claims: dict[str, Claim] = {}
        self._ended: set[str] = set()
        self._failed = ""
        """The last partition that could not be read or stored."""
        self._listed_s = self._clock.monotonic()
        self._stored_to_s: dict[str, float] = {}
        """By partition: everything that entered before this monotonic time is stored."""
        self.stats = IngestStats()

    @property
    def lag_s(self) -> float:
        """How long the oldest frame that is not stored may have waited in the stream by now.

        Grows while a read or a write is stuck. May be called by any thread.
        """
        stored_to_s = min(list(self._stored_to_s.values()), default=self._listed_s)
        return max(0.0, self._clock.monotonic() - stored_to_s)

    def step(self) -> int:
        """Advance each partition once; return the number of records stored."""
        try:
            moved = sum(progress.records for progress in self._round(without=()))
        except (StorageFull, Unreachable) as error:
            self.stats.error = str(error)
            raise
        self.stats.error = ""
        return moved

    def run(self, stop: Event) -> None:
        """Repeat `step` until `stop` is set, with a pause when idle and a longer one on errors."""
        while not stop.is_set():
            try:
                moved = self.step()
            except (StorageFull, Unreachable) as error:
                event = "store_full" if isinstance(error, StorageFull) else "unreachable"
                _log.warning(event, error=str(error), retry_in_s=self._config.full_pause_s)
                self._clock.wait(stop, self._config.full_pause_s)
                continue
            if not moved:
                self._clock.wait(stop, _IDLE_S)

    def drain(self, *, within_s: float = math.inf) -> bool:
        """Store all that was in the stream at the time of the call, even while more arrives.

        Returns False when `within_s` was not enough; the time is checked between two turns.
        Partitions claimed by another owner are skipped.
        """
        began_s = self._clock.monotonic()
        caught_up: set[str] = set()
        moved = True
        while moved:
            moved = False
            for progress in self._round(without=caught_up, draining_since_s=began_s):
                # An empty read counts too: it may have ended a parent, whose children come next.
                moved = True
                if progress.is_drained:
                    caught_up.add(progress.partition)
                if self._clock.monotonic() - began_s >= within_s:
                    return False
        return True

    @property
    def ended(self) -> Container[str]:
        """The partitions that have ended and are stored."""
        return self._ended

    def is_up_to_date(self, at_s: float) -> None:
        """Note that the stream had nothing new at this monotonic time, as far as `step` read it."""
        self._listed_s = at_s
        self._stored_to_s = dict.fromkeys(self._stored_to_s, at_s)

    def positions(self) -> dict[str, Position | None]:
        """The stored position of each partition that this owner holds."""
        return {name: claim.position for name, claim in self._claims.items()}

    def _round(
        self, *, without: Container[str], draining_since_s: float | None = None
    ) -> Iterator[IngestProgress]:
        """Take one turn of every readable partition; yield progress of those this owner holds."""
        for progress in self._spread(self._turns(without, draining_since_s)):
            for event, details in progress.events:
                (_log.error if event == "position_gone" else _log.warning)(event, **details)
            if progress.claim is None:
                self._claims.pop(progress.partition, None)
                self._stored_to_s.pop(progress.partition, None)
                continue
            self._claims[progress.partition] = progress.claim
            # The lag of an empty read is 0.
            now_s = self._clock.monotonic()
            self._stored_to_s[progress.partition] = now_s - progress.stats.lag_s
            if progress.ended:
                self._ended.add(progress.partition)
                del self._stored_to_s[progress.partition]
            self.stats.add(progress.stats)
            yield progress

    def _turns(self, without: Container[str], draining_since_s: float | None) -> Iterator[Turn]:
        partitions = self._stream.partitions()
        names = {partition.id for partition in partitions}
        listed_before_s = self._listed_s
        self._listed_s = self._clock.monotonic()
        self._stored_to_s = {
            name: at_s for name, at_s in self._stored_to_s.items() if name in names
        }
        self._claims = {name: claim for name, claim in self._claims.items() if name in names}
        self._ended &= names
        # A partition that failed comes last, so that the others need not wait for it.
        ids = [partition.id for partition in partitions]
        first = ids.index(self._failed) + 1 if self._failed in ids else 0
        for partition in [*partitions[first:], *partitions[:first]]:
            is_readable = all(
                parent not in names or parent in self._ended for parent in partition.parents
            )
            if is_readable and partition.id not in self._ended and partition.id not in without:
                # Its lag grows from now on, also if it can never be read or stored.
                self._stored_to_s.setdefault(partition.id, listed_before_s)
                now_s = self._clock.monotonic()
                draining_s = 0.0 if draining_since_s is None else now_s - draining_since_s
                yield Turn(partition.id, self._claims.get(partition.id), draining_s)

    def _one_by_one(self, turns: Iterable[Turn]) -> Iterator[IngestProgress]:
        for turn in turns:
            try:
                yield self._partitions.advance(turn)
            except (StorageFull, Unreachable):
                self._failed = turn.partition
                raise


def _is_past(read: Read, began_s: float, *, began_at_s: float, now_s: float) -> bool:
    """Whether everything was read that existed at this monotonic and this wall-clock time.

    A record with a time after `now_s` was written while the clock was wrong, so it proves nothing.
    """
    if not read.records:
        return True
    if read.complete_to_s is not None:
        return read.complete_to_s >= began_s
    return began_at_s < read.records[-1].time_s <= now_s


def log_not_drained(error: object) -> None:
    """Log why frames are left in the stream, and that none of them is lost."""
    _log.warning(
        "not_drained",
        error=str(error),
        next="remaining frames stay in the stream and are stored at the next start",
    )


@contextlib.contextmanager
def log_undrained_on_stop(is_asked: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Log instead of raising when frames cannot be read or stored now and a stop is requested.

    Errors that a restart would not fix are raised, such as a failing disk or an invalid setting.
    """
    try:
        yield
    except (StorageFull, Unreachable, ClaimLost) as error:
        if not is_asked():
            raise
        log_not_drained(error)
