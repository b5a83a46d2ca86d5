"""A window: a local copy of a remote store that follows its tail, so learners read a local disk.

The last commit of each page of the tail stores the cursor after the page, so after kill -9 the copy
resumes at the first incomplete page; chunks that it already has are not stored twice. Chunks that
the remote store removes are removed here too.
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
"""Most sessions whose removed chunk numbers are remembered. They are needed only where more than
1,024 in a row were removed, because `admit` rejects the chunk after such a gap."""
_RETRY_PAUSE_S = 1.0
_BOUND_EVERY_S = 10.0
_NO_BODY = 0
"""The checksum of an empty body."""


class Window:
    """Copies a remote store into a folder that processes on this machine read as a local store."""

    def __init__(
        self,
        remote: ExperienceStore,
        folder: Path,
        *,
        specs: Specs | None = None,
        keep_s: float | None = None,
        max_steps: int | None = None,
        max_bytes: int | None = None,
        include: Callable[[ChunkMeta], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`keep_s`, `max_steps` and `max_bytes` limit the copy; None: no limit.

        The oldest chunks are removed first. `include` selects the chunks to copy; use the same one
        whenever this folder is opened.
        """
        for name, value in (("keep_s", keep_s), ("max_steps", max_steps), ("max_bytes", max_bytes)):
            if value is not None and not value > 0:
                raise ConfigError(
                    f"{name} of a window is {value}; use a number above 0, or omit it"
                )
        self._remote = remote
        self._clock = clock or SystemClock()
        self._keep_s = keep_s
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._include = include
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
        """Items of the remote tail that were copied since this window was opened."""
        self.is_cut = False
        """Whether the last page ended early because its chunks are large."""
        self.error = ""
        """Why copying fails now; empty while it works."""

    def _source(self) -> str:
        """The partition name of the cursor; ConfigError if the folder copies another store."""
        name = f"{_PARTITION}:{getattr(self._remote, 'identity', '')}"
        others = [partition for partition in self.local.positions() if partition != name]
        if others:
            raise ConfigError(
                f"the window in {self.local.folder} follows another store ({others[0]}, not "
                f"{name}); delete this folder, which is only a copy, or use another one"
            )
        return name

    def step(self, *, wait_s: float = 0.0) -> int:
        """Copy one page of the remote tail; return its number of items."""
        page = self._remote.tail(self._cursor, max_items=PAGE, wait_s=wait_s)
        if page.items:
            self._write_page(page.items, page.cursor)
            self.items += len(page.items)
        self._cursor = page.cursor
        self.is_cut = page.is_cut
        if self._clock.monotonic() >= self._next_bound_s:
            self._next_bound_s = self._clock.monotonic() + _BOUND_EVERY_S
            self.enforce_limits()
        return len(page.items)

    def run(self, stop: Event) -> None:
        """Repeat `step` until `stop`; retries if the remote is unreachable or the disk is full."""
        while not stop.is_set():
            try:
                self.step(wait_s=0.25)
                self.error = ""
            except (Unreachable, StorageFull) as error:
                self.error = str(error)
                _log.warning("window_waits", error=str(error), retry_in_s=_RETRY_PAUSE_S)
                self._clock.wait(stop, _RETRY_PAUSE_S)

    # --- one page ---------------------------------------------------------------------------------

    def _write_page(self, items: Sequence[Stored | Forgotten], cursor: Cursor) -> None:
        """Write a page in order, the cursor with its last commit; a crash repeats the page."""
        candidates: list[Candidate] = []
        for item in items:
            if isinstance(item, Stored):
                if (
                    self._include is not None
                    and item.chunk is not None
                    and not self._include(item.chunk.meta)
                ):
                    continue
                if placeholders := self._placeholders(item.frame):
                    self.local.write(
                        WriteBatch(self._partition, self._epoch, None, refused=placeholders)
                    )
                candidates.append(Candidate(item.frame, item.chunk))
            elif item.chunks and item.player is not None:
                # Remember removed numbers, in case their session continues.
                for session, number in item.chunks:
                    self._gone.setdefault(session, []).append((number, item.reason))
                    self._gone.move_to_end(session)
                while len(self._gone) > _MOST_GONE:
                    self._gone.popitem(last=False)
            elif item.chunks:
                # The event may name collected candidates, so write those first.
                self._write(candidates, None)
                candidates = []
                self.local.quarantine(item.chunks, reason=item.reason)
            elif item.player is not None:
                self._write(candidates, None)
                candidates = []
                self.local.forget_tombstone(item.player, at_s=item.at_s or None)
        self._write(candidates, Position(cursor))

    def _placeholders(self, following: Frame) -> list[RefusedFrame]:
        """Empty frames for the removed chunks before `following`, so that it is not rejected."""
        now_s = self._clock.now()
        placeholders: list[RefusedFrame] = []
        for number, reason in self._gone.pop(following.session, ()):
            placeholder = Frame(
                kind=FrameKind.DATA,
                session=following.session,
                chunk_no=number,
                body=b"",
                body_crc=_NO_BODY,
                player=following.player,
                received_s=following.received_s,
            )
            placeholders.append(
                RefusedFrame(placeholder.encode(), reason, "removed by the remote store", now_s)
            )
        return placeholders

    def _write(self, candidates: list[Candidate], position: Position | None) -> None:
        # Replay before the commit with the cursor: after a crash in between, the page is repeated.
        self._replay_returned(candidates)
        if candidates or position:
            self.local.write(WriteBatch(self._partition, self._epoch, position, candidates))

    def _replay_returned(self, candidates: Sequence[Candidate]) -> None:
        """Replay quarantined chunks that the remote has replayed, unless they have expired here."""
        lookup = self.local.lookup
        returned: dict[tuple[uuid.UUID, int], Candidate] = {}
        with disk("reading the window"):
            for candidate in candidates:
                frame = candidate.frame
                crcs = lookup.quarantined_crcs(frame.session.bytes, frame.chunk_no)
                if frame.body_crc in crcs and not lookup.is_stored(frame.session, frame.chunk_no):
                    returned[frame.session, frame.chunk_no] = candidate
        after = 0
        while returned and (page := self.local.quarantined(after_id=after)):
            after = page[-1].id
            matches = [
                (quarantined.id, returned[quarantined.session, quarantined.chunk_no])
                for quarantined in page
                if quarantined.session is not None
                and quarantined.chunk_no is not None
                and (quarantined.session, quarantined.chunk_no) in returned
            ]
            self.local.replay(
                [number for number, _ in matches], [candidate for _, candidate in matches]
            )

    # --- bounds -----------------------------------------------------------------------------------

    def enforce_limits(self) -> int:
        """Drop chunks beyond the limits; return how many were dropped."""
        before_s = 0.0 if self._keep_s is None else self._clock.now() - self._keep_s
        if self._max_steps is not None or self._max_bytes is not None:
            before_s = max(before_s, self._surplus_before_s())
        return self.local.expire(before_s) if before_s > 0 else 0

    def _surplus_before_s(self) -> float:
        """The time before which chunks must be removed; 0 if no limit is exceeded by over 10 %."""
        seconds = self.local.sizes()
        steps = sum(row[1] for row in seconds)
        size = sum(row[2] for row in seconds)
        if steps <= 1.1 * (self._max_steps or steps) and size <= 1.1 * (self._max_bytes or size):
            return 0.0
        steps = 0
        size = 0
        for number, (received, n_steps, n_bytes) in enumerate(seconds):
            steps += n_steps
            size += n_bytes
            if number and (steps > (self._max_steps or steps) or size > (self._max_bytes or size)):
                return float(received) + 1.0
        return 0.0

    def close(self) -> None:
        self.local.close()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
