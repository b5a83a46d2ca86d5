"""How long a store elsewhere keeps chunks, where that was changed."""

import pytest

from understudy.stores.cassandra.keeping import SLACK_S, Keeping

DAY, CHANGED_S = 86_400, 1_800_000_000.0


@pytest.mark.parametrize(
    ("before", "after", "of_old", "of_new"),
    [(0, 7 * DAY, 0, 7 * DAY), (7 * DAY, 0, 7 * DAY, 0), (90 * DAY, DAY, 90 * DAY, DAY), (DAY, DAY, DAY, DAY)],
)
def test_what_was_committed_before_a_change_is_kept_as_it_was_meant_to(
    before: int, after: int, of_old: int, of_new: int
):
    keeping = Keeping(before).changed_to(after, now_s=CHANGED_S)
    assert (keeping.of(CHANGED_S - SLACK_S - 1), keeping.of(CHANGED_S + SLACK_S)) == (of_old, of_new)
    shortest = min((one for one in (before, after) if one), default=0)
    assert keeping.of(CHANGED_S) == shortest, "a change of all tables takes a while"


def test_the_shortest_time_of_before_is_remembered():
    keeping = Keeping(30 * DAY).changed_to(DAY, now_s=CHANGED_S).changed_to(0, now_s=CHANGED_S + 9 * DAY)
    assert keeping.of(CHANGED_S) == DAY
    assert keeping.of(CHANGED_S + 10 * DAY) == 0
