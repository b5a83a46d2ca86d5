"""A full check: every committed frame is read, compared with its checksums, and counted."""

import uuid
from collections.abc import Iterator, Sequence
from itertools import islice

from understudy.core.chunk import chunk_of
from understudy.core.errors import Refused
from understudy.core.frame import Frame, FrameKind
from understudy.core.ports import Gone
from understudy.core.session import tombstone_of
from understudy.stores.audit import Findings, Held
from understudy.stores.cassandra.admin import Admin
from understudy.stores.cassandra.commits import Arrived, Commit, commits_between, lasting_s
from understudy.stores.cassandra.known import Journal
from understudy.stores.cassandra.partitions import Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Row, Wire
from understudy.stores.view import EXPIRED, FORGOTTEN, QUARANTINED, STORED

_AT_ONCE = 256
_FATES: dict[Gone, int] = {"forgotten": FORGOTTEN, "expired": EXPIRED, "quarantined": QUARANTINED}


def audit(wire: Wire, partitions: Partitions, journal: Journal, *, tailer: Tailer, admin: Admin) -> Findings:
    """Read every stored byte once."""
    findings = Findings()
    heads = tailer.heads(look=True)
    rows = partitions.rows(heads)
    findings.corrupt += [
        f"the row of partition {name}, which was committed up to {head}, is not there"
        for name, head in sorted(heads.items())
        if head and name not in rows
    ]
    journal.refresh()
    arrivals = (
        one
        for _, row in sorted(rows.items())
        for one in _arrivals(wire, row, journal=journal, tailer=tailer, findings=findings)
    )
    while page := list(islice(arrivals, _AT_ONCE)):
        _audit_page(page, journal, tailer, findings)
    for row in admin.quarantine_rows():
        findings.n_parked += row.parked
        findings.n_quarantined += not row.parked
    return findings


def _arrivals(
    wire: Wire, row: Row, *, journal: Journal, tailer: Tailer, findings: Findings
) -> Iterator[tuple[Commit, Arrived]]:
    """Every arrival of a partition; what else its commits tell is noted on the way."""
    name = row.partition
    seen = 0
    last: Commit | None = None
    for commit in commits_between(wire, name, 0, row.commit_no):
        if commit.before > seen and not tailer.may_have_run_out(last):
            lost = commit.before - seen
            findings.corrupt.append(f"{lost} arrivals before commit {commit.number} of {name} are not there")
        seen = commit.before + commit.facts.n_arrivals
        last = commit
        for one in commit.facts.quarantined:
            if commit.events >= journal.forgets.get(one.player, (0, 0.0))[0] and any(one.session):
                findings.quarantined.setdefault((one.session, one.chunk_no), []).append(one.crc)
        findings.forgotten_sessions.update(tombstone_of(session) for session, _ in commit.facts.forgotten)
        yield from ((commit, one) for one in commit.facts.stored)
    last_no = 0 if last is None else last.number
    if last_no < row.commit_no and not tailer.is_past(row.at_s, lasting_s(row.keep_s)):
        findings.corrupt.append(f"commits {last_no + 1} to {row.commit_no} of {name} are not there")


def _audit_page(page: Sequence[tuple[Commit, Arrived]], journal: Journal, tailer: Tailer, findings: Findings) -> None:
    there = [one for commit, one in page if journal.arrival_gone(one, commit.events) is None]
    frames = tailer.frames(there)
    if any(one.frame_key not in frames for one in there):
        journal.refresh()
        tailer.heads()
    for commit, one in page:
        gone = journal.arrival_gone(one, commit.events)
        frame = frames.get(one.frame_key)
        if gone is None and frame is None:
            gone = tailer.lost(commit)
        if gone == "damaged":
            findings.corrupt.append(f"{_name(one)} is not there, or not whole")
        elif gone is not None:
            findings.hold(one.key, Held(one.crc, one.kind, one.first_step, one.n_steps, _FATES[gone]))
            if gone == "forgotten":
                findings.forgotten_sessions.add(tombstone_of(one.session))
        elif frame is not None:
            _audit_frame(one, frame, findings)


def _audit_frame(one: Arrived, frame: Frame, findings: Findings) -> None:
    try:
        if frame.kind is not FrameKind.DATA:
            findings.hold(one.key, Held(one.crc, one.kind, -1, 0))
            findings.control(one.session, one.chunk_no, frame.kind, frame.encode())
            return
        meta = chunk_of(frame).meta
    except Refused as error:
        findings.corrupt.append(f"{_name(one)}: {error}")
        return
    if (meta.first_step, meta.n_steps, meta.game, frame.player) != (one.first_step, one.n_steps, one.game, one.player):
        findings.corrupt.append(f"its commit tells of {_name(one)} what its metadata does not")
    findings.hold(one.key, Held(one.crc, one.kind, meta.first_step, meta.n_steps, STORED))


def _name(one: Arrived) -> str:
    return f"chunk {one.chunk_no} of session {uuid.UUID(bytes=one.session)}"
