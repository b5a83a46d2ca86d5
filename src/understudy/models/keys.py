"""API keys and their permissions, shared by all gateways of a deployment; only hashes are stored.

uk_<id>_<secret>      the id identifies the key; the secret is 256 random bits, so a plain SHA-256
                      of it is enough
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.names import game_name
from understudy.core.signed import Signer, Trusted
from understudy.models.shared import Entry, Shared
from understudy.ports import Objects

Scope = Literal["play", "work", "read", "admin"]
"""What a key may do: `play`: send frames and fetch bots; `work`: send actors' frames and fetch
weights; `read`: read metrics; `admin`: promote models, register games, and all of the others."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
EVERY_GAME = "*"
NO_KEY = "this request needs a key; send it as 'Authorization: Bearer KEY'"
MAX_REQUESTS_S = 1e9
MAX_BYTES_S = 1e12
_TEXT = re.compile(r"uk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The facts of a key, without its secret."""

    id: str
    hash: str
    scopes: tuple[Scope, ...]
    game: str = EVERY_GAME
    """The game that the key is valid for, or `*` for all games."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may use the key; requests without an Origin header are not from
    pages and are not restricted."""
    requests_s: float = 200.0
    """Allowed requests per second, on average."""
    bytes_s: float = 8e6
    """Allowed bytes sent per second, on average."""
    expires_s: float = 0.0
    """When the key expires, in seconds since 1970; 0: never."""
    label: str = ""
    registers: bool = False
    """Whether the key may register new games, as the development key may."""
    created_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.scopes or not set(self.scopes) <= set(SCOPES):
            raise ConfigError(f"scopes are {list(self.scopes)}; use one or more of {list(SCOPES)}")
        if self.game != EVERY_GAME:
            game_name(self.game)
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin[:60]!r} is not a valid origin; use scheme and host, such as "
                    "https://game.example"
                )
        for name, most in (("requests_s", MAX_REQUESTS_S), ("bytes_s", MAX_BYTES_S)):
            if not 0 < getattr(self, name) < most:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; use a number above 0 and below {most:.0e}"
                )
        if not 0 <= self.expires_s < 1e12:
            raise ConfigError(
                f"expires_s is {self.expires_s}; use a time in seconds since 1970, or 0 for never"
            )
        if len(self.label) > 100 or not self.label.isprintable():
            raise ConfigError(
                f"label {self.label[:20]!r} is too long or not printable; use at most 100 "
                "printable characters"
            )

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def is_for(self, game: str) -> bool:
        return self.game in (EVERY_GAME, game)


@dataclass(slots=True)
class KeyRing:
    """Every key ever created, as the state of the journal of keys."""

    number: int = 0
    bad_entries: int = 0
    last_bad_entry: str = ""
    keys: dict[str, Key] = field(default_factory=dict)
    revoked_s: dict[str, float] = field(default_factory=dict)

    def apply(self, entry: Mapping[str, Any], raw: bytes) -> None:
        """Apply an entry; Refused when it is invalid."""
        match entry.get("kind"):
            case "key":
                key = _key(entry["key"])
                if key.id in self.keys:
                    raise Refused("bad_entry", f"key {key.id} already exists")
                self.keys[key.id] = key
            case "revoke":
                self.revoked_s[str(entry["id"])] = float(entry["at_s"])
            case kind:
                raise Refused(
                    "bad_entry",
                    f"this version does not know key entry kind {kind!r}; install a newer "
                    "understudy",
                )


def _key(facts: Any) -> Key:
    if not isinstance(facts, dict):
        raise Refused("bad_entry", f"a key is a {type(facts).__name__}; expected an object")
    names = {key_field.name for key_field in fields(Key)}
    if facts.keys() != names:
        raise Refused(
            "bad_entry",
            f"a key has wrong fields: missing {sorted(names - facts.keys())}, unknown "
            f"{sorted(facts.keys() - names)[:6]}; install the version that created it",
        )
    try:
        return Key(**facts | {"scopes": tuple(facts["scopes"]), "origins": tuple(facts["origins"])})
    except (ConfigError, TypeError) as error:
        raise Refused("bad_entry", str(error)[:200]) from None


class Keys:
    """The keys of a deployment; a gateway applies a revocation when it next reads the keys."""

    def __init__(
        self, objects: Objects, *, trusted: Trusted, signer: Signer | None, clock: Clock
    ) -> None:
        self._shared = Shared(
            objects, "keys", KeyRing(), trusted=trusted, signer=signer, clock=clock
        )
        self._ring = KeyRing()
        self._clock = clock

    def create(self, scopes: Sequence[Scope], **facts: Any) -> tuple[str, Key]:
        """Create a key; return its text, which is not stored anywhere, and its facts."""
        secret = secrets.token_urlsafe(32)
        key = Key(
            id=secrets.token_hex(6),
            hash=_hash(secret),
            scopes=tuple(scopes),
            created_s=round(self._clock.now(), 3),
            **facts,
        )
        self._shared.write(lambda _: {"kind": "key", "key": asdict(key)})
        return f"uk_{key.id}_{secret}", key

    def revoke(self, key_id: str) -> Key:
        """Revoke the key whose id starts with `key_id`; ConfigError unless there is exactly one."""
        matches = [key for key in self.all() if key.id.startswith(key_id)] if key_id else []
        if len(matches) != 1:
            raise ConfigError(
                f"{len(matches)} keys start with {key_id[:20]!r}; use an id from 'understudy keys "
                "list'"
            )

        def entry(_: KeyRing) -> Entry:
            return {"kind": "revoke", "id": matches[0].id}

        self._shared.write(entry)
        return matches[0]

    def all(self) -> list[Key]:
        """Every key that is not revoked, oldest first, including expired ones."""
        ring = self._shared.now()
        return [key for key in ring.keys.values() if key.id not in ring.revoked_s]

    def damage(self) -> str:
        """What is wrong with the stored keys, and the next step; empty: nothing."""
        return self._shared.damage()

    def follow(self) -> None:
        """Load new entries, from disk or network, for later calls of `check`."""
        self._ring = self._shared.now()

    def check(self, text: str | None) -> Key:
        """Return the key with this text, from memory; Refused when there is no such valid key."""
        if not text:
            raise Refused("no_key", NO_KEY)
        match = _TEXT.fullmatch(text)
        key = self._ring.keys.get(match.group(1)) if match else None
        # Compared even if the id is unknown, so that the response time does not reveal which exist.
        is_right = hmac.compare_digest(
            _hash(match.group(2) if match else ""), key.hash if key else ""
        )
        if key is None or not is_right:
            raise Refused(
                "wrong_key",
                "this is not a key of this deployment; create one with 'understudy keys create'",
            )
        if key.id in self._ring.revoked_s:
            raise Refused(
                "revoked_key",
                f"key {key.id} was revoked; create another with 'understudy keys create'",
            )
        if key.expires_s and self._clock.now() >= key.expires_s:
            raise Refused(
                "expired_key",
                f"key {key.id} has expired; create another with 'understudy keys create'",
            )
        return key

    def allows_origin(self, origin: str) -> bool:
        """Whether some key allows pages of this origin; for the browser's preflight request."""
        ring = self._ring
        return any(
            origin in key.origins
            for key in list(ring.keys.values())
            if key.id not in ring.revoked_s
        )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
