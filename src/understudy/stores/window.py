"""A window: a local copy of a store elsewhere, filled by following its tail: learners sample from
their own disk.

Each page of the tail is written in one commit whose position is the cursor behind it: after kill -9
the copy goes on exactly where it was. What the remote store takes away is taken away here too.
"""

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import structlog

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, StorageFull, Unreachable
from understudy.experience.chunk import ChunkMeta
from understudy.experience.frame import Frame, FrameKind
from understudy.ports import (
    Candidate,
    Cursor,
    ExperienceStore,
    Forgotten,
    Gone,
    Position,
    RefusedFrame,
    Specs,
    Stored,
    WriteBatch,
)
from understudy.stores.database import disk
from understudy.stores.local import LocalStore

_log = structlog.get_logger("understudy.window")
_PARTITION = "remote"
PAGE = 512
_MOST_GONE = 65_536
"""Sessions whose gone numbers are remembered; they matter only where more than 1,024 are missing
in a row."""
_TROUBLE_S = 1.0
_BOUND_EVERY_S = 10.0
_NO_BODY = 0
"""The checksum of no bytes."""


class Window:
    """Follows a remote store into a folder, which anybody on this machine reads as a local
    store."""

    def __init__(
        self,
        remote: ExperienceStore,
        folder: Path,
        *,
        specs: Specs | None = None,
        keep_s: float | None = None,
        max_steps: int | None = None,
        max_bytes: int | None = None,
        wanted: Callable[[ChunkMeta], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`keep_s`, `max_steps`, `max_bytes`: how much is kept here, oldest out first; None: all
        the remote keeps.

        `wanted`: which chunks to copy at all; always the same for one folder.
        """
        for name, value in (("keep_s", keep_s), ("max_steps", max_steps), ("max_bytes", max_bytes)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} of a window is {value}; give a number above 0, or none")
        self._remote = remote
        self._clock = clock or SystemClock()
        self._keep_s = keep_s
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._wanted = wanted
        self.local = LocalStore(folder, specs=specs, clock=clock)
        try:
            self._partition = self._source()
            claim = self.local.claim(self._partition, owner="window", ttl_s=60.0)
        except BaseException:
            self.local.close()
            raise
        self._epoch = claim.epoch
        self._cursor = None if claim.position is None else Cursor(claim.position)
        self._next_bound_s = 0.0
        self._gone: OrderedDict[uuid.UUID, list[tuple[int, Gone]]] = OrderedDict()
        self.items = 0
        """Items of the tail that were taken since this was opened."""
        self.trouble = ""
        """Why it does not get on just now, for people; empty while it does."""

    def _source(self) -> str:
        """The name under which the cursor is kept; ConfigError when this folder follows another
        store."""
        name = f"{_PARTITION}:{getattr(self._remote, 'identity', '')}"
        if others := [one for one in self.local.positions() if one != name]:
            raise ConfigError(
                f"the window in {self.local.folder} follows another store ({others[0]}, not "
                f"{name}); remove it, "
                "which is only a copy, or give another one"
            )
        return name

    def step(self, *, wait_s: float = 0.0) -> int:
        """Take one page of the remote tail; how many items it had."""
        page = self._remote.tail(self._cursor, max_items=PAGE, wait_s=wait_s)
        if page.items:
            self._take(page.items, page.cursor)
            self.items += len(page.items)
        self._cursor = page.cursor
        if self._clock.monotonic() >= self._next_bound_s:
            self._next_bound_s = self._clock.monotonic() + _BOUND_EVERY_S
            self.bound()
        return len(page.items)

    def run(self, stop: Event) -> None:
        """Repeat `step` until told to stop; waits while the remote store does not answer, or
        this disk is full."""
        while not stop.is_set():
            try:
                self.step(wait_s=0.25)
                self.trouble = ""
            except (Unreachable, StorageFull) as error:
                self.trouble = str(error)
                _log.warning("window_waits", error=str(error), retry_in_s=_TROUBLE_S)
                self._clock.wait(stop, _TROUBLE_S)

    # --- one page ---------------------------------------------------------------------------------

    def _take(self, items: Sequence[Stored | Forgotten], cursor: Cursor) -> None:
        """Write a page in the order it came. Only its last commit carries the cursor; all of it
        may be repeated."""
        candidates: list[Candidate] = []
        for item in items:
            if isinstance(item, Stored):
                if (
                    self._wanted is not None
                    and item.chunk is not None
                    and not self._wanted(item.chunk.meta)
                ):
                    continue
                if traces := self._traces(item.frame):
                    self.local.write(WriteBatch(self._partition, self._epoch, None, refused=traces))
                candidates.append(Candidate(item.frame, item.chunk))
            elif item.chunks and item.player is not None:
                # Numbers that hold no bytes any more are remembered, in case their session goes on.
                for session, number in item.chunks:
                    self._gone.setdefault(session, []).append((number, item.reason))
                    self._gone.move_to_end(session)
                while len(self._gone) > _MOST_GONE:
                    self._gone.popitem(last=False)
            elif item.chunks:
                # Withdrawn after they came: what is at hand is written first.
                self._write(candidates, None)
                candidates = []
                self.local.quarantine(item.chunks, reason=item.reason)
            elif item.player is not None:
                self._write(candidates, None)
                candidates = []
                self.local.forget_tombstone(item.player, at_s=item.at_s or None)
        self._write(candidates, Position(cursor))

    def _traces(self, following: Frame) -> list[RefusedFrame]:
        """What is gone of a frame's session, as frames without a body: it counts as seen, so
        that the frame fits."""
        now_s = self._clock.now()
        traces: list[RefusedFrame] = []
        for number, reason in self._gone.pop(following.session, ()):
            trace = Frame(
                kind=FrameKind.DATA,
                session=following.session,
                chunk_no=number,
                body=b"",
                body_crc=_NO_BODY,
                player=following.player,
                received_s=following.received_s,
            )
            traces.append(RefusedFrame(trace.encode(), reason, "gone elsewhere", now_s))
        return traces

    def _write(self, candidates: list[Candidate], position: Position | None) -> None:
        # Before the commit that carries the cursor: after a crash between the two the page is taken
        # again.
        self._bring_back(candidates)
        if candidates or position:
            self.local.write(WriteBatch(self._partition, self._epoch, position, candidates))

    def _bring_back(self, candidates: Sequence[Candidate]) -> None:
        """Store what lies in quarantine here and was replayed there; what left by age stays
        away."""
        known = self.local.known
        wanted: dict[tuple[uuid.UUID, int], Candidate] = {}
        with disk("reading the window"):
            for candidate in candidates:
                frame = candidate.frame
                crcs = known.quarantined_crcs(frame.session.bytes, frame.chunk_no)
                if frame.body_crc in crcs and not known.is_stored(frame.session, frame.chunk_no):
                    wanted[frame.session, frame.chunk_no] = candidate
        after = 0
        while wanted and (page := self.local.quarantined(after_id=after)):
            after = page[-1].id
            found = [
                (one.id, wanted[one.session, one.chunk_no])
                for one in page
                if one.session is not None
                and one.chunk_no is not None
                and (one.session, one.chunk_no) in wanted
            ]
            self.local.replay(
                [number for number, _ in found], [candidate for _, candidate in found]
            )

    # --- bounds -----------------------------------------------------------------------------------

    def bound(self) -> int:
        """Drop what is too old or too much; how many chunks went."""
        before_s = 0.0 if self._keep_s is None else self._clock.now() - self._keep_s
        if self._max_steps is not None or self._max_bytes is not None:
            before_s = max(before_s, self._surplus_before_s())
        return self.local.expire(before_s) if before_s > 0 else 0

    def _surplus_before_s(self) -> float:
        """A time before which everything may go; 0 while there is not too much here. A tenth
        over is let pass."""
        seconds = self.local.sizes()
        steps = sum(row[1] for row in seconds)
        size = sum(row[2] for row in seconds)
        if steps <= 1.1 * (self._max_steps or steps) and size <= 1.1 * (self._max_bytes or size):
            return 0.0
        steps = size = 0
        for number, (received, n_steps, n_bytes) in enumerate(seconds):
            steps = steps + n_steps
            size = size + n_bytes
            if number and (steps > (self._max_steps or steps) or size > (self._max_bytes or size)):
                return float(received) + 1.0
        return 0.0

    def close(self) -> None:
        self.local.close()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
