"""Replays of users, named by their import path."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core.tensors import Array
from understudy.learn.replay import HostReplay
from understudy.replay import Drawn, ReadChunks


class FifoReplay(HostReplay):
    """Draws each step once per pass, in the order of insertion."""

    next_row = 0

    def draw(
        self,
        k: int,
        *,
        rng: np.random.Generator,
        beta: float = 0.4,
        batch: int | None = None,
        row_weights: Any = None,
    ) -> Drawn:
        rows = self.sampleable_rows()
        first = int(np.searchsorted(rows, self.next_row))
        places = first + np.arange(k * (batch or self.needs.batch))
        drawn = rows[places % len(rows)].reshape(k, -1)
        self.next_row = int(drawn[-1, -1]) + 1
        return self.at(drawn)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, facts = super().state()
        return arrays, facts | {"next_row": self.next_row}

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        super().restore(arrays, facts, read)
        self.next_row = facts["next_row"]


class HalfAReplay:
    """Has neither draws nor checkpoints."""

    n_sampleable = 0

    def __init__(self, game: Any, needs: Any, config: Any) -> None:
        self.needs = needs

    def insert(self, chunk: Any) -> int:
        return 0

    def close(self, session: Any) -> int:
        return 0

    def evict(self, session: Any, chunk_no: int) -> bool:
        return False

    def chunk_ids(self) -> list[Any]:
        return []

    def chunks_of(self, rows: Any) -> list[Any]:
        return []

    def feedback(self, rows: Any, stamps: Any, priorities: Any) -> None:
        pass


class WithoutArguments:
    """Cannot be created for a game."""


class NeverCreated:
    """Fails when it is created."""

    def __init__(self, game: Any, needs: Any, config: Any) -> None:
        raise KeyError("a mistake")


class WithFaults(HostReplay):
    """Fails in the part that its class attribute names."""

    fails_in = ""

    def _fail(self, part: str) -> None:
        if self.fails_in == part:
            raise KeyError(f"a mistake in {part}")

    @property
    def n_sampleable(self) -> int:
        self._fail("n_sampleable")
        return super().n_sampleable

    def insert(self, chunk: Any, **options: Any) -> int:
        self._fail("insert")
        return super().insert(chunk, **options)

    def draw(self, *arguments: Any, **options: Any) -> Drawn:
        self._fail("draw")
        return super().draw(*arguments, **options)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        self._fail("state")
        return super().state()
