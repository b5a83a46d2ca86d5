"""What travels as JSON: the types of the API, from which its OpenAPI document is made."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from understudy.experience.frame import MAX_COUNT
from understudy.ports import Ack

Text = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
"""Whoever plays, as the game knows them."""
Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Schema = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


MAX_HEAD_BYTES = 64 * 1024
"""Of a request: its line and its headers."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A type of the API; unknown fields are refused, so that a misspelt one is noticed."""


# --- Errors and acks ------------------------------------------------------------------------------


class Failure(Struct, frozen=True, kw_only=True):
    """Why a request failed: a code that does not change, and words for people."""

    code: str
    detail: str
    retry_after_s: float | None = None


class Failed(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: Failure


class SendResponse(Struct, frozen=True, kw_only=True):
    """The answer to a parcel or to columns: one ack per frame, and what is asked of the next
    episodes."""

    acks: list[Ack]
    keep_share: float = 1.0
    """The probability with which the next episode should be recorded."""


# --- Columns: experience of small clients ---------------------------------------------------------


class Note(Struct, frozen=True, kw_only=True):
    """An episode that begins or goes on in these columns, as in a chunk's metadata."""

    row: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    match: Text | None = None
    seat: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    opponents: Annotated[list[Text], Meta(max_length=64)] = []
    result: Annotated[str, Meta(max_length=64)] | int | float | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    model: Text | None = None
    cut: bool = False


class ChunkColumns(Struct, frozen=True, kw_only=True):
    """A chunk as JSON: the columns of docs/formats.md as lists, one value per row."""

    player: Name
    session: Text
    """A UUIDv7 that the client makes once per session."""
    chunk_no: Count
    """0 for the first chunk of the session, then one more each time."""
    first_step: Count = 0
    """How many steps the chunks before held."""
    schema: Schema | None = None
    """Which spec of the game this is; may be left out while only one fits."""
    consent: Text = "unknown"
    client: Text = "json"
    columns: dict[str, list[Any]]
    episodes: Annotated[list[Note], Meta(max_length=4096)] | None = None
    """A note per episode that touches the chunk; none: nothing is known but where they begin."""
    skipped_steps: Count = 0


class Close(Struct, frozen=True, kw_only=True):
    """No more chunks of this session come."""

    player: Name
    session: Text
    chunk_no: Count
    """One more than the last chunk's."""
    n_steps: Count
    """All steps of the session."""


# --- Games and bots -------------------------------------------------------------------------------


class GameList(Struct, frozen=True, kw_only=True):
    """Registered games that the key is for."""

    games: list[str]


class GameInfo(Struct, frozen=True, kw_only=True):
    """A registered game: its specs by schema, and who plays it."""

    game: str
    schemas: list[str]
    champion: int
    """The champion's model number; 0: no bot yet."""
    canary: int


class Registered(Struct, frozen=True, kw_only=True):
    """A spec that is kept, and its id."""

    game: str
    schema: str


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model's facts, as they were signed."""

    model_no: int
    signed: str


# --- Deciding on the server -----------------------------------------------------------------------


class Ask(Struct, frozen=True, kw_only=True):
    """One decision: an observation as the game has it, and the legal actions."""

    obs: Any
    legal: list[bool] | None = None
    """A flag for each action; none: all are legal."""
    deterministic: bool = True
    schema: Schema | None = None
    """Which spec of the game the observation is of; the champion's unless said."""


class Acted(Struct, frozen=True, kw_only=True):
    """What to do: the champion's choice, or a random legal action where there is none."""

    action: Any
    model_no: int
    """Who decided; 0: nobody did."""
    is_fallback: bool = False
    why: str = ""
    """Why it is a random action."""


class Advice(Struct, frozen=True, kw_only=True):
    """One legal action, with what the bot thinks of it."""

    action: int
    name: str
    value: float | None = None
    """The expected return, where the bot knows one."""
    probability: float | None = None


class Advised(Struct, frozen=True, kw_only=True):
    """What the champion thinks of every legal action."""

    model_no: int
    actions: list[Advice]
    """Best first."""


class Promote(Struct, frozen=True, kw_only=True):
    """Which model shall be champion."""

    model_no: Annotated[int, Meta(ge=1, lt=MAX_COUNT)]
    why: Annotated[str, Meta(max_length=300)] = "by hand"


class Pointed(Struct, frozen=True, kw_only=True):
    """What an alias means now."""

    alias: str
    model_no: int


class Health(Struct, frozen=True, kw_only=True):
    """How the gateway is; no data."""

    status: Literal["ok", "ready", "starting", "stopping"]
