"""The spool: recorded steps that are not yet acknowledged, on disk, a locked folder per process.

    SPOOL/TAG/OWNER/.lock           held while a process owns the folder
                    spool.json      game, schema and spec
                    sessions        a slot per session: id, player, the chunk number and steps below
                                    which all is done, the next number, steps so far
                    00000001.log    entries: groups of frames of any of the sessions

Nothing is synced: spooled frames survive a killed game, but maybe not a power failure.

No clock decides what is deleted: a frame stays until it is acknowledged, rejected, dropped and
reported, or forgotten. A session without a slot is finished only if every slot can be read;
otherwise its frames are sent again, and the platform discards duplicates.
"""

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path

from understudy.client.spool_folder import (
    ROLL_BYTES,
    SessionSpool,
    SpooledFrame,
    SpoolFolder,
    log_files,
    read_frames,
    read_game,
)
from understudy.client.spool_slots import read_slots
from understudy.core.errors import Corrupt, Locked, SpecError, StorageFailed
from understudy.core.log import FileLock
from understudy.core.names import PlayerName
from understudy.experience.frame import FrameKind
from understudy.experience.game import GameSpec

MAX_ADOPTED = 8
"""The most folders of killed games that a process has open at once."""


class Spool:
    """All folders of one address and game: that of this process, and those it adopted."""

    def __init__(self, folder: Path, *, cap_bytes: int = 256 * 1024 * 1024) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self._roll_bytes = max(4096, min(ROLL_BYTES, cap_bytes // 32))
        self._own: SpoolFolder | None = None
        self._adopted: list[SpoolFolder] = []
        self.may_have_more = False
        """Whether `adopt` left folders for later, because MAX_ADOPTED are open."""
        self.foreign_bytes = 0
        """Bytes of other processes' folders, as of the last `adopt`."""
        self.damaged: set[Path] = set()
        """Folders of killed games whose file `sessions` was damaged: all in them is sent again."""
        self.unreadable: dict[Path, str] = {}
        """Folders of killed games that this version cannot read, and why; they stay as they are."""
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def _folders(self) -> list[SpoolFolder]:
        return self._adopted if self._own is None else [self._own, *self._adopted]

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, including those of other processes."""
        return self.foreign_bytes + sum(folder.size_bytes for folder in self._folders)

    @property
    def memory_bytes(self) -> int:
        """Bytes of frames that could not be written to disk and exist only in memory."""
        return sum(
            entry.size_bytes
            for folder in self._folders
            for entry, _ in folder.pending
            if not entry.is_done
        )

    @property
    def error(self) -> str:
        """Why frames exist only in memory; empty if none do."""
        return next((folder.error for folder in self._folders if folder.error), "")

    @property
    def can_adopt_more(self) -> bool:
        return self.may_have_more and len(self._adopted) < MAX_ADOPTED

    def create(self, session: uuid.UUID, *, player: PlayerName, spec: GameSpec) -> SessionSpool:
        """Return a new session in this process's own folder."""
        if self._own is None:
            self._own = SpoolFolder(self.folder / str(session), spec, roll_bytes=self._roll_bytes)
        return self._own.create(session, player)

    def remove(self, spool: SessionSpool) -> None:
        """Delete a finished session, and its folder if that was the last one."""
        spool.folder.remove_session(spool)
        if not spool.folder.sessions:
            spool.folder.remove()
            if spool.folder is self._own:
                self._own = None
            else:
                self._adopted.remove(spool.folder)

    def write(self) -> int:
        """Write what was added; returns how many steps are newly on disk."""
        return sum(folder.write() for folder in self._folders)

    def tidy(self) -> int:
        """Free the space of frames that are done; returns how many steps are newly on disk."""
        return sum(folder.tidy() for folder in self._folders)

    def close(self) -> int:
        """Release every folder for the next start; returns how many steps are not on disk."""
        lost_steps = sum(folder.close() for folder in self._folders)
        self._own = None
        self._adopted = []
        return lost_steps

    def abandon(self) -> None:
        """Close the parent's files in a forked child."""
        for folder in self._folders:
            folder.abandon()
        self._own = None
        self._adopted = []

    def has_sessions(self) -> bool:
        """Whether there is any folder of a process."""
        return any(_owner_of(path) for path in self.folder.iterdir())

    def adopt(self) -> Iterator[tuple[SessionSpool, list[SpooledFrame]]]:
        """Yield the sessions of killed games and their unsent frames.

        However old they are: only the platform knows whether it accepts them, since the clock of
        this machine may be wrong.
        """
        self.foreign_bytes = 0
        self.may_have_more = False
        mine = {folder.path for folder in self._folders}
        for path in sorted(self.folder.iterdir()):
            if _owner_of(path) is None or path in mine or path in self.unreadable:
                continue
            if len(self._adopted) >= MAX_ADOPTED:
                self.may_have_more = True
                break
            lock = self._lock(path)
            if lock is None:
                continue
            try:
                if not _may_have_frames(path):
                    # What a kill left before anything was spooled, or while it was deleted.
                    SpoolFolder(path, None, lock=lock).remove()
                    continue
                spec = read_game(path).spec()
                folder = SpoolFolder(path, spec, lock=lock, roll_bytes=self._roll_bytes)
                sessions = folder.load()
            except (OSError, MemoryError):
                # Such as too many open files: the next `adopt` tries again.
                lock.close()
                continue
            except (Corrupt, SpecError) as error:
                lock.close()
                if log_files(path):
                    self.unreadable[path] = str(error)
                continue
            if not sessions:
                folder.remove()
                continue
            if folder.is_damaged:
                self.damaged.add(path)
            self._adopted.append(folder)
            yield from sessions

    def _lock(self, path: Path) -> FileLock | None:
        try:
            return FileLock(path / ".lock", what=f"the spool folder {path}")
        except Locked:
            with contextlib.suppress(OSError):
                self.foreign_bytes += sum(log.stat().st_size for log in log_files(path))
        except (OSError, StorageFailed):
            pass
        return None


def _owner_of(folder: Path) -> uuid.UUID | None:
    try:
        return uuid.UUID(folder.name)
    except ValueError:
        return None


def _may_have_frames(folder: Path) -> bool:
    """Whether a folder has files of sessions, or cannot be read."""
    try:
        return "sessions" in os.listdir(folder) or bool(log_files(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def forget_spooled(
    folder: Path, player: str, games: Collection[str]
) -> tuple[int, dict[Path, str]]:
    """Delete a player's unsent sessions of killed games, for any platform.

    Returns how many were deleted, and why a folder may have others: those of games that run or send
    now, and those that cannot be read or written.
    """
    n_deleted = 0
    left: dict[Path, str] = {}
    for path in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        try:
            if read_game(path).game not in games:
                continue
            with FileLock(path / ".lock", what="a spool folder") as lock:
                n_deleted += SpoolFolder(path, None, lock=lock).forget(player)
        except Locked:
            # The platform rejects the player's frames, since their sessions started before the
            # player was forgotten.
            if _has_player(path, player):
                left[path] = "its game is running; end the game, then run this command again"
        except StorageFailed as error:
            left[path] = str(error)
        except (Corrupt, OSError) as error:
            if _may_have_frames(path):
                left[path] = f"it cannot be read ({error}); delete it, or repair it"
    return n_deleted, left


def _has_player(folder: Path, player: str) -> bool:
    """Whether a session or frame of the player, acknowledged or not, may be in a locked folder."""
    if any(slot is not None and slot.player == player for slot in read_slots(folder)[0]):
        return True
    for path in log_files(folder):
        try:
            if any(name == player for *_, name, _ in read_frames(path)):
                return True
        except FileNotFoundError:
            continue  # everything in it was acknowledged
        except OSError:
            return True
    return False


def unreadable_spools(folder: Path) -> list[Path]:
    """Return the folders with unsent frames whose spool.json is missing or damaged."""
    unreadable: list[Path] = []
    for path in sorted(folder.glob("*/*")):
        if path.is_dir() and any(log.stat().st_size for log in log_files(path)):
            try:
                read_game(path).spec()
            except (Corrupt, SpecError):
                unreadable.append(path)
    return unreadable


def count_spooled(folder: Path) -> int:
    """Return how many sessions of any platform have unsent frames, also of running games."""
    return sum(
        slot is not None
        for path in folder.glob("*/*/sessions")
        for slot in read_slots(path.parent)[0]
    )


class UnackedFrames:
    """Unacknowledged entries of all sessions; frames on disk also stay in memory if they fit."""

    def __init__(self, *, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._used_bytes = 0
        self._entries: deque[SpooledFrame] = deque()
        self._adopted: deque[SpooledFrame] = deque()
        """Those of adopted sessions, sent after the others: the platform may put them off for long,
        such as for their age."""

    def __bool__(self) -> bool:
        return bool(self._entries or self._adopted)

    def __iter__(self) -> Iterator[SpooledFrame]:
        """Yield the entries that are not done, in order."""
        for entries in (self._entries, self._adopted):
            while entries and entries[0].is_done:
                entries.popleft()
        return (entry for entry in chain(self._entries, self._adopted) if not entry.is_done)

    def add(self, entry: SpooledFrame) -> None:
        """Append an entry; if memory is full and the frame is on disk, it is freed from memory."""
        if entry.file is not None and self._used_bytes + entry.size_bytes > self._memory_bytes:
            entry.frame = None
        if entry.frame is not None:
            self._used_bytes += entry.size_bytes
        if entry.spool.is_adopted:
            self._adopted.appendleft(entry)  # a report or a close: the data is already there
        elif entry.kind is FrameKind.DROP:
            # Before the data: without it, numbers after a long gap would be too far ahead to be
            # accepted.
            self._entries.appendleft(entry)
        else:
            self._entries.append(entry)

    def adopt(self, entries: Iterable[SpooledFrame]) -> None:
        """Append entries that another process spooled; their frames are only on disk."""
        self._adopted.extend(entries)

    def put_off(self, spools: Collection[SessionSpool]) -> None:
        """Move the entries of these adopted sessions behind those of all others."""
        self._adopted = deque(sorted(self._adopted, key=lambda entry: entry.spool in spools))

    def finish(self, entry: SpooledFrame, *, arrived: bool) -> None:
        """Mark an entry as acknowledged, rejected or dropped."""
        if entry.frame is not None:
            self._used_bytes -= entry.size_bytes
        entry.spool.done(entry, arrived=arrived)

    def drop_oldest(self, disk_bytes: int, memory_bytes: int) -> list[SpooledFrame]:
        """Drop the oldest data until this much disk and memory is freed; returns the entries."""
        dropped: list[SpooledFrame] = []
        for entry in self:
            if disk_bytes <= 0 and memory_bytes <= 0:
                break
            # A frame that was sent may have arrived, or still arrive: after a report that it was
            # dropped, the platform would reject it as a conflict.
            if entry.tried or not entry.is_data:
                continue
            if entry.file is None:
                memory_bytes -= entry.size_bytes
            else:
                disk_bytes -= entry.size_bytes
            self.finish(entry, arrived=False)
            dropped.append(entry)
        return dropped

    def clear(self) -> None:
        self._entries.clear()
        self._adopted.clear()
