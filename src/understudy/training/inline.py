"""The engine of a run: a team of actors and a learner take turns.

    round:  collect (team) ─► insert ─► updates while the limiter allows ─► publish ─► next round

In lock-step (the default) a round is a pure function of the previous one, so a run that is killed
and resumed ends bit-identical. When asynchronous, the team plays ahead while the learner updates.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.act.actor import epsilon_ladder
from understudy.core.errors import ConfigError, LearningFailed, Refused
from understudy.core.tensors import Array, arrays_under
from understudy.experience.chunk import ChunkId, chunk_name
from understudy.learn.learner import Learner
from understudy.nn.policy import Policy
from understudy.ports import Collected, Team
from understudy.training.events import (
    Compiling,
    EpisodeEnded,
    Guarded,
    OnEvent,
    Update,
    WorkerEvaluation,
    WorkersReport,
)
from understudy.training.run_store import RunStore


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
    """A team and a learner; `step` runs one round."""

    def __init__(
        self,
        learner: Learner,
        team: Team,
        *,
        config: InlineConfig,
        history: RunStore | None,
        on_event: OnEvent,
    ) -> None:
        if getattr(learner.algorithm.needs, "is_cloning", False):
            raise ConfigError(
                "this algorithm clones recorded play and would only copy itself; train "
                "it from a store: from_store=DIR"
            )
        self.learner = learner
        self._team = team
        self._config = config
        self._history = history
        self._on_event = on_event
        self._round = 0
        self.steps = 0
        self._lag = 0
        self._update_s = 0.0
        self.policy = learner.publish()
        """The team's policy."""
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
        for what in collected.replaced:
            self._on_event(Guarded(env_steps=self.steps, what=what))
        for episode in collected.episodes:
            self._on_event(
                EpisodeEnded(
                    env_steps=self.steps,
                    env=episode.env,
                    return_=episode.return_,
                    length=episode.length,
                )
            )
        for evaluation in collected.evaluations:
            self._on_event(
                WorkerEvaluation(
                    env_steps=self.steps, version=evaluation.version, returns=evaluation.returns
                )
            )
        if collected.report is not None:
            self._on_event(WorkersReport(env_steps=self.steps, report=collected.report))
        if self._history is not None:
            self._history.add(collected.chunks)
        self._lag = max((self.learner.lag_of(chunk) for chunk in collected.chunks), default=0)
        for chunk in collected.chunks:
            try:
                self.learner.insert(chunk)
            except Refused as error:
                self._quarantine([chunk.meta.id], f"a chunk was rejected: {error}", error.reason)
        if collected.on_inserted is not None:
            collected.on_inserted(self._update_s)
        compiled_s = self.learner.compile_s
        started_s = time.perf_counter()
        is_sound = self.learner.run(
            lambda: ahead is not None and ahead.has_failed,
            self,
            calls_per_version=self._config.calls_per_version if is_asynchronous else None,
        )
        compiled_s = self.learner.compile_s - compiled_s
        self._update_s += time.perf_counter() - started_s - compiled_s
        return is_sound

    def play(self, policy: Policy, round_no: int) -> Collected:
        """The team's part of a round."""
        explore: Any = None
        if policy.head.kind == "epsilon_greedy":
            if self._config.has_ladder:
                explore = epsilon_ladder(self._team.num_envs)
            else:
                explore = float(self.learner.knobs_at(self.progress)["epsilon"])
        return self._team.collect(policy, self._config.collect, round_no=round_no, explore=explore)

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
            actor_arrays, actor_facts = self._team.state()
            arrays |= {f"actor.{name}": array for name, array in actor_arrays.items()}
            facts["actor"] = actor_facts
        return arrays, facts | {"round": self._round, "env_steps": self.steps}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; without the actor's part (asynchronous), episodes restart."""
        self.learner.restore(
            arrays, facts, self._history.read if self._history is not None else lambda _: iter(())
        )
        if "actor" in facts:
            self._team.restore(arrays_under(arrays, "actor"), facts["actor"])
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
