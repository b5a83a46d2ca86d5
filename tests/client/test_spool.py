"""The files that a killed game leaves, and how the next start uses them."""

import os
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
from understudy.client.sender import send_unsent_frames
from understudy.client.spool import (
    SessionSpool,
    Spool,
    SpooledFrame,
    forget_spooled,
    read_session,
    unreadable_sessions,
)
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
from understudy.experience.session import SPOOL_S

SPEC = game_spec("my-game", obs=2, actions=3)
ANNA = player_name("anna")


def spool_of(folder: Path, clock: FakeClock | None = None) -> tuple[Spool, SessionSpool]:
    spool = Spool(folder)
    session = new_session((clock or FakeClock()).now())
    return spool, spool.create(session, player=ANNA, spec=SPEC)


def fill(one: SessionSpool, n: int, *, size: int = 100) -> list[SpooledFrame]:
    return [
        one.add(data_frame(one.session, one.next_no, bytes([at]) * size), 10) for at in range(n)
    ]


def adopted(folder: Path) -> tuple[SessionSpool, list[SpooledFrame]]:
    ((one, entries),) = Spool(folder).adopt(FakeClock().now())
    return one, entries


def test_unfinished_frames_are_found_again_in_order(tmp_path):
    _, one = spool_of(tmp_path)
    entries = fill(one, 5)
    for entry in entries[:2]:
        one.done(entry, arrived=True)
    one.tidy()
    one.close()
    other, found = adopted(tmp_path)
    assert [entry.chunk_no for entry in found] == [2, 3, 4]
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
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_live_session_is_left_alone(tmp_path):
    _, one = spool_of(tmp_path)
    fill(one, 1)
    other = Spool(tmp_path)
    assert list(other.adopt(FakeClock().now())) == []
    assert other.foreign_bytes > 100
    with pytest.raises(Locked):
        FileLock(tmp_path / str(one.session) / ".lock", what="it")
    one.close()


def test_a_torn_end_is_skipped(tmp_path):
    _, one = spool_of(tmp_path)
    fill(one, 3)
    one.close()
    (log,) = (tmp_path / str(one.session)).glob("*.log")
    log.write_bytes(log.read_bytes()[:-7])
    other, found = adopted(tmp_path)
    assert [entry.chunk_no for entry in found] == [0, 1]
    assert other.next_no == 2
    other.close()


def test_dropped_frames_whose_report_was_spooled_are_not_sent(tmp_path):
    _, one = spool_of(tmp_path)
    fill(one, 3)
    one.add(drop_frame(one.session, one.next_no, DropReport(((0, 1),), 20)), 0)
    one.close()
    other, found = adopted(tmp_path)
    assert [entry.chunk_no for entry in found] == [3, 2], "the report goes first"
    assert other.lost_numbers == []
    other.close()


def test_frames_that_could_not_be_written_are_known_to_be_lost(tmp_path, monkeypatch):
    _, one = spool_of(tmp_path)
    fill(one, 2)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        entries = fill(one, 3)
    assert all(one.read(entry) is not None for entry in entries)
    assert one.memory_bytes == sum(entry.size_bytes for entry in entries)
    one.close()
    other, found = adopted(tmp_path)
    assert [entry.chunk_no for entry in found] == [0, 1]
    assert (other.next_no, other.lost_numbers, other.lost_steps) == (5, [2, 3, 4], 30)
    other.close()


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_frames_acknowledged_out_of_order_are_not_considered_lost(tmp_path):
    spool = Spool(tmp_path, cap_bytes=64 * 1024)
    one = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    entries = fill(one, 8, size=3000)
    for entry in entries[1:]:
        one.done(entry, arrived=True)
    one.tidy(and_current=True)
    one.close()
    other, found = adopted(tmp_path)
    assert found[0].chunk_no == 0
    assert other.lost_numbers == []
    other.close()


def test_files_are_deleted_as_soon_as_all_before_them_are_done(tmp_path):
    spool = Spool(tmp_path, cap_bytes=64 * 1024)
    one = spool.create(new_session(FakeClock().now()), player=ANNA, spec=SPEC)
    entries = fill(one, 12, size=3000)
    files = len(list(tmp_path.rglob("*.log")))
    assert files > 4
    for entry in entries:
        one.done(entry, arrived=True)
        one.tidy()
    assert len(list(tmp_path.rglob("*.log"))) == 1
    one.tidy(and_current=True)
    assert one.size_bytes == 0
    one.close()


def test_a_spooled_close_frame_is_not_created_twice(tmp_path):
    _, one = spool_of(tmp_path)
    (entry,) = fill(one, 1)
    one.done(entry, arrived=True)
    one.tidy()
    one.add(close_frame(one.session, 1, CloseReport(1, 10)), 0)
    one.close()
    other, found = adopted(tmp_path)
    assert other.is_closing
    assert [entry.chunk_no for entry in found] == [1]
    other.close()


def test_sessions_older_than_a_week_are_dropped_and_counted(tmp_path):
    clock = FakeClock()
    _, one = spool_of(tmp_path, clock)
    fill(one, 1)
    one.close()
    spool = Spool(tmp_path)
    assert list(spool.adopt(clock.now() + SPOOL_S + 1)) == []
    assert spool.expired_sessions == 1
    assert list(tmp_path.iterdir()) == []


def test_frames_of_a_session_without_a_readable_session_json_are_set_aside(tmp_path):
    clock = FakeClock()
    _, one = spool_of(tmp_path / "tag", clock)
    fill(one, 2)
    one.close()
    folder = tmp_path / "tag" / str(one.session)
    about = (folder / "session.json").read_bytes()
    (folder / "session.json").write_bytes(about[: len(about) // 2])
    (folder / "old.log").write_bytes(b"not ours")
    spool = Spool(tmp_path / "tag")
    assert list(spool.adopt(clock.now())) == []
    assert spool.expired_sessions == 1
    aside = folder.with_name(f"{folder.name}.unreadable")
    assert unreadable_sessions(tmp_path) == [aside]
    (aside / "session.json").write_bytes(about)
    aside.rename(folder)
    again, found = adopted(tmp_path / "tag")
    assert [entry.chunk_no for entry in found] == [0, 1]
    again.close()


def test_a_session_folder_names_its_player_and_game(tmp_path):
    _, one = spool_of(tmp_path)
    about = read_session(tmp_path / str(one.session))
    assert (about.player, about.game, about.spec()) == ("anna", "my-game", SPEC)
    one.close()


@pytest.mark.parametrize("raw", [None, b"", b"[]", b'{"player":""}', b'{"player":"anna"}', b"\xff"])
def test_a_session_folder_without_them_is_corrupt_and_skipped(tmp_path, raw):
    folder = tmp_path / "tag" / str(new_session(FakeClock().now()))
    folder.mkdir(parents=True)
    if raw is not None:
        (folder / "session.json").write_bytes(raw)
    with pytest.raises(Corrupt, match="missing or damaged"):
        read_session(folder)
    assert forget_spooled(tmp_path, "anna", ["my-game"]) == 0
    assert send_unsent_frames(tmp_path / "tag", lambda spec: MemoryLink()) == 0
    assert folder.exists()


def test_forgetting_deletes_a_players_unlocked_sessions_and_no_others(tmp_path):
    left = [
        left_by(tmp_path / tag, name) for tag, name in (("a", "anna"), ("b", "anna"), ("a", "ben"))
    ]
    unreadable = tmp_path / "a" / left[0].name / "session.json"
    unreadable.write_bytes(unreadable.read_bytes().replace(b"obs_names", b"of a later build"))
    with pytest.raises(SpecError):
        read_session(left[0]).spec()
    _, played = spool_of(tmp_path / "a")
    assert forget_spooled(tmp_path, "anna", ["other-game"]) == 0
    assert forget_spooled(tmp_path, "anna", ["my-game", "other-game"]) == 2
    assert [folder.exists() for folder in left] == [False, False, True]
    assert (tmp_path / "a" / str(played.session) / "session.json").exists()
    played.close()


def left_by(folder: Path, name: str) -> Path:
    """Create and return the folder of a killed game's session."""
    one = Spool(folder).create(new_session(FakeClock().now()), player=player_name(name), spec=SPEC)
    fill(one, 1)
    one.close()
    return folder / str(one.session)


def test_unsent_frames_of_killed_games_are_sent_without_a_game(tmp_path):
    clock = FakeClock()
    link = MemoryLink()
    left_by(tmp_path, "anna")
    assert send_unsent_frames(tmp_path, lambda spec: link, clock=clock) == 2
    assert [frame.kind for frame in link.frames] == [FrameKind.DATA, FrameKind.CLOSE]
    assert link.specs == [SPEC]


def test_a_folder_that_is_being_created_is_not_adopted(tmp_path):
    clock = FakeClock()
    folder = tmp_path / str(new_session(clock.now()))
    folder.mkdir()
    spool = Spool(tmp_path)
    assert list(spool.adopt(clock.now() + 1)) == []
    assert folder.exists()
    assert list(spool.adopt(clock.now() + 7200)) == []
    assert not folder.exists()


def test_unknown_files_in_the_spool_folder_are_ignored(tmp_path):
    spool = Spool(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert not spool.has_sessions()
    assert list(spool.adopt(FakeClock().now())) == []


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
    one = game._sender._spool.create(new_session(clock.now()), player=ANNA, spec=game.spec)
    monkeypatch.setattr("understudy.core.log._pwrite", no_room)
    fill(one, 2)
    one.close()
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
    deadline = time.monotonic() + 30
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
    _, one = spool_of(tmp_path)
    fill(one, 1)
    monkeypatch.setattr(LogFile, "append", no_room)
    fill(one, 1)  # number 1 is in memory alone
    monkeypatch.undo()
    fill(one, 2)
    one.close()
    other, found = adopted(tmp_path)
    assert other.lost_numbers == [1]
    other.done(found[0], arrived=True)
    monkeypatch.setattr(LogFile, "append", no_room)
    other.add(drop_frame(other.session, other.next_no, DropReport(((1, 1),), 10)), 0)
    other.tidy()
    other.close()
    monkeypatch.undo()
    again, _ = adopted(tmp_path)
    assert 1 in again.lost_numbers
