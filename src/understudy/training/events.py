"""Typed events of a run, for callbacks, live views and loggers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from understudy.ports import TeamReport


@dataclass(frozen=True, slots=True, kw_only=True)
class InitFrom:
    """The weights that a run copied from another run's policy at its start."""

    run: str
    fit: Sequence[str]
    """Names of the copied weights."""
    new: Sequence[str]
    """Names of newly initialised weights: the other run has none of this name and shape."""
    unused: Sequence[str] = ()
    """Names of the other run's weights that have no place in this network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run's folder exists and the first round starts; sent once, before all other events."""

    env_steps: int
    """0, or the step at which a run is resumed."""
    run: str
    """The run's folder."""
    game: str
    algorithm: str
    seed: int
    steps: int
    """Length of the run in env steps (in updates when it trains from a store)."""
    until: float | None
    """The return at which it ends early."""
    is_from_store: bool = False
    """Whether it trains from a store and plays nothing; `env_steps` then counts updates."""
    init_from: InitFrom | None = None
    """The weights copied from another run, if any."""
    horizon: int = 0
    """Steps that schedules span; 0: those of the run."""
    cut_schedules: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Schedules that end after the run: the value at its last step, and the schedule's own end."""
    worker_command: str = ""
    """The command that starts a worker, if workers play; they need the key in `worker_key`."""
    worker_key: str = ""
    """Where the workers' key is: a file or a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded:
    """An actor's episode ended; its return is a training return, not an evaluation.

    Like that of an evaluation, it is the sum of the game's rewards, below any wrappers.
    """

    env_steps: int
    env: int
    return_: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A version was published after `updates` updates; metrics are means since the last version."""

    env_steps: int
    updates: int
    version: int
    replay_ratio: float
    """Rows sampled per inserted step, so far."""
    lag_versions: int
    metrics: Mapping[str, float]
    """Finite numbers only; a metric without one is omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The greedy policy played held-out episodes."""

    env_steps: int
    returns: Sequence[float]
    mean: float
    low: float | None
    """The ends, low and high, of the mean's 95 % interval; None with fewer than 5 episodes."""
    high: float | None
    is_best: bool
    n_cut: int = 0
    """Episodes cut after `eval_max_steps` steps, since the game has no step limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint was saved; a killed run resumes from it."""

    env_steps: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """Chunks, updates or evaluation episodes were rejected, or weights restored; see `what`."""

    env_steps: int
    what: str
    chunks: Sequence[str] = field(default=())
    """`session/chunk_no` of the chunks that caused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """A program is about to run for the first time; JAX compiles it first, which takes seconds."""

    env_steps: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersReport:
    """What the workers of a run have done, about once a second."""

    env_steps: int
    report: TeamReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvaluation:
    """A worker played held-out episodes with a version's greedy policy."""

    env_steps: int
    version: int
    returns: Sequence[float]


Event = (
    Started
    | EpisodeEnded
    | Update
    | Evaluation
    | CheckpointSaved
    | Guarded
    | Compiling
    | WorkersReport
    | WorkerEvaluation
)


class StopType:
    """The value that `on_event` returns to end a run early and cleanly."""

    def __repr__(self) -> str:
        return "Stop"


Stop: Final = StopType()

OnEvent = Callable[[Event], object]
HoldInterrupts = Callable[[], AbstractContextManager[None]]
"""Creates a context that delays a KeyboardInterrupt to its end."""
