"""How long recording a decision takes on the game's thread while the sender spools and sends.

Wall time, because that is what delays a game: it includes waiting for the interpreter lock and for
other processes. There are two controls without a sender: without pauses, plain arithmetic that
takes as long as a decision, so its tail is that of the machine; at 60 Hz, the least that a recorder
can do, which is to keep copies in a list.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.figures import Figure, Findings, Gate, all_of, percentiles
from bench.games import CART, cart_obs
from bench.sizes import Scale
from understudy.client.connect import Game, connect
from understudy.client.episode import Episode
from understudy.core.tensors import Array
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

_SEATS = 16
_BURST = 50_000
"""Decisions without a pause; far more would outrun the thread that encodes, and be dropped."""
_RATE_HZ = 60.0
_PACED_ROUNDS = 3
_P99_US = 10.0
_P9999_US = 1000.0
_MASK = 4095
_TIGHT = (
    "one interpreter lock, which the sender holds while it works on a block, and a handoff that "
    "yields to it"
)
_PACED = "the first decision of each frame, most likely because code and columns left the caches"
_TAIL = (
    "the interpreter lock while the sender encodes, and other processes on these cores (not "
    "measured separately)"
)


class _Arithmetic:
    """A control: calls of the same length that record nothing."""

    def __init__(self, took_us: float) -> None:
        self._times = range(1)
        while self._us() < took_us:
            self._times = range(len(self._times) + 1 + len(self._times) // 8)

    def _us(self) -> float:
        """The fastest of a few runs, because a busy machine can only slow them down."""
        times_us = []
        for _ in range(9):
            began = time.perf_counter()
            for _ in range(50):
                self.acted(None, 0)
            times_us.append((time.perf_counter() - began) / 50 * 1e6)
        return min(times_us)

    def acted(self, obs: object, action: int) -> None:
        total = action
        for number in self._times:
            total += number

    def reward(self, x: float) -> None: ...


class _Copies:
    """A control: only keeps every observation, action and reward in a list."""

    def __init__(self) -> None:
        self._copies: list[object] = []

    def acted(self, obs: Array, action: int) -> None:
        self._copies.append((obs.copy(), action))

    def reward(self, x: float) -> None:
        self._copies.append(x)


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure percentiles of `acted` plus `reward`, without pauses and at 60 Hz."""
    obs = cart_obs(_MASK + 1)
    game = connect(CART, data=folder, consent="granted")
    try:
        warm = _tight(game.episode("warm-up"), obs, min(20_000, scale.tight_decisions))
        arithmetic = _Arithmetic(float(np.median(warm)) / 1000)
        tight, control, cpu_s = _tight_rounds(game, arithmetic, obs, scale)
        paced, paced_control = _paced_rounds(game, obs, scale)
        for step in range(3):
            if game.flush(20.0 * (step + 1)):
                break
    finally:
        all_sent = game.close(timeout_s=30.0)
    gate = _gate(game, folder, all_sent)
    findings = Findings()
    findings.figures += _figures(
        "tight loop", tight, gate, bound_by=_bound(control, _TIGHT, _TIGHT)
    )
    findings.figures += _figures(
        f"60 Hz, {_SEATS} players", paced, gate, bound_by=_bound(paced_control, _PACED, _TAIL)
    )
    findings.figures += _figures("control (arithmetic), tight loop", control, gate, is_control=True)
    findings.figures += _figures(
        "control (copies in a list), 60 Hz", paced_control, gate, is_control=True
    )
    findings.notes.append(
        f"recorder at 60 Hz: {_first_of_a_frame(paced)}; copies in a list: "
        f"{_first_of_a_frame(paced_control)}"
    )
    findings.figures.append(
        Figure(
            name="whole client: decide, encode, spool, send into the stream",
            unit="steps/s/core",
            values=[scale.tight_decisions / used_s for used_s in cpu_s],
            gate=gate,
        )
    )
    return findings


def _tight_rounds(
    game: Game, arithmetic: _Arithmetic, obs: Array, scale: Scale
) -> tuple[list[Array], list[Array], list[float]]:
    tight = []
    control = []
    cpu_s = []
    for _ in range(scale.rounds):
        began = time.process_time()
        episode = game.episode("p-0")
        parts = []
        for first in range(0, scale.tight_decisions, _BURST):
            parts.append(_tight(episode, obs, min(_BURST, scale.tight_decisions - first)))
            # Without a pause, the game takes the interpreter from the thread that encodes.
            game.flush(30.0)
        tight.append(np.concatenate(parts))
        episode.end(obs[0])
        game.flush(30.0)
        cpu_s.append(time.process_time() - began)
        control.append(_tight(arithmetic, obs, scale.tight_decisions))
    return tight, control, cpu_s


def _tight(player: Episode | _Arithmetic, obs: Array, n: int) -> Array:
    """Nanoseconds of each decision, made without pauses."""
    took = np.empty(n, np.int64)
    clock = time.perf_counter_ns
    for at in range(n):
        current = obs[at & _MASK]
        began = clock()
        player.acted(current, at & 1)
        player.reward(1.0)
        took[at] = clock() - began
    return took


def _paced_rounds(game: Game, obs: Array, scale: Scale) -> tuple[list[Array], list[Array]]:
    paced = []
    control = []
    frames = max(2, int(scale.paced_s / 2 / _PACED_ROUNDS * _RATE_HZ))
    for _ in range(_PACED_ROUNDS):
        episodes = [game.episode(f"p-{seat}") for seat in range(_SEATS)]
        paced.append(_paced(episodes, obs, frames))
        for episode in episodes:
            episode.end(obs[0])
        control.append(_paced([_Copies() for _ in range(_SEATS)], obs, frames))
    return paced, control


def _paced(players: Sequence[Episode | _Copies], obs: Array, frames: int) -> Array:
    """Nanoseconds of each decision; after all players, the game sleeps until its next frame."""
    took = np.empty((frames, len(players)), np.int64)
    clock = time.perf_counter_ns
    due_s = time.perf_counter()
    for frame in range(frames):
        for seat, player in enumerate(players):
            current = obs[(frame + seat) & _MASK]
            began = clock()
            player.acted(current, frame & 1)
            player.reward(1.0)
            took[frame, seat] = clock() - began
        due_s += 1 / _RATE_HZ
        time.sleep(max(0.0, due_s - time.perf_counter()))
    return took.ravel()


def _figures(
    what: str,
    rounds: Sequence[Array],
    gate: Gate,
    *,
    bound_by: tuple[str, str] = ("", ""),
    is_control: bool = False,
) -> list[Figure]:
    by_round = [percentiles(took / 1000.0) for took in rounds]
    rows = (
        ("p50", [each.p50 for each in by_round], None, ""),
        ("p99", [each.p99 for each in by_round], _P99_US, bound_by[0]),
        ("p99.99", [each.p9999 for each in by_round], _P9999_US, bound_by[1]),
    )
    return [
        Figure(
            name=f"game thread, {what}: {name}",
            unit="µs",
            values=values,
            goal=None if is_control else goal,
            more_is_better=False,
            gate=gate,
            bound_by=bound,
        )
        for name, values, goal, bound in rows
    ]


def _bound(control: Sequence[Array], p99: str, p9999: str) -> tuple[str, str]:
    measured = percentiles(np.concatenate(control) / 1000.0)
    return (
        f"{p99}; the control has {measured.p99:.1f} µs",
        f"{p9999}; the control has {measured.p9999:.0f} µs",
    )


def _first_of_a_frame(paced: Sequence[Array]) -> str:
    took = np.concatenate([each.reshape(-1, _SEATS) for each in paced]) / 1000.0
    first = percentiles(took[:, 0])
    others = percentiles(took[:, 1:].ravel())
    return (
        f"the first decision of a frame takes {first.p50:.1f} µs at the median (p99 "
        f"{first.p99:.0f}), the others {others.p50:.1f} µs (p99 {others.p99:.1f})"
    )


def _gate(game: Game, folder: Path, all_sent: bool) -> Gate:
    """Every recorded step was acknowledged, and is stored once."""
    stats = game.stats()
    specs = SpecFolder(folder / "models" / "games")
    stream = FileStream(folder / "stream")
    with LocalStore(folder / "store", specs=specs) as store:
        IngestService(stream, store, specs, owner="bench").drain()
        audit = store.audit()
    stream.close()
    return all_of(
        (
            "all acknowledged",
            all_sent and stats.acked_steps == stats.recorded_steps and stats.dropped_steps == 0,
        ),
        (
            f"{audit.steps} steps stored once by audit",
            audit.steps == stats.recorded_steps and not audit.corrupt,
        ),
        (
            "no duplicate, gap or rejection",
            not (audit.duplicate_steps or audit.gap_chunks or audit.quarantined),
        ),
    )
