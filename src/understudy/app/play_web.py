"""Playing in a browser: the address of the play page, with a key that opens one game and nothing else."""

import contextlib
import json
from urllib.parse import urlencode

from understudy.app.data import DataFolder
from understudy.app.deployment import Deployment
from understudy.app.runs.choice import GameChoice, look_at
from understudy.app.status import status
from understudy.core.errors import ConfigError, Refused
from understudy.core.log import write_file

GAMES = ("rally", "CartPole-v1")
"""Games that have a page."""
_KEYS_FILE = "play.json"


def check_game(game: str) -> str:
    """The game, or ConfigError when there is no page for it."""
    if game not in GAMES:
        raise ConfigError(
            f"there is no page for {game}; there are for {' and '.join(GAMES)}: leave out --web to watch a bot play it"
        )
    return game


def running_url(data: DataFolder, *, models: str = "") -> str | None:
    """Where the gateway of a platform that runs on this folder listens; None when none does."""
    url = status(data, models=models)["url"] if data.root.is_dir() else None
    return str(url) if url else None


def play_key(deployment: Deployment, game: str) -> str:
    """A key with which a page plays this game: the same one every time, a new one when that was revoked.

    The game is registered with it, since such a key may not register anything.
    """
    deployment.registry.register(look_at(GameChoice(game=game)).spec)
    path, keys = deployment.data.root / _KEYS_FILE, deployment.keys
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        known = dict(json.loads(path.read_text()))
    with contextlib.suppress(KeyError, Refused):
        keys.follow()
        keys.check(known[game])
        return known[game]
    known[game], _ = keys.create(["play"], game=game, label=f"play page, {game}")
    write_file(path, json.dumps(known).encode(), mode=0o600)
    return known[game]


def page_address(url: str, game: str, *, key: str, bot: str = "champion") -> str:
    """What to open; the key stands behind the #, which a browser sends to nobody."""
    fields = {"game": game, **({} if bot == "champion" else {"bot": bot}), "key": key}
    return f"{url}/play#{urlencode(fields)}"
