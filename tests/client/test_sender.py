"""Retries and losses: the platform ends up with exactly the steps not reported as dropped."""

import threading
import time

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import ClientConfig, RecordingWarning, SenderConfig, connect
from understudy.core.errors import ConfigError
from understudy.experience.frame import FrameKind, read_close, read_drop


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


def play(ep, start, n):
    for i in range(start, start + n):
        ep.acted(obs(i), i % 3)
        ep.reward(1.0)


def stored_steps(link):
    return sum(
        chunk.meta.n_steps for frames in link.by_session().values() for chunk in chunks(frames)
    )


def test_closed_steps_are_sent_after_the_linger_in_a_pause(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 4)
    clock.advance(0.9)
    assert game.pump() == pytest.approx(0.1, abs=0.002)
    assert link.frames == []
    clock.advance(0.2)
    game.pump()
    assert stored_steps(link) == 3
    clock.advance(100)
    game.pump()
    assert len(link.frames) == 1
    play(ep, 4, 1)
    ep.end(obs(5))
    game.close()
    (frames,) = link.by_session().values()
    assert [step.obs for step in episodes(frames)[0]] == [(obs(i).tobytes(),) for i in range(5)]


def test_a_timeout_after_success_sends_again_and_changes_nothing(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.loses_answers = 3
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 600)
    ep.end(obs(600))
    for _ in range(10):
        clock.advance(31)
        game.pump()
    assert game.stats().failed_sends == 3
    assert game.stats().acked_steps == 600
    game.close()
    assert len(link.frames) > len({(frame.session, frame.chunk_no) for frame in link.frames})
    assert stored_steps(link) == 600


def test_retries_wait_a_random_time_that_grows_to_its_cap(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 3)
    ep.end(obs(3))
    clock.advance(2)
    waits = []
    for _ in range(40):
        wait_s = game.pump()
        waits.append(game._sender._backoff.remaining_s)
        clock.advance(max(wait_s, waits[-1]))
    assert max(waits[:2]) <= 1.0
    assert 10 < max(waits) <= 30.0
    assert len(set(waits)) > 10
    link.is_down = False
    clock.advance(31)
    game.pump()
    assert stored_steps(link) == 3
    game.close()


def test_a_retry_waits_as_long_as_the_platform_requests(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.retry_after_s = 12.0
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 3)
    ep.end(obs(3))
    clock.advance(2)
    game.pump()
    assert game._sender._backoff.remaining_s >= 12.0
    clock.advance(11)
    game.pump()
    assert link.n_sends == 1
    link.retry_after_s = None
    clock.advance(2)
    game.pump()
    assert stored_steps(link) == 3
    game.close()


def test_a_rejected_frame_is_reported_and_the_rest_is_sent(tmp_path):
    link = MemoryLink()
    link.refuses = lambda frame: frame.kind is FrameKind.DATA and frame.chunk_no == 1
    game = client(link, tmp_path)
    ep = game.episode(player="anna")
    play(ep, 0, 1200)
    ep.end(obs(1200))
    with pytest.warns(RecordingWarning, match="not_today"):
        game.close()
    (frames,) = link.by_session().values()
    reports = [read_drop(frame) for frame in frames.values() if frame.kind is FrameKind.DROP]
    assert [report.ranges for report in reports] == [((1, 1),)]
    assert [report.n_steps for report in reports] == [512]
    assert (game.stats().refused_frames, game.stats().refused_steps) == (1, 512)
    assert read_close(frames[max(frames)]).n_steps == 1200


def test_a_session_whose_reports_are_rejected_is_abandoned(tmp_path):
    link = MemoryLink()
    link.refuses = lambda frame: True
    game = client(link, tmp_path)
    ep = game.episode(player="anna")
    play(ep, 0, 10)
    ep.end(obs(10))
    with pytest.warns(RecordingWarning):
        game.close()
    assert link.frames == []
    assert not list((tmp_path / "spool").glob("*/*"))


@pytest.mark.filterwarnings("ignore:recorded steps are .* will be sent later")
@pytest.mark.parametrize("seed", range(5))
def test_at_the_spool_cap_the_reports_name_exactly_what_is_missing(tmp_path, seed):
    link = MemoryLink()
    clock = FakeClock()
    rng = np.random.default_rng(seed)
    game = client(link, tmp_path, clock=clock, spool_cap_bytes=128 * 1024)
    eps = [game.episode(player=f"p{n}") for n in range(3)]
    link.is_down = True
    sizes = rng.integers(50, 400, 120).tolist()
    with pytest.warns(RecordingWarning, match="dropped"):
        outage(game, clock, [(eps[int(rng.integers(3))], n) for n in sizes], tmp_path / "spool")
    for ep in eps:
        ep.end(obs(0))
    link.is_down = False
    for _ in range(20):
        clock.advance(31)
        game.pump()
    game.close()
    assert game.stats().dropped_steps > 0
    missing = 0
    reported = 0
    stored = 0
    for frames in link.by_session().values():
        lost = set(range(max(frames) + 1)) - set(frames)
        ranges = [
            pair
            for frame in frames.values()
            if frame.kind is FrameKind.DROP
            for pair in read_drop(frame).ranges
        ]
        assert lost == {number for first, last in ranges for number in range(first, last + 1)}
        reported += sum(
            read_drop(frame).n_steps for frame in frames.values() if frame.kind is FrameKind.DROP
        )
        stored += sum(chunk.meta.n_steps for chunk in chunks(frames))
        assert frames[max(frames)].kind is FrameKind.CLOSE
        missing += len(lost)
    assert missing > 0
    assert (stored + reported, reported) == (sum(sizes), game.stats().dropped_steps)


@pytest.mark.filterwarnings("ignore::understudy.client.session.RecordingWarning")
def test_a_spool_full_of_steps_that_may_have_arrived_keeps_them_and_drops_new_ones(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    kept = []
    for player in ("anna", "ben"):
        game = client(link, tmp_path, clock=clock, spool_cap_bytes=64 * 1024)
        game.pump()
        ep = game.episode(player=player)
        outage(game, clock, [(ep, 300)] * 40, tmp_path / "spool")
        assert not game.close()
        kept.append(game.stats().recorded_steps - game.stats().dropped_steps)
    assert kept[0] > 100 * kept[1]
    link.is_down = False
    with client(link, tmp_path, clock=clock) as game:
        for _ in range(9):
            clock.advance(31)
            game.pump()
        assert game.stats().acked_steps == sum(kept)


def outage(game, clock, turns, folder):
    """Play while nothing can be sent; the spool must stay close to its cap."""
    for at, (ep, n) in enumerate(turns):
        play(ep, at * 1000, n)
        clock.advance(1.5)
        game.pump()
        assert sum(path.stat().st_size for path in folder.rglob("*.log")) < 128 * 1024 * 1.1


def test_the_oldest_block_is_dropped_when_the_handoff_is_full(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    eps = [game.episode(player=f"p{n}") for n in range(2)]
    for ep in eps:
        play(ep, 0, 513)
    game._sessions.handoff._max_bytes = 79 * game._sessions.handoff.waiting_bytes // 2
    for at in range(1, 40):
        for ep in eps:
            play(ep, at * 512 + 1, 512)
    for ep in eps:
        ep.end(obs(1))
    with pytest.warns(RecordingWarning, match="dropped"):
        game.close()
    lost = 0
    for frames in link.by_session().values():
        reports = [read_drop(frame) for frame in frames.values() if frame.kind is FrameKind.DROP]
        lost += sum(report.n_steps for report in reports)
        assert all(report.ranges == ((0, 0),) for report in reports)
        assert chunks(frames)[0].meta.first_step == sum(report.n_steps for report in reports)
        assert read_close(frames[max(frames)]).n_steps == 40 * 512 + 1
    assert lost == game.stats().dropped_steps > 0
    assert lost + game.stats().acked_steps == game.stats().recorded_steps == 2 * (40 * 512 + 1)


def test_a_session_without_an_episode_is_closed_and_its_folder_deleted(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 3)
    ep.end(obs(3))
    clock.advance(61)
    for _ in range(3):
        game.pump()
    assert [frame.kind for frame in link.frames] == [FrameKind.DATA, FrameKind.CLOSE]
    assert not list((tmp_path / "spool").glob("*/*"))
    game.episode(player="anna").cut()
    game.close()


def test_an_episode_that_the_game_dropped_is_cut(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 0, 5)
    del ep
    clock.advance(61)
    game.pump()
    assert game.stats().open_episodes == 0
    clock.advance(61)
    for _ in range(3):
        game.pump()
    (frames,) = link.by_session().values()
    assert [note.cut for chunk in chunks(frames) for note in chunk.meta.episodes] == [True]
    game.close()


def test_a_failing_disk_loses_nothing_while_the_link_works(tmp_path, monkeypatch):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    monkeypatch.setattr("understudy.core.log._pwrite", full)
    ep = game.episode(player="anna")
    play(ep, 0, 1500)
    ep.end(obs(0))
    game.close()
    assert stored_steps(link) == 1500


def full(*_):
    raise OSError(28, "No space left on device")


def test_frames_beyond_the_memory_budget_are_read_back_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("understudy.client.sender._MEMORY_BYTES", 20_000)
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    for at in range(8):
        play(ep, at * 512, 512)
        game.pump()
    ep.end(obs(0))
    link.is_down = False
    clock.advance(31)
    game.pump()
    game.close()
    assert stored_steps(link) == 8 * 512


def test_a_real_thread_flushes_within_its_time(tmp_path):
    link = MemoryLink()
    config = ClientConfig(link=link, spool=tmp_path / "spool")
    with connect("my-game", obs=2, actions=3, config=config) as game:
        ep = game.episode(player="anna")
        play(ep, 0, 100)
        assert game.flush(10.0)
        assert stored_steps(link) == 99
        link.is_down = True
        play(ep, 100, 100)
        began_s = time.monotonic()
        assert not game.flush(0.2)
        assert time.monotonic() - began_s < 5
        link.is_down = False
    assert stored_steps(link) == 199


@pytest.mark.parametrize("name", ["spool", "send"])
def test_a_sender_continues_after_an_error(tmp_path, monkeypatch, name):
    link = MemoryLink()
    sender = SenderConfig(linger_s=0.01)
    config = ClientConfig(link=link, spool=tmp_path / "spool", sender=sender)
    with connect("my-game", obs=2, actions=3, config=config) as game:
        true_step = getattr(game._sender, name)
        tripped = threading.Event()

        def step():
            if not tripped.is_set():
                tripped.set()
                raise RuntimeError("tripped")
            return true_step()

        monkeypatch.setattr(game._sender, name, step)
        with pytest.warns(RecordingWarning, match="tripped"):
            short_game(game, tripped)
    assert stored_steps(link) == 10


class TooFewAcks(MemoryLink):
    def send(self, frames, players, *, skipped_steps=0):
        return super().send(frames, players, skipped_steps=skipped_steps)[1:]


class Broken(MemoryLink):
    def send(self, frames, players, *, skipped_steps=0):
        raise TypeError("a bug")


@pytest.mark.parametrize(
    ("link", "problem"),
    [(Broken(), "a bug"), (TooFewAcks(), "0 acknowledgements for 1 frames")],
)
def test_a_bug_of_a_link_is_warned_of_while_the_game_runs(tmp_path, link, problem):
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    play(game.episode(player="anna"), 0, 3)
    clock.advance(2)
    with pytest.warns(RecordingWarning, match=f"saved on this machine and .* later: .*{problem}"):
        game.pump()
    assert problem in game.stats().last_error
    game.close()


def short_game(game, tripped):
    ep = game.episode(player="anna")
    play(ep, 0, 10)
    assert tripped.wait(5)
    ep.end(obs(10))
    assert game.flush(10)


def test_times_must_be_above_zero():
    with pytest.raises(ConfigError, match="linger_s"):
        SenderConfig(linger_s=0.0)


@pytest.mark.filterwarnings("ignore::understudy.client.session.RecordingWarning")
def test_a_drop_report_is_sent_before_the_numbers_after_its_gap(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    link.is_down = True
    game = client(link, tmp_path, clock=clock, spool_cap_bytes=64 * 1024)
    ep = game.episode(player="anna")
    for start in range(0, 900, 3):
        play(ep, start, 3)
        clock.advance(31)
        game.pump()
    link.is_down = False
    game.close()
    game = client(link, tmp_path, clock=clock, spool_cap_bytes=64 * 1024)
    for _ in range(60):
        clock.advance(31)
        game.pump()
    kinds = [frame.kind for frame in link.frames]
    gap_end = max(
        last
        for frame in link.frames
        if frame.kind is FrameKind.DROP
        for _, last in read_drop(frame).ranges
    )
    sent_before = link.frames[: len(kinds) - kinds[::-1].index(FrameKind.DROP)]
    assert all(frame.chunk_no < gap_end for frame in sent_before if frame.kind is FrameKind.DATA)
