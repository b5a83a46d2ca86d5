"""The nine games and their scripted people, and bots that learn from them through a platform."""

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
from bench import players
from bench.people import GAMES, RANDOM, PeopleGame, Person, play
from bench.people_games import FOLD, Breakout, Courier, Poker, Vault
from bench.players import EPISODES, LOOPS, RESULT, STEPS, measure, misses, run_loop, scale_of
from understudy.act.evaluate import evaluate
from understudy.act.vector import make_envs
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.errors import UnderstudyError
from understudy.platform.config import LearnerSection

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
    with understudy.connect(game.spec(), data=tmp_path, consent="granted") as client:
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


# --- The loop -------------------------------------------------------------------------------------


SMALL = LearnerSection(
    growth=2.0,
    bc_updates=1_024,
    iql_updates=512,
    ranking_updates=128,
    settings=("bc.widths = [64, 64]", "iql.widths = [64, 64]"),
)
"""Fewer and shorter trainings of small networks: with the defaults, they take most of the time."""


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("name", "learner", "episodes"),
    [
        # Episodes of CartPole are long, so fewer of them are measured.
        pytest.param("poker", SMALL, 300, id="poker"),
        pytest.param("cartpole", dataclasses.replace(SMALL, ranking_updates=0), 100, id="cartpole"),
        *(
            pytest.param(name, LearnerSection(), 300, id=f"{name}, full", marks=pytest.mark.slow)
            for name in ("poker", "cartpole", "vault")
        ),
    ],
)
def test_people_play_through_a_platform_and_its_champion_is_measured(
    name: str, learner: LearnerSection, episodes: int, tmp_path: Path
) -> None:
    """Takes more than 20 seconds: 30,000 steps of people, as many of bots, and each training."""
    game = GAMES[name]
    folder = tmp_path / "data"
    row = run_loop(
        game,
        steps=STEPS,
        seed=0,
        episodes=episodes,
        folder=folder,
        show=lambda *_: None,
        learner=learner,
    )
    assert row["people_steps"] >= STEPS
    assert row["stored_steps"] == row["people_steps"] + row["bot_steps"]
    assert (row["lost_steps"], row["duplicate_steps"]) == (0, 0)
    first, *_ = row["promotions"]
    assert first["algorithm"] == "bc"
    # A clone that is not yet better than a constant policy on held-out steps is rejected, and the
    # next one needs twice the steps. People wait every 1,000 steps, after a whole episode.
    assert first["people_steps"] < 1_500 * (2 ** first["model"] - 1) + 100, "people waited for it"
    assert row["bot_episodes"] > 0
    decided = row["decisions"][first["model"] - 1]
    assert (decided["model"], decided["decision"]) == (f"{name}/{first['model']}", "promote")
    assert decided["why"].startswith("the first bot of its schema: on ")
    champion = row["champion"]
    assert champion in row["promotions"]
    policy = open_deployment(DataFolder(folder)).registry.policy(name, champion["model"])
    envs = make_envs(game.make, 20)
    direct = evaluate(policy, envs, seeds=range(episodes), deterministic=False).returns
    error = np.hypot(champion["standard_error"], direct.std(ddof=1) / np.sqrt(episodes))
    assert abs(champion["mean"] - direct.mean()) <= 4 * error
    assert not [bot for bot in row["promotions"] if bot["on_scale"] < row["random_on_scale"]]
    assert row["missed"] == []


def row_of(**changes: Any) -> dict[str, Any]:
    scale = scale_of("poker")
    bot = {"model": 1, "algorithm": "bc", "people_steps": 1_000, "standard_error": 1.0}
    bot |= {"mean": scale.best, "on_scale": 1.0}
    row = {
        "game": "poker",
        "seed": 0,
        "steps": STEPS,
        "episodes": 1_000,
        "commit": "an earlier one",
    }
    row |= {"champion": bot, "promotions": [bot], "random_on_scale": -1.0, "candidates": 3}
    row |= {"lost_steps": 0, "duplicate_steps": 0, "minutes": 2.5, "play_cpu_minutes": 1.5}
    row |= {"missed": [], "people_steps": STEPS}
    return row | changes


def test_a_run_misses_its_goals_by_its_champion_its_promotions_or_its_steps() -> None:
    def at(place: float, mean: float = 0.0) -> dict[str, Any]:
        return {"model": 2, "on_scale": place, "mean": mean, "standard_error": 1.0}

    assert misses(row_of()) == []
    assert misses(row_of(champion=None, promotions=[])) == ["no champion"]
    assert misses(row_of(champion=at(-0.01))) == ["champion below 0"]
    assert misses(row_of(champion=at(0.79), steps=300_000)) == ["champion below 0.8"]
    lowest = [at(-1.01, mean=0.0), at(1.0, mean=0.0)]
    assert misses(row_of(promotions=lowest)) == ["promoted below random play"]
    assert misses(row_of(promotions=[at(1.0, mean=5.0), at(0.9, mean=2.3)])) == []
    falling = [at(1.0, mean=5.0), at(0.9, mean=2.2)]
    assert misses(row_of(promotions=falling)) == ["model 2 lowered the champion's return"]
    assert misses(row_of(lost_steps=1)) == ["steps were lost or stored twice"]


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["players.py", "loop", "--game", "poker", *arguments])
    return players.main()


def test_runs_in_the_result_file_are_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "players.json"
    out.write_text(json.dumps({"rows": [row_of(), row_of(seed=1, missed=["champion below 0"])]}))
    before = out.read_text()
    kept = ("--keep", "--out", str(out))
    assert run_main(monkeypatch, "--seeds", "1", *kept) == 0
    assert run_main(monkeypatch, "--seeds", "2", *kept) == 1
    shown = capsys.readouterr()
    assert "poker seed 0: kept" in shown.err
    assert "champion below" in shown.out
    assert "5.0 minutes" in shown.out
    assert out.read_text() == before


def test_a_run_of_another_commit_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "players.json"
    out.write_text(json.dumps({"rows": [row_of(), row_of(seed=1)]}))
    again = row_of(commit="this one", candidates=9)
    monkeypatch.setattr(players, "run_loop", lambda *_, **__: again)
    assert run_main(monkeypatch, "--seeds", "1", "--out", str(out)) == 0
    assert json.loads(out.read_text())["rows"] == [again, row_of(seed=1)]


def test_wrong_arguments_and_result_files_are_rejected_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--steps", "10")
    assert "--steps is 10; pass a number of at least 1000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--seeds", "0")
    assert "--seeds is 0; pass a number of at least 1" in capsys.readouterr().err
    out = tmp_path / "players.json"
    with pytest.raises(UnderstudyError, match="does not exist; create it, or pass --out"):
        run_main(monkeypatch, "--out", str(tmp_path / "nowhere" / "x.json"))
    out.write_text('{"rows": [{}]}')
    with pytest.raises(UnderstudyError, match="move it away, or pass another --out"):
        run_main(monkeypatch, "--out", str(out))


def test_the_committed_runs_are_placed_on_the_scale_of_the_people() -> None:
    for row in json.loads(LOOPS.read_text())["rows"]:
        scale = scale_of(row["game"])
        assert row["random_on_scale"] == scale.place(scale.random)
        for bot in row["promotions"]:
            assert bot["on_scale"] == pytest.approx(scale.place(bot["mean"]), abs=1e-3)
        assert row["champion"] in [None, *row["promotions"]]
        assert row["stored_steps"] == row["people_steps"] + row["bot_steps"]
        assert row["missed"] == misses(row)
