"""Recorders: each step is closed at once, and invalid input never becomes a wrong step."""

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import Extras, RecordingWarning
from understudy.core.errors import Refused


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


def rows(link):
    (frames,) = link.by_session().values()
    return [
        [(step.obs, step.reward, step.terminated, step.truncated) for step in one]
        for one in episodes(frames)
    ]


def test_a_step_is_complete_as_soon_as_it_is_recorded(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    recorder = game.recorder(player="anna")
    recorder.reset(obs(0), seed=5)
    recorder.step(1, 2.0, obs(1), False, False, by="bot", extras=Extras(version=3, logp=-0.7))
    clock.advance(2)
    game.pump()
    assert rows(link) == [[((obs(0).tobytes(),), 2.0, False, False)]]
    recorder.step(2, 3.0, obs(2), True, False)
    game.close()
    assert rows(link) == [
        [((obs(0).tobytes(),), 2.0, False, False), ((obs(1).tobytes(),), 3.0, True, False)]
    ]
    first, second = chunks(next(iter(link.by_session().values())))
    assert first.columns["version"].tolist() == [3, 0]
    assert "version" not in second.columns
    assert [note.seed for note in first.meta.episodes] == [5]


def test_an_observation_buffer_may_be_reused(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    recorder = game.recorder(player="anna")
    buffer = obs(0)
    recorder.reset(buffer)
    for at in range(1, 5):
        buffer[:] = obs(at)
        recorder.step(0, 0.0, buffer, at == 4, False)
    game.close()
    assert [row[0] for row in rows(link)[0]] == [(obs(at).tobytes(),) for at in range(4)]


def test_terminated_and_truncated_may_both_be_true(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    with game.recorder(player="anna") as recorder:
        recorder.reset(obs(0))
        recorder.step(0, 1.0, obs(1), True, True)
    game.close()
    assert rows(link) == [[((obs(0).tobytes(),), 1.0, True, True)]]


def test_bad_input_cuts_there_and_the_next_reset_records_again(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    recorder = game.recorder(player="anna")
    recorder.reset(obs(0))
    recorder.step(0, 1.0, obs(1), False, False)
    with pytest.warns(RecordingWarning, match="not_finite"):
        recorder.step(0, 1.0, obs(np.nan), False, False)
    recorder.step(0, 1.0, obs(3), False, False)
    recorder.reset(obs(10))
    recorder.step(0, 1.0, obs(11), True, False)
    game.close()
    assert [len(one) for one in rows(link)] == [1, 1]
    assert (game.stats().bad_inputs, game.stats().ignored_calls) == (1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda recorder: recorder.reset(np.zeros(5)),
        lambda recorder: (recorder.reset(obs(0)), recorder.step(9, 0.0, obs(1), False, False)),
        lambda recorder: (
            recorder.reset(obs(0)),
            recorder.step(0, float("nan"), obs(1), False, False),
        ),
    ],
)
def test_the_first_decision_raises(tmp_path, call):
    game = client(MemoryLink(), tmp_path)
    with pytest.raises(Refused):
        call(game.recorder(player="anna"))
    game.close()


def test_steps_before_a_reset_and_after_close_are_ignored(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    recorder = game.recorder(player="anna")
    recorder.step(0, 0.0, obs(0), False, False)
    recorder.close()
    recorder.close()
    recorder.reset(obs(0))
    recorder.step(0, 0.0, obs(0), False, False)
    assert game.stats().ignored_calls == 3
    game.close()
    assert link.frames == []


def test_two_recorders_of_one_player_have_separate_sessions(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    for recorder in [game.recorder(player="anna"), game.recorder(player="anna")]:
        recorder.reset(obs(0))
        recorder.step(0, 0.0, obs(1), True, False)
    game.close()
    assert len(link.by_session()) == 2
