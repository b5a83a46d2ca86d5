"""The same numbers pass every door: client, gateway, ingest, import and learner."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.client.fakes import MemoryLink, client
from tests.ingest.specs import KnownSpecs
from tests.serve.gateways import as_columns
from understudy.algorithm import Transitions
from understudy.client import Extras
from understudy.core.errors import ConfigError, Refused
from understudy.core.names import PlayerName, new_session
from understudy.core.tensors import DTYPES
from understudy.exchange.incoming import survey
from understudy.experience.builder import ChunkBuilder
from understudy.experience.chunk import Chunk, EpisodeNote
from understudy.experience.game import game_spec
from understudy.experience.spaces import MAX_NUMBER, Box
from understudy.ingest.check import check
from understudy.learn.rows import RowLayout
from understudy.serve.intake import frame_of
from understudy.serve.wire import ChunkColumns

NOW_S = 1_800_000_000.0
SPEC = game_spec("bounds", obs=2, actions=Box((1,), DTYPES["F32"]))
LARGEST = float(np.float32(MAX_NUMBER))
TOO_LARGE = float(np.nextafter(np.float32(MAX_NUMBER), np.float32(np.inf)))
COLUMNS = ("obs", "action", "reward", "logp", "value", "priority", "raw_action")


def chunk_with(column: str, number: float) -> Chunk:
    """A valid chunk of two steps, with this number in its second row."""
    builder = ChunkBuilder(SPEC, session=new_session(NOW_S))
    builder.begin(EpisodeNote(row=0))
    extras = Extras(logp=-1.0, value=0.0, priority=1.0, raw_action=np.zeros(1, np.float32))
    for at in range(2):
        builder.decide(np.full(2, at, np.float32), np.zeros(1, np.float32), extras=extras)
    builder.finish(terminated=True)
    block = builder.take()
    assert block is not None
    chunk = block.chunk(chunk_no=0, first_step=0)
    columns = {name: values.copy() for name, values in chunk.columns.items()}
    columns[column][1] = number
    return Chunk(chunk.meta, columns)


class OneChunk:
    """A file to import that has one chunk."""

    name = "a file"
    spec = SPEC
    origins: Mapping[int, int] = {}

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        yield self._chunk, None

    def report(self) -> Mapping[str, Any]:
        return {}


def by_client(column: str, number: float, tmp_path: Any) -> None:
    game = client(MemoryLink(), tmp_path, game=SPEC, strict=True)
    given: dict[str, Any] = {name: np.zeros(1, np.float32) for name in ("action", "raw_action")}
    given |= {"obs": np.zeros(2, np.float32), "reward": 0.0}
    given[column] = np.full_like(given[column], number) if column in given else float(number)
    names = ("logp", "value", "priority", "raw_action")
    try:
        with game.episode(player="anna") as ep:
            extras = Extras(**{name: given[name] for name in names if name in given})
            ep.acted(given["obs"], given["action"], extras=extras)
            ep.reward(float(number) if column == "reward" else 0.0)
    finally:
        game.close()


def by_gateway(column: str, number: float, tmp_path: Any) -> None:
    sent = as_columns(chunk_with(column, number))
    del sent["columns"]["raw_action"]  # clients that send JSON have none
    raw = msgspec.json.encode(sent)
    frame_of(msgspec.json.decode(raw, type=ChunkColumns), {SPEC.schema: SPEC})


def by_ingest(column: str, number: float, tmp_path: Any) -> None:
    frame = replace(chunk_with(column, number).frame(), player=uuid.uuid4().bytes)
    checked = check(frame.encode(), specs=KnownSpecs(SPEC), received_s=NOW_S)
    if checked.refusal is not None:
        raise Refused(checked.refusal.reason, checked.refusal.detail)


def by_import(column: str, number: float, tmp_path: Any) -> None:
    survey(OneChunk(chunk_with(column, number)))


def by_learner(column: str, number: float, tmp_path: Any) -> None:
    extras = ("logp", "value", "priority", "raw_action")
    RowLayout(SPEC, Transitions(batch=1, extras=extras)).take(chunk_with(column, number))


DOORS = (by_client, by_gateway, by_ingest, by_import, by_learner)


@pytest.mark.parametrize(
    ("door", "column"),
    [
        (door, column)
        for door in DOORS
        for column in COLUMNS
        if (door, column) != (by_gateway, "raw_action")
    ],
)
def test_the_largest_number_passes_every_door_and_the_next_one_none(
    tmp_path: Any, door: Callable[[str, float, Any], None], column: str
):
    for number in (LARGEST, -LARGEST):
        door(column, number, tmp_path)
    for number in (TOO_LARGE, -TOO_LARGE, 1e30, np.inf, np.nan):
        # JSON has neither infinity nor NaN: they arrive as null.
        is_null = door is by_gateway and not np.isfinite(number)
        code = "bad_columns" if is_null else "not_finite|bad_action"
        with pytest.raises((Refused, ConfigError), match=code):
            door(column, number, tmp_path)
