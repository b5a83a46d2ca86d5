"""The spool: recorded steps that are not yet acknowledged, on disk, a locked folder per session.

    SPOOL/TAG/SESSION/.lock           held while a process owns the session
                      session.json    player, game, schema and spec
                      acked           the chunk number and steps below which all is done; the
                                      next number; steps so far
                      00000001.log    entries: steps, steps so far, frame

Nothing is synced: spooled frames survive a killed game, but maybe not a power failure. Each file is
written by one process and deleted once every frame in it is done.
"""

import contextlib
import shutil
import struct
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import (
    Corrupt,
    Locked,
    Refused,
    SpecError,
    StorageFailed,
    StorageFull,
    UnderstudyError,
)
from understudy.core.log import FileLock, LogFile, LogReader, no_sync, remove
from understudy.core.names import PlayerName, player_name, session_time_s
from understudy.experience.frame import Frame, FrameKind, decode_frame, read_drop
from understudy.experience.game import GameSpec, spec_from_json
from understudy.experience.session import SPOOL_S

ROLL_BYTES = 1024 * 1024

_SETTLED_S = 3600.0
_ENTRY = struct.Struct("<IQ")
_POSITION = struct.Struct("<QQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SpooledSession:
    """The session.json of a spooled session."""

    player: PlayerName
    game: str
    spec_json: str

    def spec(self) -> GameSpec:
        """Return the game's spec; SpecError if this version cannot read it."""
        return spec_from_json(self.spec_json)


def read_session(folder: Path) -> SpooledSession:
    """Read the session.json of a session's folder; Corrupt if it is missing or damaged."""
    try:
        document = strict_json((folder / "session.json").read_bytes())
        return SpooledSession(
            player_name(document["player"]),
            str(document["game"]),
            str(document.get("spec")),
        )
    except (OSError, UnderstudyError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"session.json in {folder} is missing or damaged: {error!r}") from None


def forget_spooled(folder: Path, player: str, games: Collection[str]) -> tuple[int, list[Path]]:
    """Delete a player's unsent sessions of killed games, for any platform.

    Returns how many were deleted, and the folders of those that may be left: sessions of the player
    that are being played or sent, and sessions whose player cannot be read.
    """
    n_deleted = 0
    left: list[Path] = []
    for path in sorted(folder.glob("*/*/session.json")):
        try:
            spooled = read_session(path.parent)
            if spooled.player == player and spooled.game in games:
                with FileLock(path.parent / ".lock", what="a spooled session"):
                    shutil.rmtree(path.parent)
                    n_deleted += 1
        except (Corrupt, OSError, Locked):
            if path.exists():
                left.append(path.parent)
    return n_deleted, left


def unreadable_sessions(folder: Path) -> list[Path]:
    """Return the session folders with unsent frames whose session.json is missing or damaged."""
    unreadable: list[Path] = []
    for path in sorted(folder.glob("*/*")):
        if path.is_dir() and any(log.stat().st_size for log in path.glob("*.log")):
            try:
                read_session(path).spec()
            except (Corrupt, SpecError):
                unreadable.append(path)
    return unreadable


class SpoolFile:
    """One log file, how many of its frames are not done, and how many were acknowledged."""

    __slots__ = ("log", "n_arrived", "n_live", "path", "size_bytes")

    def __init__(self, path: Path, *, log: LogFile | None = None, size_bytes: int = 0) -> None:
        self.path = path
        self.log = log
        self.size_bytes = size_bytes
        self.n_live = self.n_arrived = 0


class SpooledFrame:
    """A frame waiting for its acknowledgement; `frame` stays in memory while there is space."""

    __slots__ = (
        "chunk_no",
        "file",
        "frame",
        "is_done",
        "kind",
        "n_steps",
        "size_bytes",
        "spool",
        "start",
        "steps_before",
        "tried",
    )

    def __init__(self, spool: "SessionSpool", frame: Frame, n_steps: int) -> None:
        self.spool = spool
        self.chunk_no = frame.chunk_no
        self.n_steps = n_steps
        self.size_bytes = frame.size_bytes
        self.kind = frame.kind
        self.frame: Frame | None = frame
        self.file: SpoolFile | None = None
        self.start = 0
        self.steps_before = 0
        self.tried = False
        """Sent at least once, so it may have arrived."""
        self.is_done = False

    @property
    def is_data(self) -> bool:
        return self.kind is FrameKind.DATA


class SessionSpool:
    """The unacknowledged frames of one session."""

    def __init__(
        self,
        folder: Path,
        lock: FileLock | None,
        *,
        session: uuid.UUID,
        player: PlayerName,
        spec: GameSpec,
        roll_bytes: int = ROLL_BYTES,
    ) -> None:
        self.session = session
        self.player = player
        self.spec = spec
        self._folder = folder
        self._lock = lock
        self._roll_bytes = roll_bytes
        self._files: list[SpoolFile] = []
        self._writing: dict[bool, SpoolFile] = {}
        """One file for data and one for reports, so that reports, which are never dropped, do not
        keep dropped data on disk."""
        self._next_file = 1
        self._held: tuple[int, int] | None = None
        """The first lost number without a drop report on disk, and the steps before it."""
        self._open: dict[int, SpooledFrame] = {}
        self.next_no = 0
        self.n_steps = 0
        """The total steps of all assigned numbers."""
        self.has_ended = False
        """The session gets no more data; once all its frames are done, a close frame follows."""
        self.is_closing = False
        """The close frame was added."""
        self.is_muted = False
        """The platform rejected a drop report or close, so no more reports are sent."""
        self.memory_bytes = 0
        """Bytes of frames that could not be written to disk and exist only in memory."""
        self.lost_numbers: list[int] = []
        """Numbers that a killed game assigned but never spooled."""
        self.lost_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether every frame is done."""
        return not self._open

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, including done frames in files that still exist."""
        return sum(file.size_bytes for file in self._files)

    def add(self, frame: Frame, n_steps: int) -> SpooledFrame:
        """Spool a frame under the next number; if the disk fails, it stays in memory only."""
        entry = SpooledFrame(self, frame, n_steps)
        entry.steps_before = self.n_steps
        total = self.n_steps + n_steps if entry.is_data else self.n_steps
        with contextlib.suppress(StorageFull, StorageFailed, OSError):
            self._write(entry, frame, total)
        if entry.kind is FrameKind.DROP and entry.file is not None:
            self._unhold()
        # Last, so that an unexpected error above has used no number.
        self.next_no = frame.chunk_no + 1
        self.n_steps = total
        self._open[frame.chunk_no] = entry
        if entry.file is None:
            # The number must survive a kill, or the next start would assign it to another frame.
            self.memory_bytes += entry.size_bytes
            self._roll()
            self.save()
        return entry

    def _write(self, entry: SpooledFrame, frame: Frame, total: int) -> None:
        file = self._file(is_data=entry.is_data)
        assert file.log is not None
        entry.start = file.log.append(
            [_ENTRY.pack(entry.n_steps, total), frame.header(), frame.body]
        ).start
        entry.file = file
        file.n_live += 1
        file.size_bytes = file.log.size_bytes

    def skip(self, n_steps: int) -> int:
        """Assign the next number to steps that were dropped before they became a frame."""
        number = self.next_no
        self.next_no += 1
        self._hold(number, self.n_steps)
        self.n_steps += n_steps
        return number

    def _hold(self, number: int, steps_before: int) -> None:
        """Remember a lost number without a drop report on disk, so that a restart finds the gap."""
        self._held = min(self._held or (number, steps_before), (number, steps_before))

    def _unhold(self) -> None:
        if not any(
            entry.kind is FrameKind.DROP and entry.file is None for entry in self._open.values()
        ):
            self._held = None

    def read(self, entry: SpooledFrame) -> Frame | None:
        """Return the entry's frame from memory or disk; None if its bytes are damaged."""
        if entry.frame is not None or entry.file is None:
            return entry.frame
        with contextlib.suppress(OSError, Refused), LogReader(entry.file.path) as reader:
            record = reader.at(entry.start)
            if record is not None:
                return decode_frame(record.payload[_ENTRY.size :])
        return None

    def done(self, entry: SpooledFrame, *, arrived: bool) -> None:
        """Mark an entry as acknowledged, rejected or dropped; `tidy` frees its space."""
        entry.is_done = True
        entry.frame = None
        if self._open.pop(entry.chunk_no, None) is None:
            return
        if entry.file is None:
            self.memory_bytes -= entry.size_bytes
        else:
            entry.file.n_live -= 1
            entry.file.n_arrived += arrived
        if entry.kind is FrameKind.DROP:
            self._unhold()
        elif entry.is_data and not arrived:
            self._hold(entry.chunk_no, entry.steps_before)

    def tidy(self, *, and_current: bool = False) -> None:
        """Save the progress and delete finished files (`and_current`: also those in use)."""
        self.save()
        for is_data in [
            is_data for is_data, file in self._writing.items() if and_current and not file.n_live
        ]:
            self._stop_writing(is_data)
        files: list[SpoolFile] = []
        for file in self._files:
            # Frames acknowledged out of order stay until all before them are done; a later start
            # must not consider them lost.
            if (
                file.n_live
                or file.log is not None
                or (files and file.n_arrived)
                or not _removed(file.path)
            ):
                files.append(file)
        self._files = files

    def close(self) -> None:
        """Release the folder; frames that are not done stay for the next start."""
        self._roll()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the folder of a finished session."""
        # Without session.json no process adopts the folder. The lock is released first, because
        # Windows does not delete open files.
        _removed(self._folder / "session.json")
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, *, is_data: bool) -> SpoolFile:
        current = self._writing.get(is_data)
        if current is not None:
            if current.size_bytes < self._roll_bytes:
                return current
            self._stop_writing(is_data)
        path = self._folder / f"{self._next_file:08}.log"
        file = SpoolFile(path, log=LogFile(path, sync=no_sync))
        self._next_file += 1
        self._files.append(file)
        self._writing[is_data] = file
        return file

    def _roll(self) -> None:
        for is_data in list(self._writing):
            self._stop_writing(is_data)

    def _stop_writing(self, is_data: bool) -> None:
        file = self._writing.pop(is_data)
        if file.log is not None:
            file.log.close()
            file.log = None

    def save(self) -> None:
        """Store on disk below which chunk number everything is done."""
        oldest = self._open[min(self._open)] if self._open else None
        done_below, done_steps = (
            (oldest.chunk_no, oldest.steps_before) if oldest else (self.next_no, self.n_steps)
        )
        if self._held is not None:
            done_below, done_steps = min((done_below, done_steps), self._held)
        raw = _POSITION.pack(done_below, done_steps, self.next_no, self.n_steps)
        with contextlib.suppress(OSError):
            path = self._folder / "acked"
            # Written in place: the file has its size from the start, so this works on a full disk.
            with open(path, "r+b" if path.exists() else "wb") as file:
                file.write(raw + _CRC.pack(crc32(raw)))

    # --- Adopting the sessions of a killed game ---------------------------------------------------

    def load(self) -> list[SpooledFrame]:
        """Read the unfinished frames of another process; damaged ends of files are skipped."""
        done_below, done_steps, self.next_no, self.n_steps = self._position()
        dropped: set[int] = set()
        paths = sorted(self._folder.glob("*.log"))
        for path in [path for path in paths if path.stem.isdecimal()]:
            file = SpoolFile(path, size_bytes=path.stat().st_size)
            self._files.append(file)
            self._next_file = max(self._next_file, int(path.stem) + 1)
            for start, n_steps, total, frame in _frames(path):
                if frame.session == self.session:
                    self.next_no = max(self.next_no, frame.chunk_no + 1)
                    self.n_steps = max(self.n_steps, total)
                    self.is_closing = self.is_closing or frame.kind is FrameKind.CLOSE
                    dropped |= _dropped(frame)
                    if frame.chunk_no >= done_below:
                        self._adopt(file, start, frame, n_steps, total)
        self._find_lost(done_below, done_steps, dropped)
        for number in dropped & self._open.keys():
            self.done(self._open[number], arrived=False)
        self.has_ended = True
        # Drop reports first: without them, numbers after a long gap would be too far ahead to be
        # accepted.
        return sorted(
            self._open.values(),
            key=lambda entry: (entry.kind is not FrameKind.DROP, entry.chunk_no),
        )

    def _adopt(self, file: SpoolFile, start: int, frame: Frame, n_steps: int, total: int) -> None:
        entry = SpooledFrame(self, frame, n_steps)
        entry.frame = None
        entry.file = file
        entry.start = start
        entry.tried = True
        entry.steps_before = total - n_steps if entry.is_data else total
        self._open[frame.chunk_no] = entry
        file.n_live += 1

    def _find_lost(self, done_below: int, done_steps: int, dropped: set[int]) -> None:
        numbers = range(done_below, self.next_no)
        self.lost_numbers = [
            number for number in numbers if number not in self._open and number not in dropped
        ]
        if self.lost_numbers:
            first = self.lost_numbers[0]
            before = sum(entry.n_steps for entry in self._open.values() if entry.chunk_no < first)
            self._hold(first, done_steps + before)
            spooled = sum(entry.n_steps for entry in self._open.values() if entry.is_data)
            self.lost_steps = max(0, self.n_steps - done_steps - spooled)

    def _position(self) -> tuple[int, int, int, int]:
        with contextlib.suppress(OSError):
            raw = (self._folder / "acked").read_bytes()
            if len(raw) == _POSITION.size + 4 and _CRC.pack(crc32(raw[:-4])) == raw[-4:]:
                done_below, done_steps, next_no, n_steps = _POSITION.unpack(raw[:-4])
                return done_below, done_steps, next_no, n_steps
        return 0, 0, 0, 0


def _frames(path: Path) -> Iterator[tuple[int, int, int, Frame]]:
    with contextlib.suppress(OSError), LogReader(path) as reader:
        for record in reader.entries():
            with contextlib.suppress(Refused, struct.error):
                steps, total = _ENTRY.unpack_from(record.payload)
                yield record.start, steps, total, decode_frame(record.payload[_ENTRY.size :])


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


class Spool:
    """All session folders of one address, game and key."""

    def __init__(self, folder: Path, *, cap_bytes: int = 256 * 1024 * 1024) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self._roll_bytes = max(4096, min(ROLL_BYTES, cap_bytes // 32))
        self.foreign_bytes = 0
        """Bytes of other processes' sessions, as of the last `adopt`."""
        self.expired_sessions = 0
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, session: uuid.UUID, *, player: PlayerName, spec: GameSpec) -> SessionSpool:
        """Create a locked folder for a new session."""
        folder = self.folder / str(session)
        lock = None
        # If another process is checking the new folder, it holds the lock; without session.json it
        # does not adopt the folder.
        with contextlib.suppress(OSError, Locked):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock", what=f"the spool of session {session}")
            document = {
                "player": player,
                "game": spec.game,
                "schema": spec.schema,
                "spec": spec.to_json().decode(),
            }
            (folder / "session.json").write_bytes(canonical_json(document))
        spool = SessionSpool(
            folder, lock, session=session, player=player, spec=spec, roll_bytes=self._roll_bytes
        )
        spool.save()
        return spool

    def has_sessions(self) -> bool:
        """Whether there is any session folder."""
        return any(_session_of(path) for path in self.folder.iterdir())

    def adopt(self, now_s: float) -> Iterator[tuple[SessionSpool, list[SpooledFrame]]]:
        """Yield unlocked sessions and their unsent frames; deletes expired or unreadable ones."""
        self.foreign_bytes = 0
        for folder in sorted(self.folder.iterdir()):
            session = _session_of(folder)
            if session is None or (lock := self._lock(folder, session, now_s)) is None:
                continue
            is_expired = now_s - session_time_s(session) > SPOOL_S
            spool = None if is_expired else self._read(folder, lock, session)
            if spool is not None:
                yield spool, spool.load()
                continue
            self.expired_sessions += 1
            lock.close()
            if is_expired or not any(folder.glob("*.log")):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                # Its frames may be readable once session.json is repaired.
                with contextlib.suppress(OSError):
                    folder.rename(folder.with_name(f"{folder.name}.unreadable"))

    def _lock(self, folder: Path, session: uuid.UUID, now_s: float) -> FileLock | None:
        if not (folder / "session.json").exists() and now_s - session_time_s(session) < _SETTLED_S:
            # The folder is being created or removed, and its owner needs the lock.
            return None
        try:
            return FileLock(folder / ".lock", what=f"the spool of session {session}")
        except Locked:
            with contextlib.suppress(OSError):
                self.foreign_bytes += sum(path.stat().st_size for path in folder.glob("*.log"))
        except OSError:
            pass
        return None

    def _read(self, folder: Path, lock: FileLock, session: uuid.UUID) -> SessionSpool | None:
        # An incomplete session.json: its process was killed before anything was spooled.
        with contextlib.suppress(Corrupt, SpecError):
            spooled = read_session(folder)
            return SessionSpool(
                folder,
                lock,
                session=session,
                player=spooled.player,
                spec=spooled.spec(),
                roll_bytes=self._roll_bytes,
            )
        return None


def _session_of(folder: Path) -> uuid.UUID | None:
    try:
        return uuid.UUID(folder.name)
    except ValueError:
        return None


class UnackedFrames:
    """Unacknowledged entries of all sessions; frames on disk also stay in memory if they fit."""

    def __init__(self, *, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._used_bytes = 0
        self._entries: deque[SpooledFrame] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[SpooledFrame]:
        """Yield the entries that are not done, in order."""
        while self._entries and self._entries[0].is_done:
            self._entries.popleft()
        return (entry for entry in self._entries if not entry.is_done)

    def add(self, entry: SpooledFrame) -> None:
        """Append an entry; if memory is full and the frame is on disk, it is freed from memory."""
        if entry.file is not None and self._used_bytes + entry.size_bytes > self._memory_bytes:
            entry.frame = None
        if entry.frame is not None:
            self._used_bytes += entry.size_bytes
        if entry.kind is FrameKind.DROP:
            # Before the data: without it, numbers after a long gap would be too far ahead to be
            # accepted.
            self._entries.appendleft(entry)
        else:
            self._entries.append(entry)

    def adopt(self, entries: Iterable[SpooledFrame]) -> None:
        """Append entries that another process spooled; their frames are only on disk."""
        self._entries.extend(entries)

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
            # A frame that was sent may have arrived, so reporting it as dropped could be wrong.
            if entry.tried or not entry.is_data:
                continue
            if entry.file is None:
                memory_bytes -= entry.size_bytes
            self.finish(entry, arrived=False)
            if entry.file is not None and entry.file.n_live == 0:
                disk_bytes -= entry.file.size_bytes
            dropped.append(entry)
        return dropped

    def clear(self) -> None:
        self._entries.clear()
