"""Ingest: from a file stream through every check to the local store, durable and deduplicated."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, Findings, Gate, all_of
from bench.games import CART, SCREEN, OneGame, cart_frames, n_steps, noise, screens, session_frames
from bench.sizes import Scale
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ingest.service import IngestService
from understudy.ports import Audit
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

_FRAME_BYTES = 84 * 84
_PER_SESSION = 2048


@dataclass(frozen=True, slots=True)
class Moved:
    """One drain of a stream into an empty store."""

    cpu_s: float
    wall_s: float
    audit: Audit
    is_idempotent: bool
    """Whether sending the same frames again changed nothing."""


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure ingest of small observations in long and short chunks, then of images."""
    findings = Findings()
    for steps, count, goal in ((512, scale.chunks, 300e3), (64, scale.short_chunks, None)):
        frames = cart_frames(count, steps=steps)
        total = n_steps(frames)
        rounds = _rounds(folder, CART, frames, scale.rounds)
        gate = _gate(rounds, total)
        what = f"ingest, {steps}-step chunks"
        bound = "one core of Python: decode, checks and dedup per chunk"
        findings.figures += _rates(what, "steps/s", rounds, total, gate, goal=goal, bound_by=bound)
    for name, make in (("Atari-like", screens), ("noise", noise)):
        observations = make(min(scale.frames, _PER_SESSION))
        sessions = max(1, scale.frames // _PER_SESSION)
        frames = [frame for _ in range(sessions) for frame in session_frames(SCREEN, observations)]
        total = n_steps(frames)
        rounds = _rounds(folder, SCREEN, frames, max(1, scale.rounds - 2))
        gate = _gate(rounds, total)
        sent = sum(len(frame.body) for frame in frames)
        what = f"ingest, 84x84 {name} frames"
        findings.notes.append(
            f"ingest: 84x84 {name} frames are sent {total * _FRAME_BYTES / sent:.1f}x smaller than "
            "decoded"
        )
        bound = (
            "checksums over each byte (stream, frame, columns), inflate, and copies into the "
            "log and the database"
        )
        megabytes = total * _FRAME_BYTES / 1e6
        findings.figures += _rates(
            what, "MB/s", rounds, megabytes, gate, goal=150.0, bound_by=bound
        )
    return findings


def _rounds(folder: Path, spec: GameSpec, frames: Sequence[Frame], rounds: int) -> list[Moved]:
    return [
        drain(folder / f"{spec.game}-{at}", spec, frames, again=at == 0) for at in range(rounds)
    ]


def drain(folder: Path, spec: GameSpec, frames: Sequence[Frame], *, again: bool = False) -> Moved:
    """Append frames to a new stream; measure how long ingest takes to move them to a new store."""
    stream = FileStream(folder / "stream")
    specs = OneGame(spec)
    append(stream, frames)
    with LocalStore(folder / "store", specs=specs) as store:
        service = IngestService(stream, store, specs, owner="bench")
        cpu = time.process_time()
        wall = time.perf_counter()
        service.drain()
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - wall
        audit = store.audit()
        is_idempotent = True
        if again:
            append(stream, frames)
            service.drain()
            is_idempotent = (
                service.stats.fates["duplicate"] == len(frames) and store.audit() == audit
            )
    stream.close()
    shutil.rmtree(folder)
    return Moved(cpu, wall, audit, is_idempotent)


def append(stream: FileStream, frames: Sequence[Frame], *, at_once: int = 64) -> None:
    for at in range(0, len(frames), at_once):
        assert all(outcome.accepted for outcome in stream.append(frames[at : at + at_once]))


def _gate(rounds: Sequence[Moved], total: int) -> Gate:
    audits = [moved.audit for moved in rounds]
    return all_of(
        (
            f"{total} steps stored once by audit, every round",
            all(audit.steps == total for audit in audits),
        ),
        (
            "sent again: all duplicates, nothing changed",
            all(moved.is_idempotent for moved in rounds),
        ),
        (
            "no gap, rejection or damage",
            not any(
                audit.gap_chunks or audit.quarantined or audit.parked or audit.corrupt
                for audit in audits
            ),
        ),
    )


def _rates(
    what: str,
    unit: str,
    rounds: Sequence[Moved],
    amount: float,
    gate: Gate,
    *,
    goal: float | None,
    bound_by: str,
) -> list[Figure]:
    per_core = [amount / moved.cpu_s for moved in rounds]
    wall = [amount / moved.wall_s for moved in rounds]
    return [
        Figure(
            name=what, unit=f"{unit}/core", values=per_core, goal=goal, gate=gate, bound_by=bound_by
        ),
        Figure(name=f"{what}: wall clock", unit=unit, values=wall, gate=gate),
    ]
