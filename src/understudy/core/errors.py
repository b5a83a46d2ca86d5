"""One tree of errors; each says whether a retry helps and whose fault it is.

UnderstudyError
├── ConfigError        a setting, argument or spec that cannot work (caller)
│   ├── InvalidName    a name outside the allowed letters
│   ├── SpecError      a game description that cannot be recorded
│   └── MissingExtra   a package of an optional extra is not installed
├── Refused            a frame or chunk that may not enter, with a reason code (sender)
├── PositionGone       a stream position that was trimmed (nobody: read on from `earliest`)
├── ClaimLost          another owner holds the partition, or a newer epoch (operator)
├── Fenced             a newer learner releases this game's models; this one must stop (operator)
├── Locked             another process holds the folder (operator)
├── StorageFull        no room; nothing was acknowledged (operator, retry helps)
├── StorageFailed      the disk refused; reopen to recover (operator)
│   └── Unreachable    a stream or store elsewhere did not answer; nothing was acknowledged
│                      (operator, retry helps)
├── Corrupt            stored bytes that fail their checksum (operator)
├── LinkFailed         the platform was not reached, or took nothing of a request
│                      (operator, retry helps)
├── ServerFailed       a server for tests and development could not be fetched, started or asked
│                      (operator)
├── GameFailed         an env that raised, or gave what does not fit its spaces (the game's author)
├── LearningFailed     a run that cannot go on, whatever was restored (caller)
└── Closed             used after close (caller)
"""

from typing import Literal

Blame = Literal["caller", "sender", "operator", "nobody"]


class UnderstudyError(Exception):
    """Anything understudy raises on purpose."""

    retry_helps: bool = False
    blame: Blame = "caller"


class ConfigError(UnderstudyError):
    """A setting or argument that cannot work; the message says what to give instead."""


class InvalidName(ConfigError):
    """A name outside the allowed letters."""


class SpecError(ConfigError):
    """A game description that cannot be recorded."""


class MissingExtra(ConfigError):
    """A package of an optional extra is missing; the message holds the install command."""


class Refused(UnderstudyError):
    """A frame or chunk that may not enter; `reason` is a stable code, the text explains."""

    blame: Blame = "sender"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class PositionGone(UnderstudyError):
    """The stream no longer holds this position; read on from `earliest`."""

    retry_helps = True
    blame: Blame = "nobody"

    def __init__(self, position: str, *, earliest: str | None) -> None:
        super().__init__(f"position {position} was trimmed; the earliest kept is {earliest}")
        self.position = position
        self.earliest = earliest


class ClaimLost(UnderstudyError):
    """Another owner or a newer epoch holds the partition; `retry_after_s` says when a claim may
    work."""

    retry_helps = True
    blame: Blame = "operator"

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Fenced(UnderstudyError):
    """A newer learner has taken over; whatever this one wanted to release was not."""

    blame: Blame = "operator"


class Locked(UnderstudyError):
    """Another process holds this folder."""

    retry_helps = True
    blame: Blame = "operator"


class StorageFull(UnderstudyError):
    """No room on the disk; nothing was acknowledged, and work resumes when space returns."""

    retry_helps = True
    blame: Blame = "operator"


class StorageFailed(UnderstudyError):
    """The disk refused a write or a sync; reopening recovers what was acknowledged."""

    blame: Blame = "operator"


class Unreachable(StorageFailed):
    """A stream or store on another machine did not answer, or was too busy; the same call may be
    made again."""

    retry_helps = True


class Corrupt(UnderstudyError):
    """Stored bytes that fail their checksum."""

    blame: Blame = "operator"


class LinkFailed(UnderstudyError):
    """A whole request came to nothing, nothing is lost by it; `code` is stable, `retry_after_s`
    what was asked for."""

    retry_helps = True
    blame: Blame = "operator"

    def __init__(self, code: str, detail: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.retry_after_s = retry_after_s


class ServerFailed(UnderstudyError):
    """A server for tests and development could not be fetched or started, or died; the text says
    its last words."""

    blame: Blame = "operator"


class GameFailed(UnderstudyError):
    """An env raised, or gave what does not fit its own spaces; the cause is chained."""


class LearningFailed(UnderstudyError):
    """A run that cannot go on: its weights stay broken whatever is restored, or its actor and
    learner disagree."""


class Closed(UnderstudyError):
    """Something was used after its close()."""
