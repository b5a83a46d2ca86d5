"""What streams and models on AWS share: botocore's session with its chain of credentials, and checked endpoints."""

import ipaddress
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from understudy.core.errors import ConfigError, MissingExtra

_FROM_THE_NETWORK = ("container-role", "iam-role")
"""Providers of botocore that ask the machine for the keys of its role."""


def aws_session(scheme: str, *, credentials: str = "", profile: str = "", region: str = "") -> Any:
    """A botocore session; ConfigError when a source of keys that was named holds none.

    A named credentials file or profile is the only source. Without either, botocore's chain applies: the environment,
    the shared files, and the role of the machine, which is asked with the first request and not here.
    """
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise MissingExtra(f"{scheme}:// needs the package boto3 ({error}); pip install 'understudy[aws]'") from None
    session = botocore.session.Session(profile=profile or ("default" if credentials else None))
    if credentials:
        path = str(Path(credentials).expanduser())
        session.set_config_variable("credentials_file", path)
        session.set_config_variable("config_file", path)
    if region or os.environ.get("AWS_REGION"):
        session.set_config_variable("region", region or os.environ["AWS_REGION"])
    reason = "nothing there says where they are"
    try:
        chain = session.get_component("credential_provider")
        machine = [provider for provider in chain.providers if provider.METHOD in _FROM_THE_NETWORK]
        chain.providers = [provider for provider in chain.providers if provider not in machine]
        if session.get_credentials() is not None:
            return session
        if not (credentials or profile):
            chain.providers += machine
            return session
    except (BotoCoreError, OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"{source_of_keys(credentials=credentials, profile=profile)} has no AWS keys: {reason}; it needs "
        "aws_access_key_id and aws_secret_access_key, or a source of them such as role_arn"
    )


def source_of_keys(*, credentials: str, profile: str) -> str:
    """Where the keys come from that an address with these two options uses, for people."""
    if credentials:
        return f"[{profile or 'default'}] of credentials file {credentials}"
    return f"profile [{profile}]" if profile else "AWS_ACCESS_KEY_ID, AWS_PROFILE or the role of this machine"


def check_endpoint(endpoint: str, *, insecure: bool) -> None:
    """ConfigError for what is no address of a server, or plain HTTP that would leave this machine."""
    try:
        split = urlsplit(endpoint)
        host, _port = split.hostname or "", split.port
    except ValueError:
        host, split = "", urlsplit("")
    # Without a user, whose password nobody should read in an error.
    scheme, found, rest = endpoint.partition("://")
    shown = f"{scheme}{found}{rest.rpartition('@')[2]}"[:80]
    if split.scheme not in ("http", "https") or not host or split.username is not None:
        raise ConfigError(f"endpoint is {shown!r}; give http://127.0.0.1:PORT or https://HOST, no user in it")
    if split.scheme == "http" and not insecure and not is_here(endpoint):
        raise ConfigError(
            f"endpoint {shown} is plain http on another machine; give https://, or insecure=true where the network is "
            "your own"
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
