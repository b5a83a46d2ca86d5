"""bench/held_out_stop.py: whole players are held out, and likelihoods are those of the bot."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import held_out_stop
from bench.held_out_stop import N_PLAYERS, held_out_episodes, log_likelihoods
from bench.offline import batch_of, recorded_episodes
from bench.people import GAMES
from tests.act.policies import random_policy


def test_whole_players_with_a_fifth_of_the_steps_are_held_out():
    lengths = [10 + at % 7 for at in range(200)]
    held_out = held_out_episodes(lengths, seed=0)
    players = {at % N_PLAYERS for at in held_out}
    assert held_out == {at for at in range(200) if at % N_PLAYERS in players}
    assert 0.2 <= sum(lengths[at] for at in held_out) / sum(lengths) < 0.25
    assert held_out != held_out_episodes(lengths, seed=1)


@pytest.mark.parametrize("game", ["poker", "cartpole"])
def test_likelihoods_are_those_with_which_the_bot_chooses(game: str):
    spec = GAMES[game].spec()
    steps = batch_of(spec, recorded_episodes(GAMES[game], spec, 60, seed=0)[0])
    policy = random_policy(spec, "categorical", seed=0)
    likelihoods = np.exp(log_likelihoods(policy, steps))
    scores = np.asarray(policy.outputs(steps.obs)[policy.head.outputs[0]], np.float64)
    if steps.action_mask is not None:
        scores = np.where(steps.action_mask, scores, -np.inf)
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(chances))
    np.testing.assert_allclose(likelihoods, chances[rows, steps.action], rtol=1e-4)


def test_results_of_several_runs_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"game": game, "steps": 1, "seed": 0} for game in ("b", "a")]
    for row in rows:
        part = {"commit": "abc", "rows": [row]}
        (tmp_path / str(row["game"])).write_text(json.dumps(part))
    out = tmp_path / "out.json"
    words = ["bench", "--merge", str(tmp_path / "b"), str(tmp_path / "a"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    assert held_out_stop.main() == 0
    merged = json.loads(out.read_text())
    assert (merged["commit"], merged["rows"]) == ("abc", rows[::-1])
