"""The schedule of a game's bots: the first is cloned from people, later ones must pass the gate.

    people's steps ─► bc ─► first bot ─► (one discrete action) dqn ─► candidate ─► gate ─► ...
                                         (any other action)    bc  ─► candidate ─► gate ─► ...

The next action is a pure function of a game's status, so that it can be tested and displayed.
"""

from dataclasses import dataclass
from typing import Literal

from understudy.core.errors import ConfigError

Action = Literal["wait", "train", "release"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSchedule:
    """When a game's bots are trained and released."""

    first_steps: int = 1_000
    """Steps of people, with consent, that are needed for the first clone."""
    bc_updates: int = 2_048
    """Updates before a clone is released."""
    bc_growth: float = 1.5
    """Factor by which people's steps must grow before the next clone; for games without dqn."""
    dqn_updates: int = 2_048
    """Updates between two candidates."""
    dqn_steps: int = 2_000
    """New steps between two candidates."""
    updates_per_step: float = 1.0
    """Maximum number of updates per recorded step; beyond it, training waits for new steps."""

    def __post_init__(self) -> None:
        for name in ("first_steps", "bc_updates", "dqn_updates", "dqn_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a whole number from 1")
        if self.bc_growth <= 1 or self.updates_per_step <= 0:
            raise ConfigError(
                f"bc_growth is {self.bc_growth} and updates_per_step {self.updates_per_step}; give "
                "a bc_growth above 1 and updates_per_step above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """A game's status: the input of the schedule."""

    algorithm: str
    has_champion: bool
    """Whether there is a champion for the schema recorded now."""
    has_canary: bool
    usable_steps: int = 0
    """Steps available to learn from now; for bc only those of people."""
    steps: int = 0
    """Steps inserted into the replay so far, including those that have left it."""
    updates: int = 0
    released_steps: int = 0
    """`steps` (for bc `usable_steps`) when the last candidate was released."""
    released_updates: int = 0


@dataclass(frozen=True, slots=True)
class Next:
    """The next action, and a readable reason for it."""

    action: Action
    why: str


def algorithm_for(*, is_discrete: bool, has_champion: bool) -> str:
    """The algorithm to train a game with next."""
    return "dqn" if is_discrete and has_champion else "bc"


def next_action(status: LearnerStatus, schedule: LearningSchedule) -> Next:
    """What to do next for a game, and why."""
    if status.algorithm == "bc":
        return _next_clone(status, schedule)
    return _next_candidate(status, schedule)


def _next_clone(status: LearnerStatus, schedule: LearningSchedule) -> Next:
    due_steps = schedule.first_steps
    if status.has_champion and status.released_steps:
        due_steps = max(due_steps, int(status.released_steps * schedule.bc_growth))
    if status.usable_steps < due_steps:
        return Next(
            "wait",
            f"{status.usable_steps} of {due_steps} steps of people with consent, then a clone is "
            "trained",
        )
    if status.has_canary:
        return Next("wait", "the canary is being compared with the champion")
    if status.updates < (due_updates := status.released_updates + schedule.bc_updates):
        return Next(
            "train",
            f"cloning {status.usable_steps} steps: {status.updates} of {due_updates} updates, then "
            "the clone is released",
        )
    return Next("release", "the clone is trained")


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
    if status.usable_steps and status.updates < schedule.updates_per_step * status.steps:
        return Next("train", why)
    return Next("wait", f"waiting for new steps: {why}")


def schedule_text(schedule: LearningSchedule, *, is_discrete: bool) -> list[str]:
    """The schedule as text, one line per phase."""
    later = (
        f"then dqn on the play of people and bots: a candidate every {schedule.dqn_updates} "
        f"updates and {schedule.dqn_steps} new steps, which replaces the bot only if it passes "
        "the gate"
    )
    if not is_discrete:
        later = (
            f"then bc again whenever people have played {schedule.bc_growth:g} times as much; each "
            "clone must pass the gate (dqn needs one discrete action)"
        )
    return [f"after {schedule.first_steps} steps of people with consent: bc, the first bot", later]
