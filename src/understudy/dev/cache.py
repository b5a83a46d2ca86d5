"""The cache of resolved servers: a folder is there whole or not at all, and a damaged one is seen.

Each is made in a folder beside its place and renamed when it is whole; `files.json` in it lists every file with size
and SHA-256. Sizes are compared before every start, digests by `fetch`.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.core.errors import ServerFailed, StorageFull
from understudy.core.log import FileLock
from understudy.dev.packages import PACKAGES, Package, Tell, cache_root

_LIST = "files.json"
_OTHER_FETCH_S = 1800.0


def place_of(name: str) -> Path:
    """The folder where this server is, or will be."""
    return cache_root() / f"{name}-{PACKAGES[name].version}"


def cached(name: str) -> Path | None:
    """The folder of a resolved server; None when it is not there or not whole."""
    place = place_of(name)
    listed = _listed(place)
    return place if listed and all(_size(place / path) == facts[0] for path, facts in listed.items()) else None


def fetch(name: str, *, package: Package | None = None, tell: Tell = lambda part: None) -> bool:
    """Resolve a server into the cache, naming each part; False when it was there and every byte is right."""
    package, place = package or PACKAGES[name], place_of(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.parent / f".{place.name}.lock"
        with FileLock(lock, what=f"the download of {name}", patience_s=_OTHER_FETCH_S):
            if cached(name) and _digests_hold(place):
                return False
            if trouble := package.trouble():
                raise ServerFailed(f"{name} {package.version} cannot be fetched: {trouble}")
            _make(place, package, tell)
            return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no room for {name} ({package.size_mib} MiB) in {place.parent}: {error}; free some, or name another "
                "folder in UNDERSTUDY_SERVERS_CACHE"
            ) from None
        raise


def _make(place: Path, package: Package, tell: Tell) -> None:
    _sweep(place)
    draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        package.resolve(draft, tell)
        files = sorted(path for path in draft.rglob("*") if path.is_file() and not path.is_symlink())
        listed = {str(path.relative_to(draft)): [path.stat().st_size, _digest(path)] for path in files}
        (draft / _LIST).write_text(json.dumps(listed))
        draft.chmod(0o755)
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    except BaseException:
        _remove(draft)
        raise


def _sweep(place: Path) -> None:
    """Remove what a fetch that was killed has left; whoever calls holds the lock."""
    for path in place.parent.glob(f".{place.name}.*"):
        if path.is_dir():
            _remove(path)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _listed(place: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((place / _LIST).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _digests_hold(place: Path) -> bool:
    return all(_digest(place / path) == facts[1] for path, facts in (_listed(place) or {}).items())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
