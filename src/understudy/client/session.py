"""Sessions in the client: consecutive episodes of one player and seat, and their rows."""

import random
import uuid
import warnings
from collections import deque
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any, Generic, SupportsFloat, TypeVar

from understudy.core.clock import Clock
from understudy.core.errors import Closed, Refused
from understudy.core.names import PlayerName, new_session, session_time_s
from understudy.experience.builder import Block, ChunkBuilder, RowLayout
from understudy.experience.game import GameSpec
from understudy.experience.session import DAY_S

MAX_AGE_S = DAY_S
"""Episodes join sessions up to this age, so that unsent steps are not too old once they arrive."""


class RecordingRate:
    """The share of episodes to record; steps of all other episodes are counted and discarded."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lock = Lock()
        self.due: deque[tuple[Session, float]] = deque()
        """As `Handoff.due`, of the sessions that are not recorded."""
        self.value = 1.0
        """The share, as in the platform's last response."""
        self.skipped_steps = 0
        """Discarded steps; `Sessions.skipped_steps` includes those still in builders."""
        self.reported_steps = 0
        """Skipped steps that were reported to the platform."""

    @property
    def unreported_steps(self) -> int:
        """The number of discarded steps that were not yet reported to the platform."""
        return self.skipped_steps - self.reported_steps

    def draw(self) -> bool:
        """Return whether to record the episode that starts now."""
        return self.value >= 1.0 or self._rng.random() < self.value

    def put(self, owner: object, block: Block) -> None:
        """Count and discard a block; the counterpart of `Handoff.put`."""
        with self._lock:
            self.skipped_steps += block.n_steps

    def abandon(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = Lock()


Owner = TypeVar("Owner")

HANDOFF_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Item(Generic[Owner]):
    """A block, its session, and how many blocks and steps of the session were dropped before it."""

    owner: Owner
    block: Block | None
    lost_blocks: int
    lost_steps: int


class Handoff(Generic[Owner]):
    """A queue of blocks from game threads to the sender, bounded in bytes.

    A `put` never waits. When the queue is full, because the sender's thread is starved or its disk
    hangs, the oldest blocks are dropped; the sender reports the loss.
    """

    def __init__(self, *, max_bytes: int = HANDOFF_BYTES) -> None:
        self._max_bytes = max_bytes
        self.filled = Event()
        """Set with every block; the sender sleeps on it."""
        self.due: deque[tuple[Owner, float]] = deque()
        """Owners that have had closed steps in their builder since a time, oldest first."""
        self._lock = Lock()
        self._items: deque[tuple[Owner, Block]] = deque()
        self._lost: dict[int, tuple[Owner, int, int]] = {}
        self.waiting_bytes = 0
        self.put_steps = 0
        """Steps put in so far, including dropped ones."""

    def put(self, owner: Owner, block: Block) -> None:
        """Queue a block; called under the owner's lock, so that its blocks stay in order."""
        with self._lock:
            self.put_steps += block.n_steps
            self._items.append((owner, block))
            self.waiting_bytes += block.size_bytes
            while self.waiting_bytes > self._max_bytes and len(self._items) > 1:
                oldest, dropped = self._items.popleft()
                self.waiting_bytes -= dropped.size_bytes
                _, blocks, steps = self._lost.get(id(oldest), (oldest, 0, 0))
                self._lost[id(oldest)] = (oldest, blocks + 1, steps + dropped.n_steps)
        if not self.filled.is_set():
            self.filled.set()

    def take(self) -> Item[Owner] | None:
        """Return the oldest block and the losses before it; losses alone if no block is left."""
        with self._lock:
            if self._items:
                owner, block = self._items.popleft()
                self.waiting_bytes -= block.size_bytes
                _, blocks, steps = self._lost.pop(id(owner), (owner, 0, 0))
                return Item(owner, block, blocks, steps)
            if self._lost:
                owner, blocks, steps = self._lost.pop(next(iter(self._lost)))
                return Item(owner, None, blocks, steps)
        return None


class RecordingWarning(UserWarning):
    """A game is not recorded as expected; warned once per kind, then counted in `game.stats()`."""


class Tolerance:
    """Handles invalid input: raises on the first decision, later counts it, warns once per kind."""

    __slots__ = ("bad_inputs", "decided", "ignored_calls", "last_bad_input", "strict", "warned")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.decided = False
        self.warned: set[tuple[str, str]] = set()
        """The reason codes, with what was lost, that a warning was issued for."""
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
        """Warn once for each reason and cost; call it last: warnings may be raised as errors."""
        if (error.reason, cost) not in self.warned:
            self.warned.add((error.reason, cost))
            warnings.warn(
                f"{cost} because of invalid input: {error}. Further input of this kind with this "
                "effect is only counted, in game.stats().bad_inputs, and the last one is "
                "last_bad_input; connect with config=ClientConfig(strict=True) to raise every "
                "error",
                RecordingWarning,
                stacklevel=4,
            )


LogEntry = tuple[bytes, Any, int, int, float] | SupportsFloat
"""A decision (observation and action as packed, by, frames, and when), or a reward."""


class Session:
    """One player's seat in one client: a lock, the rows being built, and whether it is in use."""

    __slots__ = (
        "_started_s",
        "builder",
        "clock",
        "ended",
        "handoff",
        "id",
        "idle_since_s",
        "is_due",
        "is_held",
        "lock",
        "log",
        "monotonic",
        "n_uses",
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
        """Guards the builder, and which list is the log."""
        self.log: list[LogEntry] = []
        """Decisions and rewards that are not in the builder yet, at most about a block of them.

        It belongs to the running episode, which appends to it without the lock, from its first
        decision until `detach`. The sender settles it with the steps that are due. If the session
        is not due after an append, the episode settles it itself, so that no step is forgotten.
        """
        self.ended = False
        """Whether later calls are ignored; set under the lock."""
        self.is_due = False
        """Whether the session is in the queue `due`."""
        self.is_held = False
        """Whether an episode or recorder uses the session now."""
        self.n_uses = 0
        """How often the session was acquired, so that late notices of earlier uses are ignored."""
        self.monotonic = clock.monotonic
        self._started_s = self.idle_since_s = clock.monotonic()
        builder.on_waiting = self._queue

    @property
    def is_recorded(self) -> bool:
        """Whether its episodes are recorded; if not, their steps are only counted."""
        return not isinstance(self.handoff, RecordingRate)

    def t_ms(self) -> int:
        """Milliseconds since the session began."""
        return int((self.monotonic() - self._started_s) * 1000)

    @property
    def waiting_steps(self) -> int:
        """The number of closed steps not yet submitted to the sender."""
        # Each decision in the log closes the step before it.
        return self.builder.closed_steps + sum(type(entry) is tuple for entry in self.log)

    @property
    def is_old(self) -> bool:
        """Whether the next episode needs a new session; platforms reject ids too old or ahead."""
        # By the wall clock, as the platform does: it advances while a machine sleeps and may be
        # set.
        return abs(self.clock.now() - session_time_s(self.id)) > MAX_AGE_S

    def _queue(self) -> None:
        if not self.is_due:
            self.is_due = True
            self.handoff.due.append((self, self.monotonic()))

    def settle(self) -> ChunkBuilder:
        """Move the log into the builder, and return that; called under the lock."""
        log = self.log
        builder = self.builder
        started_s = self._started_s
        for _ in range(len(log)):
            entry = log.pop(0)
            if not isinstance(entry, tuple):
                builder.add_reward(entry)
                continue
            obs, action, by, frames, now_s = entry
            if builder.decide_packed(obs, action, by, frames, int((now_s - started_s) * 1000)):
                self.submit()
        return builder

    def detach(self) -> None:
        """Settle the log, which belongs to no episode from then on; called under the lock."""
        self.settle()
        self.log = []

    def submit(self) -> None:
        """Pass the closed rows to the sender; called under the lock."""
        block = self.builder.take()
        if block is not None:
            self.handoff.put(self, block)

    def cut(self) -> None:
        """Cut the running episode after its last closed step; called under the lock."""
        self.detach()
        if self.builder.in_episode and self.builder.cut():
            self.submit()

    def submit_due(self, timeout_s: float) -> bool:
        """Submit the rows of a session in the queue `due`.

        Returns False if another call holds the session for longer than `timeout_s`.
        """
        if not self.lock.acquire(timeout=timeout_s):
            return False
        try:
            # In this order: an entry that comes too late for `settle` finds the session not due.
            self.is_due = False
            self.settle()
            self.submit()
        finally:
            self.lock.release()
        return True

    def end(self, timeout_s: float = -1) -> bool:
        """Cut the episode and submit all rows; nothing is recorded afterwards.

        Returns False, and changes nothing, if another call holds it for longer than `timeout_s`.
        """
        if not self.lock.acquire(timeout=timeout_s):
            return False
        try:
            self.cut()
            self.submit()
            self.ended = True
        finally:
            self.lock.release()
        return True


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
        self.layout = RowLayout(spec)
        self.handoff: Handoff[Session] = Handoff()
        self.recording_rate = RecordingRate(random.Random() if rng is None else rng)
        self._lock = Lock()
        self._live: dict[PlayerName, dict[uuid.UUID, Session]] = {}
        self._free: dict[_Slot, dict[uuid.UUID, Session]] = {}
        self._idle: deque[tuple[Session, float]] = deque()
        """Released sessions and when; stale if `idle_since_s` has changed."""
        self.abandoned: deque[tuple[Session, int]] = deque()
        """Sessions and uses whose episode or recorder was deleted without an end."""
        self.ended: deque[Session] = deque()
        """Ended sessions, all of whose blocks are in the handoff; the sender closes them."""
        self.n_live = 0
        """The number of open sessions."""
        self._closed: str | None = None

    def acquire(self, player: PlayerName, seat: int, *, is_recorded: bool = True) -> Session:
        """Return a free or new session for an episode or a recorder."""
        with self._lock:
            if self._closed:
                raise Closed(self._closed)
            session = self._take_free((player, seat, is_recorded))
            if session is None or session.is_old:
                if not self.n_live:
                    # Without sessions the sender sleeps for long; from now on it has steps to send.
                    self.handoff.filled.set()
                session = self._new(player, seat, is_recorded=is_recorded)
            session.is_held = True
            session.n_uses += 1
            return session

    def _take_free(self, slot: _Slot) -> Session | None:
        free = self._free.get(slot)
        if free is None:
            return None
        _, session = free.popitem()
        if not free:
            del self._free[slot]
        return session

    def _new(self, player: PlayerName, seat: int, *, is_recorded: bool) -> Session:
        builder = ChunkBuilder(
            self._spec,
            session=new_session(self._clock.now()),
            kind=self._kind,
            client=self._client,
            layout=self.layout,
        )
        handoff = self.handoff if is_recorded else self.recording_rate
        session = Session(builder, player=player, seat=seat, handoff=handoff, clock=self._clock)
        self._live.setdefault(player, {})[session.id] = session
        self.n_live += 1
        return session

    def release(self, session: Session) -> None:
        """Return a session; the next episode of the same player and seat reuses it."""
        with self._lock:
            # `end_player` removes sessions before it ends them.
            if not session.is_held or not self._is_live(session):
                return
            session.is_held = False
            session.idle_since_s = self._clock.monotonic()
            self._idle.append((session, session.idle_since_s))
            slot = (session.player, session.seat, session.is_recorded)
            self._free.setdefault(slot, {})[session.id] = session

    def renew(self, session: Session, *, is_recorded: bool) -> Session:
        """Replace a session that is too old, or whose recording flag changed, by another one."""
        fresh = self.acquire(session.player, session.seat, is_recorded=is_recorded)
        self.release(session)
        return fresh

    def release_abandoned(self) -> None:
        """Cut the episodes that the game deleted without ending them."""
        while self.abandoned:
            session, use = self.abandoned.popleft()
            if session.is_held and session.n_uses == use:
                with session.lock:
                    session.cut()
                self.release(session)

    def _is_live(self, session: Session) -> bool:
        return session.id in self._live.get(session.player, {})

    def live(self) -> list[Session]:
        with self._lock:
            return [session for sessions in self._live.values() for session in sessions.values()]

    @property
    def n_open(self) -> int:
        """The number of sessions held by an episode or a recorder."""
        return sum(session.is_held for session in self.live())

    def waiting_steps(self, *, is_recorded: bool) -> int:
        """The number of closed steps not yet submitted to the sender."""
        return sum(
            session.waiting_steps for session in self.live() if session.is_recorded == is_recorded
        )

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were played but not recorded."""
        return self.recording_rate.skipped_steps + self.waiting_steps(is_recorded=False)

    def retire(self, *, idle_s: float) -> None:
        """End the sessions that were free for at least `idle_s`."""
        until_s = self._clock.monotonic() - idle_s
        idle = []
        with self._lock:
            while self._idle and self._idle[0][1] <= until_s:
                session, since_s = self._idle.popleft()
                # It may be here twice, at one time if the clock stood still, or be removed by now.
                is_idle = not session.is_held and session.idle_since_s == since_s
                if is_idle and self._is_live(session):
                    self._remove(session)
                    idle.append(session)
        for session in idle:
            self.end(session)

    def end_player(self, player: PlayerName) -> int:
        """End every session of a player, cutting running episodes; returns how many."""
        with self._lock:
            sessions = list(self._live.get(player, {}).values())
            for session in sessions:
                self._remove(session)
        for session in sessions:
            self.end(session)
        return len(sessions)

    def close(self, reason: str) -> list[Session]:
        """Return every session for the caller to `end`; `acquire` raises Closed from now on."""
        with self._lock:
            self._closed = self._closed or reason
            sessions = [
                session for sessions in self._live.values() for session in sessions.values()
            ]
            self._live.clear()
            self._free.clear()
            self._idle.clear()
            self.n_live = 0
        return sessions

    def end(self, session: Session, *, timeout_s: float = -1) -> bool:
        """End a session that was removed from `live`; the sender closes it.

        Returns False, and changes nothing, if another call holds it for longer than `timeout_s`.
        """
        has_ended = session.end(timeout_s)
        if has_ended:
            self.ended.append(session)
        return has_ended

    def _remove(self, session: Session) -> None:
        sessions = self._live[session.player]
        del sessions[session.id]
        self.n_live -= 1
        if not sessions:
            del self._live[session.player]
        slot = (session.player, session.seat, session.is_recorded)
        if (free := self._free.get(slot)) is not None:
            free.pop(session.id, None)
            if not free:
                del self._free[slot]

    def abandon(self, reason: str) -> None:
        """Forget the parent's sessions in a forked child; their locks may never be released."""
        self._lock = Lock()
        self.recording_rate.abandon()
        self._closed = reason
        for sessions in self._live.values():
            for session in sessions.values():
                session.lock = Lock()
                session.log = []
                session.ended = True
        self._live.clear()
        self._free.clear()
