"""Training from a store: a learner that plays nothing itself, and follows what players and
others leave there."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.experience.chunk import By, Chunk, ChunkId, RowKind, chunk_name
from understudy.experience.frame import FrameKind
from understudy.experience.session import tombstone_of
from understudy.learn.learner import Learner
from understudy.learn.replay import ReplaySource
from understudy.nn.policy import Policy
from understudy.ports import Forgotten, Stored
from understudy.training.events import Compiling, Guarded, OnEvent, Update
from understudy.training.follower import (
    ReaderPosition,
    StoreFollower,
    place_from_json,
    stored_chunks,
)

IDLE_S = 60.0
"""A session that was silent for this long is taken as ended, if it was heard of since the
training began."""


class FromStore:
    """Updates on what a store holds and will hold; `steps` are updates here, since nothing is
    played."""

    env_steps = 0

    def __init__(
        self,
        learner: Learner,
        follower: StoreFollower,
        *,
        steps: int,
        clock: Clock,
        on_event: OnEvent,
        learn_from: Sequence[str] = ("granted",),
        only_people: bool = False,
    ) -> None:
        """`only_people`: episodes in which a bot or a script decided are left out, for cloning."""
        if not isinstance(learner.source, ReplaySource):
            raise ConfigError(
                "an algorithm that learns from its own rollouts cannot learn from a store; use bc "
                "or dqn"
            )
        self.learner = learner
        self._replay = learner.source.replay
        self._follower = follower
        self._steps = steps
        self._on_event = on_event
        self._clock = clock
        self._learn_from = tuple(learn_from)
        self._only_people = only_people
        self.place = ReaderPosition()
        self._is_first_look = True
        self._owners: dict[uuid.UUID, bytes] = {}
        self._heard_s: dict[uuid.UUID, float] = {}
        self.left_out_chunks = 0
        """Chunks of players who did not allow learning from them."""
        self.policy = learner.publish()
        follower.join(self)

    @property
    def n_usable(self) -> int:
        """Steps that are here to learn from now."""
        return self._replay.n_sampleable

    @property
    def steps(self) -> int:
        return self.learner.counts.updates

    @property
    def progress(self) -> float:
        return min(1.0, self.steps / self._steps)

    @property
    def is_done(self) -> bool:
        return self.steps >= self._steps

    def step(self) -> bool:
        """Take what is new in the store, then one call of updates; False when the learner must
        go back."""
        self.follow()
        learner = self.learner
        if not learner.may_step:
            raise ConfigError(
                f"nothing to learn from: {learner.counts.inserted_steps} steps could be used, "
                f"{self.left_out_chunks} "
                "chunks lack consent; record with consent='granted', or check the game and its "
                "schema"
            )
        calls = learner.counts.calls
        return learner.run(lambda: learner.counts.calls > calls, self)

    # --- what the learner says while it runs ------------------------------------------------------

    def compiling(self) -> None:
        self._on_event(Compiling(env_steps=self.steps, what="update"))

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        names = list(map(chunk_name, chunks))
        self._on_event(
            Guarded(env_steps=self.steps, what="updates on these were not finite", chunks=names)
        )

    def take(self, policy: Policy, metrics: Mapping[str, float]) -> None:
        self.policy = policy
        counts = self.learner.counts
        self._on_event(
            Update(
                env_steps=self.steps,
                updates=counts.updates,
                version=counts.version,
                replay_ratio=counts.replay_ratio,
                lag_versions=0,
                metrics=metrics,
            )
        )

    # --- the store --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the store from where the last look ended.

        What it holds at the first look is taken as all there is: sessions that are open end there,
        however long ago they were heard of, so that a training of the same store has the same bits
        whenever it begins.
        """
        while self._follower.follow(self):
            pass
        if self._is_first_look:
            self._is_first_look = False
            self.learner.source.end_sessions()
            self._heard_s.clear()
        idle = [
            session for session, at_s in self._heard_s.items() if at_s < self._clock.now() - IDLE_S
        ]
        for session in idle:
            self._end(session)

    def read(self, item: Stored | Forgotten) -> None:
        """Learn from an item of the store, or let go of what was forgotten; the follower calls
        this."""
        if isinstance(item, Forgotten):
            keys = list(item.chunks)
            if item.player is not None and not keys:
                owned = {
                    session
                    for session, player in self._owners.items()
                    if tombstone_of(player) == item.player
                }
                keys = [key for key in self._replay.held() if key[0] in owned]
            for session, number in keys:
                self._replay.evict(session, number)
            return
        frame = item.frame
        chunk = item.chunk
        if chunk is None:
            if frame.kind is FrameKind.CLOSE:
                self._end(frame.session)
            return
        if chunk.meta.schema != self.learner.algorithm.game.schema:
            return
        if chunk.meta.kind != "actor" and chunk.meta.consent not in self._learn_from:
            self.left_out_chunks += 1
            return
        if self._only_people:
            chunk = people_in(chunk)
            if chunk is None:
                return
        try:
            self.learner.insert(chunk, is_own=False)
        except Refused as error:
            self._on_event(
                Guarded(
                    env_steps=self.steps,
                    what=f"a chunk was refused: {error}",
                    chunks=[chunk_name(chunk.meta.id)],
                )
            )
            return
        self._heard_s[frame.session] = float(frame.received_s)
        self._owners[frame.session] = frame.player

    def _end(self, session: uuid.UUID) -> None:
        if self._heard_s.pop(session, None) is not None:
            self._replay.close(session)

    # --- resume -----------------------------------------------------------------------------------

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The learner's part, and how far the store was read; never a row of a player."""
        arrays, facts = self.learner.checkpoint()
        heard = {str(session): at_s for session, at_s in self._heard_s.items()}
        held = {session for session, _ in self._replay.held()}
        self._owners = {
            session: player for session, player in self._owners.items() if session in held
        }
        owners = {str(session): player.hex() for session, player in self._owners.items()}
        return arrays, facts | {"place": self.place.to_json(), "heard_s": heard, "owners": owners}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        self.learner.restore(arrays, facts, self._read)
        self.place = place_from_json(facts["place"])
        self._is_first_look = self.place.cursor is None
        self._heard_s = {uuid.UUID(text): at_s for text, at_s in facts["heard_s"].items()}
        self._owners = {
            uuid.UUID(session): bytes.fromhex(player) for session, player in facts["owners"].items()
        }
        self.policy = self.learner.current()

    def _read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        """Chunks by id; those of players who were forgotten meanwhile are gone for good."""
        found = stored_chunks(self._follower.view, set(ids))
        chunks = [found[key] for key in ids if key in found]
        return iter(
            [one for one in map(people_in, chunks) if one is not None]
            if self._only_people
            else chunks
        )

    def close(self) -> None:
        self._follower.leave(self)


def people_in(chunk: Chunk) -> Chunk | None:
    """The chunk with those of its episodes in which nobody but people decided; None where there
    are none."""
    if chunk.meta.kind == "actor":
        return None
    by = chunk.columns.get("by")
    ends = [*(note.row for note in chunk.meta.episodes[1:]), chunk.n_rows]
    kept = []
    notes = []
    n_rows = 0
    for note, end in zip(chunk.meta.episodes, ends, strict=True):
        if note.model is None and (by is None or int(by[note.row : end].max()) <= By.PERSON):
            kept.append(np.arange(note.row, end))
            notes.append(replace(note, row=n_rows))
            n_rows += end - note.row
    if len(notes) == len(chunk.meta.episodes):
        return chunk
    if not kept:
        return None
    columns = {name: column[np.concatenate(kept)] for name, column in chunk.columns.items()}
    n_steps = int((columns["row"] == RowKind.STEP).sum())
    return Chunk(replace(chunk.meta, n_steps=n_steps, episodes=tuple(notes)), columns)
