"""The ledger: a record of all acknowledged frames that does not depend on client or store code.

One file per process, one line per acknowledged frame. Frames are decoded by a few lines of code in
this module, so that errors in understudy's own codec are detected.
"""

import json
import os
import struct
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from understudy.core.errors import Corrupt
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ports import Ack, Link, LiveModels, TicketBatch

_MOST_LATENCIES = 20_000


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """An acknowledged frame."""

    session: bytes
    chunk_no: int
    n_steps: int
    crc: int


class Ledger:
    """A file of acknowledged frames, written only by this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._is_cut = False
        self.steps = 0
        """Number of acknowledged steps."""

    def note(self, frames: Iterable[Frame]) -> None:
        """Write a complete line for each acknowledged frame."""
        promises = [_promise(frame) for frame in frames]
        if not promises:
            return
        self.steps += sum(promise.n_steps for promise in promises)
        lines = "".join(
            json.dumps({**asdict(promise), "session": promise.session.hex()}) + "\n"
            for promise in promises
        )
        # If a full disk truncated the last line, the next write starts a new line.
        view = memoryview((b"\n" if self._is_cut else b"") + lines.encode())
        self._is_cut = True
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._is_cut = False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LedgerLink:
    """A Link that records every acknowledgement before it returns it to the client."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._ledger = Ledger(folder)
        self.latencies_s: deque[float] = deque(maxlen=_MOST_LATENCIES)

    @property
    def acked_steps(self) -> int:
        return self._ledger.steps

    @property
    def recording_rate(self) -> float:
        return self._link.recording_rate

    def register(self, spec: GameSpec) -> None:
        self._link.register(spec)

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        return self._link.bot(after, wait_s=wait_s, schema=schema)

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        return self._link.tickets(n, schema=schema, with_control=with_control)

    def policy(self, model_no: int) -> bytes:
        return self._link.policy(model_no)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        began_s = time.perf_counter()
        acks = self._link.send(frames, players, skipped_steps=skipped_steps)
        self.latencies_s.append(time.perf_counter() - began_s)
        self._ledger.note(frame for frame, ack in zip(frames, acks, strict=True) if ack.accepted)
        return acks

    def close(self) -> None:
        self._link.close()
        self._ledger.close()


def _promise(frame: Frame) -> LedgerEntry:
    raw = frame.encode()
    (crc,) = struct.unpack_from("<I", raw, 12)
    (number,) = struct.unpack_from("<Q", raw, 32)
    n_steps = 0
    if raw[5] == 0:
        (length,) = struct.unpack_from("<Q", raw, 64)
        n_steps = int(json.loads(raw[72 : 72 + length])["__metadata__"]["n_steps"])
    return LedgerEntry(raw[16:32], number, n_steps, crc)


def read_ledger(folder: Path) -> Iterator[LedgerEntry]:
    """Yield every entry; incomplete lines are skipped, since their acks never reached a client."""
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        lines = path.read_bytes().split(b"\n")
        for at, line in enumerate(lines[:-1]):
            if line.startswith(b"{") and not line.endswith(b"}"):
                continue  # truncated by a full disk, before the client got the acknowledgement
            try:
                fields = json.loads(line)
                yield LedgerEntry(
                    bytes.fromhex(fields["session"]),
                    fields["chunk_no"],
                    fields["n_steps"],
                    fields["crc"],
                )
            except (ValueError, KeyError, TypeError):
                raise Corrupt(
                    f"line {at + 1} of ledger {path} is not readable; remove it to check the rest"
                ) from None
