"""A history of sends as their clients saw them, and the check that a store agrees with it.

Each frame is an operation in the manner of Jepsen: invoked, then acknowledged (ok), refused (fail)
or neither (info): it may have arrived or not.
"""

import json
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from understudy.client.receipts import AckedFrame
from understudy.core.errors import UnderstudyError
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ports import Ack, Cursor, Link, LiveModels, Stored, TicketBatch
from understudy.stores.view import StoreView


class Op(NamedTuple):
    """An event of an operation: `invoke`, `ok`, `fail` or `info`."""

    kind: str
    frame: AckedFrame


def described(frame: Frame) -> AckedFrame:
    return AckedFrame(frame.session.bytes, frame.chunk_no, len(frame.body), frame.body_crc)


class HistoryLink:
    """A Link that notes every send and its result in a file."""

    def __init__(self, link: Link, path: Path) -> None:
        self._link = link
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @property
    def recording_rate(self) -> float:
        return self._link.recording_rate

    def register(self, spec: GameSpec) -> None:
        self._link.register(spec)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        self._note(["invoke"] * len(frames), frames)
        try:
            acks = self._link.send(frames, players, skipped_steps=skipped_steps)
        except BaseException:
            self._note(["info"] * len(frames), frames)
            raise
        kinds = ["ok" if ack.accepted else "fail" if ack.refused else "info" for ack in acks]
        self._note(kinds, frames)
        return acks

    def _note(self, kinds: Iterable[str], frames: Iterable[Frame]) -> None:
        lines = "".join(
            json.dumps([kind, frame.session.hex, *described(frame)[1:]]) + "\n"
            for kind, frame in zip(kinds, frames, strict=True)
        )
        os.write(self._descriptor, lines.encode())

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        return self._link.bot(after, wait_s=wait_s, schema=schema)

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        return TicketBatch(entry=0)

    def policy(self, model_no: int) -> bytes:
        return self._link.policy(model_no)

    def close(self) -> None:
        self._link.close()
        os.close(self._descriptor)


def read_history(folder: Path) -> Iterator[Op]:
    """Every event of all files; a line that a kill cut off is the last of its file."""
    for path in sorted(folder.glob("*.history")):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                kind, session, chunk_no, length, crc = json.loads(line)
                yield Op(kind, AckedFrame(bytes.fromhex(session), chunk_no, length, crc))


def read_store(folder: Path) -> dict[int, AckedFrame]:
    """Every readable frame by its arrival number."""
    stored: dict[int, AckedFrame] = {}
    with StoreView(folder) as view:
        cursor: Cursor | None = None
        while items := (page := view.tail(cursor, max_items=512, wait_s=0.0)).items:
            cursor = page.cursor
            for item in items:
                if isinstance(item, Stored):
                    stored[item.arrival_no] = described(item.frame)
    return stored


class Reader:
    """Follows a store while its processes are killed; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: list[tuple[int, AckedFrame]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        cursor: Cursor | None = None
        while not self._stop.wait(0.02):
            try:
                with StoreView(self._folder) as view:
                    while not self._stop.is_set():
                        page = view.tail(cursor, max_items=256, wait_s=0.1)
                        cursor = page.cursor
                        self.seen += [
                            (item.arrival_no, described(item.frame))
                            for item in page.items
                            if isinstance(item, Stored)
                        ]
            except UnderstudyError:
                continue  # no store yet

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)


def check_history(
    history: Iterable[Op],
    stored: Mapping[int, AckedFrame],
    seen: Sequence[tuple[int, AckedFrame]] = (),
) -> list[str]:
    """Everything in which a store, and what a reader saw of it, disagrees with the clients."""
    kinds: dict[AckedFrame, set[str]] = {}
    for op in history:
        kinds.setdefault(op.frame, set()).add(op.kind)
    times = Counter(stored.values())
    places = Counter((frame.session, frame.chunk_no) for frame in stored.values())
    problems = [f"stored twice: {place}" for place, count in places.items() if count > 1]
    for frame, events in kinds.items():
        if "ok" in events and not times[frame]:
            problems.append(f"acknowledged but not stored: {frame}")
        if events <= {"invoke", "fail"} and "fail" in events and times[frame]:
            problems.append(f"refused but stored: {frame}")
    problems += [f"stored but never sent: {frame}" for frame in times if frame not in kinds]
    numbers = [number for number, _ in seen]
    if numbers != sorted(set(numbers)):
        problems.append("a reader saw an arrival number twice or out of order")
    problems += [
        f"a reader saw {frame} as number {number}, where {stored.get(number)} is stored"
        for number, frame in seen
        if stored.get(number) != frame
    ]
    return problems
