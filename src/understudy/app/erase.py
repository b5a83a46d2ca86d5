"""Commands that change a store: by its live writer when there is one, or here."""

import json
import shutil
from collections.abc import Sequence
from typing import Any

from understudy.app.data import DataFolder
from understudy.app.ingest import IngestRole
from understudy.app.requests import ask
from understudy.core.door import deployment_key, pseudonym
from understudy.core.errors import ConfigError, Locked
from understudy.core.lock import FileLock
from understudy.core.names import game_name, player_name


def forget_player(data: DataFolder, player: str, *, game: str | None, timeout_s: float) -> dict[str, Any]:
    """Erase a player by name, in one game or in all."""
    name = player_name(player)
    games = data.game_names() if game is None else [game_name(game)]
    if not games:
        raise ConfigError(f"no game is known in {data.root}, so nothing can be forgotten; is --data right?")
    if game is not None and game not in data.game_names():
        raise ConfigError(f"no game {game!r} is known in {data.root}; known are {', '.join(data.game_names())}")
    key = deployment_key(data.root)
    players = [pseudonym(key, one, name) for one in games]
    spooled = _forget_spool(data, name, games)
    if data.has_writer():
        found = ask(data.requests, "forget", timeout_s=timeout_s, players=[one.hex() for one in players])
    else:
        with IngestRole(data) as role:
            found = role.forget(players)
    return {**found, "spooled_sessions": spooled, "games": list(games)}


def _forget_spool(data: DataFolder, player: str, games: Sequence[str]) -> int:
    """Delete sessions of the player that killed games left unsent."""
    gone = 0
    for path in sorted(data.spool.glob("*/*/session.json")):
        try:
            about = json.loads(path.read_text())
            if about["player"] != player or about["game"] not in games:
                continue
            with FileLock(path.parent / ".lock", what="a spooled session"):
                shutil.rmtree(path.parent)
                gone += 1
        except (OSError, ValueError, KeyError, Locked):
            continue  # being played or sent right now: what it sends is refused, since its session began before
    return gone


def replay_quarantine(data: DataFolder, ids: list[int] | None, *, timeout_s: float) -> dict[str, Any]:
    """Store quarantined frames that now pass every check."""
    if data.has_writer():
        return dict(ask(data.requests, "replay", timeout_s=timeout_s, ids=ids))
    with IngestRole(data) as role:
        return role.replay(ids)
