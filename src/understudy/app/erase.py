"""Commands that change a store: by its live writer when there is one, or here."""

from typing import Any

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import IngestRole
from understudy.app.roles.requests import ask
from understudy.client.spooled import forget_spooled
from understudy.core.door import deployment_key, pseudonym
from understudy.core.errors import ConfigError
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
    spooled = forget_spooled(data.spool, name, games)
    if data.has_writer():
        found = ask(data.requests, "forget", timeout_s=timeout_s, players=[one.hex() for one in players])
    else:
        with IngestRole(data) as role:
            found = role.forget(players)
    return {**found, "spooled_sessions": spooled, "games": list(games)}


def replay_quarantine(data: DataFolder, ids: list[int] | None, *, timeout_s: float) -> dict[str, Any]:
    """Store quarantined frames that now pass every check."""
    if data.has_writer():
        return dict(ask(data.requests, "replay", timeout_s=timeout_s, ids=ids))
    with IngestRole(data) as role:
        return role.replay(ids)
