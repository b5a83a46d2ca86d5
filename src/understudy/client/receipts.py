"""Receipts: a file with a line for every acknowledged frame.

`understudy data verify --receipts FILE` answers what became of each of them.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from understudy.core.errors import ConfigError, Corrupt
from understudy.experience.frame import Frame


class AckedFrame(NamedTuple):
    """An acknowledged frame: its place in its session, and length and checksum of its body."""

    session: bytes
    chunk_no: int
    length: int
    crc: int


class Receipts:
    """Adds acknowledged frames to a file; any number of processes may share it. Not synced."""

    def __init__(self, path: str | os.PathLike[str], *, warn: Callable[[str, str], None]) -> None:
        """`warn` is called with a topic and a text when the file cannot be written."""
        self._warn = warn
        try:
            self._path = Path(path)
            os.close(self._open())
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                # A killed process may have left a cut line.
                self._is_cut = file.read(1) not in (b"", b"\n")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"receipts {str(path)[:80]!r} cannot be written: "
                f"{getattr(error, 'strerror', None) or error}; use a file in an existing folder, "
                "such as 'receipts.jsonl'"
            ) from None

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        return os.open(self._path, flags, 0o600)

    def add(self, frames: Iterable[Frame]) -> None:
        """Add a line for each frame; if that fails, a warning is issued and recording continues."""
        lines = "".join(
            json.dumps(
                {
                    "session": str(frame.session),
                    "chunk_no": frame.chunk_no,
                    "length": len(frame.body),
                    "crc": frame.body_crc,
                }
            )
            + "\n"
            for frame in frames
        )
        raw = (b"\n" if self._is_cut else b"") + lines.encode()
        try:
            # Opened for each call: a game with many connections keeps no descriptor for it.
            descriptor = self._open()
            n_written = 0
            try:
                while n_written < len(raw):
                    n_written += os.write(descriptor, raw[n_written:])
            finally:
                os.close(descriptor)
                if n_written:
                    self._is_cut = n_written < len(raw)
        except OSError as error:
            self._warn(
                "receipts",
                f"acknowledgements cannot be added to {self._path}: {error}; make it writable",
            )


def read_receipts(
    path: Path, *, on_cut: Callable[[int], object] = lambda number: None
) -> Iterator[AckedFrame]:
    """Yield every receipt of a file; `on_cut` gets the number of each line that was cut off.

    A kill or a full disk cuts a line, and its receipt cannot be checked.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text:
                continue
            if text.startswith(b"{") and not text.endswith(b"}"):
                on_cut(number)
                continue
            try:
                fields = json.loads(text)
                yield AckedFrame(
                    uuid.UUID(fields["session"]).bytes,
                    int(fields["chunk_no"]),
                    int(fields["length"]),
                    int(fields["crc"]),
                )
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                raise Corrupt(
                    f"line {number} of {path} is not a receipt; remove the line to check the rest"
                ) from None
