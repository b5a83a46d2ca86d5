"""The schedule by which a game's bots come to be: cloned from people first, then learned, each let
out by the gate.

    people's steps ─► bc ─► first bot ─► (one discrete action) dqn ─► candidate ─► gate ─► ...
                                         (any other action)    bc  ─► candidate ─► gate ─► ...

What to do next is a pure function of where a game stands, so that it can be tested, and shown to
people.
"""

from dataclasses import dataclass
from typing import Literal

from understudy.core.errors import ConfigError

Action = Literal["wait", "train", "release"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSchedule:
    """When a game's bots are trained and released."""

    first_steps: int = 1_000
    """Steps of people who allow it, before their first clone."""
    bc_updates: int = 2_048
    """Updates before a clone is released."""
    bc_growth: float = 1.5
    """Where clones are all there is: how much more people must have played before the next one."""
    dqn_updates: int = 2_048
    """Updates between two candidates."""
    dqn_steps: int = 2_000
    """New steps between two candidates."""
    updates_per_step: float = 1.0
    """How far training may run ahead of what was played; then it waits for new steps."""

    def __post_init__(self) -> None:
        for name in ("first_steps", "bc_updates", "dqn_updates", "dqn_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a whole number from 1")
        if self.bc_growth <= 1 or self.updates_per_step <= 0:
            raise ConfigError(
                f"bc_growth is {self.bc_growth}, updates_per_step {self.updates_per_step}; give "
                "numbers above 1 and 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """Where a game stands: all that the schedule looks at."""

    algorithm: str
    has_champion: bool
    """Whether a bot plays that was made for what is recorded now."""
    has_canary: bool
    usable_steps: int = 0
    """Steps that may be learned from now; for bc those of people."""
    steps: int = 0
    """Steps ever taken in."""
    updates: int = 0
    released_steps: int = 0
    """`steps` (for bc `usable_steps`) when the last candidate was released."""
    released_updates: int = 0


@dataclass(frozen=True, slots=True)
class Next:
    """What to do now, and why, in words for people."""

    action: Action
    why: str


def algorithm_for(*, is_discrete: bool, has_champion: bool) -> str:
    """What a game is learned with."""
    return "dqn" if is_discrete and has_champion else "bc"


def next_action(now: LearnerStatus, schedule: LearningSchedule) -> Next:
    """The next piece of work."""
    return _next_clone(now, schedule) if now.algorithm == "bc" else _next_candidate(now, schedule)


def _next_clone(now: LearnerStatus, schedule: LearningSchedule) -> Next:
    wanted = schedule.first_steps
    if now.has_champion and now.released_steps:
        wanted = max(wanted, int(now.released_steps * schedule.bc_growth))
    if now.usable_steps < wanted:
        return Next(
            "wait",
            f"{now.usable_steps} of {wanted} steps of people who allow it, then a clone is trained",
        )
    if now.has_canary:
        return Next("wait", "the canary is being judged")
    if now.updates < (due := now.released_updates + schedule.bc_updates):
        return Next(
            "train",
            f"cloning {now.usable_steps} steps: {now.updates} of {due} updates, then it is "
            "released",
        )
    return Next("release", "the clone is trained")


def _next_candidate(now: LearnerStatus, schedule: LearningSchedule) -> Next:
    due_updates = now.released_updates + schedule.dqn_updates
    due_steps = now.released_steps + schedule.dqn_steps
    is_due = now.updates >= due_updates and now.steps >= due_steps
    if is_due and not now.has_canary:
        return Next("release", "the candidate is trained")
    done, seen = (
        min(now.updates, due_updates),
        min(now.steps, due_steps),
    )  # one may be there long before the other
    says = (
        f"{done} of {due_updates} updates, {seen} of {due_steps} steps, then a candidate is "
        "released"
    )
    if is_due:
        says = (
            f"{now.updates} updates on {now.steps} steps; the canary is judged before the next "
            "candidate"
        )
    if now.usable_steps and now.updates < schedule.updates_per_step * now.steps:
        return Next("train", says)
    return Next("wait", f"waiting for new steps: {says}")


def written(schedule: LearningSchedule, *, is_discrete: bool) -> list[str]:
    """The schedule in words, a line for each phase."""
    then = (
        f"then dqn on what players and bots do: a candidate every {schedule.dqn_updates} updates "
        "and "
        f"{schedule.dqn_steps} new steps, which replaces the bot only through the gate"
    )
    if not is_discrete:
        then = (
            f"then bc again whenever people have played {schedule.bc_growth:g} times as much, "
            "through the gate "
            "(dqn needs one discrete action)"
        )
    return [f"from {schedule.first_steps} steps of people who allow it: bc, the first bot", then]
