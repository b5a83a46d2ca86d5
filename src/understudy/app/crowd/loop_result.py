"""LoopResult: what a closed loop has shown, measured at its end."""

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
        verdict, won = self.verdict, self.shares or (None, None)
        return {
            **_flat("first", self.first), **_flat("last", self.last), "improved": self.improved,
            "judged_on": self.judged_on, "acked_steps": verdict.ledger_steps, "stored_steps": verdict.steps,
            # Nothing but players' games sends anything here: neither the learner nor an actor plays.
            "steps_from_players": verdict.steps, "lost_steps": verdict.lost_steps,
            "duplicate_steps": verdict.duplicate_steps, "model_versions": self.model_versions, "killed": self.killed,
            "restarts": self.restarts, "seconds": self.seconds,
            **_flat_share("first", won[0]), **_flat_share("last", won[1]),
        }  # fmt: skip


def _flat(which: str, found: Estimate) -> dict[str, float]:
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    return {f"{which}_return": found.value, f"{which}_low": low, f"{which}_high": high}


def _flat_share(which: str, won: Estimate | None) -> dict[str, float | None]:
    ends = (None, None, None) if won is None else (won.value, won.low, won.high)
    return dict(zip((f"{which}_share", f"{which}_share_low", f"{which}_share_high"), ends, strict=True))
