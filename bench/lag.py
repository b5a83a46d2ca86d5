"""From a step to where another process can sample it: a game, ingest and a reader, each a process of its own.

A step is complete when the game has said what came of it; that moment is written into the observation that follows,
and the reader compares it with the moment in which a refresh first shows the step. The clock is the machine's
monotonic one, which its processes share.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import slow_sync
from bench.figures import Figure, Findings, Gate, all_of
from bench.scale import Scale
from understudy.app.data import DataFolder
from understudy.app.roles.children import report, stop_with_parent
from understudy.app.roles.ingest import IngestRole
from understudy.client.connect import connect
from understudy.core.chunk import RowKind
from understudy.core.errors import ConfigError
from understudy.core.game import game_spec
from understudy.core.spaces import Box
from understudy.core.statistics import percentiles
from understudy.core.tensors import DTYPES
from understudy.stores.local import LocalStore
from understudy.stores.reader import SegmentReader

_SPEC = game_spec("bench-lag", obs=Box((4,), DTYPES["F64"]), actions=2)
_PLAYERS = 4
_RATE_HZ = 60.0
_LINGER_S = 0.02
_POLL_S = 0.002
_WARM_UP_S = 0.5
_ROUNDS = 3
_GOAL_MS = 150.0


def measure(folder: Path, scale: Scale) -> Findings:
    """p50 and p99 of several plays, each in a store of its own."""
    rounds = 1 if scale.lag_s < 4 else _ROUNDS
    lags, gates = [], []
    for at in range(rounds):
        lag_ms, gate = _play(folder / str(at), scale.lag_s / rounds)
        lags.append(lag_ms)
        gates.append(gate)
    gate = Gate(all(one.passed for one in gates), next((one.says for one in gates if not one.passed), gates[0].says))
    found = [percentiles(lag_ms) for lag_ms in lags]
    name = f"step to sampleable in another process, {_LINGER_S * 1000:.0f} ms linger"
    bound = "linger, two syncs (stream, store), the polls of ingest and reader, three processes on the cores there are"
    figures = [
        Figure(
            name=f"{name}: {label}", unit="ms", values=values, goal=_GOAL_MS if label == "p99" else None,
            more_is_better=False, gate=gate, bound_by=bound if label == "p99" else "",
        )
        for label, values in (
            ("p50", [one.p50 for one in found]), ("p99", [one.p99 for one in found]),
            ("worst", [one.max for one in found]),
        )
    ]  # fmt: skip
    return Findings(figures=figures)


def _play(folder: Path, seconds: float) -> tuple[np.ndarray[Any, Any], Gate]:
    folder.mkdir()
    with _child("ingest", folder) as ingest, _child("watch", folder) as watch:
        _line(ingest)
        _line(watch)
        with _child("play", folder, str(seconds)) as play:
            recorded = _line(play)
        _close(ingest)
        seen = _close(watch)
    with LocalStore(folder / "store") as store:
        audit = store.audit()
    lag_ms = np.asarray(seen["lag_ms"])
    gate = all_of(
        (f"all {recorded['steps']} steps seen by the reader, once", seen["steps"] == recorded["steps"]),
        ("stored once by audit", audit.steps == recorded["steps"] and not (audit.duplicate_steps or audit.gap_chunks)),
    )
    return lag_ms, gate


@contextlib.contextmanager
def _child(role: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.lag", role, *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        # A role ends when its standard input does; whoever does not is killed.
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError("a process of the lag measurement ended without an answer")
    found: dict[str, Any] = json.loads(text)
    return found


def _close(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.close()
    return _line(process)


# --- The three processes ----------------------------------------------------------------------------------------------


def _ingest(folder: Path) -> None:
    stop = stop_with_parent()
    with IngestRole(DataFolder(folder)) as role:
        report({"ready": True})
        role.run(stop)
        report({"stored": role.service.stats.steps})


def _play_steps(folder: Path, seconds: float) -> None:
    """Four players at 60 steps a second; each observation carries the player, its number and the time."""
    game = connect(spec=_SPEC, data=folder, consent="granted", linger_s=_LINGER_S)
    recorders = [game.recorder(f"p-{player}") for player in range(_PLAYERS)]
    for player, recorder in enumerate(recorders):
        recorder.reset(np.array([player, 0, time.monotonic(), 0.0]))
    frames, due_s = int(seconds * _RATE_HZ), time.monotonic()
    for frame in range(1, frames + 1):
        for player, recorder in enumerate(recorders):
            recorder.step(0, 1.0, np.array([player, frame, time.monotonic(), 0.0]), False, False)
        due_s += 1 / _RATE_HZ
        time.sleep(max(0.0, due_s - time.monotonic()))
    is_sent = game.close(timeout_s=20.0)
    report({"steps": game.stats().acked_steps if is_sent else -1})


def _watch(folder: Path) -> None:
    """Refresh a reader again and again; note when each step is there for the first time."""
    stop = stop_with_parent()
    reader: SegmentReader | None = None
    first_seen: dict[tuple[int, int], float] = {}
    began_s = time.monotonic()
    known = -1
    report({"ready": True})
    while True:
        is_last = stop.is_set()
        reader = reader or _reader(folder)
        if reader is not None:
            reader.refresh()
            if reader.n_rows and reader.last_arrival != known:
                known = reader.last_arrival
                _note_new(reader, first_seen, began_s + _WARM_UP_S)
        if is_last:
            break
        time.sleep(_POLL_S)
    lag_ms = [round(lag * 1000, 3) for lag in first_seen.values() if lag >= 0]
    report({"steps": len(first_seen), "lag_ms": lag_ms})


def _note_new(reader: SegmentReader, first_seen: dict[tuple[int, int], float], count_from_s: float) -> None:
    now_s = time.monotonic()
    ids = np.arange(reader.n_rows, dtype=np.int64)
    steps = ids[reader.gather("row", ids) == RowKind.STEP]
    following = reader.gather("obs", steps + 1)
    for player, number, closed_s, _ in following.tolist():
        if (key := (int(player), int(number))) not in first_seen:
            # Imports, first files and first claims of the warm-up are seen but not counted.
            first_seen[key] = now_s - closed_s if closed_s >= count_from_s else -1.0


def _reader(folder: Path) -> SegmentReader | None:
    try:
        return SegmentReader(folder / "store", game=_SPEC.game)
    except (ConfigError, OSError):
        return None


if __name__ == "__main__":
    slow_sync.obey()
    match sys.argv[1:]:
        case ["ingest", where]:
            _ingest(Path(where))
        case ["watch", where]:
            _watch(Path(where))
        case ["play", where, for_s]:
            _play_steps(Path(where), float(for_s))
