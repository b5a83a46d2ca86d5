"""A client that runs for weeks starts new sessions, since the intake rejects old ids."""

import pytest

from tests.client.fakes import FakeClock, MemoryLink, client, episodes
from understudy.core.names import game_name, player_name, session_time_s
from understudy.experience.frame import Frame
from understudy.experience.intake import Intake
from understudy.experience.session import DAY_S


class DoorLink(MemoryLink):
    """Rejects what an intake would reject."""

    def __init__(self, clock):
        super().__init__()
        intake = Intake(bytes(32), game_name("my-game"), clock)
        anna = player_name("anna")
        self.refuses = lambda frame: (
            not isinstance(intake.admit([frame], {frame.session: anna})[0], Frame)
        )


def by_episode(game):
    ep = game.episode(player="anna")
    for at in range(3):
        ep.acted([at, 0], 0)
    ep.end([3, 0])


def by_recorder(game, recorder):
    recorder.reset([0, 0])
    for at in range(3):
        recorder.step(0, 0.0, [at + 1, 0], at == 2, False)


@pytest.mark.parametrize("how", ["episode", "recorder"])
@pytest.mark.parametrize("sleeps", [True, False])
def test_a_client_that_plays_for_weeks_is_never_rejected(tmp_path, how, sleeps):
    clock = FakeClock()
    link = DoorLink(clock)
    game = client(link, tmp_path, clock=clock)
    recorder = game.recorder(player="anna") if how == "recorder" else None
    for _ in range(40):
        by_episode(game) if recorder is None else by_recorder(game, recorder)
        clock.advance(2)
        game.pump()
        clock.now_s += DAY_S / 2
        clock.up_s += 0.0 if sleeps else DAY_S / 2
        game.pump()
    assert game.stats().open_episodes == (recorder is not None)
    game.close()
    assert (game.stats().acked_steps, game.stats().refused_steps, game.stats().ignored_calls) == (
        120,
        0,
        0,
    )
    found = link.by_session()
    assert len(found) > 6
    assert {len(steps) for frames in found.values() for steps in episodes(frames)} == {3}


def test_a_recorder_with_an_old_session_is_cut_at_its_reset_and_continues(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    recorder = game.recorder(player="anna")
    recorder.reset([0, 0])
    recorder.step(0, 1.0, [1, 0], False, False)
    clock.advance(3 * DAY_S)
    recorder.step(0, 1.0, [2, 0], False, False)
    by_recorder(game, recorder)
    game.close()
    sizes = [
        [len(steps) for steps in episodes(link.by_session()[one])]
        for one in sorted(link.by_session(), key=session_time_s)
    ]
    assert sizes == [[2], [3]]


def test_a_recorder_whose_session_was_ended_continues_at_its_next_reset(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    recorder = game.recorder(player="anna")
    by_recorder(game, recorder)
    assert game.end_session("anna")
    by_recorder(game, recorder)
    recorder.close()
    game.close()
    assert len(link.by_session()) == 2
    assert (game.stats().acked_steps, game.stats().ignored_calls) == (6, 0)


def test_a_clock_that_is_set_back_starts_a_new_session(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    by_episode(game)
    clock.now_s -= 400 * DAY_S
    by_episode(game)
    game.close()
    assert len(link.by_session()) == 2


@pytest.mark.parametrize("first", ["game", "recorder"])
def test_an_old_recorder_that_was_closed_stays_quiet(tmp_path, first):
    clock = FakeClock()
    game = client(MemoryLink(), tmp_path, clock=clock)
    recorder = game.recorder(player="anna")
    (game if first == "game" else recorder).close()
    clock.advance(3 * DAY_S)
    recorder.reset([0, 0])
    assert (game.stats().ignored_calls, game.stats().open_episodes) == (1, 0)
    game.close()
