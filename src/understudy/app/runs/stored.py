"""What a store on the disk is about: where it is, and the spec of a game in it."""

from pathlib import Path

from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.names import game_name_of_env
from understudy.stores.database import has_store
from understudy.stores.view import StoreView


def store_folder(folder: Path) -> Path:
    """The store in a data folder or a run's folder, or the store itself."""
    for one in (folder / "store", folder):
        if has_store(one):
            return one
    raise ConfigError(
        f"there is no store in {folder}; give a data folder with one, or store what was recorded: "
        f"understudy ingest --data {folder} --until-empty"
    )


def stored_spec(store: Path, game: str) -> GameSpec:
    """The newest spec of a game as the store keeps it."""
    with StoreView(store) as view:
        # An id may name the package the game is in; recorders know the game by what comes after it.
        for name in dict.fromkeys((game, game.rpartition(":")[2])):
            if specs := view.specs(game_name_of_env(name)):
                return specs[0]
    folder = store.parent if store.name == "store" else "DIR"
    raise ConfigError(
        f"the store {store} holds nothing of {game}; see what it holds: understudy data stats --data {folder}"
    )
