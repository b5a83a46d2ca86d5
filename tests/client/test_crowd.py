"""A server with many players in one process loses nothing that it recorded."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import ClientConfig, RecordingWarning, SenderConfig, connect
from understudy.core.log import LogFile
from understudy.experience.frame import FrameKind, read_close


def obs(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def play(ep, n):
    for at in range(n):
        ep.acted(obs(at, -at), at % 3)


def recorded(link):
    return sum(
        chunk.meta.n_steps for frames in link.by_session().values() for chunk in chunks(frames)
    )


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed in /proc")
def test_the_number_of_descriptors_does_not_grow_with_the_players(tmp_path):
    link = MemoryLink()
    link.is_down = True
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    before = len(os.listdir("/proc/self/fd"))
    eps = [game.episode(player=f"p{n}") for n in range(300)]
    for ep in eps:
        play(ep, 4)
    clock.advance(2)
    game.pump()
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    assert game.stats().spooled_steps == 900
    link.is_down = False
    clock.advance(60)
    while game.pump() <= 0:
        pass
    assert game.close()
    assert (recorded(link), game.stats().dropped_steps) == (900, 0)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_closing_with_a_thousand_open_sessions_drops_nothing(tmp_path):
    link = MemoryLink()
    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=60.0))
    game = connect("my-game", obs=2, actions=3, config=config)
    eps = [game.episode(player=f"p{n}") for n in range(1000)]
    for ep in eps:
        play(ep, 4)
    assert game.close(timeout_s=60.0)
    assert (recorded(link), game.stats().dropped_steps) == (3000, 0)
    assert len(link.by_session()) == 1000
    assert all(frames[max(frames)].kind is FrameKind.CLOSE for frames in link.by_session().values())


@pytest.mark.parametrize("how", ["flush", "close"])
def test_more_than_fits_into_the_handoff_is_spooled_by_flush_and_close(tmp_path, how):
    link = MemoryLink()
    game = client(link, tmp_path)
    game._sessions.handoff._max_bytes = 20_000
    eps = [game.episode(player=f"p{n}") for n in range(30)]
    for ep in eps:
        play(ep, 200)
    assert getattr(game, how)()
    game.close()
    assert (recorded(link), game.stats().dropped_steps) == (30 * 199, 0)


def test_a_game_never_waits_for_a_disk_that_hangs(tmp_path, monkeypatch):
    link = MemoryLink()
    hangs = threading.Event()
    goes_on = threading.Event()
    true_append = LogFile.append

    def append(self, parts):
        hangs.set()
        assert goes_on.wait(30)
        return true_append(self, parts)

    monkeypatch.setattr(LogFile, "append", append)
    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=0.01))
    game = connect("my-game", obs=2, actions=3, config=config)
    eps = [game.episode(player=f"p{n}") for n in range(20)]
    try:
        for ep in eps:
            play(ep, 2)
        assert hangs.wait(30)
        game._sessions.handoff._max_bytes = 200_000
        for ep in eps:
            play(ep, 600)
            ep.end()
        game.episode(player="late")
        assert not goes_on.is_set()
        assert 100_000 < game._sessions.handoff.waiting_bytes <= 200_000
    finally:
        goes_on.set()
    assert game.close(timeout_s=60.0)
    stats = game.stats()
    assert stats.dropped_steps > 0
    assert stats.acked_steps + stats.dropped_steps == stats.recorded_steps == 20 * 602


def test_a_session_takes_the_memory_of_what_it_recorded(tmp_path):
    game = client(MemoryLink(), tmp_path, obs=6)
    eps = [game.episode(player="warm-up")]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(300):
        ep = game.episode(player=f"p{n}")
        for _ in range(4):
            ep.acted(obs(1, 2, 3, 4, 5, 6), 1)
        eps.append(ep)
    each = (tracemalloc.get_traced_memory()[0] - before) / 300
    tracemalloc.stop()
    assert each < 6000, "a block of 512 rows would take 33,000"
    game.close()


VICTIM = """
    import sys
    import numpy as np
    from understudy.client import ClientConfig, connect

    class Down:
        address = "memory"
        recording_rate = 1.0
        def register(self, spec): raise ConnectionError
        def send(self, frames, players, *, skipped_steps=0): raise ConnectionError
        def close(self): pass

    config = ClientConfig(link=Down(), spool=sys.argv[1])
    game = connect("my-game", obs=2, actions=3, config=config)
    eps = [game.episode(player=f"p{n}") for n in range(200)]
    for at in range(5):
        for number, ep in enumerate(eps):
            ep.acted(np.array([number, at], np.float32), at % 3)
    game.flush(0.0)
    print(game.stats().spooled_steps, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is a POSIX signal")
def test_a_killed_server_loses_nothing_that_was_spooled(tmp_path):
    victim = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), str(tmp_path / "spool")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    assert victim.stdin is not None
    assert victim.stdout.readline() == "800\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    victim.stdin.close()
    victim.stdout.close()
    link = MemoryLink()
    config = ClientConfig(link=link, spool=tmp_path / "spool")
    game = connect("my-game", obs=2, actions=3, config=config)
    deadline = time.monotonic() + 60
    while game.stats().adopted_sessions < 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert game.close(timeout_s=60.0)
    found = link.by_session()
    assert {link.players[session] for session in found} == {f"p{n}" for n in range(200)}
    for session, frames in found.items():
        number = float(link.players[session][1:])
        ((*steps,),) = episodes(frames)
        assert [step.obs for step in steps] == [(obs(number, at).tobytes(),) for at in range(4)]
        assert read_close(frames[max(frames)]).n_steps == 4
    assert list((tmp_path / "spool").glob("*/*/*")) == []


def test_a_player_who_leaves_is_ended(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    anna = [game.episode(player="anna", seat=seat) for seat in range(2)]
    ben = game.episode(player="ben")
    for ep in (*anna, ben):
        play(ep, 3)
    assert game.end_session("anna")
    assert not game.end_session("anna")
    assert not game.end_session()
    game.pump()
    game.pump()
    kinds = {
        player: [frame.kind for frame in link.frames if frame.session == session]
        for session, player in link.players.items()
    }
    assert kinds == {"anna": [FrameKind.DATA, FrameKind.CLOSE]}
    assert sorted(link.players.values()) == ["anna", "anna"]
    anna[0].acted(obs(1, 1), 0)
    anna[0].end()
    assert (game.stats().ignored_calls, game.stats().open_episodes) == (2, 1)
    play(game.episode(player="anna"), 2)
    game.close()
    assert len(link.by_session()) == 4
    assert game.stats().acked_steps == 2 + 2 + 2 + 1


def test_a_session_that_is_being_ended_is_not_handed_out_again(tmp_path, monkeypatch):
    game = client(MemoryLink(), tmp_path)
    ep = game.episode(player="anna")
    play(ep, 3)
    true_end = game._sessions.end

    def end(session):
        ep.end(obs(3, 3))  # a thread that held the session's lock
        return true_end(session)

    with monkeypatch.context() as patch:
        patch.setattr(game._sessions, "end", end)
        assert game.end_session("anna")
    play(game.episode(player="anna"), 3)
    assert game.close()
    assert (game.stats().acked_steps, game.stats().ignored_calls) == (3 + 2, 0)


def test_a_session_released_twice_at_one_time_is_closed_once(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock, sender=SenderConfig(session_idle_s=5.0))
    for _ in range(2):
        with game.episode(player="anna") as ep:
            play(ep, 3)
    clock.advance(6)
    while game.pump() <= 0:
        pass
    assert [frame.kind for frame in link.frames].count(FrameKind.CLOSE) == 1
    game.close()
    assert (game._sessions.n_live, game.stats().acked_steps) == (0, 4)


def test_idle_sessions_close_by_themselves_and_running_ones_do_not(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    sender = SenderConfig(session_idle_s=5.0)
    game = client(link, tmp_path, clock=clock, sender=sender)
    paused = game.episode(player="paused")
    play(paused, 3)
    for n in range(20):
        with game.episode(player=f"p{n}") as ep:
            play(ep, 3)
    clock.advance(4)
    game.pump()
    with game.episode(player="p0") as ep:
        play(ep, 3)
    clock.advance(2)
    while game.pump() <= 0:
        pass
    closed = {link.players[frame.session] for frame in link.frames if frame.kind is FrameKind.CLOSE}
    assert closed == {f"p{n}" for n in range(1, 20)}
    assert len(game._sessions.live()) == 2
    play(paused, 3)
    game.close()
    assert game.stats().acked_steps == 5 + 19 * 2 + 2 * 2
    assert len(game._sessions.handoff.due) <= 1


def test_a_dropped_episode_of_a_session_that_is_used_again_cuts_nothing(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    first = game.episode(player="anna")
    play(first, 3)
    first.end(obs(0, 0))
    second = game.episode(player="anna")
    play(second, 2)
    game._sessions.abandoned.append((first._session, first._use))
    game.pump()
    play(second, 2)
    assert game.stats().open_episodes == 1
    second.end(obs(0, 0))
    game.close()
    assert (recorded(link), game.stats().ignored_calls) == (7, 0)


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_steps_lost_on_a_full_disk_are_not_called_saved(tmp_path, monkeypatch):
    link = MemoryLink()
    link.is_down = True
    game = client(link, tmp_path)
    monkeypatch.setattr("understudy.core.log._pwrite", no_room)
    play(game.episode(player="anna"), 10)
    with pytest.warns(RecordingWarning) as caught:
        assert not game.close()
    texts = [str(one.message) for one in caught]
    assert any("wait in memory, because they cannot be saved" in text for text in texts)
    assert any("9 recorded steps are lost" in text for text in texts)
    assert not any("are saved" in text for text in texts)
    assert (game.stats().spooled_steps, game.stats().dropped_steps) == (0, 9)


@pytest.mark.filterwarnings("ignore:recorded steps are .* will be sent later")
def test_steps_are_saved_once_a_full_disk_has_room_again(tmp_path, monkeypatch):
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 10)
    clock.advance(2)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.core.log._pwrite", no_room)
        with pytest.warns(RecordingWarning, match="wait in memory"):
            game.pump()
    assert game.stats().spooled_steps == 0
    with pytest.warns(RecordingWarning, match="are saved on this machine"):
        assert not game.close()
    assert (game.stats().spooled_steps, game.stats().dropped_steps) == (9, 0)
    link.is_down = False
    with client(link, tmp_path, clock=clock) as again:
        again.pump()
    assert recorded(link) == 9


FORKED = """
    import os, sys
    sys.path.insert(0, ".")
    from tests.client.fakes import MemoryLink
    from understudy.client import ClientConfig, connect

    def connected(link):
        config = ClientConfig(link=link, spool=sys.argv[1], background=False)
        return connect("my-game", obs=2, actions=3, config=config)

    game = connected(MemoryLink())
    ep = game.episode(player="anna")
    ep.acted([0, 0], 0)
    ep.acted([1, 0], 0)
    game.flush(0.0)
    child = os.fork()
    if child == 0:
        again = connected(MemoryLink())
        again.pump()
        os._exit(again.stats().adopted_sessions)
    adopted = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    other = connected(MemoryLink())
    other.pump()
    print(adopted, other.stats().adopted_sessions)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_release_the_parents_spool(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 0"), done.stderr
