"""The door: what may enter a stream, decided from headers alone, and who a frame belongs to from
then on."""

import contextlib
import hashlib
import hmac
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.log import make_folder, sync_folder
from understudy.core.names import GameName, PlayerName
from understudy.experience.frame import MAX_BODY_BYTES, NO_PLAYER, Frame, FrameKind
from understudy.experience.session import INTAKE_MAX_AGE_S, refused_session

KEY_BYTES = 32


def pseudonym(key: bytes, game: str, name: str) -> bytes:
    """The 16 bytes that stand for a player in stored frames; only the deployment's key leads
    from a name to it."""
    return hmac.new(key, game.encode() + b"\0" + name.encode(), hashlib.sha256).digest()[:16]


def deployment_key(data_folder: Path) -> bytes:
    """The data folder's own secret, made on first use; processes that start at once agree on
    one."""
    path = data_folder / "key"
    if not path.exists():
        # Looked for again, since a process that starts at the same time makes the key first and the
        # store then.
        if (data_folder / "store" / "store.json").exists() and not path.exists():
            raise ConfigError(
                f"{path} is missing, and {data_folder / 'store'} was written with it: under a new "
                "key nobody in there "
                "could be found or forgotten; restore the key from a backup"
            )
        make_folder(data_folder)
        create_once(path, secrets.token_bytes(KEY_BYTES))
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path} has {len(key)} bytes instead of {KEY_BYTES}; restore it from a backup, or "
            "delete it to give "
            "every player a new pseudonym"
        )
    return key


def key_mark(key: bytes) -> str:
    """What tells a deployment's key from others and does not lead to it."""
    return hashlib.sha256(b"understudy pseudonyms\0" + key).hexdigest()[:32]


def create_once(path: Path, raw: bytes) -> None:
    """Make a small secret file (0600) durably, whole or not at all; one that another process
    made first stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600
    )
    try:
        os.write(descriptor, raw)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        # A link, unlike a rename, never replaces the key another process has just made.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    sync_folder(path.parent)


class Intake:
    """Stamps the frames that may enter with their player's pseudonym and the time."""

    def __init__(self, key: bytes, game: GameName, clock: Clock) -> None:
        self._key = key
        self.game = game
        self._clock = clock
        self._known: dict[PlayerName, bytes] = {}

    def admit(
        self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]
    ) -> list[Frame | Refused]:
        """For each frame the stamped one, or why it is refused for good."""
        now_s = self._clock.now()
        return [self._admit(frame, players.get(frame.session), now_s) for frame in frames]

    def _admit(self, frame: Frame, player: PlayerName | None, now_s: float) -> Frame | Refused:
        if frame.kind not in (FrameKind.DATA, FrameKind.DROP, FrameKind.CLOSE) or frame.flags:
            return Refused(
                "bad_kind",
                f"kind {int(frame.kind)}, flags {frame.flags}; wanted 0, 1 or 2 and no flags",
            )
        if len(frame.body) > MAX_BODY_BYTES:
            return Refused(
                "too_large",
                f"a body of {len(frame.body)} bytes; at most {MAX_BODY_BYTES} are taken",
            )
        if frame.player != NO_PLAYER or frame.received_s:
            return Refused(
                "stamped", "player and received_s are set at the door; a client sends zeros"
            )
        if player is None:
            return Refused("no_player", f"nobody was named for session {frame.session}")
        if refused := refused_session(frame.session, entered_s=now_s, oldest_s=INTAKE_MAX_AGE_S):
            return refused
        known = self._known.get(player)
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[player] = pseudonym(self._key, self.game, player)
        return frame.stamped(known, int(now_s))
