"""Objects of S3 and of what speaks its API: where it is, and with whose keys.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

Keys come from the file that `credentials` names, else from the profile that `profile` names, else from where the
vendor's tools look; see `core/aws_keys.py`. They are never part of the address.
"""

import importlib.util
import ipaddress
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.store import S3Store

from understudy.core.aws_keys import AwsKeys, Profile, find_keys
from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.location import Location

if TYPE_CHECKING:
    from obstore.store import S3Credential

_PATIENCE_S = 15.0
"""How long a call that fails is tried again; whoever called decides what then."""
_ASKED_FOR = timedelta(minutes=5)
"""How long keys are kept that a profile gets from elsewhere, before they are asked for again."""
_OPTIONS = ("credentials", "endpoint", "insecure", "profile", "region")


def open_s3(location: Location) -> S3Store:
    """The store of a bucket; nothing is asked of the network yet."""
    location.refuse_others(_OPTIONS)
    if len(location.hosts) != 1:
        raise ConfigError("s3:// names no bucket; write s3://BUCKET/PATH")
    endpoint = location.text("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    keys = find_keys(credentials=location.text("credentials"), profile=location.text("profile"))
    region = location.text("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return S3Store(
        location.hosts[0][0],
        prefix=location.path or None,
        region=region or (keys.region if keys else "") or "us-east-1",
        # Keys that are handed over by themselves are mixed with nothing in the environment.
        **({"credential_provider": _provider(keys)} if keys else {}),  # type: ignore[arg-type]
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


def _provider(keys: AwsKeys | Profile) -> "Callable[[], S3Credential]":
    if isinstance(keys, AwsKeys):
        given: S3Credential = {
            "access_key_id": keys.key_id, "secret_access_key": keys.secret, "token": keys.token, "expires_at": None
        }  # fmt: skip
        return lambda: given
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtra(
            f"profile [{keys.name}] gets its keys from elsewhere, which needs the package boto3; "
            "pip install 'understudy[aws]'"
        )
    return _asked(keys.name)


def _asked(profile: str) -> "Callable[[], S3Credential]":
    """Keys of a role, a single sign-on or a program, asked for again before they are over."""
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(botocore.session.Session(profile=profile), ttl=_ASKED_FOR)
    except (BotoCoreError, ClientError, ValueError) as error:
        raise ConfigError(f"profile [{profile}] gives no keys: {error}; log in, or correct it") from None
