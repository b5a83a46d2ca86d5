"""Exporting: reads the stored chunks of one schema by session, and writes a file or folder."""

import importlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from understudy.backends.data import DataFolder
from understudy.backends.local import WINDOW_PAGE, open_view, open_window
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

if TYPE_CHECKING:
    from understudy.stores.view import StoreView

OnSteps = Callable[[int, int], None]
"""Called with the number of steps done and the total."""

_SHORT_PAGES = 3
"""A copy ends after this many pages that are not full: while another process writes, it may never
read an empty page."""


def import_extra(module: str) -> Any:
    """Import a module of the extra `export`; MissingExtra states the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtra(
            f"this format needs the package {error.name or name}; pip install 'understudy[export]'"
        ) from error


def one_line(error: BaseException, *, most: int = 160) -> str:
    """Return a library's error message as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    text = text or f"the library reported no details ({type(error).__name__})"
    return text if len(text) <= most else f"{text[: most - 1]}…"


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFilter:
    """Which chunks to export; empty fields match everything."""

    game: str | None = None
    schema: str = ""
    """The beginning of a schema's id, for a game with several schemas."""
    player: str | None = None
    """A player's name in the game."""
    consent: tuple[str, ...] = ()
    """Consents under which players' steps are exported, empty for all; actors' steps need none."""
    since_s: float = 0.0
    """Received at this time or later."""


@dataclass(slots=True)
class ExportedChunks:
    """The chunks that match a filter, as of the time this was opened."""

    view: "StoreView"
    spec: GameSpec
    filter: ExportFilter
    n_steps: int
    """Steps of the game and schema, including those left out because of their consent."""
    _numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    left_out: Counter[str] = field(default_factory=Counter)
    """Steps that were left out, by their consent."""
    gone_chunks: int = 0
    """Chunks that were erased or expired before they were read."""

    def chunks(self, on_steps: OnSteps | None = None) -> Iterator[tuple[Chunk, bytes]]:
        """Yield each chunk once with its player's pseudonym, by session id and chunk number."""
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
                self.filter.consent
                and meta.kind != "actor"
                and meta.consent not in self.filter.consent
            ):
                self.left_out[meta.consent] += meta.n_steps
            else:
                yield item.chunk, item.frame.player
            if on_steps is not None:
                on_steps(done, self.n_steps)

    def why_empty(self) -> str:
        """Return the reason why the export is empty."""
        omitted = ", ".join(
            f"{steps} steps with consent {name}" for name, steps in sorted(self.left_out.items())
        )
        return (
            f"nothing to export for {self.spec.game}: left out {omitted or 'erased steps'}; pass "
            "other consents with --consent"
        )


def open_history(
    data: DataFolder, view: "StoreView", export_filter: ExportFilter, *, specs: Specs | None = None
) -> ExportedChunks:
    """Return the chunks of one game's schema; ConfigError if none or several schemas match."""
    player = None
    if export_filter.player is not None:
        if export_filter.game is None:
            raise ConfigError(
                "--player needs --game: a player has a different pseudonym in each game"
            )
        player = pseudonym(
            deployment_key(data.root), export_filter.game, player_name(export_filter.player)
        )
    matches = view.chunks(game=export_filter.game, player=player, since_s=export_filter.since_s)
    rows = sorted(
        (row for row in matches if row.schema.startswith(export_filter.schema)),
        key=lambda row: (row.session, row.chunk_no),
    )
    choices = sorted({(row.game, row.schema) for row in rows})
    if not choices:
        raise ConfigError(
            f"the store of {data.root} holds no steps that match the options; see what it holds: "
            f"understudy data stats --data {data.root}"
        )
    games = sorted({game for game, _ in choices})
    if len(games) > 1:
        raise ConfigError(
            f"the store holds several games ({', '.join(games)}); choose one with --game"
        )
    if len(choices) > 1:
        schemas = ", ".join(schema[:12] for _, schema in choices)
        raise ConfigError(
            f"{games[0]} was recorded in several schemas ({schemas}); choose one with --schema"
        )
    ((game, schema),) = choices
    stored = next((spec for spec in view.specs(game) if spec.schema == schema), None)
    spec = stored or (specs or SpecFolder(data.games)).spec(game, schema)
    if spec is None:
        raise ConfigError(
            f"no spec of {game} with schema {schema[:12]} is registered in {data.root}; register "
            "the game again"
        )
    numbers = np.array([row.arrival_no for row in rows], np.int64)
    return ExportedChunks(view, spec, export_filter, sum(row.n_steps for row in rows), numbers)


@contextmanager
def local_copy(
    store: ExperienceStore, specs: Specs, export_filter: ExportFilter, *, beside: Path
) -> Iterator["StoreView"]:
    """Yield a view of a temporary local copy of a remote store, in a folder next to `beside`.

    An export reads session by session, which a remote store does not support. The copy has the
    chunks of the filter's game and schema. Raises StorageFailed if it lacks one: the export would
    be incomplete without notice.
    """

    def matches(meta: ChunkMeta) -> bool:
        is_game = export_filter.game in (None, meta.game)
        return is_game and meta.schema.startswith(export_filter.schema)

    with tempfile.TemporaryDirectory(
        prefix=f".{beside.name}.", suffix=".copy", dir=beside.absolute().parent
    ) as folder:
        with open_window(store, Path(folder), specs=specs, include=matches) as window:
            short = 0
            while short < _SHORT_PAGES and (items := window.step()):
                short += items < WINDOW_PAGE and not window.is_cut
            after = 0
            while page := window.local.quarantined(after_id=after):
                after = page[-1].id
                for frame in page:
                    if frame.reason not in get_args(Gone):
                        raise StorageFailed(
                            f"chunk {frame.chunk_no} of session {frame.session} conflicts with "
                            f"other chunks of the store ({frame.reason}); check the store with "
                            "understudy data verify"
                        )
        with open_view(Path(folder)) as view:
            yield view


def optional_columns(spec: GameSpec) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return the type and row shape of each column that a chunk of this game may lack."""
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for name, space in spec.action_columns.items():
        columns[raw_name(name)] = (raw_space(space).dtype, space.shape)
    columns |= {name: (dtype, ()) for name, dtype in OPTIONAL.items()}
    if spec.discrete is not None:
        columns["action_mask"] = (np.dtype(np.bool_), (spec.discrete.n,))
    return columns


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """The file or folder that an export wrote."""

    path: Path
    size_bytes: int
    steps: int
    episodes: int
    sessions: int


def check_not_exists(path: Path) -> None:
    """Raise ConfigError if the path exists: an export never overwrites a file or folder."""
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; remove it, or pass another path")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; create it first")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` if the block succeeds and removed otherwise."""
    check_not_exists(path)
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
