"""Objects on disk: named bytes, created once and never changed; the storage of the registry.

A backend needs only one conditional write: create if absent. On a disk that is a hard link; in S3
(`cloud.py`) it is a request with If-None-Match.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from understudy.core.errors import ConfigError, Refused, StorageFailed
from understudy.core.log import make_folder, storage_error, sync_folder
from understudy.ports import Objects


def open_objects(location: str | Path) -> Objects:
    """Open the objects in a folder or at a URL such as s3://bucket/path."""
    text = str(location)
    # A path as text must look like one, so that a mistyped URL does not become a new folder.
    if isinstance(location, str) and not ("://" in text or text.startswith(("/", "./", "../"))):
        raise ConfigError(
            f"{text[:80]!r} is neither a URL nor a path; use s3://BUCKET/PATH, or ./{text[:80]} "
            "for a folder of that name"
        )
    if "://" not in text or text.startswith("file://"):
        return FolderObjects(Path(text.removeprefix("file://")))
    from understudy.models.cloud import CloudObjects

    return CloudObjects(text)


_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


def check_object_name(name: str) -> str:
    """Return the name; Refused when it is invalid or could escape the folder."""
    parts = name.split("/")
    if len(name) > 512 or any(
        not part or part.startswith(".") or not set(part) <= _LETTERS for part in parts
    ):
        raise Refused(
            "bad_name",
            f"{name[:60]!r} is not a valid object name; use at most 512 of A-Z a-z 0-9 . _ - and "
            "slashes, without empty parts or parts that start with a dot",
        )
    return name


class FolderObjects:
    """Objects as files; an object survives a power cut once `create` has returned."""

    poll_every_s = 0.0

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; use a folder for models")
        self._folder = folder

    def get(self, name: str) -> bytes | None:
        try:
            return (self._folder / check_object_name(name)).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def create(self, name: str, raw: bytes) -> bool:
        path = self._folder / check_object_name(name)
        if path.is_dir():
            raise StorageFailed(f"{path} is a folder, where a file belongs; move it away")
        if path.exists():
            return False
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            make_folder(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            # Unlike a rename, a link never replaces a file that another process just created.
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_error(error, f"writing {name}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        sync_folder(path.parent)
        return True

    def list(self, prefix: str) -> Sequence[str]:
        root = self._folder / check_object_name(prefix)
        names: list[str] = []
        for folder, _, files in os.walk(root):
            parent = Path(folder).relative_to(self._folder).as_posix()
            for file in files:
                # Files of other programs, and links that lead nowhere, are no objects.
                with contextlib.suppress(Refused):
                    name = check_object_name(f"{parent}/{file}")
                    if os.path.isfile(os.path.join(folder, file)):
                        names.append(name)
        return sorted(names)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / check_object_name(name)).unlink()
