"""A run's own store: what its actors played, so that a replay can be filled again after a kill."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from understudy.core.chunk import Chunk, ChunkId, chunk_name, chunk_of
from understudy.core.clock import Clock
from understudy.core.errors import Corrupt
from understudy.core.frame import decode_frame
from understudy.core.game import GameSpec
from understudy.core.ports import Candidate, Quarantined, WriteBatch
from understudy.engines.follower import stored_chunks
from understudy.stores.local import LocalStore

_PARTITION = "actors"
_WRITE_CHUNKS = 256
_NOBODY = bytes(16)
"""Actors are nobody's: their chunks have no player."""


class _OneGame:
    """The specs of a store that holds a single game."""

    def __init__(self, game: GameSpec) -> None:
        self._game = game

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return self._game if (game, schema) == (self._game.game, self._game.schema) else None

    def knows(self, game: str) -> bool:
        return game == self._game.game


class History:
    """Chunks wait in memory until a checkpoint needs them on the disk; `read` gives them back."""

    def __init__(self, folder: Path, game: GameSpec, *, clock: Clock) -> None:
        self._clock = clock
        self._store = LocalStore(folder, specs=_OneGame(game))
        self._claim = self._store.claim(_PARTITION, owner="run", ttl_s=1e6)
        self._waiting: list[Chunk] = []

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._waiting.extend(chunks)

    def flush(self) -> None:
        """Make everything durable; a chunk that is there already, from before a kill, is stored once."""
        now_s = int(self._clock.now())
        for at in range(0, len(self._waiting), _WRITE_CHUNKS):
            part = self._waiting[at : at + _WRITE_CHUNKS]
            candidates = [Candidate(chunk.frame().stamped(_NOBODY, now_s), chunk) for chunk in part]
            self._store.write(WriteBatch(_PARTITION, self._claim.epoch, None, candidates))
        self._waiting = []

    def read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        """The chunks with these ids, in this order, quarantined ones too; Corrupt when one is missing."""
        found = stored_chunks(self._store, set(ids))
        if wanted := set(ids) - found.keys():
            # Not all of them decode: what has a NaN in its rewards never was in a replay.
            frames = [decode_frame(one.raw) for key, one in self._in_quarantine() if key in wanted]
            found |= {chunk.meta.id: chunk for chunk in map(chunk_of, frames)}
        if missing := [chunk_name(one) for one in ids if one not in found]:
            raise Corrupt(f"the run's store lacks {len(missing)} chunks of its checkpoint, such as {missing[0]}")
        return iter([found[key] for key in ids])

    def _in_quarantine(self) -> Iterator[tuple[ChunkId, Quarantined]]:
        last = 0
        while page := self._store.quarantined(after_id=last):
            for one in page:
                if one.session is not None and one.chunk_no is not None:
                    yield (one.session, one.chunk_no), one
            last = page[-1].id

    @property
    def quarantined(self) -> Sequence[ChunkId]:
        """What was taken out of every sample for good."""
        return [key for key, _ in self._in_quarantine()]

    def quarantine(self, ids: Sequence[ChunkId], *, reason: str) -> None:
        """Take chunks out of every later sample; those still waiting are stored first."""
        self.flush()
        self._store.quarantine(ids, reason=reason)

    def close(self) -> None:
        self._store.close()
