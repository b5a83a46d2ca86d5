"""Objects of S3 and of what speaks its API: where it is, and with whose keys.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

Keys come from the file that `credentials` names, or from where the vendor's tools look: the environment, then the
shared credentials file, then the machine's own role. They are never part of the address.
"""

import configparser
import ipaddress
import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from obstore.store import S3Store

from understudy.core.errors import ConfigError
from understudy.core.location import Location

_PATIENCE_S = 15.0
"""How long a call that fails is tried again; whoever called decides what then."""
_OPTIONS = ("credentials", "endpoint", "insecure", "profile", "region")


def open_s3(location: Location) -> S3Store:
    """The store of a bucket; nothing is asked of the network yet."""
    location.refuse_others(_OPTIONS)
    if len(location.hosts) != 1:
        raise ConfigError("s3:// names no bucket; write s3://BUCKET/PATH")
    endpoint = location.text("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = location.text("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    profile, file = location.text("profile"), location.text("credentials")
    # A file that was named goes before the environment, a file that is merely there does not.
    keys = {} if os.environ.get("AWS_ACCESS_KEY_ID") and not file else _shared_keys(profile, file)
    return S3Store(
        location.hosts[0][0],
        prefix=location.path or None,
        region=region or "us-east-1",
        **keys,  # type: ignore[arg-type]
        **({"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}),  # type: ignore[arg-type]
        client_options={
            "allow_http": _may_be_plain(endpoint, insecure=location.flag("insecure")),
            "timeout": timedelta(seconds=30),
        },
        retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=_PATIENCE_S)},
    )


def _may_be_plain(endpoint: str | None, *, insecure: bool) -> bool:
    """Whether the endpoint speaks plain HTTP and may; ConfigError when models would travel in the open."""
    if endpoint is None or not endpoint.startswith("http://"):
        return False
    host = urlsplit(endpoint).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if not (is_here or insecure):
        raise ConfigError(f"endpoint {host} is plain http on another machine; give https://, or insecure=true")
    return True


def _shared_keys(profile: str, file: str) -> dict[str, str]:
    """Keys of a profile in the shared credentials file; empty where there is none, for the machine's own role."""
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    path = Path(file or os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read(path)
    except (configparser.Error, UnicodeDecodeError):
        raise ConfigError(f"{path} is no credentials file; it has a [{name}] with aws_access_key_id = ...") from None
    if not found.has_section(name):
        if profile or file:
            raise ConfigError(f"{path} has no profile [{name}]; add it, or name another one")
        return {}
    names = {
        "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }  # fmt: skip
    return {ours: found.get(name, theirs) for theirs, ours in names.items() if found.has_option(name, theirs)}
