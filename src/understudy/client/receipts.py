"""Receipts: a file with a line for every acknowledged frame.

`understudy data verify --receipts FILE` answers what became of each of them.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from understudy.core.errors import ConfigError, Corrupt
from understudy.core.log import storage_error
from understudy.experience.frame import MAX_BODY_BYTES, MAX_COUNT, Frame

_MAX_LINE_BYTES = 1 << 16
"""A longer line is no receipt, and is not read at once."""


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
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"receipts {str(path)[:80]!r} cannot be written: "
                f"{getattr(error, 'strerror', None) or error}; use a file in an existing folder, "
                "such as 'receipts.jsonl'"
            ) from None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
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
        raw = lines.encode()
        try:
            # Opened for each call: a game with many connections keeps no descriptor for it.
            descriptor = self._open()
            try:
                if os.lseek(descriptor, 0, os.SEEK_END):
                    os.lseek(descriptor, -1, os.SEEK_END)
                    # A kill or a full disk may have cut the last line, also of another process.
                    if os.read(descriptor, 1) != b"\n":
                        raw = b"\n" + raw
                while raw:
                    raw = raw[os.write(descriptor, raw) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn(
                "receipts",
                "receipts of these acknowledgements are missing: "
                f"{storage_error(error, f'writing {self._path}', then='continue')}",
            )


def read_receipts(
    path: Path, *, on_cut: Callable[[int], object] = lambda number: None
) -> Iterator[AckedFrame]:
    """Yield every receipt of a file; `on_cut` gets the number of each line that was cut off.

    A kill or a full disk cuts a line, and its receipt cannot be checked. The line of another
    process may follow it without a newline.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_BYTES), b""), 1):
            text = line.strip()
            if not text:
                continue
            cut, brace, rest = text.rpartition(b"{")
            has_end = text.endswith(b"}")
            is_line = len(line) < _MAX_LINE_BYTES or line.endswith(b"\n")
            if is_line and (cut or bool(brace) != has_end):
                on_cut(number)
                if not (brace and has_end):
                    continue
            try:
                fields = json.loads(brace + rest if is_line else b"")
                yield AckedFrame(
                    uuid.UUID(fields["session"]).bytes,
                    _number(fields["chunk_no"], MAX_COUNT),
                    _number(fields["length"], MAX_BODY_BYTES + 1),
                    _number(fields["crc"], 1 << 32),
                )
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise Corrupt(
                    f"line {number} of {path} is not a receipt; remove the line to check the rest"
                ) from None


def _number(field: object, end: int) -> int:
    if type(field) is not int or not 0 <= field < end:
        raise ValueError
    return field
