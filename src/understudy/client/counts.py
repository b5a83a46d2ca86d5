"""Counts: what a sender and a whole client did so far, as numbers."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a Game did so far; steps are closed transitions."""

    recorded_steps: int
    skipped_steps: int
    """Played and not recorded, because the platform asked for a share of episodes only."""
    keep_share: float
    """The probability with which the next episode is recorded."""
    spooled_steps: int
    acked_steps: int
    refused_steps: int
    dropped_steps: int
    sent_frames: int
    acked_frames: int
    refused_frames: int
    failed_sends: int
    adopted_sessions: int
    expired_sessions: int
    """What killed games left and nobody could send within a week; it was deleted."""
    bad_inputs: int
    ignored_calls: int
    open_episodes: int
    last_error: str
    bot: str
    """Who plays new episodes, such as `my-game/7`; empty while there is no bot."""
    refused_bots: int
    last_bot_error: str
    """Why the newest bot is not played, or could not be fetched; the last good one stays."""
