"""The poisoning suite: what a tenth of malicious players can do to the gate, and to steps."""

from dataclasses import replace

import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.core.names import new_session
from understudy.experience.chunk import RowKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.ingest.check import check_against_spec
from understudy.testing.clock import START_S
from understudy.testing.poisoning import (
    ATTACKS,
    GAMES,
    Attack,
    Returns,
    Trial,
    TrialCounts,
    constant,
    poison,
    run_trials,
    two_peaks,
    unequal_players,
    won_or_lost,
)
from understudy.testing.samples import random_chunk

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
FULL = 100
N_PLAYERS = 30
MALICIOUS = {"1 %": 1, "5 %": 2, "10 %": 3}
"""Malicious players among 30, rounded up."""


def worse_and_better(trial: Trial, count: int) -> tuple[TrialCounts, TrialCounts]:
    """A candidate that is worse by 0.1 and favoured, and one better by 0.2 and not favoured."""
    worse = run_trials(replace(trial, gain=-0.1), count, seed=2)
    better = run_trials(replace(trial, gain=0.2, favours_candidate=False), count, seed=3)
    print(f"{trial}: worse: {worse}; better: {better}")
    return worse, better


# --- The gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    ("game", "share", "count"),
    [
        (constant, "1 %", 5),
        (constant, "5 %", 5),
        (constant, "10 %", 20),
        (unequal_players, "10 %", 3),
        *(pytest.param(game, share, FULL, marks=SLOW) for game in GAMES for share in MALICIOUS),
    ],
)
def test_a_tenth_of_thirty_players_promote_no_worse_candidate_and_prevent_few_better_ones(
    game: Returns, share: str, count: int, attack: Attack
):
    n_malicious = MALICIOUS[share]
    trial = Trial(game, 0.0, n_players=N_PLAYERS, n_malicious=n_malicious, attack=attack)
    if game is constant and count < FULL:
        trial = replace(trial, n_episodes=400)  # constant returns are decided after a hundred
    worse, better = worse_and_better(trial, count)
    assert worse.promoted == 0
    if attack == "sock_puppets" and n_malicious == 3 and game is won_or_lost:
        # Thirty names that lie in a tenth of the episodes delay a proof: not defended.
        return
    assert better.promoted >= 0.9 * count - (count < FULL)


@pytest.mark.parametrize("n_players", [1, 3])
@pytest.mark.parametrize(
    ("game", "count"),
    [(unequal_players, 5), *(pytest.param(game, FULL, marks=SLOW) for game in GAMES)],
)
def test_with_one_or_three_players_who_are_honest_the_same_holds(
    game: Returns, n_players: int, count: int
):
    """A tenth of them is nobody: below ten players, lies are not defended against."""
    worse, better = worse_and_better(Trial(game, 0.0, n_players=n_players), count)
    assert worse.promoted == 0
    assert better.promoted >= 0.9 * count - (count < FULL)


def test_below_ten_players_one_liar_decides_which_is_not_defended():
    liar = Trial(two_peaks, -0.1, n_players=3, n_malicious=1)
    assert run_trials(liar, 5).promoted == 5
    assert "false returns are not guarded against" in liar.decide(np.random.default_rng(0)).why


@pytest.mark.parametrize(
    ("game", "count"),
    [(unequal_players, 3), *(pytest.param(game, FULL, marks=SLOW) for game in GAMES)],
)
def test_a_name_for_each_episode_promotes_no_worse_candidate_and_blocks_better_ones(
    game: Returns, count: int
):
    """With a tenth of the episodes; that better candidates are blocked is not defended."""
    many = Trial(
        game, 0.0, n_players=N_PLAYERS, n_malicious=3, attack="sock_puppets", n_names=2_000
    )
    worse, better = worse_and_better(many, count)
    assert worse.promoted == 0
    assert better.promoted < 0.5 * count


def test_invented_players_with_most_of_the_episodes_decide_which_is_not_defended():
    flood = Trial(
        unequal_players,
        -0.1,
        n_players=N_PLAYERS,
        n_malicious=3,
        attack="sock_puppets",
        malicious_plays=20.0,
    )
    assert run_trials(flood, 5).promoted == 5


def test_malicious_players_as_many_as_all_and_unknown_attacks_are_rejected():
    with pytest.raises(ConfigError, match="n_malicious is 3 of 3 players"):
        Trial(two_peaks, 0.0, n_players=3, n_malicious=3)
    with pytest.raises(ConfigError, match="use one of reward_lies, "):
        Trial(two_peaks, 0.0, n_players=3, attack="bribes")  # type: ignore[arg-type]


# --- Recorded steps -------------------------------------------------------------------------------

SPECS = (
    game_spec("cart", obs=4, actions=2),
    game_spec(
        "masked",
        obs={"grid": Box((3, 3), np.dtype(np.uint8)), "x": Box((2,), np.dtype(np.float32))},
        actions=4,
    ),
    game_spec("slide", obs=4, actions=Box((2,), np.dtype(np.float32), -1.0, 3.0)),
    game_spec("free", obs=4, actions=Box((1,), np.dtype(np.float32))),
)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("spec", SPECS, ids=[spec.game for spec in SPECS])
def test_poisoned_chunks_differ_as_described_and_are_accepted(spec: GameSpec, attack: Attack):
    rng = np.random.default_rng(0)
    session = new_session(START_S, rng.bytes(10))
    optional = ["raw_action", "logp"] + (["action_mask"] if spec.discrete is not None else [])
    honest = random_chunk(spec, rng, session=session, n_steps=40, optional=optional)
    sent = poison(honest, attack, spec, rng)
    check_against_spec(sent, spec)
    is_step = honest.columns["row"] == RowKind.STEP
    differs = {
        name: bool((sent.columns[name] != column)[is_step].any())
        for name, column in honest.columns.items()
        if name in sent.columns
    }
    assert differs["reward"] == (attack in ("reward_lies", "sock_puppets"))
    assert differs["action"] == (attack in ("thrown_games", "sock_puppets"))
    assert all(differs[name] == (attack == "extreme_observations") for name in spec.obs_columns)
    if differs["action"] and spec.discrete is not None:
        mask = honest.columns["action_mask"]
        same = (sent.columns["action"] == honest.columns["action"])[is_step]
        assert (mask[is_step][same].sum(axis=1) == 1).all(), "no other action was valid"
    if attack == "extreme_observations" and spec.game == "cart":
        assert 1e15 < np.abs(sent.columns["obs"]).max() < 1e20
