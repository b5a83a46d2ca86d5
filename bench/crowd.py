"""Measures one game process with very many players, and the game thread of a small one.

    python bench/crowd.py                   about four minutes on two cores; writes
                                            bench/results/crowd.json
    python bench/crowd.py --before SRC      also measures another checkout, in turn with this one;
                                            SRC is its src folder
    python bench/crowd.py --quick           fewer players; writes nothing unless --out is given
    python bench/crowd.py --paced OUT       only the game thread, a minute; writes the file OUT

Each measurement is a process of its own that records into a data folder, through the public client.
Ten thousand players join within the first seconds, and each takes one decision a second from then
on. At 60 Hz, 16 players take one decision a frame.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn, percentiles  # noqa: E402
from bench.machine import commit  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.client.connect import ClientConfig, Game, connect  # noqa: E402
from understudy.client.episode import Episode  # noqa: E402

_SEATS = 16
_RATE_HZ = 60.0
_TICK_S = 0.01
_OBS = np.zeros((64, 6), np.float32)
_DEADLINE_S = 600.0
_BEFORE = "the checkout before"
_GOALS = {"descriptors": 64.0, "memory_mb": 150.0, "episode_ms": 1.0, "dropped": 0.0}
_PACED = (
    ("p50", "p50"),
    ("p99", "p99"),
    ("p99.99", "p99.99"),
    ("first", "first decision after the sleep between frames: p50"),
    ("later", "all other decisions: p99"),
    ("additions", "20 additions after the same sleep, without the client: p50"),
)
_BOUND = "one interpreter, which encodes a chunk per player and send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    players: int
    seconds: float
    paced_s: float
    rounds: int


SIZES = {
    size.name: size
    for size in (
        Size(name="full", players=10_000, seconds=20.0, paced_s=8.0, rounds=3),
        Size(name="quick", players=1_000, seconds=8.0, paced_s=4.0, rounds=1),
        Size(name="tiny", players=30, seconds=1.0, paced_s=0.5, rounds=1),
    )
}


def main() -> int:
    """Run both parts; 0 if every gate passed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--paced")
    options, sys.argv[1:] = parser.parse_known_args()
    sources = {"ours": ROOT / "src"}
    if options.before is not None:
        sources[_BEFORE] = options.before.resolve()

    def crowd(folder: Path, size: Size, findings: Findings) -> None:
        measured = _in_turn(sources, folder, size, "crowd", size.players, size.seconds)
        for name, rounds in measured.items():
            findings.figures += _crowd_figures(name, size, rounds)
        if options.before is not None:
            findings.notes.append(f"{_BEFORE} is commit {commit(options.before)}")

    def paced(folder: Path, size: Size, findings: Findings) -> None:
        measured = _in_turn(sources, folder, size, "paced", size.paced_s)
        _paced_figures(measured, findings)

    parts = {"crowd": crowd, "paced": paced}
    if options.paced is not None:
        del parts["crowd"]
        sys.argv += ["--out", options.paced]
    return run_once("crowd", about=__doc__, sizes=SIZES, parts=parts)


def _in_turn(
    sources: dict[str, Path], folder: Path, size: Size, *words: object
) -> dict[str, list[dict[str, Any]]]:
    folder.mkdir()

    def run(name: str) -> dict[str, Any]:
        data = folder / f"{len(list(folder.iterdir()))}"
        command = [sys.executable, __file__, "child", data, *words]
        child = subprocess.run(
            [str(word) for word in command],
            env=os.environ | {"PYTHONPATH": str(sources[name])},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_DEADLINE_S,
        )
        fields: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return fields

    return in_turn(size.rounds, {name: functools.partial(run, name) for name in sources})


def _crowd_figures(name: str, size: Size, rounds: list[dict[str, Any]]) -> list[Figure]:
    is_ours = name == "ours"
    what = f"{size.players:,} players in one process" + ("" if is_ours else f", {name}")
    gate = _gate(rounds) if is_ours else Gate(True, "reported beside ours")
    rows = (
        ("descriptors", "descriptors", "count"),
        ("memory_mb", "most memory", "MB"),
        ("episode_ms", "episode(): p99", "ms"),
        ("dropped", "dropped steps", "count"),
        ("acted_us", "acted(): p99", "µs"),
        ("late_ms", "a frame of the game is late: p99", "ms"),
        ("cores", "processor time", "cores"),
        ("close_s", "close()", "s"),
    )
    return [
        Figure(
            name=f"{what}: {label}",
            unit=unit,
            values=[float(fields[key]) for fields in rounds],
            goal=_GOALS.get(key) if is_ours else None,
            more_is_better=False,
            gate=gate,
            bound_by=_BOUND if is_ours else "",
        )
        for key, label, unit in rows
    ]


def _gate(rounds: list[dict[str, Any]]) -> Gate:
    steps = rounds[0]["recorded"]
    return all_of(
        (
            f"all {steps} steps acknowledged",
            all(fields["acked"] == fields["recorded"] for fields in rounds),
        ),
        ("every decision recorded", all(fields["is_complete"] for fields in rounds)),
    )


def _paced_figures(measured: dict[str, list[dict[str, Any]]], findings: Findings) -> None:
    gate = _gate(measured["ours"])
    for name, rounds in measured.items():
        what = f"game thread, 60 Hz, {_SEATS} players" + ("" if name == "ours" else f", {name}")
        findings.figures += [
            Figure(
                name=f"{what}: {label}",
                unit="µs",
                values=[float(fields[part]) for fields in rounds],
                more_is_better=False,
                gate=gate,
            )
            for part, label in _PACED
        ]
    if _BEFORE in measured:
        findings.ratios.append(
            Ratio(
                name=f"game thread, 60 Hz, {_SEATS} players: p99",
                peer=_BEFORE,
                unit="µs",
                ours=[fields["p99"] for fields in measured["ours"]],
                theirs=[fields["p99"] for fields in measured[_BEFORE]],
                gate=gate,
                more_is_better=False,
            )
        )


# --- The measured processes; they run with the src folder of either checkout ----------------------


def _connected(folder: Path) -> Game:
    config = ClientConfig(close_timeout_s=300.0)
    return connect("crowd", obs=6, actions=4, data=folder, consent="granted", config=config)


def _crowd(folder: Path, n_players: int, seconds: float) -> dict[str, Any]:
    """Players join in the first half; each takes one decision in every second from then on."""
    game = _connected(folder)
    ticks_s = round(1 / _TICK_S)
    n_ticks = round(seconds / _TICK_S)
    joins = np.linspace(0, n_ticks // 2, n_players, endpoint=False).astype(int).tolist()
    episodes: list[Episode] = []
    episode_ns = []
    acted_ns = []
    late_s = []
    decisions = np.zeros(n_players, np.int64)
    descriptors = 0
    clock = time.perf_counter_ns
    began_cpu_s = time.process_time()
    began_s = time.perf_counter()
    for tick in range(n_ticks):
        while len(episodes) < n_players and joins[len(episodes)] <= tick:
            began = clock()
            episodes.append(game.episode(f"player-{len(episodes)}"))
            episode_ns.append(clock() - began)
        for episode in episodes[tick % ticks_s :: ticks_s]:
            began = clock()
            episode.acted(_OBS[tick & 63], tick & 3)
            acted_ns.append(clock() - began)
        decisions[tick % ticks_s : len(episodes) : ticks_s] += 1
        if tick % ticks_s == 0:
            descriptors = max(descriptors, _descriptors())
        due_s = began_s + (tick + 1) * _TICK_S
        time.sleep(max(0.0, due_s - time.perf_counter()))
        late_s.append(max(0.0, time.perf_counter() - due_s))
    cores = (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
    # The last decision of each player has no next observation, and is cut.
    expected = int(np.maximum(decisions - 1, 0).sum())
    descriptors = max(descriptors, _descriptors())
    began_s = time.perf_counter()
    game.close()
    close_s = time.perf_counter() - began_s
    stats = game.stats()
    return {
        "descriptors": descriptors,
        "memory_mb": _peak_mb(),
        "episode_ms": percentiles(np.array(episode_ns) / 1e6).p99,
        "acted_us": percentiles(np.array(acted_ns) / 1e3).p99,
        "late_ms": percentiles(np.array(late_s) * 1e3).p99,
        "cores": cores,
        "close_s": close_s,
        "dropped": stats.dropped_steps,
        "recorded": stats.recorded_steps,
        "acked": stats.acked_steps,
        "is_complete": stats.recorded_steps == expected,
    }


def _paced(folder: Path, seconds: float) -> dict[str, Any]:
    """Nanoseconds of each decision; after all players, the game sleeps until its next frame."""
    game = _connected(folder)
    episodes = [game.episode(f"player-{seat}") for seat in range(_SEATS)]
    frames = round(seconds * _RATE_HZ)
    took = np.empty((frames, _SEATS), np.int64)
    clock = time.perf_counter_ns
    due_s = time.perf_counter()
    for frame in range(frames):
        for seat, episode in enumerate(episodes):
            obs = _OBS[(frame + seat) & 63]
            began = clock()
            episode.acted(obs, frame & 3)
            episode.reward(1.0)
            took[frame, seat] = clock() - began
        due_s += 1 / _RATE_HZ
        time.sleep(max(0.0, due_s - time.perf_counter()))
    game.close()
    stats = game.stats()
    # The first second warms up.
    took = took[min(frames // 2, round(_RATE_HZ)) :]
    measured = percentiles(took.ravel() / 1e3)
    return {
        "p50": measured.p50,
        "p99": measured.p99,
        "p99.99": measured.p9999,
        "first": percentiles(took[:, 0] / 1e3).p50,
        "later": percentiles(took[:, 1:].ravel() / 1e3).p99,
        "additions": _after_sleep_us(len(took)),
        "recorded": stats.recorded_steps,
        "acked": stats.acked_steps,
        "is_complete": stats.recorded_steps == (frames - 1) * _SEATS,
    }


def _after_sleep_us(n_frames: int) -> float:
    """Microseconds of 20 additions after the sleep between two frames: this machine's own share."""
    took = []
    for _ in range(n_frames):
        time.sleep(1 / _RATE_HZ)
        began = time.perf_counter_ns()
        total = 0
        for number in range(20):
            total += number
        took.append(time.perf_counter_ns() - began)
    return percentiles(np.array(took) / 1e3).p50


def _descriptors() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def _peak_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["child", folder, "crowd", n_players, seconds]:
            print(json.dumps(_crowd(Path(folder), int(n_players), float(seconds))))
        case ["child", folder, "paced", seconds]:
            print(json.dumps(_paced(Path(folder), float(seconds))))
        case _:
            try:
                sys.exit(main())
            except KeyboardInterrupt:
                sys.exit(130)
