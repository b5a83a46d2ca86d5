"""The hand-off between game threads and the sender: bounded in blocks and bytes.

When it is more than half full, whoever fills it gives way for half a millisecond per block, so that the sender gets to
run beside a game that never rests; when it is full the oldest block is dropped, takes a number and is reported.
"""

from collections import deque
from dataclasses import dataclass
from threading import Event, Lock
from typing import Generic, TypeVar

from understudy.core.block import Block, BlockPool
from understudy.core.clock import Clock

Owner = TypeVar("Owner")

_GIVE_WAY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Item(Generic[Owner]):
    """A block and its session; before it `lost_blocks` of the same session were dropped."""

    owner: Owner
    block: Block | None
    lost_blocks: int
    lost_steps: int


class Handoff(Generic[Owner]):
    """Blocks in the order they were filled; when full, the oldest makes room and is accounted to its session."""

    def __init__(
        self, pool: BlockPool, *, clock: Clock, max_blocks: int = 64, max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self._pool, self._clock = pool, clock
        self.filled = Event()
        """Set with every block; the sender sleeps on it."""
        self._never = Event()
        self._max_blocks = max(2, min(max_blocks, max_bytes // max(1, pool.set_bytes)))
        self._lock = Lock()
        self._items: deque[tuple[Owner, Block]] = deque()
        self._lost: dict[int, tuple[Owner, int, int]] = {}
        self.put_steps = 0
        """Steps handed over so far, dropped ones included."""

    def put(self, owner: Owner, block: Block) -> None:
        """Hand over a block; called under the owner's lock, so that its blocks keep their order."""
        dropped: Block | None = None
        with self._lock:
            self.put_steps += block.n_steps
            if len(self._items) >= self._max_blocks:
                loser, dropped = self._items.popleft()
                _, blocks, steps = self._lost.get(id(loser), (loser, 0, 0))
                self._lost[id(loser)] = (loser, blocks + 1, steps + dropped.n_steps)
            self._items.append((owner, block))
            n_waiting = len(self._items)
        if not self.filled.is_set():
            self.filled.set()
        if dropped is not None:
            self._pool.give(dropped.columns)
        if n_waiting * 2 > self._max_blocks:
            self._clock.wait(self._never, _GIVE_WAY_S)

    def take(self) -> Item[Owner] | None:
        """The oldest block with the losses before it; losses alone once nothing else waits."""
        with self._lock:
            if self._items:
                owner, block = self._items.popleft()
                _, blocks, steps = self._lost.pop(id(owner), (owner, 0, 0))
                return Item(owner, block, blocks, steps)
            if self._lost:
                owner, blocks, steps = self._lost.pop(next(iter(self._lost)))
                return Item(owner, None, blocks, steps)
        return None
