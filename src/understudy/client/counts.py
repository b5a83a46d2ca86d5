"""Counts: what a sender did so far, as numbers."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    spooled_steps: int = 0
    acked_steps: int = 0
    refused_steps: int = 0
    dropped_steps: int = 0
    sent_frames: int = 0
    acked_frames: int = 0
    refused_frames: int = 0
    failed_sends: int = 0
    adopted_sessions: int = 0
    expired_sessions: int = 0
    last_error: str = ""
