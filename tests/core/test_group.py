"""Group commit: many callers, few commits, and each caller receives its own result."""

import threading
from collections.abc import Sequence

import pytest

from understudy.core.log import GroupCommit


class Log:
    """Commits that can be blocked, and the groups they received."""

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
    """Submit each item from its own thread while the first commit is blocked, so the rest wait."""
    results: dict[int, object] = {}

    def submit(item: int) -> None:
        try:
            results[item] = group.submit(item)
        except ValueError as error:
            results[item] = error

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
    return results


def test_a_single_caller_does_not_wait():
    log = Log()
    assert group_of(log).submit(4) == 40
    assert log.groups == [[4]]


def test_waiting_callers_share_a_commit():
    log = Log()
    items = [1, 2, 3, 4, 5, 6]
    assert submit_all(group_of(log), items, log) == {item: item * 10 for item in items}
    assert [len(group) for group in log.groups] == [1, 5]


def test_a_commit_is_limited_in_size_but_has_at_least_one_item():
    log = Log()
    items = [1, 40, 50, 60, 300, 20]
    assert submit_all(group_of(log, most=100), items, log) == {item: item * 10 for item in items}
    assert all(sum(group) <= 100 or len(group) == 1 for group in log.groups)
    assert sorted(item for group in log.groups for item in group) == sorted(items)


def test_a_failed_commit_fails_exactly_its_own_items():
    log = Log()
    results = submit_all(group_of(log, most=10), [1, -2, 3, 9], log)
    assert results[1] == 10
    assert isinstance(results[-2], ValueError)
    failed = next(group for group in log.groups if -2 in group)
    assert all(isinstance(results[item], ValueError) == (item in failed) for item in results)
    assert group_of(log).submit(7) == 70


def test_the_alone_lock_waits_for_a_running_commit_and_blocks_the_next():
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


def test_a_failing_size_function_fails_its_own_caller_only():
    group = GroupCommit[int, int](lambda items: list(items), size=lambda item: 10 // item, most=10)
    with pytest.raises(ZeroDivisionError):
        group.submit(0)
    assert group.submit(2) == 2


def test_a_wrong_number_of_results_is_an_error():
    group = GroupCommit[int, int](lambda items: [], size=lambda _: 1, most=10)
    with pytest.raises(ValueError, match="zip"):
        group.submit(1)
