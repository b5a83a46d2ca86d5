"""Addresses: where this machine opens what a gateway serves, what others use, and the play page's with its key."""

import contextlib
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlencode, urlsplit

PAGES = ("rally", "CartPole-v1")
"""Games that have a page."""


def openable(url: str) -> str:
    """A gateway's address as this machine can open it: one that listens everywhere is asked on loopback."""
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(parts.hostname or "")
        if found.is_unspecified:
            near = "127.0.0.1" if found.version == 4 else "[::1]"
            return parts._replace(netloc=f"{near}:{parts.port}").geturl()
    return url


def for_others(url: str, hosts: Sequence[str]) -> str:
    """What other machines use instead, in words; empty when the gateway listens at one address only."""
    if openable(url) == url:
        return ""
    parts = urlsplit(url)
    if not hosts:
        return "other machines are refused until gateway.hosts has this machine's name"
    return f"other machines use {', '.join(f'{parts.scheme}://{host}:{parts.port}' for host in hosts)}"


def page_address(url: str, game: str, *, key: str, bot: str = "champion") -> str:
    """What to open; the key stands behind the #, which a browser sends to nobody."""
    fields = {"game": game, **({} if bot == "champion" else {"bot": bot}), "key": key}
    return f"{openable(url)}/play#{urlencode(fields)}"
