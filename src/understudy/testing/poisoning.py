"""The poisoning suite: malicious players in simulated trials of the gate, and in recorded steps.

    trial = Trial(two_peaks, -0.1, n_players=30, n_malicious=3, attack="reward_lies")
    run_trials(trial, 100)                     ─► how many candidates the gate promoted
    poison(chunk, "thrown_games", spec, rng)   ─► the chunk as a malicious client would send it

Returns are on the scale on which random play is 0 and the best person is 1. A malicious player
favours one of the two bots in every episode, and knows which one plays:

    attack                in a trial                                 in recorded steps
    reward_lies           reports 100 for the favoured bot and       100 times the opposite reward
                          -100 for the other
    extreme_observations  shows the other bot false observations,    false observations, up to 1e19
                          so that it plays like random play
    thrown_games          lets the favoured bot win: it is as good   another action than the
                          as the best person                         player's
    sock_puppets          lies, under many names                     lies and other actions; the
                                                                     caller names the players
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, RowKind
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete, Space
from understudy.models.gate import Bounds, GateDecision, Played, compare
from understudy.ports import CANARY_BESIDE_CONTROL
from understudy.testing.samples import random_rows

Attack = Literal["reward_lies", "extreme_observations", "thrown_games", "sock_puppets"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)

LIE = 100.0
"""The false return on the scale: as large as it can be without being ignored as absurd."""
_LARGEST_EXPONENT = 19.0
"""Chunks with numbers above 1e20 are rejected by ingest."""

# --- Returns --------------------------------------------------------------------------------------

Returns = Callable[[np.random.Generator, float, Array, Array], Array]
"""Returns with a mean of `level` on the scale; given also the time of each episode, from 0 to 1,
and the skill of its player, from -1 to 1."""


def two_peaks(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """All or nothing, with some noise."""
    n = len(time)
    return np.where(rng.random(n) < level, rng.normal(1, 0.1, n), rng.normal(0, 0.05, n))


def heavy_tails(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """Student's t with 2 degrees of freedom."""
    return np.asarray(level + 0.15 * rng.standard_t(2, len(time)))


def constant(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """The same return in every episode."""
    return np.full(len(time), level)


def capped(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """Lengths of episodes that end at any step alike, and after 500: random play lasts 20."""
    means = np.geomspace(1, 1e6, 4_000)
    length = 20 + 480 * min(max(level, 0.0), 0.999)
    mean = means[np.searchsorted(means * -np.expm1(-500 / means), length)]
    lengths = np.minimum(500, np.ceil(rng.exponential(mean, len(time))))
    return np.asarray((lengths - 20) / 480)


def won_or_lost(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """Random play wins 10 % and the best person 90 %."""
    return np.asarray(((rng.random(len(time)) < 0.1 + 0.8 * level) - 0.1) / 0.8)


def drifting(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """Returns that rise by the whole scale during the trial."""
    return np.asarray(level - 0.5 + time + rng.normal(0, 0.25, len(time)))


def unequal_players(rng: np.random.Generator, level: float, time: Array, skill: Array) -> Array:
    """Returns that depend more on the player than on the bot."""
    return np.asarray(level + 0.6 * skill + rng.normal(0, 0.25, len(time)))


GAMES: tuple[Returns, ...] = (
    two_peaks,
    heavy_tails,
    constant,
    capped,
    won_or_lost,
    drifting,
    unequal_players,
)

# --- Trials of the gate ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """Simulated episodes of a candidate and a champion, some of them with malicious players."""

    game: Returns
    gain: float
    """How much better than the champion the candidate is."""
    _: KW_ONLY
    n_players: int
    n_malicious: int = 0
    """How many of the players are malicious."""
    attack: Attack = "reward_lies"
    favours_candidate: bool = True
    """Whether malicious players help the candidate; otherwise they help the champion."""
    malicious_plays: float = 1.0
    """How many times as often as the others each malicious player plays."""
    n_names: int = 10
    """Names under which each sock puppet's owner plays in turn."""
    share: float | None = None
    """The candidate's share of the episodes; None: it grows as the gate lets it."""
    level: float = 0.4
    """How well the champion plays."""
    control_gain: float | None = None
    """How much better than the champion the control is; None: there is none."""
    n_episodes: int = 2_000
    """Episodes of both bots together, in which the candidate must be decided."""

    def __post_init__(self) -> None:
        if not 0 <= self.n_malicious < self.n_players:
            raise ConfigError(
                f"n_malicious is {self.n_malicious} of {self.n_players} players; use a number from "
                "0 to one below n_players"
            )
        if self.attack not in ATTACKS:
            raise ConfigError(f"attack is {self.attack!r}; use one of {', '.join(ATTACKS)}")

    def decide(self, rng: np.random.Generator, bounds: Bounds | None = None) -> GateDecision:
        """The gate's decision about the candidate after one such trial."""
        bounds = bounds or Bounds()
        candidate, champion, earlier = self.episodes(rng, bounds)
        if self.control_gain is None:
            return compare(candidate, champion, bounds, earlier=earlier)
        beside, control = self.beside_control(rng, bounds)
        return compare([*candidate, *beside], champion, bounds, control=control, earlier=earlier)

    def beside_control(
        self, rng: np.random.Generator, bounds: Bounds
    ) -> tuple[list[Played], list[Played]]:
        """Episodes of the candidate and of the control, drawn among those of the trial."""
        share = bounds.control_share_beside(self.share or bounds.max_share)
        draws_share = share / (1 - CANARY_BESIDE_CONTROL)
        # Of all episodes, `n_episodes` are drawn between candidate and champion.
        is_drawn = rng.random(self.n_episodes) < draws_share / (1 - draws_share)
        started = np.nonzero(is_drawn)[0] + 0.5
        time = started / self.n_episodes
        player = rng.integers(self.n_players, size=len(started))
        skill = np.linspace(-1, 1, self.n_players)[player] if self.n_players > 1 else 0 * time
        is_candidate = rng.random(len(started)) < CANARY_BESIDE_CONTROL
        control_level = self.level + (self.control_gain or 0.0)
        returns = np.where(
            is_candidate,
            self.game(rng, self.level + self.gain, time, skill),
            self.game(rng, control_level, time, skill),
        )
        played: tuple[list[Played], list[Played]] = ([], [])
        for start, who, return_, own in zip(
            started.tolist(), player.tolist(), returns.tolist(), is_candidate.tolist(), strict=True
        ):
            propensity = CANARY_BESIDE_CONTROL if own else 1 - CANARY_BESIDE_CONTROL
            played[0 if own else 1].append(
                Played(int(start), start, return_, f"player-{who}", 0, propensity)
            )
        return played

    def episodes(
        self, rng: np.random.Generator, bounds: Bounds | None = None
    ) -> tuple[list[Played], list[Played], list[Played]]:
        """Episodes of the candidate, of the champion, and of people before the trial."""
        bounds = bounds or Bounds()
        time = np.linspace(0, 1, self.n_episodes)
        weights = np.where(np.arange(self.n_players) < self.n_malicious, self.malicious_plays, 1.0)
        player = rng.choice(self.n_players, self.n_episodes, p=weights / weights.sum())
        skill = np.linspace(-1, 1, self.n_players)[player] if self.n_players > 1 else 0 * time
        shares = [
            bounds.share_after(at) if self.share is None else self.share
            for at in range(self.n_episodes)
        ]
        is_candidate = rng.random(self.n_episodes) < np.array(shares)
        returns = np.where(
            is_candidate,
            self.game(rng, self.level + self.gain, time, skill),
            self.game(rng, self.level, time, skill),
        )
        if self.n_malicious:
            is_favoured = is_candidate == self.favours_candidate
            falsified = self._falsified(rng, returns, is_favoured, time, skill)
            returns = np.where(player < self.n_malicious, falsified, returns)
        name_no = np.arange(self.n_episodes) % self.n_names
        played = [
            Played(at, float(at), return_, self._name(who, number), 0, share if own else 1 - share)
            for at, (who, number, return_, own, share) in enumerate(
                zip(
                    player.tolist(),
                    name_no.tolist(),
                    returns.tolist(),
                    is_candidate.tolist(),
                    shares,
                    strict=True,
                )
            )
        ]
        by_candidate = is_candidate.tolist()
        return (
            [episode for episode, own in zip(played, by_candidate, strict=True) if own],
            [episode for episode, own in zip(played, by_candidate, strict=True) if not own],
            self._earlier(rng),
        )

    def _falsified(
        self,
        rng: np.random.Generator,
        returns: Array,
        is_favoured: Array,
        time: Array,
        skill: Array,
    ) -> Array:
        """The returns as they would be if all players were malicious."""
        match self.attack:
            case "extreme_observations":
                return np.where(is_favoured, returns, self.game(rng, 0.0, time, skill))
            case "thrown_games":
                return np.where(is_favoured, self.game(rng, 1.0, time, skill), returns)
            case _:
                return np.where(is_favoured, LIE, -LIE)

    def _earlier(self, rng: np.random.Generator) -> list[Played]:
        """Forty episodes each of people from random play to the best person.

        Malicious ones lie there, too: half of their returns are far above the range, half below.
        """
        n_people = max(5, self.n_players)
        none = np.zeros(40)
        earlier = []
        for person, level in enumerate(np.linspace(0, 1, n_people).tolist()):
            returns = self.game(rng, level, none, none)
            if person < self.n_malicious and self.attack in ("reward_lies", "sock_puppets"):
                returns = np.where(np.arange(40) % 2, LIE, -LIE)
            earlier += [
                Played(at, 0.0, return_, self._name(person, at % self.n_names))
                for at, return_ in enumerate(returns.tolist())
            ]
        return earlier

    def _name(self, player: int, name_no: int) -> str:
        has_many = self.attack == "sock_puppets" and player < self.n_malicious
        return f"player-{player}-{name_no}" if has_many else f"player-{player}"


@dataclass(frozen=True, slots=True)
class TrialCounts:
    """What the gate decided in many trials."""

    promoted: int
    rejected: int
    """Proven worse."""
    undecided: int
    """Neither proven better nor worse within the trial's episodes."""
    promoted_after: tuple[int, ...]
    """Episodes of both bots that each promotion needed."""

    def __str__(self) -> str:
        after = f" after {int(np.median(self.promoted_after))} episodes" if self.promoted else ""
        return (
            f"{self.promoted} promoted{after}, {self.rejected} rejected, {self.undecided} undecided"
        )


def run_trials(
    trial: Trial, count: int, *, seed: int = 0, bounds: Bounds | None = None
) -> TrialCounts:
    """Simulate a trial so many times, and count the gate's decisions."""
    rng = np.random.default_rng(seed)
    decisions = [trial.decide(rng, bounds) for _ in range(count)]
    promoted_after = tuple(
        decision.n_episodes for decision in decisions if decision.decision == "promote"
    )
    rejected = sum(decision.why.startswith("worse") for decision in decisions)
    return TrialCounts(
        len(promoted_after), rejected, count - len(promoted_after) - rejected, promoted_after
    )


# --- Recorded steps -------------------------------------------------------------------------------


def poison(chunk: Chunk, attack: Attack, spec: GameSpec, rng: np.random.Generator) -> Chunk:
    """Return the chunk as a malicious client would send it; ingest accepts it.

    Sock puppets lie and choose other actions; that they have many names is up to the caller.
    """
    columns = dict(chunk.columns)
    is_step = columns["row"] == RowKind.STEP
    if attack in ("reward_lies", "sock_puppets"):
        columns["reward"] = (-LIE * columns["reward"]).astype(np.float32)
    if attack == "extreme_observations":
        for name, space in spec.obs_columns.items():
            columns[name] = _extreme(space, len(is_step), rng)
    if attack in ("thrown_games", "sock_puppets"):
        for name, space in spec.action_columns.items():
            action = _other_action(space, columns[name], columns.get("action_mask"), rng)
            is_mine = is_step.reshape(-1, *[1] * (action.ndim - 1))
            columns[name] = np.where(is_mine, action, columns[name]).astype(space.dtype)
            columns.pop(f"raw_{name}", None)
        columns.pop("logp", None)
    return Chunk(replace(chunk.meta), columns).validate()


def _extreme(space: Space, n_rows: int, rng: np.random.Generator) -> Array:
    """Rows that a space's type can hold, of sizes from 1 to 1e19 where it has floats."""
    if space.dtype.kind != "f":
        return random_rows(space, n_rows, rng)
    shape = (n_rows, *space.shape)
    sizes = 10 ** rng.uniform(0, _LARGEST_EXPONENT, shape) * rng.choice([-1.0, 1.0], shape)
    largest = float(np.finfo(space.dtype).max)
    extreme: Array = np.clip(sizes, -largest, largest).astype(space.dtype)
    return extreme


def _other_action(space: Space, action: Array, mask: Any, rng: np.random.Generator) -> Array:
    """Another valid action than each of these, if there is one; for floats, the opposite one."""
    if isinstance(space, Discrete):
        number = action.astype(np.int64) - space.start
        is_valid = np.ones((len(action), space.n), np.bool_) if mask is None else mask
        is_other = is_valid & (np.arange(space.n) != number[:, None])
        chosen = np.where(is_other, rng.random(is_other.shape), -1.0).argmax(axis=1)
        return np.where(is_other.any(axis=1), chosen, number) + space.start
    if isinstance(space, Box) and space.dtype.kind == "f":
        low, high = (end.astype(np.float64) for end in space.ends())
        centre = np.zeros(space.shape)
        is_bounded = np.isfinite(low) & np.isfinite(high)
        centre[is_bounded] = low[is_bounded] + high[is_bounded]
        return np.clip(centre - action, low, high)
    return random_rows(space, len(action), rng)
