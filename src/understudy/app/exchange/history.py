"""What an export reads: the stored chunks of one schema, session by session, each session in order."""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from understudy.app.data import DataFolder
from understudy.core.chunk import Chunk
from understudy.core.door import deployment_key, pseudonym
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.names import player_name
from understudy.core.ports import Cursor, Specs, Stored
from understudy.ingest.specs import SpecFolder
from understudy.stores.view import StoreView

OnSteps = Callable[[int, int], None]
"""Told how many steps are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which chunks to export; empty fields match everything."""

    game: str | None = None
    schema: str = ""
    """The beginning of a schema's id, where a game has several."""
    player: str | None = None
    """A name as the game gave it."""
    consent: tuple[str, ...] = ()
    """Players' steps under these consents, or under any; actors' steps need none."""
    since_s: float = 0.0
    """Received at this time or later."""


@dataclass(frozen=True, slots=True)
class Item:
    """One stored chunk and the pseudonym of its player."""

    chunk: Chunk
    player: bytes


@dataclass(slots=True)
class History:
    """The chunks that are wanted, as they were when this was made; a context manager's job is its view's."""

    view: StoreView
    spec: GameSpec
    wanted: Wanted
    n_steps: int
    """Steps of the game and schema; what is left out for its consent is among them."""
    _numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    left_out: Counter[str] = field(default_factory=Counter)
    """Steps that were left out, by their consent."""
    gone_chunks: int = 0
    """Chunks that were forgotten or expired while they were to be read."""

    def items(self, on_steps: OnSteps | None = None) -> Iterator[Item]:
        """Each chunk once: sessions by id, and in each the numbers in order."""
        done = 0
        for number in self._numbers.tolist():
            page = self.view.tail(Cursor(str(number - 1)), max_items=1, wait_s=0.0)
            item = page.items[0] if page.items else None
            if not isinstance(item, Stored) or item.chunk is None or item.arrival_no != number:
                self.gone_chunks += 1
                continue
            meta = item.chunk.meta
            done += meta.n_steps
            if self.wanted.consent and meta.kind != "actor" and meta.consent not in self.wanted.consent:
                self.left_out[meta.consent] += meta.n_steps
            else:
                yield Item(item.chunk, item.frame.player)
            if on_steps is not None:
                on_steps(done, self.n_steps)


def open_history(data: DataFolder, view: StoreView, wanted: Wanted, *, specs: Specs | None = None) -> History:
    """The history of one game's schema; ConfigError when there are several and none was named, or nothing at all."""
    player = None if wanted.player is None else _pseudonym_of(data, wanted)
    rows = [
        row
        for row in view.chunks(game=wanted.game, player=player, since_s=wanted.since_s)
        if row.schema.startswith(wanted.schema)
    ]
    choices = sorted({(row.game, row.schema) for row in rows})
    if not choices:
        raise ConfigError(
            f"the store of {data.root} holds nothing of what was asked for; see what it holds: "
            f"understudy data stats --data {data.root}"
        )
    game, schema = _chosen(choices, wanted)
    mine = sorted((row for row in rows if row.schema == schema), key=lambda row: (row.session, row.chunk_no))
    n_steps = sum(row.n_steps for row in mine)
    numbers = np.array([row.arrival_no for row in mine], np.int64)
    return History(view, _spec(data, view, specs, game, schema), wanted, n_steps, numbers)


def _pseudonym_of(data: DataFolder, wanted: Wanted) -> bytes:
    if wanted.game is None:
        raise ConfigError("--player needs --game: a player has another pseudonym in each game")
    return pseudonym(deployment_key(data.root), wanted.game, player_name(wanted.player or ""))


def _chosen(choices: list[tuple[str, str]], wanted: Wanted) -> tuple[str, str]:
    if len(choices) == 1:
        return choices[0]
    games = sorted({game for game, _ in choices})
    if len(games) > 1:
        raise ConfigError(f"the store holds several games ({', '.join(games)}); name one with --game")
    schemas = ", ".join(schema[:12] for _, schema in choices)
    raise ConfigError(f"{games[0]} was recorded in several schemas ({schemas}); name one with --schema")


def _spec(data: DataFolder, view: StoreView, specs: Specs | None, game: str, schema: str) -> GameSpec:
    stored = next((spec for spec in view.specs(game) if spec.schema == schema), None)
    found = stored or (specs or SpecFolder(data.games)).spec(game, schema)
    if found is None:
        raise ConfigError(
            f"no spec of {game} in schema {schema[:12]} is registered in {data.root}; register the game again"
        )
    return found


def noise_of(session: uuid.UUID) -> int:
    """The random part of a session's id: what stays when an import gives the session another time."""
    return session.int & ((0xFFF << 64) | ((1 << 62) - 1))
