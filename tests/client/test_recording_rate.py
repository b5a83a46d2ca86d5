"""The recording rate: the client records a share of whole episodes and counts the others."""

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client
from understudy.core.errors import LinkFailed
from understudy.experience.chunk import RowKind
from understudy.serve.state import Quota

OBS = np.zeros(2, np.float32)


def play(game, n_steps, player="ada"):
    ep = game.episode(player=player)
    for _ in range(n_steps):
        ep.acted(OBS, 0)
    ep.end(OBS)


def with_share(share, tmp_path, **settings):
    """Return a game with this recording rate."""
    link = MemoryLink()
    clock = FakeClock()
    link.recording_rate = share
    game = client(link, tmp_path, clock=clock, **settings)
    play(game, 1)
    clock.advance(2)
    game.pump()
    assert game.stats().recording_rate == share
    return game, link, clock


def test_whole_episodes_are_recorded_at_the_rate_and_the_rest_is_counted(tmp_path):
    game, link, clock = with_share(0.3, tmp_path)
    for _ in range(1000):
        play(game, 7)
    clock.advance(2)
    game.pump()
    stats = game.stats()
    assert stats.recorded_steps + stats.skipped_steps == 7001
    assert stats.recorded_steps == pytest.approx(2100, abs=300)
    assert stats.recorded_steps % 7 == 1
    for _ in range(2):
        clock.advance(15)
        game.pump()
    assert link.skipped_steps == stats.skipped_steps
    assert game.close()
    found = [chunk for frames in link.by_session().values() for chunk in chunks(frames)]
    starts = sum(int(chunk.columns["is_first"].sum()) for chunk in found)
    ends = sum(int((chunk.columns["row"] == RowKind.FINAL).sum()) for chunk in found)
    assert starts == ends == 1 + (stats.recorded_steps - 1) // 7
    assert (
        sum(chunk.meta.n_steps for chunk in found)
        == stats.recorded_steps
        == game.stats().acked_steps
    )


def test_an_episode_that_is_not_recorded_works_as_usual(tmp_path):
    game, link, clock = with_share(0.0, tmp_path)
    ep = game.episode(player="ada", consent="granted")
    assert ep.act(OBS) in (0, 1, 2)
    ep.acted(OBS, 1)
    ep.reward(1.0)
    ep.end(OBS, result="won")
    with game.episode(player="ada", consent="denied") as ep:
        ep.acted(OBS, 1)
        ep.acted(OBS, 1)
    play(game, 3000)
    forgotten = game.episode(player="bob")
    forgotten.acted(OBS, 1)
    forgotten.acted(OBS, 1)
    del forgotten
    clock.advance(2)
    game.pump()
    stats = game.stats()
    assert (stats.recorded_steps, stats.skipped_steps, stats.bad_inputs, stats.open_episodes) == (
        1,
        3004,
        0,
        0,
    )
    assert game.close()
    assert game.stats().acked_steps == 1
    assert list((tmp_path / "spool").glob("*/*")) == []
    assert link.skipped_steps == 3004


def test_a_recorder_draws_with_each_reset(tmp_path):
    game, link, clock = with_share(0.5, tmp_path)
    with game.recorder(player="ada") as recorder:
        for _ in range(200):
            recorder.reset(OBS)
            for at in range(5):
                recorder.step(0, 0.0, OBS, at == 4, False)
    clock.advance(2)
    game.pump()
    stats = game.stats()
    assert stats.recorded_steps + stats.skipped_steps == 1001
    assert 350 < stats.skipped_steps < 650
    assert stats.skipped_steps % 5 == 0
    game.close()
    found = [chunk for frames in link.by_session().values() for chunk in chunks(frames)]
    assert sum(chunk.meta.n_steps for chunk in found) == stats.recorded_steps


def test_skipped_steps_are_reported_with_frames_or_alone(tmp_path):
    game, link, clock = with_share(0.0, tmp_path)
    play(game, 10)
    clock.advance(5)
    sends = link.n_sends
    game.pump()
    assert link.n_sends == sends
    clock.advance(6)
    game.pump()
    assert (link.n_sends, link.skipped_steps) == (sends + 1, 10)
    link.recording_rate = 1.0
    play(game, 10)
    clock.advance(11)
    game.pump()
    assert (link.skipped_steps, game.stats().recording_rate) == (20, 1.0)
    play(game, 10)
    assert game.close()
    assert game.stats().acked_steps == 11


def test_skipped_steps_that_could_not_be_reported_are_reported_later(tmp_path):
    class Away(MemoryLink):
        def register(self, spec):
            pass

        def send(self, frames, players, *, skipped_steps=0):
            if self.is_down:
                raise LinkFailed("unreachable", "down", retry_after_s=1.0)
            return super().send(frames, players, skipped_steps=skipped_steps)

    link = Away()
    clock = FakeClock()
    link.recording_rate = 0.0
    game = client(link, tmp_path, clock=clock)
    play(game, 1)
    clock.advance(2)
    game.pump()
    play(game, 10)
    link.is_down = True
    for _ in range(3):
        clock.advance(40)
        game.pump()
    assert (link.skipped_steps, game.stats().failed_sends) == (0, 3)
    assert "unreachable" in game.stats().last_error
    link.is_down = False
    clock.advance(40)
    game.pump()
    assert link.skipped_steps == 10
    game.close()


class QuotaLink(MemoryLink):
    """Has the real quota of a gateway, and discards the frames."""

    def __init__(self, quota: Quota) -> None:
        super().__init__()
        self.quota = quota
        self.steps = 0

    def send(self, frames, players, *, skipped_steps=0):
        kept = sum(chunk.meta.n_steps for frame in frames for chunk in chunks_in(frame))
        self.steps += kept
        self.recording_rate = self.quota.count_steps(kept, skipped_steps)
        acks = super().send(frames, players, skipped_steps=skipped_steps)
        self.frames.clear()
        return acks


def chunks_in(frame):
    from understudy.experience.chunk import chunk_of
    from understudy.experience.frame import FrameKind

    return [chunk_of(frame)] if frame.kind is FrameKind.DATA else []


@pytest.mark.parametrize(
    ("n_players", "target_steps_s", "seconds"),
    [(10, 10.0, 200), (100, 50.0, 60), pytest.param(1000, 50.0, 60, marks=pytest.mark.slow)],
)
def test_the_platform_gets_its_quota_for_any_number_of_players(
    tmp_path, n_players, target_steps_s, seconds
):
    clock = FakeClock()
    warm_s = 20
    n_steps = 4
    quota = Quota(target_steps_s, clock)
    # Ten players have one client each; a thousand share ten clients, as on a match server.
    links = [QuotaLink(quota) for _ in range(10)]
    games = [
        client(link, tmp_path / str(at), clock=clock, rng_seed=at) for at, link in enumerate(links)
    ]
    kept_before = n_episodes = 0
    for second in range(seconds):
        if second == warm_s:
            kept_before = sum(link.steps for link in links)
        for who in range(second % 2, n_players, 2):
            play(games[who % 10], n_steps, player=f"p-{who}")
            n_episodes += 1
        clock.advance(1.0)
        for game in games:
            while game.pump() == 0:
                pass
    rate = (sum(link.steps for link in links) - kept_before) / (seconds - warm_s)
    assert rate == pytest.approx(target_steps_s, rel=0.1)
    share = np.mean([game.stats().recording_rate for game in games])
    assert share == pytest.approx(target_steps_s / (n_players * n_steps / 2), rel=0.2)
    stats = [game.stats() for game in games]
    assert sum(one.recorded_steps + one.skipped_steps for one in stats) == n_episodes * n_steps
    for game in games:
        assert game.close()
