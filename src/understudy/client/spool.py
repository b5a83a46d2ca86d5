"""The spool: what was recorded and not yet acknowledged, on disk, one locked folder per session.

    SPOOL/TAG/SESSION/.lock           held while a process owns the session
                      session.json    player, game, schema and spec
                      acked           the number and steps below which all is done; the next
                                      number; steps so far
                      00000001.log    framed entries: steps, steps so far, frame

Nothing here is synced: a killed game loses nothing that was spooled, a power cut may. Files are
written by one process and deleted as a whole once every frame in them is done.
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
    """What a session's folder says about it."""

    player: PlayerName
    game: str
    spec_json: str

    def spec(self) -> GameSpec:
        """The game's spec; SpecError when this build cannot read it."""
        return spec_from_json(self.spec_json)


def read_about(folder: Path) -> SpooledSession:
    """Whose session a spool folder holds; Corrupt when its session.json is missing or damaged."""
    try:
        about = strict_json((folder / "session.json").read_bytes())
        return SpooledSession(
            player_name(about["player"]), str(about["game"]), str(about.get("spec"))
        )
    except (OSError, UnderstudyError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{folder} does not say whose session it holds: {error!r}") from None


def forget_spooled(folder: Path, player: str, games: Collection[str]) -> int:
    """Delete what killed games left unsent of a player, in a spool with every tag; how many
    sessions went."""
    gone = 0
    for path in sorted(folder.glob("*/*/session.json")):
        # Being played or sent right now: what it sends is refused, since its session began before.
        with contextlib.suppress(Corrupt, OSError, Locked):
            about = read_about(path.parent)
            if about.player == player and about.game in games:
                with FileLock(path.parent / ".lock", what="a spooled session"):
                    shutil.rmtree(path.parent)
                    gone += 1
    return gone


class SpoolFile:
    """One log file, how many of its frames are still needed, and how many arrived."""

    __slots__ = ("log", "n_arrived", "n_live", "path", "size_bytes")

    def __init__(self, path: Path, *, log: LogFile | None = None, size_bytes: int = 0) -> None:
        self.path = path
        self.log = log
        self.size_bytes = size_bytes
        self.n_live = self.n_arrived = 0


class SpooledFrame:
    """One frame that waits for its acknowledgement; `frame` is kept in memory only while there
    is room."""

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
        """Handed to the link at least once, so it may have arrived."""
        self.is_done = False

    @property
    def is_data(self) -> bool:
        return self.kind is FrameKind.DATA


class SessionSpool:
    """The frames of one session between their birth and their acknowledgement."""

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
        """The file for data and the one for reports: a report is never dropped, so it must not
        keep dropped data."""
        self._next_file = 1
        self._held: tuple[int, int] | None = None
        """The first number that is lost and in no report on the disk, and the steps before it."""
        self._open: dict[int, SpooledFrame] = {}
        self.next_no = 0
        self.n_steps = 0
        """Steps under all numbers given out so far."""
        self.has_ended = False
        """No more data comes; once everything is done a close frame follows."""
        self.is_closing = False
        """The close frame was added."""
        self.is_muted = False
        """Its reports are refused, so none is sent any more."""
        self.memory_bytes = 0
        """Bytes of frames that the disk refused and that live in memory alone."""
        self.lost_numbers: list[int] = []
        """Numbers that a killed game gave out and never spooled."""
        self.lost_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether every frame is done."""
        return not self._open

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, done frames in files that still exist included."""
        return sum(file.size_bytes for file in self._files)

    def add(self, frame: Frame, n_steps: int) -> SpooledFrame:
        """Spool the frame that takes the next number; when the disk refuses, it is kept in
        memory alone."""
        entry = SpooledFrame(self, frame, n_steps)
        entry.steps_before = self.n_steps
        total = self.n_steps + n_steps if entry.is_data else self.n_steps
        with contextlib.suppress(StorageFull, StorageFailed, OSError):
            self._write(entry, frame, total)
        if entry.kind is FrameKind.DROP and entry.file is not None:
            self._let_go()
        # Only now: an error that nobody foresaw has taken no number.
        self.next_no = frame.chunk_no + 1
        self.n_steps = total
        self._open[frame.chunk_no] = entry
        if entry.file is None:
            # The number must survive a kill even so, or the next start would give it to another
            # frame.
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
        """Take the next number for steps that were dropped before they became a frame."""
        number = self.next_no
        self.next_no = self.next_no + 1
        self._hold(number, self.n_steps)
        self.n_steps += n_steps
        return number

    def _hold(self, number: int, steps_before: int) -> None:
        """This number is lost, and no report on the disk says so yet: whoever comes next must
        find it missing."""
        self._held = min(self._held or (number, steps_before), (number, steps_before))

    def _let_go(self) -> None:
        if not any(
            entry.kind is FrameKind.DROP and entry.file is None for entry in self._open.values()
        ):
            self._held = None

    def read(self, entry: SpooledFrame) -> Frame | None:
        """The entry's frame, from memory or disk; None when its bytes are damaged."""
        if entry.frame is not None or entry.file is None:
            return entry.frame
        with contextlib.suppress(OSError, Refused), LogReader(entry.file.path) as reader:
            found = reader.at(entry.start)
            if found is not None:
                return decode_frame(found.payload[_ENTRY.size :])
        return None

    def done(self, entry: SpooledFrame, *, arrived: bool) -> None:
        """The entry is acknowledged, or refused or dropped; `tidy` frees its place."""
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
            self._let_go()
        elif entry.is_data and not arrived:
            self._hold(entry.chunk_no, entry.steps_before)

    def tidy(self, *, and_current: bool = False) -> None:
        """Note how far everything is done and delete files nobody needs (`and_current`: the one
        in use too)."""
        self.save()
        for is_data in [
            is_data for is_data, file in self._writing.items() if and_current and not file.n_live
        ]:
            self._stop_writing(is_data)
        kept: list[SpoolFile] = []
        for file in self._files:
            # What arrived out of order stays until all before it is done: a later start must not
            # take it for lost.
            if (
                file.n_live
                or file.log is not None
                or (kept and file.n_arrived)
                or not _removed(file.path)
            ):
                kept.append(file)
        self._files = kept

    def close(self) -> None:
        """Let go of the folder; what is not done stays for the next start."""
        self._roll()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the folder of a finished session."""
        # Without its session.json nobody adopts it; the lock is let go first, because Windows
        # deletes no open file.
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
        """Note on disk how far everything is done."""
        oldest = self._open[min(self._open)] if self._open else None
        done_below, done_steps = (
            (oldest.chunk_no, oldest.steps_before) if oldest else (self.next_no, self.n_steps)
        )
        if self._held is not None:
            done_below, done_steps = min((done_below, done_steps), self._held)
        raw = _POSITION.pack(done_below, done_steps, self.next_no, self.n_steps)
        with contextlib.suppress(OSError):
            path = self._folder / "acked"
            # Written in place: the few bytes are there from the start, so a full disk cannot refuse
            # them.
            with open(path, "r+b" if path.exists() else "wb") as file:
                file.write(raw + _CRC.pack(crc32(raw)))

    # --- Taking over what a killed game left ------------------------------------------------------

    def load(self) -> list[SpooledFrame]:
        """Read what another process spooled here and did not finish; damaged ends are left out."""
        done_below, done_steps, self.next_no, self.n_steps = self._position()
        dropped: set[int] = set()
        for path in sorted(self._folder.glob("*.log")):
            file = SpoolFile(path, size_bytes=path.stat().st_size)
            self._files.append(file)
            self._next_file = max(self._next_file, int(path.stem) + 1)
            for start, n_steps, total, frame in _frames(path):
                if frame.session == self.session:
                    self.next_no, self.n_steps = (
                        max(self.next_no, frame.chunk_no + 1),
                        max(self.n_steps, total),
                    )
                    self.is_closing = self.is_closing or frame.kind is FrameKind.CLOSE
                    dropped |= _dropped(frame)
                    if frame.chunk_no >= done_below:
                        self._adopt(file, start, frame, n_steps, total)
        self._find_lost(done_below, done_steps, dropped)
        for number in dropped & self._open.keys():
            self.done(self._open[number], arrived=False)
        self.has_ended = True
        # Drop reports first: without them the numbers behind a long gap would be too far ahead to
        # be taken.
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
            before = sum(
                one.n_steps for one in self._open.values() if one.chunk_no < self.lost_numbers[0]
            )
            self._hold(self.lost_numbers[0], done_steps + before)
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
        for found in reader.entries():
            with contextlib.suppress(Refused, struct.error):
                steps, total = _ENTRY.unpack_from(found.payload)
                yield found.start, steps, total, decode_frame(found.payload[_ENTRY.size :])


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
    """Every session folder of one address, game and key."""

    def __init__(self, folder: Path, *, cap_bytes: int = 256 * 1024 * 1024) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self._roll_bytes = max(4096, min(ROLL_BYTES, cap_bytes // 32))
        self.foreign_bytes = 0
        """What other processes had here when `adopt` last looked."""
        self.expired_sessions = 0
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, session: uuid.UUID, *, player: PlayerName, spec: GameSpec) -> SessionSpool:
        """A locked folder for a new session."""
        folder = self.folder / str(session)
        lock = None
        # A locked folder under a fresh id is being looked at; without our session.json nobody takes
        # it over.
        with contextlib.suppress(OSError, Locked):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock", what=f"the spool of session {session}")
            about = {
                "player": player,
                "game": spec.game,
                "schema": spec.schema,
                "spec": spec.to_json().decode(),
            }
            (folder / "session.json").write_bytes(canonical_json(about))
        spool = SessionSpool(
            folder, lock, session=session, player=player, spec=spec, roll_bytes=self._roll_bytes
        )
        spool.save()
        return spool

    def has_sessions(self) -> bool:
        """Whether any session folder is there at all."""
        return any(_session_of(path) for path in self.folder.iterdir())

    def adopt(self, now_s: float) -> Iterator[tuple[SessionSpool, list[SpooledFrame]]]:
        """Sessions a killed game left, with the frames still to be sent; too old ones are
        dropped and counted."""
        self.foreign_bytes = 0
        for folder in sorted(self.folder.iterdir()):
            session = _session_of(folder)
            if session is None or (lock := self._lock(folder, session, now_s)) is None:
                continue
            spool = (
                self._read(folder, lock, session)
                if now_s - session_time_s(session) <= SPOOL_S
                else None
            )
            if spool is not None:
                yield spool, spool.load()
                continue
            self.expired_sessions += 1
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _lock(self, folder: Path, session: uuid.UUID, now_s: float) -> FileLock | None:
        if not (folder / "session.json").exists() and now_s - session_time_s(session) < _SETTLED_S:
            # Being made or removed right now; its owner has the lock before and without the file.
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
        # Killed before its session.json was whole: nothing can have been spooled behind it.
        with contextlib.suppress(Corrupt, SpecError):
            about = read_about(folder)
            return SessionSpool(
                folder,
                lock,
                session=session,
                player=about.player,
                spec=about.spec(),
                roll_bytes=self._roll_bytes,
            )
        return None


def _session_of(folder: Path) -> uuid.UUID | None:
    try:
        return uuid.UUID(folder.name)
    except ValueError:
        return None


class UnackedFrames:
    """Entries of every session; their frames stay in memory while there is room, and on disk
    anyway."""

    def __init__(self, *, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._kept_bytes = 0
        self._entries: deque[SpooledFrame] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[SpooledFrame]:
        """Whatever is not done, in order."""
        while self._entries and self._entries[0].is_done:
            self._entries.popleft()
        return (entry for entry in self._entries if not entry.is_done)

    def add(self, entry: SpooledFrame) -> None:
        """Take the next entry; its frame is let go when memory is full and the disk has it."""
        if entry.file is not None and self._kept_bytes + entry.size_bytes > self._memory_bytes:
            entry.frame = None
        if entry.frame is not None:
            self._kept_bytes += entry.size_bytes
        if entry.kind is FrameKind.DROP:
            # Ahead of the data: without it the numbers behind a long gap would be too far ahead to
            # be taken.
            self._entries.appendleft(entry)
        else:
            self._entries.append(entry)

    def adopt(self, entries: Iterable[SpooledFrame]) -> None:
        """Take entries that another process spooled; their frames are on disk alone."""
        self._entries.extend(entries)

    def finish(self, entry: SpooledFrame, *, arrived: bool) -> None:
        """The entry was acknowledged, or refused or dropped."""
        if entry.frame is not None:
            self._kept_bytes -= entry.size_bytes
        entry.spool.done(entry, arrived=arrived)

    def drop_oldest(self, disk_bytes: int, memory_bytes: int) -> list[SpooledFrame]:
        """Finish the oldest data until so much of disk and memory is free; what was dropped."""
        dropped: list[SpooledFrame] = []
        for entry in self:
            if disk_bytes <= 0 and memory_bytes <= 0:
                break
            # What was handed to the link may have arrived, so calling it dropped could be wrong.
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
