"""The schedule of a game's bots: the first is cloned from people, later ones must pass the gate.

    1,000 steps of people ─► bc ─► first bot
    1.5 times as many ─► bc from new weights ─► candidate ─► gate, and so on
    20,000 steps of people and bots ─► iql from new weights ─► candidate ─► gate
    1.5 times as many ─► iql from new weights ─► candidate ─► gate, and so on

In games with few discrete actions and neither grids nor images, bc is trained beside iql, and the
candidate is the one of both that recorded steps rank first (`release/candidate_ranking.py`).

With `improve_with = "dqn"`, one training continues and releases a candidate from time to time. The
next action is a pure function of a game's status, so that it can be tested and displayed.
"""

import math
from dataclasses import dataclass
from typing import Literal

from understudy.core.errors import ConfigError

Action = Literal["wait", "train", "release"]
ALGORITHMS = ("iql", "dqn", "bc")
"""The algorithms that a game may be improved with; with bc, it is only cloned."""


MAX_FACTOR = 1_000
"""The largest growth, temperature and number of updates per step."""
MAX_COUNT = 10**12
"""The largest number of steps or updates."""
_PROMISING = 0.25
"""Evidence for a canary with which it is worth waiting for the rest of its comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSchedule:
    """When a game's bots are trained and released, and from whose steps."""

    first_steps: int = 1_000
    """Steps of people, with consent, that are needed for the first clone."""
    bc_updates: int = 2_048
    """Updates before a clone is released."""
    growth: float = 1.5
    """Factor by which the steps must grow before bc or iql restart from new weights."""
    improve_with: str = "iql"
    """The algorithm that is to play better than people: iql, dqn (discrete actions only), or bc
    for clones only."""
    improve_steps: int = 20_000
    """Steps of people and bots from which on it replaces bc."""
    iql_updates: int = 5_120
    """Updates before a candidate of iql is released."""
    ranking_updates: int = 3_072
    """Updates by which candidates of bc and iql are ranked on recorded steps; 0: no ranking."""
    dqn_updates: int = 2_048
    """Updates of dqn between two candidates."""
    dqn_steps: int = 2_000
    """New steps between two candidates of dqn."""
    updates_per_step: float = 1.0
    """Maximum number of updates of dqn per recorded step; beyond it, training waits for new
    steps."""
    temperature: float = 0.25
    """Temperature at which released bots of bc and iql choose: below 1, they make the random
    mistakes of people less often than people do."""
    people_share: float = 0.75
    """The least share of people's steps in what iql and dqn learn from; 0: as recorded, 1: only
    people's steps."""

    def __post_init__(self) -> None:
        for name in (
            "first_steps",
            "bc_updates",
            "improve_steps",
            "iql_updates",
            "dqn_updates",
            "dqn_steps",
        ):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; give a whole number from 1 to {MAX_COUNT}"
                )
        if self.ranking_updates < 0:
            raise ConfigError(
                f"ranking_updates is {self.ranking_updates}; give a whole number from 0"
            )
        if self.improve_with not in ALGORITHMS:
            raise ConfigError(
                f"improve_with is {self.improve_with!r}; give one of {', '.join(ALGORITHMS)}"
            )
        if not 0 <= self.people_share <= 1:
            raise ConfigError(
                f"people_share is {self.people_share}; give a number from 0 to 1, such as 0.75"
            )
        for name, low in (("growth", 1), ("updates_per_step", 0), ("temperature", 0)):
            number = getattr(self, name)
            if not low < number <= MAX_FACTOR:
                raise ConfigError(
                    f"{name} is {number}; give a number above {low} and at most {MAX_FACTOR}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """A game's status: the input of the schedule."""

    algorithm: str
    has_champion: bool
    """Whether there is a champion for the schema recorded now."""
    has_canary: bool
    canary_evidence: float = 0.0
    """How far the canary has come on the way to a proof that it is better: 1 is the proof."""
    may_judge_canary: bool = True
    """Whether the canary has played as many episodes as a decision needs."""
    usable_steps: int = 0
    """Steps available to learn from now; for bc only those of people."""
    steps: int = 0
    """Steps inserted into the replay so far, including those that have left it."""
    updates: int = 0
    released_steps: int = 0
    """`steps` when the last candidate was released."""
    released_updates: int = 0
    """`updates` at that time; 0 once bc or iql have restarted from new weights."""


@dataclass(frozen=True, slots=True)
class Next:
    """The next action, and a readable reason for it."""

    action: Action
    why: str
    missing_steps: int | None = 0
    """Steps that must still be recorded before the next candidate is trained; None: not known."""


def algorithm_for(
    schedule: LearningSchedule, *, is_discrete: bool, has_champion: bool, steps: int
) -> str:
    """The algorithm to train a game with next; `steps` are those of people and bots so far."""
    improves = has_champion and steps >= schedule.improve_steps
    if not improves or (schedule.improve_with == "dqn" and not is_discrete):
        return "bc"
    return schedule.improve_with


def next_action(status: LearnerStatus, schedule: LearningSchedule) -> Next:
    """What to do next for a game, and why."""
    if status.algorithm == "dqn":
        return _next_candidate(status, schedule)
    return _next_restart(status, schedule)


def _next_restart(status: LearnerStatus, schedule: LearningSchedule) -> Next:
    """The next action of bc or iql, which train each candidate from new weights.

    While a canary is compared with the champion, the steps must grow by `growth` squared for a
    clone: a comparison takes many episodes, and clones improve little. iql improves so much with
    more steps that its next candidate takes the canary's place, unless the canary is promising. A
    canary that cannot be judged yet keeps its place until the steps have grown by `growth` to the
    fourth: where episodes are long, none would ever be judged otherwise.
    """
    is_bc = status.algorithm == "bc"
    what = "clone" if is_bc else "candidate of iql"
    whose = "steps of people with consent" if is_bc else "steps with consent"
    steps = status.usable_steps
    due_steps = schedule.first_steps
    if steps >= due_steps and status.released_updates:
        # Includes steps that have left a full replay.
        steps = status.steps
        waits = status.has_canary and (is_bc or status.canary_evidence >= _PROMISING)
        power = 2 if waits else 1
        if status.has_canary and not status.may_judge_canary:
            power = 4
        factor = schedule.growth**power
        due_steps = max(status.released_steps + 1, math.ceil(status.released_steps * factor))
    if steps < due_steps:
        why = f"{steps} of {due_steps} {whose}, then a {what} is trained"
        return Next("wait", why, due_steps - steps)
    due_updates = schedule.bc_updates if is_bc else schedule.iql_updates
    if status.updates < due_updates or status.released_updates:
        updates = 0 if status.released_updates else status.updates
        return Next(
            "train",
            f"learning from {status.usable_steps} {whose}: {updates} of {due_updates} updates, "
            f"then the {what} is released",
        )
    return Next("release", f"the {what} is trained")


def _next_candidate(status: LearnerStatus, schedule: LearningSchedule) -> Next:
    due_updates = status.released_updates + schedule.dqn_updates
    due_steps = status.released_steps + schedule.dqn_steps
    is_due = status.updates >= due_updates and status.steps >= due_steps
    if is_due and not status.has_canary:
        return Next("release", "the candidate is trained")
    # Either count may be reached long before the other.
    updates = min(status.updates, due_updates)
    steps = min(status.steps, due_steps)
    why = (
        f"{updates} of {due_updates} updates, {steps} of {due_steps} steps, then a candidate is "
        "released"
    )
    if is_due:
        why = (
            f"{status.updates} updates on {status.steps} steps; the next candidate is released "
            "once the canary is decided"
        )
    missing_steps = due_steps - steps
    if status.usable_steps and status.updates < schedule.updates_per_step * status.steps:
        return Next("train", why, missing_steps)
    return Next("wait", f"waiting for new steps: {why}", missing_steps)


def schedule_text(schedule: LearningSchedule, *, is_discrete: bool, may_rank: bool) -> list[str]:
    """The schedule as text; `may_rank`: whether candidates of the game can be ranked."""
    later = (
        f"then bc again, from new weights, whenever people have played {schedule.growth:g} times "
        "as much; each clone replaces the bot only if it passes the gate"
    )
    lines = [
        f"after {schedule.first_steps} steps of people with consent: bc, the first bot",
        later,
    ]
    phase = f"from {schedule.improve_steps} steps of people and bots on: {schedule.improve_with}"
    if schedule.improve_with == "iql":
        lines.append(f"{phase} instead, in the same way")
        if may_rank and schedule.ranking_updates:
            lines.append(
                "before each release of iql, a clone (bc) is trained too, and "
                f"{schedule.ranking_updates} updates rank both on recorded steps: the best is "
                "released"
            )
    elif schedule.improve_with == "dqn" and is_discrete:
        lines.append(
            f"{phase} instead: a candidate every {schedule.dqn_updates} updates and "
            f"{schedule.dqn_steps} new steps, which replaces the bot only if it passes the gate"
        )
    return lines
