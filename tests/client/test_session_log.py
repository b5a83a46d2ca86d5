"""Decisions and rewards that an episode logs without a lock are recorded once, and in order."""

import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import ClientConfig, RecordingWarning, SenderConfig, connect
from understudy.core.errors import Refused
from understudy.experience.game import game_spec
from understudy.experience.spaces import MAX_NUMBER


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


def logged(ep):
    return ep._session.log


def recorded(frames):
    """First number of the observation, action, and reward of every step of a session."""
    return [
        (float(np.frombuffer(step.obs[0], np.float32)[0]), step.action[0][0], step.reward)
        for steps in episodes(frames)
        for step in steps
    ]


def steps_of(link):
    """The steps of the only session."""
    (frames,) = link.by_session().values()
    return recorded(frames)


def test_only_the_first_decision_of_a_send_takes_the_lock(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    with client(link, tmp_path, clock=clock) as game:
        ep = game.episode("anna")
        ep.acted(obs(0), 0)
        ep.acted(obs(1), 1)
        assert logged(ep) == []  # its first step is closed, so the sender has to know the session
        with ep._session.lock:
            for at in range(2, 5):
                ep.acted(obs(at), at % 3, by="script", frames=at)
                ep.reward(at)
        assert len(logged(ep)) == 6
        assert game.stats().recorded_steps == 4
        clock.advance(1.0)
        game.pump()
        assert logged(ep) == []
        assert game.stats().acked_steps == 4
        ep.end(obs(5))
    assert steps_of(link) == [(at, at % 3, at if at > 1 else 0) for at in range(5)]
    (frames,) = link.by_session().values()
    assert [n for chunk in chunks(frames) for n in chunk.columns["frames"].tolist() if n > 1] == [
        2,
        3,
        4,
    ]


def test_an_observation_may_change_after_the_call(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        ep = game.episode("anna")
        seen = obs(0)
        for at in range(6):
            seen[:] = at
            ep.acted(seen, 0)
        ep.end()
    assert [seen for seen, _, _ in steps_of(link)] == list(range(6))


def test_times_are_those_of_the_calls(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    with client(link, tmp_path, clock=clock) as game:
        ep = game.episode("anna")
        for at in range(5):
            ep.acted(obs(at), 0)
            clock.advance(0.25)
        ep.end()
    (chunk,) = chunks(next(iter(link.by_session().values())))
    assert chunk.columns["t_ms"].tolist() == [0, 250, 500, 750, 1000, 0]


@pytest.mark.parametrize("call", ["decisions", "rewards"])
def test_a_log_is_bounded_while_the_sender_does_not_run(tmp_path, call):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        ep = game.episode("anna")
        ep.acted(obs(0), 0)
        ep.acted(obs(1), 0)
        n_rows = ep._session.builder.layout.n_rows
        longest = 0
        for at in range(3 * n_rows):
            if call == "decisions":
                ep.acted(obs(at), 0)
            else:
                ep.reward(1.0)
            longest = max(longest, len(logged(ep)))
        ep.end()
        assert n_rows // 2 < longest <= n_rows
        assert game.stats().recorded_steps == (3 * n_rows + 2 if call == "decisions" else 2)
    assert sum(reward for _, _, reward in steps_of(link)) == (call == "rewards") * 3 * n_rows


def test_a_decision_logged_right_after_the_sender_looked_is_due_again(tmp_path):
    class Late(list[Any]):
        def append(self, entry):
            game.flush(0.0)  # between the check and the append
            super().append(entry)

    link = MemoryLink()
    clock = FakeClock()
    with client(link, tmp_path, clock=clock) as game:
        ep = game.episode("anna")
        ep._log = Late()
        ep.acted(obs(0), 0)
        ep.acted(obs(1), 0)
        ep.acted(obs(2), 0)
        assert game.stats().spooled_steps == 1
        clock.advance(1.0)
        game.pump()
        assert game.stats().acked_steps == 2


def test_a_call_that_arrives_after_another_thread_ended_the_episode_changes_nothing(tmp_path):
    class Late(list[Any]):
        def append(self, entry):
            if not ep._over:
                ep.end(obs(9))
                following.append(game.episode("anna"))
                following[0].acted(obs(10), 1)
            super().append(entry)

    link = MemoryLink()
    following: list[Any] = []
    with client(link, tmp_path) as game:
        ep = game.episode("anna")
        ep._log = Late()
        ep.acted(obs(0), 0)
        ep.acted(obs(1), 0)
        following[0].end(obs(11))
    assert [seen for seen, _, _ in steps_of(link)] == [0, 10]


@pytest.mark.parametrize("bad", [(obs(np.nan), 0), (obs(1), 9), (np.zeros(3), 0), (obs(1), "x")])
@pytest.mark.parametrize("strict", [False, True])
def test_invalid_input_is_refused_in_its_call_and_what_was_logged_before_it_stays(
    tmp_path, bad, strict
):
    link = MemoryLink()
    game = client(link, tmp_path, strict=strict)
    ep = game.episode("anna")
    for at in range(4):
        ep.acted(obs(at), at % 3)
    with pytest.raises(Refused) if strict else pytest.warns(RecordingWarning):
        ep.acted(*bad)
    assert game.stats().bad_inputs == 1
    ep.acted(obs(4), 1)
    assert game.stats().ignored_calls == (not strict)
    game.close()
    found = steps_of(link)
    assert found[:3] == [(at, at % 3, 0) for at in range(3)]


def test_a_reward_for_a_refused_decision_is_early(tmp_path):
    game = client(MemoryLink(), tmp_path, strict=True)
    ep = game.episode("anna")
    ep.acted(obs(0), 0)
    ep.acted(obs(1), 0)
    with pytest.raises(Refused, match="not_in_space"):
        ep.acted(obs(2), 9)
    with pytest.raises(Refused, match="early_reward"):
        ep.reward(1.0)
    game.close()


def test_logged_rewards_keep_a_sum_within_the_bound(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        ep = game.episode("anna")
        ep.acted(obs(0), 0)
        ep.reward(MAX_NUMBER)
        for reward in (1e6, 1, np.float32(2), np.float64(3)):
            ep.reward(reward)
        ep.acted(obs(1), 0)
        more: tuple[Any, ...] = (0.5, 1, np.float32(2), np.float64(3), True, np.int64(4))
        for one in more:
            ep.reward(one)
        ep.end()
        assert game.stats().bad_inputs == 0
    assert [reward for _, _, reward in steps_of(link)] == [np.float32(MAX_NUMBER), 11.5]


def test_a_game_with_masks_may_leave_them_out(tmp_path):
    link = MemoryLink()
    spec = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
    with client(link, tmp_path, game=spec) as game:
        ep = game.episode("anna")
        ep.acted(obs(0), 0, action_mask=[True, False, True])
        for at in range(1, 4):
            ep.acted(obs(at), at - 1)
        ep.end()
    (chunk,) = chunks(next(iter(link.by_session().values())))
    masks = chunk.columns["action_mask"].tolist()
    assert masks == [[True, False, True]] + [[True] * 3] * 4


def test_threads_that_play_while_the_sender_runs_lose_nothing(tmp_path):
    n_players = 4
    n_steps = 3000
    link = MemoryLink()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        sender = SenderConfig(linger_s=0.001)
        config = ClientConfig(link=link, spool=tmp_path / "spool", sender=sender)
        with connect("my-game", obs=2, actions=3, config=config) as game:

            def play(player):
                ep = game.episode(f"player-{player}")
                for at in range(n_steps):
                    ep.acted(obs(at), at % 3)
                    ep.reward(at)
                ep.end()

            players = [threading.Thread(target=play, args=(n,)) for n in range(n_players)]
            for player in players:
                player.start()
            for player in players:
                player.join(60.0)
            assert game.flush(30.0)
            assert game.stats().acked_steps == n_players * n_steps
    finally:
        sys.setswitchinterval(interval_s)
    for frames in link.by_session().values():
        assert recorded(frames) == [(at, at % 3, at) for at in range(n_steps)]
