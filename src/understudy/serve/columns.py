"""Experience as JSON: the same columns as lists, made into the same frame that other clients send."""

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core.chunk import OPTIONAL, REQUIRED, Chunk, RowKind, chunk_of
from understudy.core.errors import InvalidName, Refused
from understudy.core.frame import CloseReport, Frame, close_frame
from understudy.core.game import GameSpec
from understudy.core.meta import ChunkMeta, EpisodeNote
from understudy.core.names import PlayerName, player_name
from understudy.core.tensors import Array
from understudy.ingest.check import check_against_spec
from understudy.serve.wire import Close, Columns, Note


def frame_of(sent: Columns, specs: Mapping[str, GameSpec]) -> tuple[Frame, PlayerName]:
    """The frame of these columns and whose it is; Refused when they are no chunk of this game."""
    player = _player(sent.player)
    if sent.schema is not None:
        if sent.schema not in specs:
            raise Refused("unknown_schema", f"this game has no such schema; it has {sorted(specs)[:4]}")
        return _frame(sent, specs[sent.schema]), player
    frames, refused = [], Refused("unknown_schema", "no spec of this game is known")
    for spec in specs.values():
        try:
            frames.append(_frame(sent, spec))
        except Refused as error:
            refused = error
    if len(frames) > 1:
        raise Refused("which_schema", f"the columns fit {len(frames)} specs of this game; say which in 'schema'")
    if not frames:
        raise refused
    return frames[0], player


def close_of(sent: Close) -> tuple[Frame, PlayerName]:
    """The frame that closes a session, and whose it is."""
    report = CloseReport(n_chunks=sent.chunk_no, n_steps=sent.n_steps)
    return close_frame(_session(sent.session), sent.chunk_no, report), _player(sent.player)


def _frame(sent: Columns, spec: GameSpec) -> Frame:
    columns = _arrays(sent, spec)
    meta = ChunkMeta(
        game=spec.game, schema=spec.schema, session=_session(sent.session), chunk_no=sent.chunk_no,
        first_step=sent.first_step, n_steps=int((columns["row"] == RowKind.STEP).sum()), consent=sent.consent,
        client=sent.client, episodes=_notes(sent, columns["is_first"]),
    )  # fmt: skip
    try:
        frame = Chunk(meta, columns).validate().frame()
    except UnicodeError:
        raise Refused("bad_metadata", "a text holds half a character") from None
    # Read back as ingest will read it: what is acked here is not refused there.
    check_against_spec(chunk_of(frame), spec)
    return frame


def _arrays(sent: Columns, spec: GameSpec) -> dict[str, Array]:
    wanted: dict[str, Any] = {name: np.dtype(dtype) for name, dtype in (REQUIRED | OPTIONAL).items()}
    wanted |= {name: space.dtype for name, space in (spec.obs_columns | spec.action_columns).items()}
    wanted["legal"] = np.dtype(np.bool_)
    if unknown := sent.columns.keys() - wanted.keys():
        names = [name[:40] for name in sorted(unknown)[:4]]
        raise Refused("bad_columns", f"{names} are no columns of {spec.game}; known: {sorted(wanted)[:40]}")
    if missing := {*REQUIRED, *spec.obs_columns, *spec.action_columns} - sent.columns.keys():
        raise Refused("bad_columns", f"{sorted(missing)[:8]} are missing")
    return {name: _array(name, values, wanted[name]) for name, values in sent.columns.items()}


def _array(name: str, values: list[Any], dtype: np.dtype[Any]) -> Array:
    try:
        with np.errstate(all="ignore"):
            found = np.array(values)
            array = found.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused("bad_columns", f"{name} is no column of {dtype}: {str(error)[:100]}") from None
    is_kind = found.dtype.kind in "biuf" and (dtype.kind == "b") == (found.dtype.kind == "b")
    # Floats are rounded to the column's precision; whatever else changed would be another value.
    if not is_kind or (dtype.kind != "f" and not np.array_equal(array, found)):
        raise Refused("bad_columns", f"{name} holds values that {dtype} cannot")
    return array


def _notes(sent: Columns, is_first: Array) -> tuple[EpisodeNote, ...]:
    if sent.episodes is None:
        return tuple(EpisodeNote(row=row) for row in [0, *(np.flatnonzero(is_first[1:]) + 1).tolist()])
    return tuple(_note(note) for note in sent.episodes)


def _note(note: Note) -> EpisodeNote:
    return EpisodeNote(
        row=note.row, seat=note.seat, match=note.match, opponents=tuple(note.opponents), result=note.result,
        seed=note.seed, model=note.model, cut=note.cut,
    )  # fmt: skip


def _session(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise Refused("bad_session", f"session {text[:40]!r} is no UUID; make a UUIDv7 once per session") from None


def _player(text: str) -> PlayerName:
    try:
        return player_name(text)
    except InvalidName as error:
        raise Refused("bad_player", str(error)) from None
