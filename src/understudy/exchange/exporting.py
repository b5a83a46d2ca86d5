"""Exporting: the stored chunks of one schema, session by session, and the file or folder that
they are written to."""

import importlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from understudy.backends.data import DataFolder
from understudy.core.errors import ConfigError, MissingExtra, StorageFailed
from understudy.core.log import sync_folder
from understudy.core.names import player_name
from understudy.experience.builder import raw_name
from understudy.experience.chunk import OPTIONAL, Chunk, ChunkMeta
from understudy.experience.game import GameSpec
from understudy.experience.intake import deployment_key, pseudonym
from understudy.experience.writer import raw_space
from understudy.ingest.specs import SpecFolder
from understudy.ports import Cursor, ExperienceStore, Gone, Specs, Stored
from understudy.stores.view import StoreView
from understudy.stores.window import PAGE, Window

OnSteps = Callable[[int, int], None]
"""Called with how many steps are done, of how many."""

_SHORT_PAGES = 3
"""A page that is not full has reached the end of that moment; while others write, no page may
ever be empty."""


def extra(module: str) -> Any:
    """A module of the extra `export`, or MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtra(
            f"this format needs the package {error.name or name}; pip install 'understudy[export]'"
        ) from error


def one_line(error: BaseException, *, most: int = 160) -> str:
    """What a library said, as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    text = text or f"it is not as the library wants it ({type(error).__name__})"
    return text if len(text) <= most else f"{text[: most - 1]}…"


# --- what is read ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFilter:
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


@dataclass(slots=True)
class ExportedChunks:
    """The chunks that are wanted, as they were when this was opened."""

    view: StoreView
    spec: GameSpec
    wanted: ExportFilter
    n_steps: int
    """Steps of the game and schema; what is left out for its consent is among them."""
    _numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    left_out: Counter[str] = field(default_factory=Counter)
    """Steps that were left out, by their consent."""
    gone_chunks: int = 0
    """Chunks that were forgotten or expired while they were to be read."""

    def chunks(self, on_steps: OnSteps | None = None) -> Iterator[tuple[Chunk, bytes]]:
        """Each chunk once, with its player's pseudonym: sessions by id, and in each the numbers
        in order."""
        done = 0
        for number in self._numbers.tolist():
            page = self.view.tail(Cursor(str(number - 1)), max_items=1, wait_s=0.0)
            item = page.items[0] if page.items else None
            if not isinstance(item, Stored) or item.chunk is None or item.arrival_no != number:
                self.gone_chunks += 1
                continue
            meta = item.chunk.meta
            done += meta.n_steps
            if (
                self.wanted.consent
                and meta.kind != "actor"
                and meta.consent not in self.wanted.consent
            ):
                self.left_out[meta.consent] += meta.n_steps
            else:
                yield item.chunk, item.frame.player
            if on_steps is not None:
                on_steps(done, self.n_steps)

    def why_empty(self) -> str:
        """Why an export of it would be empty."""
        left = ", ".join(
            f"{steps} steps with consent {name}" for name, steps in sorted(self.left_out.items())
        )
        return (
            f"nothing is left to export of {self.spec.game}: left out {left or 'nothing'}; name "
            "others with --consent"
        )


def open_history(
    data: DataFolder, view: StoreView, wanted: ExportFilter, *, specs: Specs | None = None
) -> ExportedChunks:
    """The history of one game's schema; ConfigError when there are several and none was named,
    or nothing at all."""
    player = None
    if wanted.player is not None:
        if wanted.game is None:
            raise ConfigError("--player needs --game: a player has another pseudonym in each game")
        player = pseudonym(deployment_key(data.root), wanted.game, player_name(wanted.player))
    found = view.chunks(game=wanted.game, player=player, since_s=wanted.since_s)
    rows = sorted(
        (row for row in found if row.schema.startswith(wanted.schema)),
        key=lambda row: (row.session, row.chunk_no),
    )
    choices = sorted({(row.game, row.schema) for row in rows})
    if not choices:
        raise ConfigError(
            f"the store of {data.root} holds nothing of what was asked for; see what it holds: "
            f"understudy data stats --data {data.root}"
        )
    games = sorted({game for game, _ in choices})
    if len(games) > 1:
        raise ConfigError(
            f"the store holds several games ({', '.join(games)}); name one with --game"
        )
    if len(choices) > 1:
        schemas = ", ".join(schema[:12] for _, schema in choices)
        raise ConfigError(
            f"{games[0]} was recorded in several schemas ({schemas}); name one with --schema"
        )
    ((game, schema),) = choices
    stored = next((spec for spec in view.specs(game) if spec.schema == schema), None)
    spec = stored or (specs or SpecFolder(data.games)).spec(game, schema)
    if spec is None:
        raise ConfigError(
            f"no spec of {game} in schema {schema[:12]} is registered in {data.root}; register the "
            "game again"
        )
    numbers = np.array([row.arrival_no for row in rows], np.int64)
    return ExportedChunks(view, spec, wanted, sum(row.n_steps for row in rows), numbers)


@contextmanager
def copied(
    store: ExperienceStore, specs: Specs, wanted: ExportFilter, *, beside: Path
) -> Iterator[StoreView]:
    """A local copy of a store elsewhere, in a folder beside `beside` that is removed when the block
    ends.

    An export reads session by session, which a store elsewhere cannot. StorageFailed where the copy
    lacks what the store has: an export of it would look whole.
    """

    def is_wanted(meta: ChunkMeta) -> bool:
        return wanted.game in (None, meta.game) and meta.schema.startswith(wanted.schema)

    with tempfile.TemporaryDirectory(
        prefix=f".{beside.name}.", suffix=".copy", dir=beside.absolute().parent
    ) as folder:
        with Window(store, Path(folder), specs=specs, wanted=is_wanted) as window:
            short = 0
            while short < _SHORT_PAGES and (items := window.step()):
                short += items < PAGE
            after = 0
            while page := window.local.quarantined(after_id=after):
                after = page[-1].id
                for frame in page:
                    if frame.reason not in get_args(Gone):
                        raise StorageFailed(
                            f"chunk {frame.chunk_no} of session {frame.session} does not fit what "
                            "the store holds "
                            f"beside it ({frame.reason}); look at it with understudy data verify"
                        )
        with StoreView(Path(folder)) as view:
            yield view


def optional_columns(spec: GameSpec) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of a row of each column that a chunk of this game may lack."""
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for name, space in spec.action_columns.items():
        columns[raw_name(name)] = (raw_space(space).dtype, space.shape)
    columns |= {name: (dtype, ()) for name, dtype in OPTIONAL.items()}
    if spec.discrete is not None:
        columns["legal"] = (np.dtype(np.bool_), (spec.discrete.n,))
    return columns


# --- where it is written --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """What an export left behind."""

    path: Path
    size_bytes: int
    steps: int
    episodes: int
    sessions: int


def must_be_free(path: Path) -> None:
    """ConfigError when something is there already: an export never replaces what was named by
    mistake."""
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is there already; remove it, or give another name")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}; make it first")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` if the block ends well, and is removed
    otherwise."""
    must_be_free(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        yield temporary
        for part in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            if part.is_dir():
                sync_folder(part)
                continue
            with part.open("rb") as file:
                os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    with suppress(FileNotFoundError):
        path.unlink()
