"""bench/offline.py: people's steps, a short training on them, and the bot's place."""

import numpy as np
import pytest

from bench import offline
from bench.offline import (
    learned,
    malicious_among,
    poisoned,
    recorded,
    sent_by_players,
    spearman,
)
from bench.people import GAMES
from understudy.learn.centre import find_centre
from understudy.training.train_request import TrainRequest, resolve


def test_steps_of_people_are_recorded_as_transitions():
    game = GAMES["courier"]
    steps = recorded(game, game.spec(), 500, seed=0)
    assert {len(column) for column in steps.obs.values()} == {500}
    goes_on = steps.discount[:-1] == 1
    for name, column in steps.obs.items():
        follows = (column[1:] == steps.next_obs[name][:-1]).reshape(499, -1).all(1)
        assert follows[goes_on].mean() > 0.95, "all but those that were truncated"
    assert steps.action_mask[np.arange(500), steps.action].all()
    assert find_centre(game.spec(), steps) == "obs.map obs.robot.place[0],obs.robot.place[1]"
    vault = GAMES["vault"]
    assert find_centre(vault.spec(), recorded(vault, vault.spec(), 500, seed=0)) == "obs.grid 5"
    breakout = GAMES["breakout"]
    assert find_centre(breakout.spec(), recorded(breakout, breakout.spec(), 500, seed=0)) == ""


def test_some_players_are_poisoned_and_the_learner_accepts_their_chunks():
    game = GAMES["poker"]
    spec = game.spec()
    honest = sent_by_players(game, spec, 1_500, seed=0)
    assert len({player for player, _ in honest}) == 30
    average = malicious_among(honest, 3, most_active=False)
    assert 100 <= poisoned(honest, "reward_lies", spec, malicious=average, seed=0)[1] <= 200
    malicious = malicious_among(honest, 3, most_active=True)
    sent, n_false = poisoned(honest, "sock_puppets", spec, malicious=malicious, seed=0)
    assert 150 <= n_false <= 600
    changed = [at for at, pair in enumerate(zip(honest, sent, strict=True)) if pair[0] != pair[1]]
    assert {honest[at][0] for at in changed} == malicious
    assert len({sent[at][0] for at in changed}) == len(changed), "a name for each episode"
    request = TrainRequest(
        algorithm="bc", preset="bc-people", settings={"steps": 64, "batch": 32, "widths": [8]}
    )
    learner = learned(spec, resolve(request, spec), sent, updates=64, seed=0)
    assert learner.counts.skipped_updates == 0
    assert learner.counts.inserted_steps == sum(chunk.meta.n_steps for _, chunk in sent)


def test_a_short_run_prints_the_bots_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["offline.py", "cartpole", "bc", "--steps", "2000", "--updates", "256"]
    monkeypatch.setattr("sys.argv", [*command, "--episodes", "20", "--set", "batch=64"])
    assert offline.main() == 0
    what, _, place = capsys.readouterr().out.strip().partition(": ")
    assert what == "cartpole bc, 2000 steps, 256 updates, seed 0, centre '', symmetry ''"
    assert float(place.split(" ")[0]) > 0


def test_spearman_compares_ranks_and_shares_them_among_equals():
    assert spearman([1, 2, 3, 40], [-1, 0, 7, 8]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 0, 1, 2, 3 and 0.5, 0.5, 2, 3.
    assert spearman([1, 2, 3, 4], [5, 5, 6, 7]) == pytest.approx(0.9487, abs=1e-4)
