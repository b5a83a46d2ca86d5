"""Tally: what a growing store says about its games: which schemas are played, who allows learning,
what bots return.

It keeps its place in the store and can be written down, so nothing is counted twice. An episode
counts for a model when its note names it, when it was seen from its first step to its end, and when
no person or script decided in it.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from understudy.experience.chunk import By, Chunk, RowKind
from understudy.experience.frame import FrameKind
from understudy.ports import Forgotten, Stored
from understudy.training.follower import ReaderPosition, StoreFollower, place_from_json

_MAX_EPISODES = 4_096
"""Kept of each model; the gate decides long before."""
_MAX_MODELS = 64
_SILENT_S = 86_400.0
"""An episode that was not heard of for so long is given up."""


class Played(NamedTuple):
    """One episode that a model played to its end."""

    arrival_no: int
    """Of the chunk it ended in: the order in which episodes became known."""
    begun_s: float
    return_: float


@dataclass(slots=True)
class _Open:
    """An episode whose end was not seen yet."""

    next_chunk: int
    begun_s: float
    heard_s: float
    total: float
    model: str | None
    is_whole: bool
    """Whether it was one model's alone, and nothing of it is missing."""


@dataclass(slots=True)
class Recorded:
    """What is stored under one schema of a game."""

    first_arrival: int
    steps: Counter[str] = field(default_factory=Counter)
    """By consent, as they came; those of actors are under `actor`."""


class StoreStats:
    """Follows one store for all of its games; not thread-safe."""

    def __init__(self, follower: StoreFollower) -> None:
        self._follower = follower
        self.place = ReaderPosition()
        self._open: dict[str, _Open] = {}
        self._played: dict[str, deque[Played]] = {}
        self.schemas: dict[str, dict[str, Recorded]] = {}
        """By game and schema."""
        follower.join(self)

    def follow(self, *, max_items: int = 4_096) -> bool:
        """Read on; whether there was anything new."""
        return self._follower.follow(self, max_items=max_items)

    def read(self, item: Stored | Forgotten) -> None:
        """Count an item of the store; the follower calls this."""
        if isinstance(item, Forgotten):
            return
        if item.chunk is not None:
            self._take(item, item.chunk)
        elif item.frame.kind is FrameKind.CLOSE:
            self._open.pop(str(item.frame.session), None)

    def returns(self, model: str, *, since_s: float) -> list[Played]:
        """Episodes of a model that began since then, in the order in which they became known.

        Both sides of a comparison are cut alike: an episode that began earlier counts for neither.
        """
        return [one for one in self._played.get(model, ()) if one.begun_s >= int(since_s)]

    def schema(self, game: str, *, min_steps: int) -> str | None:
        """What is played now: the newest schema with that many steps, else the one with most of
        them."""
        known = self.schemas.get(game)
        if not known:
            return None
        ripe = [name for name, one in known.items() if one.steps.total() >= min_steps]
        if ripe:
            return max(ripe, key=lambda name: known[name].first_arrival)
        return max(known, key=lambda name: known[name].steps.total())

    # --- episodes ---------------------------------------------------------------------------------

    def _take(self, item: Stored, chunk: Chunk) -> None:
        meta = chunk.meta
        columns = chunk.columns
        recorded = self.schemas.setdefault(meta.game, {}).setdefault(
            meta.schema, Recorded(item.arrival_no)
        )
        recorded.steps["actor" if meta.kind == "actor" else meta.consent] += meta.n_steps
        if meta.kind == "actor":
            return
        session = str(meta.session)
        heard_s = float(item.frame.received_s)
        by = columns.get("by")
        running = self._open.pop(session, None)
        ends = [*(note.row for note in meta.episodes[1:]), chunk.n_rows]
        for note, end in zip(meta.episodes, ends, strict=True):
            rows = slice(note.row, end)
            is_step = columns["row"][rows] == RowKind.STEP
            is_first = bool(columns["is_first"][note.row])
            if is_first or running is None or running.next_chunk != meta.chunk_no:
                running = _Open(meta.chunk_no, heard_s, heard_s, 0.0, None, is_first)
            running.total += float(columns["reward"][rows][is_step].astype(np.float64).sum())
            # A client may name the model only in the chunks after the bot's first decision.
            if running.model is not None and note.model != running.model:
                running.is_whole = False
            running.model = note.model or running.model
            if by is not None and np.isin(by[rows][is_step], (By.PERSON, By.SCRIPT)).any():
                running.is_whole = False
            has_ended = bool(columns["row"][end - 1] == RowKind.FINAL)
            if has_ended:
                self._count(item.arrival_no, running)
            running.next_chunk = meta.chunk_no + 1
            running.heard_s = heard_s
        # Only an episode that goes on is remembered; one that is not heard of for long is given up.
        if running is not None and not has_ended and not note.cut:
            self._open[session] = running
            oldest = next(iter(self._open))
            if self._open[oldest].heard_s < heard_s - _SILENT_S:
                del self._open[oldest]

    def _count(self, arrival_no: int, ended: _Open) -> None:
        if not ended.is_whole or ended.model is None:
            return
        if ended.model not in self._played:
            while len(self._played) >= _MAX_MODELS:
                del self._played[next(iter(self._played))]
            self._played[ended.model] = deque(maxlen=_MAX_EPISODES)
        self._played[ended.model].append(Played(arrival_no, ended.begun_s, ended.total))

    # --- resume -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "place": self.place.to_json(),
            "open": {
                name: [one.next_chunk, one.begun_s, one.heard_s, one.total, one.model, one.is_whole]
                for name, one in self._open.items()
            },
            "played": {model: list(played) for model, played in self._played.items()},
            "schemas": {
                game: {name: [one.first_arrival, dict(one.steps)] for name, one in known.items()}
                for game, known in self.schemas.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.place = place_from_json(state["place"])
        self._open = {name: _Open(*fields) for name, fields in state["open"].items()}
        self._played = {
            model: deque((Played(*fields) for fields in played), maxlen=_MAX_EPISODES)
            for model, played in state["played"].items()
        }
        self.schemas = {
            game: {name: Recorded(first, Counter(steps)) for name, (first, steps) in known.items()}
            for game, known in state["schemas"].items()
        }

    def close(self) -> None:
        self._follower.leave(self)
