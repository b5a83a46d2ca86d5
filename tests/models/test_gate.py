"""The gate promotes what is better with the stated confidence, whatever the returns look like."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.models.gate import (
    Bounds,
    GateDecision,
    ModelCheck,
    Played,
    _range,
    compare,
    compared_with_champion,
    decide_by_checks,
)
from understudy.ports import CANARY_BESIDE_CONTROL
from understudy.testing.poisoning import (
    GAMES,
    Returns,
    Trial,
    drifting,
    heavy_tails,
    run_trials,
    two_peaks,
    unequal_players,
    won_or_lost,
)

SOUND = (ModelCheck("finite", True), ModelCheck("golden", True))
BOUNDS = Bounds()
Array = Any


def n_promoted(trial: Trial, count: int, *, seed: int = 0) -> int:
    return run_trials(trial, count, seed=seed).promoted


def played(returns: Array, *, bot: int, player: str = "") -> list[Played]:
    """Episodes of one of two bots that play in turn, as if each had been drawn."""
    return [
        Played(2 * at + bot, 0.0, value, player, 0, 0.5)
        for at, value in enumerate(returns.tolist())
    ]


def judge(candidate: Array, champion: Array, bounds: Bounds = BOUNDS) -> GateDecision:
    return compare(played(candidate, bot=0), played(champion, bot=1), bounds)


# --- Checks ---------------------------------------------------------------------------------------


def test_a_failed_check_rejects_any_model():
    checks = (*SOUND, ModelCheck("latency", False, "90 ms, at most 5 are allowed"))
    for has_champion in (True, False):
        found = decide_by_checks(checks, has_champion=has_champion)
        assert found == GateDecision("reject", "latency: 90 ms, at most 5 are allowed")


def test_the_first_bot_needs_only_the_checks():
    first = decide_by_checks(SOUND, has_champion=False)
    assert first.decision == "promote"
    assert first.why.endswith(
        "no champion to compare with; not compared with people or random play"
    )
    found = decide_by_checks(SOUND, has_champion=True)
    assert (found.decision, found.why[:15]) == ("wait", "passed 2 checks")


# --- What is promoted -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "n_players"),
    [
        (6, 3),
        *(
            pytest.param(1_000, n_players, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for n_players in (1, 3, 30)
        ),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_at_most_one_in_a_hundred_copies_of_the_champion_is_promoted(
    game: Returns, trials: int, n_players: int
):
    """Looked at after each of 2,000 episodes; half of the copies play a fifth of them."""
    promoted = sum(
        n_promoted(Trial(game, 0.0, n_players=n_players, share=share), trials // 2, seed=1)
        for share in (0.2, 0.5)
    )
    print(f"{game.__name__}, {n_players} players: {promoted} of {trials} copies promoted")
    assert promoted <= trials // 100


@pytest.mark.parametrize(
    ("trials", "n_players"),
    [
        (5, 30),
        *(
            pytest.param(100, n_players, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for n_players in (1, 3, 30)
        ),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_no_worse_candidate_is_promoted_and_nine_of_ten_better_ones_are(
    game: Returns, trials: int, n_players: int
):
    """Worse by 0.1 and better by 0.2, where random play is 0 and the best person 1."""
    worse = n_promoted(Trial(game, -0.1, n_players=n_players), trials, seed=2)
    better = n_promoted(Trial(game, 0.2, n_players=n_players), trials, seed=3)
    print(f"{game.__name__}, {n_players} players: {worse} worse, {better} better of {trials}")
    assert worse == 0
    assert better >= 0.9 * trials - (trials < 100)


def test_a_candidate_that_is_better_for_one_player_and_worse_for_two_is_not_promoted():
    rng = np.random.default_rng(4)
    candidate, champion, earlier = Trial(unequal_players, 0.0, n_players=3).episodes(rng)
    gains = {"player-0": 0.5, "player-1": -0.3, "player-2": -0.3}
    candidate = [one._replace(return_=one.return_ + gains[one.player]) for one in candidate]
    assert compare(candidate, champion, BOUNDS, earlier=earlier).decision == "reject"


def test_negative_returns_are_compared_alike():
    rng = np.random.default_rng(2)
    assert judge(rng.normal(-80, 10, 480), rng.normal(-200, 10, 480)).decision == "promote"
    assert judge(rng.normal(-300, 10, 480), rng.normal(-200, 10, 480)).decision == "reject"


def test_equal_constant_returns_prove_nothing_and_unequal_ones_do():
    found = judge(np.full(1_000, 500.0), np.full(1_000, 500.0))
    assert found.decision == "reject"
    assert found.why.startswith("undecided after 1000 episodes: mean return 500 over 9")
    assert judge(np.full(999, 500.0), np.full(999, 500.0)).decision == "wait"
    assert judge(np.full(480, 500.0), np.full(480, 9.0)).decision == "promote"
    assert judge(np.full(480, 9.0), np.full(480, 500.0)).decision == "reject"


def test_too_few_episodes_wait():
    found = compare(played(np.ones(19), bot=0), played(np.zeros(500), bot=1), BOUNDS, earlier=())
    assert (found.decision, found.why[-13:]) == ("wait", "each needs 10")
    assert compare([], [], BOUNDS).decision == "wait"


def test_episodes_whose_bot_was_not_drawn_at_random_are_not_compared():
    """Such as those of a client that does not know of the candidate yet, or of chosen opponents."""
    rng = np.random.default_rng(11)
    candidate, champion, earlier = Trial(two_peaks, 0.3, n_players=3).episodes(rng)
    wanted = compare(candidate, champion, BOUNDS, earlier=earlier)
    for propensity in (None, 1.0, 1e-9):
        others = [
            episode._replace(return_=1e9, propensity=propensity)
            for episode in (*candidate, *champion)
        ]
        assert (
            compare([*others, *candidate], [*others, *champion], BOUNDS, earlier=earlier) == wanted
        )
        assert compare(others, others, BOUNDS, earlier=earlier).decision == "wait"


def test_returns_that_are_not_finite_are_rejected():
    for bad in (np.nan, np.inf):
        assert judge(np.array([bad]), np.array([1.0])).decision == "reject"


def test_a_huge_return_counts_no_more_than_the_highest_that_was_known():
    rng = np.random.default_rng(5)
    candidate = rng.normal(0.0, 1.0, 400)
    candidate[::20] = 1e9
    assert judge(candidate, rng.normal(0.5, 1.0, 400)).decision != "promote"


def test_one_of_a_few_players_with_absurd_returns_does_not_blind_the_comparison():
    rng = np.random.default_rng(14)
    candidate, champion, earlier = Trial(won_or_lost, -0.5, n_players=6).episodes(rng)
    lies = [
        Played(at, 0.0, value, "person-liar")
        for at, value in enumerate(rng.choice([-1e19, 1e9, 1e19], 40).tolist())
    ]
    decision = compare(candidate, champion, BOUNDS, earlier=[*earlier, *lies])
    assert decision.decision == "reject"
    assert "clipped to -0." in decision.why


# --- Time -----------------------------------------------------------------------------------------


def test_a_decision_is_the_same_however_often_and_late_it_is_computed():
    for gain, wanted in ((0.3, "promote"), (-0.3, "reject")):
        rng = np.random.default_rng(6)
        candidate, champion, earlier = Trial(two_peaks, gain, n_players=12).episodes(rng)
        late = compare(candidate, champion, BOUNDS, earlier=earlier)
        assert late.decision == wanted
        decisions = []
        for end in range(0, len(candidate) + len(champion), 100):
            known = [
                [one for one in episodes if one.arrival_no < end]
                for episodes in (candidate, champion)
            ]
            decisions.append(compare(known[0], known[1], BOUNDS, earlier=earlier))
        made = [one for one in decisions if one.decision != "wait"]
        assert decisions[0].decision == "wait"
        assert set(made) == {late}
        assert len(made) > len(decisions) // 4


def test_episodes_of_one_chunk_are_compared_in_the_order_in_which_they_were_played():
    """Many short episodes end in one chunk: its rows tell their order."""
    rng = np.random.default_rng(7)
    candidate, champion, earlier = Trial(two_peaks, 0.3, n_players=3).episodes(rng)
    chunked = [
        [one._replace(arrival_no=one.arrival_no // 50, row=one.arrival_no % 50) for one in episodes]
        for episodes in (candidate, champion)
    ]
    assert compare(chunked[0], chunked[1], BOUNDS, earlier=earlier) == compare(
        candidate, champion, BOUNDS, earlier=earlier
    )


def test_quick_wins_and_slow_losses_do_not_make_a_candidate_seem_better():
    """Both bots win half of their episodes; a candidate's win is known long before its loss."""

    def is_promoted(rng: np.random.Generator, *, only_settled: bool) -> bool:
        n_players = 60
        open_until = np.zeros(n_players)
        episodes = []
        for number in range(800):
            player = int(open_until.argmin())
            started_s = float(open_until[player])
            is_candidate = bool(rng.random() < 0.5)
            return_ = float(rng.random() < 0.5)
            length_s = (1.0 if return_ else 10.0) if is_candidate else 5.0
            open_until[player] += length_s
            played = Played(number, started_s, return_, f"{player}", 0, 0.5)
            episodes.append((started_s + length_s, is_candidate, played))
        episodes.sort(key=lambda episode: episode[0])
        earlier = [Played(0, 0.0, float(at % 2)) for at in range(40)]
        for end in range(20, 600, 20):
            known = [
                (is_candidate, played._replace(arrival_no=at))
                for at, (_, is_candidate, played) in enumerate(episodes[:end])
            ]
            if only_settled:
                settled_s = min(played.started_s for _, _, played in episodes[end:])
                known = [(bot, played) for bot, played in known if played.started_s < settled_s]
            else:
                known = [(bot, played._replace(started_s=0.0, player="")) for bot, played in known]
            decision = compare(
                [played for is_candidate, played in known if is_candidate],
                [played for is_candidate, played in known if not is_candidate],
                BOUNDS,
                earlier=earlier,
            )
            if decision.decision != "wait":
                return decision.decision == "promote"
        return False

    rng = np.random.default_rng(12)
    assert sum(is_promoted(rng, only_settled=True) for _ in range(8)) == 0
    assert sum(is_promoted(rng, only_settled=False) for _ in range(8)) > 0, "the trap is real"


def test_a_clearly_worse_candidate_is_rejected_long_before_the_end():
    rng = np.random.default_rng(8)
    for n_players in (1, 3, 30):
        found = Trial(unequal_players, -0.5, n_players=n_players).decide(rng)
        assert found.why.startswith("worse: mean return ")
        n_candidate = int(found.why.split(" over ")[1].split()[0])
        assert n_candidate < 250


# --- Liars ----------------------------------------------------------------------------------------


def test_a_player_with_half_of_the_episodes_counts_a_tenth():
    praise = Trial(unequal_players, -0.1, n_players=20, n_malicious=1, malicious_plays=20)
    assert n_promoted(praise, 10) == 0
    slander = replace(praise, gain=0.3, favours_candidate=False)
    assert n_promoted(slander, 10) >= 9


def test_a_player_with_most_of_the_episodes_does_not_hide_the_returns_of_the_others():
    rng = np.random.default_rng(0)
    earlier = [
        Played(0, 0.0, float(return_), f"player-{number}")
        for number in range(9)
        for return_ in rng.normal(10, 3, 10)
    ]
    earlier += [Played(0, 0.0, float(return_), "fan") for return_ in rng.normal(100, 5, 900)]
    low, high = _range(earlier, 0.05)
    assert low < 8
    assert high > 12


def test_names_that_play_little_do_not_widen_the_range():
    """Ten names with four false returns each: a quarter of the names, 3 % of the episodes."""
    rng = np.random.default_rng(16)
    candidate, champion, earlier = Trial(two_peaks, -0.3, n_players=29).episodes(rng)
    lies = [
        Played(at, 0.0, value, f"puppet-{name}")
        for name in range(10)
        for at, value in enumerate((-100.0, 100.0, -100.0, 100.0))
    ]
    decision = compare(candidate, champion, BOUNDS, earlier=[*earlier, *lies])
    assert decision.decision == "reject"
    assert "clipped to -0." in decision.why
    assert 20 <= decision.n_episodes <= len(candidate) + len(champion)


def test_a_verdict_says_what_was_compared_and_whether_lies_are_defended_against():
    rng = np.random.default_rng(9)
    few = Trial(two_peaks, 0.3, n_players=3).decide(rng).why
    assert few.startswith("better: mean return 0.")
    assert "the champion's 0." in few
    assert (
        "with 99% confidence, trial 1); players: 3, fewer than 10, so false returns are not "
        "guarded against" in few
    )
    many = Trial(two_peaks, 0.3, n_players=30).decide(rng).why
    assert many.endswith("players: 30, of whom any 3 may lie")
    assert "players" not in judge(np.ones(400), np.zeros(400)).why.split("confidence")[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_episodes": 1},
        {"max_episodes": 9},
        {"error": 0.0},
        {"error": 0.5},
        {"life_error": 0.0},
        {"first_share": 0.0},
        {"max_share": 0.6},
        {"control_share": -0.1},
        {"control_share": 0.3},
        {"forget_margin": -0.1},
        {"forget_margin": 0.6},
        {"first_share": 0.3, "max_share": 0.2},
    ],
)
def test_bounds_that_prove_nothing_are_rejected(wrong: dict[str, float]):
    with pytest.raises(ConfigError):
        Bounds(**wrong)  # type: ignore[arg-type]


# --- Shares and errors ----------------------------------------------------------------------------


def test_a_canary_starts_small_and_doubles_its_share_with_every_five_episodes():
    assert [BOUNDS.share_after(n) for n in (0, 4, 5, 10, 15, 19, 20, 10**9)] == [
        0.05,
        0.05,
        0.1,
        0.2,
        0.4,
        0.4,
        0.5,
        0.5,
    ]
    assert Bounds(first_share=0.5).share_after(0) == 0.5


@pytest.mark.parametrize(
    ("trials", "n_players"),
    [
        (6, 30),
        *(
            pytest.param(1_000, n_players, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for n_players in (1, 3, 30)
        ),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_a_growing_share_promotes_no_more_copies_of_the_champion(
    game: Returns, trials: int, n_players: int
):
    promoted = n_promoted(Trial(game, 0.0, n_players=n_players), trials, seed=1)
    print(f"{game.__name__}, {n_players} players: {promoted} of {trials} copies promoted")
    assert promoted <= trials // 100


def test_the_errors_of_all_candidates_of_a_schema_sum_up_to_the_life_error():
    errors = [BOUNDS.error_of(trial_no) for trial_no in range(1, 100_000)]
    assert errors[0] == BOUNDS.error
    assert errors == sorted(errors, reverse=True)
    assert sum(Bounds(error=0.499).error_of(trial_no) for trial_no in range(1, 100_000)) < 0.05
    assert errors[999] > 1e-7, "a late candidate needs about three times the evidence of the first"


def test_a_candidate_that_waits_shows_how_far_it_has_come():
    rng = np.random.default_rng(15)
    candidate, champion, earlier = Trial(won_or_lost, 0.3, n_players=3, share=0.5).episodes(rng)
    evidence = []
    for end in (18, 60, 120):
        known = [
            [episode for episode in episodes if episode.arrival_no < end]
            for episodes in (candidate, champion)
        ]
        decision = compare(known[0], known[1], BOUNDS, earlier=earlier)
        assert decision.decision == "wait"
        evidence.append(decision.evidence)
    assert evidence[0] == 0.0, "too few episodes"
    assert 0.0 < evidence[1] < evidence[2] < 1.0
    worse = compare(champion[:60], candidate[:60], BOUNDS, earlier=earlier)
    assert worse.evidence < 0.25


def test_a_late_candidate_needs_more_evidence_and_the_verdict_states_it():
    rng = np.random.default_rng(10)
    candidate, champion, earlier = Trial(two_peaks, 0.3, n_players=3).episodes(rng)
    first, late = (
        compare(candidate, champion, BOUNDS, earlier=earlier, trial_no=trial_no)
        for trial_no in (1, 30)
    )
    assert first.decision == late.decision == "promote"
    first_n, late_n = (int(found.why.split(" over ")[1].split()[0]) for found in (first, late))
    assert first_n < late_n
    assert "with 99% confidence, trial 1)" in first.why
    assert "with 99.987% confidence, trial 30)" in late.why


# --- The control ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "n_players"),
    [
        (6, 3),
        *(
            pytest.param(1_000, n_players, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
            for n_players in (1, 3, 30)
        ),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_beside_a_control_at_most_one_in_a_hundred_copies_of_the_champion_is_promoted(
    game: Returns, trials: int, n_players: int
):
    trial = Trial(game, 0.0, n_players=n_players, control_gain=0.0)
    counts = run_trials(trial, trials, seed=1)
    print(f"{game.__name__}, {n_players} players: {counts}")
    assert counts.promoted <= trials // 100


@pytest.mark.parametrize(
    ("trials", "n_players"),
    [
        (3, 30),
        *(
            pytest.param(100, n_players, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
            for n_players in (1, 3, 30)
        ),
    ],
)
@pytest.mark.parametrize("game", GAMES)
def test_a_better_candidate_is_promoted_beside_a_control_as_good_as_itself(
    game: Returns, trials: int, n_players: int
):
    """The control may reject one of 200; nine of ten are promoted, as without it."""
    trial = Trial(game, 0.2, n_players=n_players, control_gain=0.2)
    counts = run_trials(trial, trials, seed=3)
    print(f"{game.__name__}, {n_players} players: {counts}")
    assert counts.promoted >= 0.9 * trials - (trials < 100)


def test_a_candidate_that_is_better_than_the_champion_and_worse_than_the_control_is_rejected():
    """The champion has drifted down to 0; a slow comparison with it leaves time for the control."""
    rng = np.random.default_rng(5)
    trial = Trial(won_or_lost, 0.1, n_players=3, level=0.0, control_gain=1.0)
    decisions = [trial.decide(rng) for _ in range(20)]
    rejected = [found for found in decisions if found.decision == "reject"]
    assert len(rejected) >= 15
    for found in rejected:
        assert found.why.startswith("worse than the control: mean return ")
        assert "the control's " in found.why
        assert 0 < found.n_episodes < 2_000
    without = run_trials(replace(trial, control_gain=None), 20, seed=5)
    assert without.promoted >= 15


def test_only_episodes_drawn_beside_the_control_are_compared_with_it():
    rng = np.random.default_rng(6)
    trial = Trial(two_peaks, 0.3, n_players=3)
    candidate, champion, earlier = trial.episodes(rng)
    plain = compare(candidate, champion, BOUNDS, earlier=earlier)
    assert plain.decision == "promote"
    # The control is far better, but was not drawn beside the candidate, or is too rare to tell.
    for propensity, count in ((None, 500), (0.5, 500), (0.4, 9)):
        control = [
            Played(at, at + 0.5, 1e6, "player-0", propensity=propensity) for at in range(count)
        ]
        beside = [
            Played(at, at + 0.7, -1e6, "player-0", propensity=propensity and 1 - propensity)
            for at in range(count)
        ]
        found = compare(
            [*candidate, *(each for each in beside if propensity == 0.4)],
            champion,
            BOUNDS,
            control=control,
            earlier=earlier,
        )
        assert found.decision == "promote"
        assert found.why.startswith(plain.why)


def test_a_promotion_beside_a_control_says_so_and_is_the_same_however_late_it_is_computed():
    trial = Trial(two_peaks, 0.3, n_players=3, control_gain=0.3)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        candidate, champion, earlier = trial.episodes(rng)
        beside, control = trial.beside_control(rng, BOUNDS)
        candidate = [*candidate, *beside]
        found = compare(candidate, champion, BOUNDS, control=control, earlier=earlier)
        assert found.decision == "promote"
        assert "; not proven worse than the control: mean return " in found.why
        early, early_champion, early_control = (
            [each for each in played if each.started_s < found.n_episodes]
            for played in (candidate, champion, control)
        )
        again = compare(early, early_champion, BOUNDS, control=early_control, earlier=earlier)
        assert again == found


def test_the_controls_share_grows_with_the_canarys():
    shares = [BOUNDS.control_share_beside(share) for share in (0.05, 0.1, 0.2, 0.5)]
    assert shares == pytest.approx([0.02, 0.04, 0.05, 0.05])
    assert Bounds(control_share=0.0).control_share_beside(0.5) == 0


# --- After a forget -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "gain", "promoted"),
    [
        (10, 0.0, (7, 10)),
        (10, -0.4, (0, 0)),
        pytest.param(1_000, -0.3, (0, 10), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("game", [heavy_tails, unequal_players, drifting])
def test_a_replacement_that_is_hardly_worse_is_promoted_and_a_worse_one_is_not(
    game: Returns, trials: int, gain: float, promoted: tuple[int, int]
):
    """A tenth of the range of these returns is less than 0.2, and clipping hides less than 0.1."""
    rng = np.random.default_rng(7)
    trial = Trial(game, gain, n_players=3)
    decisions = []
    for _ in range(trials):
        candidate, champion, earlier = trial.episodes(rng)
        decisions.append(compare(candidate, champion, BOUNDS, earlier=earlier, margin=0.1))
    low, high = promoted
    n_promoted = sum(found.decision == "promote" for found in decisions)
    print(f"{game.__name__}, {gain}: {n_promoted} of {trials} promoted")
    assert low <= n_promoted <= high


def test_a_replacement_exactly_at_the_margin_is_rarely_promoted_and_the_reason_says_so():
    """Returns of 0 or 1 with a range of 0 to 1, so that the margin is that of the probabilities."""
    rng = np.random.default_rng(8)
    earlier = [Played(at, -1.0, float(at % 2)) for at in range(100)]
    outcomes = []
    for _ in range(50):
        is_candidate = rng.random(1_000) < 0.5
        returns = rng.random(1_000) < np.where(is_candidate, 0.5, 0.6)
        episodes = [
            Played(at, float(at), float(value), propensity=0.5)
            for at, value in enumerate(returns.tolist())
        ]
        candidate, champion = (
            [each for each, own in zip(episodes, is_candidate, strict=True) if own == is_own]
            for is_own in (True, False)
        )
        found = compare(candidate, champion, BOUNDS, earlier=earlier, margin=0.1)
        outcomes.append(found.decision)
    assert outcomes.count("promote") <= 1
    assert outcomes.count("reject") <= 1
    same = played(np.tile([0.0, 1.0], 400), bot=0), played(np.tile([1.0, 0.0], 400), bot=1)
    found = compare(*same, BOUNDS, earlier=earlier, margin=0.1)
    assert found.decision == "promote"
    assert found.why.startswith(
        "not worse by more than 0.1 of the range, as a replacement: mean return "
    )
    assert compare(*same, BOUNDS, earlier=earlier).decision == "wait"
    lower = played(np.zeros(400), bot=0), played(np.ones(400), bot=1)
    found = compare(*lower, BOUNDS, earlier=earlier, margin=0.1)
    assert found.decision == "reject"
    assert found.why.startswith("worse by more than 0.1 of the range, as a replacement: ")


def test_episodes_beside_the_control_and_ones_that_were_not_drawn_are_not_compared():
    drawn = [Played(number, 0.0, 1.0, propensity=0.5) for number in range(3)]
    others = [
        Played(3, 0.0, 1.0, propensity=CANARY_BESIDE_CONTROL),
        Played(4, 0.0, 1.0),
        Played(5, 0.0, 1.0, propensity=0.01),
    ]
    assert compared_with_champion([*others, *drawn], Bounds()) == drawn
