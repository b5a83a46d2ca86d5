"""One folder of the spool: the sessions of one process, and the log that they share.

All sessions of a process share the log. A file is deleted once every frame in it is done; if less
than half of it is left, the rest moves to the end of the log, so that a session which is never
acknowledged does not keep the frames of other sessions on disk.
"""

import contextlib
import errno
import os
import struct
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.client.spool_slots import SLOT_BYTES, Slot, read_slots, seal
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import (
    Corrupt,
    Locked,
    Refused,
    StorageFailed,
    StorageFull,
    UnderstudyError,
)
from understudy.core.log import FileLock, LogFile, LogReader, no_sync, remove
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame, FrameKind, decode_frame, read_drop
from understudy.experience.game import GameSpec, spec_from_json

ROLL_BYTES = 1024 * 1024

_GROUP_BYTES = 64 * 1024
"""Frames are written in groups of about this size; damage on disk costs the group."""
_FRAME = struct.Struct("<IIQH")
"""Before each frame of a group: its size, its steps, the session's steps so far, and the length
of the player's name, which follows."""
_SLOTS_PER_GROWTH = 64


@dataclass(frozen=True, slots=True)
class SpooledGame:
    """The spool.json of a folder."""

    game: str
    spec_json: str

    def spec(self) -> GameSpec:
        """Return the game's spec; SpecError if this version cannot read it."""
        return spec_from_json(self.spec_json)


def read_game(folder: Path) -> SpooledGame:
    """Read the spool.json of a folder; Corrupt if it is missing or damaged."""
    try:
        document = strict_json((folder / "spool.json").read_bytes())
        return SpooledGame(str(document["game"]), str(document["spec"]))
    except (OSError, UnderstudyError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"spool.json in {folder} is missing or damaged: {error!r}") from None


class SpoolFile:
    """One log file and the frames in it that must stay on disk."""

    __slots__ = ("entries", "live_bytes", "log", "path", "size_bytes")

    def __init__(self, path: Path, *, log: LogFile | None = None, size_bytes: int = 0) -> None:
        self.path = path
        self.log = log
        self.size_bytes = size_bytes
        self.entries: set[SpooledFrame] = set()
        self.live_bytes = 0

    def add(self, entry: "SpooledFrame") -> None:
        """Note that a frame is in this file."""
        self.entries.add(entry)
        self.live_bytes += entry.size_bytes

    def release(self, entry: "SpooledFrame") -> None:
        """Mark a frame as no longer needed in the file; does nothing the second time."""
        if entry in self.entries:
            self.entries.remove(entry)
            self.live_bytes -= entry.size_bytes


class SpooledFrame:
    """A frame waiting for its acknowledgement; `frame` stays in memory while there is space."""

    __slots__ = (
        "chunk_no",
        "file",
        "frame",
        "is_done",
        "kind",
        "n_steps",
        "offset",
        "size_bytes",
        "spool",
        "start",
        "steps_before",
        "tried",
    )

    def __init__(
        self, spool: "SessionSpool", frame: Frame, n_steps: int, *, steps_before: int
    ) -> None:
        self.spool = spool
        self.chunk_no = frame.chunk_no
        self.n_steps = n_steps
        self.steps_before = steps_before
        self.size_bytes = frame.size_bytes
        self.kind = frame.kind
        self.frame: Frame | None = frame
        self.file: SpoolFile | None = None
        """None while the frame is not on disk."""
        self.start = 0
        """Where its group starts in the file."""
        self.offset = 0
        """Where it starts in its group."""
        self.tried = False
        """Sent at least once, maybe by another process, so it may have arrived."""
        self.is_done = False

    @property
    def is_data(self) -> bool:
        return self.kind is FrameKind.DATA

    @property
    def total_steps(self) -> int:
        """The steps of the session up to and including this frame."""
        return self.steps_before + (self.n_steps if self.is_data else 0)


class SessionSpool:
    """The unacknowledged frames of one session."""

    __slots__ = (
        "_held",
        "_n_waiting",
        "_order",
        "folder",
        "has_ended",
        "is_adopted",
        "is_closing",
        "is_muted",
        "lost_numbers",
        "lost_steps",
        "n_steps",
        "next_no",
        "player",
        "session",
        "slot_no",
    )

    def __init__(
        self, folder: "SpoolFolder", session: uuid.UUID, player: PlayerName, *, slot_no: int
    ) -> None:
        self.session = session
        self.player = player
        self.folder = folder
        self.slot_no = slot_no
        self._order: deque[SpooledFrame] = deque()
        """Frames in the order of their numbers, from the first one that is not done."""
        self._n_waiting = 0
        self._held: tuple[int, int] | None = None
        """The first lost number without a drop report on disk, and the steps before it."""
        self.next_no = 0
        self.n_steps = 0
        """The total steps of all assigned numbers."""
        self.has_ended = False
        """The session gets no more data; once all its frames are done, a close frame follows."""
        self.is_adopted = False
        """Another process recorded the session."""
        self.is_closing = False
        """The close frame was added."""
        self.is_muted = False
        """The platform rejected a drop report or close, so no more reports are sent."""
        self.lost_numbers: list[int] = []
        """Numbers that a killed game assigned but never spooled."""
        self.lost_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether every frame is done."""
        return not self._n_waiting

    @property
    def spec(self) -> GameSpec:
        assert self.folder.spec is not None
        return self.folder.spec

    def add(self, frame: Frame, n_steps: int) -> SpooledFrame:
        """Spool a frame under the next number; it is on disk after the next `Spool.write`."""
        entry = SpooledFrame(self, frame, n_steps, steps_before=self.n_steps)
        self.next_no = frame.chunk_no + 1
        self.n_steps = entry.total_steps
        self._order.append(entry)
        self._n_waiting += 1
        self.folder.pending.append((entry, frame))
        return entry

    def skip(self, n_steps: int) -> int:
        """Assign the next number to steps that were dropped before they became a frame."""
        number = self.next_no
        self.next_no += 1
        self._hold(number, self.n_steps)
        self.n_steps += n_steps
        self.folder.changed.add(self.slot_no)
        return number

    def _hold(self, number: int, steps_before: int) -> None:
        """Remember a lost number without a drop report on disk, so that a restart finds the gap."""
        self._held = min(self._held or (number, steps_before), (number, steps_before))

    def unhold(self) -> None:
        """Forget the lost numbers if all drop reports are on disk or done."""
        if not any(
            entry.kind is FrameKind.DROP and entry.file is None and not entry.is_done
            for entry in self._order
        ):
            self._held = None

    def read(self, entry: SpooledFrame) -> Frame | None:
        """Return the entry's frame from memory or disk; None if its bytes are damaged."""
        return entry.frame or self.folder.read(entry)

    def done(self, entry: SpooledFrame, *, arrived: bool) -> None:
        """Mark an entry as acknowledged, rejected or dropped; `Spool.tidy` frees its space."""
        if entry.is_done:
            return
        entry.is_done = True
        entry.frame = None
        self._n_waiting -= 1
        self.folder.changed.add(self.slot_no)
        if entry.kind is FrameKind.DROP:
            self.unhold()
        elif entry.is_data and not arrived:
            self._hold(entry.chunk_no, entry.steps_before)
        if not arrived and entry.file is not None:
            entry.file.release(entry)
        # Frames acknowledged out of order stay on disk until all before them are done; a later
        # start must not consider them lost.
        while self._order and self._order[0].is_done:
            first = self._order.popleft()
            if first.file is not None:
                first.file.release(first)

    def slot(self) -> Slot:
        """Return the session's slot, as the next start reads it."""
        done_below = self.next_no
        done_steps = self.n_steps
        if self._order:
            done_below = self._order[0].chunk_no
            done_steps = self._order[0].steps_before
        if self._held is not None:
            done_below, done_steps = min((done_below, done_steps), self._held)
        return Slot(self.session, self.player, done_below, done_steps, self.next_no, self.n_steps)

    def release(self) -> None:
        """Release what the session has on disk."""
        for entry in self._order:
            if entry.file is not None:
                entry.file.release(entry)
        self._order.clear()
        self._n_waiting = 0

    def load(
        self, slot: Slot | None, entries: dict[int, SpooledFrame], dropped: set[int]
    ) -> list[SpooledFrame]:
        """Adopt the entries of a killed game; returns those to send.

        Without a slot, because it is damaged, everything before the first entry counts as done, and
        everything before a close frame.
        """
        self.is_adopted = True
        first = min(entries.values(), key=lambda entry: entry.chunk_no, default=None)
        if slot is not None:
            done_below = slot.done_below
            done_steps = slot.done_steps
            self.next_no = slot.next_no
            self.n_steps = slot.n_steps
        else:
            assert first is not None
            done_below = first.chunk_no
            done_steps = first.steps_before
        for number in sorted(entries):
            entry = entries[number]
            self.next_no = max(self.next_no, number + 1)
            self.n_steps = max(self.n_steps, entry.total_steps)
            self.is_closing = self.is_closing or entry.kind is FrameKind.CLOSE
            if number >= done_below:
                self._order.append(entry)
                self._n_waiting += 1
                assert entry.file is not None
                entry.file.add(entry)
        if slot is not None or not self.is_closing:
            self._find_lost(done_below, done_steps, dropped)
        for entry in [entry for entry in self._order if entry.chunk_no in dropped]:
            self.done(entry, arrived=False)
        self.has_ended = True
        # Drop reports first: without them, numbers after a long gap would be too far ahead to be
        # accepted.
        return sorted(
            (entry for entry in self._order if not entry.is_done),
            key=lambda entry: (entry.kind is not FrameKind.DROP, entry.chunk_no),
        )

    def _find_lost(self, done_below: int, done_steps: int, dropped: set[int]) -> None:
        known = dropped | {entry.chunk_no for entry in self._order}
        self.lost_numbers = [n for n in range(done_below, self.next_no) if n not in known]
        if self.lost_numbers:
            first = self.lost_numbers[0]
            before = sum(entry.n_steps for entry in self._order if entry.chunk_no < first)
            self._hold(first, done_steps + before)
            spooled = sum(entry.n_steps for entry in self._order if entry.is_data)
            self.lost_steps = max(0, self.n_steps - done_steps - spooled)


class SpoolFolder:
    """The sessions of one process, and the log that they share, in a locked folder."""

    def __init__(
        self,
        path: Path,
        spec: GameSpec | None,
        *,
        lock: FileLock | None = None,
        roll_bytes: int = ROLL_BYTES,
    ) -> None:
        self.path = path
        self.spec = spec
        self._lock = lock
        self._is_open = lock is not None
        self._roll_bytes = roll_bytes
        self.sessions: dict[uuid.UUID, SessionSpool] = {}
        self._slots: list[SessionSpool | None] = []
        self._free_slots: list[int] = []
        self._n_slots_on_disk = 0
        self.is_damaged = False
        """Whether the file `sessions` was damaged when this folder was loaded."""
        self._must_replace = False
        self.changed: set[int] = set()
        """Slots whose contents on disk are outdated."""
        self._unsaved: set[int] = set()
        """Slots of sessions that are not on disk yet; they are written before any frame is."""
        self.pending: list[tuple[SpooledFrame, Frame]] = []
        """Frames to write: new ones, and those that move to the end of the log."""
        self._files: list[SpoolFile] = []
        self._writing: SpoolFile | None = None
        self._next_file = 1
        self._group: tuple[SpoolFile, int, bytes] | None = None
        """The group that was read last."""
        self.error = ""
        """Why the last write failed; empty if it did not."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, including done frames in files that still exist."""
        return sum(file.size_bytes for file in self._files)

    def create(self, session: uuid.UUID, player: PlayerName) -> SessionSpool:
        """Return a new session; it is on disk with its first frame."""
        slot_no = self._free_slots.pop() if self._free_slots else len(self._slots)
        if slot_no == len(self._slots):
            self._slots.append(None)
        spool = SessionSpool(self, session, player, slot_no=slot_no)
        self._slots[slot_no] = spool
        self.sessions[session] = spool
        self.changed.add(slot_no)
        self._unsaved.add(slot_no)
        return spool

    def remove_session(self, spool: SessionSpool) -> None:
        """Forget a session; the space of its frames is free after `tidy`."""
        spool.release()
        del self.sessions[spool.session]
        self._slots[spool.slot_no] = None
        self._free_slots.append(spool.slot_no)
        self.changed.add(spool.slot_no)

    # --- Writing and reading ----------------------------------------------------------------------

    def write(self) -> int:
        """Write pending frames; returns how many steps are newly on disk.

        What cannot be written stays in memory, and the next call tries again.
        """
        pending = [
            (entry, frame)
            for entry, frame in self.pending
            if (not entry.is_done if entry.file is None else entry in entry.file.entries)
        ]
        n_steps = 0
        at = 0
        try:
            if pending:
                self._open()
            if self._unsaved:
                self.save()
            while at < len(pending):
                size_bytes = 0
                end = at
                while end < len(pending) and size_bytes < _GROUP_BYTES:
                    size_bytes += pending[end][0].size_bytes
                    end += 1
                n_steps += self._append(pending[at:end])
                at = end
            self.error = ""
        except (OSError, Locked, StorageFull, StorageFailed) as error:
            self.error = str(error)
            if not isinstance(error, StorageFull):
                self._stop_writing()
        finally:
            # Whatever the error. Frames that were to move are still where they were.
            self.pending = [(entry, frame) for entry, frame in pending[at:] if entry.file is None]
            if self.pending:
                # Their numbers must survive a kill, or the next start would assign them again.
                self.changed |= {entry.spool.slot_no for entry, _ in self.pending}
                with contextlib.suppress(OSError):
                    self.save()
        return n_steps

    def _open(self) -> None:
        if self._is_open:
            return
        if self._lock is None:
            path = self.path / ".lock"
            # The start of another game looks into each folder for a moment.
            lock = FileLock(path, what=f"the spool folder {self.path}", timeout_s=0.5)
            if not path.exists():
                # The start of another game found the folder empty, and deletes it.
                lock.close()
                raise Locked(f"the spool folder {self.path} is being deleted by another process")
            self._lock = lock
        assert self.spec is not None
        document = {
            "game": self.spec.game,
            "schema": self.spec.schema,
            "spec": self.spec.to_json().decode(),
        }
        (self.path / "spool.json").write_bytes(canonical_json(document))
        self._is_open = True

    def _append(self, group: Sequence[tuple[SpooledFrame, Frame]]) -> int:
        file = self._file()
        assert file.log is not None
        parts: list[bytes] = []
        offsets: list[int] = []
        at = 0
        for entry, frame in group:
            player = entry.spool.player.encode()
            head = _FRAME.pack(entry.size_bytes, entry.n_steps, entry.total_steps, len(player))
            parts += [head, player, frame.header(), frame.body]
            offsets.append(at + len(head) + len(player))
            at += len(head) + len(player) + entry.size_bytes
        start = file.log.append(parts).start
        file.size_bytes = file.log.size_bytes
        n_steps = 0
        for (entry, _), offset in zip(group, offsets, strict=True):
            if entry.file is None:
                n_steps += entry.n_steps
            else:
                entry.file.release(entry)
            entry.file = file
            entry.start = start
            entry.offset = offset
            file.add(entry)
            if entry.kind is FrameKind.DROP:
                entry.spool.unhold()
        return n_steps

    def _file(self) -> SpoolFile:
        if self._writing is not None:
            if self._writing.size_bytes < self._roll_bytes:
                return self._writing
            self._stop_writing()
        path = self.path / f"{self._next_file:08}.log"
        file = SpoolFile(path, log=LogFile(path, sync=no_sync))
        self._next_file += 1
        self._files.append(file)
        self._writing = file
        return file

    def _stop_writing(self) -> None:
        file = self._writing
        self._writing = None
        if file is not None and file.log is not None:
            file.log.close()
            file.log = None
            if not file.size_bytes and _removed(file.path):
                self._files.remove(file)

    def save(self) -> None:
        """Write the changed slots in place; OSError if the disk has no room for new ones."""
        if not self._is_open or not self.changed:
            return
        path = self.path / "sessions"
        n_slots = self._n_slots_on_disk
        while n_slots < len(self._slots):
            n_slots += _SLOTS_PER_GROWTH
        if self._must_replace:
            # At once: half of it, without damage, would make unfinished sessions seem finished.
            new = self.path / "sessions.new"
            new.write_bytes(b"".join(self._slot(slot_no, n_slots) for slot_no in range(n_slots)))
            os.replace(new, path)
            self._n_slots_on_disk = n_slots
            self._must_replace = False
        else:
            self._write_slots(path, n_slots)
        self.changed.clear()
        self._unsaved.clear()

    def _write_slots(self, path: Path, n_slots: int) -> None:
        with open(path, "r+b" if path.exists() else "w+b") as file:
            if n_slots > self._n_slots_on_disk:
                # All at once, so that slots of later sessions can be written on a full disk.
                file.seek(self._n_slots_on_disk * SLOT_BYTES)
                file.write(seal(b"", 0) * (n_slots - self._n_slots_on_disk))
                file.flush()
                self._n_slots_on_disk = n_slots
                self.changed.add(0)  # which then has the new length
            for slot_no in sorted(self.changed):
                file.seek(slot_no * SLOT_BYTES)
                file.write(self._slot(slot_no, n_slots))

    def _slot(self, slot_no: int, n_slots: int) -> bytes:
        spool = self._slots[slot_no] if slot_no < len(self._slots) else None
        return seal(b"", n_slots) if spool is None else spool.slot().encode(n_slots)

    def read(self, entry: SpooledFrame) -> Frame | None:
        """Return a frame from disk; None if its bytes are damaged or gone.

        OSError if they cannot be read now, such as with too many open files.
        """
        if entry.file is None:
            return None
        if self._group is None or self._group[:2] != (entry.file, entry.start):
            self._group = None
            try:
                with LogReader(entry.file.path) as reader:
                    record = reader.at(entry.start)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EIO):
                    raise
                record = None
            if record is not None:
                self._group = (entry.file, entry.start, record.payload)
        if self._group is None:
            return None
        try:
            return decode_frame(self._group[2][entry.offset : entry.offset + entry.size_bytes])
        except Refused:
            return None

    # --- Freeing space ----------------------------------------------------------------------------

    def tidy(self) -> int:
        """Delete files whose frames are all done, and move the rest out of files that mostly are.

        Returns how many steps are newly on disk.
        """
        closed = [file for file in self._files if file is not self._writing]
        for file in closed:
            if file.entries and file.live_bytes * 2 < file.size_bytes:
                self.move_from(file)
        n_steps = self.write()
        if all(file.entries for file in closed):
            return n_steps
        # The slots first: without the file and with an old slot, frames would be considered lost.
        with contextlib.suppress(OSError):
            self.save()
            self._files = [
                file
                for file in self._files
                if file is self._writing or file.entries or not _removed(file.path)
            ]
        return n_steps

    def move_from(self, file: SpoolFile) -> None:
        """Let the next `write` copy the frames of a file to the end of the log."""
        for entry in sorted(file.entries, key=lambda entry: (entry.start, entry.offset)):
            with contextlib.suppress(OSError):
                frame = entry.frame or self.read(entry)
                if frame is not None:
                    self.pending.append((entry, frame))

    def close(self) -> int:
        """Release the folder for the next start; returns how many steps are not on disk."""
        self.write()
        with contextlib.suppress(OSError):
            self.save()
        self._stop_writing()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return sum(entry.n_steps for entry, _ in self.pending)

    def abandon(self) -> None:
        """Close the parent's files in a forked child; the parent keeps writing them."""
        if self._writing is not None and self._writing.log is not None:
            self._writing.log.close()
        self._writing = None
        if self._lock is not None:
            self._lock.abandon()
            self._lock = None

    def remove(self) -> None:
        """Delete the folder; none of its sessions is left."""
        self._stop_writing()
        if self._lock is None:
            return
        # The slots first, and spool.json last: whatever a kill leaves is deleted by the next start.
        with contextlib.suppress(OSError):
            self.save()
        names = ("sessions.new", "sessions", "spool.json")
        paths = [*log_files(self.path), *(self.path / name for name in names)]
        is_removed = all(_removed(path) for path in paths)
        # While it is held, so that no other process holds a deleted lock; but Windows does not
        # delete open files.
        is_unlocked = is_removed and _removed(self.path / ".lock")
        self._lock.close()
        self._lock = None
        if is_unlocked or (is_removed and _removed(self.path / ".lock")):
            # Files of other programs stay.
            with contextlib.suppress(OSError):
                self.path.rmdir()

    # --- Adopting what a killed game left ---------------------------------------------------------

    def load(self) -> list[tuple[SessionSpool, list[SpooledFrame]]]:
        """Read the sessions of another process and their unsent frames.

        Damaged groups are skipped; sessions whose slot is damaged are found by their frames.
        Corrupt if neither slots nor frames can be read, OSError if a file cannot.
        """
        slots, self.is_damaged = read_slots(self.path)
        self._must_replace = self.is_damaged
        self._n_slots_on_disk = len(slots)
        by_session: dict[uuid.UUID, Slot | None] = {}
        for slot_no, slot in enumerate(slots):
            self._slots.append(None)
            if slot is None:
                self._free_slots.append(slot_no)
                continue
            spool = SessionSpool(self, slot.session, slot.player, slot_no=slot_no)
            self._slots[slot_no] = spool
            self.sessions[slot.session] = spool
            by_session[slot.session] = slot
        if self.is_damaged:
            self.changed.update(range(len(slots)))
        entries: dict[uuid.UUID, dict[int, SpooledFrame]] = {}
        dropped: dict[uuid.UUID, set[int]] = {}
        for path in log_files(self.path):
            file = SpoolFile(path, size_bytes=path.stat().st_size)
            self._files.append(file)
            self._next_file = max(self._next_file, int(path.stem) + 1)
            for start, offset, n_steps, total, player, frame in read_frames(path):
                session = frame.session
                if session not in self.sessions:
                    if not self.is_damaged:
                        continue  # a finished session
                    self.create(session, player)
                entry = SpooledFrame(self.sessions[session], frame, n_steps, steps_before=total)
                if entry.is_data:
                    entry.steps_before -= n_steps
                entry.frame = None
                entry.file = file
                entry.start = start
                entry.offset = offset
                entry.tried = True
                entries.setdefault(session, {})[frame.chunk_no] = entry
                dropped.setdefault(session, set()).update(_dropped(frame))
        if self.is_damaged and self.size_bytes and not self.sessions:
            raise Corrupt(f"neither the sessions nor the frames in {self.path} can be read")
        return [
            (
                spool,
                spool.load(
                    by_session.get(session), entries.get(session, {}), dropped.get(session, set())
                ),
            )
            for session, spool in self.sessions.items()
        ]

    def forget(self, player: str) -> int:
        """Delete a player's sessions from a folder that is not loaded yet; returns how many.

        Also deletes acknowledged frames of the player. StorageFailed if something could not be
        moved or deleted.
        """
        self.load()
        name = player.encode()
        spools = [spool for spool in self.sessions.values() if spool.player == player]
        # Found by bytes, so that damaged groups are found, too; another match only costs a copy.
        files = [file for file in self._files if name in file.path.read_bytes()]
        for file in files:
            self.move_from(file)
        self.pending = [item for item in self.pending if item[0].spool.player != player]
        self.write()
        if self.error:
            raise StorageFailed(
                f"the frames of other players could not be moved ({self.error}); free some "
                "disk space, then run this command again"
            )
        for spool in spools:
            self.remove_session(spool)
        if self.sessions:
            self.tidy()
            self.close()
        else:
            self.remove()
        is_named = bool(self.changed) and (self.path / "sessions").exists()
        if is_named or any(file.path.exists() for file in files):
            raise StorageFailed(
                "files with the player's name could not be changed or deleted; check the "
                "permissions of its files, then run this command again"
            )
        return len(spools)


def log_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.log") if path.stem.isdecimal())


def read_frames(path: Path) -> Iterator[tuple[int, int, int, int, PlayerName, Frame]]:
    with LogReader(path) as reader:
        start: int | None = 0
        while start is not None:
            record = reader.at(start)
            if record is None:
                start = reader.damage_end(start)
                continue
            at = 0
            while at < len(record.payload):
                size, n_steps, total, length = _FRAME.unpack_from(record.payload, at)
                offset = at + _FRAME.size + length
                player = PlayerName(record.payload[at + _FRAME.size : offset].decode())
                at = offset + size
                with contextlib.suppress(Refused):
                    frame = decode_frame(record.payload[offset:at])
                    yield start, offset, n_steps, total, player, frame
            start = record.end


def _dropped(frame: Frame) -> set[int]:
    if frame.kind is FrameKind.DROP:
        with contextlib.suppress(Refused):
            return {
                number
                for first, last in read_drop(frame).ranges
                for number in range(first, last + 1)
            }
    return set()


def _removed(path: Path) -> bool:
    try:
        remove(path)
    except OSError:
        return False
    return True
