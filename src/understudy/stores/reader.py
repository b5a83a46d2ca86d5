"""SegmentReader: random batches straight from a store's columns, in any process, while the writer goes on.

Sealed rows are read from memory-mapped segments, unsealed ones from memory, so new steps can be sampled at once and
the data may be larger than the machine's memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from understudy.core.chunk import RowKind
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError
from understudy.core.frame import FrameKind
from understudy.core.game import GameSpec, spec_from_json
from understudy.core.meta import CONSENTS, KINDS
from understudy.core.ports import Cursor, Forgotten, Stored
from understudy.core.tensors import Array
from understudy.core.windows import ChunkTable, Flags, Ids, NStep, link
from understudy.stores.batches import Plan, RowFilter, Transitions, Window
from understudy.stores.segments import DEFAULTS
from understudy.stores.sources import CHUNK_FIELDS, MemorySource, SegmentSource, Source
from understudy.stores.view import Moved, StoreView

__all__ = ["RowFilter", "SegmentReader", "Transitions", "Window"]

IDLE_S = 60.0
"""A session that is silent for this long is not waited for."""

_TRIES = 64


class SegmentReader:
    """Samples one schema of a local store; call `refresh` to see what came since."""

    def __init__(
        self,
        folder: Path,
        *,
        game: str | None = None,
        schema: str | None = None,
        rows: RowFilter | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._view = StoreView(folder)
        self._filter = rows or RowFilter()
        self._game, self._schema = game, schema
        self._spec: GameSpec | None = None
        self._segments: dict[int, SegmentSource] = {}
        self._memory = MemorySource()
        self._cursor: Cursor | None = None
        self._gone: dict[bytes, int] = {}
        self._hidden: dict[tuple[bytes, int], int] = {}
        self._closed: set[bytes] = set()
        self._sources: list[Source] = []
        self._bases: Ids = np.zeros(0, np.int64)
        self._chunks: dict[str, Array] = {}
        self._table: ChunkTable | None = None
        self._is_laid_out, self._waits_until_s = False, math.inf
        self._allowed: Ids = np.zeros(0, np.int64)
        self._ends: Ids = np.zeros(0, np.int64)
        try:
            self.refresh()
        except BaseException:
            self._view.close()
            raise

    @property
    def spec(self) -> GameSpec | None:
        """The game's spec as the store keeps it."""
        return self._spec

    @property
    def n_rows(self) -> int:
        """Rows that the filter lets through, final and bootstrap rows included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def last_arrival(self) -> int:
        """The newest arrival number this reader knows."""
        return int(self._cursor) if self._cursor is not None else 0

    def refresh(self) -> None:
        """Look for new, sealed and forgotten chunks."""
        for _ in range(_TRIES):
            try:
                changed = self._load_segments()
                break
            except Moved:
                continue
        else:
            raise Moved("segments are being rewritten faster than they can be opened")
        fresh = self._follow()
        if changed or fresh or not self._is_laid_out:
            self._lay_out()
        elif self._clock.now() >= self._waits_until_s:
            self._table = None  # somebody who was waited for has been silent for too long

    def _load_segments(self) -> bool:
        catalogue = self._view.catalogue
        with catalogue.looking():
            sealed_below = catalogue.fact("sealed_below", 1)
            for item in self._view.pending_erasures():
                self._evict(item)
            if self._schema is None:
                self._choose_schema()
            numbers = [
                row[0] for row in catalogue.rows("SELECT id FROM segments WHERE schema = ? ORDER BY id", self._schema)
            ]
            changed = numbers != list(self._segments)
            self._segments = {
                number: self._segments.get(number) or SegmentSource(self._view.segment(number)) for number in numbers
            }
        memory = self._memory.without_sealed(sealed_below)
        if memory is not self._memory:
            self._closed.clear()  # sealed closes are in the catalogue
        changed, self._memory = changed or memory is not self._memory, memory
        if self.last_arrival < sealed_below - 1:
            self._cursor = Cursor(str(sealed_below - 1))
        if self._spec is None and self._schema is not None:
            row = catalogue.one("SELECT spec FROM schemas WHERE schema = ?", self._schema)
            self._spec = spec_from_json(row[0]) if row is not None and row[0] else None
        return changed

    def _choose_schema(self) -> None:
        rows = self._view.catalogue.rows(
            "SELECT game, schema FROM schemas WHERE ? IS NULL OR game = ?", self._game, self._game
        )
        if len(rows) > 1:
            raise ConfigError(
                f"the store holds {len(rows)} schemas ({', '.join(f'{game}/{schema[:12]}' for game, schema in rows)}); "
                "name one with schema="
            )
        if rows:
            self._schema = rows[0][1]

    def _follow(self) -> bool:
        changed = False
        while True:
            tail = self._view.tail(self._cursor, max_items=1024, wait_s=0.0)
            self._cursor = tail.cursor
            if not tail.items:
                return changed
            changed = True
            self._memory.extend([item for item in tail.items if isinstance(item, Stored) and self._is_mine(item)])
            for item in tail.items:
                if isinstance(item, Stored) and item.frame.kind is FrameKind.CLOSE:
                    self._closed.add(item.frame.session.bytes)
                if isinstance(item, Forgotten):
                    self._evict(item)

    def _evict(self, item: Forgotten) -> None:
        for session, number in item.chunks:
            self._hidden[session.bytes, number] = item.arrival_no
        if item.reason == "forgotten" and item.player and not item.chunks:
            self._gone[item.player] = item.arrival_no

    def _is_mine(self, item: Stored) -> bool:
        if item.chunk is None:
            return False
        meta = item.chunk.meta
        if self._schema is None and self._game in (None, meta.game):
            self._schema = meta.schema
        return meta.schema == self._schema

    def _lay_out(self) -> None:
        """Number all rows, and find the chunks that the filter lets through."""
        self._sources = [source for source in self._segments.values() if source.n_rows]
        if self._memory.n_rows:
            self._sources.append(self._memory)
        counts = [source.n_rows for source in self._sources]
        self._bases = (
            np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if counts else np.zeros(0, np.int64)
        )
        self._chunks = {
            name: np.concatenate([np.zeros(0, dtype), *(source.chunks[name] for source in self._sources)])
            for name, dtype in CHUNK_FIELDS.items()
        }
        n_chunks = [len(source.chunks["no"]) for source in self._sources]
        self._chunks["start"] = self._chunks["first_row"] + np.repeat(self._bases, n_chunks)
        self._table, self._is_laid_out, self._waits_until_s = None, True, math.inf
        self._allowed = np.flatnonzero(self._chunk_mask()).astype(np.int64)
        self._ends = np.cumsum(self._chunks["n_rows"][self._allowed])

    def _chunk_mask(self) -> Flags:
        wanted, chunks = self._filter, self._chunks
        mask = np.isin(chunks["consent"], [CONSENTS.index(one) for one in wanted.consent])
        mask |= chunks["kind"] == KINDS.index("actor")
        mask &= (chunks["received"] >= wanted.since_s) & (chunks["received"] <= wanted.until_s)
        if wanted.kind is not None:
            mask &= chunks["kind"] == KINDS.index(wanted.kind)
        if wanted.player is not None:
            mask &= chunks["player"] == np.void(wanted.player)
        for player, number in self._gone.items():
            mask &= ~((chunks["player"] == np.void(player)) & (chunks["arrival"] <= number))
        for (session, chunk_no), number in self._hidden.items():
            is_hidden = (chunks["session"] == np.void(session)) & (chunks["no"] == chunk_no)
            mask &= ~(is_hidden & (chunks["arrival"] <= number))
        return mask

    def table(self) -> ChunkTable:
        """How chunks follow one another; made when first asked for."""
        if self._table is None:
            chunks = self._chunks
            _, session = np.unique(chunks["session"], return_inverse=True)
            continues_in, continued_from = link(
                session=session, chunk_no=chunks["no"], starts_episode=chunks["starts_episode"],
                ends_open=chunks["ends_open"],
            )  # fmt: skip
            self._table = ChunkTable(
                chunks["start"], chunks["n_rows"], continues_in, continued_from, self._may_continue(session)
            )
        return self._table

    def _may_continue(self, session: Array) -> Flags:
        """The newest chunk of each session that was heard of lately and did not close."""
        chunks = self._chunks
        if not len(session):
            return np.zeros(0, np.bool_)
        newest = np.zeros(int(session.max()) + 1, np.int64)
        np.maximum.at(newest, session, chunks["no"])
        recent = chunks["received"] > self._clock.now() - IDLE_S
        flags: Flags = (chunks["no"] == newest[session]) & recent & chunks["ends_open"]
        for at in np.flatnonzero(flags):
            flags[at] = not self._has_closed(chunks["session"][at].tobytes())
        self._waits_until_s = float(chunks["received"][flags].min()) + IDLE_S if flags.any() else math.inf
        return flags

    def _has_closed(self, session: bytes) -> bool:
        query = "SELECT 1 FROM arrivals WHERE session = ? AND kind = ?"
        return session in self._closed or self._view.catalogue.one(query, session, int(FrameKind.CLOSE)) is not None

    # --- sampling -------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch: int,
        *,
        rng: np.random.Generator,
        window: Window | None = None,
        recent: int | None = None,
        extras: Sequence[str] = (),
    ) -> Transitions:
        """A batch drawn uniformly over steps (with replacement), or over about the `recent` newest ones."""
        window = window or Window()
        allowed, ends = (self._allowed, self._ends) if recent is None else self._newest(recent)
        total = int(ends[-1]) if len(ends) else 0
        rows, tries = np.zeros(0, np.int64), 0
        while len(rows) < batch:
            if total == 0 or tries == _TRIES:
                raise ConfigError(
                    f"nothing can be sampled: none of {sum(self._chunks['n_rows'])} rows passes {self._filter}; widen "
                    "the filter (players' steps need consent='granted' unless it says otherwise), or record more first"
                )
            missing = batch - len(rows)
            drawn = np.sort(rng.integers(0, total, size=missing + missing // 8 + 8))
            found = self._sampleable(np.sort(self._ids(drawn, allowed, ends)), window)
            # Sorted rows are read faster; what is too much goes at random, not from one end.
            if len(found) > missing:
                found = found[np.sort(rng.permutation(len(found))[:missing])]
            rows = np.sort(np.concatenate([rows, found])) if len(rows) else found
            tries += len(found) == 0
        if window.n_step == 1 and window.stack == 1:
            return self._adjacent(rows, window, extras)
        return self._windowed(rows, window, extras)

    def _newest(self, recent: int) -> tuple[Ids, Ids]:
        order = self._allowed[np.argsort(-self._chunks["arrival"][self._allowed], kind="stable")]
        ends = np.cumsum(self._chunks["n_rows"][order])
        keep = int(np.searchsorted(ends, recent)) + 1
        return order[:keep], ends[:keep]

    def _ids(self, drawn: Ids, allowed: Ids, ends: Ids) -> Ids:
        at = np.searchsorted(ends, drawn, side="right")
        chunk = allowed[at]
        ids: Ids = self._chunks["start"][chunk] + drawn - (ends[at] - self._chunks["n_rows"][chunk])
        return ids

    def _sampleable(self, ids: Ids, window: Window) -> Ids:
        keep = self._take("row", self._plan(ids)) == RowKind.STEP
        if self._filter.looks_at_rows:
            keep &= self._row_mask(ids)
        ids = ids[keep]
        if not len(ids):
            return ids
        if window.n_step > 1:
            ids = ids[~self._n_step(ids, window).waiting]
        if window.stack > 1:
            ids = ids[self.table().stack(ids, self.gather, k=window.stack).may_sample]
        return ids

    def _row_mask(self, ids: Ids) -> Flags:
        wanted = self._filter
        mask = np.ones(len(ids), np.bool_)
        if wanted.by:
            mask &= np.isin(self.gather("by", ids), wanted.by)
        if wanted.min_version or wanted.max_version < 2**32 - 1:
            version = self.gather("version", ids)
            mask &= (version >= wanted.min_version) & (version <= wanted.max_version)
        return mask

    def _n_step(self, ids: Ids, window: Window) -> NStep:
        return self.table().n_step(ids, self.gather, n=window.n_step, discount=window.discount)

    def gather(self, name: str, ids: Ids) -> Array:
        """Values of a column at row ids of any shape."""
        order = np.argsort(ids, axis=None, kind="stable")
        values = self._take(name, self._plan(ids.ravel()[order]))
        result = np.empty_like(values)
        result[order] = values
        return result.reshape(*ids.shape, *values.shape[1:])

    def _plan(self, rows: Ids) -> Plan:
        """Sorted row ids, shared out over the sources they lie in."""
        bounds = [*np.searchsorted(rows, self._bases).tolist(), len(rows)]
        parts = [
            (source, slice(bounds[at], bounds[at + 1]), rows[bounds[at] : bounds[at + 1]] - self._bases[at])
            for at, source in enumerate(self._sources)
            if bounds[at] < bounds[at + 1]
        ]
        return Plan(len(rows), parts)

    def _take(self, name: str, plan: Plan) -> Array:
        out: Array | None = None
        for source, where, local in plan.parts:
            column = source.column(name)
            if column is None:
                continue
            if out is None:
                make = np.empty if plan.is_complete(name) else np.zeros
                out = make((plan.n_rows, *column.shape[1:]), column.dtype)
                if make is np.zeros and name in DEFAULTS:
                    out[:] = DEFAULTS[name]
            column.take(local, axis=0, out=out[where], mode="clip")
        if out is None:
            raise ConfigError(f"no sampled chunk has a column {name!r}")
        return out

    def _names(self, head: str) -> list[str]:
        names: set[str] = set()
        for source in self._sources:
            names |= {name for name in source.names if name.split(".", 1)[0] == head}
            if names:
                break
        return sorted(names)

    def _adjacent(self, rows: Ids, window: Window, extras: Sequence[str]) -> Transitions:
        """One-step transitions: the next observation is always the next row of the same chunk."""
        obs, plan = self._names("obs"), self._plan(rows)
        following = plan.moved(1)
        terminated = self._take("terminated", plan)
        return Transitions(
            obs={name: self._take(name, plan) for name in obs},
            action={name: self._take(name, plan) for name in self._names("action")},
            reward=self._take("reward", plan),
            next_obs={name: self._take(name, following) for name in obs},
            factor=np.where(terminated, np.float32(0), np.float32(window.discount)),
            terminated=terminated,
            truncated=self._take("truncated", plan),
            extras=self._extras(rows, rows + 1, extras),
            rows=rows,
        )

    def _windowed(self, rows: Ids, window: Window, extras: Sequence[str]) -> Transitions:
        steps = self._n_step(rows, window)
        obs, obs_rows, next_rows = self._names("obs"), rows, steps.bootstrap
        if window.stack > 1:
            obs_rows = self.table().stack(rows, self.gather, k=window.stack).rows
            next_rows = self.table().stack(steps.bootstrap, self.gather, k=window.stack).rows
        return Transitions(
            obs={name: self.gather(name, obs_rows) for name in obs},
            action={name: self.gather(name, rows) for name in self._names("action")},
            reward=steps.returns,
            next_obs={name: self.gather(name, next_rows) for name in obs},
            factor=steps.factor,
            terminated=steps.terminated,
            truncated=steps.truncated,
            extras=self._extras(rows, steps.bootstrap, extras),
            rows=rows,
        )

    def _extras(self, rows: Ids, following: Ids, names: Sequence[str]) -> dict[str, Array]:
        values = {name: self.gather(name, rows) for name in names}
        if "legal" in names:
            values["next_legal"] = self.gather("legal", following)
        return values

    def close(self) -> None:
        self._segments, self._sources, self._memory = {}, [], MemorySource()
        self._view.close()

    def __enter__(self) -> "SegmentReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
