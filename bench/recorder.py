"""What a decision costs the game's own thread while the sender spools and sends beside it.

Wall time, since that is what a game feels: waiting for the interpreter lock and for other processes is inside. The
control is the same loop around an object that does nothing, so its tail is the machine's own.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.figures import Figure, Findings, Gate, all_of
from bench.games import CART, cart_obs
from bench.scale import Scale
from understudy.client.connect import Game, connect
from understudy.core.statistics import percentiles
from understudy.core.tensors import Array
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

_SEATS = 16
_RATE_HZ = 60.0
_PACED_ROUNDS = 3
_P99_US, _P9999_US = 10.0, 1000.0
_MASK = 4095


class _Nothing:
    """The control: the same calls, recording nothing."""

    def acted(self, obs: Array, action: int) -> None: ...

    def reward(self, x: float) -> None: ...

    def end(self, obs: Array) -> None: ...


def measure(folder: Path, scale: Scale) -> Findings:
    """Percentiles of `acted` + `reward`, without pauses and at 60 Hz."""
    obs = cart_obs(_MASK + 1)
    game = connect(spec=CART, data=folder, consent="granted")
    try:
        _tight([game.episode("warm-up")], obs, min(20_000, scale.tight_decisions))
        tight, control, cpu_s = _tight_rounds(game, obs, scale)
        paced, paced_control = _paced_rounds(game, obs, scale)
        for step in range(3):
            if game.flush(20.0 * (step + 1)):
                break
    finally:
        all_sent = game.close(timeout_s=30.0)
    gate = _gate(game, folder, all_sent)
    found = Findings()
    found.figures += _figures("tight loop", tight, gate, bound_by=_bound(control))
    found.figures += _figures(f"60 Hz, {_SEATS} players", paced, gate, bound_by=_bound(paced_control))
    found.figures += _figures("control (records nothing), tight loop", control, gate, is_control=True)
    found.figures += _figures("control (records nothing), 60 Hz", paced_control, gate, is_control=True)
    found.figures.append(
        Figure(
            name="whole client: decide, encode, spool, send into the stream",
            unit="steps/s/core", values=[scale.tight_decisions / one for one in cpu_s], gate=gate,
        )
    )  # fmt: skip
    return found


def _tight_rounds(game: Game, obs: Array, scale: Scale) -> tuple[list[Array], list[Array], list[float]]:
    tight, control, cpu_s = [], [], []
    for _ in range(scale.rounds):
        began = time.process_time()
        episode = game.episode("p-0")
        tight.append(_tight([episode], obs, scale.tight_decisions))
        episode.end(obs[0])
        game.flush(30.0)
        cpu_s.append(time.process_time() - began)
        control.append(_tight([_Nothing()], obs, scale.tight_decisions))
    return tight, control, cpu_s


def _tight(players: Sequence[object], obs: Array, n: int) -> Array:
    """Nanoseconds of each decision, one right after the other."""
    took, clock, player = np.empty(n, np.int64), time.perf_counter_ns, players[0]
    acted: Callable[..., None] = player.acted  # type: ignore[attr-defined]
    reward: Callable[..., None] = player.reward  # type: ignore[attr-defined]
    for at in range(n):
        seen = obs[at & _MASK]
        began = clock()
        acted(seen, at & 1)
        reward(1.0)
        took[at] = clock() - began
    return took


def _paced_rounds(game: Game, obs: Array, scale: Scale) -> tuple[list[Array], list[Array]]:
    paced, control = [], []
    frames = max(2, int(scale.paced_s / 2 / _PACED_ROUNDS * _RATE_HZ))
    for _ in range(_PACED_ROUNDS):
        episodes = [game.episode(f"p-{seat}") for seat in range(_SEATS)]
        paced.append(_paced(episodes, obs, frames))
        for episode in episodes:
            episode.end(obs[0])
        control.append(_paced([_Nothing() for _ in range(_SEATS)], obs, frames))
    return paced, control


def _paced(players: Sequence[object], obs: Array, frames: int) -> Array:
    """Nanoseconds of each decision: all players decide, then the game sleeps until its next frame."""
    took, clock = np.empty((frames, len(players)), np.int64), time.perf_counter_ns
    due_s = time.perf_counter()
    for frame in range(frames):
        for seat, player in enumerate(players):
            seen = obs[(frame + seat) & _MASK]
            began = clock()
            player.acted(seen, frame & 1)  # type: ignore[attr-defined]
            player.reward(1.0)  # type: ignore[attr-defined]
            took[frame, seat] = clock() - began
        due_s += 1 / _RATE_HZ
        time.sleep(max(0.0, due_s - time.perf_counter()))
    return took.ravel()


def _figures(
    what: str, rounds: Sequence[Array], gate: Gate, *, bound_by: str = "", is_control: bool = False
) -> list[Figure]:
    found = [percentiles(one / 1000.0) for one in rounds]
    wanted = (
        ("p50", [one.p50 for one in found], None),
        ("p99", [one.p99 for one in found], _P99_US),
        ("p99.99", [one.p9999 for one in found], _P9999_US),
    )
    return [
        Figure(
            name=f"game thread, {what}: {name}", unit="µs", values=values, goal=None if is_control else goal,
            more_is_better=False, gate=gate, bound_by=bound_by if goal else "",
        )
        for name, values, goal in wanted
    ]  # fmt: skip


def _bound(control: Sequence[Array]) -> str:
    found = percentiles(np.concatenate(control) / 1000.0)
    return f"the machine alone (control): p99 {found.p99:.1f} µs, p99.99 {found.p9999:.0f} µs; the rest is the lock"


def _gate(game: Game, folder: Path, all_sent: bool) -> Gate:
    """Everything recorded was acknowledged, and is stored once."""
    stats, specs = game.stats(), SpecFolder(folder / "models" / "games")
    stream = FileStream(folder / "stream")
    with LocalStore(folder / "store", specs=specs) as store:
        IngestService(stream, store, specs, owner="bench").drain()
        audit = store.audit()
    stream.close()
    return all_of(
        ("all acknowledged", all_sent and stats.acked_steps == stats.recorded_steps and stats.dropped_steps == 0),
        (f"{audit.steps} steps stored once by audit", audit.steps == stats.recorded_steps and not audit.corrupt),
        ("no duplicate, gap or refusal", not (audit.duplicate_steps or audit.gap_chunks or audit.quarantined)),
    )
