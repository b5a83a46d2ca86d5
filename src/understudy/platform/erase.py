"""Commands that change a store: run by the process that has it open for writing, else here."""

import contextlib
import os
from pathlib import Path
from typing import Any

from understudy.backends.data import DataFolder, stored_schemas
from understudy.backends.deployment import registered_games
from understudy.backends.local import has_store, open_local_store, open_view
from understudy.backends.specs import registered_specs
from understudy.backends.unfinished_imports import UnfinishedImports
from understudy.client.spool import forget_spooled
from understudy.core.errors import ConfigError, Locked, UnderstudyError
from understudy.core.log import FileLock
from understudy.core.names import game_name, player_name
from understudy.core.wording import shortened
from understudy.experience.intake import deployment_key, pseudonym
from understudy.experience.session import tombstone_of
from understudy.platform.backup import delete_snapshots
from understudy.platform.config import Config
from understudy.platform.ingest import open_own_ingest, open_own_store, replay
from understudy.platform.requests import send_request
from understudy.ports import FullStore
from understudy.release.store_stats import player_hash


def forget_player(
    data: DataFolder,
    player: str,
    *,
    game: str | None,
    timeout_s: float,
    config: Config | None = None,
) -> dict[str, Any]:
    """Erase a player by name in one game or in all; `config` locates remote streams and games.

    The result's `left` names each place that may still hold something of the player, and why;
    `earlier` has the time of each earlier request to forget the name, by game and by its arrival
    number; it is empty if that cannot be read. `first_steps` has the arrival numbers of the
    player's first steps, by game and schema; None for a game if they are not known.
    """
    config = config or Config()
    registered = registered_games(data, models=config.models.url)
    games, players = _find(data, player, registered, game)
    before = _before_erasing(data.store, games, players)
    if data.has_writer():
        hexes = [player_id.hex() for player_id in players]
        result = dict(
            send_request(
                data.requests,
                "forget",
                timeout_s=timeout_s,
                check="run this command again later: it erases what is left, or says when the "
                "name was requested before",
                players=hexes,
            )
        )
    elif config.stream.url:
        with open_own_store(data, config) as store:
            chunks = sum(store.forget(player_id) for player_id in players)
            result = {"chunks": chunks, "stream_bytes": 0, "is_erasing": store.is_erasing}
    else:
        with open_own_ingest(data, config) as role:
            result = role.forget(players)
    left = {}
    if result.pop("is_erasing"):
        left["store"] = (
            "a reader has the store open, so the last bytes are not erased yet; close the reader, "
            "then run this command again"
        )
    left |= _left_in_stream(config.stream.url)
    return result | before | _forget_copies(data, player, games, players, left)


def forget_in_remote_store(
    data: DataFolder,
    store: FullStore,
    player: str,
    *,
    registered: list[str],
    game: str | None,
    stream: str = "",
) -> dict[str, Any]:
    """Erase a player in a remote store; ingest rejects frames that are still in the stream.

    `stream` is the URL of a remote stream; "" if it is in the data folder.
    """
    games, players = _find(data, player, registered, game)
    # Arrival numbers are those of the copy that the learner reads.
    window = DataFolder(data.root, store_name="window").store
    before = _before_erasing(window, games, players)
    chunks = sum(store.forget(player_id) for player_id in players)
    left = {
        "store": "the database keeps deleted rows in its files until they are compacted, and the "
        "player's pseudonym and session ids in its tables; see docs/cassandra.md"
    }
    left |= _left_in_stream(stream) or {
        "stream": "ingest deletes the frames from the data folder's stream an hour after they were "
        "stored"
    }
    result = {"chunks": chunks, "stream_bytes": 0}
    return result | before | _forget_copies(data, player, games, players, left)


def _find(
    data: DataFolder, player: str, registered: list[str], game: str | None
) -> tuple[list[str], list[bytes]]:
    """Return the games, and the player's pseudonym in each."""
    name = player_name(player)
    # A game whose spec was deleted is not registered, but has players.
    registered = sorted({*registered, *stored_schemas(data)})
    if not registered:
        raise ConfigError(
            f"no game is registered in {data.root}, so there is no player to erase; check --data"
        )
    if game is not None and str(game_name(game)) not in registered:
        raise ConfigError(
            f"the game {game!r} is not registered in {data.root}; pass one of the registered "
            f"games: {', '.join(registered)}"
        )
    if not (data.root / "key").exists():
        raise ConfigError(
            f"{data.root} has no key, so no player can be found by name; pass the deployment's "
            "own folder with --data, or restore the key from a backup"
        )
    games = registered if game is None else [game]
    key = deployment_key(data.root)
    return games, [pseudonym(key, game_name(played), name) for played in games]


def _before_erasing(store: Path, games: list[str], players: list[bytes]) -> dict[str, Any]:
    """What a store knows of a player before the erasure: `earlier` and `first_steps`."""
    unknown = {"earlier": {}, "first_steps": dict.fromkeys(games)}
    if not has_store(store):
        return unknown
    by_game = dict(zip(games, players, strict=True))
    try:
        with contextlib.closing(open_view(store)) as view:
            return {
                "earlier": {game: view.forgets_of(player) for game, player in by_game.items()},
                "first_steps": {
                    game: view.first_arrivals(player) for game, player in by_game.items()
                },
            }
    except UnderstudyError:
        return unknown  # a damaged copy must not prevent the erasure


def _left_in_stream(url: str) -> dict[str, str]:
    if not url:
        return {}
    return {
        "stream": "a remote stream keeps the frames until its retention ends; ingest rejects them"
    }


def _forget_copies(
    data: DataFolder, player: str, games: list[str], players: list[bytes], left: dict[str, str]
) -> dict[str, Any]:
    """Erase what the data folder holds besides store and stream; return the rest of the result."""
    spooled, still_spooled = forget_spooled(data.spool, player_name(player), games)
    if still_spooled:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in still_spooled.items())
        left["spool"] = f"frames of the player may be in {reasons[:2000]}"
    UnfinishedImports(data.root).forget(players)
    window = DataFolder(data.root, store_name="window").store
    snapshots = data.root / "snapshots"
    try:
        if has_store(window):
            with open_local_store(window) as copy:
                for player_id in players:
                    copy.forget(player_id)
    except Locked:
        left["window"] = "a running learner erases its copy of the store at its next read"
    except UnderstudyError as error:
        left["window"] = (
            f"the learner's copy of the store cannot be changed; delete {window}, from which only "
            f"time is lost: {shortened(str(error), 500)}"
        )
    try:
        if snapshots.is_dir():
            with FileLock(snapshots / ".lock", what="a backup"):
                delete_snapshots(snapshots)
    except Locked:
        left["snapshots"] = (
            "a backup in progress may contain the player; replace it by a new one afterwards"
        )
    hexes = [player_id.hex().encode() for player_id in players]
    checkpoints = []
    for folder in data.root.glob("learner*"):
        for place, _, names in os.walk(folder):  # a running learner may delete files meanwhile
            for path in (Path(place, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if not any(text in path.read_bytes() for text in hexes):
                        continue
                    # Those of another store were moved aside; training can begin anew there.
                    if path.match("learner-*/*/*/*.safetensors"):
                        path.unlink()
                    else:
                        checkpoints.append(path)
    statistics = data.root / "learner" / "store_stats.json"
    if checkpoints:
        left["learner"] = (
            "checkpoints name the player's pseudonym and sessions, but hold no steps; a running "
            f"learner deletes or replaces them (files: {len(checkpoints)}, such as "
            f"{checkpoints[0]})"
        )
    elif statistics.is_file() and any(
        player_hash(tombstone_of(player_id)).encode() in statistics.read_bytes()
        for player_id in players
    ):
        left["learner"] = (
            f"{statistics} has returns of the player's episodes, under a hash of the pseudonym; a "
            "running learner removes them within seconds"
        )
    return {"left": left, "is_finished": not left, "spooled_sessions": spooled, "games": games}


def compact_store(data: DataFolder, *, config: Config, timeout_s: float) -> dict[str, Any]:
    """Release free pages of the data folder's own store to the file system."""
    if not data.has_store():
        raise ConfigError(
            f"there is no store in {data.root} to compact; compact a remote store with its own "
            "tools"
        )
    if data.has_writer():
        check = "look for free bytes: understudy data stats"
        return dict(send_request(data.requests, "compact", timeout_s=timeout_s, check=check))
    with open_own_store(data, config) as store:
        return {"freed_bytes": store.compact()}


def replay_quarantine(
    data: DataFolder, ids: list[int] | None, *, timeout_s: float, config: Config | None = None
) -> dict[str, Any]:
    """Store quarantined frames that now pass every check."""
    if data.has_writer():
        check = "run: understudy data quarantine list"
        return dict(
            send_request(data.requests, "replay", timeout_s=timeout_s, check=check, ids=ids)
        )
    with open_own_store(data, config := config or Config()) as store:
        return dict(replay(store, registered_specs(data, models=config.models.url), ids))
