"""Sessions on the game's side: the episodes that follow one another for one player and seat, and
their rows."""

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
"""An episode joins a session no older than this: what it records must still be fresh when it can
be sent at last."""


class RecordingRate:
    """Whole episodes are kept with the platform's `share`; the others are played into here,
    counted and forgotten."""

    def __init__(self, pool: BlockPool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._lock = Lock()
        self.share = 1.0
        """By the platform's last answer."""
        self.skipped_steps = 0
        """Played and not recorded; `Sessions.skipped_steps` knows of those too that are still
        with the game's side."""
        self.reported_steps = 0
        """Those of them that the platform has heard of."""

    def keeps(self) -> bool:
        """Whether the episode that begins now is recorded."""
        return self.share >= 1.0 or self._rng.random() < self.share

    def put(self, owner: object, block: Block) -> None:
        """What `Handoff.put` is to episodes that are kept."""
        with self._lock:
            self.skipped_steps += block.n_steps
        self._pool.give(block.columns)

    def abandon(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here."""
        self._lock = Lock()


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
    """Blocks on their way from game threads to the sender, in the order they were filled; bounded
    in blocks and bytes.

    When it is more than half full, whoever fills it gives way for half a millisecond per block, so
    that the sender gets to run beside a game that never rests; when it is full the oldest block
    makes room, takes a number and is reported.
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


class RecordingWarning(UserWarning):
    """Something of a game is not recorded as it should be; said once, then counted in
    `game.stats()`."""


class Tolerance:
    """What happens to input that cannot be recorded: raised on the first decision, later counted
    and warned once."""

    __slots__ = ("bad_inputs", "decided", "ignored_calls", "strict", "warned")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.decided = False
        self.warned = False
        self.bad_inputs = 0
        self.ignored_calls = 0

    def judge(self, error: Exception) -> Refused:
        """Count the error and hand it back as a refusal, or raise it when the game is still
        being written."""
        self.bad_inputs += 1
        may_go_on = self.decided and not self.strict
        self.decided = True
        if isinstance(error, Refused):
            if not may_go_on:
                raise error
            return error
        # Whatever a strange object raises inside NumPy must not stop a game that has been running.
        refused = Refused("bad_input", f"{type(error).__name__}: {str(error)[:120]}")
        if not may_go_on:
            raise refused from error
        return refused

    def warn(self, error: Refused) -> None:
        """Say it once, after the recording was brought in order."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"an episode is no longer recorded: {error}. Later ones are counted in "
                "game.stats().bad_inputs only; "
                "connect with strict=True to raise each",
                RecordingWarning,
                stacklevel=4,
            )


class Session:
    """One player's seat in one client: a lock, the rows being built, and whoever holds it now."""

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
        handoff: "Handoff[Session] | Keeping",
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
        """No call is recorded any more; set under the lock."""
        self.holder: Callable[[], object] | None = None
        """A weak reference to the episode or recorder that records into it now."""
        self._monotonic = clock.monotonic
        self._started_s = self.idle_since_s = clock.monotonic()

    @property
    def is_recorded(self) -> bool:
        """Whether its episodes are recorded; otherwise their steps are only counted."""
        return not isinstance(self.handoff, RecordingRate)

    def t_ms(self) -> int:
        """Milliseconds since the session began."""
        return int((self._monotonic() - self._started_s) * 1000)

    @property
    def is_old(self) -> bool:
        """Whether the next episode needs another session, since a door refuses ids from far back
        or ahead."""
        # As the door counts: by the wall clock, which goes on while a machine sleeps and may be
        # set.
        return abs(self.clock.now() - session_time_s(self.id)) > MAX_AGE_S

    @property
    def is_abandoned(self) -> bool:
        """Whether its episode was forgotten by the game without an end."""
        holder = self.holder
        return holder is not None and holder() is None

    def hand_over(self) -> None:
        """Pass the closed rows on; called under the lock."""
        block = self.builder.take()
        if block is not None:
            self.handoff.put(self, block)

    def cut(self) -> None:
        """Stop the running episode where it is known; called under the lock."""
        if self.builder.in_episode and self.builder.cut():
            self.hand_over()

    def end(self) -> None:
        """Cut and pass on everything; nothing is recorded afterwards."""
        with self.lock:
            self.cut()
            self.hand_over()
            self.ended = True


_Place = tuple[PlayerName, int, bool]
"""A player, a seat, and whether what they do is recorded."""


class Sessions:
    """Every session a client has open; free ones are reused by the next episode of the same
    player and seat."""

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
        self._free: defaultdict[_Place, list[Session]] = defaultdict(list)
        self._closed: str | None = None

    def acquire(self, player: PlayerName, seat: int, *, is_recorded: bool = True) -> Session:
        """A session nobody else holds, for an episode or a recorder."""
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
            session.holder = lambda: (
                True
            )  # held, until its episode or recorder is there to be referred to
            return session

    def release(self, session: Session) -> None:
        """Give a session back; the same player's next episode goes on in it."""
        with self._lock:
            if session.holder is None or session.ended:
                return
            session.holder = None
            session.idle_since_s = self._clock.monotonic()
            self._free[session.player, session.seat, session.is_recorded].append(session)

    def renew(self, session: Session, *, is_recorded: bool) -> Session:
        """Another session for the holder of one that is old or of another kind."""
        fresh = self.acquire(session.player, session.seat, is_recorded=is_recorded)
        fresh.holder = session.holder
        self.release(session)
        return fresh

    def live(self) -> list[Session]:
        with self._lock:
            return list(self._live.values())

    @property
    def n_open(self) -> int:
        """Sessions held by an episode or recorder now."""
        return sum(session.holder is not None for session in self.live())

    def waiting_steps(self, *, is_recorded: bool) -> int:
        """Closed steps that are still with the game's side."""
        return sum(
            session.builder.closed_steps
            for session in self.live()
            if session.is_recorded == is_recorded
        )

    @property
    def skipped_steps(self) -> int:
        """Steps that were played and not recorded, up to now."""
        return self.recording_rate.skipped_steps + self.waiting_steps(is_recorded=False)

    @property
    def unreported_steps(self) -> int:
        """Those of them that the platform has not heard of."""
        return max(0, self.skipped_steps - self.recording_rate.reported_steps)

    def retire(self, *, idle_s: float) -> list[Session]:
        """End sessions that were free for long; they are no longer live."""
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

    def close(self, why: str) -> list[Session]:
        """End every session; `acquire` raises Closed from now on."""
        with self._lock:
            self._closed = self._closed or why
            ended = list(self._live.values())
            self._live.clear()
            self._free.clear()
        for session in ended:
            session.end()
        return ended

    def abandon(self, why: str) -> None:
        """In a forked child: forget the parent's sessions without a trace; its locks may be held
        by nobody."""
        self._lock = Lock()
        self.recording_rate.abandon()
        self._closed = why
        for session in self._live.values():
            session.lock = Lock()
            session.ended = True
        self._live.clear()
        self._free.clear()
