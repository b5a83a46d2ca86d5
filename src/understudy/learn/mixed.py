"""MixedReplay: players' and actors' steps in two replays, of which every batch takes a fixed number of rows each."""

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError
from understudy.core.meta import ChunkId
from understudy.core.tensors import Array, part
from understudy.learn.replay import Drawn, HostReplay
from understudy.learn.replay_state import ReadChunks
from understudy.learn.side_by_side import side_by_side


class MixedReplay:
    """One replay made of two: a few rows of people are not drowned in millions of a simulator's.

    Importance weights correct within each part; the mixture itself is meant. While one part is empty, the other fills
    the batch.
    """

    def __init__(self, players: HostReplay, actors: HostReplay, *, player_rows: int) -> None:
        if players.needs != actors.needs:
            raise ConfigError("players and actors must be replays for the same needs; make both for one algorithm")
        if not 0 <= player_rows <= players.needs.batch:
            raise ConfigError(f"player_rows is {player_rows}; give a number from 0 to the batch {players.needs.batch}")
        self.needs = players.needs
        self._players, self._actors, self._player_rows = players, actors, player_rows

    @property
    def n_sampleable(self) -> int:
        """Starts that may be drawn."""
        return self._players.n_sampleable + self._actors.n_sampleable

    @property
    def n_steps_inserted(self) -> int:
        """Steps ever inserted, those that have left included."""
        return self._players.n_steps_inserted + self._actors.n_steps_inserted

    @property
    def n_bad_priorities(self) -> int:
        """Priorities that were NaN, infinite or negative, and left out."""
        return self._players.n_bad_priorities + self._actors.n_bad_priorities

    def insert(self, chunk: Chunk, *, weight: float = 1.0) -> int:
        """How many starts became sampleable, in the part that the chunk's kind belongs to."""
        replay = self._players if chunk.meta.kind == "player" else self._actors
        return replay.insert(chunk, weight=weight)

    def close(self, session: uuid.UUID) -> int:
        """How many waiting starts became sampleable, because no more chunks of this session come."""
        return self._players.close(session) + self._actors.close(session)

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether rows of this chunk were here; none is drawn any more."""
        found = [replay.evict(session, chunk_no) for replay in (self._players, self._actors)]
        return any(found)

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that what was drawn at these rows came from, each once."""
        border = self._players.capacity
        return self._players.chunks_of(rows[rows < border]) + self._actors.chunks_of(rows[rows >= border] - border)

    def draw(self, k: int, *, rng: np.random.Generator, beta: float = 0.4, batch: int | None = None) -> Drawn:
        """k batches, players' rows first."""
        wanted = batch or self.needs.batch
        n_players = min(self._player_rows, wanted)
        if self._actors.n_sampleable == 0:
            n_players = wanted
        if self._players.n_sampleable == 0:
            n_players = 0
        drawn = []
        if n_players:
            drawn.append(self._players.draw(k, rng=rng, beta=beta, batch=n_players))
        if n_players < wanted:
            found = self._actors.draw(k, rng=rng, beta=beta, batch=wanted - n_players)
            drawn.append(found._replace(rows=found.rows + self._players.capacity))
        return drawn[0] if len(drawn) == 1 else side_by_side(drawn, partial(np.concatenate, axis=1))

    def feedback(self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array) -> None:
        """Give drawn rows new priorities."""
        border = self._players.capacity
        is_player = rows < border
        self._players.feedback(rows[is_player], stamps[is_player], priorities[is_player])
        self._actors.feedback(rows[~is_player] - border, stamps[~is_player], priorities[~is_player])

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs besides the chunks themselves."""
        players, actors = self._players.state(), self._actors.state()
        arrays = {f"players.{name}": array for name, array in players[0].items()}
        arrays |= {f"actors.{name}": array for name, array in actors[0].items()}
        return arrays, {"players": players[1], "actors": actors[1]}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks) -> None:
        """Become the replay that `state` described: every later draw has the same bits."""
        for name, replay in (("players", self._players), ("actors", self._actors)):
            replay.restore(part(arrays, name), facts[name], read)
