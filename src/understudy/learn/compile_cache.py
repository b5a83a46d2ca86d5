"""JAX's folder of compiled programs: an entry that was cut short while it was written is taken out.

JAX writes an entry in place and never writes it again: one that a kill or a full disk has cut would
be read in vain, with a warning, by every process to come, and its program compiled each time.
"""

import contextlib
import os
import time
import zlib
from pathlib import Path

_STAMP = "checked"
"""Its time says up to when entries were looked into; most starts then only list the folder."""
_ZSTD = b"\x28\xb5\x2f\xfd"
"""How an entry begins where the zstandard package is installed; such entries are left as they
are."""


def drop_broken(folder: Path) -> int:
    """How many entries were taken out; a folder that is not there or not ours to write is left
    alone."""
    stamp = folder / _STAMP
    now_s = time.time()
    n_dropped = 0
    with contextlib.suppress(OSError):
        checked_s = stamp.stat().st_mtime if stamp.exists() else 0.0
        for entry in os.scandir(folder):
            if entry.name.endswith("-cache") and not _is_whole(entry, checked_s=checked_s):
                os.unlink(entry)
                n_dropped += 1
        stamp.touch()
        os.utime(stamp, (now_s, now_s))  # what was written meanwhile is looked into next time
    return n_dropped


def _is_whole(entry: os.DirEntry[str], *, checked_s: float) -> bool:
    facts = entry.stat()
    if facts.st_size == 0 or facts.st_mtime < checked_s:
        return facts.st_size > 0
    raw = Path(entry).read_bytes()
    try:
        return raw.startswith(_ZSTD) or bool(zlib.decompress(raw))
    except zlib.error:
        return False


def use_compile_cache() -> None:
    """Keep compiled programs on the disk, so that the next run of the same shape starts at once."""
    import jax

    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "understudy" / "jax"
    folder = os.environ.get("UNDERSTUDY_COMPILE_CACHE", str(default))
    if folder and not getattr(jax.config, "jax_compilation_cache_dir", None):
        drop_broken(Path(folder))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
