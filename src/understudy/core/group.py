"""Group commit without a timer: whoever comes first writes for everyone who is waiting."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Waiting(Generic[Item, Result]):
    __slots__ = ("done", "error", "item", "result", "size")

    def __init__(self, item: Item, size: int) -> None:
        self.item = item
        self.size = size
        self.done = False
        self.result: Result | None = None
        self.error: BaseException | None = None


class GroupCommit(Generic[Item, Result]):
    """Turns concurrent `submit` calls into few `commit` calls; one sync serves all that waited for it."""

    def __init__(self, commit: Callable[[Sequence[Item]], Sequence[Result]], *, size: Callable[[Item], int], most: int):
        self._commit = commit
        self._size = size
        self._most = most
        self._waiting: deque[_Waiting[Item, Result]] = deque()
        self._leader = threading.Lock()

    def submit(self, item: Item) -> Result:
        """The commit's result for this item, once it is durable; its error when the commit failed."""
        mine: _Waiting[Item, Result] = _Waiting(item, self._size(item))
        self._waiting.append(mine)
        while not mine.done:
            # The lock's holder commits for everybody queued; the next holder usually finds its own item done.
            with self._leader:
                if not mine.done:
                    self._commit_waiting()
        if mine.error is not None:
            raise mine.error
        assert mine.result is not None
        return mine.result

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While inside, no commit runs; callers of `submit` wait."""
        with self._leader:
            yield

    def _commit_waiting(self) -> None:
        group = [self._waiting.popleft()]
        total = group[0].size
        while self._waiting and total + self._waiting[0].size <= self._most:
            group.append(self._waiting.popleft())
            total += group[-1].size
        try:
            for one, result in zip(group, self._commit([one.item for one in group]), strict=True):
                one.result = result
        except BaseException as error:
            for one in group:
                one.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for one in group:
                one.done = True
