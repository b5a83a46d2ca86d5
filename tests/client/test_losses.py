"""Drop reports: what was lost, as ranges of bounded number."""

from understudy.client.losses import Losses, merge
from understudy.core.names import new_session


def test_numbers_become_ranges():
    assert merge([5, 1, 2, 3, 9, 8, 3]) == ((1, 3), (5, 5), (8, 9))
    assert merge([]) == ()


def test_a_report_holds_at_most_1024_ranges_and_the_steps_once():
    losses = Losses()
    session = new_session(0.0)
    losses.add(session, range(0, 4000, 2), 7)
    losses.add(session, [4000], 1)
    reports = [report for _, report in losses.reports()]
    assert [(len(report.ranges), report.n_steps) for report in reports] == [(1024, 8), (977, 0)]
    assert list(losses.reports()) == []
