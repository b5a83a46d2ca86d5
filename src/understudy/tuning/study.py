"""Study: the loop of a study, and the events that it sends.

The loop imports neither JAX nor a game; only the slots' processes do.
"""

import bisect
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, LearningFailed
from understudy.core.settings import nearest
from understudy.training.events import Stop
from understudy.tuning.journal import (
    Journal,
    Row,
    TrialRecord,
    finished_fields,
)
from understudy.tuning.result import score, signed
from understudy.tuning.search import (
    SearchPlan,
    has_converged,
    make_rule,
    make_searcher,
    trial_seed,
)
from understudy.tuning.slots import Fields, Slot, SlotLost, Slots, slot_request
from understudy.tuning.study_config import StudyConfig
from understudy.tuning.trial import Metric, Report, Searcher, Trial, TrialResult

MAX_LOSSES = 3
"""A trial whose process ended so often fails, unless it came further each time: it may have ended
the process itself."""
SYNC_S = 0.1
"""Results of this time may be lost in a power cut, and their trials repeated; none in a kill."""


# --- Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStarted:
    """The study's folder exists, and its trials start; sent before all other events.

    It is sent again when the winner is trained on held-out seeds: the trials are then those of this
    test.
    """

    folder: str
    name: str
    max_trials: int
    metric: Metric
    rows: Sequence[Row]
    """The trials that ended before the study was resumed."""
    best: Row | None
    """Of these."""
    slots: int
    is_test: bool
    """Whether the trials are trainings of the best ones on held-out seeds."""
    notes: Sequence[str]
    limit_s: float = math.inf
    """Seconds until the study ends at the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A slot runs a trial."""

    trial: Trial
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial has its result."""

    row: Row
    is_best: bool
    """Of all trials that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEnded:
    """A slot's process ended unexpectedly; its trials start again elsewhere."""

    slot: int
    why: str


StudyEvent = StudyStarted | TrialStarted | Report | TrialEnded | SlotEnded
OnStudyEvent = Callable[[StudyEvent], object]


# --- The loop -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenSlot:
    """A slot as the study knows it."""

    index: int
    slot: Slot
    lanes: int | None = None
    """0 if it runs one trial after the other; None until it is ready."""
    running: dict[int, float] = field(default_factory=dict)
    """The deadline of each of its trials, on the monotonic clock."""
    bucket: str = ""
    """Of its running trials."""
    asked_buckets: dict[int, None] = field(default_factory=dict)
    """Trials whose bucket it was asked for, in this order."""


class Study:
    """The loop of a study: decides in the order of trials, so that no result depends on time."""

    def __init__(
        self,
        config: StudyConfig,
        journal: Journal,
        slots: Slots,
        *,
        num_slots: int,
        searcher: Searcher | None = None,
        clock: Clock | None = None,
        on_event: OnStudyEvent = lambda event: None,
    ) -> None:
        """`searcher` is by default that of `config`."""
        self._config = config
        self._journal = journal
        self._state = journal.state
        self._max_trials = self._state.max_trials or config.max_trials
        self._slots = slots
        self._num_slots = num_slots
        self._clock = clock or SystemClock()
        self._on_event = on_event
        self._rule = make_rule(config.stopping)
        self._waits = config.stopping.rule != "none"
        self._searcher = searcher or make_searcher(
            SearchPlan(
                space=config.space,
                seed=config.seed,
                method=config.search.method,
                metric=config.metric,
                constraints=config.constraints,
                points=config.search.points,
            )
        )
        self._open: list[_OpenSlot] = []
        self._buckets: dict[int, str] = {}
        self._n_failed_starts = 0
        self._scores: list[float | None] = []
        """Of the trials that the searcher was told."""
        self._reports: list[list[float]] = []
        """The same; larger is better."""
        self._best: float | None = None
        """The score of the best of all trials that have ended."""
        self._waiting: list[int] = []
        self._sync_at_s = -math.inf
        self._ends_at_s = math.inf
        """On the monotonic clock, as `_sync_at_s`."""
        self._note_at_s = math.inf
        """When the journal next notes that this process still runs, if the time is limited."""
        self.is_stopped = False
        """An event's receiver returned Stop."""
        self._restore()
        if config.max_seconds and not self._state.is_over:
            self._ends_at_s = self._clock.monotonic() + config.max_seconds - self._state.used_s
            journal.append("opened", at_s=self._now_s())
            self._note_at_s = self._clock.monotonic() + self._note_every_s

    def _restore(self) -> None:
        """Repeat what the searcher was asked and told before."""
        for record in self._state.records:
            trial = record.trial
            self._tell(self._n_needed(trial.trial_no))
            values = self._searcher.ask(trial.trial_no)
            if json.loads(json.dumps(values)) != trial.values:
                raise ConfigError(
                    f"{self._journal.path} has other values for trial {trial.trial_no} than "
                    f"{self._config.search.method} chooses now; resume the study with the versions "
                    f"of packages that it was started with: {self._state.created['versions']}"
                )
            if record.result is None:
                self._waiting.append(trial.trial_no)
            else:
                self._note_score(record.result)

    def _n_needed(self, trial_no: int) -> int:
        """How many trials the searcher has been told when it is asked for this one."""
        convergence = self._config.convergence
        if convergence.threshold is not None and convergence.is_legacy:
            return trial_no - trial_no % convergence.legacy_batch  # RLiable waits for each batch
        return max(0, trial_no - self._config.search.lag + 1)

    @property
    def _note_every_s(self) -> float:
        """Seconds between two `ran` events, of which a journal has at most 1,000."""
        return max(1.0, self._config.max_seconds / 1_000)

    @property
    def limit_s(self) -> float:
        """Seconds until the study ends at the latest; infinite without a limit."""
        return max(0.0, self._ends_at_s - self._clock.monotonic())

    # --- One round --------------------------------------------------------------------------------

    def run(self) -> None:
        """Repeat `step` until the study is over or an event's receiver returned Stop."""
        while not self.is_stopped and self.step():
            pass

    def step(self) -> bool:
        """Ask for trials, start them, and handle what slots send; False after the last step."""
        if self._clock.monotonic() >= self._ends_at_s and not self._state.is_over:
            self._end_out_of_time()
        elif self._clock.monotonic() >= self._note_at_s:
            self._journal.append("ran", at_s=self._now_s())
            self._note_at_s = self._clock.monotonic() + self._note_every_s
        while self._ask():
            pass
        is_idle = not self._waiting and not any(open_slot.running for open_slot in self._open)
        if self._state.is_out_of_time or (self._state.ended and is_idle):
            self._journal.sync()
            return False
        self._start_slots()
        self._lease()
        if self._clock.monotonic() >= self._sync_at_s:  # while the slots work
            self._journal.sync()
            self._sync_at_s = self._clock.monotonic() + SYNC_S
        by_slot = {id(open_slot.slot): open_slot for open_slot in self._open}
        for slot in self._slots.wait([open_slot.slot for open_slot in self._open], self._wait_s()):
            open_slot = by_slot[id(slot)]
            try:
                self._handle(open_slot, slot.receive())
            except SlotLost as error:
                self._lose(open_slot, str(error))
        self._end_overdue()
        return True

    def close(self) -> None:
        """End the slots, also in the middle of a trial; may be called twice."""
        while self._open:
            self._open.pop().slot.kill()
        self._slots.close()

    # --- Which trials -----------------------------------------------------------------------------

    def _ask(self) -> bool:
        """Ask for the next trial if that is possible now."""
        records = self._state.records
        trial_no = len(records)
        if self._state.ended:
            return False
        if trial_no >= self._max_trials:
            return self._end(f"all {self._max_trials} trials")
        n_needed = self._n_needed(trial_no)
        if any(record.result is None for record in records[len(self._scores) : n_needed]):
            return False
        self._tell(n_needed)
        if has_converged(self._scores, self._config.convergence):
            return self._end("converged")
        values = self._searcher.ask(trial_no)
        if values is None:
            return self._end("the space has no more points")
        self._journal.append(
            "asked",
            trial_no=trial_no,
            values=dict(values),
            seed=trial_seed(self._config.seed, trial_no),
        )
        self._waiting.append(trial_no)
        return True

    def _end(self, why: str) -> bool:
        self._journal.append("ended", why=why)
        return False

    def _end_out_of_time(self) -> None:
        """End the study; the result of a running trial is its last report, if there is one."""
        for trial_no in sorted(no for open_slot in self._open for no in open_slot.running):
            if reports := self._state.records[trial_no].reports:
                leases = reversed(self._state.leases)
                start_s = next(lease.start_s for lease in leases if lease.trial_no == trial_no)
                self._finish(
                    TrialResult(
                        trial_no=trial_no,
                        state="stopped",
                        metrics={self._config.metric.name: reports[-1][1]},
                        seconds=max(0.0, self._now_s() - start_s),
                    )
                )
        self._journal.append(
            "ended",
            why=f"its {self._config.max_seconds:g} seconds are over",
            is_out_of_time=True,
            at_s=self._now_s(),
        )

    def _tell(self, count: int) -> None:
        """Tell the searcher the results of the first `count` trials, in order."""
        for record in self._state.records[len(self._scores) : count]:
            assert record.result is not None
            self._searcher.tell(record.trial, record.result)
            self._scores.append(score(self._config, record.result))
            self._reports.append(self._signed_reports(record))

    def _signed_reports(self, record: TrialRecord) -> list[float]:
        return [signed(self._config.metric, value) for _, value in record.reports]

    def _must_stop(self, record: TrialRecord) -> bool:
        """The decision on a report; the trials that count are those told before it was asked."""
        reports = self._signed_reports(record)
        earlier = self._reports[: self._n_needed(record.trial.trial_no)]
        return self._rule.must_stop(reports, [other[: len(reports)] for other in earlier])

    # --- Where they run ---------------------------------------------------------------------------

    def _start_slots(self) -> None:
        n_trials = len(self._waiting) + sum(len(open_slot.running) for open_slot in self._open)
        free = set(range(self._num_slots)) - {open_slot.index for open_slot in self._open}
        for index in sorted(free)[: max(0, n_trials - len(self._open))]:
            request = slot_request(self._config.trainable, waits=self._waits)
            self._open.append(_OpenSlot(index, self._slots.open(index, request)))

    def _lease(self) -> None:
        """Start waiting trials where there is room, and ask for the buckets of the others."""
        ready = [open_slot for open_slot in self._open if open_slot.lanes is not None]
        has_lanes = any((open_slot.lanes or 0) > 1 for open_slot in ready)
        n_free = sum(max(0, (each.lanes or 1) - len(each.running)) for each in ready)
        for trial_no in list(self._waiting):
            if has_lanes and trial_no not in self._buckets:
                self._ask_bucket(trial_no, ready)
            elif n_free and (open_slot := self._free_slot(trial_no, ready)) is not None:
                n_free -= 1
                self._start(trial_no, open_slot)

    def _ask_bucket(self, trial_no: int, ready: Sequence[_OpenSlot]) -> None:
        if not any(trial_no in open_slot.asked_buckets for open_slot in ready):
            trial = self._state.records[trial_no].trial
            ready[0].asked_buckets[trial_no] = None
            self._send(ready[0], {"do": "bucket", "trial": _trial_fields(trial)})

    def _start(self, trial_no: int, open_slot: _OpenSlot) -> None:
        timeout_s = self._config.slots.trial_timeout_s
        self._waiting.remove(trial_no)
        self._journal.append(
            "leased",
            trial_no=trial_no,
            slot=open_slot.index,
            at_s=self._now_s(),
            deadline_s=round(self._clock.now() + timeout_s, 3) if timeout_s else None,
        )
        open_slot.running[trial_no] = self._clock.monotonic() + (timeout_s or math.inf)
        open_slot.bucket = self._buckets.get(trial_no, "")
        record = self._state.records[trial_no]
        self._send(open_slot, {"do": "start", "trial": _trial_fields(record.trial)})
        self._emit(TrialStarted(trial=record.trial, slot=open_slot.index))

    def _free_slot(self, trial_no: int, ready: Sequence[_OpenSlot]) -> _OpenSlot | None:
        """A slot with room for the trial.

        Trials of one bucket share a slot with lanes. A trial whose process ended before has a slot
        of its own, since it may have ended it.
        """
        records = self._state.records

        def has_room(open_slot: _OpenSlot) -> bool:
            running = open_slot.running
            if not running:
                return True
            return (
                len(running) < (open_slot.lanes or 1)
                and open_slot.bucket == self._buckets.get(trial_no, "")
                and not any(records[other].losses for other in (trial_no, *running))
            )

        free = [open_slot for open_slot in ready if has_room(open_slot)]
        return min(free, key=lambda open_slot: len(open_slot.running), default=None)

    def _send(self, open_slot: _OpenSlot, message: Fields) -> None:
        with suppress(SlotLost):  # the next `receive` raises it again
            open_slot.slot.send(message)

    def _wait_s(self) -> float | None:
        deadlines = [at for open_slot in self._open for at in open_slot.running.values()]
        deadlines += [self._ends_at_s, self._note_at_s]
        if not self._journal.is_synced:
            deadlines.append(self._sync_at_s)
        first = min(deadlines)
        return None if first == math.inf else max(0.0, first - self._clock.monotonic())

    # --- What slots send --------------------------------------------------------------------------

    def _handle(self, open_slot: _OpenSlot, message: Fields) -> None:
        match message["is"]:
            case "ready":
                name = self._config.metric.name
                if name not in message["metrics"]:
                    raise ConfigError(
                        f"{self._config.trainable.path} measures no metric {name}; "
                        f"{nearest(name, message['metrics'])}"
                    )
                open_slot.lanes = message["lanes"]
                self._n_failed_starts = 0
            case "refused":
                kind = ConfigError if message["is_config"] else LearningFailed
                raise kind(message["error"])
            case "bucket":
                self._buckets[message["trial_no"]] = message["bucket"]
                del open_slot.asked_buckets[message["trial_no"]]
            case "report":
                self._handle_report(open_slot, message)
            case "result":
                trial_no = message["trial_no"]
                if trial_no in open_slot.asked_buckets:  # it has no bucket
                    del open_slot.asked_buckets[trial_no]
                    self._waiting.remove(trial_no)
                open_slot.running.pop(trial_no, None)
                names = ("trial_no", "state", "metrics", "seconds", "error")
                self._finish(TrialResult(**{name: message[name] for name in names}))

    def _handle_report(self, open_slot: _OpenSlot, message: Fields) -> None:
        report = Report(message["trial_no"], message["step"], message["value"])
        self._journal.append("report", **report._asdict())
        if self._waits:
            must_stop = self._must_stop(self._state.records[report.trial_no])
            answer = {"do": "answer", "trial_no": report.trial_no, "must_stop": must_stop}
            self._send(open_slot, answer)
        self._emit(report)

    def _finish(self, result: TrialResult) -> None:
        name = self._config.metric.name
        if result.state != "failed" and name not in result.metrics:
            error = f"the trial ended without a finite {name}"
            result = replace(result, state="failed", metrics={}, error=error)
        self._journal.append("finished", **finished_fields(result), at_s=self._now_s())
        record = self._state.records[result.trial_no]
        assert record.result is not None
        is_best = self._note_score(record.result)
        self._emit(TrialEnded(row=Row(record.trial, record.result), is_best=is_best))

    def _note_score(self, result: TrialResult) -> bool:
        value = score(self._config, result)
        is_best = value is not None and (self._best is None or value > self._best)
        if is_best:
            self._best = value
        return is_best

    def _fail(self, trial_no: int, error: str, seconds: float = 0.0) -> None:
        self._finish(TrialResult(trial_no=trial_no, state="failed", error=error, seconds=seconds))

    def _lose(self, open_slot: _OpenSlot, why: str) -> None:
        """Start the trials of a slot whose process ended again, unless they end it each time."""
        self._open.remove(open_slot)
        open_slot.slot.kill()
        if open_slot.lanes is None:
            self._n_failed_starts += 1
            if self._n_failed_starts >= MAX_LOSSES:
                raise LearningFailed(
                    f"a slot ended {MAX_LOSSES} times before it was ready: {why}; correct what it "
                    "reports there, and resume the study"
                )
        # Of the trials whose bucket it was asked for, only the first one may have ended it.
        for trial_no in sorted({*open_slot.running, *list(open_slot.asked_buckets)[:1]}):
            self._journal.append("lost", trial_no=trial_no, why=why, at_s=self._now_s())
            if trial_no in open_slot.asked_buckets:
                self._waiting.remove(trial_no)
            if self._state.records[trial_no].losses >= MAX_LOSSES:
                self._fail(trial_no, f"its process ended {MAX_LOSSES} times: {why}")
            else:
                bisect.insort(self._waiting, trial_no)
        self._emit(SlotEnded(slot=open_slot.index, why=why))

    def _end_overdue(self) -> None:
        """Fail the trials that are past their deadlines; others of their slots start again."""
        now_s = self._clock.monotonic()
        for open_slot in list(self._open):
            if min(open_slot.running.values(), default=math.inf) > now_s:
                continue
            self._open.remove(open_slot)
            open_slot.slot.kill()
            limit_s = self._config.slots.trial_timeout_s
            for trial_no, deadline_s in open_slot.running.items():
                if deadline_s <= now_s:
                    error = f"it did not end within {limit_s:g} s; raise trial_timeout_s"
                    self._fail(trial_no, error, limit_s)
                else:
                    bisect.insort(self._waiting, trial_no)
            why = f"a trial did not end within {limit_s:g} s"
            self._emit(SlotEnded(slot=open_slot.index, why=why))

    def _now_s(self) -> float:
        return round(self._clock.now(), 3)

    def _emit(self, event: StudyEvent) -> None:
        if self._on_event(event) is Stop:
            self.is_stopped = True


def _trial_fields(trial: Trial) -> dict[str, Any]:
    return {"trial_no": trial.trial_no, "values": dict(trial.values), "seed": trial.seed}
