"""Intake: admits frames to a stream by their headers alone, and stamps player and time."""

import contextlib
import hashlib
import hmac
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.log import create_once, make_folder
from understudy.core.names import GameName, PlayerName
from understudy.experience.frame import MAX_BODY_BYTES, NO_PLAYER, Frame, FrameKind
from understudy.experience.session import INTAKE_MAX_AGE_S, has_valid_time, refused_session
from understudy.experience.ticket import TicketSeal

BACKUP_FILE = "backup.json"
"""The table of contents of a backup; a folder with it is not a data folder."""
RESTORING = "restoring"
"""The folder of a restore that has not finished."""
KEY_ID_FILE = "key.id"
"""The fingerprint of the key that a data folder was first used with."""
KEY_BYTES = 32
_CHECKSUM_BYTES = 8

_RECENT_SESSIONS = 64
"""How many of the last sessions this machine's clock is compared with."""
_CLOCK_RETRY_S = 30.0


def pseudonym(key: bytes, game: str, name: str) -> bytes:
    """The 16 bytes that identify a player in stored frames; needs the deployment's key."""
    return hmac.new(key, game.encode() + b"\0" + name.encode(), hashlib.sha256).digest()[:16]


def why_unusable(data_folder: Path) -> str:
    """Why nothing may write to a folder, and the next step; empty if it is a data folder."""
    if (data_folder / BACKUP_FILE).exists():
        return (
            f"{data_folder} is a backup, which would be changed; restore it to a new folder first: "
            f"understudy restore {data_folder} --keys keep --data NEW"
        )
    if (data_folder / RESTORING).exists() and not (data_folder / "signing.key").exists():
        return (
            f"a restore to {data_folder} is running or did not finish; run 'understudy restore' "
            "with the same backup again, or use another data folder"
        )
    return ""


def check_data_folder(data_folder: Path) -> None:
    """Raise ConfigError if nothing may write to a folder."""
    if reason := why_unusable(data_folder):
        raise ConfigError(reason)


def deployment_key(data_folder: Path) -> bytes:
    """The secret key of a data folder, created on first use; all processes get the same key.

    ConfigError if it is damaged or missing, or is not the one that the folder was used with.
    """
    check_data_folder(data_folder)
    path = data_folder / "key"
    if not path.exists():
        names = ("store/store.json", "stream", KEY_ID_FILE)
        used = next((other for name in names if (other := data_folder / name).exists()), None)
        # The key is looked for again: a process that starts at the same time creates the key
        # first and then the stream and the store.
        if used is not None and not path.exists():
            raise ConfigError(
                f"{path} is missing, and {used} was written with it: with a new key, its players "
                "could not be found or forgotten; restore the key from a backup"
            )
        make_folder(data_folder)
        create_once(path, key_file(secrets.token_bytes(KEY_BYTES)))
    key = read_key(path)
    check_key_id(data_folder, key)
    if not (data_folder / KEY_ID_FILE).exists():
        # A folder that this user may only read is checked by the next process that writes.
        with contextlib.suppress(OSError):
            create_once(data_folder / KEY_ID_FILE, key_fingerprint(key).encode())
    return key


def check_key_id(data_folder: Path, key: bytes) -> None:
    """Raise ConfigError if a data folder was used with another key."""
    path = data_folder / KEY_ID_FILE
    recorded = path.read_text(errors="replace") if path.exists() else key_fingerprint(key)
    if not re.fullmatch("[0-9a-f]{32}", recorded):
        raise ConfigError(f"{path} is damaged; delete it if {data_folder / 'key'} is the right key")
    if recorded != key_fingerprint(key):
        raise ConfigError(
            f"{data_folder / 'key'} differs from the key that this deployment was created with, "
            "so its players could not be found or forgotten; copy the key of its other machines "
            f"here, restore it from a backup, or, if it is the right one, delete {path}"
        )


def key_file(key: bytes) -> bytes:
    """The contents of a key's file: the key, and a checksum to detect damage."""
    return key + hashlib.sha256(b"understudy key\0" + key).digest()[:_CHECKSUM_BYTES]


def read_key(path: Path) -> bytes:
    """The key in a file; ConfigError if the file is damaged."""
    raw = path.read_bytes()
    key = raw[:KEY_BYTES]
    if raw != key_file(key) or len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path} is damaged: it has {len(raw)} bytes, expected {KEY_BYTES + _CHECKSUM_BYTES} "
            "with a valid checksum; restore it from a backup, or copy it from another machine of "
            "this deployment"
        )
    return key


def key_fingerprint(key: bytes) -> str:
    """A fingerprint of a deployment's key that does not reveal it."""
    return hashlib.sha256(b"understudy pseudonyms\0" + key).hexdigest()[:32]


class Intake:
    """Stamps admitted frames with their player's pseudonym and the time.

    A frame whose session began at an impossible time is rejected. The rejection is final if most of
    the last 64 sessions have possible times; otherwise the clock of this machine may be wrong, and
    the frame must be sent again later. Frames of sessions with possible times are admitted either
    way, so that false times cannot block them.
    """

    def __init__(self, key: bytes, game: GameName, clock: Clock) -> None:
        self._key = key
        self.game = game
        self.seal = TicketSeal(key)
        self._clock = clock
        self._pseudonyms: dict[PlayerName, bytes] = {}
        self._recent: dict[uuid.UUID, None] = {}

    def admit(
        self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]
    ) -> list[Frame | Refused]:
        """Return each frame with its stamps, or why it is rejected and whether to retry."""
        now_s = self._clock.now()
        for frame in frames:
            if frame.session in players and frame.session.version == 7:
                self._recent[frame.session] = None
        if len(self._recent) > 2 * _RECENT_SESSIONS:
            self._recent = dict.fromkeys(list(self._recent)[-_RECENT_SESSIONS:])
        outcomes = [self._admit(frame, players.get(frame.session), now_s) for frame in frames]
        if any(map(_has_bad_time, outcomes)):
            recent = list(self._recent)[-_RECENT_SESSIONS:]
            n_bad = sum(
                not has_valid_time(session, entered_s=now_s, oldest_s=INTAKE_MAX_AGE_S)
                for session in recent
            )
            if 2 * n_bad > len(recent):
                again = Refused(
                    "clocks_differ",
                    f"{n_bad} of the last {len(recent)} sessions began at times that this "
                    "platform's clock rules out; check its clock, and those of the machines that "
                    "record; frames of such sessions must be sent again later",
                    retry_after_s=_CLOCK_RETRY_S,
                )
                outcomes = [again if _has_bad_time(outcome) else outcome for outcome in outcomes]
        return outcomes

    def _admit(self, frame: Frame, player: PlayerName | None, now_s: float) -> Frame | Refused:
        if frame.kind not in (FrameKind.DATA, FrameKind.DROP, FrameKind.CLOSE) or frame.flags:
            return Refused(
                "bad_kind",
                f"kind {int(frame.kind)}, flags {frame.flags}; expected 0, 1 or 2 and no flags",
            )
        if len(frame.body) > MAX_BODY_BYTES:
            return Refused(
                "too_large",
                f"a body of {len(frame.body)} bytes; at most {MAX_BODY_BYTES} are accepted",
            )
        if frame.player != NO_PLAYER or frame.received_s:
            return Refused(
                "stamped", "player and received_s are set by the platform; a client sends zeros"
            )
        if player is None:
            return Refused(
                "no_player",
                f"no player was named for session {frame.session}; name one in `players`",
            )
        if refused := refused_session(frame.session, entered_s=now_s, oldest_s=INTAKE_MAX_AGE_S):
            return refused
        pseudonym_ = self._pseudonyms.get(player)
        if pseudonym_ is None:
            if len(self._pseudonyms) >= 4096:
                self._pseudonyms.clear()
            pseudonym_ = self._pseudonyms[player] = pseudonym(self._key, self.game, player)
        return frame.stamped(pseudonym_, int(now_s))


def _has_bad_time(outcome: Frame | Refused) -> bool:
    return isinstance(outcome, Refused) and outcome.reason == "bad_session_time"
