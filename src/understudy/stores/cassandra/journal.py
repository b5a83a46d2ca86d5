"""The journal: every admin commit, kept at hand. It says what is gone, and what that means for a session."""

import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from understudy.core.frame import FrameKind
from understudy.core.names import session_time_s
from understudy.core.ports import Gone
from understudy.core.session import SessionState, admit, readmit, withdraw
from understudy.stores.cassandra.facts import ADMIN, Arrived, Commit, Event, Key
from understudy.stores.cassandra.reading import commits_between
from understudy.stores.cassandra.wire import Wire

if TYPE_CHECKING:
    from understudy.stores.cassandra.known import Stated

_LANE = "SELECT commit_no, events FROM lanes WHERE partition = ?"


class Journal:
    """Admin commits up to `head`; many threads may ask at once."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self.head = 0
        self.expired_before_s = 0
        """Data received before this is gone."""
        self.forgets: dict[bytes, tuple[int, float]] = {}
        """Per player: the newest admin commit that forgot them, and when."""
        self.replayed: set[int] = set()
        """Quarantine ids that were stored after all."""
        self._hidden: dict[Key, int] = {}
        self._effects: dict[bytes, list[tuple[int, Arrived | int]]] = {}
        """Per session: replayed frames, and steps of chunks that were taken out."""

    def refresh(self) -> int:
        """Read what came since; the number of the last admin commit."""
        row = self._wire.one(self._wire.bind(_LANE, ADMIN))
        return self.read_to(0 if row is None else row.commit_no)

    def read_to(self, number: int) -> int:
        """Read the admin commits up to a number that is committed."""
        with self._lock:
            if number > self.head:
                for commit in commits_between(self._wire, ADMIN, self.head, number):
                    self.apply(commit)
                self.head = number
            return self.head

    def apply(self, commit: Commit) -> None:
        """Take in one admin commit."""
        number, event = commit.tag.commit_no, commit.facts.event
        for one in commit.facts.stored:
            self.replayed.add(one.replays)
            self._effects.setdefault(one.session, []).append((number, one))
        if event is None:
            return
        if event.kind == "forget":
            before = self.forgets.get(event.player, (0, 0.0))
            self.forgets[event.player] = (number, max(event.at_s, before[1]))
        for session, chunk_no, n_steps in event.chunks:
            self._hidden[session, chunk_no] = number
            self._effects.setdefault(session, []).append((number, n_steps))

    def events(self, above: int) -> Iterator[tuple[Commit, Event]]:
        """Erasures behind a number, with their commits."""
        for commit in commits_between(self._wire, ADMIN, above, self.head):
            if commit.facts.event is not None:
                yield commit, commit.facts.event

    # --- what it means ------------------------------------------------------------------------------------------

    def gone(self, one: Arrived, events: int) -> Gone | None:
        """Why a frame can no longer be read that was stored when `events` admin commits were there."""
        if events < self.forgets.get(one.player, (0, 0.0))[0]:
            return "forgotten"
        if events < self._hidden.get(one.key, 0):
            return "quarantined"
        is_old = one.kind == FrameKind.DATA and one.received_s < self.expired_before_s
        return "expired" if is_old else None

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a player was erased after this session began, or after the frame came."""
        found = self.forgets.get(player)
        return found is not None and (session_time_s(session) <= found[1] or received_s < int(found[1]))

    def up_to_date(self, session: uuid.UUID, found: "Stated | None") -> "Stated | None":
        """A session's state with everything in it that was decided since it was written."""
        if found is None or found.events >= self.head:
            return found
        state = found.state
        for number, effect in self._effects.get(session.bytes, ()):
            if number > found.events:
                state = withdraw(state, effect) if isinstance(effect, int) else _stored(state, effect)
        if found.events < self.forgets.get(state.player, (0, 0.0))[0]:
            state = replace(state, forgotten=True)
        return replace(found, state=state, events=self.head)


def _stored(state: SessionState, one: Arrived) -> SessionState:
    after, verdict = admit(state, one.arrival())
    return readmit(state, one.arrival()) if verdict else after
