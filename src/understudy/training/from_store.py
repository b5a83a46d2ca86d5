"""Training from a store: a learner that plays nothing and follows the experience of others."""

import itertools
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Transitions
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId, RowKind, chunk_name, people_rows
from understudy.experience.frame import FrameKind
from understudy.experience.session import tombstone_of
from understudy.learn.best_episodes import pieces_of, returns_of, rows_from
from understudy.learn.learner import Learner
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import PlayersReplay, ReplaySource
from understudy.nn.policy import Policy
from understudy.ports import Forgotten, Stored
from understudy.replay import Drawn, ReplayConfig
from understudy.training.events import Compiling, Guarded, OnEvent, Update
from understudy.training.follower import (
    MAX_READ_S,
    ReaderPosition,
    StoreFollower,
    position_from_json,
    stored_chunks,
)

HELD_OUT_SHARE = 0.2
"""Share of the steps that `hold_out` keeps from training."""
MAX_HELD_OUT_SHARE = 1 / 3
MANY_PLAYERS = 15
"""From this many players on, whole players are held out."""
MIN_COMPARED_STEPS = 20
"""Held-out steps that are needed to compare a bot with people."""
_COMPARED_STEPS = 4_096
IDLE_S = 60.0
"""A session counts as ended after this long without a chunk, if it was active during training."""


class FromStore:
    """Learns from a growing store; `steps` counts updates, since nothing is played."""

    env_steps = 0

    def __init__(
        self,
        learner: Learner,
        follower: StoreFollower,
        *,
        steps: int,
        clock: Clock,
        on_event: OnEvent,
        horizon: int = 0,
        learn_from: Sequence[str] = ("granted",),
        only_people: bool = False,
        people_share: float = 0.0,
    ) -> None:
        """`horizon`: updates that schedules span; 0: `steps`.

        `only_people`: use only episodes in which no decision is known to be by a bot or actor. The
        learner service sets it for cloning. `train --algorithm bc --from-store` does not, and
        also clones the decisions of bots and actors in the store.

        `people_share`: the share of such episodes in what is learned, if those of bots and actors
        have more than the rest of it. 0: as recorded; 1: as with `only_people`.
        """
        if not isinstance(learner.source, ReplaySource):
            raise ConfigError(
                "an on-policy algorithm learns from its own rollouts and cannot train from a "
                "store; use bc, iql or dqn"
            )
        self.learner = learner
        self._source = learner.source
        self._source.check_players()
        self._replay = self._source.of_players
        self._follower = follower
        self._steps = steps
        self._horizon = horizon or steps
        self._on_event = on_event
        self._clock = clock
        self._learn_from = tuple(learn_from)
        self._only_people = only_people or people_share == 1
        self._source.people_share = people_share
        self.position = ReaderPosition()
        self._is_first_read = True
        self._max_read_s = MAX_READ_S
        self._owners: dict[uuid.UUID, bytes] = {}
        self._received_s: dict[uuid.UUID, float] = {}
        self._held_out: dict[ChunkId, int] = {}
        """Chunks that are not learned from, to compare a policy with, and their steps."""
        self._to_hold_out = 0
        """Steps of later chunks that are to be held out too."""
        self.left_out_chunks = 0
        """Chunks skipped because their players did not consent to learning."""
        self.rejected_chunks = 0
        """Chunks skipped because the learner rejected them, such as for rewards of NaN."""
        self.policy = learner.publish()
        follower.join(self)

    @property
    def n_usable(self) -> int:
        """Steps available to learn from now, or held out of that."""
        return self._replay.n_sampleable + sum(self._held_out.values())

    @property
    def best_of(self) -> dict[str, int]:
        """`best_episodes` and `known_episodes`, if it clones only the best of them; else empty."""
        names = ("best_episodes", "known_episodes")
        metrics = self._source.metrics
        return {name: int(metrics[name]) for name in names if name in metrics}

    @property
    def steps(self) -> int:
        return self.learner.counts.updates

    @property
    def progress(self) -> float:
        return min(1.0, self.steps / self._horizon)

    @property
    def is_done(self) -> bool:
        return self.steps >= self._steps

    def step(self) -> bool:
        """Read new experience, then run one call of updates; False if weights must be restored."""
        self.follow()
        learner = self.learner
        if not learner.may_step:
            raise ConfigError(
                f"the store has nothing to learn from: {learner.counts.inserted_steps} usable "
                f"steps, {self.left_out_chunks} chunks without consent, {self.rejected_chunks} "
                "rejected; record with consent='granted', or check the game and its schema"
            )
        began_s = self._clock.monotonic()
        self._measure()
        calls = learner.counts.calls
        is_sound = learner.run(lambda: learner.counts.calls > calls, self)
        self._max_read_s = max(MAX_READ_S, self._clock.monotonic() - began_s)
        return is_sound

    def _measure(self) -> None:
        try:
            self._source.measure(self._owners)
        except ConfigError as error:
            if not self._held_out:
                raise
            n_steps = sum(self._held_out.values())
            raise ConfigError(
                f"{error}; {n_steps} steps are held out to compare the bot with, so more episodes "
                "may be all that is missing"
            ) from None

    # --- Callbacks of the learner -----------------------------------------------------------------

    def compiling(self) -> None:
        self._on_event(Compiling(env_steps=self.steps, what="update"))

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        names = list(map(chunk_name, chunks))
        self._on_event(
            Guarded(
                env_steps=self.steps, what="updates on these chunks were not finite", chunks=names
            )
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
                metrics={**metrics, **self._source.metrics},
            )
        )

    # --- The store --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the store from the current position; after the first time only for a while.

        That is about a second, or as long as the last call of updates took.

        The first read treats the store as complete: open sessions end there, however recent they
        are, so that training on the same store is bit-identical whenever it starts.
        """
        self._follower.catch_up(self, max_s=math.inf if self._is_first_read else self._max_read_s)
        if self._is_first_read:
            self._is_first_read = False
            self.learner.source.end_sessions()
            self._received_s.clear()
        idle = [
            session
            for session, received_s in self._received_s.items()
            if received_s < self._clock.now() - IDLE_S
        ]
        for session in idle:
            self._end(session)

    def read(self, item: Stored | Forgotten) -> None:
        """Insert an item into the replay, or evict forgotten chunks; called by the follower."""
        if isinstance(item, Forgotten):
            keys = list(item.chunks)
            if item.player is not None and not keys:
                owned = {
                    session
                    for session, player in self._owners.items()
                    if tombstone_of(player) == item.player
                }
                known = (*self._replay.chunk_ids(), *self._held_out)
                keys = [key for key in known if key[0] in owned]
            for session, number in keys:
                self._replay.evict(session, number)
                self._held_out.pop((session, number), None)
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
            self.rejected_chunks += 1
            self._on_event(
                Guarded(
                    env_steps=self.steps,
                    what=f"a chunk was rejected: {error}",
                    chunks=[chunk_name(chunk.meta.id)],
                )
            )
            return
        self._received_s[frame.session] = float(frame.received_s)
        self._owners[frame.session] = frame.player
        if chunk.meta.n_steps < 2 * self._to_hold_out:
            self._hold_out({chunk.meta.id: chunk.meta.n_steps})

    # --- Held-out steps ---------------------------------------------------------------------------

    def hold_out(self) -> None:
        """Keep a share of the steps out of training, those of later chunks if these are too few."""
        steps = self._replay.steps_of_chunks()
        owners = {key: self._owners[key[0]] for key in steps if key[0] in self._owners}
        self._to_hold_out = int(HELD_OUT_SHARE * sum(steps.values()))
        self._hold_out({key: steps[key] for key in held_out_of(owners, steps)})

    def _hold_out(self, steps: Mapping[ChunkId, int]) -> None:
        for session, number in steps:
            self._replay.evict(session, number)
        self._held_out |= steps
        self._to_hold_out = max(0, self._to_hold_out - sum(steps.values()))

    @property
    def has_held_out(self) -> bool:
        return bool(self._held_out)

    def learned_sample(self, max_steps: int = _COMPARED_STEPS) -> Batch:
        """Some of the steps that are learned from, as updates see them."""
        self._source.weigh(self._owners)
        drawn = _draw(self._replay, max_steps, row_weights=self._source.weights.drawn)
        return _without_axis(self._source.limited(drawn))

    def held_out(self) -> list[Batch]:
        """The held-out steps, a batch for each player; those erased since then are omitted.

        If only the best episodes are cloned, these are the steps of whole episodes that are as
        good as those, unless they are too few.
        """
        algorithm = self.learner.algorithm
        assert isinstance(algorithm.needs, Transitions)
        needs = replace(algorithm.needs, prioritised=False)
        by_player: dict[bytes, list[Chunk]] = {}
        for chunk in self._as_good_as_learned(list(self._read(list(self._held_out)))):
            by_player.setdefault(self._owners[chunk.meta.session], []).append(chunk)
        batches = []
        for chunks in by_player.values():
            n_rows = sum(chunk.n_rows + needs.stack for chunk in chunks)
            replay = HostReplay(algorithm.game, needs, ReplayConfig(capacity=2 * n_rows + 1_024))
            for chunk in chunks:
                replay.insert(chunk)
            for chunk in chunks:
                replay.close(chunk.meta.session)
            batches.append(_without_axis(_draw(replay, _COMPARED_STEPS).batches))
        return batches

    def _as_good_as_learned(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The chunks without episodes that would not be learned from for their returns.

        All chunks, if too few steps would be left to compare a bot with.
        """
        self._source.measure(self._owners)
        if self._source.least_return == -math.inf:  # all episodes are learned from
            return chunks
        pieces = {chunk.meta.id: pieces_of(chunk) for chunk in chunks}
        returns = returns_of(pieces, max_reward=self._source.max_reward)
        best = rows_from(pieces, returns, self._source.least_return)
        some = (_with_rows(chunk, best[chunk.meta.id]) for chunk in chunks)
        as_good = [chunk for chunk in some if chunk is not None]
        is_enough = sum(chunk.meta.n_steps for chunk in as_good) >= MIN_COMPARED_STEPS
        return as_good if is_enough else chunks

    def _end(self, session: uuid.UUID) -> None:
        if self._received_s.pop(session, None) is not None:
            self._replay.close(session)

    # --- Checkpoints ------------------------------------------------------------------------------

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The learner's state and the position in the store; never a player's rows."""
        arrays, facts = self.learner.checkpoint()
        sessions = {session for session, _ in (*self._replay.chunk_ids(), *self._held_out)}
        self._owners = {
            session: player for session, player in self._owners.items() if session in sessions
        }
        return arrays, facts | {
            "position": self.position.to_json(),
            "received_s": {str(session): at_s for session, at_s in self._received_s.items()},
            "owners": {str(session): player.hex() for session, player in self._owners.items()},
            "held_out": [
                [str(session), number, n_steps]
                for (session, number), n_steps in self._held_out.items()
            ],
            "to_hold_out": self._to_hold_out,
        }

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        self.learner.restore(arrays, facts, self._read)
        self.position = position_from_json(facts["position"])
        self._is_first_read = self.position.cursor is None
        self._received_s = {uuid.UUID(text): at_s for text, at_s in facts["received_s"].items()}
        self._owners = {
            uuid.UUID(session): bytes.fromhex(player) for session, player in facts["owners"].items()
        }
        self._held_out = {
            (uuid.UUID(session), number): n_steps
            for session, number, n_steps in facts.get("held_out", ())  # new in this version
        }
        self._to_hold_out = facts.get("to_hold_out", 0)
        self.policy = self.learner.current()

    def _read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        """Chunks by id; those deleted in the meantime, on a player's request, are omitted."""
        stored = stored_chunks(self._follower.view, set(ids))
        chunks = [stored[key] for key in ids if key in stored]
        if not self._only_people:
            return iter(chunks)
        return iter([people for chunk in chunks if (people := people_in(chunk)) is not None])

    def close(self) -> None:
        self._follower.leave(self)


def held_out_of(players: Mapping[ChunkId, bytes], steps: Mapping[ChunkId, int]) -> list[ChunkId]:
    """The chunks to hold out, of chunks in order of arrival: about a fifth of the steps.

    With many players, or if each has a single chunk, these are all chunks of some players;
    otherwise the last chunks of each in turn, or of some players if that is more, such as where the
    last chunks are short. Nothing is held out if that would be more than a third of the steps.
    """
    chunks: dict[bytes, list[ChunkId]] = {}
    for key, player in players.items():
        chunks.setdefault(player, []).append(key)
    n_steps = sum(steps.values())

    def first_of(groups: Sequence[Sequence[ChunkId]]) -> list[ChunkId]:
        held_out: list[ChunkId] = []
        n_held_out = 0
        for group in groups:
            n_more = sum(steps[key] for key in group)
            if n_held_out >= HELD_OUT_SHARE * n_steps:
                break
            if n_held_out + n_more <= MAX_HELD_OUT_SHARE * n_steps:
                held_out += group
                n_held_out += n_more
        return held_out

    by_player = first_of([chunks[player] for player in sorted(chunks)])  # hashes, in no order
    if len(chunks) >= MANY_PLAYERS:
        return by_player
    in_turn = itertools.zip_longest(*(reversed(own[1:]) for own in chunks.values()))
    last = first_of([[key] for keys in in_turn for key in keys if key is not None])
    is_enough = sum(steps[key] for key in last) >= HELD_OUT_SHARE / 2 * n_steps
    return last if is_enough else max(last, by_player, key=lambda keys: sum(steps[k] for k in keys))


def _draw(
    replay: PlayersReplay, max_steps: int, *, row_weights: NDArray[np.float32] | None = None
) -> Drawn:
    """Steps of a replay, always the same ones of the same replay."""
    n_steps = min(max_steps, replay.n_sampleable)
    rng = np.random.default_rng(0)
    return replay.draw(1, rng=rng, batch=n_steps, row_weights=row_weights)


def _without_axis(batches: Batch) -> Batch:
    """The first of several batches."""
    batch: Batch = jax.tree.map(lambda column: column[0], batches)
    return batch


def people_in(chunk: Chunk) -> Chunk | None:
    """The chunk without episodes that a bot or actor played in; None if no episode is left."""
    return _with_rows(chunk, people_rows(chunk))


def _with_rows(chunk: Chunk, is_kept: NDArray[np.bool_]) -> Chunk | None:
    """The chunk with these rows only, those of whole pieces of episodes; None without any."""
    if is_kept.all():
        return chunk
    if not is_kept.any():
        return None
    row_no = np.cumsum(is_kept) - 1
    notes = tuple(
        replace(note, row=int(row_no[note.row]))
        for note in chunk.meta.episodes
        if is_kept[note.row]
    )
    columns = {name: column[is_kept] for name, column in chunk.columns.items()}
    if not is_kept[-1] and columns["row"][-1] == RowKind.BOOTSTRAP:
        # The next chunk continues an episode that is left out here, not this one.
        notes = (*notes[:-1], replace(notes[-1], cut=True))
    n_steps = int((columns["row"] == RowKind.STEP).sum())
    return Chunk(replace(chunk.meta, n_steps=n_steps, episodes=notes), columns)
