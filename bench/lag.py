"""The time from a step until another process can sample it; game, ingest and reader are processes.

A step is complete when the game has reported its result; that time is written into the next
observation. The reader acts like a learner: it tails the store, decodes each chunk and inserts it
into a replay. It compares that time with the time when the replay can first draw the step. The
clock is the machine's monotonic one, which its processes share.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from bench import slow_sync
from bench.figures import Figure, Findings, Gate, all_of, percentiles
from bench.sizes import Scale
from understudy.algorithm import Transitions
from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, connect
from understudy.client.sender import SenderConfig
from understudy.core.errors import ConfigError
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import Chunk, RowKind
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box
from understudy.learn.replay import HostReplay
from understudy.platform.children import report, stop_with_parent
from understudy.platform.ingest import IngestRole
from understudy.ports import Cursor, Stored
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView

ROOT = Path(__file__).resolve().parents[1]
_SPEC = game_spec("bench-lag", obs=Box((4,), DTYPES["F64"]), actions=2)
_PLAYERS = 4
_RATE_HZ = 60.0
_LINGER_S = 0.02
_POLL_S = 0.002
_WAIT_S = 0.05
_WARM_UP_S = 0.5
_ROUNDS = 3
_GOAL_MS = 150.0


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure p50 and p99 of several rounds of play, each with its own store."""
    rounds = 1 if scale.lag_s < 4 else _ROUNDS
    lags = []
    gates = []
    for at in range(rounds):
        lag_ms, gate = _play(folder / str(at), scale.lag_s / rounds)
        lags.append(lag_ms)
        gates.append(gate)
    gate = Gate(
        all(each.passed for each in gates),
        next((each.says for each in gates if not each.passed), gates[0].says),
    )
    by_round = [percentiles(lag_ms) for lag_ms in lags]
    name = f"step to sampleable in another process, {_LINGER_S * 1000:.0f} ms linger"
    bound = (
        "linger, two syncs (stream, store), the polls of ingest and reader, three processes on "
        "the available cores"
    )
    figures = [
        Figure(
            name=f"{name}: {label}",
            unit="ms",
            values=values,
            goal=_GOAL_MS if label == "p99" else None,
            more_is_better=False,
            gate=gate,
            bound_by=bound if label == "p99" else "",
        )
        for label, values in (
            ("p50", [each.p50 for each in by_round]),
            ("p99", [each.p99 for each in by_round]),
            ("worst", [each.max for each in by_round]),
        )
    ]
    return Findings(figures=figures)


def _play(folder: Path, seconds: float) -> tuple[np.ndarray[Any, Any], Gate]:
    folder.mkdir()
    with (
        child("bench.lag", "ingest", folder) as ingest,
        child("bench.lag", "watch", folder) as watch,
    ):
        line(ingest)
        line(watch)
        with child("bench.lag", "play", folder, str(seconds)) as play:
            recorded = line(play)
        close(ingest)
        seen = close(watch)
    with LocalStore(folder / "store") as store:
        audit = store.audit()
    lag_ms = np.asarray(seen["lag_ms"])
    gate = all_of(
        (
            f"all {recorded['steps']} steps in the reader's replay, once",
            seen["steps"] == recorded["steps"],
        ),
        (
            "stored once by audit",
            audit.steps == recorded["steps"] and not (audit.duplicate_steps or audit.gap_chunks),
        ),
    )
    return lag_ms, gate


@contextlib.contextmanager
def child(module: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a module of this package and ends when its standard input closes."""
    command = [sys.executable, "-m", module, *map(str, words)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process
    finally:
        # A role ends when its standard input closes; otherwise it is killed.
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next report of a process."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError("a process of a measurement ended without a report")
    fields: dict[str, Any] = json.loads(text)
    return fields


def close(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Close the standard input of a process and return its last report."""
    assert process.stdin is not None
    process.stdin.close()
    return line(process)


# --- The three processes --------------------------------------------------------------------------


def _ingest(folder: Path) -> None:
    stop = stop_with_parent()
    with IngestRole(DataFolder(folder)) as role:
        report({"ready": True})
        role.run(stop)
        report({"stored": role.service.stats.steps})


def _play_steps(folder: Path, seconds: float) -> None:
    """Four players at 60 steps per second; an observation is player, number and time."""
    config = ClientConfig(sender=SenderConfig(linger_s=_LINGER_S))
    game = connect(_SPEC, data=folder, consent="granted", config=config)
    recorders = [game.recorder(f"p-{player}") for player in range(_PLAYERS)]
    for player, recorder in enumerate(recorders):
        recorder.reset(np.array([player, 0, time.monotonic(), 0.0]))
    frames = int(seconds * _RATE_HZ)
    due_s = time.monotonic()
    for frame in range(1, frames + 1):
        for player, recorder in enumerate(recorders):
            recorder.step(0, 1.0, np.array([player, frame, time.monotonic(), 0.0]), False, False)
        due_s += 1 / _RATE_HZ
        time.sleep(max(0.0, due_s - time.monotonic()))
    is_sent = game.close(timeout_s=20.0)
    report({"steps": game.stats().acked_steps if is_sent else -1})


def _watch(folder: Path) -> None:
    """Follow the store into a replay; record when each step can first be drawn."""
    stop = stop_with_parent()
    replay = HostReplay(_SPEC, Transitions(batch=1))
    cursor: Cursor | None = None
    lags_s: list[float] = []
    count_from_s = time.monotonic() + _WARM_UP_S
    report({"ready": True})
    view = _view(folder, stop)
    while True:
        is_last = stop.is_set()
        page = view.tail(cursor, max_items=1024, wait_s=0.0 if is_last else _WAIT_S)
        cursor = page.cursor
        for item in page.items:
            if isinstance(item, Stored) and item.chunk is not None:
                replay.insert(item.chunk)
                lags_s += _lags(item.chunk, count_from_s)
        if is_last and not page.items:
            break
    view.close()
    report({"steps": replay.n_sampleable, "lag_ms": [round(lag_s * 1000, 3) for lag_s in lags_s]})


def _lags(chunk: Chunk, count_from_s: float) -> list[float]:
    """Seconds since each step of a chunk was complete; steps of the warm-up are left out."""
    now_s = time.monotonic()
    steps = np.flatnonzero(chunk.columns["row"] == RowKind.STEP)
    complete_s = chunk.columns["obs"][steps + 1, 2]
    return [now_s - at_s for at_s in complete_s.tolist() if at_s >= count_from_s]


def _view(folder: Path, stop: Event) -> StoreView:
    """The store, once ingest has created it."""
    while True:
        try:
            return StoreView(folder / "store")
        except ConfigError:
            if stop.wait(_POLL_S):
                raise


if __name__ == "__main__":
    slow_sync.obey()
    match sys.argv[1:]:
        case ["ingest", where]:
            _ingest(Path(where))
        case ["watch", where]:
            _watch(Path(where))
        case ["play", where, for_s]:
            _play_steps(Path(where), float(for_s))
