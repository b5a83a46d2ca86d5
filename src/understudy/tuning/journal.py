"""The journal of a study: what happened, one event a line; the state of a study is computed of it.

    created    the study, its id and the versions of packages
    opened     a process runs the study from here on; only if its time is limited
    ran        that process still runs; every second, or less often if the limit is long
    asked      a trial: values and seed
    leased     a slot starts the trial, from its beginning; a deadline if it has one
    report     an intermediate value of the trial
    lost       the slot's process ended before the trial
    finished   the result of the trial, without its reports
    extended   max_trials is another number
    ended      no further trial is asked, and why; if its time is over, trials without a result
               get none

The events opened, ran, leased, lost and finished, and an ended one of a study whose time is over,
have `at_s`, seconds since 1970, but not in journals of earlier versions. Each line has its number
and a checksum. The process that appends holds the study's lock. A line that a kill or power cut
left unfinished is cut off when the study is resumed: at worst it repeats a trial, which has the
same result. Damage in front of a readable line is an error.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from understudy.core.canonical import strict_json
from understudy.core.errors import Closed, ConfigError, Corrupt, Refused, StorageFailed, StorageFull
from understudy.core.log import Sync, make_folder, storage_error, sync_data, write_file
from understudy.tuning.trial import Trial, TrialResult

NAME = "journal.jsonl"
_CRC = ',"crc":"'
_END_BYTES = len(_CRC) + len('00000000"}\n')


class Row(NamedTuple):
    """A trial, and how it ended."""

    trial: Trial
    result: TrialResult


@dataclass(slots=True)
class TrialRecord:
    """What a journal says of one trial."""

    trial: Trial
    result: TrialResult | None = None
    reports: list[tuple[int, float]] = field(default_factory=list)
    losses: int = 0
    """How often its process ended since it last came further than before."""
    most_reports: int = 0
    """When its process ended, at most."""


class SlotTime(NamedTuple):
    """A trial on a slot; a trial whose slot ended has several."""

    trial_no: int
    slot: int
    start_s: float
    """Since 1970, as `end_s`."""
    end_s: float | None = None
    """None: the trial runs, or nothing was there to write down its end."""


class StudyState:
    """The state of a study, from its events."""

    def __init__(self) -> None:
        self.created: Mapping[str, Any] = {}
        self.records: list[TrialRecord] = []
        self.leases: list[SlotTime] = []
        """Of which the times are known, in the order of their starts."""
        self._open_leases: dict[int, int] = {}
        """The last lease of each trial, by its index, while it has no end."""
        self.max_trials: int | None = None
        """If it was changed since the study was created."""
        self.ended = ""
        """Why no further trial is asked; empty if the study goes on."""
        self.is_out_of_time = False
        """The study has ended, and trials without a result get none."""
        self.used_s = 0.0
        """Seconds in which processes ran the study, if its time is limited."""
        self._seen_s = math.inf
        """When the process that runs it wrote its last event; infinite before the first one."""
        self.n_events = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        """Change the state by one event."""
        self.n_events += 1
        if (at_s := event.get("at_s")) is not None:
            if event["event"] != "opened":
                self.used_s += max(0.0, at_s - self._seen_s)
            self._seen_s = at_s
        match event["event"]:
            case "created":
                self.created = event
            case "asked":
                trial = Trial(
                    trial_no=event["trial_no"], values=event["values"], seed=event["seed"]
                )
                self.records.append(TrialRecord(trial))
            case "extended":
                self.max_trials = event["max_trials"]
                self.ended = ""
            case "ended":
                self.ended = event["why"]
                self.is_out_of_time = event.get("is_out_of_time", False)
            case "opened" | "ran":
                pass
            case kind:
                self._apply_to_trial(self.records[event["trial_no"]], kind, event)
                if "at_s" in event:
                    self._note_time(event["trial_no"], kind, event)

    def _note_time(self, trial_no: int, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "leased":
            self._open_leases[trial_no] = len(self.leases)
            self.leases.append(SlotTime(trial_no, event["slot"], event["at_s"]))
        elif (index := self._open_leases.pop(trial_no, None)) is not None:
            self.leases[index] = self.leases[index]._replace(end_s=event["at_s"])

    def _apply_to_trial(self, record: TrialRecord, kind: str, event: Mapping[str, Any]) -> None:
        match kind:
            case "leased":
                record.reports = []
            case "report":
                record.reports.append((event["step"], event["value"]))
            case "lost":
                if len(record.reports) > record.most_reports:
                    record.most_reports = len(record.reports)
                    record.losses = 0
                record.losses += 1
            case "finished":
                record.result = TrialResult(
                    trial_no=record.trial.trial_no,
                    state=event["state"],
                    metrics=event["metrics"],
                    reports=tuple(record.reports),
                    seconds=event["seconds"],
                    error=event["error"],
                )

    @property
    def is_over(self) -> bool:
        """Whether the study has ended, and no trial is left to run."""
        all_ran = all(record.result for record in self.records)
        return bool(self.ended) and (self.is_out_of_time or all_ran)

    def rows(self) -> list[Row]:
        """The trials that have ended, in order."""
        return [
            Row(record.trial, record.result) for record in self.records if record.result is not None
        ]


class JournalContent(NamedTuple):
    """The contents of a journal."""

    state: StudyState
    size_bytes: int
    """Of the readable lines; an unfinished one may follow."""


def read_journal(path: Path) -> JournalContent:
    """Read a journal, also while a study appends to it.

    ConfigError if there is none; Corrupt if a line in front of a readable one is damaged.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        why = "it has no journal" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(
            f"{path.parent} is not a study ({why}); give the folder that 'tune' printed"
        ) from None
    state = StudyState()
    at = 0
    for line_no, line in enumerate(raw.splitlines(keepends=True)):
        event = _event(line)
        if event is None and not any(
            _event(later) for later in raw[at + len(line) :].splitlines(True)
        ):
            break
        if event is None or event["n"] != line_no:
            raise Corrupt(
                f"line {line_no + 1} of {path} is damaged or missing, and later lines are not; "
                f"restore the file from a copy, or keep the trials before it: head -n {line_no} "
                f"{path.name} > kept, replace {path.name} by it, and resume the study"
            )
        state.apply(event)
        at += len(line)
    if not state.created:
        raise Corrupt(
            f"line 1 of {path} is damaged; restore the file from a copy, or start the study again"
        )
    return JournalContent(state, at)


def _event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None if it is damaged or unfinished."""
    if line[-_END_BYTES:] != _end(line[:-_END_BYTES]):
        return None
    try:
        event: dict[str, Any] = strict_json(line)
    except Refused:
        return None
    return event


def _line(line_no: int, event: str, fields: Mapping[str, Any]) -> bytes:
    # Not in canonical form: the order of a space's dimensions has a meaning.
    text = json.dumps(
        {"n": line_no, "event": event, **fields},
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()[:-1]
    return text + _end(text)


def _end(text: bytes) -> bytes:
    """The end of a line that begins with this text."""
    return f'{_CRC}{crc32(text):08x}"}}\n'.encode()


def create_journal(path: Path, **created: Any) -> None:
    """Write a journal with its first event; it exists completely or not at all."""
    make_folder(path.parent.resolve())
    write_file(path, _line(0, "created", created), mode=0o644)


class Journal:
    """Appends to the journal of a study; the caller holds the study's lock."""

    def __init__(self, path: Path, *, sync: Sync = sync_data) -> None:
        """Open a journal that `create_journal` wrote; cut off a line that is not finished."""
        self.path = path
        self._sync = sync
        self.is_synced = True
        self.state, self.size_bytes = read_journal(path)
        self._descriptor: int | None = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        self.cut_bytes = os.fstat(self._descriptor).st_size - self.size_bytes
        """The size of the line that was cut off."""
        try:
            self._cut()
        except OSError:
            self.close()
            raise

    def append(self, event: str, **fields: Any) -> None:
        """Write an event and apply it to the state."""
        if self._descriptor is None:
            raise Closed(f"{self.path} is closed; resume the study to append to it")
        line = memoryview(_line(self.state.n_events, event, fields))
        end = self.size_bytes + len(line)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._cut()
            raise storage_error(
                error, f"writing {self.path.name}", then="resume the study"
            ) from error
        self.size_bytes = end
        self.is_synced = False
        self.state.apply({"event": event, **fields})

    def _cut(self) -> None:
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self.size_bytes)
        os.lseek(self._descriptor, self.size_bytes, os.SEEK_SET)

    def sync(self) -> None:
        """Make all events durable."""
        if self.is_synced or self._descriptor is None:
            return
        try:
            self._sync(self._descriptor)
        except OSError as error:
            raise storage_error(
                error, f"writing {self.path.name}", then="resume the study"
            ) from error
        self.is_synced = True

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(StorageFailed, StorageFull):  # each wait of the study reports it
                self.sync()
            os.close(self._descriptor)
            self._descriptor = None


def finished_fields(result: TrialResult) -> dict[str, Any]:
    """The fields of the event `finished`."""
    return {
        "trial_no": result.trial_no,
        "state": result.state,
        "metrics": dict(result.metrics),
        "seconds": round(result.seconds, 6),
        "error": result.error,
    }


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The trials as JSON; two runs of a study have equal tables, except for `seconds`."""
    return [
        {
            "trial_no": row.trial.trial_no,
            "values": dict(row.trial.values),
            "seed": row.trial.seed,
            "state": row.result.state,
            "metrics": dict(row.result.metrics),
            "reports": [list(report) for report in row.result.reports],
            "seconds": row.result.seconds,
            "error": row.result.error,
        }
        for row in rows
    ]
