"""RunStore: the experience of a run's own actors, to refill its replay after a kill.

add ─► flush ─► a checkpoint is saved ─► trim: what no checkpoint may ask for is deleted
"""

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from understudy.backends.local import open_local_store
from understudy.core.clock import Clock
from understudy.core.errors import Corrupt
from understudy.experience.chunk import Chunk, ChunkId, chunk_name, chunk_of
from understudy.experience.frame import decode_frame
from understudy.experience.game import GameSpec
from understudy.ports import Candidate, Quarantined, WriteBatch
from understudy.training.follower import stored_chunks

_PARTITION = "actors"
_WRITE_CHUNKS = 256
_WRITE_BYTES = 8 * 1024 * 1024
"""Approximate bytes of one transaction, which SQLite's log must hold as well."""
_NO_PLAYER = bytes(16)
"""Actors' chunks have no player."""


class _OneGame:
    """The specs of a store with a single game."""

    def __init__(self, game: GameSpec) -> None:
        self._game = game

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return self._game if (game, schema) == (self._game.game, self._game.schema) else None

    def has_game(self, game: str) -> bool:
        return game == self._game.game


class RunStore:
    """A store of chunks in a run's folder.

    Chunks stay in memory until `flush`, before a checkpoint; only then can `read` return them.
    """

    def __init__(self, folder: Path, game: GameSpec, *, clock: Clock) -> None:
        self._clock = clock
        self._store = open_local_store(folder, specs=_OneGame(game))
        self._claim = self._store.claim(_PARTITION, owner="run", ttl_s=1e6)
        self._waiting: list[Chunk] = []
        self._oldest: deque[set[ChunkId]] = deque(maxlen=2)
        """The oldest chunks of the two newest checkpoints, as far as they are known."""

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._waiting.extend(chunks)

    def flush(self) -> None:
        """Make everything durable; chunks that were stored before a kill are not stored again."""
        now_s = int(self._clock.now())
        while batch := self._waiting[:_WRITE_CHUNKS]:
            largest_bytes = max(chunk.size_bytes for chunk in batch)
            batch = batch[: max(1, _WRITE_BYTES // largest_bytes)]
            candidates = [
                Candidate(chunk.frame().stamped(_NO_PLAYER, now_s), chunk) for chunk in batch
            ]
            self._store.write(WriteBatch(_PARTITION, self._claim.epoch, None, candidates))
            del self._waiting[: len(batch)]

    def read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        """The chunks of a checkpoint, in order; Corrupt if one is missing.

        Quarantined ones are included. `trim` keeps them while the checkpoint is needed.
        """
        chunks = stored_chunks(self._store, set(ids))
        if rest := set(ids) - chunks.keys():
            # Only these are decoded: chunks with NaN rewards do not decode, and never were in a
            # replay.
            frames = [
                decode_frame(entry.raw) for key, entry in self._in_quarantine() if key in rest
            ]
            chunks |= {chunk.meta.id: chunk for chunk in map(chunk_of, frames)}
        if missing := [chunk_name(key) for key in ids if key not in chunks]:
            raise Corrupt(
                f"the run's store lacks {len(missing)} chunks of its checkpoint, such as "
                f"{missing[0]}; restore the run's folder from a copy, or train again"
            )
        self._oldest.append(_oldest_of_sessions(ids))
        return iter([chunks[key] for key in ids])

    def trim(self, needed: Sequence[ChunkId]) -> None:
        """Delete what the two newest checkpoints cannot ask for; call after one is durable.

        `needed`: the chunks of the newest checkpoint. Everything from the oldest chunk of both
        checkpoints on is kept, so that a run that goes back to the older one finds all it played
        since. A kill at any moment leaves only less deleted.
        """
        oldest = _oldest_of_sessions(needed)
        # The same chunks: a checkpoint that was saved again, which leaves the one before it.
        if not self._oldest or oldest != self._oldest[-1]:
            self._oldest.append(oldest)
        if len(self._oldest) == 2 and all(self._oldest):
            self._store.trim(set.union(*self._oldest))

    def _in_quarantine(self) -> Iterator[tuple[ChunkId, Quarantined]]:
        last = 0
        while page := self._store.quarantined(after_id=last):
            for entry in page:
                if entry.session is not None and entry.chunk_no is not None:
                    yield (entry.session, entry.chunk_no), entry
            last = page[-1].id

    @property
    def quarantined(self) -> Sequence[ChunkId]:
        """The quarantined chunks, which are never sampled again."""
        return [key for key, _ in self._in_quarantine()]

    def quarantine(self, ids: Sequence[ChunkId], *, reason: str) -> None:
        """Exclude chunks from all later samples; unstored ones are stored first."""
        self.flush()
        self._store.quarantine(ids, reason=reason)

    def close(self) -> None:
        self._store.close()


def _oldest_of_sessions(ids: Iterable[ChunkId]) -> set[ChunkId]:
    """The first of these chunks of each session; those of a session are stored in order."""
    oldest: dict[uuid.UUID, int] = {}
    for session, number in ids:
        oldest[session] = min(number, oldest.get(session, number))
    return set(oldest.items())
