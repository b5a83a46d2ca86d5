"""Random specs, chunks and sessions that pass every check."""

import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from understudy.core.names import new_session
from understudy.core.tensors import DTYPES, Array
from understudy.experience.chunk import OPTIONAL, Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.experience.writer import raw_space
from understudy.testing.clock import START_S

PLAYER = b"player-seventeen"
"""The pseudonym of a player, 16 bytes."""

OTHER_PLAYER = b"player-eighteen."

_WHOLE = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


def cart_spec(game: str = "cart") -> GameSpec:
    """A small game with four floats and two actions."""
    return game_spec(game, obs=4, actions=2)


def random_space(rng: np.random.Generator, *, is_image: bool = False) -> Space:
    """A random space of any kind that a column may have, or of a small image."""
    shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    int_dtype = DTYPES[_WHOLE[rng.integers(len(_WHOLE))]]
    match 5 if is_image else rng.integers(5):
        case 0:
            low, high = sorted(rng.normal(0, 5, 2).round(1).tolist())
            bounds = (low, high) if rng.random() < 0.5 else (None, None)
            return Box(shape, DTYPES[("F16", "F32", "F64")[rng.integers(3)]], *bounds)
        case 1:
            return Box(shape, int_dtype)
        case 2:
            return Discrete(int(rng.integers(1, 9)), int(rng.integers(0, 3)), int_dtype)
        case 3:
            counts = tuple(int(n) for n in rng.integers(1, 6, math.prod(shape)))
            return MultiDiscrete(counts, shape, int_dtype)
        case 4:
            return MultiBinary(shape)
        case _:
            return Box((24, 24), DTYPES["U8"])


def random_spec(rng: np.random.Generator, game: str = "sample") -> GameSpec:
    """A random game: plain, nested or image observations, one or more actions, maybe masks."""
    obs: Any = random_space(rng, is_image=bool(rng.random() < 0.2))
    if rng.random() < 0.4:
        obs = {
            key: random_space(rng, is_image=key == "camera") for key in ("camera", "self.hp", "0")
        }
    actions: Any = int(rng.integers(1, 6))
    if rng.random() < 0.6:
        actions = random_space(rng)
    elif rng.random() < 0.3:
        actions = {"move": random_space(rng), "say": random_space(rng)}
    has_action_mask = isinstance(actions, int | Discrete) and rng.random() < 0.5
    return game_spec(game, obs=obs, actions=actions, has_action_mask=has_action_mask)


def random_rows(space: Space, n: int, rng: np.random.Generator) -> Array:
    """`n` random rows of a space."""
    shape = (n, *space.shape)
    kind = space.dtype.kind
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, shape).astype(space.dtype)
    if isinstance(space, MultiDiscrete):
        return (
            (rng.random((n, len(space.counts))) * space.counts).astype(space.dtype).reshape(shape)
        )
    if isinstance(space, MultiBinary):
        return rng.integers(0, 2, shape).astype(space.dtype)
    assert isinstance(space, Box)
    if kind == "f":
        low = -1.0 if space.low is None else space.low
        high = 1.0 if space.high is None else space.high
        flat = rng.uniform(np.ravel(low), np.ravel(high), (n, math.prod(space.shape)))
        rows: Array = (
            np.clip(flat.astype(space.dtype), low, high).astype(space.dtype).reshape(shape)
        )
        return rows
    info = np.iinfo(space.dtype)
    least: Any = info.min if space.low is None else space.low
    most: Any = info.max if space.high is None else space.high
    return rng.integers(least, most, shape, dtype=space.dtype, endpoint=True)


def random_chunk(
    spec: GameSpec,
    rng: np.random.Generator,
    *,
    session: uuid.UUID,
    chunk_no: int = 0,
    first_step: int = 0,
    n_steps: int = 6,
    is_first: bool | None = None,
    optional: Sequence[str] = (),
) -> Chunk:
    """A valid chunk of this game with random episode ends; `optional` names optional columns."""
    rows = _row_kinds(rng, n_steps, chunk_no == 0 if is_first is None else is_first)
    n = len(rows)
    is_step = np.array([kind == RowKind.STEP for kind, *_ in rows])
    columns: dict[str, Array] = {
        "row": np.array([kind for kind, *_ in rows], np.uint8),
        "is_first": np.array([first for _, first, *_ in rows], np.bool_),
        "terminated": np.array([end == "terminated" for *_, end in rows], np.bool_),
        "truncated": np.array([end == "truncated" for *_, end in rows], np.bool_),
        "reward": np.where(is_step, rng.normal(0, 1, n), 0).astype(np.float32),
    }
    columns |= {name: random_rows(space, n, rng) for name, space in spec.obs_columns.items()}
    for name, space in spec.action_columns.items():
        columns[name] = random_rows(space, n, rng)
        columns[name][~is_step] = 0
    columns |= _optional_columns(spec, rng, columns, optional)
    meta = ChunkMeta(
        game=spec.game,
        schema=spec.schema,
        session=session,
        chunk_no=chunk_no,
        first_step=first_step,
        n_steps=n_steps,
        consent="granted",
        client="samples/1",
        episodes=_notes(columns["is_first"]),
    )
    return Chunk(meta, columns).validate()


def _row_kinds(rng: np.random.Generator, n_steps: int, opens: bool) -> list[tuple[int, bool, str]]:
    rows: list[tuple[int, bool, str]] = []
    for number in range(n_steps):
        end = str(rng.choice(["terminated", "truncated", "cut"])) if rng.random() < 0.2 else ""
        rows.append((RowKind.STEP, opens, end))
        opens = bool(end)
        if end in ("terminated", "truncated"):
            rows.append((RowKind.FINAL, False, ""))
        elif end or number + 1 == n_steps:
            rows.append((RowKind.BOOTSTRAP, False, ""))
    return rows


def _optional_columns(
    spec: GameSpec, rng: np.random.Generator, columns: dict[str, Array], optional: Sequence[str]
) -> dict[str, Array]:
    n = len(columns["row"])
    extra: dict[str, Array] = {}
    for name in optional:
        if name == "raw_action":
            for action, space in spec.action_columns.items():
                raw = rng.normal(0, 1, (n, *space.shape))
                extra[f"raw_{action}"] = raw.astype(raw_space(space).dtype)
        elif name in OPTIONAL:
            extra[name] = rng.integers(0, 4, n).astype(OPTIONAL[name])
    if spec.discrete is not None and (spec.has_action_mask or "action_mask" in optional):
        action_mask = rng.random((n, spec.discrete.n)) < 0.5
        action_mask[
            np.arange(n), np.clip(columns["action"].astype(np.int64) - spec.discrete.start, 0, None)
        ] = True
        extra["action_mask"] = action_mask
    return extra


def _notes(is_first: Array) -> tuple[EpisodeNote, ...]:
    starts = [int(row) for row in np.flatnonzero(is_first)]
    starts = starts if starts[:1] == [0] else [0, *starts]
    return tuple(EpisodeNote(row=row, seed=row, match=f"m-{row}") for row in starts)


def random_session(
    spec: GameSpec,
    rng: np.random.Generator,
    *,
    n_chunks: int = 4,
    max_steps: int = 8,
    optional: Sequence[str] = (),
    session: uuid.UUID | None = None,
) -> list[Chunk]:
    """Consecutive chunks of one session, whose steps and episodes continue across chunks."""
    session = session or new_session(START_S, rng.bytes(10))
    chunks: list[Chunk] = []
    first_step = 0
    opens = True
    for number in range(n_chunks):
        n_steps = int(rng.integers(1, max_steps + 1))
        chunk = random_chunk(
            spec,
            rng,
            session=session,
            chunk_no=number,
            first_step=first_step,
            n_steps=n_steps,
            is_first=opens,
            optional=[name for name in optional if rng.random() < 0.7],
        )
        chunks.append(chunk)
        first_step += n_steps
        last_step = int(np.flatnonzero(chunk.columns["row"] == RowKind.STEP)[-1])
        opens = bool(
            chunk.columns["terminated"][last_step] or chunk.columns["truncated"][last_step]
        )
    return chunks


def stamped(
    chunks: Sequence[Chunk], *, player: bytes = PLAYER, received_s: float = START_S
) -> Iterator[Frame]:
    """The frames of chunks, with player and time as the intake sets them."""
    for chunk in chunks:
        yield chunk.frame().stamped(player, int(received_s))
