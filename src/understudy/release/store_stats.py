"""StoreStats: statistics of a growing store: schemas played, steps by consent, returns.

The position in the store is saved with the statistics, so nothing is counted twice. An episode
counts if it is complete from its first step to its end: for a model if the episode's note names the
model and no person or script decided in it, for people if they made every decision.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from understudy.experience.chunk import By, Chunk, RowKind
from understudy.experience.frame import FrameKind
from understudy.experience.session import tombstone_of
from understudy.models.gate import Played
from understudy.ports import Forgotten, Stored
from understudy.training.follower import ReaderPosition, StoreFollower, position_from_json

_MAX_EPISODES = 8_192
"""Episodes kept per model, many more than the gate needs to decide."""
_FIRST_EPISODES = 1_024
"""The first episodes of a model, and of people, which are never dropped."""
_MAX_MODELS = 64
_SILENT_S = 86_400.0
"""An open episode is dropped after this long without a chunk."""


@dataclass(slots=True)
class _Open:
    """An episode that has not ended yet."""

    next_chunk: int
    started_s: float
    received_s: float
    total: float
    model: str | None
    is_whole: bool
    """Whether no chunk is missing, and no second model has played."""
    is_bots: bool = True
    """Whether no person or script has decided so far."""
    is_persons: bool = True
    """Whether people have made every decision so far."""


@dataclass(slots=True)
class Recorded:
    """What the store holds of one schema of a game: its first arrival number and its steps."""

    first_arrival: int
    steps: Counter[str] = field(default_factory=Counter)
    """Number of steps by consent at their arrival; those of actors are under `actor`."""


class StoreStats:
    """Statistics of all games of one store, which `follow` brings up to date; not thread-safe."""

    def __init__(self, follower: StoreFollower) -> None:
        self._follower = follower
        self.position = ReaderPosition()
        self._open: dict[str, _Open] = {}
        self._played: dict[str, list[Played]] = {}
        self._people: dict[str, list[Played]] = {}
        """First episodes of people, by schema."""
        self.schemas: dict[str, dict[str, Recorded]] = {}
        """By game and schema."""
        follower.join(self)

    def follow(self, *, max_items: int = 4_096) -> bool:
        """Read and count the next page of the store; return whether it had any items."""
        return self._follower.follow(self, max_items=max_items)

    def read(self, item: Stored | Forgotten) -> None:
        """Count an item of the store; called by the follower."""
        if isinstance(item, Forgotten):
            return
        if item.chunk is not None:
            self._add(item, item.chunk)
        elif item.frame.kind is FrameKind.CLOSE:
            self._open.pop(str(item.frame.session), None)

    @property
    def n_steps(self) -> int:
        """Steps of all games that were read so far, including those erased later."""
        return sum(
            recorded.steps.total()
            for schemas in self.schemas.values()
            for recorded in schemas.values()
        )

    def returns(self, model: str, *, since_s: float) -> list[Played]:
        """Episodes of a model that started at `since_s` or later, in the order they became known.

        A comparison uses the same `since_s` for both models, so earlier episodes count for neither.
        """
        played = self._played.get(model, ())
        return [episode for episode in played if episode.started_s >= int(since_s)]

    def people(self, schema: str) -> Sequence[Played]:
        """The first episodes of people with this schema."""
        return self._people.get(schema, ())

    def schema(self, game: str, *, min_steps: int) -> str | None:
        """The current schema: the newest with `min_steps` steps, else that with the most steps."""
        schemas = self.schemas.get(game)
        if not schemas:
            return None
        mature = [name for name, stored in schemas.items() if stored.steps.total() >= min_steps]
        if mature:
            return max(mature, key=lambda name: schemas[name].first_arrival)
        return max(schemas, key=lambda name: schemas[name].steps.total())

    # --- Episodes ---------------------------------------------------------------------------------

    def _add(self, item: Stored, chunk: Chunk) -> None:
        meta = chunk.meta
        columns = chunk.columns
        recorded = self.schemas.setdefault(meta.game, {}).setdefault(
            meta.schema, Recorded(item.arrival_no)
        )
        recorded.steps["actor" if meta.kind == "actor" else meta.consent] += meta.n_steps
        if meta.kind == "actor":
            return
        session = str(meta.session)
        received_s = float(item.frame.received_s)
        by = columns.get("by")
        running = self._open.pop(session, None)
        ends = [*(note.row for note in meta.episodes[1:]), chunk.n_rows]
        for note, end in zip(meta.episodes, ends, strict=True):
            rows = slice(note.row, end)
            is_step = columns["row"][rows] == RowKind.STEP
            is_first = bool(columns["is_first"][note.row])
            if is_first or running is None or running.next_chunk != meta.chunk_no:
                running = _Open(meta.chunk_no, received_s, received_s, 0.0, None, is_first)
            running.total += float(columns["reward"][rows][is_step].astype(np.float64).sum())
            # The first chunks of an episode may lack the model: a client names it once it decides.
            if running.model is not None and note.model != running.model:
                running.is_whole = False
            running.model = note.model or running.model
            deciders = set() if by is None else set(by[rows][is_step].tolist())
            running.is_bots &= not deciders & {By.PERSON, By.SCRIPT}
            # A chunk may hold only the last row of an episode, and no step.
            running.is_persons &= by is not None and deciders <= {By.PERSON}
            has_ended = bool(columns["row"][end - 1] == RowKind.FINAL)
            if has_ended:
                self._count(item, chunk, running, row=note.row)
            running.next_chunk = meta.chunk_no + 1
            running.received_s = received_s
        # Only unfinished episodes are kept; silent ones are dropped.
        if running is not None and not has_ended and not note.cut:
            self._open[session] = running
            oldest = next(iter(self._open))
            if self._open[oldest].received_s < received_s - _SILENT_S:
                del self._open[oldest]

    def _count(self, item: Stored, chunk: Chunk, ended: _Open, *, row: int) -> None:
        if not ended.is_whole:
            return
        # A hash of the player, so that this file need not be searched for forgotten players.
        player = tombstone_of(item.frame.player).hex()[:16]
        played = Played(item.arrival_no, ended.started_s, ended.total, player, row)
        if ended.model is None:
            first = self._people.setdefault(chunk.meta.schema, [])
            if ended.is_persons and len(first) < _FIRST_EPISODES:
                first.append(played)
            return
        if not ended.is_bots or not ended.model.startswith(f"{chunk.meta.game}/"):
            return
        if ended.model not in self._played:
            while len(self._played) >= _MAX_MODELS:
                del self._played[next(iter(self._played))]
        episodes = self._played.setdefault(ended.model, [])
        episodes.append(played)
        if len(episodes) > _MAX_EPISODES:
            del episodes[_FIRST_EPISODES]

    # --- Checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The complete state, as plain values."""
        return {
            "position": self.position.to_json(),
            "open": {session: list(astuple(episode)) for session, episode in self._open.items()},
            "played": {model: list(played) for model, played in self._played.items()},
            "people": {schema: list(played) for schema, played in self._people.items()},
            "schemas": {
                game: {
                    name: [stored.first_arrival, dict(stored.steps)]
                    for name, stored in schemas.items()
                }
                for game, schemas in self.schemas.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self.position = position_from_json(state["position"])
        self._open = {name: _Open(*fields) for name, fields in state["open"].items()}
        self._played, self._people = (
            {name: [Played(*fields) for fields in played] for name, played in state[kind].items()}
            for kind in ("played", "people")
        )
        self.schemas = {
            game: {
                name: Recorded(first, Counter(steps)) for name, (first, steps) in schemas.items()
            }
            for game, schemas in state["schemas"].items()
        }

    def close(self) -> None:
        self._follower.leave(self)
