"""The inline engine: actor and learner in one process, in turns.

    round:  collect (actor) ─► insert ─► updates while the limiter lets them pass ─► publish ─► next round

Deterministic: in lock-step, a round is a pure function of the round before, so a run that is killed and resumed ends
with the same bits. Asynchronous: the actor plays ahead in a thread of its own while the learner updates.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.act.actor import Actor, Collected
from understudy.act.explore import ladder
from understudy.core.chunk import Chunk, ChunkId, chunk_name
from understudy.core.errors import ConfigError, LearningFailed, Refused
from understudy.core.events import Compiling, Episode, Guarded, OnEvent, Update
from understudy.core.policy import Policy
from understudy.core.tensors import Array, part
from understudy.engines.history import History
from understudy.learn.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineConfig:
    """How acting and learning take turns."""

    steps: int
    """Env steps of the whole run, over all envs."""
    collect: int = 32
    """Steps per env and round."""
    is_asynchronous: bool = False
    has_ladder: bool = False
    """Each env keeps its own share of random actions (Ape-X), instead of one that falls for all."""
    calls_per_version: int = 4
    """Asynchronous: calls of the learner before the actor gets newer weights; in lock-step, once a round."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; give a whole number from 1, such as 100000")
        if self.collect < 1:
            raise ConfigError(f"collect is {self.collect}; give a whole number from 1, such as 32")
        if self.calls_per_version < 1:
            raise ConfigError(f"calls_per_version is {self.calls_per_version}; give a whole number from 1, such as 4")


class Inline:
    """One actor and one learner; `step` is a round."""

    def __init__(
        self, learner: Learner, actor: Actor, *, config: InlineConfig, history: History | None, on_event: OnEvent
    ) -> None:
        if config.is_asynchronous and learner.is_on_policy:
            raise ConfigError(
                "asynchronous is true, but this algorithm learns only from what its newest weights play; leave it false"
            )
        if getattr(learner.algorithm.needs, "is_cloning", False):
            raise ConfigError("this algorithm clones what others did and would only copy itself; give --from-store DIR")
        self.learner, self._actor, self._config = learner, actor, config
        self._history, self._on_event = history, on_event
        self._round = self.steps = self._lag = 0
        self._policy = learner.publish()
        if (
            self._policy.head.kind == "epsilon_greedy"
            and not config.has_ladder
            and "epsilon" not in learner.knobs_at(0)
        ):
            raise ConfigError(
                "this algorithm's head is epsilon_greedy, and its Knobs have no epsilon to play with; add "
                "epsilon: float | Schedule, set ladder, or choose another head, such as categorical"
            )
        self._ahead: _Ahead | None = None

    @property
    def policy(self) -> Policy:
        """What the actor plays with."""
        return self._policy

    @property
    def env_steps(self) -> int:
        return self.steps

    @property
    def progress(self) -> float:
        return min(1.0, self.steps / self._config.steps)

    @property
    def is_done(self) -> bool:
        return self.steps >= self._config.steps

    def step(self) -> bool:
        """One round; False when too many updates failed and the learner must go back to its last checkpoint."""
        collected = self._collect()
        self.steps += collected.env_steps
        self._round += 1
        for one in collected.episodes:
            self._on_event(Episode(env_steps=self.steps, env=one.env, return_=one.return_, length=one.length))
        self._insert(collected.chunks)
        calls_per_version = self._config.calls_per_version if self._config.is_asynchronous else None
        return self.learner.run(self._must_stop, self, calls_per_version=calls_per_version)

    def _must_stop(self) -> bool:
        return self._ahead is not None and self._ahead.has_failed

    def _collect(self) -> Collected:
        if not self._config.is_asynchronous:
            return self.play(self._policy, self._round)
        if self._ahead is None:
            self.learner.end_sessions()  # of before a resume: nothing follows what they played
            self._ahead = _Ahead(self, self._round)
        return self._ahead.take()

    def play(self, policy: Policy, round_no: int) -> Collected:
        """The actor's part of a round."""
        explore: Any = None
        if policy.head.kind == "epsilon_greedy":
            if self._config.has_ladder:
                explore = ladder(self._actor.num_envs)
            else:
                explore = float(self.learner.knobs_at(self.progress)["epsilon"])
        return self._actor.collect(policy, self._config.collect, round_no=round_no, explore=explore)

    def _insert(self, chunks: Sequence[Chunk]) -> None:
        if self._history is not None:
            self._history.add(chunks)
        self._lag = max((self.learner.lag_of(chunk) for chunk in chunks), default=0)
        for chunk in chunks:
            try:
                self.learner.insert(chunk)
            except Refused as error:
                self._blame([chunk.meta.id], f"a chunk was refused: {error}", error.reason)

    # --- what the learner says while it runs ------------------------------------------------------------------------

    def compiling(self) -> None:
        self._on_event(Compiling(env_steps=self.steps, what="update"))

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        self._blame(chunks, "updates on rows of these chunks were not finite", "not_finite")

    def take(self, policy: Policy, metrics: Mapping[str, float]) -> None:
        self._policy, counts = policy, self.learner.counts
        self._on_event(Update(
            env_steps=self.steps, updates=counts.updates, version=counts.version,
            replay_ratio=counts.replay_ratio, lag_versions=self._lag, metrics=metrics,
        ))  # fmt: skip

    def _blame(self, ids: Sequence[ChunkId], what: str, reason: str) -> None:
        names = list(map(chunk_name, ids))
        self._on_event(Guarded(env_steps=self.steps, what=what, chunks=names))
        if self._history is not None:
            self._history.quarantine(ids, reason=reason)

    # --- resume -----------------------------------------------------------------------------------------------------

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything that an engine of the same settings needs to go on; chunks are made durable first."""
        if self._history is not None:
            self._history.flush()
        arrays, facts = self.learner.checkpoint()
        if not self._config.is_asynchronous:
            played, playing = self._actor.state()
            arrays |= {f"actor.{name}": array for name, array in played.items()}
            facts["actor"] = playing
        return arrays, facts | {"round": self._round, "env_steps": self.steps}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; without the actor's part (asynchronous), episodes begin anew."""
        self.learner.restore(arrays, facts, self._read)
        if "actor" in facts:
            self._actor.restore(part(arrays, "actor"), facts["actor"])
        self._round, self.steps = facts["round"], facts["env_steps"]
        self._policy = self.learner.current()

    def go_back(self, arrays: Mapping[str, Array]) -> None:
        """Take a checkpoint's weights again, and learn on half as fast from what is here."""
        self.learner.go_back(arrays)
        self._policy = self.learner.publish()

    def _read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        return self._history.read(ids) if self._history is not None else iter(())

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self._history is not None:
            self._history.close()


class _Ahead:
    """The actor's thread: plays one round ahead with the newest policy, and waits when nobody takes it."""

    def __init__(self, engine: Inline, round_no: int) -> None:
        self._engine, self._round = engine, round_no
        self._played: queue.Queue[Collected | BaseException] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self.has_failed = False
        """Nothing more comes; the next `take` says why."""
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not (self._stop.is_set() or self.has_failed):
            try:
                collected: Collected | BaseException = self._engine.play(self._engine.policy, self._round)
            except BaseException as error:
                collected, self.has_failed = error, True
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
                raise LearningFailed("the actor's thread ended without a word")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30.0)
