"""Playing in a browser: where the gateway of a folder is, and a key that opens one game and
nothing else."""

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment
from understudy.core.errors import ConfigError, LinkFailed, Refused
from understudy.core.log import is_locked, write_file
from understudy.platform.platform import roles_folder

PAGES = ("rally", "CartPole-v1")
"""Games that have a page."""
_KEPT_FILE = "play.json"
_LOOK_EVERY_S = 0.1
_ANSWER_S = 5.0
_OK = 200


def check_game(game: str) -> str:
    """The game, or ConfigError when there is no page for it."""
    if game not in PAGES:
        raise ConfigError(
            f"there is no page for {game}; there are for {' and '.join(PAGES)}: leave out --web to "
            "watch a bot play it"
        )
    return game


def check_bot(deployment: Deployment, game: str, bot: str) -> str:
    """The champion, or the number of a model that exists; ConfigError otherwise."""
    return bot if bot == "champion" else str(deployment.registry.find(bot, game=game).model_no)


# --- Where it is ----------------------------------------------------------------------------------


def openable(url: str) -> str:
    """A gateway's address as this machine can open it: one that listens everywhere is asked on
    loopback."""
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(parts.hostname or "")
        if found.is_unspecified:
            near = "127.0.0.1" if found.version == 4 else "[::1]"
            return parts._replace(netloc=f"{near}:{parts.port}").geturl()
    return url


def for_others(url: str, hosts: Sequence[str]) -> str:
    """What other machines use instead, in words; empty when the gateway listens at one address
    only."""
    if openable(url) == url:
        return ""
    parts = urlsplit(url)
    if not hosts:
        return "other machines are refused until gateway.hosts has this machine's name"
    return (
        f"other machines use {', '.join(f'{parts.scheme}://{host}:{parts.port}' for host in hosts)}"
    )


def page_address(url: str, game: str, *, key: str, bot: str = "champion") -> str:
    """What to open; the key stands behind the #, which a browser never sends."""
    fields = {"game": game, **({} if bot == "champion" else {"bot": bot}), "key": key}
    return f"{openable(url)}/play#{urlencode(fields)}"


def is_running(data: DataFolder) -> bool:
    """Whether a gateway runs on this folder now."""
    return is_locked(roles_folder(data) / "gateway.lock")


def running_url(data: DataFolder) -> str | None:
    """Where the gateway that runs on this folder listens; None when none does, or it has not
    said so yet."""
    if not is_running(data):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        url = json.loads((roles_folder(data) / "gateway.json").read_text())["report"].get("url")
        return str(url) if url else None
    return None


def answer_of(url: str, game: str, *, key: str) -> str:
    """Why a page with this key cannot play there now; empty when it can."""
    try:
        answer = urllib3.request(
            "GET",
            f"{openable(url)}/v1/games/{game}",
            headers={"Authorization": f"Bearer {key}"},
            retries=False,
            timeout=_ANSWER_S,
        )
    except urllib3.exceptions.SSLError:
        # A certificate for the name that players use: from here nothing more can be asked.
        return ""
    except urllib3.exceptions.HTTPError as error:
        return f"unreachable: {error}"
    return (
        ""
        if answer.status == _OK
        else f"{answer.status}: {answer.data[:200].decode(errors='replace')}"
    )


def await_gateway(data: DataFolder, game: str, *, key: str, patience_s: float = 20.0) -> str:
    """The address of the gateway that runs here, once it takes this key; LinkFailed says why it
    does not."""
    deadline_s = time.monotonic() + patience_s
    said = ""
    while True:
        url = running_url(data)
        said = answer_of(url, game, key=key) if url else "it has not said where it listens"
        if url and not said:
            return url
        if time.monotonic() >= deadline_s:
            raise LinkFailed(
                "not_ready",
                f"the gateway of {data.root} does not take the page's key after {patience_s:.0f} s "
                f"({said}); see "
                f"'understudy status --data {data.root}', and whether both have the same "
                "models.url",
            )
        time.sleep(_LOOK_EVERY_S)


# --- What is kept ---------------------------------------------------------------------------------


def play_key(deployment: Deployment, game: str) -> str:
    """A key with which a page plays this game: the same one every time, a new one when that was
    revoked.

    The game is registered with it, since such a key may not register anything.
    """
    from understudy.training.env_info import (
        GameChoice,
        look_at,
    )  # late: Gymnasium takes a while, and `up` needs none

    deployment.registry.register(look_at(GameChoice(game=game)).spec)
    keys = deployment.keys
    kept = _kept(deployment.data)
    known = kept["keys"] if isinstance(kept.get("keys"), dict) else {}
    with contextlib.suppress(KeyError, TypeError, AttributeError, Refused):
        keys.follow()
        keys.check(known[game])
        return str(known[game])
    key, _ = keys.create(["play"], game=game, label=f"play page, {game}")
    _keep(deployment.data, {**kept, "keys": {**known, game: key}})
    return key


def kept_port(data: DataFolder) -> int:
    """Where the page was the last time, since a browser finds what it kept only at the same
    address; 0: nowhere yet."""
    port = _kept(data).get("port")
    return port if isinstance(port, int) and 0 < port < 1 << 16 else 0


def keep_port(data: DataFolder, port: int) -> None:
    """The next page is to be here, too."""
    if port != kept_port(data):
        _keep(data, {**_kept(data), "port": port})


def is_free(host: str, port: int) -> bool:
    """Whether a gateway can listen there now."""
    with contextlib.suppress(OSError):
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(kind, socket.SOCK_STREAM) as tried:
            if os.name != "nt":
                # As servers do: connections of the last one that are still closing are not in the
                # way.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            return True
    return False


def _kept(data: DataFolder) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((data.root / _KEPT_FILE).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _keep(data: DataFolder, kept: dict[str, Any]) -> None:
    write_file(data.root / _KEPT_FILE, json.dumps(kept).encode(), mode=0o600)
