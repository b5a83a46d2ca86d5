"""The Replay port: where a learner keeps recent steps and draws its batches from.

    insert(chunk) ─► rows ─► draw(k) ─► Drawn(batches, rows, stamps) ─► feedback(rows, priorities)

A replay is a class with three arguments, `Name(game, needs, config)`. A run names it in its setting
`replay`: by a short name of `REPLAYS`, or by an import path, `module:Class`. Test your own with
`understudy.testing.replays.ReplayContract`.
"""

import functools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Transitions
from understudy.core.errors import ConfigError, UnderstudyError, named_errors
from understudy.core.settings import load_object
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import GameSpec

ReadChunks = Callable[[Sequence[ChunkId]], Iterator[Chunk]]
"""Reads these chunks again, in this order; deleted ones are omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The capacity and the prioritisation of a replay."""

    capacity: int = 100_000
    """In rows. A chunk takes a row per step, one per episode or chunk end, and up to
    n_step + stack - 2 rows that repeat the end of the previous chunk."""
    alpha: float = 0.6
    """Rows are drawn in proportion to their mass, weight * priority^alpha; 0 ignores priorities."""
    min_priority: float = 1e-6
    """Lower bound of priorities, so that every row can be drawn."""
    max_priority: float = 1e6
    """Upper bound of priorities, so that no row fills every batch."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"capacity is {self.capacity}; give a number of rows, such as 100000")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; give a number from 0 to 1, such as 0.6")
        if not 0 < self.min_priority <= self.max_priority <= 1e30:
            raise ConfigError(
                f"min_priority is {self.min_priority} and max_priority {self.max_priority}; "
                "give 0 < min_priority <= max_priority <= 1e30"
            )


class Drawn(NamedTuple):
    """Batches, and the rows they were drawn from; a stamp shows if a row was overwritten since."""

    batches: Batch  # every array with the leading axes [k, batch]
    rows: NDArray[np.int64]  # [k, batch]
    stamps: NDArray[np.int32]  # [k, batch]


class Replay(Protocol):
    """The recent steps of one game; used by one thread.

    Equal calls in equal order give equal bits, also if a new replay is restored in between.
    """

    @property
    def needs(self) -> Transitions:
        """The batches that it was created for."""
        ...

    @property
    def n_sampleable(self) -> int:
        """Steps that may be drawn."""
        ...

    def insert(self, chunk: Chunk) -> int:
        """Insert a chunk; returns how many steps became sampleable. If it raises, nothing changes.

        Refused if the chunk is invalid, of another game, or already there. Other chunks, usually
        the oldest, are evicted to make room. A column `priority` may set first priorities.
        """
        ...

    def close(self, session: uuid.UUID) -> int:
        """End a session; returns how many steps became sampleable that waited for a next chunk."""
        ...

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Evict a chunk, so that none of its rows is drawn again; returns whether it had any."""
        ...

    def chunk_ids(self) -> Sequence[ChunkId]:
        """(session, chunk_no) of the chunks in the replay, oldest first."""
        ...

    def chunks_of(self, rows: NDArray[np.int64]) -> Sequence[ChunkId]:
        """The chunks that the transitions at these rows come from, each once."""
        ...

    def draw(self, k: int, *, rng: np.random.Generator, beta: float) -> Drawn:
        """k batches; ConfigError if nothing is sampleable. `rng` is the only source of chance.

        `beta` is how far the weights of batches correct for priorities, from 0 to 1.
        """
        ...

    def feedback(
        self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array
    ) -> None:
        """Set new priorities of drawn rows; ignores evicted rows and invalid priorities."""
        ...

    def needed_chunks(self) -> Sequence[ChunkId]:
        """The chunks that `restore` reads if the state is saved now.

        A run deletes older ones; if a replay needs none, the run keeps everything.
        """
        ...

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The state that `restore` needs, besides the chunks themselves: arrays, and JSON."""
        ...

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Restore a new replay from a `state`; ConfigError if it was saved with other settings.

        Chunks that `read` omits leave with everything that was computed from them.
        """
        ...


# --- Replays by name ------------------------------------------------------------------------------


REPLAYS: Mapping[str, str] = {
    "host": "understudy.learn.replay:HostReplay",
    "device": "understudy.learn.device_replay:DeviceReplay",
}
"""Short names; any other replay is named by its import path, `module:Class`."""


def replay_class(name: str) -> Callable[..., Replay]:
    """The class for a short name or an import path; ConfigError suggests the closest name."""
    replay_type: Callable[..., Replay] = load_object(
        REPLAYS.get(name, name), what="replay", known=REPLAYS
    )
    return replay_type


def make_replay(
    name: str, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None
) -> Replay:
    """Create the replay with this short name or import path; ConfigError if it is not one.

    Errors in the methods of a user's class become LearningFailed, which names class and method.
    """
    replay_type = replay_class(name)
    try:
        replay = replay_type(game, needs, config or ReplayConfig())
    except UnderstudyError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"replay {name!r} cannot be created: {what}; a replay is created with a GameSpec, "
            "Transitions and a ReplayConfig; give it an __init__ of three arguments"
        ) from error
    if name not in REPLAYS:
        replay = cast(Replay, _NamedReplay(replay, name))
    parts = [part for part in vars(Replay) if part[0] != "_"]
    if missing := [part for part in parts if not hasattr(replay, part)]:
        raise ConfigError(
            f"replay {name!r} lacks {joined(missing)}; a replay has {joined(parts, most=20)}: add "
            "them as the protocol understudy.replay.Replay describes, or use "
            f"{' or '.join(map(repr, REPLAYS))}"
        )
    return replay


class _NamedReplay:
    """A user's replay, whose errors name its class and the method."""

    def __init__(self, replay: Any, name: str) -> None:
        self._replay = replay
        self._name = name

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the user's, also for isinstance
        return type(self._replay)

    def __getattr__(self, part: str) -> Any:
        if not hasattr(type(self._replay), part):  # of the instance, or missing
            return getattr(self._replay, part)
        then = "correct the class (understudy.testing.ReplayContract tests it)"
        with named_errors(f"replay {self._name!r} failed in {part}", then=then):
            value = getattr(self._replay, part)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            with named_errors(f"replay {self._name!r} failed in {part}()", then=then):
                return value(*arguments, **options)

        return call
