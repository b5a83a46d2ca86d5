"""A process of players over a bad network: real client, spool and stream, and a ledger of every promise.

Run as `python -m tests.faults.recorder SETTINGS`, with settings as JSON. It reports lines of JSON until it is killed or
its standard input closes.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.recording import cart
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.data import DataFolder
from understudy.client.connect import ClientConfig, connect, local_link
from understudy.client.sender import SenderConfig
from understudy.core.clock import SystemClock
from understudy.testing import Faults, FaultyLink

_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """What one process does."""

    data: str
    players: list[str]
    seed: int
    faults: dict[str, float] = field(default_factory=dict)
    """Fields of `understudy.testing.Faults`."""
    spool_cap_bytes: int = 64 * 1024 * 1024
    linger_s: float = 0.02
    rate: float = 3000.0
    """Steps a second and player."""


def main(settings: RecorderSettings) -> None:
    """Play until told to stop; then close, which flushes what it can."""
    stop = threading.Event()
    threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
    rng, data, spec = np.random.default_rng(settings.seed), DataFolder(Path(settings.data)), cart()
    # Inside the faults: whatever the stream called durable is promised, whether the client heard of it or not.
    ledger = LedgerLink(local_link(data.root, spec, SystemClock()), data.ledger)
    link = FaultyLink(ledger, Faults(**settings.faults), np.random.default_rng(settings.seed + 1))
    sender = SenderConfig(
        linger_s=settings.linger_s, idle_s=0.5, adopt_every_s=0.5, retry_first_s=0.01, retry_cap_s=0.05
    )
    config = ClientConfig(spool=data.spool, spool_cap_bytes=settings.spool_cap_bytes, sender=sender)
    with connect(spec=spec, link=link, consent="granted", config=config) as game:
        recorders = [game.recorder(player) for player in settings.players]
        for recorder in recorders:
            recorder.reset(_obs(rng))
        recorded, began_s, report_s = 0, time.monotonic(), 0.0
        while not stop.is_set():
            now_s = time.monotonic()
            if now_s > report_s:
                report_s = now_s + _REPORT_EVERY_S
                stats = game.stats()
                _report(recorded, ledger.acked_steps, stats.dropped_steps, stats.failed_sends)
            if recorded > (now_s - began_s) * settings.rate:
                stop.wait(0.002)
                continue
            for recorder in recorders:
                ends = bool(rng.random() < 0.02)
                recorder.step(int(rng.integers(2)), float(rng.normal()), _obs(rng), ends, False, by="script")
                if ends:
                    recorder.reset(_obs(rng))
            recorded += 1


def _obs(rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return rng.normal(size=4).astype(np.float32)


def _report(recorded: int, acked: int, dropped: int, failed_sends: int) -> None:
    fields = {"recorded": recorded, "acked": acked, "dropped": dropped, "failed_sends": failed_sends}
    print(json.dumps(fields), flush=True)


def _watch_stdin(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main(RecorderSettings(**json.loads(sys.argv[1])))
