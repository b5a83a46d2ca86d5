"""A file system that loses what was not synced: the state of a disk after a power cut.

`Disk` is the model, without any FUSE: files and folders as programs see them (live), as the platter
has them (durable), and every change in between. A cut keeps an arbitrary subset of what is in
between: single writes, or 4 KiB pages of them; truncations; names that were created, renamed or
removed. A file's bytes become durable with an fsync of the file (which also keeps the name it was
created under), names with an fsync of their folder. Nothing else is promised, so that a program
which passes here relies on nothing a file system may leave out.

Run as `python -m tests.faults.power_cut STATE MOUNT` it serves STATE's files under MOUNT through
FUSE; the line `cut SEED` on its standard input cuts the power: from then on every call fails with
EIO, and when MOUNT is unmounted STATE is what survived. Pages are cached by the kernel
(write-through), so SQLite's memory-mapped -shm file works.
"""

import contextlib
import errno
import os
import random
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PAGE = 4096


@dataclass(eq=False, slots=True)
class Node:
    """A file or a folder; writes and truncations since the last sync wait in `pending`."""

    is_folder: bool
    mode: int
    live: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes), or (size, None) for a truncation."""
    names: dict[str, "Node"] = field(default_factory=dict)
    durable_names: dict[str, "Node"] = field(default_factory=dict)
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names that is not durable yet; a rename is atomic."""

    removed: tuple[Node, str] | None
    added: tuple[Node, str] | None
    node: Node
    creates: bool = False

    def touches(self, folder: Node, name: str | None = None) -> bool:
        places = [place for place in (self.removed, self.added) if place is not None]
        return any(place[0] is folder and name in (None, place[1]) for place in places)

    def apply(self) -> None:
        if self.removed is not None:
            self.removed[0].durable_names.pop(self.removed[1], None)
        if self.added is not None:
            self.added[0].durable_names[self.added[1]] = self.node


class Disk:
    """Files, folders and what a power cut leaves of them."""

    def __init__(self) -> None:
        self.root = Node(is_folder=True, mode=0o755)
        self._changes: list[Change] = []
        self.syncs = 0

    # --- names ------------------------------------------------------------------------------------

    def find(self, path: str) -> Node:
        node = self.root
        for name in path.split("/"):
            if name:
                if not node.is_folder:
                    raise OSError(errno.ENOTDIR, path)
                if name not in node.names:
                    raise OSError(errno.ENOENT, path)
                node = node.names[name]
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        return self.find(folder), name

    def create(self, path: str, mode: int, *, is_folder: bool = False) -> Node:
        folder, name = self._place(path)
        if name in folder.names:
            raise OSError(errno.EEXIST, path)
        node = Node(is_folder, mode, time_s=time.time())
        folder.names[name] = node
        self._changes.append(Change(None, (folder, name), node, creates=not is_folder))
        return node

    def link(self, old: str, new: str) -> None:
        node = self.find(old)
        (folder, name) = self._place(new)
        if name in folder.names:
            raise OSError(errno.EEXIST, new)
        folder.names[name] = node
        self._changes.append(Change(None, (folder, name), node))

    def remove(self, path: str) -> None:
        folder, name = self._place(path)
        node = self.find(path)
        if node.names:
            raise OSError(errno.ENOTEMPTY, path)
        del folder.names[name]
        if not is_hidden(name):
            self._changes.append(Change((folder, name), None, node))

    def rename(self, old: str, new: str) -> None:
        (source, old_name), (target, new_name) = self._place(old), self._place(new)
        node = self.find(old)
        del source.names[old_name]
        target.names[new_name] = node
        # libfuse hides an open file that was removed under such a name; to the disk it is gone.
        added = None if is_hidden(new_name) else (target, new_name)
        self._changes.append(Change((source, old_name), added, node))

    # --- bytes ------------------------------------------------------------------------------------

    def write(self, node: Node, raw: bytes, at: int) -> None:
        _write(node.live, raw, at)
        node.pending.append((at, raw))
        node.time_s = time.time()

    def truncate(self, node: Node, size: int) -> None:
        _truncate(node.live, size)
        node.pending.append((size, None))
        node.time_s = time.time()

    # --- durability -------------------------------------------------------------------------------

    def sync_file(self, node: Node) -> None:
        self.syncs += 1
        for at, raw in node.pending:
            _apply(node.durable, at, raw)
        node.pending.clear()
        for change in [one for one in self._changes if one.creates and one.node is node]:
            assert change.added is not None
            folder, name = change.added
            self._settle(partial(Change.touches, folder=folder, name=name), up_to=change)

    def sync_folder(self, folder: Node) -> None:
        self.syncs += 1
        self._settle(lambda one: one.touches(folder), up_to=None)

    def _settle(self, chosen: Callable[[Change], bool], *, up_to: Change | None) -> None:
        kept = []
        is_past = False
        for change in self._changes:
            if not is_past and chosen(change):
                change.apply()
            else:
                kept.append(change)
            is_past = is_past or change is up_to
        self._changes = kept

    def cut(self, rng: random.Random) -> None:
        """Keep synced data and any subset of the rest; then live and durable are equal."""
        luck_of_names, luck_of_bytes = (
            rng.choice([0.0, 1.0, rng.random(), rng.random()]) for _ in range(2)
        )
        for change in self._changes:
            if rng.random() < luck_of_names:
                change.apply()
        self._changes.clear()
        by_page = rng.random() < 0.5
        for node in set(_walk(self.root)):
            for at, raw in node.pending:
                for piece_at, piece in _pieces(at, raw, by_page):
                    if rng.random() < luck_of_bytes:
                        _apply(node.durable, piece_at, piece)
            node.pending.clear()
            node.live, node.names = bytearray(node.durable), dict(node.durable_names)

    # --- to and from a real folder ----------------------------------------------------------------

    @staticmethod
    def load(folder: Path) -> "Disk":
        """A disk on which everything in a folder is durable."""
        disk = Disk()
        disk._load(folder, disk.root)
        return disk

    def _load(self, folder: Path, node: Node) -> None:
        for path in folder.iterdir():
            about = path.stat()
            child = Node(path.is_dir(), stat.S_IMODE(about.st_mode), time_s=about.st_mtime)
            node.names[path.name] = node.durable_names[path.name] = child
            if child.is_folder:
                self._load(path, child)
            else:
                child.durable = bytearray(path.read_bytes())
                child.live = bytearray(child.durable)

    def save(self, folder: Path) -> None:
        """Make a folder hold what is live here, and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        self._save(self.root, folder)

    def _save(self, node: Node, path: Path) -> None:
        if node.is_folder:
            path.mkdir()
            for name, child in node.names.items():
                if not is_hidden(name):
                    self._save(child, path / name)
        else:
            path.write_bytes(node.live)
            path.chmod(node.mode)
            os.utime(path, (node.time_s, node.time_s))


def is_hidden(name: str) -> bool:
    """Whether libfuse made this name for a removed file that is still open."""
    return name.startswith(".fuse_hidden")


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in [*node.names.values(), *node.durable_names.values()]:
        yield from _walk(child)


def _write(buffer: bytearray, raw: bytes, at: int) -> None:
    if len(buffer) < at:
        buffer.extend(bytes(at - len(buffer)))
    buffer[at : at + len(raw)] = raw


def _truncate(buffer: bytearray, size: int) -> None:
    del buffer[size:]
    buffer.extend(bytes(size - len(buffer)))


def _apply(buffer: bytearray, at: int, raw: bytes | None) -> None:
    if raw is None:
        _truncate(buffer, at)
    else:
        _write(buffer, raw, at)


def _pieces(at: int, raw: bytes | None, by_page: bool) -> Iterator[tuple[int, bytes | None]]:
    if raw is None or not by_page:
        yield at, raw
        return
    while raw:
        size = PAGE - at % PAGE
        yield at, raw[:size]
        at = at + size
        raw = raw[size:]


class Served:
    """A Disk as FUSE operations; after the cut every call fails."""

    use_ns = True

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[int, Node] = {}
        self._next = 1
        self.is_cut = False

    def _alive(self) -> Disk:
        if self.is_cut:
            raise OSError(errno.EIO, "the power is off")
        return self._disk

    def _handle(self, node: Node) -> int:
        self._next += 1
        self._open[self._next] = node
        return self._next

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        disk = self._alive()
        node = self._open[fh] if fh is not None and fh in self._open else disk.find(path)
        kind = stat.S_IFDIR if node.is_folder else stat.S_IFREG
        time_ns = int(node.time_s * 1e9)
        return {
            "st_mode": kind | node.mode,
            "st_nlink": 1,
            "st_size": len(node.live),
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            "st_mtime": time_ns,
            "st_ctime": time_ns,
            "st_atime": time_ns,
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._alive().find(path).names]

    def opendir(self, path: str) -> int:
        return self._handle(self._alive().find(path))

    def releasedir(self, path: str, fh: int) -> int:
        return self.release(path, fh)

    def open(self, path: str, flags: int) -> int:
        return self._handle(self._alive().find(path))

    def create(self, path: str, mode: int, flags: int) -> int:
        return self._handle(self._alive().create(path, stat.S_IMODE(mode)))

    def release(self, path: str, fh: int) -> int:
        self._open.pop(fh, None)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._alive()
        return bytes(self._open[fh].live[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._alive().write(self._open[fh], bytes(data), offset)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        disk = self._alive()
        disk.truncate(
            self._open[fh] if fh is not None and fh in self._open else disk.find(path), length
        )
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._alive().sync_file(self._open[fh])
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._alive().sync_folder(self._open[fh])
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._alive().create(path, stat.S_IMODE(mode), is_folder=True)
        return 0

    def unlink(self, path: str) -> int:
        self._alive().remove(path)
        return 0

    def rmdir(self, path: str) -> int:
        self._alive().remove(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        self._alive().rename(old, new)
        return 0

    def link(self, target: str, source: str) -> int:
        self._alive().link(source, target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._alive().find(path).mode = stat.S_IMODE(mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        self._alive().find(path).time_s = times[1] / 1e9 if times else time.time()
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {
            "f_bsize": PAGE,
            "f_frsize": PAGE,
            "f_blocks": 1 << 22,
            "f_bfree": 1 << 21,
            "f_bavail": 1 << 21,
        }


def serve(state: Path, mount: Path) -> None:
    """Serve a folder until it is unmounted; then the folder holds what survived."""
    import mfusepy

    disk = Disk.load(state)
    operations = type("PowerCut", (Served, mfusepy.Operations), {})(disk)
    seeds: list[int] = []

    def listen() -> None:
        for line in sys.stdin:
            seeds.append(int(line.split()[1]))
            operations.is_cut = True
            print(f"cut after {disk.syncs} syncs", flush=True)
        if not seeds:
            os.kill(os.getpid(), 15)  # whoever started us is gone: libfuse unmounts

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(RuntimeError):
        mfusepy.FUSE(operations, str(mount), foreground=True, nothreads=True)
    if seeds:
        disk.cut(random.Random(seeds[0]))
    disk.save(state)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
