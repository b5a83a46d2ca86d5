"""Episode.act and Recorder.act: the bot decides, the game never waits, the decider is stored."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.client.fakes import SEAL, chunks, client
from tests.client.platforms import SPEC, Platform, constant_policy
from understudy.client import ClientConfig, RecordingWarning
from understudy.client.gym import record
from understudy.core.errors import Refused
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import By
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box

OBS = np.zeros(2, np.float32)


def recorded(game, link):
    """Return every chunk that arrived."""
    game.close()
    return [chunk for frames in link.by_session().values() for chunk in chunks(frames)]


def playing(tmp_path, policy=None, **settings):
    """Return a platform with one bot, and a game that loaded it."""
    platform = Platform(tmp_path)
    if policy is not None:
        platform.release(policy)
    game = client(platform.link, tmp_path, **settings)
    game._bots.pick()
    game.pump()
    return platform, game


def test_the_bots_decision_is_recorded_with_its_probability_and_version(tmp_path):
    policy = random_policy(SPEC, "categorical", version=5)
    platform, game = playing(tmp_path, policy)
    ep = game.episode(player="ada")
    actions = [ep.act(np.array([at, -at], np.float32)) for at in range(200)]
    ep.reward(1.0)
    ep.end(OBS)
    (chunk,) = recorded(game, platform.link)
    steps = chunk.columns["row"] == 0
    assert chunk.columns["action"][steps].tolist() == actions
    assert set(chunk.columns["by"][steps]) == {By.BOT}
    assert set(chunk.columns["version"][steps]) == {5}
    logits = policy.outputs({"obs": chunk.columns["obs"][steps]})["logits"].astype(np.float64)
    wanted = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(200), actions]
    assert chunk.columns["logp"][steps] == pytest.approx(wanted, abs=1e-5)
    assert len(set(actions)) == 3
    (note,) = chunk.meta.episodes
    assert note.model == "my-game/1"


def test_a_deterministic_decision_is_certain(tmp_path):
    platform, game = playing(tmp_path, random_policy(SPEC, "categorical"))
    ep = game.episode(player="ada")
    assert len({ep.act(OBS, deterministic=True) for _ in range(50)}) == 1
    ep.end()
    (chunk,) = recorded(game, platform.link)
    assert set(chunk.columns["logp"]) == {0.0}


def test_continuous_actions_are_recorded_before_clipping(tmp_path):
    spec = game_spec("my-game", obs=2, actions=Box((2, 2), DTYPES["F32"], -0.01, 0.01))
    platform, game = playing(tmp_path, random_policy(spec, "gaussian_clipped"), game=spec)
    ep = game.episode(player="ada")
    actions = [ep.act(OBS) for _ in range(20)]
    ep.end()
    (chunk,) = recorded(game, platform.link)
    assert all(action.shape == (2, 2) and np.abs(action).max() <= 0.01001 for action in actions)
    assert chunk.columns["raw_action"].shape[1:] == (2, 2)
    assert np.abs(chunk.columns["raw_action"]).max() > 0.01


def test_each_episode_has_its_own_frame_stack(tmp_path):
    _, game = playing(tmp_path, random_policy(SPEC, "argmax", stack=4))
    policy = random_policy(SPEC, "argmax", stack=4)
    episodes = [(game.episode(player="ada"), policy.player()) for _ in range(2)]
    rng = np.random.default_rng(0)
    for _ in range(30):
        for ep, player in episodes:
            obs = rng.normal(0, 3, 2).astype(np.float32)
            assert ep.act(obs) == player.act(obs)
    game.close()


def test_person_and_bot_take_turns_and_the_model_is_named_from_the_first_decision_on(tmp_path):
    platform, game = playing(tmp_path, constant_policy(2))
    ep = game.episode(player="ada", opponents=["person"])
    ep.acted(OBS, 0)
    assert ep.act(OBS) == 2
    ep.acted(OBS, 1)
    ep.end(OBS)
    (chunk,) = recorded(game, platform.link)
    assert chunk.columns["by"].tolist()[:3] == [By.PERSON, By.BOT, By.PERSON]
    (note,) = chunk.meta.episodes
    assert (note.model, note.opponents) == ("my-game/1", ("person",))


def test_an_episode_of_a_person_names_no_model(tmp_path):
    platform, game = playing(tmp_path, constant_policy(2))
    ep = game.episode(player="ada")
    ep.acted(OBS, 0)
    ep.end()
    (chunk,) = recorded(game, platform.link)
    assert chunk.meta.episodes[0].model is None
    assert "logp" not in chunk.columns


def test_an_episode_keeps_its_bot_when_a_newer_one_arrives(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    ep = game.episode(player="ada")
    assert ep.act(OBS) == 1
    platform.release(constant_policy(2))
    game._bots.step()
    assert game.stats().bot == "my-game/2"
    assert ep.act(OBS) == 1
    ep.end()
    assert game.episode(player="ada").act(OBS) == 2


def test_the_canary_plays_whole_episodes(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.3)
    game._bots.step()
    played: list[int] = []
    for _ in range(300):
        ep = game.episode(player="ada")
        actions = {ep.act(OBS) for _ in range(5)}
        ep.end()
        game._bots.fetch_tickets()
        assert len(actions) == 1
        played += actions
    assert 60 < played.count(2) < 120
    models = [
        note.model
        for chunk in recorded(game, platform.link)
        for note in chunk.meta.episodes
        if chunk.columns["is_first"][note.row]
    ]
    assert models == [f"my-game/{action}" for action in played]


# --- Without a bot --------------------------------------------------------------------------------


def test_without_a_bot_a_random_action_is_recorded_as_a_scripts(tmp_path):
    platform, game = playing(tmp_path)
    ep = game.episode(player="ada")
    assert {ep.act(OBS) for _ in range(100)} == {0, 1, 2}
    ep.end()
    (chunk,) = recorded(game, platform.link)
    assert set(chunk.columns["by"].tolist()[:100]) == {By.SCRIPT}
    assert chunk.meta.episodes[0].model is None


def test_only_valid_actions_are_taken_with_and_without_a_bot(tmp_path):
    spec = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
    platform, game = playing(tmp_path, game=spec)
    action_mask = [True, False, True]
    ep = game.episode(player="ada")
    assert {ep.act(OBS, action_mask=action_mask) for _ in range(100)} == {0, 2}
    platform.release(constant_policy(1, spec))
    game._bots.step()
    assert {ep.act(OBS, action_mask=action_mask) for _ in range(50)} <= {0, 2}
    assert {ep.act(OBS) for _ in range(50)} == {1}
    ep.end()
    game.close()


@pytest.mark.parametrize("otherwise", [1, np.int64(1), "stay", lambda obs: 1, lambda obs: "stay"])
def test_otherwise_is_an_action_or_a_function_and_is_returned_as_a_number(tmp_path, otherwise):
    platform, game = playing(tmp_path, actions=["up", "stay", "down"])
    ep = game.episode(player="ada")
    assert [ep.act(OBS, otherwise=otherwise) for _ in range(5)] == [1] * 5
    ep.end()
    (chunk,) = recorded(game, platform.link)
    assert chunk.columns["action"].tolist()[:5] == [1] * 5
    assert set(chunk.columns["by"].tolist()[:5]) == {By.SCRIPT}


def test_a_bot_takes_precedence_over_otherwise_which_is_not_called(tmp_path):
    _, game = playing(tmp_path, constant_policy(2))
    ep = game.episode(player="ada")
    assert ep.act(OBS, otherwise=lambda obs: 1 / 0) == 2
    game.close()


def test_errors_of_the_games_own_function_are_raised(tmp_path):
    _, game = playing(tmp_path)
    ep = game.episode(player="ada")
    ep.act(OBS, otherwise=0)
    with pytest.raises(ZeroDivisionError):
        ep.act(OBS, otherwise=lambda obs: 1 / 0)
    game.close()


# --- Bad input ------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "shape": (([0.0] * 3,), {}),
    "nan": (([np.nan, 0.0],), {}),
    "no numbers": ((object(),), {}),
    "mask": ((OBS,), {"action_mask": [True, False]}),
    "nothing valid": ((OBS,), {"action_mask": [False] * 3}),
    "otherwise": ((OBS,), {"otherwise": 7}),
    "invalid otherwise": ((OBS,), {"otherwise": 0, "action_mask": [False, True, True]}),
}


@pytest.mark.parametrize(
    ("what", "has_bot"),
    [
        (what, has_bot)
        for what in BAD
        for has_bot in (False, True)
        if not has_bot or "otherwise" not in what
    ],
)
def test_bad_input_raises_at_first_and_later_only_stops_the_recording(tmp_path, what, has_bot):
    spec = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
    platform, game = playing(tmp_path, constant_policy(1, spec) if has_bot else None, game=spec)
    arguments, keywords = BAD[what]
    with pytest.raises(Refused):
        game.episode(player="ada").act(*arguments, **keywords)
    ep = game.episode(player="ada")
    ep.act(OBS)
    ep.act(OBS)
    with pytest.warns(RecordingWarning, match="recording of this episode stopped"):
        assert ep.act(*arguments, **keywords) in (0, 1, 2)
    assert ep.act(OBS) in (0, 1, 2)
    assert ep.act(*arguments, **keywords) in (0, 1, 2)
    assert (game.stats().bad_inputs, game.stats().ignored_calls) == (2, 2)
    other = game.episode(player="ada")
    other.act(OBS)
    other.end()
    (chunk,) = recorded(game, platform.link)
    assert [note.cut for note in chunk.meta.episodes] == [True, False]


def test_the_action_returned_for_bad_input_follows_the_action_mask(tmp_path):
    spec = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
    _, game = playing(tmp_path, constant_policy(1, spec), game=spec)
    for _ in range(20):
        ep = game.episode(player="ada")
        ep.act(OBS)
        game._tolerance.warned.add(("not_finite", "recording of this episode stopped"))
        assert ep.act([np.nan, 0], action_mask=[False, False, True]) == 2


def test_after_the_end_the_bot_still_acts_and_nothing_is_recorded(tmp_path):
    platform, game = playing(tmp_path, constant_policy(2))
    ep = game.episode(player="ada")
    ep.act(OBS)
    ep.end()
    with pytest.warns(RecordingWarning, match="act was called"):
        assert ep.act(OBS) == 2
    (chunk,) = recorded(game, platform.link)
    assert chunk.meta.n_steps == 1
    assert ep.act(OBS) == 2


# --- Recorders ------------------------------------------------------------------------------------


def test_a_recorder_records_the_bots_action_when_the_env_takes_it(tmp_path):
    platform, game = playing(tmp_path, constant_policy(2))
    with game.recorder(player="ada") as recorder:
        recorder.reset(OBS)
        recorder.step(recorder.act(OBS), 1.0, OBS, False, False)
        recorder.act(OBS)
        recorder.step(0, 1.0, OBS, False, False, by="person")
        recorder.step(2, 1.0, OBS, True, False)
    (chunk,) = recorded(game, platform.link)
    assert chunk.columns["by"].tolist()[:3] == [By.BOT, By.PERSON, By.UNKNOWN]
    assert chunk.columns["version"].tolist()[:3] == [0, 0, 0]
    assert chunk.meta.episodes[0].model == "my-game/1"


def test_a_recorded_env_plays_with_the_bot(tmp_path):
    platform = Platform(tmp_path)
    env = record(
        gymnasium.make("CartPole-v1"),
        "cart",
        config=ClientConfig(link=platform.link, spool=tmp_path / "spool", background=False),
    )
    obs, _ = env.reset(seed=0)
    for _ in range(60):
        obs, _, terminated, truncated, _ = env.step(
            env.act(obs, otherwise=lambda obs: int(obs[2] > 0))
        )
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    found = [chunk for frames in platform.link.by_session().values() for chunk in chunks(frames)]
    assert sum(chunk.meta.n_steps for chunk in found) >= 59
    assert {code for chunk in found for code in chunk.columns["by"][chunk.columns["row"] == 0]} == {
        By.SCRIPT
    }


def test_an_episode_notes_the_ticket_of_its_bot_if_there_were_several(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    _played(game)
    platform.release(constant_policy(2), "canary", share=0.25)
    game._bots.step()
    for _ in range(40):
        _played(game)
    notes = [note for chunk in recorded(game, platform.link) for note in chunk.meta.episodes]
    assert {note.propensity for note in notes} == {None}
    tickets = {note.ticket: note.model for note in notes if note.ticket is not None}
    assert len(tickets) == len(notes) - 1, "one for each episode"
    drawn = {(model, opened(text).propensity) for text, model in tickets.items()}
    assert drawn == {("my-game/1", 0.75), ("my-game/2", 0.25)}
    assert all(model == f"my-game/{opened(text).model_no}" for text, model in tickets.items())


def test_every_chunk_of_a_long_episode_has_its_ticket(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.25)
    game._bots.step()
    episode = game.episode(player="ada")
    for _ in range(1_000):
        episode.act(OBS)
    episode.end(OBS)
    notes = [note for chunk in recorded(game, platform.link) for note in chunk.meta.episodes]
    assert len(notes) > 1
    assert {(note.model, note.ticket) for note in notes} == {(notes[0].model, notes[0].ticket)}
    assert notes[0].ticket is not None


def opened(text):
    return SEAL.open(text, game="my-game", schema=SPEC.schema)


def _played(game):
    episode = game.episode(player="ada")
    episode.act(OBS)
    episode.end(OBS)
