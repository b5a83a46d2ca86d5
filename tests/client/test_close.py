"""Flushing and closing: with and without a thread, on links that respond, fail or hang."""

import threading
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


@pytest.mark.parametrize("is_down", [True, False])
def test_a_second_close_returns_what_the_first_returned(tmp_path, is_down):
    link = MemoryLink()
    link.is_down = is_down
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 3)
    assert [game.close(), game.close(), game.flush()] == [not is_down] * 3


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


def test_closing_warns_of_a_sender_that_hangs_in_its_link(tmp_path, monkeypatch):
    class Hanging(MemoryLink):
        def __init__(self):
            super().__init__()
            self.goes_on = threading.Event()

        def send(self, frames, players, *, skipped_steps=0):
            self.goes_on.wait(30)
            return super().send(frames, players)

    monkeypatch.setattr(import_module("understudy.client.connect"), "_JOIN_S", 0.05)
    link = Hanging()
    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=0.01))
    game = connect("my-game", obs=2, actions=3, config=config)
    ep = game.episode(player="anna")
    play(ep, 3)
    ep.end()
    with pytest.warns(RecordingWarning, match="did not stop"):
        assert not game.close(timeout_s=0.05)
    assert not link.is_closed
    link.goes_on.set()
    assert game._thread is not None
    game._thread.join(10)
    assert not game._thread.is_alive()


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
