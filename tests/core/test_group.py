"""Group commit: many callers, few commits, and each gets its own answer."""

import threading
from collections.abc import Sequence

import pytest

from understudy.core.log import GroupCommit


class Log:
    """Commits that can be held up, and what they were given."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_inside = threading.Event()

    def commit(self, items: Sequence[int]) -> Sequence[int]:
        self.is_inside.set()
        assert self.may_go.wait(20.0)
        self.groups.append(list(items))
        if any(item < 0 for item in items):
            raise ValueError("negative")
        return [item * 10 for item in items]


def group_of(log: Log, *, most: int = 100) -> GroupCommit[int, int]:
    return GroupCommit(log.commit, size=lambda item: abs(item), most=most)


def submit_all(group: GroupCommit[int, int], items: Sequence[int], log: Log) -> dict[int, object]:
    """Submit from a thread each while the first commit is held up, so that the rest wait
    together."""
    found: dict[int, object] = {}

    def submit(item: int) -> None:
        try:
            found[item] = group.submit(item)
        except ValueError as error:
            found[item] = error

    log.may_go.clear()
    threads = [threading.Thread(target=submit, args=(item,)) for item in items]
    threads[0].start()
    assert log.is_inside.wait(20.0)
    for thread in threads[1:]:
        thread.start()
    while len(group._waiting) < len(items) - 1:
        threading.Event().wait(0.001)
    log.may_go.set()
    for thread in threads:
        thread.join(20.0)
    return found


def test_one_caller_is_served_at_once():
    log = Log()
    assert group_of(log).submit(4) == 40
    assert log.groups == [[4]]


def test_those_who_wait_share_a_commit():
    log = Log()
    items = [1, 2, 3, 4, 5, 6]
    assert submit_all(group_of(log), items, log) == {item: item * 10 for item in items}
    assert [len(group) for group in log.groups] == [1, 5]


def test_a_commit_takes_no_more_than_it_may_but_always_one():
    log = Log()
    items = [1, 40, 50, 60, 300, 20]
    assert submit_all(group_of(log, most=100), items, log) == {item: item * 10 for item in items}
    assert all(sum(group) <= 100 or len(group) == 1 for group in log.groups)
    assert sorted(item for group in log.groups for item in group) == sorted(items)


def test_a_failed_commit_fails_everybody_in_it_and_nobody_else():
    log = Log()
    found = submit_all(group_of(log, most=10), [1, -2, 3, 9], log)
    assert found[1] == 10
    assert isinstance(found[-2], ValueError)
    failed = next(group for group in log.groups if -2 in group)
    assert all(isinstance(found[item], ValueError) == (item in failed) for item in found)
    assert group_of(log).submit(7) == 70


def test_who_is_alone_waits_for_the_commit_that_runs_and_holds_up_the_next():
    log = Log()
    group = group_of(log)
    log.may_go.clear()
    first = threading.Thread(target=group.submit, args=(1,))
    first.start()
    assert log.is_inside.wait(20.0)
    threading.Timer(0.05, log.may_go.set).start()
    with group.alone:
        assert log.groups == [[1]], "it ran to its end before this began"
        second = threading.Thread(target=group.submit, args=(2,))
        second.start()
        second.join(0.05)
        assert log.groups == [[1]]
    second.join(20.0)
    first.join(20.0)
    assert log.groups == [[1], [2]]


def test_an_interrupt_reaches_the_caller_and_leaves_the_group_usable():
    calls: list[int] = []

    def commit(items: Sequence[int]) -> Sequence[int]:
        calls.append(len(items))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return list(items)

    group = GroupCommit(commit, size=lambda _: 1, most=10)
    with pytest.raises(KeyboardInterrupt):
        group.submit(1)
    assert group.submit(2) == 2


def test_a_size_that_cannot_be_told_fails_its_own_caller_only():
    group = GroupCommit[int, int](lambda items: list(items), size=lambda item: 10 // item, most=10)
    with pytest.raises(ZeroDivisionError):
        group.submit(0)
    assert group.submit(2) == 2


def test_results_that_do_not_match_are_an_error_not_a_mix_up():
    group = GroupCommit[int, int](lambda items: [], size=lambda _: 1, most=10)
    with pytest.raises(ValueError, match="zip"):
        group.submit(1)
