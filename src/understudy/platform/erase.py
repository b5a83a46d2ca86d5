"""Commands that change a store: run by the process that has it open for writing, else here."""

from typing import Any

from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.backends.specs import registered_specs
from understudy.backends.unfinished_imports import UnfinishedImports
from understudy.client.spool import forget_spooled
from understudy.core.errors import ConfigError
from understudy.core.names import game_name, player_name
from understudy.experience.intake import deployment_key, pseudonym
from understudy.platform.config import Config
from understudy.platform.ingest import open_own_ingest, open_own_store, replay
from understudy.platform.requests import send_request
from understudy.ports import FullStore


def forget_player(
    data: DataFolder,
    player: str,
    *,
    game: str | None,
    timeout_s: float,
    config: Config | None = None,
) -> dict[str, Any]:
    """Erase a player by name in one game or in all; `config` locates remote streams and games."""
    config = config or Config()
    models = config.models.url
    registered = (
        list(open_deployment(data, models=models).registry.games()) if models else data.game_names()
    )
    games, players, spooled = _find(data, player, registered, game)
    if data.has_writer():
        hexes = [player_id.hex() for player_id in players]
        result = send_request(data.requests, "forget", timeout_s=timeout_s, players=hexes)
    elif config.stream.url:
        # Frames that are still in a remote stream are rejected when ingest reads them.
        with open_own_store(data, config) as store:
            chunks = sum(store.forget(player_id) for player_id in players)
            result = {"chunks": chunks, "stream_bytes": 0, "is_finished": not store.is_erasing}
    else:
        with open_own_ingest(data, config) as role:
            result = role.forget(players)
    return {**result, "spooled_sessions": spooled, "games": games}


def forget_in_remote_store(
    data: DataFolder, store: FullStore, player: str, *, registered: list[str], game: str | None
) -> dict[str, Any]:
    """Erase a player in a remote store; ingest rejects frames that are still in the stream."""
    games, players, spooled = _find(data, player, registered, game)
    chunks = sum(store.forget(player_id) for player_id in players)
    UnfinishedImports(data.root).forget(players)
    return {
        "chunks": chunks,
        "stream_bytes": 0,
        "is_finished": True,
        "spooled_sessions": spooled,
        "games": games,
    }


def _find(
    data: DataFolder, player: str, registered: list[str], game: str | None
) -> tuple[list[str], list[bytes], int]:
    """Erase a player's spooled sessions; return the games, the pseudonyms and the number erased."""
    name = player_name(player)
    if not registered:
        raise ConfigError(
            f"no game is registered in {data.root}, so there is no player to erase; check --data"
        )
    if game is not None and str(game_name(game)) not in registered:
        raise ConfigError(
            f"the game {game!r} is not registered in {data.root}; registered are "
            f"{', '.join(registered)}; pass one of them"
        )
    if not (data.root / "key").exists():
        raise ConfigError(
            f"{data.root} has no key, so no player can be found by name; pass the deployment's "
            "own folder with --data, or restore the key from a backup"
        )
    games = registered if game is None else [game]
    key = deployment_key(data.root)
    players = [pseudonym(key, game_name(played), name) for played in games]
    return games, players, forget_spooled(data.spool, name, games)


def compact_store(data: DataFolder, *, config: Config, timeout_s: float) -> dict[str, Any]:
    """Release free pages of the data folder's own store to the file system."""
    if not data.has_store():
        raise ConfigError(
            f"there is no store in {data.root} to compact; compact a remote store with its own "
            "tools"
        )
    if data.has_writer():
        return dict(send_request(data.requests, "compact", timeout_s=timeout_s))
    with open_own_store(data, config) as store:
        return {"freed_bytes": store.compact()}


def replay_quarantine(
    data: DataFolder, ids: list[int] | None, *, timeout_s: float, config: Config | None = None
) -> dict[str, Any]:
    """Store quarantined frames that now pass every check."""
    if data.has_writer():
        return dict(send_request(data.requests, "replay", timeout_s=timeout_s, ids=ids))
    with open_own_store(data, config := config or Config()) as store:
        return dict(replay(store, registered_specs(data, models=config.models.url), ids))
