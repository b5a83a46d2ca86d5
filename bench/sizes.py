"""Sizes of a run: full for results, quick for a preview, tiny for the smoke test."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes and repeats of every measurement."""

    name: str
    rounds: int
    """How often a rate or a ratio is measured."""
    tight_decisions: int
    """Decisions in one round of the recorder without pauses."""
    paced_s: float
    """Seconds of play at 60 decisions per second and player."""
    chunks: int
    """512-step chunks in one round of ingest."""
    short_chunks: int
    """64-step chunks in one round of ingest."""
    frames: int
    """84x84 observations in one round of ingest."""
    sessions: int
    """Concurrent sessions in one round of a store."""
    commits: int
    """Durable commits in one round of a log or a store."""
    lag_s: float


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="full",
            rounds=7,
            tight_decisions=200_000,
            paced_s=24.0,
            chunks=512,
            short_chunks=1024,
            frames=8_192,
            sessions=1_000,
            commits=16,
            lag_s=25.0,
        ),
        Scale(
            name="quick",
            rounds=3,
            tight_decisions=50_000,
            paced_s=4.0,
            chunks=256,
            short_chunks=256,
            frames=2_048,
            sessions=1_000,
            commits=8,
            lag_s=5.0,
        ),
        Scale(
            name="tiny",
            rounds=1,
            tight_decisions=2_000,
            paced_s=0.3,
            chunks=8,
            short_chunks=16,
            frames=128,
            sessions=20,
            commits=2,
            lag_s=1.0,
        ),
    )
}
