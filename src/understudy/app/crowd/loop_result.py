"""LoopResult, or NoBot: what a closed loop has shown, measured at its end."""

from dataclasses import dataclass
from typing import Any

from understudy.app.crowd.bot_judge import shares
from understudy.app.verify import Verdict
from understudy.core.statistics import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """The first and the last bot, and every acknowledgement against the stored bytes."""

    first: Estimate
    """Mean return of the first champion."""
    last: Estimate
    is_match: bool
    """Whether returns are points won and lost, which can be told as shares."""
    judged_on: str
    """In which episodes both were judged, in words."""
    improved: bool
    """The last bot's interval lies above the first one's."""
    verdict: Verdict
    model_versions: list[int]
    """Champions in the order they came."""
    killed: str | None
    restarts: int
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether it improved and nothing was lost or doubled."""
        return self.improved and not self.verdict.lost_steps and not self.verdict.duplicate_steps

    @property
    def shares(self) -> tuple[Estimate, Estimate] | None:
        """The shares of points that the first and the last bot won, in a match."""
        return (shares(self.first), shares(self.last)) if self.is_match else None

    def to_json(self) -> dict[str, Any]:
        won = self.shares or (None, None)
        return {
            **_flat("first_return", self.first), **_flat("last_return", self.last), "improved": self.improved,
            "judged_on": self.judged_on, **_counts(self.verdict), "model_versions": self.model_versions,
            "killed": self.killed, "restarts": self.restarts, "seconds": self.seconds,
            **_flat("first_share", won[0]), **_flat("last_share", won[1]),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBot:
    """A loop that ended before the first bot came."""

    max_seconds: float
    """How long people played."""
    seconds: float
    """Since the start, which takes a while on a busy machine."""
    kill: str | None
    """The role that would have been killed with the first bot there."""
    verdict: Verdict
    restarts: int

    def why(self, keep: str | None) -> str:
        """What happened and what to do, in words; `keep`: the folder that stays."""
        look = f"look at what is kept with `understudy status --data {keep or 'DIR'}`"
        said = f"no bot came within {self.max_seconds:g} s of play ({self.seconds:.0f} s with starting up and ending)"
        if self.kill:
            said += f", so the {self.kill} was never killed"
        return f"{said}; give more --seconds, or {look if keep else f'give --keep DIR and {look}'}"

    def to_json(self) -> dict[str, Any]:
        """The fields of a result; what was not measured is None."""
        return {
            **_flat("first_return", None), **_flat("last_return", None), "improved": False, "judged_on": None,
            **_counts(self.verdict), "model_versions": [], "killed": None, "restarts": self.restarts,
            "seconds": self.seconds, **_flat("first_share", None), **_flat("last_share", None),
        }  # fmt: skip


def _counts(verdict: Verdict) -> dict[str, int]:
    return {
        "acked_steps": verdict.ledger_steps, "stored_steps": verdict.steps,
        # Nothing but players' games sends anything here: neither the learner nor an actor plays.
        "steps_from_players": verdict.steps, "lost_steps": verdict.lost_steps,
        "duplicate_steps": verdict.duplicate_steps,
    }  # fmt: skip


def _flat(name: str, found: Estimate | None) -> dict[str, float | None]:
    """A measured value and its ends, in as many digits as anybody reads."""
    stem = name.removesuffix("_return")
    if found is None:
        return {name: None, f"{stem}_low": None, f"{stem}_high": None}
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    return {name: round(found.value, 4), f"{stem}_low": round(low, 4), f"{stem}_high": round(high, 4)}
