"""The inline engine: actor and learner take turns in one process.

    round:  collect (actor) ─► insert ─► updates while the limiter allows ─► publish ─► next round

In lock-step (the default) a round is a pure function of the previous one, so a run that is killed
and resumed ends bit-identical. When asynchronous, the actor plays ahead in its own thread while
the learner updates.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.act.actor import Actor, Collected, epsilon_ladder
from understudy.backends.local import open_local_store
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, LearningFailed, Refused
from understudy.core.tensors import Array, arrays_under
from understudy.experience.chunk import Chunk, ChunkId, chunk_name, chunk_of
from understudy.experience.frame import decode_frame
from understudy.experience.game import GameSpec
from understudy.learn.learner import Learner
from understudy.nn.policy import Policy
from understudy.ports import Candidate, Quarantined, WriteBatch
from understudy.training.events import Compiling, EpisodeEnded, Guarded, OnEvent, Update
from understudy.training.follower import stored_chunks

_PARTITION = "actors"
_WRITE_CHUNKS = 256
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
    """A run's own store: the experience of its actors, to refill the replay after a kill.

    Chunks stay in memory until `flush`, before a checkpoint; only then can `read` return them.
    """

    def __init__(self, folder: Path, game: GameSpec, *, clock: Clock) -> None:
        self._clock = clock
        self._store = open_local_store(folder, specs=_OneGame(game))
        self._claim = self._store.claim(_PARTITION, owner="run", ttl_s=1e6)
        self._waiting: list[Chunk] = []

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._waiting.extend(chunks)

    def flush(self) -> None:
        """Make everything durable; chunks that were stored before a kill are not stored again."""
        now_s = int(self._clock.now())
        for at in range(0, len(self._waiting), _WRITE_CHUNKS):
            batch = self._waiting[at : at + _WRITE_CHUNKS]
            candidates = [
                Candidate(chunk.frame().stamped(_NO_PLAYER, now_s), chunk) for chunk in batch
            ]
            self._store.write(WriteBatch(_PARTITION, self._claim.epoch, None, candidates))
        self._waiting = []

    def read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        """These chunks, in order, including quarantined ones; Corrupt if one is missing."""
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
        return iter([chunks[key] for key in ids])

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineConfig:
    """How acting and learning alternate."""

    steps: int
    """Env steps of the whole run, over all envs."""
    horizon: int = 0
    """Env steps that schedules span; 0: those of the run."""
    collect: int = 32
    """Steps per env and round."""
    is_asynchronous: bool = False
    has_ladder: bool = False
    """Each env has its own fixed epsilon (Ape-X), instead of one annealed epsilon for all."""
    calls_per_version: int = 4
    """When asynchronous: learner calls per published version. In lock-step: one per round."""

    def __post_init__(self) -> None:
        for name, example in (("steps", 100_000), ("collect", 32), ("calls_per_version", 4)):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(
                    f"{name} is {value}; give a whole number from 1, such as {example}"
                )


class Inline:
    """One actor and one learner; `step` runs one round."""

    def __init__(
        self,
        learner: Learner,
        actor: Actor,
        *,
        config: InlineConfig,
        history: RunStore | None,
        on_event: OnEvent,
    ) -> None:
        if config.is_asynchronous and learner.is_on_policy:
            raise ConfigError(
                "asynchronous is true, but this algorithm is on-policy and learns only from its "
                "newest weights; set it to false"
            )
        if getattr(learner.algorithm.needs, "is_cloning", False):
            raise ConfigError(
                "this algorithm clones recorded play and would only copy itself; give "
                "--from-store DIR"
            )
        self.learner = learner
        self._actor = actor
        self._config = config
        self._history = history
        self._on_event = on_event
        self._round = 0
        self.steps = 0
        self._lag = 0
        self.policy = learner.publish()
        """The actor's policy."""
        if (
            self.policy.head.kind == "epsilon_greedy"
            and not config.has_ladder
            and "epsilon" not in learner.knobs_at(0)
        ):
            raise ConfigError(
                "this algorithm's head is epsilon_greedy, but its Knobs have no epsilon; add "
                "epsilon: float | Schedule, set ladder, or choose another head, such as categorical"
            )
        self._ahead: _ActorThread | None = None

    @property
    def env_steps(self) -> int:
        return self.steps

    @property
    def progress(self) -> float:
        return min(1.0, self.steps / (self._config.horizon or self._config.steps))

    @property
    def is_done(self) -> bool:
        return self.steps >= self._config.steps

    def step(self) -> bool:
        """One round; False if too many updates failed and the last checkpoint must be restored."""
        is_asynchronous = self._config.is_asynchronous
        if is_asynchronous and self._ahead is None:
            # Sessions from before a resume do not continue.
            self.learner.source.end_sessions()
            self._ahead = _ActorThread(self, self._round)
        ahead = self._ahead
        collected = self.play(self.policy, self._round) if ahead is None else ahead.take()
        self.steps += collected.env_steps
        self._round += 1
        for episode in collected.episodes:
            self._on_event(
                EpisodeEnded(
                    env_steps=self.steps,
                    env=episode.env,
                    return_=episode.return_,
                    length=episode.length,
                )
            )
        if self._history is not None:
            self._history.add(collected.chunks)
        self._lag = max((self.learner.lag_of(chunk) for chunk in collected.chunks), default=0)
        for chunk in collected.chunks:
            try:
                self.learner.insert(chunk)
            except Refused as error:
                self._quarantine([chunk.meta.id], f"a chunk was rejected: {error}", error.reason)
        return self.learner.run(
            lambda: ahead is not None and ahead.has_failed,
            self,
            calls_per_version=self._config.calls_per_version if is_asynchronous else None,
        )

    def play(self, policy: Policy, round_no: int) -> Collected:
        """The actor's part of a round."""
        explore: Any = None
        if policy.head.kind == "epsilon_greedy":
            if self._config.has_ladder:
                explore = epsilon_ladder(self._actor.num_envs)
            else:
                explore = float(self.learner.knobs_at(self.progress)["epsilon"])
        return self._actor.collect(policy, self._config.collect, round_no=round_no, explore=explore)

    # --- Callbacks of the learner -----------------------------------------------------------------

    def compiling(self) -> None:
        self._on_event(Compiling(env_steps=self.steps, what="update"))

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        self._quarantine(chunks, "updates on rows of these chunks were not finite", "not_finite")

    def take(self, policy: Policy, metrics: Mapping[str, float]) -> None:
        self.policy = policy
        counts = self.learner.counts
        self._on_event(
            Update(
                env_steps=self.steps,
                updates=counts.updates,
                version=counts.version,
                replay_ratio=counts.replay_ratio,
                lag_versions=self._lag,
                metrics=metrics,
            )
        )

    def _quarantine(self, ids: Sequence[ChunkId], what: str, reason: str) -> None:
        names = list(map(chunk_name, ids))
        self._on_event(Guarded(env_steps=self.steps, what=what, chunks=names))
        if self._history is not None:
            self._history.quarantine(ids, reason=reason)

    # --- Checkpoints ------------------------------------------------------------------------------

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The state that an engine with the same settings resumes from; stores chunks first."""
        if self._history is not None:
            self._history.flush()
        arrays, facts = self.learner.checkpoint()
        if not self._config.is_asynchronous:
            actor_arrays, actor_facts = self._actor.state()
            arrays |= {f"actor.{name}": array for name, array in actor_arrays.items()}
            facts["actor"] = actor_facts
        return arrays, facts | {"round": self._round, "env_steps": self.steps}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; without the actor's part (asynchronous), episodes restart."""
        self.learner.restore(
            arrays, facts, self._history.read if self._history is not None else lambda _: iter(())
        )
        if "actor" in facts:
            self._actor.restore(arrays_under(arrays, "actor"), facts["actor"])
        self._round = facts["round"]
        self.steps = facts["env_steps"]
        self.policy = self.learner.current()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self._history is not None:
            self._history.close()


class _ActorThread:
    """The actor's thread: plays one round ahead with the newest policy, then waits for `take`."""

    def __init__(self, engine: Inline, round_no: int) -> None:
        self._engine = engine
        self._round = round_no
        self._played: queue.Queue[Collected | BaseException] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self.has_failed = False
        """The thread has stopped; the next `take` raises its error."""
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not (self._stop.is_set() or self.has_failed):
            try:
                collected: Collected | BaseException = self._engine.play(
                    self._engine.policy, self._round
                )
            except BaseException as error:
                collected = error
                self.has_failed = True
            self._round += 1
            while not self._stop.is_set():
                with contextlib.suppress(queue.Full):
                    self._played.put(collected, timeout=0.1)
                    break

    def take(self) -> Collected:
        while True:
            with contextlib.suppress(queue.Empty):
                collected = self._played.get(timeout=1.0)
                if isinstance(collected, BaseException):
                    raise collected
                return collected
            if not self._thread.is_alive():
                raise LearningFailed("the actor's thread ended without an error; resume the run")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30.0)
