"""A snapshot of a store: taken by the process that has it open, in a moment, whatever its size."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from understudy.core.log import make_folder
from understudy.stores.local import LocalStore


def snapshot_store(store: LocalStore, target: Path) -> int:
    """Make `target` the store as it is now; how many segments it has. Both lie on the same disk.

    Everything is sealed first, so that what is left to copy are segments, which never change and are linked, and the
    catalogue. The caller writes nothing meanwhile.
    """
    store.freeze(wait=True)
    for name in ("log", "segments"):
        make_folder(target / name)
    segments = sorted((store.folder / "segments").glob("*.safetensors"))
    for path in segments:
        os.link(path, target / "segments" / path.name)
    for path in (store.folder / "log").glob("*.log"):
        shutil.copyfile(path, target / "log" / path.name)
    shutil.copyfile(store.folder / "watermark", target / "watermark")
    source, copy = (sqlite3.connect(folder / "catalogue.sqlite") for folder in (store.folder, target))
    with closing(source), closing(copy):
        source.backup(copy)
        # In one file, which can be read from a disk that nobody may write to.
        copy.execute("PRAGMA journal_mode=DELETE")
    return len(segments)
