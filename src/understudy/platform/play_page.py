"""Playing in a browser: the address of a folder's gateway, and a key for one game only."""

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
"""Games that can be played in a browser."""
_STATE_FILE = "play.json"
_LOOK_EVERY_S = 0.1
_ANSWER_S = 5.0
_OK = 200


def check_game(game: str) -> str:
    """Return the game; ConfigError if there is no page for it."""
    if game not in PAGES:
        raise ConfigError(
            f"there is no page for {game}, only for {' and '.join(PAGES)}; leave out --web to "
            "watch a bot play it"
        )
    return game


def check_bot(deployment: Deployment, game: str, bot: str) -> str:
    """Return "champion" or the number of an existing model; ConfigError if there is none."""
    return bot if bot == "champion" else str(deployment.registry.find(bot, game=game).model_no)


# --- Address --------------------------------------------------------------------------------------


def browser_url(url: str) -> str:
    """Return the URL for a browser on this machine: loopback if the gateway listens everywhere."""
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(parts.hostname or "")
        if address.is_unspecified:
            loopback = "127.0.0.1" if address.version == 4 else "[::1]"
            return parts._replace(netloc=f"{loopback}:{parts.port}").geturl()
    return url


def network_url_text(url: str, hosts: Sequence[str]) -> str:
    """Describe the URL for other machines; empty if the gateway listens at one address only."""
    if browser_url(url) == url:
        return ""
    parts = urlsplit(url)
    if not hosts:
        return "other machines are rejected until gateway.hosts has this machine's name"
    return (
        f"other machines use {', '.join(f'{parts.scheme}://{host}:{parts.port}' for host in hosts)}"
    )


def page_address(url: str, game: str, *, key: str, bot: str = "champion") -> str:
    """Return the page's URL; the key is in the fragment, which browsers do not send."""
    fields = {"game": game, **({} if bot == "champion" else {"bot": bot}), "key": key}
    return f"{browser_url(url)}/play#{urlencode(fields)}"


def is_running(data: DataFolder) -> bool:
    """Return whether a gateway of this folder is running."""
    return is_locked(roles_folder(data) / "gateway.lock")


def running_url(data: DataFolder) -> str | None:
    """Return the URL of this folder's gateway; None if none runs or its URL is not known yet."""
    if not is_running(data):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        url = json.loads((roles_folder(data) / "gateway.json").read_text())["report"].get("url")
        return str(url) if url else None
    return None


def play_error(url: str, game: str, *, key: str) -> str:
    """Return why a page with this key cannot play at the gateway now; empty if it can."""
    try:
        answer = urllib3.request(
            "GET",
            f"{browser_url(url)}/v1/games/{game}",
            headers={"Authorization": f"Bearer {key}"},
            retries=False,
            timeout=_ANSWER_S,
        )
    except urllib3.exceptions.SSLError:
        # The certificate is for the name that players use, so this machine cannot check further.
        return ""
    except urllib3.exceptions.HTTPError as error:
        return f"unreachable: {error}"
    return (
        ""
        if answer.status == _OK
        else f"{answer.status}: {answer.data[:200].decode(errors='replace')}"
    )


def await_gateway(data: DataFolder, game: str, *, key: str, timeout_s: float = 20.0) -> str:
    """Return the URL of the running gateway once it accepts this key; LinkFailed if it does not."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        url = running_url(data)
        problem = play_error(url, game, key=key) if url else "it has not reported its URL yet"
        if url and not problem:
            return url
        if time.monotonic() >= deadline_s:
            raise LinkFailed(
                "not_ready",
                f"the gateway of {data.root} does not accept the page's key after "
                f"{timeout_s:.0f} s ({problem}); check 'understudy status --data {data.root}', and "
                "that the gateway and this command use the same models.url",
            )
        time.sleep(_LOOK_EVERY_S)


# --- Saved key and port ---------------------------------------------------------------------------


def play_key(deployment: Deployment, game: str) -> str:
    """Return the key for a page of this game: the same every time, a new one if it was revoked.

    Also registers the game, since such a key may not register anything.
    """
    # Imported late: Gymnasium is slow to import, and `up` does not need it.
    from understudy.training.env_info import GameChoice, inspect_env

    deployment.registry.register(inspect_env(GameChoice(game=game)).spec)
    keys = deployment.keys
    saved = _read_state(deployment.data)
    keys_by_game = saved["keys"] if isinstance(saved.get("keys"), dict) else {}
    with contextlib.suppress(KeyError, TypeError, AttributeError, Refused):
        keys.follow()
        keys.check(keys_by_game[game])
        return str(keys_by_game[game])
    key, _ = keys.create(["play"], game=game, label=f"play page, {game}")
    _write_state(deployment.data, {**saved, "keys": {**keys_by_game, game: key}})
    return key


def saved_port(data: DataFolder) -> int:
    """Return the page's last port, or 0; a browser finds its stored data only at the same URL."""
    port = _read_state(data).get("port")
    return port if isinstance(port, int) and 0 < port < 1 << 16 else 0


def save_port(data: DataFolder, port: int) -> None:
    """Save the port for the next start."""
    if port != saved_port(data):
        _write_state(data, {**_read_state(data), "port": port})


def is_free(host: str, port: int) -> bool:
    """Return whether a gateway can listen there now."""
    with contextlib.suppress(OSError):
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            if os.name != "nt":
                # As servers do: closing connections of the previous server must not block the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return True
    return False


def _read_state(data: DataFolder) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        fields = json.loads((data.root / _STATE_FILE).read_text())
        return fields if isinstance(fields, dict) else {}
    return {}


def _write_state(data: DataFolder, fields: dict[str, Any]) -> None:
    write_file(data.root / _STATE_FILE, json.dumps(fields).encode(), mode=0o600)
