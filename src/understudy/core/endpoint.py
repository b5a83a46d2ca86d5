"""The address of a server that speaks an API of AWS: what it may be, and that nothing travels in the open unasked."""

import ipaddress
from urllib.parse import urlsplit

from understudy.core.errors import ConfigError


def check_endpoint(endpoint: str, *, insecure: bool) -> None:
    """ConfigError for what is no address of a server, or plain HTTP that would leave this machine."""
    try:
        split = urlsplit(endpoint)
        host, _port = split.hostname or "", split.port
    except ValueError:
        host, split = "", urlsplit("")
    if split.scheme not in ("http", "https") or not host or split.username is not None:
        raise ConfigError(
            f"endpoint is {_shown(endpoint)!r}; give http://127.0.0.1:PORT or https://HOST, no user in it"
        )
    if split.scheme == "http" and not insecure and not is_loopback(host):
        raise ConfigError(
            f"endpoint {_shown(endpoint)} is plain http on another machine; give https://, or insecure=true where the "
            "network is your own"
        )


def is_here(endpoint: str) -> bool:
    """Whether an endpoint is on this machine."""
    return is_loopback(urlsplit(endpoint).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(endpoint: str) -> str:
    """Without a user, whose password nobody should read in an error."""
    scheme, found, rest = endpoint.partition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"[:80]
