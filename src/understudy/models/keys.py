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
from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.core.names import game_name
from understudy.core.signed import Signer, Trusted
from understudy.core.wording import joined, shortened
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
_ALL = "*"
_REPEATED = 32
"""Each entry repeats this many of the last revocations, in case their own entries are damaged."""
_CLOSED = (
    "a key may have been revoked there, so no key is accepted until the entry is restored from a "
    "backup, or 'understudy keys repair --keys keep|revoke' decides what happens to the keys"
)
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
            raise ConfigError(
                f"scopes are {joined(self.scopes)}; use one or more of {joined(SCOPES)}"
            )
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
    unread: int = 0
    bad_entries: int = 0
    last_bad_entry: str = ""
    keys: dict[str, Key] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)
    last_revocations: list[tuple[int, str]] = field(default_factory=list)
    """The last entries that revoked a key, each with its number and the id of the key, or `*`."""
    is_unsure: bool = False
    """Whether a revocation may be lost, because many consecutive entries are missing."""
    _created: dict[str, int] = field(default_factory=dict)
    """The number of the entry that created each key."""

    def apply(self, entry: Mapping[str, Any], raw: bytes, *, lost: int) -> None:
        """Apply an entry; Refused when it is invalid."""
        number = entry["number"]
        kind = entry.get("kind")
        revocations = [(int(at), str(key_id)) for at, key_id in entry["revoked"]]
        if kind == "key":
            key = _key(entry["key"])
            if key.id in self.keys:
                raise Refused("bad_entry", f"key {key.id} already exists")
            self.keys[key.id] = key
            self._created[key.id] = number
        elif kind == "revoke":
            revocations.append((number, str(entry["id"])))
        elif kind == "restart":
            # An operator decided whether keys whose revocation may be lost are valid.
            self.is_unsure = False
            lost = 0
        else:
            raise Refused(
                "bad_entry",
                f"this version does not know key entry kind {kind!r}; install a newer understudy",
            )
        for revocation in revocations:
            self._revoke(*revocation)
        self.is_unsure = self.is_unsure or lost > _REPEATED

    def _revoke(self, number: int, key_id: str) -> None:
        """Revoke a key, or every key that was created before the entry with this number."""
        if key_id == _ALL:
            self.revoked.update(key for key, at in self._created.items() if at < number)
        else:
            self.revoked.add(key_id)
        if (number, key_id) not in self.last_revocations:
            self.last_revocations = sorted([*self.last_revocations, (number, key_id)])[-_REPEATED:]

    def check(self) -> None:
        """Raise Corrupt if a revocation may be lost, so that its key would be accepted again."""
        if self.unread or self.is_unsure:
            raise Corrupt(f"the journal of keys is damaged ({self.last_bad_entry}); {_CLOSED}")


def _key(facts: Any) -> Key:
    if not isinstance(facts, dict):
        raise Refused("bad_entry", f"a key is a {type(facts).__name__}; expected an object")
    names = {key_field.name for key_field in fields(Key)}
    if facts.keys() != names:
        raise Refused(
            "bad_entry",
            f"a key has wrong fields: missing {joined(names - facts.keys())}, unknown "
            f"{joined(facts.keys() - names)}; install the version that created it",
        )
    try:
        return Key(**facts | {"scopes": tuple(facts["scopes"]), "origins": tuple(facts["origins"])})
    except (ConfigError, TypeError) as error:
        raise Refused("bad_entry", shortened(str(error), 200)) from None


class Keys:
    """The keys of a deployment; a gateway applies a revocation when it next reads the keys."""

    def __init__(
        self,
        objects: Objects,
        *,
        trusted: Trusted,
        signer: Signer | None,
        clock: Clock,
        memory: Objects | None = None,
    ) -> None:
        """`memory`: objects on this machine, which remember the newest entry that it has read."""
        self._shared = Shared(
            objects, "keys", KeyRing, trusted=trusted, signer=signer, clock=clock, memory=memory
        )
        self._ring: KeyRing | None = KeyRing()
        """The keys for `check`; None: a revocation may be lost."""
        self._clock = clock

    def create(self, scopes: Sequence[Scope], **facts: Any) -> tuple[str, Key]:
        """Create a key; return its text, which is not stored anywhere, and its facts."""
        text = new_key_text()
        key = key_with_text(text, scopes, created_s=round(self._clock.now(), 3), **facts)
        self._write({"kind": "key", "key": asdict(key)})
        return text, key

    def _write(self, facts: Entry) -> None:
        def entry(ring: KeyRing) -> Entry:
            ring.check()
            return {**facts, "revoked": ring.last_revocations}

        self._shared.write(entry)

    def revoke(self, key_id: str) -> Key:
        """Revoke the key whose id starts with `key_id`; ConfigError unless there is exactly one."""
        matches = [key for key in self.all() if key.id.startswith(key_id)] if key_id else []
        if len(matches) != 1:
            raise ConfigError(
                f"{len(matches)} keys start with {key_id[:20]!r}; use an id from 'understudy keys "
                "list'"
            )
        self._write({"kind": "revoke", "id": matches[0].id})
        return matches[0]

    def all(self) -> list[Key]:
        """Every key that is not known to be revoked, oldest first, including expired ones."""
        ring = self._shared.unchecked()
        return [key for key in ring.keys.values() if key.id not in ring.revoked]

    def damage(self) -> str:
        """What is wrong with the stored keys, and the next step; empty: nothing."""
        try:
            ring = self._shared.unchecked()
        except Corrupt as error:
            return f"{error}; {_CLOSED}"
        damage = self._shared.damage()
        return f"{damage}; {_CLOSED}" if damage and (ring.unread or ring.is_unsure) else damage

    def repair(self, *, revoke: bool) -> bool:
        """Accept a damaged journal although a revocation may be lost; False if it is whole."""
        if not self._shared.damage():
            return False
        self.restart(revoke=revoke)
        return True

    def restart(self, *, revoke: bool) -> None:
        """Make every machine accept the keys as they are, or `revoke` all of them."""

        def entry(ring: KeyRing) -> Entry:
            number = ring.number + ring.unread + 1
            new = [(number, _ALL)] if revoke else []
            return {"kind": "restart", "revoked": [*ring.last_revocations, *new]}

        self._shared.restart(entry)

    def follow(self) -> None:
        """Load new entries, from disk or network, for later calls of `check`.

        If a revocation may be lost, this raises Corrupt, and `check` accepts no key.
        """
        try:
            ring = self._shared.now()
            ring.check()
        except Corrupt:
            self._ring = None
            raise
        self._ring = ring

    def check(self, text: str | None) -> Key:
        """Return the key with this text, from memory; Refused when there is no such valid key."""
        if not text:
            raise Refused("no_key", NO_KEY)
        ring = self._ring
        if ring is None:
            raise Refused(
                "keys_damaged",
                "the stored keys are damaged, so none is accepted until the operator repairs them; "
                "keep the data and try again later",
            )
        return check_key(text, ring, now_s=self._clock.now())

    def allows_origin(self, origin: str) -> bool:
        """Whether some key allows pages of this origin; for the browser's preflight request."""
        ring = self._ring or KeyRing()
        return any(
            origin in key.origins for key in list(ring.keys.values()) if key.id not in ring.revoked
        )


def new_key_text() -> str:
    """The text of a new key."""
    return f"uk_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"


def key_with_text(text: str, scopes: Sequence[Scope], **facts: Any) -> Key:
    """The facts of a key with this text; ConfigError if it is not the text of a key."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            "the key has characters or a length that keys do not have; copy it again, or omit it "
            "to have one created"
        )
    return Key(id=match.group(1), hash=_hash(match.group(2)), scopes=tuple(scopes), **facts)


def check_key(text: str, ring: KeyRing, *, now_s: float) -> Key:
    """Return the ring's key with this text; Refused when there is no such valid key."""
    match = _TEXT.fullmatch(text)
    key = ring.keys.get(match.group(1)) if match else None
    # Compared even if the id is unknown, so that the response time does not reveal which exist.
    is_right = hmac.compare_digest(_hash(match.group(2) if match else ""), key.hash if key else "")
    if key is None or not is_right:
        raise Refused(
            "wrong_key",
            "this is not a key of this deployment; create one with 'understudy keys create'",
        )
    if key.id in ring.revoked:
        raise Refused(
            "revoked_key",
            f"key {key.id} was revoked; create another with 'understudy keys create'",
        )
    if key.expires_s and now_s >= key.expires_s:
        raise Refused(
            "expired_key",
            f"key {key.id} has expired; create another with 'understudy keys create'",
        )
    return key


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
