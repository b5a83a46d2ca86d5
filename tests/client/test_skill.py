"""Skills in the Python client: what an episode notes, and which noise it plays with."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.client.fakes import client
from tests.client.platforms import SIGNER, SPEC, Platform, constant_policy
from tests.client.test_act import OBS, playing, recorded
from understudy.client.gym import record
from understudy.core.errors import Refused
from understudy.core.signed import Signer
from understudy.experience.chunk import EpisodeNote
from understudy.experience.game import game_spec, spec_from_gymnasium
from understudy.experience.skill import BotSkill

PUBLISHED = {"easy": 0.8, "even": 0.4}


def publish(platform: Platform, noise: dict[str, float]) -> None:
    epoch = platform.registry.catalogue("my-game").epoch
    platform.registry.set_noise("my-game", 1, noise, episodes=20, epoch=epoch)
    platform.announce()


def play(game, steps: int = 20, **how) -> list[int]:
    episode = game.episode(player="bot", **how)
    actions = [episode.act(OBS) for _ in range(steps)]
    episode.end(OBS)
    return actions


def notes(game, platform: Platform) -> list[EpisodeNote]:
    return [note for chunk in recorded(game, platform.link) for note in chunk.meta.episodes]


def test_a_client_that_never_met_the_learner_uses_the_defaults(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    share = np.mean([action != 1 for action in play(game, 3_000, skill="even")])
    assert share == pytest.approx(0.25 * 2 / 3, abs=0.04)
    play(game, skill="easy")
    played = [(note.model, note.skill, note.noise) for note in notes(game, platform)]
    assert set(played) == {("my-game/1", "even", 0.25), ("my-game/1", "easy", 0.5)}


def test_published_noise_is_used_from_the_next_episode_on_and_after_an_offline_start(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    episode = game.episode(player="bot", skill="even")
    episode.act(OBS)
    publish(platform, PUBLISHED)
    game._bots.step()
    episode.act(OBS)
    episode.end(OBS)
    play(game, skill="even")
    play(game, skill="easy")
    assert [note.noise for note in notes(game, platform)] == [0.25, 0.4, 0.8]
    platform.link.is_down = True
    game = client(platform.link, tmp_path)
    assert game._bots.draw_at(BotSkill("easy"))[1].noise == 0.8


@pytest.mark.parametrize(
    "forged",
    ["other key", "other kind", "other schema", "out of range", "not signed"],
)
def test_noise_that_fails_a_check_is_not_used(tmp_path, forged: str):
    platform, game = playing(tmp_path, constant_policy(1))
    publish(platform, PUBLISHED)
    game._bots.step()
    entry = {
        "kind": "noise",
        "journal": "registry/my-game",
        "schema": SPEC.schema,
        "noise": {"easy": 0.0, "even": 0.0},
    }
    other = {
        "other key": Signer(bytes(32)).sign(entry),
        "other kind": SIGNER.sign(entry | {"kind": "point"}),
        "other schema": SIGNER.sign(entry | {"schema": "0" * 64}),
        "out of range": SIGNER.sign(entry | {"noise": {"easy": 0.0, "even": -1.0}}),
        "not signed": b"{}",
    }
    live = platform.link.live_models
    assert live is not None
    text = other[forged].decode()
    platform.link.live_models = replace(live, number=live.number + 1, noise=text)
    game._bots.step()
    assert game._bots.refused_bots == 1
    play(game, skill="even")
    (note,) = notes(game, platform)
    assert (note.model, note.noise) == ("my-game/1", 0.4), "the last valid one"
    game = client(platform.link, tmp_path)
    assert game._bots.draw_at(BotSkill("even"))[1].noise == 0.4


def test_at_a_skill_or_a_temperature_the_champion_plays_and_nothing_is_drawn(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    game._bots.step()
    for how in ({"skill": "easy"}, {"skill": "even"}, {"temperature": 2.5}) * 20:
        play(game, 1, **how)
    found = {
        (note.model, note.ticket, note.skill, note.temperature) for note in notes(game, platform)
    }
    assert found == {
        ("my-game/1", None, "easy", None),
        ("my-game/1", None, "even", None),
        ("my-game/1", None, None, 2.5),
    }


def test_hard_is_the_bot_as_released_and_notes_nothing(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    assert play(game, 50, skill="hard") == play(game, 50) == [1] * 50
    assert all(note.is_released_play for note in notes(game, platform))


def test_an_episode_whose_model_the_game_names_notes_the_skill_too(tmp_path):
    platform, game = playing(tmp_path, constant_policy(1))
    play(game, model="my-game/1", skill="even")
    (note,) = notes(game, platform)
    assert (note.model, note.skill, note.noise) == ("my-game/1", "even", 0.25)


def test_without_a_bot_the_episode_has_no_noise_yet(tmp_path):
    platform, game = playing(tmp_path)
    play(game, skill="even")
    (note,) = notes(game, platform)
    assert (note.model, note.skill, note.noise) == (None, "even", None)


def test_bad_values_are_refused_when_the_episode_starts(tmp_path):
    _, game = playing(tmp_path, constant_policy(1))
    for begin in (game.episode, game.recorder):
        with pytest.raises(Refused, match="skill is 'medium'; give one of easy, even, hard"):
            begin(skill="medium")
        with pytest.raises(Refused, match="temperature is 0; give a number from"):
            begin(temperature=0)
        with pytest.raises(Refused, match="give one of the two"):
            begin(skill="easy", temperature=2.0)
    assert game.stats().open_episodes == 0
    game.close()


def test_a_recorded_env_plays_every_episode_at_its_skill(tmp_path):
    env = gymnasium.make("CartPole-v1")
    spec = spec_from_gymnasium(env, game="my-game")
    platform, game = playing(tmp_path, constant_policy(1, spec), game=spec)
    recorded_env = record(env, game, player="bot", skill="easy")
    for seed in range(3):
        obs, _ = recorded_env.reset(seed=seed)
        has_ended = False
        while not has_ended:
            obs, _, has_ended, _, _ = recorded_env.step(recorded_env.act(obs))
    found = {(note.skill, note.noise, note.model) for note in notes(game, platform)}
    assert found == {("easy", 0.5, "my-game/1")}


def test_masked_actions_are_never_played(tmp_path):
    spec = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
    _, game = playing(tmp_path, constant_policy(1, spec), game=spec)
    episode = game.episode(skill="easy")
    mask = [True, False, True]
    actions = [episode.act(OBS, action_mask=mask) for _ in range(300)]
    assert set(actions) == {0, 2}
    game.close()


# --- Exploring ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "at"),
    [(0.25, (None, 4.0)), (1.0, (0.1, None)), (None, (0.1, None)), ("hot", (0.1, None))],
)
def test_a_champion_explores_in_its_share_of_episodes_also_after_an_offline_start(
    tmp_path, temperature, at
):
    platform, game = playing(tmp_path, constant_policy(1, kind="categorical"))
    platform.release(constant_policy(2, kind="categorical"), temperature=temperature)
    platform.release(constant_policy(0), "canary", share=0.5)
    epoch = platform.registry.catalogue("my-game").epoch
    platform.registry.set_noise("my-game", 2, PUBLISHED, episodes=0, epoch=epoch, explore_share=0.5)
    platform.announce()
    game._bots.step()
    for _ in range(200):
        play(game, 1)
        game._bots.fetch_tickets()
    play(game, 1, skill="even")
    *episodes, even = notes(game, platform)
    assert (even.noise, even.temperature, even.model) == (0.4, None, "my-game/2")
    exploring = [note for note in episodes if not note.is_released_play]
    assert len(exploring) == pytest.approx(100, abs=30)
    assert {(note.model, note.skill, note.noise, note.temperature) for note in exploring} == {
        ("my-game/2", None, *at)
    }
    assert {note.ticket for note in exploring} == {None}
    assert None not in {note.ticket for note in episodes if note.is_released_play}
    platform.link.is_down = True
    offline = client(platform.link, tmp_path)
    skills = [offline._bots.draw_exploring() for _ in range(100)]
    assert set(skills) == {None, BotSkill(None, *at)}


def test_an_exploring_champion_plays_more_randomly(tmp_path):
    policy = random_policy(SPEC, "categorical").at_temperature(0.25)
    platform, game = playing(tmp_path, policy)
    platform.release(policy, temperature=0.25)
    epoch = platform.registry.catalogue("my-game").epoch
    platform.registry.set_noise("my-game", 2, PUBLISHED, episodes=0, epoch=epoch, explore_share=0.5)
    platform.announce()
    game._bots.step()
    chances: dict[float | None, np.ndarray] = {}
    while len(chances) < 2:
        episode = game.episode(player="bot")
        actions = [episode.act(OBS) for _ in range(2_000)]
        episode.end(OBS)
        temperature = episode._chooser.temperature
        chances[temperature] = np.bincount(actions, minlength=3) / len(actions)
    expected = chances[None] ** 0.25 / (chances[None] ** 0.25).sum()
    assert chances[4.0] == pytest.approx(expected, abs=0.06)
    assert chances[4.0].max() < chances[None].max()
