"""What a closed loop says at its end, to people and to programs."""

from dataclasses import fields
from typing import Any

from understudy.app.crowd.loop_result import LoopResult, NoBot
from understudy.app.verify import Verdict
from understudy.core.statistics import Estimate

COUNTS: dict[str, Any] = {field.name: 0 for field in fields(Verdict)} | {"corrupt": (), "live_writer": False}
VERDICT = Verdict(**COUNTS | {"steps": 120, "ledger_steps": 100})
NO_BOT = NoBot(max_seconds=75.0, seconds=134.2, kill=None, verdict=VERDICT, restarts=0)
RESULT = LoopResult(
    first=Estimate(-0.7, -0.7999999999999999, -0.6), last=Estimate(0.1, None, None), is_match=True, judged_on="serves",
    improved=True, verdict=VERDICT, model_versions=[1, 2], killed=None, restarts=0, seconds=60.1,
)  # fmt: skip


def test_numbers_have_as_many_digits_as_anybody_reads():
    told = RESULT.to_json()
    assert (told["first_share"], told["first_share_low"], told["first_low"]) == (0.15, 0.1, -0.8)
    assert told["last_low"] == told["last_high"] == told["last_return"] == 0.1


def test_a_loop_without_a_bot_tells_the_same_fields():
    told = NO_BOT.to_json()
    assert set(told) == set(RESULT.to_json())
    assert told["improved"] is False
    assert told["first_share"] is told["last_low"] is None
    assert (told["acked_steps"], told["stored_steps"], told["lost_steps"]) == (100, 120, 0)


def test_why_no_bot_came_is_said_with_what_was_asked_for():
    assert "within 75 s of play (134 s with starting up and ending);" in NO_BOT.why(None)
    assert "give --keep DIR and look" in NO_BOT.why(None)
    kept = NO_BOT.why("K")
    assert "--keep" not in kept
    assert kept.endswith("`understudy status --data K`")
    asked = NoBot(max_seconds=5, seconds=9.0, kill="learner", verdict=VERDICT, restarts=0)
    assert "so the learner was never killed" in asked.why(None)
