"""The JSON types of the API; its OpenAPI document is generated from them."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from understudy.core.errors import Refused
from understudy.core.wording import shortened
from understudy.experience.frame import MAX_COUNT
from understudy.experience.skill import MAX_TEMPERATURE
from understudy.experience.ticket import MAX_TICKET_CHARS
from understudy.ports import MAX_TICKETS, Ack

Text = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
"""A player's name in the game."""
TicketText = Annotated[str, Meta(max_length=MAX_TICKET_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Schema = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a request's head: its request line and headers."""
MAX_HEADERS = 100
HEAD_TOO_LARGE = (
    f"the head of a request has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; send "
    "fewer and smaller headers"
)
MAX_TEXTS = 65_536
"""Maximum number of objects, keys and texts in a JSON body."""


def read_json(content: bytes, kind: Any) -> Any:
    """Decode a JSON body as that type; Refused if it is invalid.

    Objects and texts, which need many times their size in memory, are counted before anything is
    allocated: the lengths in the types are only checked once everything is decoded.
    """
    n_texts = content.count(b"{") + content.count(b'"') // 2
    if n_texts > MAX_TEXTS:
        raise Refused(
            "bad_body",
            f"the body has {n_texts} objects, keys and texts; send at most {MAX_TEXTS}",
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused("bad_body", shortened(str(error), 200)) from None


def read_numbers(raw: msgspec.Raw, shapes: Iterable[tuple[int, ...]], *, what: str) -> Any:
    """Decode nested lists of numbers, or objects of them; Refused if they exceed these shapes.

    Values and lists are counted before anything is allocated.
    """
    text = bytes(raw)
    n_values = text.count(b",")
    n_lists = text.count(b"[") + text.count(b"{")
    max_values = 0
    max_lists = 0
    for shape in shapes:
        max_values += math.prod(shape)
        # Lists within lists, and the objects or lists around this part.
        max_lists += len(shape) * math.prod(shape[:-1]) + _MAX_PATH
    if n_values > max_values + _MAX_PATH or n_lists > max_lists:
        raise Refused(
            "bad_shape",
            f"{what} has {n_values + 1} values in {n_lists} lists; at most {max_values} values in "
            f"{max_lists} lists fit this game",
        )
    return read_json(text, Any)


_MAX_PATH = 8
"""Levels above a part of an observation, at most."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A type of the API; unknown fields are rejected, which detects misspelt ones."""


# --- Errors and acks ------------------------------------------------------------------------------


class Failure(Struct, frozen=True, kw_only=True):
    """Why a request failed: a stable code, and a message for people."""

    code: str
    detail: str
    retry_after_s: float | None = None


class Failed(Struct, frozen=True, kw_only=True):
    """The body of every answer to a request that failed."""

    error: Failure


class SendResponse(Struct, frozen=True, kw_only=True):
    """The answer to frames or columns: one ack per frame, and the recording rate from now on."""

    acks: list[Ack]
    recording_rate: float = 1.0
    """The probability with which the next episode should be recorded."""


# --- Columns: experience of small clients ---------------------------------------------------------


class Note(Struct, frozen=True, kw_only=True):
    """Metadata of an episode that starts or continues in these columns, as in docs/formats.md."""

    row: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    match: Text | None = None
    seat: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    opponents: Annotated[list[Text], Meta(max_length=64)] = []
    result: Annotated[str, Meta(max_length=64)] | int | float | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    model: Text | None = None
    propensity: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The probability with which `model` was drawn, as clients of earlier versions state it."""
    ticket: TicketText | None = None
    """The gateway's draw of `model` for the episode, if there were several."""
    skill: Literal["easy", "even"] | None = None
    noise: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The noise of that skill, as the answer to `act` states it."""
    temperature: Annotated[float, Meta(gt=0, le=MAX_TEMPERATURE)] | None = None
    cut: bool = False


class ChunkColumns(Struct, frozen=True, kw_only=True):
    """A chunk as JSON: the columns of docs/formats.md as lists, one value per row."""

    player: Name
    session: Text
    """A UUIDv7 that the client creates once per session."""
    chunk_no: Count
    """0 for the first chunk of the session, then incremented by 1."""
    first_step: Count = 0
    """Number of steps in all earlier chunks of the session."""
    schema: Schema | None = None
    """The schema of the game's spec; optional if the columns fit only one spec."""
    consent: Text = "unknown"
    client: Text = "json"
    columns: dict[str, msgspec.Raw]
    """Lists of numbers, decoded by `read_numbers` once the column's shape is known."""
    episodes: Annotated[list[Note], Meta(max_length=4096)] | None = None
    """A note per episode in the chunk; null: none, and episodes start where `is_first` is true."""
    skipped_steps: Count = 0


class Close(Struct, frozen=True, kw_only=True):
    """Closes a session, which then accepts no more chunks."""

    player: Name
    session: Text
    chunk_no: Count
    """The number of the last chunk plus 1."""
    n_steps: Count
    """Total steps of the session."""


# --- Games and bots -------------------------------------------------------------------------------


class GameList(Struct, frozen=True, kw_only=True):
    """Registered games that the key is valid for."""

    games: list[str]


class GameInfo(Struct, frozen=True, kw_only=True):
    """A registered game: its schemas and live models."""

    game: str
    schemas: list[str]
    champion: int
    """The champion's model number, of the newest schema that has one; 0: no bot yet."""
    canary: int
    champions: dict[str, int]
    """The champion's model number of every schema that has one."""
    missing_steps: int | None = None
    """Steps to record before the next candidate, or the first bot, is trained; null: not known."""
    trained_schema: str | None = None
    """The schema that is trained now; null: not known."""
    steps: dict[str, int]
    """Recorded steps of every schema, as far as they are known."""


class Registered(Struct, frozen=True, kw_only=True):
    """A registered spec and its schema."""

    game: str
    schema: str


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model's signed manifest, and what became of it."""

    model_no: int
    signed: str
    verdict: str = ""
    """The gate's decision and its reason; empty: not judged yet."""


class TicketRequest(Struct, frozen=True, kw_only=True):
    """A request to draw the bots of the next episodes."""

    schema: Schema | None = None
    """The schema of the game's spec; by default the newest that has a champion."""
    n: Annotated[int, Meta(ge=1, le=MAX_TICKETS)] = 64
    """For how many episodes."""
    control: bool = True
    """Whether the client can play the control, too."""


# --- Decisions on the server ----------------------------------------------------------------------


class Ask(Struct, frozen=True, kw_only=True):
    """A request for a decision: an observation and the valid actions."""

    obs: msgspec.Raw
    """Numbers in the game's shape, decoded by `read_numbers`."""
    action_mask: list[bool] | None = None
    """Whether each action is valid; null: all are."""
    deterministic: bool | None = None
    """Choose the best action instead of sampling; null: true, or false with a temperature."""
    skill: str | None = None
    """How well the bot plays: easy, even or hard; null: hard, as released."""
    temperature: float | None = None
    """How random the bot's choices are; null: as released."""
    schema: Schema | None = None
    """The schema of the observation's spec; by default that of the ticket, and without a ticket the
    newest that has a champion."""
    draw: bool = False
    """Whether an episode begins, whose bot is to be drawn, once, if a canary is on trial."""
    ticket: TicketText | None = None
    """The ticket that the episode's first answer returned: the same bot decides again."""


class Acted(Struct, frozen=True, kw_only=True):
    """The bot's action, or a random valid one if no bot decided."""

    action: Any
    model_no: int
    """The model that decided; 0: none."""
    is_fallback: bool = False
    why: str = ""
    """Why the action is random."""
    noise: float | msgspec.UnsetType = msgspec.UNSET
    """The noise of the requested skill, for the episode's note; absent without a skill."""
    ticket: str | msgspec.UnsetType = msgspec.UNSET
    """The draw of the bot, for the episode's note and its next requests; absent without one.

    A random action has it, too, if the drawn bot failed or was too slow.
    """


class Advice(Struct, frozen=True, kw_only=True):
    """A valid action with the bot's rating."""

    action: int
    name: str
    value: float | None = None
    """The expected return, if the bot estimates it."""
    probability: float | None = None


class Advised(Struct, frozen=True, kw_only=True):
    """The champion's rating of every valid action."""

    model_no: int
    actions: list[Advice]
    """Best first."""


class Promote(Struct, frozen=True, kw_only=True):
    """A request to make a model champion."""

    model_no: Annotated[int, Meta(ge=1, lt=MAX_COUNT)]
    why: Annotated[str, Meta(max_length=300)] = "by hand"


class Pointed(Struct, frozen=True, kw_only=True):
    """The model that an alias points to now."""

    alias: str
    model_no: int


class Health(Struct, frozen=True, kw_only=True):
    """Whether the gateway is alive."""

    status: Literal["ok"]


class Readiness(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the gateway serves requests, and the state of the roles that run beside it."""

    status: Literal["ready", "degraded", "stopping"]
    """`degraded`: requests are served, but another role is down."""
    roles: dict[str, str] = {}
    """By role: starting, running, silent, waiting (for its restart), stopping, ended, unknown or
    not running."""
