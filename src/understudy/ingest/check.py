"""The checks every frame passes before it may be stored: pure, and in the order of what they
cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from understudy.core.errors import Refused, StorageFailed, StorageFull
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, RowKind, chunk_of
from understudy.experience.frame import FrameKind, decode_frame, read_close, read_drop
from understudy.experience.game import GameSpec
from understudy.experience.session import INGEST_S, refused_session
from understudy.experience.spaces import Space
from understudy.experience.writer import raw_space
from understudy.ports import Candidate, RefusedFrame, Specs

UNREADABLE = "unreadable"
"""The reason of frames on which a check itself failed; tests and operators should never see it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks say about one record: a candidate, or a refusal that is kept as
    quarantined or parked."""

    outcome: Literal["candidate", "refused", "parked"]
    candidate: Candidate | None = None
    refusal: RefusedFrame | None = None


def check(raw: bytes, *, specs: Specs, received_s: float) -> Checked:
    """Judge one frame as it came into the stream at `received_s`, however much later that is done.

    What reading `specs` raises passes: it says nothing about the frame, which has to be judged
    again later.
    """
    game = ""
    try:
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
    except (StorageFailed, StorageFull, OSError):
        raise
    except Exception as error:
        # A mistake of ours in one of the checks; raised, it would stop this frame's partition for
        # good.
        return Checked(
            "refused", refusal=RefusedFrame(raw, UNREADABLE, repr(error)[:200], received_s, game)
        )
    return Checked("candidate", Candidate(frame, chunk))


def _unknown(raw: bytes, chunk: Chunk, *, specs: Specs, received_s: float) -> Checked:
    game = chunk.meta.game
    schema = chunk.meta.schema
    if not specs.knows(game):
        refusal = RefusedFrame(
            raw, "unknown_game", f"no game {game} is registered", received_s, game
        )
        return Checked("refused", refusal=refusal)
    detail = f"schema {schema[:12]} of {game} is not registered; register it and replay"
    return Checked("parked", refusal=RefusedFrame(raw, "unknown_schema", detail, received_s, game))


def check_against_spec(chunk: Chunk, spec: GameSpec) -> None:
    """Refuse columns that do not lie in the game's spaces."""
    if chunk.meta.game != spec.game:
        raise Refused("unknown_game", f"a chunk of {chunk.meta.game} under a schema of {spec.game}")
    is_step = chunk.columns["row"] == RowKind.STEP
    _check_named(chunk, "obs", spec.obs_columns)
    _check_named(chunk, "action", spec.action_columns)
    if any(_head(name) == "raw_action" for name in chunk.columns):
        _check_named(
            chunk,
            "raw_action",
            {f"raw_{name}": raw_space(one) for name, one in spec.action_columns.items()},
        )
    # The observation behind a terminated step may be padding, and nobody looks at it.
    is_seen = np.concatenate([[True], ~chunk.columns["terminated"][:-1]])
    for name, space in spec.obs_columns.items():
        _check_obs(name, chunk.columns[name], space, is_seen)
    for name, space in spec.action_columns.items():
        if not space.holds(chunk.columns[name][is_step]).all():
            raise Refused("bad_action", f"{name!r} lies outside {space.to_json()}")
    _check_legal(chunk, spec, is_step)


def _check_named(chunk: Chunk, head: str, spaces: Mapping[str, Space]) -> None:
    found = {name for name in chunk.columns if _head(name) == head}
    if found != spaces.keys():
        raise Refused("bad_columns", f"wanted {sorted(spaces)}, got {sorted(found)}")
    for name, space in spaces.items():
        column = chunk.columns[name]
        if column.dtype != space.dtype or column.shape[1:] != space.shape:
            raise Refused(
                "bad_columns",
                f"{name!r} is {column.dtype}{column.shape[1:]}, wanted {space.dtype}{space.shape}",
            )


def _head(name: str) -> str:
    return name.split(".", 1)[0]


def _check_obs(name: str, column: Array, space: Space, is_seen: Array) -> None:
    # Real games leave their declared float bounds now and then; numbers that are none are what
    # breaks learners.
    if column.dtype.kind == "f":
        if not np.isfinite(column).all():
            raise Refused("not_finite", f"{name!r} holds NaN or infinity")
    elif not space.holds(column[is_seen]).all():
        raise Refused("bad_obs", f"{name!r} lies outside {space.to_json()}")


def _check_legal(chunk: Chunk, spec: GameSpec, is_step: Array) -> None:
    legal = chunk.columns.get("legal")
    discrete = spec.discrete
    if legal is None:
        if spec.has_legal:
            raise Refused(
                "bad_columns", "'legal' is missing; this game says which actions are legal"
            )
        return
    if discrete is None or legal.shape[1] != discrete.n:
        raise Refused("bad_columns", f"'legal' has {legal.shape[1]} flags for the action space")
    steps = np.flatnonzero(is_step)
    if not legal[steps, chunk.columns["action"][steps] - discrete.start].all():
        raise Refused("illegal_action", "an action was taken that its own mask forbids")
