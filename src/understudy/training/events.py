"""What happens in a run, as typed events: for callbacks, live views and logs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class InitFrom:
    """What a run took from another one's policy to begin with."""

    run: str
    fit: Sequence[str]
    """Names of the weights it took."""
    new: Sequence[str]
    """Names of those that begin fresh: the other run has none of this name and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run's folder is there and the first round begins; comes once, before every other
    event."""

    env_steps: int
    """0, or where a resumed run goes on."""
    run: str
    """The run's folder."""
    game: str
    algorithm: str
    seed: int
    steps: int
    """When the run ends at the latest, in env steps (updates, where it learns from a store)."""
    until: float | None
    """The return at which it ends earlier."""
    is_from_store: bool = False
    """Whether it learns from a store and plays nothing; every `env_steps` counts updates then."""
    init_from: InitFrom | None = None
    """What it begins with, where it was asked to start from another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded:
    """An actor's episode ended; its return is a training return, never the measure of a policy."""

    env_steps: int
    env: int
    return_: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A version was published: `updates` so far, and the means of what those since the version
    before said."""

    env_steps: int
    updates: int
    version: int
    replay_ratio: float
    """Rows sampled for each step inserted, so far."""
    lag_versions: int
    metrics: Mapping[str, float]
    """Finite numbers; what no update could say is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The greedy policy played held-out episodes."""

    env_steps: int
    returns: Sequence[float]
    mean: float
    low: float | None
    """Ends of the 95 % interval of the mean; None below 5 episodes, which say too little."""
    high: float | None
    is_best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """From here a killed run goes on."""

    env_steps: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The learner refused something: a chunk, an update, or a stretch of the run."""

    env_steps: int
    what: str
    chunks: Sequence[str] = field(default=())
    """`session/chunk_no` of the chunks to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """The first call of a program: JAX translates it before it runs."""

    env_steps: int
    what: str


Event = Started | EpisodeEnded | Update | Evaluation | CheckpointSaved | Guarded | Compiling


class StopType:
    """What `on_event` returns to end a run early, in good order."""

    def __repr__(self) -> str:
        return "Stop"


Stop: Final = StopType()

OnEvent = Callable[[Event], object]
