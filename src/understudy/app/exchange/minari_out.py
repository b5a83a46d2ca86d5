"""Export to Minari: whole episodes, as an HDF5 dataset that `minari.load_dataset` opens.

Minari's Arrow form is not written: its reader cuts episodes that are longer than one of its batches (Minari #351).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.app.exchange.extra import extra
from understudy.app.exchange.gym_spaces import gym_space, unflattened
from understudy.app.exchange.history import History, Item, OnSteps
from understudy.app.exchange.parquet_out import Written, nothing_left
from understudy.app.exchange.target import whole
from understudy.core.chunk import Chunk, EpisodeNote, RowKind
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array

SPEC_KEY = "understudy_spec"
_NAME = re.compile(r"[-_\w]+-v\d+", re.ASCII)


@dataclass(slots=True)
class Left:
    """Episodes that were left out, and why."""

    cut: int = 0
    """Nobody saw how they ended."""
    unfinished: int = 0
    """They go on behind what is stored."""
    gaps: int = 0
    """Some of their chunks are not here, or were left out."""

    def to_json(self) -> dict[str, int]:
        return {"cut": self.cut, "unfinished": self.unfinished, "gaps": self.gaps}


@dataclass(frozen=True, slots=True)
class _Rows:
    """A whole episode: chunks' rows from its first step to its final observation."""

    columns: dict[str, Array]
    note: EpisodeNote
    item: Item


@dataclass(slots=True)
class Episodes:
    """Puts the chunks of sessions together to whole episodes; one episode is in memory at a time."""

    left: Left = field(default_factory=Left)
    sessions: int = 0
    _parts: list[Chunk] = field(default_factory=list)
    _is_broken: bool = False
    """Whether an episode goes on whose beginning is not here."""
    _expected: tuple[bytes, int] = (b"", -1)

    def take(self, item: Item) -> Iterator[_Rows]:
        """The episodes that end in the next chunk of the history."""
        chunk, meta = item.chunk, item.chunk.meta
        is_same = meta.session.bytes == self._expected[0]
        if (meta.session.bytes, meta.chunk_no) != self._expected:
            self.close(is_gap=is_same)
        self.sessions += not is_same
        self._expected = (meta.session.bytes, meta.chunk_no + 1)
        bounds = [*(note.row for note in meta.episodes), chunk.n_rows]
        for note, start, end in zip(meta.episodes, bounds[:-1], bounds[1:], strict=True):
            part = Chunk(meta, {name: rows[start:end] for name, rows in chunk.columns.items()})
            goes_on = end == chunk.n_rows and chunk.columns["row"][-1] == RowKind.BOOTSTRAP and not note.cut
            self._add(part)
            if not goes_on and (whole := self._ended(is_final=part.columns["row"][-1] == RowKind.FINAL)):
                yield _Rows(_joined(whole), note, item)

    def _add(self, part: Chunk) -> None:
        if part.columns["is_first"][0]:
            # The one before went on at its chunk's end, and then did not.
            self.left.cut += bool(self._parts)
            self._parts, self._is_broken = [part], False
        elif self._parts:
            self._parts.append(part)
        else:
            self.left.gaps += not self._is_broken
            self._is_broken = True

    def _ended(self, *, is_final: bool) -> list[Chunk]:
        """The parts of the episode that ends here, or none where it is not whole."""
        parts, self._parts, self._is_broken = self._parts, [], False
        if parts and not is_final:
            self.left.cut += 1
        return parts if is_final else []

    def close(self, *, is_gap: bool = False) -> None:
        """Nothing more comes of this session, or chunks of it are missing."""
        if self._parts:
            self.left.gaps += is_gap
            self.left.unfinished += not is_gap
        self._parts, self._is_broken = [], False


def _joined(parts: list[Chunk]) -> dict[str, Array]:
    names = set.intersection(*(set(part.columns) for part in parts))
    columns = {}
    for name in sorted(names):
        rows = [part.columns[name][:-1] for part in parts[:-1]]  # the bootstrap row is the next part's first
        columns[name] = np.concatenate([*rows, parts[-1].columns[name]])
    return columns


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """A dataset, its id, and the episodes that are not in it."""

    written: Written
    dataset_id: str
    left: Left


def write_minari(history: History, path: Path, *, on_steps: OnSteps | None = None) -> WrittenDataset:
    """Write whole episodes as a Minari dataset in the folder `path`; ConfigError, and no folder, without any."""
    minari, storage = extra("minari"), extra("minari.dataset.minari_storage")
    extra("h5py")
    spec, episodes = history.spec, Episodes()
    dataset_id, totals = dataset_name(path), Counter[str]()
    with whole(path) as temporary:
        temporary.mkdir()
        made = storage.MinariStorage.new(
            temporary / "data", observation_space=gym_space(spec.obs), action_space=gym_space(spec.action),
            data_format="hdf5", jpeg_encoding=False,
        )  # fmt: skip
        facts: list[dict[str, Any]] = []
        made.update_episodes(_buffers(history, episodes, facts, on_steps))
        totals.update(steps=made.total_steps, episodes=made.total_episodes)
        if not totals["episodes"]:
            left = ", ".join(f"{count} {why}" for why, count in episodes.left.to_json().items() if count)
            raise ConfigError(f"no episode is whole ({left})" if left else nothing_left(history))
        made.update_episode_metadata(facts)
        made.update_metadata({
            "dataset_id": dataset_id, "minari_version": minari.__version__, SPEC_KEY: spec.to_json().decode(),
            "description": f"Episodes of {spec.game}, exported by understudy.",
        })  # fmt: skip
    size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    written = Written(path.absolute(), size, totals["steps"], totals["episodes"], episodes.sessions)
    return WrittenDataset(written, dataset_id, episodes.left)


def dataset_name(path: Path) -> str:
    """The folder's name where it is an id of Minari's, otherwise the nearest that is one."""
    name = path.name
    if _NAME.fullmatch(name):
        return name
    return f"{re.sub(r'[^-_A-Za-z0-9]', '-', name)}-v0"


def _buffers(
    history: History, episodes: Episodes, facts: list[dict[str, Any]], on_steps: OnSteps | None
) -> Iterator[Any]:
    buffer = extra("minari.data_collector.episode_buffer").EpisodeBuffer
    spec = history.spec
    for item in history.items(on_steps):
        for one in episodes.take(item):
            rows, n = one.columns, len(one.columns["row"]) - 1
            infos = {
                name: column if name == "legal" else column[:n]
                for name, column in rows.items()
                if name not in {*spec.obs_columns, *spec.action_columns, *_PLAIN}
            }
            meta = one.item.chunk.meta
            fact = {"session": str(meta.session), "consent": meta.consent, "kind": meta.kind, "model": one.note.model}
            facts.append({name: value for name, value in fact.items() if value is not None})
            yield buffer(
                id=None, seed=one.note.seed, options=None,
                observations=unflattened({name: rows[name] for name in spec.obs_columns}, "obs"),
                actions=unflattened({name: rows[name][:n] for name in spec.action_columns}, "action"),
                rewards=rows["reward"][:n], terminations=rows["terminated"][:n], truncations=rows["truncated"][:n],
                infos=infos,
            )  # fmt: skip
    episodes.close()


_PLAIN = ("row", "is_first", "reward", "terminated", "truncated")
