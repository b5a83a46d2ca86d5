"""What a chunk says about itself: identity, consent, and one note per episode that touches it."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import InvalidName, Refused
from understudy.core.frame import MAX_COUNT
from understudy.core.names import GameName, game_name

CHUNK_FORMAT = "understudy-chunk/1"
KINDS = ("player", "actor")
CONSENTS = ("granted", "denied", "unknown")

ChunkId = tuple[uuid.UUID, int]
"""(session, chunk_no): what a chunk is known by, everywhere."""

_SCHEMA = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeNote:
    """What is known about one episode that touches the chunk, from row `row` on."""

    row: int
    seat: int = 0
    match: str | None = None
    opponents: tuple[str, ...] = ()
    """What the others were (`person`, `script`, a model's name), never a player's name."""
    result: str | float | None = None
    seed: int | None = None
    model: str | None = None
    cut: bool = False
    """Nobody saw how it ended: the last decision was dropped, and the episode stops at a bootstrap row."""

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"row": self.row, "seat": self.seat}
        fields |= {name: value for name in _NOTE_TEXTS if (value := getattr(self, name)) is not None}
        if self.opponents:
            fields["opponents"] = list(self.opponents)
        return fields | ({"cut": True} if self.cut else {})


_NOTE_TEXTS = ("match", "result", "seed", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMeta:
    """What a chunk says about itself."""

    game: GameName
    schema: str
    session: uuid.UUID
    chunk_no: int
    first_step: int
    n_steps: int
    kind: str = "player"
    consent: str = "unknown"
    client: str = ""
    episodes: tuple[EpisodeNote, ...]

    @property
    def id(self) -> ChunkId:
        return self.session, self.chunk_no

    def to_metadata(self) -> dict[str, str]:
        return {
            "format": CHUNK_FORMAT, "game": self.game, "schema": self.schema, "session": str(self.session),
            "chunk_no": str(self.chunk_no), "first_step": str(self.first_step), "n_steps": str(self.n_steps),
            "kind": self.kind, "consent": self.consent, "client": self.client,
            "episodes": canonical_json([note.to_json() for note in self.episodes]).decode(),
        }  # fmt: skip


def chunk_name(chunk: ChunkId) -> str:
    """An id as people read it."""
    return f"{chunk[0]}/{chunk[1]}"


_META_KEYS = {
    "format", "game", "schema", "session", "chunk_no", "first_step", "n_steps", "kind", "consent", "client", "episodes",
}  # fmt: skip


def read_meta(metadata: Mapping[str, str]) -> ChunkMeta:
    """Typed metadata; Refused when a key is missing, unknown or ill-formed."""
    if metadata.keys() != _META_KEYS:
        raise Refused("bad_metadata", f"metadata keys differ: {sorted(metadata.keys() ^ _META_KEYS)[:6]}")
    if metadata["format"] != CHUNK_FORMAT:
        raise Refused("bad_version", f"chunk format {metadata['format'][:40]!r}; this build reads {CHUNK_FORMAT}")
    if metadata["kind"] not in KINDS or metadata["consent"] not in CONSENTS:
        raise Refused("bad_metadata", f"kind must be one of {KINDS} and consent one of {CONSENTS}")
    if len(metadata["client"]) > 128 or not _SCHEMA.fullmatch(metadata["schema"]):
        raise Refused("bad_metadata", "client is at most 128 characters, schema 64 of 0-9 a-f")
    try:
        game, session = game_name(metadata["game"]), uuid.UUID(metadata["session"])
    except (InvalidName, ValueError) as error:
        raise Refused("bad_metadata", str(error)[:200]) from None
    if str(session) != metadata["session"]:
        raise Refused("bad_metadata", "session must be a UUID in lower case with dashes")
    notes = strict_json(metadata["episodes"])
    if not isinstance(notes, list):
        raise Refused("bad_metadata", "episodes must be a list")
    return ChunkMeta(
        game=game, schema=metadata["schema"], session=session, kind=metadata["kind"], consent=metadata["consent"],
        client=metadata["client"], chunk_no=_whole(metadata, "chunk_no"), first_step=_whole(metadata, "first_step"),
        n_steps=_whole(metadata, "n_steps"), episodes=tuple(_note(note) for note in notes),
    )  # fmt: skip


def _whole(metadata: Mapping[str, str], name: str) -> int:
    text = metadata[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and str(int(text)) == text and int(text) < MAX_COUNT):
        raise Refused("bad_metadata", f"{name} is {text[:30]!r}; wanted a whole number from 0 below 2^48")
    return int(text)


def _note(fields: Any) -> EpisodeNote:
    if not isinstance(fields, dict) or not {"row", "seat"} <= fields.keys() <= {
        "row", "seat", "opponents", "cut", *_NOTE_TEXTS,
    }:  # fmt: skip
        raise Refused("bad_metadata", f"an episode has row, seat and known keys only, got {str(fields)[:80]}")
    opponents = fields.get("opponents", [])
    checks = (
        all(type(fields[name]) is int and 0 <= fields[name] < 1 << 32 for name in ("row", "seat")),
        all(isinstance(fields.get(name, ""), str) and len(fields.get(name, "")) <= 128 for name in ("match", "model")),
        isinstance(opponents, list) and len(opponents) <= 64,
        all(isinstance(one, str) and len(one) <= 128 for one in opponents),
        _is_result(fields.get("result")),
        fields.get("seed") is None or (type(fields["seed"]) is int and 0 <= fields["seed"] < 1 << 64),
        type(fields.get("cut", False)) is bool,
    )
    if not all(checks):
        raise Refused("bad_metadata", f"an episode has a field of the wrong type or size: {str(fields)[:120]}")
    return EpisodeNote(**{**fields, "opponents": tuple(opponents)})


def _is_result(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= 64
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300)
