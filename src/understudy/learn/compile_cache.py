"""JAX's compilation cache on disk, with removal of truncated entries.

JAX writes an entry in place and never rewrites it: after a kill or a full disk, every later process
would fail to read the truncated entry, warn about it, and compile the program again.
"""

import contextlib
import os
import time
import zlib
from pathlib import Path

_STAMP = "checked"
"""The file whose mtime is the time of the last check; older entries are not checked again."""
_ZSTD = b"\x28\xb5\x2f\xfd"
"""The magic number of entries written with the zstandard package; these are not checked."""


def delete_truncated_entries(folder: Path) -> int:
    """Delete truncated entries and return their number; skips a missing or read-only folder."""
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
        os.utime(stamp, (now_s, now_s))  # entries written in the meantime are checked next time
    return n_dropped


def _is_whole(entry: os.DirEntry[str], *, checked_s: float) -> bool:
    stat = entry.stat()
    if stat.st_size == 0 or stat.st_mtime < checked_s:
        return stat.st_size > 0
    raw = Path(entry).read_bytes()
    try:
        return raw.startswith(_ZSTD) or bool(zlib.decompress(raw))
    except zlib.error:
        return False


def use_compile_cache() -> None:
    """Cache compiled programs on disk, so that later runs of the same shapes need not compile.

    UNDERSTUDY_COMPILE_CACHE sets the folder; if it is empty, or if JAX already has a cache folder,
    nothing changes.
    """
    import jax

    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "understudy" / "jax"
    folder = os.environ.get("UNDERSTUDY_COMPILE_CACHE", str(default))
    if folder and not getattr(jax.config, "jax_compilation_cache_dir", None):
        delete_truncated_entries(Path(folder))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
