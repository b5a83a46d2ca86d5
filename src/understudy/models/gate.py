"""The gate: decides with pure functions whether players may get a model.

    checks ─► reject, or the first bot ─► promote
    episodes of candidate and champion ─► differences by player and time ─► promote, wait or reject

`compare` promotes what is better with the stated confidence, and rejects what is worse, or is still
undecided at the end. It may be called after every episode: the test is a bet on each difference,
and the probability that the capital of a bet on a copy of the champion ever reaches 1 / `error` is
at most `error` (decision 18). A decision depends only on the episodes, not on when it is computed.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

Decision = Literal["promote", "wait", "reject"]

_BLOCKS = (2, 4, 8)
"""Episodes of a player's first, second and every later block. Only the number of episodes ends a
block, not what was played in it: so a trend in the returns favours neither bot."""
_BETS = np.array([0.25, 0.5, 1.0, 2.0, 4.0])
"""Shares of the capital that are bet on a difference of the whole range; the capital is divided
among them, since the best one depends on the unknown difference."""
_MAX_BET = 0.9
_MIN_EARLIER = 20
"""Earlier episodes that are enough to tell the range of returns."""
_MIN_PLAYERS_FOR_DEFENCE = 10
"""The number of players from which on a tenth of them may lie."""
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


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of one check of the model itself, without playing."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long a candidate is compared with the champion, and with what certainty."""

    min_episodes: int = 30
    """Episodes that candidate and champion must each have before a decision."""
    max_episodes: int = 1_000
    """After this many episodes of its own, an undecided candidate is rejected."""
    error: float = 0.01
    """Highest probability that a candidate which is not better is promoted."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_episodes <= self.max_episodes:
            raise ConfigError(
                f"min_episodes is {self.min_episodes} and max_episodes {self.max_episodes}; use 2 "
                "or more, with min_episodes not above max_episodes"
            )
        if not 0 < self.error < 0.5:
            raise ConfigError(f"error is {self.error}; use a number above 0 and below 0.5")


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision about a candidate, and the reason as text."""

    decision: Decision
    why: str


def decide_by_checks(checks: Sequence[ModelCheck], *, has_champion: bool) -> GateDecision:
    """Reject what fails a check and promote a first bot; any other candidate waits for play."""
    for check in checks:
        if not check.passed:
            return GateDecision("reject", f"{check.name}: {check.detail}")
    if not has_champion:
        return GateDecision("promote", "the first bot, which passed every check")
    return GateDecision(
        "wait", f"passed {len(checks)} checks; as canary it plays a share of the episodes"
    )


# --- Comparison -----------------------------------------------------------------------------------


def compare(
    candidate: Sequence[Played],
    champion: Sequence[Played],
    bounds: Bounds,
    *,
    earlier: Sequence[Played] = (),
) -> GateDecision:
    """Return the first decision that the episodes support, checked after each; wait if none.

    `earlier`: episodes of people and of the champion from before the trial. Returns are clipped to
    their range; if they are too few, the first episodes tell the range and are not compared.
    """
    episodes = [*candidate, *champion]
    returns = np.array([episode.return_ for episode in episodes])
    if not np.isfinite(returns).all():
        return GateDecision("reject", "a return of the candidate or the champion is not finite")
    order = np.lexsort(
        ([episode.row for episode in episodes], [episode.arrival_no for episode in episodes])
    )
    n_candidate = np.cumsum(order < len(candidate))
    is_over = len(candidate) >= bounds.max_episodes
    # What becomes known after the last episode that counts changes nothing.
    order = order[: int(np.searchsorted(n_candidate, bounds.max_episodes)) + 1]
    if len(earlier) < _MIN_EARLIER:
        earlier = [episodes[at] for at in order[:_MIN_EARLIER]]
        order = order[_MIN_EARLIER:]
    is_candidate = order < len(candidate)
    n_episodes = np.minimum(np.cumsum(is_candidate), np.cumsum(~is_candidate))
    if not len(order) or n_episodes[-1] < bounds.min_episodes:
        return GateDecision(
            "reject" if is_over else "wait",
            f"{len(candidate)} episodes of the candidate, {len(champion)} of the champion; each "
            f"needs {bounds.min_episodes}",
        )
    low, high = _range(earlier)
    scaled = (np.clip(returns[order], low, high) - low) / (high - low)
    players = np.unique([episodes[at].player for at in order], return_inverse=True)[1]
    blocks = _blocks(scaled, is_candidate, players.reshape(-1))
    may_decide = n_episodes[blocks.end] >= bounds.min_episodes
    better, worse = (_Bet(blocks, sign, bounds.error) for sign in (1, -1))
    proven_at = [bet.first_proof(may_decide) for bet in (better, worse)]
    at = min(proven_at)
    n_compared = int(blocks.end[at]) + 1 if at < len(blocks.end) else len(order)
    if at < len(blocks.end):
        is_better = proven_at[0] == at
        decision: Decision = "promote" if is_better else "reject"
        outcome = "better" if is_better else "worse"
    elif is_over:
        decision = "reject"
        outcome = f"undecided after {bounds.max_episodes} episodes"
    else:
        return GateDecision(
            "wait",
            f"{len(candidate)} episodes of the candidate, {len(champion)} of the champion; neither "
            "is proven better",
        )
    is_candidate = is_candidate[:n_compared]
    compared = returns[order[:n_compared]]
    ends = better.interval(at)
    if outcome == "worse":
        ends = [-end for end in reversed(worse.interval(at))]
    low_gain, gain, high_gain = ((high - low) * end for end in ends)
    why = (
        f"{outcome}: mean return {compared[is_candidate].mean():.4g} over {is_candidate.sum()} "
        f"episodes, the champion's {compared[~is_candidate].mean():.4g} over "
        f"{(~is_candidate).sum()}; within players, of returns clipped to {low:.4g} to {high:.4g}, "
        f"the difference is {gain:.3g} (from {low_gain:.3g} to {high_gain:.3g} with "
        f"{100 - 200 * bounds.error:.4g}% confidence)"
    )
    if any(episode.player for episode in episodes):
        n_players = len(set(blocks.player[: at + 1]))
        n_liars = _n_liars(n_players)
        why += f"; players: {n_players}, " + (
            f"of whom any {n_liars} may lie"
            if n_liars
            else f"fewer than {_MIN_PLAYERS_FOR_DEFENCE}, so false returns are not guarded against"
        )
    return GateDecision(decision, why)


def _range(earlier: Sequence[Played]) -> tuple[float, float]:
    """The players' 5 % and 95 % quantiles, without the most extreme tenth of the players."""
    by_player: dict[str, list[float]] = {}
    for episode in earlier:
        by_player.setdefault(episode.player, []).append(episode.return_)
    ends = np.sort([np.quantile(mine, (0.05, 0.95)) for mine in by_player.values()], axis=0)
    n_liars = _n_liars(len(ends))
    low = float(ends[n_liars, 0])
    high = float(ends[-1 - n_liars, 1])
    if high > low:
        return low, high
    margin = max(abs(low), 1.0) / 2  # all alike so far: leave room on both sides
    return low - margin, low + margin


def _n_liars(n_players: int) -> int:
    """How many players may lie: a tenth of them, rounded up; none below ten players."""
    return math.ceil(n_players / 10) if n_players >= _MIN_PLAYERS_FOR_DEFENCE else 0


class _Blocks(NamedTuple):
    """Consecutive episodes of a player with both bots, in the order in which they ended."""

    gain: NDArray[np.float64]
    """Mean of the candidate minus mean of the champion, from -1 to 1."""
    weight: NDArray[np.float64]
    """The inverse of the gain's variance, in units of the variance of an episode."""
    player: NDArray[np.intp]
    end: NDArray[np.intp]
    """The last episode."""


def _blocks(
    scaled: NDArray[np.float64], is_candidate: NDArray[np.bool_], players: NDArray[np.intp]
) -> _Blocks:
    """The complete blocks in which both bots played."""
    by_player = np.argsort(players, kind="stable")
    starts = np.searchsorted(players[by_player], players)
    place = np.empty(len(players), np.intp)
    place[by_player] = np.arange(len(players))
    place -= starts
    edges = np.cumsum(_BLOCKS)
    number = np.where(
        place < edges[-2],
        np.searchsorted(edges, place, side="right"),
        len(_BLOCKS) - 1 + (place - edges[-2]) // _BLOCKS[-1],
    )
    block_ids, block = np.unique(players * len(players) + number, return_inverse=True)
    sizes = np.array(_BLOCKS)[np.minimum(block_ids % len(players), len(_BLOCKS) - 1)]
    count = np.bincount(block)
    n_candidate = np.bincount(block, is_candidate)
    n_champion = count - n_candidate
    sums = [np.bincount(block, scaled * chosen) for chosen in (is_candidate, ~is_candidate)]
    end = np.zeros(len(count), np.intp)
    end[block] = np.arange(len(block))  # the last one stays
    (used,) = np.nonzero((count == sizes) & (n_candidate > 0) & (n_champion > 0))
    used = used[np.argsort(end[used])]
    n_candidate = n_candidate[used]
    n_champion = n_champion[used]
    return _Blocks(
        sums[0][used] / n_candidate - sums[1][used] / n_champion,
        n_candidate * n_champion / (n_candidate + n_champion),
        block_ids[used] // len(players),
        end[used],
    )


class _Bet:
    """A bet that one of the bots is better; each block's weight is fixed before its gain is seen.

    A player's weight is limited to a tenth, or to 2 / players if that is more. From ten players on,
    the tenth of them with the lowest mean so far has no weight, so that a few liars cannot prevent
    a proof; and the proof must also hold, with less confidence, without the tenth with the most
    evidence, whoever they are.
    """

    def __init__(self, blocks: _Blocks, sign: int, error: float) -> None:
        self._gain = sign * blocks.gain
        self._player = blocks.player
        self._error = error
        self._weight = blocks.weight.copy()
        self._is_fair = np.ones(len(self._gain), np.bool_)
        """Whether no player has more than the allowed weight."""
        used: dict[int, float] = {}
        all_used = 0.0
        most_used = 0.0
        means: dict[int, tuple[float, float]] = {}  # each player's mean gain, and its weight
        ranked: list[tuple[float, int]] = []  # the players by mean gain
        for at, (player, gain, weight) in enumerate(
            zip(blocks.player.tolist(), self._gain.tolist(), blocks.weight.tolist(), strict=True)
        ):
            mean, seen = means.get(player, (0.0, 0.0))
            means[player] = (mean + (gain - mean) * weight / (seen + weight), seen + weight)
            n_players = len(means)
            share = max(0.1, 2 / n_players)
            mine = used.get(player, 0.0)
            if share < 1:
                weight = min(weight, max(0.0, share / (1 - share) * (all_used - mine) - mine))
            if seen:
                rank = bisect.bisect_left(ranked, (mean, player))
                del ranked[rank]
                if rank < _n_liars(n_players):
                    weight = 0.0
            bisect.insort(ranked, (means[player][0], player))
            self._weight[at] = weight
            used[player] = mine + weight
            all_used += weight
            most_used = max(most_used, used[player])
            self._is_fair[at] = share >= 1 or most_used <= share * all_used * (1 + 1e-9)
        self._bets = np.minimum(self._weight[:, None] * _BETS, _MAX_BET)

    def first_proof(self, may_decide: NDArray[np.bool_]) -> int:
        """The first block after which the bet is won; the number of blocks without one."""
        growth = np.log1p(self._bets * self._gain[:, None])
        is_won = _capital(np.cumsum(growth, axis=0)) >= math.log(1 / self._error)
        for at in np.nonzero(is_won & may_decide & self._is_fair)[0].tolist():
            n_liars = _n_liars(len(set(self._player[: at + 1])))
            by_player = np.zeros((int(self._player.max()) + 1, len(_BETS)))
            np.add.at(by_player, self._player[: at + 1], growth[: at + 1])
            highest = np.sort(by_player, axis=0)[len(by_player) - n_liars :]
            honest = by_player.sum(axis=0) - np.maximum(highest, 0).sum(axis=0)
            if not n_liars or _capital(honest) >= math.log(1 / _ERROR_WITH_LIARS):
                return int(at)
        return len(self._gain)

    def interval(self, at: int) -> list[float]:
        """The lowest, mean and highest gain that the blocks up to one of them allow."""
        bets = self._bets[: at + 1]
        gain = self._gain[: at + 1]
        weight = self._weight[: at + 1]
        ends = []
        for sign in (1, -1):
            low = -1.0
            high = 1.0
            for _ in range(16):
                middle = (low + high) / 2
                excess = (sign * gain - middle) / (1 + max(middle, 0.0))
                growth = np.log1p(bets * excess[:, None]).sum(axis=0)
                if _capital(growth) >= math.log(1 / self._error):
                    low = middle
                else:
                    high = middle
            ends.append(sign * low)
        mean = float(weight @ gain / weight.sum()) if weight.any() else 0.0
        return [ends[0], mean, ends[1]]


def _capital(growth: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of the mean capital of all bets."""
    return np.asarray(np.logaddexp.reduce(growth, axis=-1) - math.log(len(_BETS)))
