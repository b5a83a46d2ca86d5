"""Sessions in the client: consecutive episodes of one player and seat, and their rows."""

import random
import uuid
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock
from typing import Generic, TypeVar

from understudy.core.clock import Clock
from understudy.core.errors import Closed, Refused
from understudy.core.names import PlayerName, new_session, session_time_s
from understudy.experience.builder import Block, BlockPool, ChunkBuilder
from understudy.experience.game import GameSpec
from understudy.experience.session import DAY_S

MAX_AGE_S = DAY_S
"""Episodes join sessions up to this age, so that unsent steps are not too old once they arrive."""


class RecordingRate:
    """The share of episodes to record; steps of all other episodes are counted and discarded."""

    def __init__(self, pool: BlockPool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._lock = Lock()
        self.value = 1.0
        """The share, as in the platform's last response."""
        self.skipped_steps = 0
        """Discarded steps; `Sessions.skipped_steps` includes those still in open blocks."""
        self.reported_steps = 0
        """Skipped steps that were reported to the platform."""

    def draw(self) -> bool:
        """Return whether to record the episode that starts now."""
        return self.value >= 1.0 or self._rng.random() < self.value

    def put(self, owner: object, block: Block) -> None:
        """Count and discard a block; the counterpart of `Handoff.put`."""
        with self._lock:
            self.skipped_steps += block.n_steps
        self._pool.give(block.columns)

    def abandon(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = Lock()


Owner = TypeVar("Owner")

_YIELD_S = 0.0005


@dataclass(frozen=True, slots=True)
class Item(Generic[Owner]):
    """A block, its session, and how many blocks and steps of the session were dropped before it."""

    owner: Owner
    block: Block | None
    lost_blocks: int
    lost_steps: int


class Handoff(Generic[Owner]):
    """A queue of blocks from game threads to the sender, bounded in blocks and bytes.

    While it is more than half full, each `put` sleeps for half a millisecond, so that the sender
    gets to run beside a game that never pauses. When it is full, the oldest block is dropped;
    the sender reports the loss.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        clock: Clock,
        max_blocks: int = 64,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self.filled = Event()
        """Set with every block; the sender sleeps on it."""
        self._never = Event()
        self._max_blocks = max(2, min(max_blocks, max_bytes // max(1, pool.set_bytes)))
        self._lock = Lock()
        self._items: deque[tuple[Owner, Block]] = deque()
        self._lost: dict[int, tuple[Owner, int, int]] = {}
        self.put_steps = 0
        """Steps put in so far, including dropped ones."""

    def put(self, owner: Owner, block: Block) -> None:
        """Queue a block; called under the owner's lock, so that its blocks stay in order."""
        dropped: Block | None = None
        with self._lock:
            self.put_steps += block.n_steps
            if len(self._items) >= self._max_blocks:
                oldest, dropped = self._items.popleft()
                _, blocks, steps = self._lost.get(id(oldest), (oldest, 0, 0))
                self._lost[id(oldest)] = (oldest, blocks + 1, steps + dropped.n_steps)
            self._items.append((owner, block))
            n_waiting = len(self._items)
        if not self.filled.is_set():
            self.filled.set()
        if dropped is not None:
            self._pool.give(dropped.columns)
        if n_waiting * 2 > self._max_blocks:
            self._clock.wait(self._never, _YIELD_S)

    def take(self) -> Item[Owner] | None:
        """Return the oldest block and the losses before it; losses alone if no block is left."""
        with self._lock:
            if self._items:
                owner, block = self._items.popleft()
                _, blocks, steps = self._lost.pop(id(owner), (owner, 0, 0))
                return Item(owner, block, blocks, steps)
            if self._lost:
                owner, blocks, steps = self._lost.pop(next(iter(self._lost)))
                return Item(owner, None, blocks, steps)
        return None


class RecordingWarning(UserWarning):
    """A game is not recorded as expected; warned once a kind, then counted in `game.stats()`."""


class Tolerance:
    """Handles invalid input: raises on the first decision, later counts it, warns once a kind."""

    __slots__ = ("bad_inputs", "decided", "ignored_calls", "last_bad_input", "strict", "warned")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.decided = False
        self.warned: set[str] = set()
        """The reason codes that were warned of."""
        self.bad_inputs = 0
        self.last_bad_input = ""
        self.ignored_calls = 0

    def judge(self, error: Exception) -> Refused:
        """Count the error and return it as Refused; raise it on the first decision or if strict."""
        may_continue = self.decided and not self.strict
        self.decided = True
        # An unexpected error inside NumPy must not stop a game that has been running.
        refused = (
            error
            if isinstance(error, Refused)
            else Refused("bad_input", f"{type(error).__name__}: {str(error)[:120]}")
        )
        self.bad_inputs += 1
        self.last_bad_input = str(refused)
        if not may_continue:
            raise refused from (None if refused is error else error)
        return refused

    def warn(self, error: Refused, cost: str = "recording of this episode stopped") -> None:
        """Warn once for each reason code; called after what the input costs was done."""
        if error.reason not in self.warned:
            self.warned.add(error.reason)
            warnings.warn(
                f"{cost} because of invalid input: {error}. game.stats() counts further ones as "
                "bad_inputs, without a warning, and shows the last one as last_bad_input; connect "
                "with config=ClientConfig(strict=True) to raise each",
                RecordingWarning,
                stacklevel=4,
            )


class Session:
    """One player's seat in one client: a lock, the rows being built, and the current holder."""

    __slots__ = (
        "__weakref__",
        "_monotonic",
        "_started_s",
        "builder",
        "clock",
        "ended",
        "handoff",
        "holder",
        "id",
        "idle_since_s",
        "lock",
        "player",
        "seat",
    )

    def __init__(
        self,
        builder: ChunkBuilder,
        *,
        player: PlayerName,
        seat: int,
        handoff: "Handoff[Session] | RecordingRate",
        clock: Clock,
    ) -> None:
        self.id: uuid.UUID = builder.session
        self.builder = builder
        self.player = player
        self.seat = seat
        self.handoff = handoff
        self.clock = clock
        self.lock = Lock()
        self.ended = False
        """Whether later calls are ignored; set under the lock."""
        self.holder: Callable[[], object] | None = None
        """A weak reference to the episode or recorder that uses the session now."""
        self._monotonic = clock.monotonic
        self._started_s = self.idle_since_s = clock.monotonic()

    @property
    def is_recorded(self) -> bool:
        """Whether its episodes are recorded; if not, their steps are only counted."""
        return not isinstance(self.handoff, RecordingRate)

    def t_ms(self) -> int:
        """Milliseconds since the session began."""
        return int((self._monotonic() - self._started_s) * 1000)

    @property
    def is_old(self) -> bool:
        """Whether the next episode needs a new session; platforms reject ids too old or ahead."""
        # By the wall clock, as the platform does: it advances while a machine sleeps and may be
        # set.
        return abs(self.clock.now() - session_time_s(self.id)) > MAX_AGE_S

    @property
    def is_abandoned(self) -> bool:
        """Whether the game dropped its episode without ending it."""
        holder = self.holder
        return holder is not None and holder() is None

    def submit(self) -> None:
        """Pass the closed rows to the sender; called under the lock."""
        block = self.builder.take()
        if block is not None:
            self.handoff.put(self, block)

    def cut(self) -> None:
        """Cut the running episode after its last closed step; called under the lock."""
        if self.builder.in_episode and self.builder.cut():
            self.submit()

    def end(self) -> None:
        """Cut the episode and submit all rows; nothing is recorded afterwards."""
        with self.lock:
            self.cut()
            self.submit()
            self.ended = True


_Slot = tuple[PlayerName, int, bool]
"""A player, a seat, and whether the episodes are recorded."""


class Sessions:
    """All open sessions of a client; episodes of the same player and seat reuse free ones."""

    def __init__(
        self,
        spec: GameSpec,
        *,
        kind: str,
        client: str,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._spec = spec
        self._kind = kind
        self._client = client
        self._clock = clock
        self.pool = BlockPool(spec)
        self.handoff: Handoff[Session] = Handoff(self.pool, clock=clock)
        self.recording_rate = RecordingRate(self.pool, random.Random() if rng is None else rng)
        self._lock = Lock()
        self._live: dict[uuid.UUID, Session] = {}
        self._free: defaultdict[_Slot, list[Session]] = defaultdict(list)
        self._closed: str | None = None

    def acquire(self, player: PlayerName, seat: int, *, is_recorded: bool = True) -> Session:
        """Return a free or new session for an episode or a recorder."""
        with self._lock:
            if self._closed:
                raise Closed(self._closed)
            free = self._free[player, seat, is_recorded]
            session = free.pop() if free else None
            if session is None or session.is_old:
                builder = ChunkBuilder(
                    self._spec,
                    session=new_session(self._clock.now()),
                    kind=self._kind,
                    client=self._client,
                    pool=self.pool,
                )
                handoff = self.handoff if is_recorded else self.recording_rate
                session = Session(
                    builder, player=player, seat=seat, handoff=handoff, clock=self._clock
                )
                self._live[session.id] = session
            # Held until a reference to its episode or recorder replaces this.
            session.holder = lambda: True
            return session

    def release(self, session: Session) -> None:
        """Return a session; the next episode of the same player and seat reuses it."""
        with self._lock:
            if session.holder is None or session.ended:
                return
            session.holder = None
            session.idle_since_s = self._clock.monotonic()
            self._free[session.player, session.seat, session.is_recorded].append(session)

    def renew(self, session: Session, *, is_recorded: bool) -> Session:
        """Replace a session that is too old, or whose recording flag changed, by another one."""
        fresh = self.acquire(session.player, session.seat, is_recorded=is_recorded)
        fresh.holder = session.holder
        self.release(session)
        return fresh

    def live(self) -> list[Session]:
        with self._lock:
            return list(self._live.values())

    @property
    def n_open(self) -> int:
        """The number of sessions held by an episode or a recorder."""
        return sum(session.holder is not None for session in self.live())

    def waiting_steps(self, *, is_recorded: bool) -> int:
        """The number of closed steps not yet submitted to the sender."""
        return sum(
            session.builder.closed_steps
            for session in self.live()
            if session.is_recorded == is_recorded
        )

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were played but not recorded."""
        return self.recording_rate.skipped_steps + self.waiting_steps(is_recorded=False)

    @property
    def unreported_steps(self) -> int:
        """The number of skipped steps that were not yet reported to the platform."""
        return max(0, self.skipped_steps - self.recording_rate.reported_steps)

    def retire(self, *, idle_s: float) -> list[Session]:
        """End and return the sessions that were free for at least `idle_s`."""
        now_s = self._clock.monotonic()
        with self._lock:
            idle = [
                session
                for session in self._live.values()
                if session.holder is None and now_s - session.idle_since_s >= idle_s
            ]
            for session in idle:
                del self._live[session.id]
                key = (session.player, session.seat, session.is_recorded)
                if session in self._free[key]:
                    self._free[key].remove(session)
                if not self._free[key]:
                    del self._free[key]
        for session in idle:
            session.end()
        return idle

    def close(self, reason: str) -> list[Session]:
        """End and return every session; `acquire` raises Closed from now on."""
        with self._lock:
            self._closed = self._closed or reason
            ended = list(self._live.values())
            self._live.clear()
            self._free.clear()
        for session in ended:
            session.end()
        return ended

    def abandon(self, reason: str) -> None:
        """Forget the parent's sessions in a forked child; their locks may never be released."""
        self._lock = Lock()
        self.recording_rate.abandon()
        self._closed = reason
        for session in self._live.values():
            session.lock = Lock()
            session.ended = True
        self._live.clear()
        self._free.clear()
