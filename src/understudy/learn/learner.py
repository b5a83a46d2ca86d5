"""The learner: runs and guards an algorithm's updates, many of them in one compiled call.

    insert(chunk) ─► source ─► draw ─► one compiled scan of updates ─► feedback
        ─► publish ─► policy of a version

It works with any algorithm. Inside the scan, a non-finite update leaves the state unchanged; after
the scan, the rows that caused it are traced to their chunks, which are reported and evicted from
the replay.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from understudy.algorithm import Algorithm, Feedback, Rollouts, Schedule, Transitions
from understudy.core.errors import ConfigError, LearningFailed, named_errors
from understudy.core.tensors import Array, arrays_under
from understudy.experience.chunk import Chunk, ChunkId
from understudy.learn.replay_source import Limiter, LimiterConfig, ReplaySource
from understudy.learn.rollouts import RolloutQueue
from understudy.nn.policy import Policy
from understudy.replay import ReplayConfig, make_replay

MAX_RATIO_ERROR = 1e-3
"""Largest allowed |ratio - 1| of learner to actor probabilities before the first gradient step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The learner's settings, for every algorithm."""

    updates_per_call: int = 16
    """Updates in one compiled scan: more is faster, fewer keep priorities fresher."""
    limiter: LimiterConfig | None = field(default_factory=LimiterConfig)
    """None: no limit on how often a step is sampled, for training from a store."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    replay_name: str = "host"
    """A short name of `understudy.replay.REPLAYS`, or the import path of a class."""
    max_lag_versions: int = 1_000
    """Actors' chunks with a larger lag are skipped (on-policy: any lag); players' never are."""
    max_skips: int = 10
    """Skipped updates in a row before the last checkpoint is restored."""

    def __post_init__(self) -> None:
        for name, least in (("updates_per_call", 1), ("max_lag_versions", 0), ("max_skips", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}; give a whole number from {least}")


@dataclass(slots=True)
class LearnerCounts:
    """A learner's counters; part of every checkpoint."""

    calls: int = 0
    updates: int = 0
    version: int = 0
    inserted_steps: int = 0
    sampled_rows: int = 0
    skipped_updates: int = 0
    skips_in_a_row: int = 0
    stale_chunks: int = 0
    rate_scale: float = 1.0
    """Halved at each restore; multiplies the learning rate."""

    @property
    def replay_ratio(self) -> float:
        return self.sampled_rows / max(1, self.inserted_steps)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a `step`: mean metrics of its updates, and chunks that made updates fail."""

    metrics: Mapping[str, float]
    bad_chunks: Sequence[ChunkId] = ()
    must_restore: bool = False
    """Too many updates in a row were skipped: the last checkpoint must be restored."""


class Watcher(Protocol):
    """Receives a learner's callbacks, in the thread that runs it; implemented by engines."""

    @property
    def progress(self) -> float:
        """The fraction of the training that is done, for schedules."""
        ...

    def compiling(self) -> None:
        """The first call is next; it takes longer than later ones."""
        ...

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        """Updates on rows of these chunks were not finite, and were skipped."""
        ...

    def take(self, policy: Policy, metrics: Mapping[str, float]) -> None:
        """A new version's policy, and the mean metrics of the calls since the last version."""
        ...


class Learner:
    """An algorithm's state, and the data it learns from."""

    def __init__(
        self,
        algorithm: Algorithm,
        knobs: Any,
        *,
        root_seed: int,
        config: LearnerConfig | None = None,
        start: Mapping[str, Array] | None = None,
    ) -> None:
        """`start`: initial weights by name, used where they fit the algorithm's network."""
        self.algorithm = algorithm
        self.config = config or LearnerConfig()
        self._knobs = knobs
        self.counts = LearnerCounts()
        self.compile_s = 0.0
        needs = algorithm.needs
        self.source: ReplaySource | RolloutQueue
        if isinstance(needs, Transitions):
            per_call = self.config.updates_per_call
            limits = self.config.limiter
            limiter = None if limits is None else Limiter(limits)
            replay = make_replay(self.config.replay_name, algorithm.game, needs, self.config.replay)
            self.source = ReplaySource(replay, limiter, per_call, needs.batch, root_seed)
        else:
            self.source = RolloutQueue(algorithm.game, needs)
        with _named_errors(algorithm, "init"):
            self.state = algorithm.init(jax.random.PRNGKey(root_seed), start)
        self._call = _compiled(algorithm)
        self._is_compiled = False

    def insert(self, chunk: Chunk, *, is_own: bool = True) -> int:
        """Insert a chunk and return how many steps it has; 0 if it is stale, Refused if invalid.

        Pass `is_own=False` for chunks that this run's actors have not made, such as all of a store:
        their versions are unrelated to this learner's, and their priorities are ignored.
        """
        if not is_own and "priority" in chunk.columns:
            columns = {name: chunk.columns[name] for name in chunk.columns if name != "priority"}
            chunk = Chunk(chunk.meta, columns)
        if is_own and self.lag_of(chunk) > (
            0 if self.is_on_policy else self.config.max_lag_versions
        ):
            self.counts.stale_chunks += 1
            self.source.skip_chunk(chunk)
            return 0
        steps = self.source.insert(chunk)
        self.counts.inserted_steps += steps
        return steps

    @property
    def is_on_policy(self) -> bool:
        """Whether the algorithm may learn only from experience played with the newest weights."""
        return self.source.is_on_policy

    def lag_of(self, chunk: Chunk) -> int:
        """The lag of an actor's chunk: how many versions old its weights are."""
        if chunk.meta.kind != "actor" or "version" not in chunk.columns:
            return 0
        return max(0, self.counts.version - int(chunk.columns["version"][0]))

    @property
    def may_step(self) -> bool:
        """Whether there is enough data for a call, and the limiter allows it."""
        return self.source.may_update

    def run(
        self, stop: Callable[[], bool], watcher: Watcher, *, calls_per_version: int | None = None
    ) -> bool:
        """Repeat `step` until `stop()` or no update is due; False if a checkpoint must be restored.

        Weights are published every `calls_per_version` calls, and at the end if there were calls
        since the last version; with None, only at the end. If a checkpoint must be restored, they
        are not published.
        """
        unpublished: list[Mapping[str, float]] = []
        while True:
            is_over = not self.may_step or stop()
            if unpublished and (is_over or len(unpublished) == calls_per_version):
                values: dict[str, list[float]] = {}
                for metrics in unpublished:
                    for name, value in metrics.items():
                        values.setdefault(name, []).append(value)
                watcher.take(self.publish(), _means(values))
                unpublished = []
            if is_over:
                return True
            if not self._is_compiled:
                watcher.compiling()
            report = self.step(watcher.progress)
            if report.bad_chunks:
                watcher.blame(report.bad_chunks)
            if report.must_restore:
                return False
            unpublished.append(report.metrics)

    def step(self, progress: float) -> Report:
        """Run one compiled call; `progress`, for schedules, is the fraction of the run done."""
        counts = self.counts
        knobs = self.knobs_at(progress)
        exponent = float(knobs.get("importance_exponent", 0.0))
        batches = self.source.draw(counts.calls, importance_exponent=exponent)
        started_s = time.perf_counter()
        with _named_errors(self.algorithm, "update"):
            self.state, feedback = self._call(self.state, batches, knobs)
            feedback = jax.device_get(feedback)
        if not self._is_compiled:
            self._is_compiled = True
            self.compile_s = time.perf_counter() - started_s
        bad = self.source.feedback(feedback)
        ok = np.atleast_1d(feedback.ok)
        counts.calls += 1
        counts.updates += len(ok)
        counts.sampled_rows += self.source.rows_per_call
        self._count_skips(ok)
        self._check_ratio(feedback, ok)
        metrics = {name: np.asarray(values)[ok] for name, values in feedback.metrics.items()}
        return Report(_means(metrics), bad, counts.skips_in_a_row >= self.config.max_skips)

    def _count_skips(self, ok: Array) -> None:
        counts = self.counts
        good = np.flatnonzero(ok)
        counts.skipped_updates += int((~ok).sum())
        counts.skips_in_a_row = (
            len(ok) - 1 - int(good[-1]) if len(good) else counts.skips_in_a_row + len(ok)
        )

    def _check_ratio(self, feedback: Feedback, ok: Array) -> None:
        if feedback.ratio_error is None or not ok.any():
            return
        worst = float(np.max(feedback.ratio_error[ok]))
        if not worst <= MAX_RATIO_ERROR:
            raise LearningFailed(
                "the acting policy differs from the learning policy: probability ratios are off by "
                f"{worst:.2g}, at most {MAX_RATIO_ERROR} is allowed; check that the network's "
                "NumPy and JAX implementations agree"
            )

    def knobs_at(self, progress: float) -> dict[str, np.float32]:
        """The value of every knob after this fraction of the run."""
        values = {}
        for name in self._knobs.__dataclass_fields__:
            knob = getattr(self._knobs, name)
            values[name] = knob.at(progress) if isinstance(knob, Schedule) else float(knob)
        if "learning_rate" in values:
            values["learning_rate"] *= self.counts.rate_scale
        return {name: np.float32(value) for name, value in values.items()}

    def publish(self) -> Policy:
        """Start the next version and return its policy."""
        self.counts.version += 1
        return self.current()

    def current(self) -> Policy:
        """The policy of the current version; LearningFailed if its weights are not finite."""
        with _named_errors(self.algorithm, "policy"):
            policy = self.algorithm.policy(self.state)
        if not all(np.isfinite(array).all() for array in policy.weights.values()):
            raise LearningFailed("the weights are not finite; resume from the last checkpoint")
        return replace(policy, version=self.counts.version)

    # --- Checkpoints ------------------------------------------------------------------------------

    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The state that a learner with the same settings resumes from, without a replay's rows."""
        arrays, facts = self.source.state()
        named = {f"source.{name}": array for name, array in arrays.items()}
        named |= {f"state.{name}": array for name, array in state_to_arrays(self.state).items()}
        return named, {"counts": asdict(self.counts), "source": facts}

    def restore(
        self,
        arrays: Mapping[str, Array],
        facts: Mapping[str, Any],
        read: Callable[[Sequence[ChunkId]], Any],
    ) -> None:
        """Resume from a checkpoint; `read` returns chunks by id from the run's store."""
        self.state = state_from_arrays(self.state, arrays_under(arrays, "state"))
        self.counts = LearnerCounts(**facts["counts"])
        self.source.restore(arrays_under(arrays, "source"), facts["source"], read)

    def restore_weights(self, arrays: Mapping[str, Array]) -> None:
        """Restore a checkpoint's weights and halve the learning rate; data and counts stay."""
        self.state = state_from_arrays(self.state, arrays_under(arrays, "state"))
        self.counts.rate_scale = self.counts.rate_scale / 2
        self.counts.skips_in_a_row = 0
        self.source.on_weights_restored()


def _named_errors(algorithm: Algorithm, method: str) -> AbstractContextManager[None]:
    """A context in which an error of a user's algorithm names its class and the method."""
    kind = type(algorithm)
    if kind.__module__.startswith("understudy."):
        return nullcontext()
    then = "correct the class (understudy.testing.AlgorithmContract tests it)"
    name = f"{kind.__module__}:{kind.__qualname__}"
    return named_errors(f"algorithm {name!r} failed in {method}()", then=then)


def _means(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The mean of the finite numbers of each name; a name without any is omitted."""
    finite = {
        name: (array := np.asarray(values))[np.isfinite(array)] for name, values in numbers.items()
    }
    return {name: float(np.mean(values)) for name, values in finite.items() if values.size}


_programs: deque[tuple[Algorithm, str, Callable[..., Any]]] = deque(maxlen=16)
"""The last algorithms of this process, with their text and their program."""


def _compiled(algorithm: Algorithm) -> Callable[..., Any]:
    """The program of `_guarded`, traced and compiled once for learners of equal algorithms.

    An algorithm's methods are pure, so its fields determine the program. The text is compared too:
    mappings of another order and numbers of another type are equal, but not compiled alike.
    """
    text = repr(algorithm)
    for known, known_text, program in tuple(_programs):
        if type(known) is type(algorithm) and known_text == text and _are_equal(known, algorithm):
            return program
    program = jax.jit(_guarded(algorithm), donate_argnums=0)
    _programs.append((algorithm, text, program))
    return program


def _are_equal(known: Algorithm, algorithm: Algorithm) -> bool:
    try:
        return bool(known == algorithm)
    except ValueError:  # of fields that are arrays
        return False


def _guarded(algorithm: Algorithm) -> Callable[..., Any]:
    """Many updates in one scan."""
    update = guarded_update(algorithm)

    def call(state: Any, batches: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        return jax.lax.scan(lambda state, batch: update(state, batch, knobs), state, batches)

    return call


def guarded_update(algorithm: Algorithm) -> Callable[..., tuple[Any, Feedback]]:
    """The algorithm's update; one that is not finite leaves the state unchanged."""

    def update(state: Any, batch: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        updated, feedback = algorithm.update(state, batch, knobs)
        _check_feedback(algorithm.needs, feedback)
        leaves = [
            leaf for leaf in jax.tree.leaves(updated) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        ok = feedback.ok & jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
        guarded = jax.tree.map(lambda new, old: jnp.where(ok, new, old), updated, state)
        return guarded, feedback._replace(ok=ok)

    return update


def _check_feedback(needs: Transitions | Rollouts, feedback: Feedback) -> None:
    """ConfigError if required feedback is missing; runs while the first call is traced."""
    if isinstance(needs, Rollouts):
        is_missing = feedback.ratio_error is None
        name = "ratio_error"
        why = "needs Rollouts"
    else:
        is_missing = needs.prioritised and feedback.priorities is None
        name = "priorities"
        why = "is prioritised"
    if is_missing:
        raise ConfigError(
            f"the Feedback of update() has no {name}, but the algorithm {why}; add this field as "
            "understudy/algorithm.py describes"
        )


def state_to_arrays(state: Any) -> dict[str, Array]:
    """The leaves of a pytree as NumPy arrays, numbered in JAX's order."""
    return {f"leaf{at:04d}": np.asarray(leaf) for at, leaf in enumerate(jax.tree.leaves(state))}


def state_from_arrays(template: Any, arrays: Mapping[str, Array]) -> Any:
    """The pytree from its arrays, in the structure of `template`; ConfigError if they differ."""
    leaves, structure = jax.tree.flatten(template)
    loaded = [arrays.get(f"leaf{at:04d}") for at in range(len(leaves))]
    for at, (leaf, array) in enumerate(zip(leaves, loaded, strict=True)):
        if (
            array is None
            or array.shape != leaf.shape
            or array.dtype != leaf.dtype
            or len(arrays) != len(leaves)
        ):
            got = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise ConfigError(
                f"the checkpoint's state does not fit: leaf {at} is {got}, expected "
                f"{leaf.dtype}{list(leaf.shape)}; "
                "resume with the settings the run was started with"
            )
    return jax.tree.unflatten(structure, [jnp.array(array) for array in loaded])
