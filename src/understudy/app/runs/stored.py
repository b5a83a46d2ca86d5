"""What a store on the disk is about: where it is, and the spec of a game in it."""

from collections.abc import Iterator
from pathlib import Path

from understudy.app.data import DataFolder
from understudy.app.runs.folder import RunFolder
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.names import game_name_of_env
from understudy.core.ports import Cursor, Stored
from understudy.ingest.specs import SpecFolder
from understudy.stores.reader import SegmentReader
from understudy.stores.view import StoreView


def store_folder(folder: Path) -> Path:
    """The store in a data folder or a run's folder, or the store itself."""
    for one in (folder / "store", folder):
        if (one / "catalogue.sqlite").exists():
            return one
    raise ConfigError(
        f"there is no store in {folder}; give a data folder with one, or store what was recorded: "
        f"understudy ingest --data {folder} --until-empty"
    )


def stored_spec(store: Path, game: str) -> GameSpec:
    """The spec of a game as the store knows it; what came so lately that it is not sealed yet counts too."""
    # An id may name the package the game is in; recorders know the game by what comes after it.
    for name in dict.fromkeys((game, game.rpartition(":")[2])):
        spec = _sealed_spec(store, game_name_of_env(name)) or _unsealed_spec(store, game_name_of_env(name))
        if spec is not None:
            return spec
    folder = store.parent if store.name == "store" else "DIR"
    raise ConfigError(
        f"the store {store} holds nothing of {game}; see what it holds: understudy data stats --data {folder}"
    )


def _sealed_spec(store: Path, game: str) -> GameSpec | None:
    with SegmentReader(store, game=game) as reader:
        return reader.spec


def _unsealed_spec(store: Path, game: str) -> GameSpec | None:
    """From beside the store: a data folder keeps the specs of its games, a run has its policy's."""
    beside = RunFolder(store.parent)
    specs = SpecFolder(DataFolder(store.parent).games)
    for schema in _schemas(store, game):
        if beside.exists and (spec := beside.policy("last").game).schema == schema:
            return spec
        if (found := specs.spec(game, schema)) is not None:
            return found
    return None


def _schemas(store: Path, game: str) -> Iterator[str]:
    """Each schema that a game's chunks have, once, in the order they came."""
    seen: set[str] = set()
    cursor: Cursor | None = None
    with StoreView(store) as view:
        while items := (page := view.tail(cursor, max_items=1024, wait_s=0.0)).items:
            cursor = page.cursor
            for item in items:
                meta = item.chunk.meta if isinstance(item, Stored) and item.chunk is not None else None
                if meta is not None and meta.game == game and meta.schema not in seen:
                    seen.add(meta.schema)
                    yield meta.schema
