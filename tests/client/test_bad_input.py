"""Invalid input costs only itself, is named, and each kind of it is warned of once."""

import warnings

import numpy as np
import pytest

from tests.client.fakes import MemoryLink, chunks, client, episodes
from understudy.client import RecordingWarning
from understudy.core.errors import Refused
from understudy.experience.spaces import MAX_NUMBER


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


def playing(tmp_path, **settings):
    """A game whose first decision was valid, so that invalid input no longer raises."""
    link = MemoryLink()
    game = client(link, tmp_path, **settings)
    with game.episode(player="ben") as ep:
        ep.acted(obs(0), 0)
    return link, game


def recorded(game, link):
    """The only session's episodes, and the notes of its chunks."""
    game.close()
    (frames,) = link.by_session().values()
    notes = [note for chunk in chunks(frames) for note in chunk.meta.episodes]
    return [
        [(step.reward, step.terminated, step.truncated) for step in steps]
        for steps in episodes(frames)
    ], notes


# --- Only itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [1.0, None, float("nan"), "text"])
def test_a_reward_before_the_first_decision_costs_only_itself(tmp_path, reward):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    with pytest.warns(RecordingWarning, match="a reward was ignored.*early_reward"):
        ep.reward(reward)
    for at in range(4):
        ep.acted(obs(at), 0)
        ep.reward(0.5)
    ep.end(obs(4))
    stats = game.stats()
    assert (stats.bad_inputs, stats.ignored_calls) == (1, 0)
    assert stats.last_bad_input.startswith("early_reward: ")
    found, _ = recorded(game, link)
    assert found == [[(0.5, False, False)] * 3 + [(0.5, True, False)]]


def test_a_game_that_begins_with_a_reward_is_told_and_its_episode_goes_on(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path)
    ep = game.episode(player="anna")
    with pytest.raises(Refused, match="early_reward"):
        ep.reward(1.0)
    ep.acted(obs(0), 0)
    ep.end()
    assert recorded(game, link)[0] == [[(0.0, True, False)]]


def test_a_truncated_end_without_an_observation_says_that_it_drops_the_last_decision(tmp_path):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    for at in range(4):
        ep.acted(obs(at), 0)
    with pytest.warns(RecordingWarning, match=r"last decision was dropped.*end\(obs, truncated"):
        ep.end(truncated=True, result="draw")
    assert game.stats().last_bad_input.startswith("no_last_obs: ")
    found, (note,) = recorded(game, link)
    assert found == [[(0.0, False, False)] * 3]
    assert (note.cut, note.result) == (True, "draw")


@pytest.mark.parametrize("result", ["x" * 65, [1], float("nan"), 1e301, np.float32("nan")])
@pytest.mark.parametrize("truncated", [False, True])
def test_an_invalid_result_costs_only_itself(tmp_path, result, truncated):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    ep.reward(1.0)
    with pytest.warns(RecordingWarning, match="result was ignored"):
        ep.end(obs(1), truncated=truncated, result=result)
    assert game.stats().bad_inputs == 1
    found, (note,) = recorded(game, link)
    assert found == [[(1.0, not truncated, truncated)]]
    assert (note.cut, note.result) == (False, None)


@pytest.mark.parametrize("fact", [{"seed": np.int64(3)}, {"seat": "x"}, {"match": 5}])
def test_an_invalid_fact_about_an_episode_is_refused_with_a_reason(tmp_path, fact):
    _, game = playing(tmp_path)
    with pytest.raises(Refused, match="bad_metadata"):
        game.episode(player="anna", **fact)
    assert game.stats().open_episodes == 0
    game.close()


@pytest.mark.parametrize("seed", [-1, 1.5, "x", np.int64(3)])
def test_an_invalid_seed_of_a_recorder_costs_only_its_episode(tmp_path, seed):
    link, game = playing(tmp_path)
    recorder = game.recorder(player="anna")
    with pytest.warns(RecordingWarning, match="bad_metadata"):
        recorder.reset(obs(0), seed=seed)
    recorder.step(0, 1.0, obs(1), True, False)
    recorder.reset(obs(0), seed=1)
    recorder.step(0, 1.0, obs(1), True, False)
    assert recorded(game, link)[0] == [[(1.0, True, False)]]


@pytest.mark.parametrize("last", [obs(np.nan), np.zeros(3), "text", obs(1e30)])
def test_an_invalid_last_observation_of_a_game_that_is_over_costs_only_itself(tmp_path, last):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    with pytest.warns(RecordingWarning, match="last observation was ignored"):
        ep.end(last, result=1)
    found, (note,) = recorded(game, link)
    assert found == [[(0.0, True, False)]]
    assert note.result == 1


@pytest.mark.parametrize("flag", ["x", 2, None, 0.5, [True], np.zeros(2)])
def test_an_invalid_flag_drops_only_the_decision_whose_outcome_it_leaves_unknown(tmp_path, flag):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    ep.acted(obs(1), 0)
    with pytest.warns(RecordingWarning, match="last decision was dropped.*truncated is"):
        ep.end(obs(2), truncated=flag)
    recorder = game.recorder(player="carl")
    recorder.reset(obs(0))
    recorder.step(0, 0.0, obs(1), False, False)
    game._tolerance.warned.clear()
    with pytest.warns(RecordingWarning, match="terminated is"):
        recorder.step(0, 0.0, obs(2), flag, False)
    game.close()
    found = [[len(steps) for steps in episodes(one)] for one in link.by_session().values()]
    assert found == [[1], [1]]


@pytest.mark.parametrize("flag", [np.True_, 1, np.array(True)])
def test_a_flag_may_be_of_any_type_that_equals_true(tmp_path, flag):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    ep.end(obs(1), truncated=flag)
    assert recorded(game, link)[0] == [[(0.0, False, True)]]
    assert game.stats().bad_inputs == 0


@pytest.mark.parametrize(
    "ending", [{"result": [1]}, {"truncated": "x"}, {"obs": obs(np.nan)}, {"truncated": True}]
)
def test_strict_raises_an_invalid_end_and_a_valid_one_may_follow(tmp_path, ending):
    link = MemoryLink()
    game = client(link, tmp_path, strict=True)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    with pytest.raises(Refused):
        ep.end(**ending)
    with pytest.raises(Refused):
        ep.end(**ending)
    ep.reward(1.0)
    ep.end(obs(1), truncated=True)
    assert recorded(game, link)[0] == [[(1.0, False, True)]]


def test_an_invalid_end_ends_the_episode_even_if_warnings_are_errors(tmp_path):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    with pytest.raises(RecordingWarning):
        ep.end(obs(1), result=[1])
    assert game.stats().open_episodes == 0
    assert recorded(game, link)[0] == [[(0.0, True, False)]]


# --- Named, and warned of once --------------------------------------------------------------------


def test_each_kind_of_invalid_input_is_warned_of_once_and_the_last_one_is_named(tmp_path):
    _, game = playing(tmp_path)
    kinds = {
        "not_finite": lambda ep: ep.acted(obs(np.nan), 0),
        "bad_shape": lambda ep: ep.acted(np.zeros(3), 0),
        "not_in_space": lambda ep: ep.acted(obs(1), 7),
        "bad_by": lambda ep: ep.acted(obs(1), 0, by="ghost"),
        "early_reward": lambda ep: ep.reward(1.0),
        "bad_metadata": lambda ep: ep.end(result=[1]),
        "bad_input": lambda ep: ep.acted(obs(1), 0, frames="many"),
    }
    warned = []
    for turn in range(3):
        for kind, call in kinds.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(game.episode(player="anna"))
            warned += [str(warning.message) for warning in caught]
            assert game.stats().last_bad_input.startswith(f"{kind}: "), turn
    assert [kind for text in warned for kind in kinds if f"{kind}: " in text] == list(kinds)
    assert game.stats().bad_inputs == 3 * len(kinds)
    game.close()


def test_one_kind_of_input_that_costs_more_is_warned_of_again(tmp_path):
    _, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(1), 0)
    with pytest.warns(RecordingWarning, match="a reward was ignored"):
        game.episode(player="bob").reward(1.0)
    with pytest.warns(RecordingWarning, match="recording of this episode stopped"):
        ep.reward(np.nan)
    ep = game.episode(player="anna")
    ep.acted(obs(1), 0)
    with pytest.warns(RecordingWarning, match="last decision"):
        ep.end(obs(np.nan), truncated=True)
    game.close()


def test_a_result_may_be_a_number_of_numpy(tmp_path):
    link, game = playing(tmp_path)
    for result in (np.float32(0.5), np.int64(7), np.str_("win")):
        ep = game.episode(player="anna")
        ep.acted(obs(1), 0)
        ep.end(result=result)
    assert game.stats().bad_inputs == 0
    assert game.close()
    sessions = link.by_session().values()
    notes = [
        note for frames in sessions for chunk in chunks(frames) for note in chunk.meta.episodes
    ]
    assert {note.result for note in notes} - {None} == {0.5, 7, "win"}


def test_a_game_without_invalid_input_names_none(tmp_path):
    _, game = playing(tmp_path)
    assert game.stats().last_bad_input == ""
    game.close()


# --- Bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [1e30, -1e30, 10**400, 1.0001 * MAX_NUMBER])
def test_a_reward_beyond_the_bound_of_learners_is_invalid_input(tmp_path, reward):
    link, game = playing(tmp_path)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    ep.reward(MAX_NUMBER)
    ep.acted(obs(1), 0)
    with pytest.warns(RecordingWarning, match="recording of this episode stopped"):
        ep.reward(reward)
    assert recorded(game, link)[0] == [[(float(np.float32(MAX_NUMBER)), False, False)]]
