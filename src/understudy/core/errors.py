"""The tree of errors; each class states whether a retry helps and who can fix the cause.

UnderstudyError
├── ConfigError        a setting, argument or spec cannot work (caller)
│   ├── InvalidName    a name has characters that are not allowed
│   ├── SpecError      a game description cannot be recorded
│   └── MissingExtra   a package of an optional extra is not installed
├── Refused            a frame or chunk was rejected, with a reason code (sender)
├── PositionGone       a stream position was trimmed (no fault: continue from `earliest`)
├── ClaimLost          another owner or a newer epoch holds the partition (operator, retry helps)
├── Fenced             a newer learner releases this game's models; the older must stop (operator)
├── Locked             another process holds the folder (operator, retry helps)
├── StorageFull        the disk or memory is full; nothing was acknowledged
│                      (operator, retry helps)
├── StorageFailed      the disk failed a write; reopen to recover (operator)
│   └── Unreachable    a remote stream or store did not respond; nothing was acknowledged
│                      (operator, retry helps)
├── Corrupt            stored bytes do not match their checksum (operator)
├── LinkFailed         the platform was unreachable or rejected a whole request
│                      (operator, retry helps)
├── ServerFailed       a server for tests and development could not be fetched or started, or died
│                      (operator)
├── GameFailed         an env raised or returned values outside its spaces (the game's author)
├── LearningFailed     a run cannot continue, even from a checkpoint (caller)
└── Closed             an object was used after close() (caller)
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

Blame = Literal["caller", "sender", "operator", "none"]


class UnderstudyError(Exception):
    """The base class of every error that understudy raises on purpose."""

    retry_helps: bool = False
    blame: Blame = "caller"


class ConfigError(UnderstudyError):
    """A setting or argument cannot work; the message states what to give instead."""


class InvalidName(ConfigError):
    """A name has characters that are not allowed."""


class SpecError(ConfigError):
    """A game description cannot be recorded."""


class MissingExtra(ConfigError):
    """A package of an optional extra is missing; the message contains the install command."""


class Refused(UnderstudyError):
    """A frame or chunk was rejected; `reason` is a stable code and `detail` explains it.

    It is rejected for good, unless `retry_after_s` is set: then send it again after that time.
    """

    blame: Blame = "sender"

    def __init__(self, reason: str, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


class PositionGone(UnderstudyError):
    """The stream no longer has this position; continue reading from `earliest`."""

    retry_helps = True
    blame: Blame = "none"

    def __init__(self, position: str, *, earliest: str | None) -> None:
        super().__init__(
            f"position {position} was trimmed; continue from {earliest or 'the earliest record'}"
        )
        self.position = position
        self.earliest = earliest


class ClaimLost(UnderstudyError):
    """Another owner or a newer epoch holds the partition; claim again after `retry_after_s`."""

    retry_helps = True
    blame: Blame = "operator"

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Fenced(UnderstudyError):
    """A newer learner has taken over this game; the older learner's model was not released."""

    blame: Blame = "operator"


class Locked(UnderstudyError):
    """Another process holds this folder."""

    retry_helps = True
    blame: Blame = "operator"


class StorageFull(UnderstudyError):
    """The disk or memory is full; nothing was acknowledged, and work resumes when space is free."""

    retry_helps = True
    blame: Blame = "operator"


class StorageFailed(UnderstudyError):
    """A write or sync failed; reopening recovers everything that was acknowledged."""

    blame: Blame = "operator"


class Unreachable(StorageFailed):
    """A remote stream or store did not respond or was too busy; the same call can be retried."""

    retry_helps = True


class Corrupt(UnderstudyError):
    """Stored bytes do not match their checksum."""

    blame: Blame = "operator"


class LinkFailed(UnderstudyError):
    """A whole request failed; nothing is lost, and it can be repeated.

    `code` is stable; `retry_after_s` is the wait that the server asked for, 0 if none.
    """

    retry_helps = True
    blame: Blame = "operator"

    def __init__(self, code: str, detail: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.retry_after_s = retry_after_s


class ServerFailed(UnderstudyError):
    """A server for tests and development could not be fetched or started, or died.

    The message includes the server's last output, if there is any.
    """

    blame: Blame = "operator"


class GameFailed(UnderstudyError):
    """An env raised or returned values outside its own spaces; the cause is chained."""


class LearningFailed(UnderstudyError):
    """A run cannot continue, such as when updates stay non-finite after restoring a checkpoint."""


class Closed(UnderstudyError):
    """An object was used after close()."""


@contextlib.contextmanager
def named_errors(what: str, *, then: str) -> Iterator[None]:
    """Raise an error of a user's own class as LearningFailed, which names `what` failed.

    Errors of understudy, which the class raises on purpose, pass.
    """
    try:
        yield
    except UnderstudyError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise LearningFailed(
            f"{what}: {type(error).__name__}: {text}; {then}, then resume the run; --debug shows "
            "the traceback"
        ) from error
