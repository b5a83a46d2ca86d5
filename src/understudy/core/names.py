"""Validated names: text that may become part of a path, a key or a message."""

import re
import time
import unicodedata
import uuid
from typing import NewType

from understudy.core.errors import InvalidName

GameName = NewType("GameName", str)
"""A game's title, safe as one path component on every platform."""

PlayerName = NewType("PlayerName", str)
"""A player's name in the game; never written into a body or a store."""

_GAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}
_MAX_PLAYER_BYTES = 256


def game_name(text: str) -> GameName:
    """Validate a game's name, or raise InvalidName: letters, digits, `.`, `_`, `-`, at most 63."""
    if not isinstance(text, str) or not _GAME.fullmatch(text) or text.endswith("."):
        raise InvalidName(
            f"game name {text!r} is not allowed; give 1 to 63 of A-Z a-z 0-9 . _ - that start with "
            "a letter or digit and do not end with a dot, such as 'my-game'"
        )
    if text.split(".")[0].lower() in _DEVICES:
        raise InvalidName(
            f"game name {text!r} is reserved by Windows; add a letter, such as '{text}-game'"
        )
    return GameName(text)


def game_name_of_env(env_id: str) -> GameName:
    """The game's name for a Gymnasium id: `ALE/Pong-v5` becomes `ALE-Pong-v5`."""
    return game_name(env_id.replace("/", "-").replace(":", "-"))


def player_name(text: str) -> PlayerName:
    """Validate a player's name, or raise InvalidName: printable text of at most 256 bytes.

    Returns it in Unicode's composed form (NFC): the same name may be typed in several forms, and
    would then have several pseudonyms.
    """
    name = ""
    if isinstance(text, str) and len(text) <= _MAX_PLAYER_BYTES:
        name = unicodedata.normalize("NFC", text)
    if not name or not name.isprintable() or len(name.encode()) > _MAX_PLAYER_BYTES:
        shown = repr(text[:40] if isinstance(text, str) else text)[:80]
        raise InvalidName(
            f"player name {shown} is not allowed; give 1 to {_MAX_PLAYER_BYTES} bytes of printable "
            "text"
        )
    return PlayerName(name)


def new_session(now_s: float | None = None, random: bytes | None = None) -> uuid.UUID:
    """Create a UUIDv7, whose first 48 bits are the time in milliseconds."""
    millis = round((time.time() if now_s is None else now_s) * 1000) & (1 << 48) - 1
    noise = int.from_bytes(uuid.uuid4().bytes[6:] if random is None else random[:10], "big")
    value = (
        millis << 80 | 0x7 << 76 | (noise >> 64 & 0xFFF) << 64 | 0b10 << 62 | noise & (1 << 62) - 1
    )
    return uuid.UUID(int=value)


def session_time_s(session: uuid.UUID) -> float:
    """The start time of a UUIDv7 session, in seconds since 1970."""
    return (session.int >> 80) / 1000.0
