"""The checks of every frame before it is stored: pure functions, cheapest first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from understudy.core.errors import Refused, StorageFailed, StorageFull
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.chunk import Chunk, RowKind, chunk_of
from understudy.experience.frame import FrameKind, decode_frame, read_close, read_drop
from understudy.experience.game import GameSpec
from understudy.experience.session import INGEST_S, refused_session
from understudy.experience.spaces import Space, check_recordable
from understudy.experience.writer import raw_space
from understudy.ports import DAMAGED_ENTRY, DAMAGED_STREAM, Candidate, RefusedFrame, Specs

UNREADABLE = "unreadable"
"""The reason code when a check itself fails; a bug that should never occur."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one record: a candidate, or a refusal that is quarantined or parked."""

    outcome: Literal["candidate", "refused", "parked"]
    candidate: Candidate | None = None
    refusal: RefusedFrame | None = None


def check(raw: bytes, *, specs: Specs, received_s: float) -> Checked:
    """Check one frame; its age counts at `received_s`, when it entered the stream.

    Errors while reading `specs` and a lack of memory are raised: they are not the frame's fault, so
    the caller checks it again later.
    """
    game = ""
    try:
        if raw.startswith(DAMAGED_ENTRY):
            raise Refused(DAMAGED_STREAM, raw.decode("utf-8", "replace"))
        frame = decode_frame(raw)
        if too_old := refused_session(frame.session, entered_s=received_s, oldest_s=INGEST_S):
            raise too_old
        if frame.kind is not FrameKind.DATA:
            read_report = read_drop if frame.kind is FrameKind.DROP else read_close
            read_report(frame)
            return Checked("candidate", Candidate(frame, None))
        chunk = chunk_of(frame)
        game = chunk.meta.game
        spec = specs.spec(game, chunk.meta.schema)
        if spec is None:
            return _unknown(raw, chunk, specs=specs, received_s=received_s)
        check_against_spec(chunk, spec)
    except Refused as refused:
        return Checked(
            "refused", refusal=RefusedFrame(raw, refused.reason, refused.detail, received_s, game)
        )
    except (StorageFailed, StorageFull, OSError, MemoryError):
        raise
    except Exception as error:
        # A bug in one of the checks; if raised, it would block this frame's partition for good.
        return Checked(
            "refused", refusal=RefusedFrame(raw, UNREADABLE, repr(error)[:200], received_s, game)
        )
    return Checked("candidate", Candidate(frame, chunk))


def _unknown(raw: bytes, chunk: Chunk, *, specs: Specs, received_s: float) -> Checked:
    game = chunk.meta.game
    schema = chunk.meta.schema
    if not specs.has_game(game):
        refusal = RefusedFrame(
            raw,
            "unknown_game",
            f"game {game} is not registered; register it and replay",
            received_s,
            game,
        )
        return Checked("refused", refusal=refusal)
    detail = f"schema {schema[:12]} of {game} is not registered; register it and replay"
    return Checked("parked", refusal=RefusedFrame(raw, "unknown_schema", detail, received_s, game))


def check_against_spec(chunk: Chunk, spec: GameSpec) -> None:
    """Raise Refused if a chunk's columns or their values do not fit the game's spec."""
    if chunk.meta.game != spec.game:
        raise Refused(
            "unknown_game", f"the chunk is of {chunk.meta.game}, but its schema is of {spec.game}"
        )
    is_step = chunk.columns["row"] == RowKind.STEP
    _check_named(chunk, "obs", spec.obs_columns)
    _check_named(chunk, "action", spec.action_columns)
    if any(_head(name) == "raw_action" for name in chunk.columns):
        _check_named(
            chunk,
            "raw_action",
            {f"raw_{name}": raw_space(space) for name, space in spec.action_columns.items()},
        )
    # The observation after a terminated step may be padding, which is never used.
    is_used = np.concatenate([[True], ~chunk.columns["terminated"][:-1]])
    for name, space in spec.obs_columns.items():
        _check_obs(name, chunk.columns[name], space, is_used)
    for name, space in spec.action_columns.items():
        if not space.contains(chunk.columns[name][is_step]).all():
            raise Refused("bad_action", f"{name!r} is outside {space.to_json()}")
        if space.dtype.kind == "f":
            check_recordable(name, chunk.columns[name])
    _check_action_mask(chunk, spec, is_step)


def _check_named(chunk: Chunk, head: str, spaces: Mapping[str, Space]) -> None:
    columns = {name for name in chunk.columns if _head(name) == head}
    if columns != spaces.keys():
        raise Refused("bad_columns", f"expected {joined(spaces)}, got {joined(columns)}")
    for name, space in spaces.items():
        column = chunk.columns[name]
        if column.dtype != space.dtype or column.shape[1:] != space.shape:
            raise Refused(
                "bad_columns",
                f"{name!r} is {column.dtype}{list(column.shape[1:])}, expected "
                f"{space.dtype}{list(space.shape)}",
            )


def _head(name: str) -> str:
    return name.split(".", 1)[0]


def _check_obs(name: str, column: Array, space: Space, is_used: Array) -> None:
    # Real games sometimes exceed their declared float bounds; only numbers that are not finite, or
    # too large, break learners.
    if column.dtype.kind == "f":
        check_recordable(name, column)
    elif not space.contains(column[is_used]).all():
        raise Refused("bad_obs", f"{name!r} is outside {space.to_json()}")


def _check_action_mask(chunk: Chunk, spec: GameSpec, is_step: Array) -> None:
    action_mask = chunk.columns.get("action_mask")
    discrete = spec.discrete
    if action_mask is None:
        if spec.has_action_mask:
            raise Refused("bad_columns", "'action_mask' is missing; this game has action masks")
        return
    got = f"'action_mask' has {action_mask.shape[1]} flags per row, but the game has"
    if discrete is None:
        raise Refused("bad_columns", f"{got} no discrete actions; omit it")
    if action_mask.shape[1] != discrete.n:
        raise Refused("bad_columns", f"{got} {discrete.n} actions")
    steps = np.flatnonzero(is_step)
    if not action_mask[steps, chunk.columns["action"][steps] - discrete.start].all():
        raise Refused("invalid_action", "an action is excluded by the action mask of its row")
