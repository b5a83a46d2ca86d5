from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from understudy.core.errors import Closed, ConfigError, Corrupt, StorageFull
from understudy.testing.faults import FaultySync
from understudy.tuning.journal import NAME, Journal, SlotTime, create_journal, read_journal, table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "study" / NAME
    create_journal(path, study={"space": {"z": 1, "a": 2}})
    return path


def fill(journal: Journal) -> None:
    for trial_no in range(3):
        journal.append("asked", trial_no=trial_no, values={"x": 0.1 * trial_no}, seed=trial_no)
        journal.append("leased", trial_no=trial_no, slot=0, deadline_s=None)
        journal.append("report", trial_no=trial_no, step=1, value=1e-17 * trial_no)
    journal.append(
        "finished", trial_no=0, state="done", metrics={"reward": 1 / 3}, seconds=0.5, error=""
    )
    journal.append("lost", trial_no=1, why="it was ended by signal 9")
    journal.append("leased", trial_no=1, slot=1, deadline_s=7.5)


def test_a_journal_is_read_as_it_was_written(path: Path):
    with closing(Journal(path)) as journal:
        fill(journal)
        written = journal.state
    state = read_journal(path).state
    assert state.records == written.records
    assert list(state.created["study"]["space"]) == ["z", "a"]  # the order has a meaning
    assert table(state.rows())[0]["metrics"] == {"reward": 1 / 3}
    assert state.records[0].result is not None
    assert state.records[0].result.reports == ((1, 0.0),)
    assert state.records[1].losses == 1
    assert state.records[1].reports == []  # it starts from its beginning
    assert state.records[2].reports == [(1, 2e-17)]


def test_the_times_of_leases_are_read_if_the_journal_has_them(path: Path):
    with closing(Journal(path)) as journal:
        fill(journal)  # as an earlier version
        assert journal.state.leases == []
        journal.append("leased", trial_no=2, slot=1, deadline_s=None, at_s=5.0)
        journal.append("leased", trial_no=1, slot=0, deadline_s=None, at_s=5.5)
        journal.append("lost", trial_no=2, why="it was ended by signal 9", at_s=6.0)
        journal.append("lost", trial_no=2, why="its bucket was asked for", at_s=6.5)
        journal.append("leased", trial_no=2, slot=0, deadline_s=None, at_s=7.0)
        end = {"state": "failed", "metrics": {}, "seconds": 0.0, "error": "no"}
        journal.append("finished", trial_no=2, **end, at_s=8.0)
    assert read_journal(path).state.leases == [
        SlotTime(2, 1, 5.0, 6.0),
        SlotTime(1, 0, 5.5),
        SlotTime(2, 0, 7.0, 8.0),
    ]


def test_losses_are_counted_since_a_trial_last_came_further(path: Path):
    with closing(Journal(path)) as journal:
        fill(journal)
        losses = []
        for n_reports in (0, 1, 1, 0, 2, 1):
            journal.append("leased", trial_no=1, slot=0, deadline_s=None)
            for step in range(n_reports):
                journal.append("report", trial_no=1, step=step, value=0.0)
            journal.append("lost", trial_no=1, why="it was ended by signal 9")
            losses.append(journal.state.records[1].losses)
    assert losses == [2, 3, 4, 5, 1, 2]  # one was lost before, after a report


def test_a_line_cut_at_any_byte_is_cut_off_and_the_rest_kept(path: Path):
    with closing(Journal(path)) as journal:
        fill(journal)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    start = len(raw) - len(lines[-1])
    for size in range(start + 1, len(raw)):
        path.write_bytes(raw[:size])
        with closing(Journal(path)) as journal:
            assert journal.cut_bytes == size - start
            journal.append("leased", trial_no=1, slot=1, deadline_s=7.5)
        assert path.read_bytes() == raw


def test_pages_lost_at_the_end_are_cut_off(path: Path):
    with closing(Journal(path)) as journal:
        fill(journal)
    raw = path.read_bytes()
    path.write_bytes(raw[:-200] + bytes(150) + raw[-50:-1])
    with closing(Journal(path)) as journal:
        assert journal.cut_bytes > 150
        assert len(journal.state.records) == 3


def test_a_damaged_byte_before_a_readable_line_is_named(path: Path, rng: np.random.Generator):
    with closing(Journal(path)) as journal:
        fill(journal)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    for _ in range(100):
        at = int(rng.integers(len(raw) - len(lines[-1]) - 1))
        flipped = bytearray(raw)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        line_no = raw[:at].count(b"\n") + 1
        with pytest.raises(Corrupt, match=f"line {line_no} of .*restore the file from a copy"):
            read_journal(path)
        assert path.read_bytes() == flipped


@pytest.mark.parametrize("change", ["deleted", "exchanged", "repeated"])
def test_a_deleted_moved_or_repeated_line_is_damage(path: Path, change: str):
    with closing(Journal(path)) as journal:
        fill(journal)
    lines = path.read_bytes().splitlines(keepends=True)
    match change:
        case "deleted":
            lines = [lines[0], *lines[2:]]
        case "exchanged":
            lines[1], lines[4] = lines[4], lines[1]
        case _:
            lines.insert(2, lines[1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(Corrupt, match=r"line [23] of"):
        read_journal(path)


def test_no_journal_or_another_file_is_no_study(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a study"):
        read_journal(tmp_path / NAME)
    (tmp_path / NAME).write_text("notes\n")
    with pytest.raises(Corrupt, match="line 1"):
        Journal(tmp_path / NAME)


def test_all_events_are_synced_at_once(path: Path):
    sync = FaultySync(full_at=[2])
    with closing(Journal(path, sync=sync)) as journal:
        fill(journal)
        assert sync.calls == 0
        journal.sync()
        journal.sync()
        assert sync.calls == 1
        journal.append("ended", why="all 3 trials")
        with pytest.raises(StorageFull, match="free some space"):
            journal.sync()
    with pytest.raises(Closed):
        journal.append("ended", why="")
