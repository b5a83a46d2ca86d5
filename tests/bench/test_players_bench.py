"""The nine games and their scripted people: spaces, masks, seeds, skills, and a quick run."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy
from bench.people import GAMES, RANDOM, PeopleGame, Person, play
from bench.people_games import FOLD, Breakout, Courier, Poker, Vault
from bench.players import EPISODES, RESULT, measure

ROOT = Path(__file__).resolve().parents[2]
MASKED = [game for game in GAMES.values() if game.has_action_mask]
LONGEST = 500

each_game = pytest.mark.parametrize("game", GAMES.values(), ids=lambda game: game.name)
each_masked_game = pytest.mark.parametrize("game", MASKED, ids=lambda game: game.name)


def trajectory(game: PeopleGame, person: Person, seed: int) -> list[tuple[Any, ...]]:
    """The observation, mask, action, reward and end of every step, as text or numbers."""
    env = game.make()
    rng = np.random.default_rng(seed)
    obs, info = env.reset(seed=seed)
    person.reset()
    rows = []
    is_over = False
    while not is_over:
        mask = info.get("action_mask")
        assert env.observation_space.contains(obs)
        assert (mask is not None) == game.has_action_mask
        action = person.act(obs, rng, action_mask=mask)
        assert env.action_space.contains(action if isinstance(action, np.ndarray) else int(action))
        if mask is not None:
            assert mask.dtype == np.bool_
            assert mask.shape == (env.action_space.n,)  # type: ignore[attr-defined]
            assert mask[action]
        before = str(obs)
        obs, reward, terminated, truncated, info = env.step(action)
        assert not (terminated and truncated)
        is_over = terminated or truncated
        rows.append((before, str(mask), str(action), float(reward), terminated, truncated))
    assert env.observation_space.contains(obs)
    return rows


@each_game
def test_a_game_obeys_its_spaces_and_masks_and_ends(game: PeopleGame) -> None:
    for skill in (RANDOM, game.people[2]):
        rows = trajectory(game, Person(game, skill), seed=5)
        assert 1 <= len(rows) <= LONGEST


@each_game
def test_the_same_seed_is_the_same_episode_and_another_seed_is_another(game: PeopleGame) -> None:
    person = Person(game, game.people[1])
    first = trajectory(game, person, seed=1)
    assert trajectory(game, person, seed=1) == first
    assert trajectory(game, person, seed=2) != first


@each_masked_game
def test_a_masked_action_is_rejected(game: PeopleGame) -> None:
    env = game.make()
    _, info = env.reset(seed=0)
    mask = info["action_mask"]
    with pytest.raises(ValueError, match="not valid now"):
        env.step(int(np.flatnonzero(~mask)[0]))


@each_masked_game
def test_the_expert_never_picks_a_masked_action_whatever_it_forgets(game: PeopleGame) -> None:
    env = game.make()
    for forgotten in {frozenset[str](), *(frozenset(skill.forgets) for skill in game.people)}:
        for seed in range(3):
            obs, info = env.reset(seed=seed)
            is_over = False
            while not is_over:
                mask = info["action_mask"]
                action = game.expert(obs, mask, forgotten)
                assert mask[action]
                obs, _, terminated, truncated, info = env.step(action)
                is_over = terminated or truncated


@each_game
def test_a_better_person_plays_better_in_a_small_sample(game: PeopleGame) -> None:
    env = game.make()
    means = []
    for skill in (game.people[0], game.people[2], game.people[4]):
        person = Person(game, skill)
        played = [play(env, person, np.random.default_rng([2, at])) for at in range(12)]
        means.append(np.mean([outcome.total for outcome in played]))
    assert means == sorted(means)


def test_the_opponents_card_is_not_in_the_observation_of_poker() -> None:
    env = Poker()
    obs, _ = env.reset(seed=3)
    env._other = (env._other + 1) % 8
    assert np.array_equal(env._observe(), obs)


def test_a_fold_in_poker_costs_what_was_paid() -> None:
    env = Poker()
    for seed in range(20):
        _, info = env.reset(seed=seed)
        while not info["action_mask"][FOLD]:
            _, reward, _, _, info = env.step(1)
        paid = env._paid[0]
        _, reward, _, _, _ = env.step(FOLD)
        assert reward == -paid


def test_the_chest_of_the_vault_needs_the_key() -> None:
    env = Vault()
    env.reset(seed=0)
    row, column = np.argwhere(env._grid[:, :, Vault.CHEST])[0].tolist()
    env._player = (row, column)
    assert not env._mask()[4]
    env._has_key = True
    assert env._mask()[4]
    _, reward, _, _, _ = env.step(4)
    assert reward == 2.0


def test_a_courier_without_charge_stops_and_a_wrong_door_costs_half() -> None:
    game = GAMES["courier"]
    env = Courier()
    obs, info = env.reset(seed=0)
    moves = 0
    terminated = False
    while not terminated:
        action = int(np.flatnonzero(info["action_mask"][:4])[0])
        obs, reward, terminated, _, info = env.step(action)
        moves += 1
    assert (moves, reward) == (Courier.CAPACITY, -1.0)
    obs, info = env.reset(seed=0)
    rewards = set()
    for _ in range(60):
        action = game.expert(obs, info["action_mask"], frozenset({"colour"}))
        obs, reward, _, _, info = env.step(action)
        rewards.add(reward)
    assert -0.5 in rewards


def test_breakout_rewards_bricks_and_ends_when_the_ball_is_lost() -> None:
    env = Breakout()
    env.reset(seed=0)
    bricks = int(env._bricks.sum())
    total = 0.0
    terminated = False
    while not terminated:
        obs, reward, terminated, _, _ = env.step(1)
        total += reward
    assert bricks - int(obs[:, :, Breakout.BRICK].sum()) == total
    assert obs[:, :, Breakout.BALL].argmax() // 10 == 9


@pytest.mark.parametrize("name", ["vault", "courier", "pendulum"])
def test_played_episodes_are_recorded_by_the_client(name: str, tmp_path: Path) -> None:
    game = GAMES[name]
    env = game.make()
    rng = np.random.default_rng(0)
    with understudy.connect(spec=game.spec(), data=tmp_path, consent="granted") as client:
        person = Person(game, game.people[3])
        by_person = play(env, person, rng, episode=client.episode("person-3"))
        by_bot = play(env, None, rng, episode=client.episode("person-3"))
    stats = client.stats()
    assert stats.recorded_steps == stats.acked_steps == by_person.n_steps + by_bot.n_steps
    assert stats.dropped_steps == 0


def test_the_committed_result_was_measured_with_these_people() -> None:
    result = json.loads(RESULT.read_text())
    assert result["episodes"] == EPISODES
    assert result["seed"] != result["calibration_seed"]
    assert result["games"].keys() == GAMES.keys()
    for name, row in result["games"].items():
        skills = [json.loads(json.dumps(dataclasses.asdict(skill))) for skill in GAMES[name].people]
        assert [{key: person[key] for key in skills[0]} for person in row["people"]] == skills
        means = [row["random"]["mean"], *(person["mean"] for person in row["people"])]
        assert means == sorted(means), name
        assert row["faultless"]["mean"] > row["best"], name
        assert 0.45 <= row["average_on_scale"] <= 0.55, name


def test_a_quick_run_writes_a_result_and_repeats_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "people.json"
    command = [sys.executable, str(ROOT / "bench" / "players.py"), "people"]
    command += ["--quick", "--game", "poker", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "average on scale" in ran.stdout
    result = json.loads(out.read_text())
    assert {"date", "commit", "machine", "seed", "calibration_seed", "minutes"} <= result.keys()
    again = measure(GAMES["poker"], episodes=20, seed=result["seed"], each=lambda: None)
    assert json.loads(json.dumps(again)) == result["games"]["poker"]
