"""The files that a killed game leaves, and how the next start uses them."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import ClientConfig, connect
from understudy.client.connect import spool_tag
from understudy.client.sender import send_unsent_frames
from understudy.client.spool import (
    MAX_ADOPTED,
    Spool,
    count_spooled,
    forget_spooled,
    unreadable_spools,
)
from understudy.client.spool_folder import SessionSpool, SpooledFrame, SpoolFolder, read_game
from understudy.core.errors import Corrupt, Locked, SpecError
from understudy.core.log import FileLock, LogFile
from understudy.core.names import new_session, player_name
from understudy.experience.frame import (
    CloseReport,
    DropReport,
    FrameKind,
    close_frame,
    data_frame,
    drop_frame,
    read_close,
    read_drop,
)
from understudy.experience.game import game_spec
from understudy.ports import Ack

SPEC = game_spec("my-game", obs=2, actions=3)
ANNA = player_name("anna")


def spool_of(folder: Path, clock: FakeClock | None = None) -> tuple[Spool, SessionSpool]:
    spool = Spool(folder)
    session = new_session((clock or FakeClock()).now())
    return spool, spool.create(session, player=ANNA, spec=SPEC)


def fill(one: SessionSpool, n: int, *, size: int = 100) -> list[SpooledFrame]:
    """Spool frames of 10 steps each, in one write."""
    entries = [
        one.add(data_frame(one.session, one.next_no, bytes([at]) * size), 10) for at in range(n)
    ]
    one.folder.write()
    return entries


def adopt(folder: Path) -> tuple[Spool, SessionSpool, list[SpooledFrame]]:
    spool = Spool(folder)
    ((one, entries),) = spool.adopt()
    return spool, one, entries


def numbers(entries: list[SpooledFrame]) -> list[int]:
    return [entry.chunk_no for entry in entries]


def logs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.log"))


def test_unfinished_frames_are_found_again_in_order(tmp_path):
    spool, one = spool_of(tmp_path)
    entries = fill(one, 5)
    for entry in entries[:2]:
        one.done(entry, arrived=True)
    assert spool.close() == 0
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [2, 3, 4]
    assert (other.next_no, other.n_steps, other.player, other.spec.schema) == (
        5,
        50,
        "anna",
        SPEC.schema,
    )
    frame = other.read(found[0])
    assert frame is not None
    assert frame.body == bytes([2]) * 100
    assert other.lost_numbers == []
    spool.remove(other)
    assert list(tmp_path.iterdir()) == []


def test_what_was_acknowledged_since_the_slots_were_saved_is_sent_again_and_not_lost(tmp_path):
    spool, one = spool_of(tmp_path)
    for entry in fill(one, 5)[:2]:
        one.done(entry, arrived=True)
    crash(spool)
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [0, 1, 2, 3, 4]
    assert other.lost_numbers == []
    spool.close()


def crash(spool: Spool) -> None:
    """Release the locks as the system does for a killed process."""
    for folder in spool._folders:
        assert folder._lock is not None
        folder._lock.close()


def test_a_live_folder_is_left_alone(tmp_path):
    spool, one = spool_of(tmp_path)
    fill(one, 1)
    other = Spool(tmp_path)
    assert list(other.adopt()) == []
    assert other.foreign_bytes > 100
    with pytest.raises(Locked):
        FileLock(tmp_path / str(one.session) / ".lock", what="it")
    spool.close()


def test_all_sessions_share_one_folder_and_one_log(tmp_path):
    spool = Spool(tmp_path / "tag")
    ones = [
        spool.create(new_session(FakeClock().now()), player=player_name(f"p{n}"), spec=SPEC)
        for n in range(200)
    ]
    for one in ones:
        one.add(data_frame(one.session, 0, b"x" * 100), 10)
    assert spool.write() == 2000
    assert len(list((tmp_path / "tag").iterdir())) == len(logs(tmp_path)) == 1
    for one in ones[::2]:
        spool.remove(one)
    spool.close()
    assert count_spooled(tmp_path) == 100
    again = Spool(tmp_path / "tag")
    assert {one.player for one, _ in again.adopt()} == {f"p{n}" for n in range(1, 200, 2)}
    again.close()


def test_a_session_that_is_never_acknowledged_does_not_keep_the_frames_of_others(tmp_path):
    spool = Spool(tmp_path, cap_bytes=128 * 1024)
    stuck = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    one = spool.create(new_session(FakeClock().now()), player=player_name("ben"), spec=SPEC)
    (kept,) = fill(stuck, 1)
    for _ in range(100):
        for entry in fill(one, 10):
            one.done(entry, arrived=True)
        spool.tidy()
        assert spool.size_bytes < 3 * 4096
    frame = stuck.read(kept)
    crash(spool)
    again = Spool(tmp_path)
    found = {spool.player: numbers(entries) for spool, entries in again.adopt()}
    assert found[ANNA] == [0]
    assert all(spool.lost_numbers == [] for spool in again._adopted[0].sessions.values())
    ((entry,),) = [spool._order for spool in again._adopted[0].sessions.values() if spool._order]
    assert again._adopted[0].read(entry) == frame
    again.close()


def test_a_torn_end_is_skipped(tmp_path):
    spool, one = spool_of(tmp_path)
    for _ in range(3):
        fill(one, 1)
    crash(spool)
    (log,) = logs(tmp_path)
    log.write_bytes(log.read_bytes()[:-7])
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [0, 1]
    assert other.next_no == 2
    spool.close()


def test_a_flipped_byte_costs_its_group_alone(tmp_path):
    spool, one = spool_of(tmp_path)
    for _ in range(3):
        fill(one, 1)
    spool.close()
    (log,) = logs(tmp_path)
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 1
    log.write_bytes(raw)
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [0, 2]
    assert (other.lost_numbers, other.lost_steps) == ([1], 10)
    spool.close()


def damage_sessions(path: Path, damage: str) -> None:
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[20] ^= 1
    elif damage == "zeroed":
        raw[:512] = bytes(512)
    elif damage == "cut":
        del raw[512:]
    elif damage == "cut at a growth":
        del raw[64 * 512 :]
    elif damage == "empty":
        raw.clear()
    path.write_bytes(raw)
    if damage == "missing":
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "players"),
    [
        ("flipped", 3),
        ("zeroed", 3),
        ("cut", 3),
        ("cut at a growth", 70),
        ("empty", 3),
        ("missing", 3),
    ],
)
def test_steps_whose_slots_are_damaged_are_sent_and_the_damage_is_named(tmp_path, damage, players):
    names = [f"p{n}" for n in range(players)]
    folder = left_by(tmp_path / "spool" / spool_tag("memory", "my-game"), *names)
    damage_sessions(folder / "sessions", damage)
    link = MemoryLink()
    with client(link, tmp_path) as game:
        with pytest.warns(UserWarning, match=r"file sessions in .* was damaged"):
            game.pump()
        while game.pump() <= 0:
            pass
        assert game.stats().dropped_steps == 0
    assert sorted(link.players.values()) == sorted(names)
    assert {(session, *numbers) for session, numbers in link.by_session().items()} == {
        (session, 0, 1) for session in link.players
    }
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_sessions_without_a_readable_slot_are_found_by_their_frames(tmp_path, damage):
    spool, one = spool_of(tmp_path)
    entries = fill(one, 4)
    one.done(entries[0], arrived=True)
    spool.close()
    damage_sessions(tmp_path / str(one.session) / "sessions", damage)
    for is_damaged in (True, False):
        spool, other, found = adopt(tmp_path)
        assert numbers(found) == [0, 1, 2, 3]
        assert (other.player, other.next_no, other.n_steps) == ("anna", 4, 40)
        assert (other.lost_numbers, other.folder.is_damaged) == ([], is_damaged)
        spool.close()


def test_a_finished_session_is_sent_again_only_if_its_slot_is_damaged(tmp_path):
    spool = Spool(tmp_path, cap_bytes=64 * 1024)
    anna, ben = [
        spool.create(new_session(FakeClock().now()), player=player_name(name), spec=SPEC)
        for name in ("anna", "ben")
    ]
    fill(ben, 1, size=3000)
    entries = fill(anna, 1, size=1500)
    entries += fill(anna, 2, size=5000)
    entries.append(anna.add(close_frame(anna.session, 3, CloseReport(3, 30)), 0))
    fill(ben, 1, size=5000)
    for entry in entries:
        anna.done(entry, arrived=True)
    spool.remove(anna)
    spool.tidy()
    assert [path.stem for path in logs(tmp_path)] == ["00000001", "00000003"]
    spool.close()
    spool, other, _ = adopt(tmp_path)
    assert other.player == "ben"
    spool.close()
    damage_sessions(other.folder.path / "sessions", "zeroed")
    spool = Spool(tmp_path)
    found = {one.player: (numbers(entries), one.lost_numbers) for one, entries in spool.adopt()}
    assert found == {"anna": ([0, 3], []), "ben": ([0, 1], [])}
    spool.close()


def test_a_kill_while_damaged_slots_are_replaced_makes_no_session_seem_finished(
    tmp_path, monkeypatch
):
    spool, one = spool_of(tmp_path)
    fill(one, 2)
    spool.close()
    (tmp_path / str(one.session) / "sessions").unlink()
    spool, _, _ = adopt(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", no_room)
        spool.write()
    crash(spool)
    _, _, found = adopt(tmp_path)
    assert numbers(found) == [0, 1]


def test_a_log_that_cannot_be_opened_now_is_neither_deleted_nor_lost(tmp_path, monkeypatch):
    folder = left_by(tmp_path, "anna")
    spool, one, (entry,) = adopt(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.client.spool_folder.LogReader", no_files)
        with pytest.raises(OSError, match="Too many"):
            one.read(entry)
        spool.close()
        again = Spool(tmp_path)
        assert list(again.adopt()) == []
        assert folder.exists()
    ((one, (entry,)),) = again.adopt()
    assert one.read(entry) is not None


def no_files(*_):
    raise OSError(24, "Too many open files")


def test_a_folder_of_which_nothing_can_be_read_stays(tmp_path):
    folder = left_by(tmp_path, "anna")
    (log,) = logs(tmp_path)
    raw = bytearray(log.read_bytes())
    raw[40] ^= 1
    log.write_bytes(raw)
    damage_sessions(folder / "sessions", "empty")
    spool = Spool(tmp_path)
    assert list(spool.adopt()) == []
    assert "neither the sessions nor the frames" in spool.unreadable[folder]
    assert log.read_bytes() == raw


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_deletes_no_file_of_its_parent(tmp_path, monkeypatch):
    spool, one = spool_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        fill(one, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(logs(tmp_path)) == 1
    child = os.fork()
    if child == 0:
        try:
            spool.abandon()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert spool.write() == 20
    crash(spool)
    _, _, found = adopt(tmp_path)
    assert numbers(found) == [0, 1]


def test_a_clock_that_is_ahead_deletes_nothing(tmp_path):
    clock = FakeClock()
    folder = left_by(tmp_path / "spool" / spool_tag("memory", "my-game"), "anna")
    clock.advance(30 * 86_400)
    link = MemoryLink()
    link.is_down = True
    game = client(link, tmp_path, clock=clock)
    game.pump()
    game.close()
    assert logs(folder) != []
    link.is_down = False
    with client(link, tmp_path, clock=clock) as game:
        game.pump()
    assert [frame.kind for frame in link.frames] == [FrameKind.DATA, FrameKind.CLOSE]


def test_sessions_that_the_platform_finds_too_old_are_counted_and_named_by_a_warning(tmp_path):
    folder = left_by(tmp_path / "spool" / spool_tag("memory", "my-game"), "anna")
    link = MemoryLink()
    link.refuses = lambda frame: True
    with client(link, tmp_path) as game:
        with pytest.warns(UserWarning, match="rejected recorded steps permanently: not_today"):
            game.pump()
        while folder.exists():
            game.pump()
        assert game.stats().refused_steps == 10


class Undecided(MemoryLink):
    """Puts off what anna played, as a platform that cannot know whether its own clock is wrong."""

    def send(self, frames, players, *, skipped_steps=0):
        super().send(frames, players, skipped_steps=skipped_steps)
        later = Ack(False, retry_after_s=30.0, error="clocks_differ")
        return [later if players[frame.session] == "anna" else Ack(True) for frame in frames]


@pytest.mark.parametrize("has_losses", [False, True])
def test_old_sessions_that_the_platform_puts_off_do_not_stop_new_steps(
    tmp_path, monkeypatch, has_losses
):
    spool = Spool(tmp_path / "spool" / spool_tag("memory", "my-game"))
    old = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    fill(old, 100)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        fill(old, int(has_losses))
        spool.close()
    clock = FakeClock()
    with client(Undecided(), tmp_path, clock=clock) as game:
        game.pump()
        for n in range(1, 4):
            ep = game.episode(player="ben")
            for _ in range(10):
                ep.acted(np.zeros(2, np.float32), 1)
            ep.end()
            clock.advance(2)
            assert game.pump() > 0, "what was put off is not sent again at once"
            assert game.stats().acked_steps == n * 10
            assert game.flush()
        assert game.close()
    assert logs(old.folder.path) != []


def left_in_turn(tmp_path, clock, **n_sessions):
    """Leave a folder for each player, in this order, with so many sessions of one frame."""
    for at, (name, n) in enumerate(n_sessions.items()):
        spool = Spool(tmp_path / "spool" / spool_tag("memory", "my-game"))
        for _ in range(n):
            session = new_session(clock.now() + at)
            fill(spool.create(session, player=player_name(name), spec=SPEC), 1)
        spool.close()


def test_closing_sends_frames_of_an_earlier_start_while_the_platform_accepts_them(tmp_path):
    clock = FakeClock()
    left_in_turn(tmp_path, clock, ben=128, anna=100)
    link = Undecided()
    with client(link, tmp_path, clock=clock) as game:
        game.pump()
        assert game.close()
    assert link.n_sends == 5
    assert count_spooled(tmp_path / "spool") == 100


def test_frames_that_the_platform_puts_off_hold_up_no_other_session(tmp_path):
    clock = FakeClock()
    left_in_turn(tmp_path, clock, anna=100, ben=10)
    with client(Undecided(), tmp_path, clock=clock) as game:
        for _ in range(5):
            game.pump()
            clock.advance(31)
        assert game.stats().acked_steps == 100
    assert count_spooled(tmp_path / "spool") == 100


def test_dropped_frames_whose_report_was_spooled_are_not_sent(tmp_path):
    spool, one = spool_of(tmp_path)
    fill(one, 3)
    one.add(drop_frame(one.session, one.next_no, DropReport(((0, 1),), 20)), 0)
    spool.close()
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [3, 2], "the report goes first"
    assert other.lost_numbers == []
    spool.close()


def test_frames_that_could_not_be_written_are_known_to_be_lost(tmp_path, monkeypatch):
    spool, one = spool_of(tmp_path)
    fill(one, 2)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        entries = fill(one, 3)
        assert all(one.read(entry) is not None for entry in entries)
        assert spool.memory_bytes == sum(entry.size_bytes for entry in entries)
        assert "no room" in spool.error
        assert len(logs(tmp_path)) == 1
        assert spool.close() == 30, "these steps are lost"
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [0, 1]
    assert (other.next_no, other.lost_numbers, other.lost_steps) == (5, [2, 3, 4], 30)
    spool.close()


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_frames_in_memory_are_written_once_there_is_room(tmp_path, monkeypatch):
    spool, one = spool_of(tmp_path)
    fill(one, 1)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        fill(one, 2)
    assert spool.write() == 20
    crash(spool)
    spool, other, found = adopt(tmp_path)
    assert numbers(found) == [0, 1, 2]
    assert other.lost_numbers == []
    spool.close()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_frames_whose_write_was_stopped_by_any_error_are_written_by_the_next(
    tmp_path, monkeypatch, error
):
    def stopped(*_):
        raise error

    spool, one = spool_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "append", stopped)
        with pytest.raises(error):
            fill(one, 2)
    assert spool.write() == 20
    crash(spool)
    spool, other, found = adopt(tmp_path)
    assert (numbers(found), other.lost_numbers) == ([0, 1], [])
    spool.close()


def test_frames_acknowledged_out_of_order_are_not_considered_lost(tmp_path):
    spool = Spool(tmp_path, cap_bytes=64 * 1024)
    one = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    entries = [entry for _ in range(8) for entry in fill(one, 1, size=3000)]
    for entry in entries[1:]:
        one.done(entry, arrived=True)
    spool.tidy()
    crash(spool)
    spool, other, found = adopt(tmp_path)
    assert found[0].chunk_no == 0
    assert other.lost_numbers == []
    spool.close()


def test_files_are_deleted_as_soon_as_all_in_them_is_done(tmp_path):
    spool = Spool(tmp_path, cap_bytes=64 * 1024)
    one = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    entries = [entry for _ in range(12) for entry in fill(one, 1, size=3000)]
    assert len(logs(tmp_path)) > 4
    for entry in entries:
        one.done(entry, arrived=True)
        spool.tidy()
    assert len(logs(tmp_path)) == 1
    spool.remove(one)
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_a_spooled_close_frame_is_not_created_twice(tmp_path):
    spool, one = spool_of(tmp_path)
    (entry,) = fill(one, 1)
    one.done(entry, arrived=True)
    one.add(close_frame(one.session, 1, CloseReport(1, 10)), 0)
    spool.close()
    spool, other, found = adopt(tmp_path)
    assert other.is_closing
    assert numbers(found) == [1]
    spool.close()


def test_a_folder_names_its_game(tmp_path):
    spool, one = spool_of(tmp_path)
    fill(one, 1)
    about = read_game(tmp_path / str(one.session))
    assert (about.game, about.spec()) == ("my-game", SPEC)
    spool.close()


@pytest.mark.parametrize("raw", [None, b"", b"[]", b'{"game":""}', b'{"spec":"{}"}', b"\xff"])
def test_a_folder_without_its_game_stays_as_it_is(tmp_path, raw):
    spool, one = spool_of(tmp_path / "tag")
    fill(one, 1)
    spool.close()
    folder = tmp_path / "tag" / str(one.session)
    (folder / "spool.json").unlink()
    if raw is not None:
        (folder / "spool.json").write_bytes(raw)
    before = logs(tmp_path)[0].read_bytes()
    with pytest.raises(Corrupt, match="missing or damaged"):
        read_game(folder)
    n_deleted, left = forget_spooled(tmp_path, "anna", ["my-game"])
    assert (n_deleted, list(left)) == (0, [folder])
    assert send_unsent_frames(tmp_path / "tag", lambda spec: MemoryLink()) == 0
    spool = Spool(tmp_path / "tag")
    assert list(spool.adopt()) == []
    assert list(spool.unreadable) == [folder]
    assert unreadable_spools(tmp_path) == [folder]
    assert logs(tmp_path)[0].read_bytes() == before


def test_files_of_other_programs_in_a_folder_stop_nothing(tmp_path):
    spool, one = spool_of(tmp_path)
    fill(one, 1)
    spool.close()
    (tmp_path / str(one.session) / "old.log").write_bytes(b"not ours")
    (tmp_path / ".DS_Store").write_bytes(b"not ours")
    spool, other, entries = adopt(tmp_path)
    assert numbers(entries) == [0]
    other.done(entries[0], arrived=True)
    spool.remove(other)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        ".DS_Store",
        "old.log",
    ]
    assert list(Spool(tmp_path).adopt()) == []
    assert unreadable_spools(tmp_path.parent) == []


def test_steps_of_a_spec_that_this_version_cannot_read_are_never_deleted(tmp_path):
    folder = left_by(tmp_path / "spool" / spool_tag("memory", "my-game"), "anna")
    path = folder / "spool.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"obs_names", b"of a later build"))
    with pytest.raises(SpecError):
        read_game(folder).spec()
    link = MemoryLink()
    game = client(link, tmp_path)
    with pytest.warns(UserWarning, match="stay in .*cannot read them"):
        game.pump()
    game.close()
    assert link.frames == []
    path.write_bytes(good)
    with client(link, tmp_path) as game:
        game.pump()
    assert [frame.kind for frame in link.frames] == [FrameKind.DATA, FrameKind.CLOSE]


def test_forgetting_deletes_a_players_sessions_in_unlocked_folders_and_no_others(tmp_path):
    left = [
        left_by(tmp_path / tag, *names)
        for tag, names in (("a", ["anna"]), ("b", ["anna", "ben"]), ("a", ["ben"]))
    ]
    unreadable = left[0] / "spool.json"
    unreadable.write_bytes(unreadable.read_bytes().replace(b"obs_names", b"of a later build"))
    with pytest.raises(SpecError):
        read_game(left[0]).spec()
    spool, played = spool_of(tmp_path / "a")
    fill(played, 1)
    assert forget_spooled(tmp_path, "anna", ["other-game"]) == (0, {})
    in_use = tmp_path / "a" / str(played.session)
    n_deleted, still_spooled = forget_spooled(tmp_path, "anna", ["my-game", "other-game"])
    assert (n_deleted, list(still_spooled)) == (2, [in_use])
    assert [folder.exists() for folder in left] == [False, True, True]
    for folder in left[1:]:
        assert not any(b"anna" in path.read_bytes() for path in folder.iterdir())
    assert logs(in_use) != []
    spool.close()
    _, one, entries = adopt(tmp_path / "b")
    assert (one.player, numbers(entries), one.lost_numbers) == ("ben", [0], [])
    frame = one.read(entries[0])
    assert frame is not None
    assert b"ben" in frame.body


def left_by(folder: Path, *names: str) -> Path:
    """Create and return the folder of a killed game with a session of each of these players."""
    spool = Spool(folder)
    for name in names:
        session = new_session(FakeClock().now())
        one = spool.create(session, player=player_name(name), spec=SPEC)
        one.add(data_frame(session, 0, f"a body of {name}".encode()), 10)
        path = one.folder.path
    spool.close()
    return path


def test_acknowledged_frames_of_a_forgotten_player_are_deleted_too(tmp_path):
    spool = Spool(tmp_path / "tag")
    ones = [
        spool.create(new_session(FakeClock().now()), player=player_name(name), spec=SPEC)
        for name in ("anna", "anna", "ben")
    ]
    for one in ones:
        one.add(data_frame(one.session, 0, f"a body of {one.player}".encode()), 10)
    spool.write()
    spool.remove(ones[0])
    spool.close()
    assert forget_spooled(tmp_path, "anna", ["my-game"]) == (1, {})
    assert not any(b"anna" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert count_spooled(tmp_path) == 1


def finished_beside(folder: Path) -> Spool:
    """Return a spool with a finished session of anna in the log of an unfinished one of ben."""
    spool = Spool(folder)
    anna, ben = [
        spool.create(new_session(FakeClock().now()), player=player_name(name), spec=SPEC)
        for name in ("anna", "ben")
    ]
    anna.add(data_frame(anna.session, 0, b"a body of anna"), 10)
    ben.add(data_frame(ben.session, 0, b"a body of ben" * 100), 10)
    spool.write()
    spool.remove(anna)
    ben.folder.save()
    return spool


def test_frames_of_a_forgotten_players_finished_session_are_deleted(tmp_path):
    spool = finished_beside(tmp_path / "tag")
    n_deleted, left = forget_spooled(tmp_path, "anna", ["my-game"])
    assert (n_deleted, [path.parent.name for path in left]) == (0, ["tag"]), "the game runs"
    assert forget_spooled(tmp_path, "carl", ["my-game"]) == (0, {})
    spool.close()
    assert forget_spooled(tmp_path, "anna", ["my-game"]) == (0, {})
    assert not any(b"anna" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    _, one, (entry,) = adopt(tmp_path / "tag")
    frame = one.read(entry)
    assert frame is not None
    assert (one.player, frame.body) == ("ben", b"a body of ben" * 100)


def test_forgetting_says_if_a_file_could_not_be_deleted(tmp_path, monkeypatch):
    finished_beside(tmp_path / "tag").close()
    with monkeypatch.context() as patch:
        patch.setattr("understudy.client.spool_folder.remove", no_room)
        n_deleted, left = forget_spooled(tmp_path, "anna", ["my-game"])
    (reason,) = left.values()
    assert (n_deleted, "could not be changed or deleted" in reason) == (0, True)
    assert forget_spooled(tmp_path, "anna", ["my-game"]) == (0, {})
    assert not any(b"anna" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_forgetting_on_a_full_disk_says_that_it_did_not(tmp_path, monkeypatch):
    left_by(tmp_path / "tag", "anna", "ben")
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        n_deleted, left = forget_spooled(tmp_path, "anna", ["my-game"])
    assert n_deleted == 0
    (reason,) = left.values()
    assert re.search(r"could not be moved .*no room.*free some disk space", reason)
    assert forget_spooled(tmp_path, "anna", ["my-game"]) == (1, {})
    assert count_spooled(tmp_path) == 1


def test_unsent_frames_of_killed_games_are_sent_without_a_game(tmp_path):
    clock = FakeClock()
    link = MemoryLink()
    for _ in range(MAX_ADOPTED + 3):
        left_by(tmp_path, "anna")
    n_frames = 2 * (MAX_ADOPTED + 3)
    assert send_unsent_frames(tmp_path, lambda spec: link, clock=clock) == n_frames
    assert {frame.kind for frame in link.frames} == {FrameKind.DATA, FrameKind.CLOSE}
    assert link.specs[0] == SPEC
    assert list(tmp_path.iterdir()) == []


def deny(monkeypatch, folder: Path) -> None:
    """Make a folder unreadable, also for root."""

    def denied(call, is_listing):
        def checked(path=".", *args, **settings):
            if not isinstance(path, int) and folder == (
                Path(path) if is_listing else Path(path).parent
            ):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **settings)

        return checked

    for name in ("stat", "open", "scandir", "listdir"):
        is_listing = name in ("scandir", "listdir")
        monkeypatch.setattr(os, name, denied(getattr(os, name), is_listing))


def test_a_folder_that_cannot_be_read_costs_only_itself(tmp_path, monkeypatch):
    tag = tmp_path / "spool" / spool_tag("memory", "my-game")
    folders = sorted(left_by(tag, name) for name in ("anna", "ben", "carl"))
    link = MemoryLink()
    with monkeypatch.context() as patch:
        deny(patch, folders[1])
        with client(link, tmp_path) as game:
            game.pump()
    assert [folder.exists() for folder in folders] == [False, True, False]
    assert [frame.kind for frame in link.frames].count(FrameKind.DATA) == 2
    assert forget_spooled(tmp_path / "spool", "dan", ["my-game"]) == (0, {})
    deny(monkeypatch, folders[1])
    n_deleted, left = forget_spooled(tmp_path / "spool", "dan", ["my-game"])
    assert (n_deleted, list(left)) == (0, [folders[1]])


def test_sessions_adopted_before_an_unforeseen_error_are_sent(tmp_path, monkeypatch):
    tag = tmp_path / "spool" / spool_tag("memory", "my-game")
    last = max(left_by(tag, name) for name in ("anna", "ben", "carl"))
    true_load = SpoolFolder.load

    def load(folder):
        if folder.path == last:
            raise RuntimeError("unforeseen")
        return true_load(folder)

    link = MemoryLink()
    with client(link, tmp_path) as game:
        with monkeypatch.context() as patch:
            patch.setattr(SpoolFolder, "load", load)
            with pytest.raises(RuntimeError):
                game.pump()
        game.pump()
        assert game.stats().acked_steps == 20
    assert list(tag.iterdir()) == [last]


@pytest.mark.parametrize("files", [[], [".lock"], [".lock", "spool.json"]])
def test_a_folder_of_a_game_that_was_killed_before_it_spooled_anything_is_deleted(tmp_path, files):
    folder = tmp_path / str(new_session(FakeClock().now()))
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"")
    spool = Spool(tmp_path)
    assert spool.has_sessions()
    assert list(spool.adopt()) == []
    assert not spool.has_sessions()


def test_a_new_folder_that_another_start_deletes_is_created_again(tmp_path, monkeypatch):
    spool, one = spool_of(tmp_path)
    one.add(data_frame(one.session, 0, b"body"), 10)
    true_lock = FileLock.__init__

    def lock(self, path, **settings):
        true_lock(self, path, **settings)
        monkeypatch.undo()
        path.unlink()  # by another process, which had the lock just before

    monkeypatch.setattr(FileLock, "__init__", lock)
    assert spool.write() == 0
    assert spool.write() == 10
    other = Spool(tmp_path)
    assert list(other.adopt()) == []
    assert other.foreign_bytes > 0
    spool.close()


def test_unknown_files_in_the_spool_folder_are_ignored(tmp_path):
    spool = Spool(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert not spool.has_sessions()
    assert list(spool.adopt()) == []


def test_the_next_start_sends_what_a_closed_game_could_not(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    for i in range(700):
        ep.acted(np.array([i, 0], np.float32), 1)
    assert not game.close()
    link.is_down = False
    again = client(link, tmp_path, clock=clock)
    again.pump()
    again.pump()
    assert again.stats().adopted_sessions == 1
    again.close()
    (frames,) = link.by_session().values()
    assert sum(chunk.meta.n_steps for chunk in chunks(frames)) == 699
    assert read_close(frames[max(frames)]).n_steps == 699
    assert link.players[frames[0].session] == "anna"


def test_numbers_lost_with_a_killed_game_are_reported_by_the_next(tmp_path, monkeypatch):
    clock = FakeClock()
    link = MemoryLink()
    game = client(link, tmp_path, clock=clock)
    folder = tmp_path / "spool" / spool_tag("memory", "my-game")
    spool, one = spool_of(folder, clock)
    monkeypatch.setattr("understudy.core.log._pwrite", no_room)
    fill(one, 2)
    crash(spool)
    monkeypatch.undo()
    clock.advance(31)
    with pytest.warns(UserWarning, match="dropped"):
        game.pump()
    game.close()
    report, close = link.frames
    assert read_drop(report) == DropReport(((0, 1),), 20)
    assert (close.kind, close.chunk_no) == (FrameKind.CLOSE, 3)


VICTIM = """
    import sys, time
    import numpy as np
    from pathlib import Path
    from understudy.client import ClientConfig, SenderConfig, connect

    class Down:
        address = "memory"
        def register(self, spec): raise ConnectionError
        def send(self, frames, players, *, skipped_steps=0): raise ConnectionError
        def close(self): pass

    sender = SenderConfig(linger_s=0.01)
    config = ClientConfig(link=Down(), spool=sys.argv[1], sender=sender)
    game = connect("my-game", obs=2, actions=3, config=config)
    ep = game.episode(player="anna")
    at = 0
    while True:
        ep.acted(np.array([at, -at], np.float32), at % 3)
        ep.reward(float(at))
        at += 1
        if at % 200 == 0:
            game.flush(0.0)
            print(at, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is a POSIX signal")
def test_a_killed_game_loses_only_what_was_not_yet_spooled(tmp_path):
    victim = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), str(tmp_path / "spool")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    spooled = 0
    while spooled < 3000:
        spooled = int(victim.stdout.readline())
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    victim.stdout.close()
    link = MemoryLink()
    config = ClientConfig(link=link, spool=tmp_path / "spool")
    game = connect("my-game", obs=2, actions=3, config=config)
    deadline = time.monotonic() + 60
    while (
        not any(frame.kind is FrameKind.CLOSE for frame in link.frames)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    game.close()
    (frames,) = link.by_session().values()
    (steps,) = episodes(frames)
    assert len(steps) >= spooled - 1
    for at, step in enumerate(steps):
        assert step.obs == (np.array([at, -at], np.float32).tobytes(),)
        assert step.next_obs == (np.array([at + 1, -at - 1], np.float32).tobytes(),)
        assert step.reward == at
    assert read_close(frames[max(frames)]).n_steps == len(steps)
    assert not list((tmp_path / "spool").glob("*/*/*.log"))


def test_a_loss_whose_report_could_not_be_written_is_found_by_the_next_start(tmp_path, monkeypatch):
    spool, one = spool_of(tmp_path)
    fill(one, 1)
    entry = one.add(data_frame(one.session, 1, b"x"), 10)
    monkeypatch.setattr(LogFile, "append", no_room)
    spool.write()
    one.done(entry, arrived=False)  # number 1 was in memory alone, and is dropped
    monkeypatch.undo()
    fill(one, 2)
    crash(spool)
    spool, other, found = adopt(tmp_path)
    assert other.lost_numbers == [1]
    other.done(found[0], arrived=True)
    monkeypatch.setattr(LogFile, "append", no_room)
    other.add(drop_frame(other.session, other.next_no, DropReport(((1, 1),), 10)), 0)
    spool.tidy()
    crash(spool)
    monkeypatch.undo()
    _, again, _ = adopt(tmp_path)
    assert 1 in again.lost_numbers
