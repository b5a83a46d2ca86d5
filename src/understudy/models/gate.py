"""The gate: decides with pure functions whether players may get a model.

    checks ─► reject, or the first bot ─► promote
    episodes, each drawn for candidate or champion ─► bets on their returns ─► promote, wait, reject

`compare` promotes what is better with the stated confidence, and rejects what is worse, or is still
undecided at the end. It may be called after every episode: the test is a bet on each return, and
the probability that the capital of a bet on a copy of the champion ever reaches 1 / `error` is at
most `error` (decision 18). A decision depends only on the episodes, not on when it is computed.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.plural import plural
from understudy.ports import CANARY_BESIDE_CONTROL, MAX_CONTROL_SHARE

Decision = Literal["promote", "wait", "reject"]
MAX_MARGIN = 0.5
"""The largest margin of a comparison, as a share of the range of returns."""

_BETS = np.array([0.25, 0.5, 1.0, 2.0, 4.0])
"""Shares of the capital that are bet on a difference of the whole range; the capital is divided
among them, since the best one depends on the unknown difference."""
_MAX_LOSS = 0.9
"""The largest share of the capital that one episode can lose."""
_MEMORY_EPISODES = 16
"""Episodes of a player over which the expected return is averaged, so that it follows a trend."""
_MIN_EARLIER = 20
"""Earlier episodes that are enough to tell the range of returns."""
_TAIL = 0.05
"""The share of a player's highest returns, and of the lowest, that does not widen the range."""
_FAR = 1_000.0
"""Returns this many times as large as those of the median player are not believed."""
_MIN_PLAYERS_TO_DIFFER = 3
_MIN_PLAYERS_FOR_DEFENCE = 10
"""The number of players from which on a tenth of them may lie."""
_EPISODES_PER_DOUBLING = 5
"""Episodes of canary and champion together after which the canary's share doubles."""
_SPENDING_SUM = 2.11
"""Above the sum of 1 / (n log(n)^2) over all n from 2, which is 2.1097."""
_ERROR_WITH_LIARS = 0.05
"""Highest probability of a wrong proof if a tenth of the players lie together, in the worst way."""


class Played(NamedTuple):
    """An episode that was played to its end."""

    arrival_no: int
    """Arrival number of the episode's last chunk: the order in which episodes became known."""
    started_s: float
    return_: float
    player: str = ""
    row: int = 0
    """Its place in that chunk."""
    propensity: float | None = None
    """The probability with which its bot was drawn; None if no gateway drew it."""
    entry: int = 0
    """The canary's journal entry by which it was drawn; 0 if it was not drawn."""
    has_invalid_draw: bool = False
    """Whether the client claimed a draw that is not valid; the mean that is shown leaves it out."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of one check of the model itself, without playing."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How often and how long a candidate plays as canary, and with what certainty it is judged."""

    min_episodes: int = 10
    """Episodes that candidate and champion must each have before a decision."""
    max_episodes: int = 1_000
    """After this many episodes of its own, an undecided candidate is rejected."""
    error: float = 0.005
    """Highest probability that a candidate which is not better is promoted."""
    life_error: float = 0.05
    """The same for all candidates of a schema together, however many there will be."""
    first_share: float = 0.05
    """The share of episodes that a canary plays at first."""
    max_share: float = 0.5
    """The share doubles up to this one while the canary is not proven worse."""
    control_share: float = 0.05
    """The share of episodes that the best earlier champion plays beside a canary; 0: none."""
    forget_margin: float = 0.1
    """By how much of the range of returns a replacement may be worse, that after a `forget` or the
    first one after the champion of an earlier schema was carried over."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_episodes <= self.max_episodes:
            raise ConfigError(
                f"min_episodes is {self.min_episodes} and max_episodes {self.max_episodes}; use 2 "
                "or more, with min_episodes not above max_episodes"
            )
        if not 0 < self.error < 0.5:
            raise ConfigError(f"error is {self.error}; use a number above 0 and below 0.5")
        if not 0 < self.life_error < 0.5:
            raise ConfigError(
                f"life_error is {self.life_error}; use a number above 0 and below 0.5"
            )
        if not 0 < self.first_share <= self.max_share <= 0.5:
            raise ConfigError(
                f"first_share is {self.first_share} and max_share {self.max_share}; use shares "
                "above 0 and at most 0.5, with first_share not above max_share"
            )
        if not 0 <= self.control_share <= MAX_CONTROL_SHARE:
            raise ConfigError(
                f"control_share is {self.control_share}; use a number from 0 to {MAX_CONTROL_SHARE}"
            )
        if not 0 <= self.forget_margin <= MAX_MARGIN:
            raise ConfigError(
                f"forget_margin is {self.forget_margin}; use a number from 0 to {MAX_MARGIN}"
            )

    def error_of(self, trial_no: int) -> float:
        """The error of a schema's candidate by its number, from 1; all sum up to `life_error`.

        It falls little faster than 1 / `trial_no`, so that later candidates keep a chance.
        """
        rank = trial_no + 1
        return min(self.error, self.life_error / (_SPENDING_SUM * rank * math.log(rank) ** 2))

    def share_after(self, n_episodes: int) -> float:
        """The share of a canary after this many episodes of canary and champion."""
        doublings = min(n_episodes // _EPISODES_PER_DOUBLING, 1_000)  # a larger one overflows
        return min(self.max_share, self.first_share * 2.0**doublings)

    def control_share_beside(self, share: float) -> float:
        """The control's share beside a canary with this share, with which it grows at first."""
        return min(self.control_share, round(share * (1 - CANARY_BESIDE_CONTROL), 9))


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision about a candidate, and the reason as text."""

    decision: Decision
    why: str
    evidence: float = 0.0
    """How far a candidate that waits has come on the way to a proof that it is better, up to 1."""
    n_episodes: int = 0
    """Episodes of both bots after which a comparison was decided; 0 without one."""


def decide_by_checks(
    checks: Sequence[ModelCheck], *, has_champion: bool, people: ModelCheck | None = None
) -> GateDecision:
    """Reject what fails a check and promote a first bot; any other candidate waits for play.

    `people`: the comparison of a first bot with held-out steps of people, if there were enough.
    """
    for check in checks:
        if not check.passed:
            return GateDecision("reject", f"{check.name}: {check.detail}")
    if not has_champion and people is None:
        return GateDecision(
            "promote",
            "the first bot of its schema, which passed every check: no champion to compare with; "
            "not compared with people or random play",
        )
    if not has_champion and people is not None:
        return GateDecision(
            "promote" if people.passed else "reject",
            ("the first bot of its schema: " if people.passed else "not better than a constant: ")
            + f"{people.detail}; returns were not compared",
        )
    return GateDecision(
        "wait",
        f"passed {len(checks)} {plural(len(checks), 'check')}; as canary it plays a share of the "
        "episodes",
    )


# --- Comparison -----------------------------------------------------------------------------------


def compare(
    candidate: Sequence[Played],
    champion: Sequence[Played],
    bounds: Bounds,
    *,
    control: Sequence[Played] = (),
    earlier: Sequence[Played] = (),
    trial_no: int = 1,
    margin: float = 0.0,
) -> GateDecision:
    """Return the first decision that the episodes support, checked after each; wait if none.

    A candidate is promoted once it is proven better than the champion, and rejected once it is
    proven worse than the champion or than the control.

    Episodes are compared in the order in which they started, so each that started before one of
    these must have ended: otherwise the bot that wins quickly would seem better.

    Only episodes whose bot was drawn at random are compared: a client that does not know of the
    candidate yet plays the champion in any case, at times of its own. A draw is between candidate
    and champion, or between candidate and control.

    `control`: episodes of an earlier champion, if one plays beside the candidate.
    `earlier`: episodes of people and of the champion from before the trial. Returns are clipped to
    their range; if they are too few, the first episodes tell the range and are not compared.
    `trial_no`: the candidate's number among those of its schema, on which its error depends.
    `margin`: the candidate is promoted once it is proven not to be worse by more than this share
    of the range, and rejected once it is proven to be.
    """
    beside_control = _Pair(
        [each for each in candidate if _has(each, CANARY_BESIDE_CONTROL)],
        [each for each in control if _has(each, 1 - CANARY_BESIDE_CONTROL)],
        "control",
    )
    candidate = compared_with_champion(candidate, bounds)
    champion = [
        episode
        for episode in champion
        if episode.propensity is not None and _may_compare(1 - episode.propensity, bounds)
    ]
    pair = _Pair(candidate, champion, "champion")
    if not all(math.isfinite(each.return_) for each in (*pair.episodes, *beside_control.episodes)):
        return GateDecision("reject", "a return of one of the compared bots is not finite")
    is_over = len(candidate) >= bounds.max_episodes
    # What becomes known after the last episode that counts changes nothing.
    n_candidate = np.cumsum(pair.is_candidate)
    pair = pair.part(0, int(np.searchsorted(n_candidate, bounds.max_episodes)) + 1)
    tail = _TAIL
    if len(earlier) < _MIN_EARLIER:
        first = pair.episodes[:_MIN_EARLIER]
        earlier = [episode._replace(player="") for episode in first]
        pair = pair.part(len(first))
        beside_control = beside_control.part(beside_control.n_until(first[-1]) if first else 0)
        tail = 2 * _TAIL  # so that the most extreme of so few does not count
    may_decide = pair.may_decide(bounds)
    if not may_decide.any():
        return GateDecision(
            "reject" if is_over else "wait",
            f"{len(candidate)} {plural(len(candidate), 'episode')} of the candidate, "
            f"{len(champion)} of the champion; each needs {bounds.min_episodes}",
        )
    ends = _range(earlier, tail)
    draws = pair.draws(ends)
    better = _Bet(draws, 1, bounds.error_of(trial_no), above=-margin)
    worse = _Bet(draws, -1, bounds.error, above=margin)
    proven_at = [bet.first_proof(may_decide) for bet in (better, worse)]
    at = min(proven_at)
    bet = better
    if at < len(pair.episodes):
        beside_control = beside_control.part(0, beside_control.n_until(pair.episodes[at]))
    if (may_decide := beside_control.may_decide(bounds)).any():
        below = _Bet(beside_control.draws(ends), -1, bounds.error)
        below_at = below.first_proof(may_decide)
        if below_at < len(beside_control.episodes):
            why = beside_control.text("worse than the control", ends, below, below_at, trial_no)
            n_before = pair.n_until(beside_control.episodes[below_at])
            return GateDecision("reject", why, n_episodes=n_before + below_at + 1)
    if at < len(pair.episodes):
        is_better = proven_at[0] == at
        decision: Decision = "promote" if is_better else "reject"
        outcome = "better" if is_better else "worse"
        bet = better if is_better else worse
        if margin:
            how = "not worse" if is_better else "worse"
            outcome = f"{how} by more than {margin:g} of the range, as a replacement"
    elif is_over:
        decision = "reject"
        outcome = f"undecided after {bounds.max_episodes} episodes"
    else:
        proof = (
            "whether the replacement is as good is not proven yet"
            if margin
            else "neither is proven better"
        )
        return GateDecision(
            "wait",
            f"{len(candidate)} episodes of the candidate, {len(champion)} of the champion; {proof}",
            better.evidence(),
        )
    why = pair.text(outcome, ends, bet, at, trial_no)
    if decision == "promote" and len(set(beside_control.is_candidate)) > 1:
        why += f"; not proven worse than the control: {beside_control.means(ends)}"
    return GateDecision(decision, why, n_episodes=min(at + 1, len(pair.episodes)))


def of_trial(episodes: Sequence[Played], first_no: int) -> list[Played]:
    """The episodes without the draws of earlier trials; `first_no` is the trial's first entry."""
    return [
        episode if episode.entry >= first_no else episode._replace(propensity=None)
        for episode in episodes
    ]


def compared_with_champion(candidate: Sequence[Played], bounds: Bounds) -> list[Played]:
    """The candidate's episodes that `compare` compares with the champion's.

    These are drawn at random, between these two.
    """
    return [episode for episode in candidate if _may_compare(episode.propensity, bounds)]


class _Pair:
    """Episodes of the candidate and of another bot, in the order in which they started."""

    def __init__(self, candidate: Sequence[Played], other: Sequence[Played], name: str) -> None:
        both = [(episode, True) for episode in candidate] + [(each, False) for each in other]
        both.sort(key=lambda pair: _start(pair[0]))
        self.episodes = [episode for episode, _ in both]
        self.is_candidate = np.array([is_candidate for _, is_candidate in both], np.bool_)
        self._name = name

    def part(self, first: int, last: int | None = None) -> "_Pair":
        """The episodes from one of them on, up to another."""
        part = _Pair((), (), self._name)
        part.episodes = self.episodes[first:last]
        part.is_candidate = self.is_candidate[first:last]
        return part

    def n_until(self, episode: Played) -> int:
        """The number of episodes that started no later than this one."""
        return bisect.bisect_right(self.episodes, _start(episode), key=_start)

    def may_decide(self, bounds: Bounds) -> NDArray[np.bool_]:
        """After which episodes each bot has played enough."""
        n_episodes = np.minimum(np.cumsum(self.is_candidate), np.cumsum(~self.is_candidate))
        return np.asarray(n_episodes >= bounds.min_episodes)

    def draws(self, ends: tuple[float, float]) -> "_Draws":
        propensity = np.array([episode.propensity for episode in self.episodes])
        players = np.unique([episode.player for episode in self.episodes], return_inverse=True)[1]
        return _draws(
            (self._clipped(ends) - ends[0]) / (ends[1] - ends[0]),
            self.is_candidate,
            np.where(self.is_candidate, propensity, 1 - propensity),
            players.reshape(-1),
        )

    def means(self, ends: tuple[float, float]) -> str:
        """The mean returns of both bots, as text."""
        returns = self._clipped(ends)
        own = returns[self.is_candidate]
        other = returns[~self.is_candidate]
        return (
            f"mean return {own.mean():.4g} over {len(own)} {plural(len(own), 'episode')}, the "
            f"{self._name}'s {other.mean():.4g} over {len(other)}"
        )

    def text(
        self, outcome: str, ends: tuple[float, float], bet: "_Bet", at: int, trial_no: int
    ) -> str:
        """What was compared up to the episode that decided, and what it proves."""
        compared = self.part(0, at + 1)
        low_gain, gain, high_gain = ((ends[1] - ends[0]) * end for end in bet.interval(at))
        why = (
            f"{outcome}: {compared.means(ends)}, clipped to {ends[0]:.4g} to {ends[1]:.4g}; within "
            f"players, the difference is {gain:.3g} (from {low_gain:.3g} to {high_gain:.3g} with "
            f"{100 - 200 * bet.error:.6g}% confidence, trial {trial_no})"
        )
        players = {episode.player for episode in compared.episodes}
        if players == {""}:
            return why
        n_liars = _n_liars(len(players))
        return f"{why}; players: {len(players)}, " + (
            f"of whom any {n_liars} may lie"
            if n_liars
            else f"fewer than {_MIN_PLAYERS_FOR_DEFENCE}, so false returns are not guarded against"
        )

    def _clipped(self, ends: tuple[float, float]) -> NDArray[np.float64]:
        return np.asarray(np.clip([episode.return_ for episode in self.episodes], *ends))


def _start(episode: Played) -> tuple[float, str, int, int]:
    """Sorts episodes by their start, since quick wins end before slow losses."""
    return episode.started_s, episode.player, episode.arrival_no, episode.row


def _has(episode: Played, propensity: float) -> bool:
    return episode.propensity is not None and math.isclose(episode.propensity, propensity)


def _may_compare(canary_share: float | None, bounds: Bounds) -> bool:
    """Whether an episode's bot was drawn at random, with a share that canaries have."""
    return (
        canary_share is not None
        and bounds.first_share - 1e-9 <= canary_share <= bounds.max_share + 1e-9
    )


def _range(earlier: Sequence[Played], tail: float) -> tuple[float, float]:
    """Each player's range without these tails, without the most extreme tenth of the players.

    That is a tenth of the players and of their episodes, since a player can have many names which
    play little. Nor do players count whose returns are far beyond all known sizes: with them, all
    others would seem alike.
    """
    by_player: dict[str, list[float]] = {}
    for episode in earlier:
        by_player.setdefault(episode.player, []).append(episode.return_)
    ends = np.array([np.quantile(mine, (tail, 1 - tail)) for mine in by_player.values()])
    n_episodes = np.array([len(mine) for mine in by_player.values()])
    sizes = np.abs(ends).max(axis=1)
    if len(ends) >= _MIN_PLAYERS_TO_DIFFER and np.median(sizes) > 0:
        is_near = sizes <= _FAR * np.median(sizes)
        ends = ends[is_near]
        n_episodes = n_episodes[is_near]
    low = _without_liars(ends[:, 0], n_episodes)
    high = -_without_liars(-ends[:, 1], n_episodes)
    if high < low:  # one player has most of the episodes: all count alike
        alike = np.ones(len(ends), np.int_)
        low = _without_liars(ends[:, 0], alike)
        high = -_without_liars(-ends[:, 1], alike)
    if high > low:
        return low, high
    margin = max(abs(low), 1.0) / 2  # all alike so far: leave room on both sides
    return low - margin, low + margin


def _without_liars(ends: NDArray[np.float64], n_episodes: NDArray[np.int_]) -> float:
    """The lowest end after those of liars: a tenth of the players, and of the episodes."""
    n_liars = _n_liars(len(ends))
    order = np.argsort(ends)
    if n_liars:
        n_before = np.cumsum(n_episodes[order])
        n_liars = max(n_liars, 1 + int(np.searchsorted(n_before, n_before[-1] / 10)))
    return float(ends[order[min(n_liars, len(ends) - 1)]])


def _n_liars(n_players: int) -> int:
    """How many players may lie: a tenth of them, rounded up; none below ten players."""
    return math.ceil(n_players / 10) if n_players >= _MIN_PLAYERS_FOR_DEFENCE else 0


def _n_silent(weight: NDArray[np.float64]) -> int:
    """How many players a bet ignores: a tenth of those who have nine tenths of the weight.

    Names that hardly play are not counted, so whoever invents some does not make a bet ignore more
    of the others.
    """
    most = np.cumsum(np.sort(weight)[::-1])
    return math.ceil((1 + int(np.searchsorted(most, 0.9 * most[-1] - 1e-9))) / 9)


def _lowest_tenth(
    ranked: Sequence[tuple[float, int]], means: Mapping[int, tuple[float, float]]
) -> tuple[float, int]:
    """The last of the players with the lowest means who have a tenth of the weight together."""
    left = sum(weight for _, weight in means.values()) / 10
    for mean, player in ranked:
        left -= means[player][1]
        if left <= 0:
            return mean, player
    return (-math.inf, 0)


class _Draws(NamedTuple):
    """Episodes whose bot was drawn at random, in the order in which they ended."""

    gain: NDArray[np.float64]
    """(1 for the candidate, 0 for the champion, minus `chance`) times (return - expected return).
    Whatever was expected, its mean is the difference of the bots times chance * (1 - chance)."""
    is_candidate: NDArray[np.bool_]
    chance: NDArray[np.float64]
    """The probability with which the candidate was drawn."""
    max_loss: NDArray[np.float64]
    """The largest possible loss of a bet on the candidate, and of one on the champion."""
    player: NDArray[np.intp]


def _draws(
    scaled: NDArray[np.float64],
    is_candidate: NDArray[np.bool_],
    chance: NDArray[np.float64],
    player: NDArray[np.intp],
) -> _Draws:
    """Compare each return, from 0 to 1, with the player's mean so far."""
    expected = np.empty(len(scaled))
    mean = 0.5
    means: dict[int, tuple[float, int]] = {}  # each player's mean, and number of episodes
    for at, (who, return_) in enumerate(zip(player.tolist(), scaled.tolist(), strict=True)):
        mine, n = means.get(who, (mean, 0))
        expected[at] = mine
        means[who] = (mine + (return_ - mine) / min(n + 2, _MEMORY_EPISODES), n + 1)
        mean += (return_ - mean) / min(at + 2, 2 * _MEMORY_EPISODES)
    return _Draws(
        (is_candidate - chance) * (scaled - expected),
        is_candidate,
        chance,
        np.maximum(
            (1 - chance) * np.stack([expected, 1 - expected]),
            chance * np.stack([1 - expected, expected]),
        ),
        player,
    )


class _Bet:
    """A bet that one of the bots is better; each stake is fixed before the return is seen.

    A player's weight is limited to a tenth, or to 2 / players if that is more. From ten players on,
    the tenth of them with the lowest mean so far has no weight, so that a few liars cannot prevent
    a proof; and the proof must also hold, with less confidence, without the tenth with the most
    evidence, whoever they are. Both are tenths of the players and of what they have played: one
    person can play under many names.
    """

    def __init__(self, draws: _Draws, sign: int, error: float, *, above: float = 0.0) -> None:
        """`sign`: 1 for a bet on the candidate, -1 on the other; `above`: the gain it bets on."""
        self._draws = draws
        self._sign = sign
        self._above = above
        self.error = error
        full_weight = draws.chance * (1 - draws.chance)
        self._weight = full_weight.copy()
        self._is_fair = np.ones(len(full_weight), np.bool_)
        """Whether no player has more than the allowed weight."""
        used: dict[int, float] = {}
        all_used = 0.0
        most_used = 0.0
        n_silent = 0
        lowest = (-math.inf, 0)
        count_at = 0
        means: dict[int, tuple[float, float]] = {}  # each player's mean gain, and its weight
        ranked: list[tuple[float, int]] = []  # the players by mean gain
        for at, (player, gain, weight) in enumerate(
            zip(
                draws.player.tolist(),
                (sign * draws.gain).tolist(),
                full_weight.tolist(),
                strict=True,
            )
        ):
            mean, seen = means.get(player, (0.0, 0.0))
            means[player] = (mean + (gain - mean * weight) / (seen + weight), seen + weight)
            n_players = len(means)
            if at >= count_at:
                n_silent = _n_silent(np.array([seen for _, seen in means.values()]))
                lowest = _lowest_tenth(ranked, means)
                count_at = at + at // 16
            share = max(0.1, 2 / n_players)
            mine = used.get(player, 0.0)
            if share < 1:
                weight = min(weight, max(0.0, share / (1 - share) * (all_used - mine) - mine))
            if seen:
                rank = bisect.bisect_left(ranked, (mean, player))
                del ranked[rank]
                if n_players >= _MIN_PLAYERS_FOR_DEFENCE and (
                    rank < n_silent or (mean, player) <= lowest
                ):
                    weight = 0.0
            bisect.insort(ranked, (means[player][0], player))
            self._weight[at] = weight
            used[player] = mine + weight
            all_used += weight
            most_used = max(most_used, used[player])
            self._is_fair[at] = share >= 1 or most_used <= share * all_used * (1 + 1e-9)
        self._stake = self._weight / full_weight

    def first_proof(self, may_decide: NDArray[np.bool_]) -> int:
        """The first episode after which the bet is won; the number of episodes without one."""
        growth = self._growth(self._sign, self._above)
        player = self._draws.player
        is_won = _capital(np.cumsum(growth, axis=0)) >= math.log(1 / self.error)
        n_players = np.cumsum(
            np.isin(np.arange(len(player)), np.unique(player, return_index=True)[1])
        )
        by_player = np.zeros((int(player.max()) + 1, len(_BETS)))
        n_added = 0
        for at in np.nonzero(is_won & may_decide & self._is_fair)[0].tolist():
            np.add.at(by_player, player[n_added : at + 1], growth[n_added : at + 1])
            n_added = at + 1
            n_liars = _n_liars(int(n_players[at]))
            if not n_liars:
                return int(at)
            full_weight = self._draws.chance[: at + 1] * (1 - self._draws.chance[: at + 1])
            weight = np.zeros(len(by_player))
            np.add.at(weight, player[: at + 1], full_weight)
            honest = by_player.sum(axis=0) - _most_evidence(by_player, weight, n_liars)
            if _capital(honest) >= math.log(1 / _ERROR_WITH_LIARS):
                return int(at)
        return len(player)

    def evidence(self) -> float:
        """The capital after all episodes, on a logarithmic scale on which a proof is 1."""
        capital = _capital(self._growth(self._sign, self._above).sum(axis=0))
        return float(capital / math.log(1 / self.error))

    def interval(self, at: int) -> list[float]:
        """The lowest, mean and highest gain of the candidate that episodes up to one allow."""
        ends = []
        for sign in (1, -1):
            low = -1.0
            high = 1.0
            for _ in range(16):
                middle = (low + high) / 2
                growth = self._growth(sign * self._sign, middle)[: at + 1].sum(axis=0)
                if _capital(growth) >= math.log(1 / self.error):
                    low = middle
                else:
                    high = middle
            ends.append(sign * low)
        weight = self._weight[: at + 1]
        gain = self._sign * self._stake[: at + 1] @ self._draws.gain[: at + 1]
        mean = float(gain / weight.sum()) if weight.any() else 0.0
        # Those of a bet on the other bot are gains of that one.
        return [ends[0], mean, ends[1]] if self._sign > 0 else [-ends[1], -mean, -ends[0]]

    def _growth(self, sign: int, difference: float) -> NDArray[np.float64]:
        """Growth of the capitals, as logarithms, of a bet on a difference above this one."""
        draws = self._draws
        gain = sign * draws.gain - draws.is_candidate * (1 - draws.chance) * difference
        max_loss = draws.max_loss[0 if sign > 0 else 1] + (1 - draws.chance) * max(difference, 0)
        bets = np.minimum(self._stake[:, None] * _BETS, (_MAX_LOSS / max_loss)[:, None])
        return np.asarray(np.log1p(bets * gain[:, None]))


def _most_evidence(
    growth: NDArray[np.float64], weight: NDArray[np.float64], n_liars: int
) -> NDArray[np.float64]:
    """The most that so many players, or players with a tenth of the weight, add to each capital.

    `growth`: float64[players, bets]. The second bound is for players with many names.
    """
    gains = np.maximum(growth, 0)
    by_count = np.sort(gains, axis=0)[len(gains) - n_liars :].sum(axis=0)
    # Those with the most evidence for their weight come first; the last may exceed the tenth.
    order = np.argsort(-gains / np.maximum(weight, 1e-300)[:, None], axis=0)
    before = np.cumsum(weight[order], axis=0) - weight[order]
    is_within = before < weight.sum() / 10
    by_weight = (np.take_along_axis(gains, order, axis=0) * is_within).sum(axis=0)
    return np.asarray(np.maximum(by_count, by_weight))


def _capital(growth: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of the mean capital of all bets."""
    return np.asarray(np.logaddexp.reduce(growth, axis=-1) - math.log(len(_BETS)))
