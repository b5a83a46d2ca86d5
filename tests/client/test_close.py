"""Flushing and closing: with and without a thread, on links that respond, fail or hang."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib import import_module

import pytest

from tests.client.fakes import FakeClock, MemoryLink, client
from understudy.client import ClientConfig, RecordingWarning, SenderConfig, connect
from understudy.experience.frame import FrameKind


def play(ep, n):
    for at in range(n):
        ep.acted([at, 0], at % 3)


def test_without_a_thread_flush_sends_by_itself(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 1200)
    assert game.flush()
    assert game.stats().acked_steps == 1199
    game.close()


def test_without_a_thread_flush_ends_even_when_the_clock_stands_still(tmp_path):
    link = MemoryLink()
    link.is_down = True
    game = client(link, tmp_path)
    ep = game.episode(player="anna")
    play(ep, 10)
    assert not game.flush(10.0)
    assert game.stats().failed_sends == 1
    assert not game.close()


def test_without_a_thread_flush_retries_until_its_timeout(tmp_path):
    class Ticking(FakeClock):
        def wait(self, event, timeout_s):
            self.advance(timeout_s)
            return False

    link = MemoryLink()
    link.loses_answers = 3
    game = client(link, tmp_path, clock=Ticking())
    play(game.episode(player="anna"), 10)
    assert game.flush(30.0)
    assert (game.stats().failed_sends, game.stats().acked_steps) == (3, 9)
    game.close()


def test_a_flush_with_a_timeout_of_0_only_spools(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 10)
    assert not game.flush(0.0)
    assert (game.stats().spooled_steps, link.n_sends) == (9, 0)
    game.close()


def test_without_a_thread_close_ends_at_its_timeout(tmp_path):
    class Slow(MemoryLink):
        def send(self, frames, players, *, skipped_steps=0):
            clock.advance(2.0)
            return super().send(frames, players, skipped_steps=skipped_steps)

    link = Slow()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    for n in range(300):
        play(game.episode(player=f"p{n}"), 2)
    with pytest.warns(RecordingWarning, match="saved on this machine"):
        assert not game.close(timeout_s=3.0)
    assert link.n_sends == 2
    assert game.stats().spooled_steps == 300


@pytest.mark.parametrize("is_down", [True, False])
def test_a_second_close_returns_what_the_first_returned(tmp_path, is_down):
    link = MemoryLink()
    link.is_down = is_down
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 3)
    assert [game.close(), game.close(), game.flush()] == [not is_down] * 3


@pytest.mark.filterwarnings("ignore:recorded steps are .* will be sent later")
def test_closing_warns_of_unsent_steps(tmp_path):
    link = MemoryLink()
    link.is_down = True
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 3)
    with pytest.warns(
        RecordingWarning,
        match="they are saved on this machine and will be sent when the game starts again",
    ):
        assert not game.close()


class Hanging(MemoryLink):
    """Does not respond until `may_respond` is set."""

    def __init__(self):
        super().__init__()
        self.is_asked = threading.Event()
        self.may_respond = threading.Event()

    def send(self, frames, players, *, skipped_steps=0):
        self.is_asked.set()
        self.may_respond.wait(30)
        return super().send(frames, players)


def hanging(tmp_path):
    link = Hanging()
    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=0.01))
    return link, connect("my-game", obs=2, actions=3, config=config)


def test_steps_are_spooled_while_a_request_hangs(tmp_path):
    link, game = hanging(tmp_path)
    ep = game.episode(player="anna")
    play(ep, 10)
    assert link.is_asked.wait(10)
    play(ep, 1000)
    deadline_s = time.monotonic() + 10
    while game.stats().spooled_steps < 1009 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (game.stats().spooled_steps, link.n_sends) == (1009, 0)
    link.may_respond.set()
    assert game.close()
    assert game.stats().acked_steps == 1009
    assert game.stats().dropped_steps == 0


def test_a_game_closed_while_a_request_hangs_leaves_its_spool_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("understudy.client.connect"), "_JOIN_S", 0.05)
    link, game = hanging(tmp_path)
    play(game.episode(player="anna"), 10)
    assert link.is_asked.wait(10)
    with pytest.warns(RecordingWarning, match="will be sent when the game starts again"):
        assert not game.close(timeout_s=0.05)
    assert link.is_closed
    config = ClientConfig(link=MemoryLink(), spool=tmp_path, background=False)
    again = connect("my-game", obs=2, actions=3, config=config)
    again.pump()
    again.pump()
    assert again.stats().adopted_sessions == 1
    assert again.stats().acked_steps == 9
    # The late response changes nothing any more.
    link.may_respond.set()
    for thread in game._threads:
        thread.join(10)
    assert game.stats().acked_steps == 0
    assert again.close()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")
def test_a_signal_handler_may_close_the_game_whatever_it_interrupts(tmp_path):
    script = """
        import signal, sys, threading, time
        sys.path.insert(0, ".")
        from importlib import import_module
        from tests.client.fakes import MemoryLink
        from understudy.client import ClientConfig, connect
        from understudy.core.clock import SystemClock

        import_module("understudy.client.connect")._JOIN_S = 0.02

        class Interrupting(SystemClock):
            \"\"\"Sends a signal to the main thread when it has read the clock n times.\"\"\"

            left = 0

            def now(self):
                self.count()
                return time.time()

            def monotonic(self):
                self.count()
                return time.monotonic()

            def count(self):
                if threading.current_thread() is threading.main_thread():
                    self.left -= 1
                    if self.left == 0:
                        signal.raise_signal(signal.SIGUSR1)

        n = n_blocked = 0
        while not n or clock.left <= 0:
            n += 1
            clock = Interrupting()
            config = ClientConfig(link=MemoryLink(), spool=sys.argv[1], clock=clock)
            game = connect("my-game", obs=2, actions=3, config=config)
            closed = []
            signal.signal(signal.SIGUSR1, lambda *_: closed.append(game.close(0.05)))
            other = game.episode("bob")
            other.acted([0, 0], 0)
            other.acted([1, 1], 1)
            clock.left = n
            try:
                ep = game.episode("anna")
                for at in range(3):
                    ep.acted([at, 0], 0)
                game.flush(1.0)
                ep.end([3, 0])
                recorder = game.recorder("carl")
                recorder.reset([0, 0])
                recorder.step(0, 1.0, [1, 1], True, False)
                recorder.reset([0, 0])
                game.end_session("bob")
            except game_closed:
                pass
            assert game.close(60.0), n
            stats = game.stats()
            assert stats.recorded_steps == stats.acked_steps == stats.spooled_steps > 0, stats
            link = config.link
            assert len(link.frames) == sum(map(len, link.by_session().values())), n
            assert len(closed) == (clock.left <= 0), n
            n_blocked += closed == [False]
        print(n_blocked > 0)
    """.replace("game_closed", 'import_module("understudy.core.errors").Closed')
    script = textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_two_threads_that_pump_at_once_count_an_ack_once(tmp_path):
    class Nested(MemoryLink):
        """Another thread calls pump while this one waits for its response."""

        def send(self, frames, players, *, skipped_steps=0):
            if self.n_sends == 0:
                self.n_sends += 1
                other = threading.Thread(target=game.pump)
                other.start()
                other.join(10)
            return super().send(frames, players)

    link = Nested()
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 10)
    assert game.flush()
    assert [frame.kind for frame in link.frames] == [FrameKind.DATA] * 2
    assert (game.stats().acked_steps, game.stats().acked_frames) == (9, 1)
    game.close()
