"""Random spaces and the chunks of games that have them, for property tests."""

import math
import uuid
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.experience.trajectories import Trajectory, rows_of, trajectories
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import OPTIONAL, Chunk, ChunkMeta, EpisodeNote
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

SESSION = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
whole = st.sampled_from(["U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"]).map(
    DTYPES.__getitem__
)
floats = st.sampled_from(["F16", "F32", "F64"]).map(DTYPES.__getitem__)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Any space a column may have."""
    kind = draw(
        st.sampled_from(["box", "int box", "image", "discrete", "multi_discrete", "multi_binary"])
    )
    shape = draw(shapes)
    if kind == "box":
        low, high = sorted(draw(st.tuples(st.integers(-8, 8), st.integers(-8, 8))))
        bounds = draw(
            st.sampled_from([(None, None), (float(low), float(high)), (None, float(high))])
        )
        return Box(shape, draw(floats), *bounds)
    if kind == "int box":
        return Box(shape, draw(whole))
    if kind == "image":
        return Box((16, 16, 2), DTYPES["U8"])
    if kind == "discrete":
        return Discrete(draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(whole))
    if kind == "multi_discrete":
        counts = tuple(
            draw(st.lists(st.integers(1, 5), min_size=math.prod(shape), max_size=math.prod(shape)))
        )
        return MultiDiscrete(counts, shape, draw(whole))
    return MultiBinary(shape)


keys = st.sampled_from(["camera", "self.hp", "self.pos", "0", "1.x", "a-b_c"])


@st.composite
def specs(draw: st.DrawFn) -> GameSpec:
    """Any game: plain or nested observations and actions, perhaps action masks."""
    some = st.dictionaries(keys, spaces(), min_size=1, max_size=3)
    obs = draw(spaces() | some)
    actions = draw(spaces() | some | st.integers(1, 6))
    has_action_mask = isinstance(actions, int | Discrete) and draw(st.booleans())
    return game_spec(
        "rally",
        obs=obs,
        actions=actions,
        has_action_mask=has_action_mask,
        max_episode_steps=draw(st.none() | st.just(9)),
    )


def values(draw: st.DrawFn, space: Space, n: int) -> Any:
    """Random values of a column's type; chunks do not check them against the space."""
    return draw(
        hnp.arrays(
            space.dtype, (n, *space.shape), elements=_elements(space.dtype), fill=st.nothing()
        )
    )


def _elements(dtype: Any) -> Any:
    return hnp.from_dtype(dtype, allow_nan=False) if dtype.kind == "f" else hnp.from_dtype(dtype)


@st.composite
def chunks(draw: st.DrawFn, *, min_steps: int = 1) -> Chunk:
    """Valid chunks of random games, with some of the optional columns."""
    trajectory: Trajectory = draw(
        trajectories().filter(lambda trajectory: len(trajectory.steps) >= min_steps)
    )
    spec = draw(specs())
    columns = rows_of(list(trajectory.steps))
    del columns["obs"]
    n = len(columns["row"])
    for name, space in {**spec.obs_columns, **spec.action_columns}.items():
        columns[name] = (
            np.random.default_rng(draw(st.integers(0, 9)))
            .integers(0, 2, (n, *space.shape))
            .astype(space.dtype)
        )
        if columns[name].size < 64:
            columns[name] = values(draw, space, n)
    for name in draw(st.sets(st.sampled_from(sorted(OPTIONAL)))):
        columns[name] = np.arange(n).astype(OPTIONAL[name]) % 4
    if spec.has_action_mask and spec.discrete:
        columns["action_mask"] = np.ones((n, spec.discrete.n), np.bool_)
    return chunk_with(columns, schema=spec.schema)


def chunk_with(
    columns: dict[str, Any], *, chunk_no: int = 0, schema: str = "0" * 64, **more: Any
) -> Chunk:
    """A chunk of these columns with matching metadata."""
    starts = np.flatnonzero(columns["is_first"]).tolist()
    starts = starts if starts and starts[0] == 0 else [0, *starts]
    meta = ChunkMeta(
        game="rally",  # type: ignore[arg-type]
        schema=schema,
        session=SESSION,
        chunk_no=chunk_no,
        first_step=0,
        n_steps=int((columns["row"] == 0).sum()),
        episodes=tuple(EpisodeNote(row=row) for row in starts),
    )
    return Chunk(replace(meta, **more), columns)


def small_columns() -> dict[str, Any]:
    """Five rows with every kind of row: a terminated step, a truncated one and a bootstrap end."""
    return {
        "obs": np.arange(12, dtype=np.float32).reshape(6, 2),
        "action": np.array([1, 0, 2, 0, 1, 0], np.int32),
        "reward": np.array([1, 0, 2, 0, 3, 0], np.float32),
        "row": np.array([0, 1, 0, 1, 0, 2], np.uint8),
        "is_first": np.array([1, 0, 1, 0, 1, 0], np.bool_),
        "terminated": np.array([1, 0, 0, 0, 0, 0], np.bool_),
        "truncated": np.array([0, 0, 1, 0, 0, 0], np.bool_),
    }
