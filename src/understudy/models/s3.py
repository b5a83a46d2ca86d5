"""Objects of S3 and of what speaks its API: where it is, and with whose keys.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

Keys come from the file that `credentials` names, else from the profile that `profile` names, else from where the
vendor's tools look; see `core/aws_keys.py`. They are never part of the address.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.store import S3Store

from understudy.core.aws_keys import AwsKeys, Profile, find_keys, source_of_keys
from understudy.core.endpoint import check_endpoint
from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.location import Location
from understudy.models.cloud_trouble import Whereabouts

if TYPE_CHECKING:
    from obstore.store import S3Credential

_PATIENCE_S = 15.0
"""How long a call that fails is tried again; whoever called decides what then."""
_ASKED_FOR = timedelta(minutes=5)
"""How long keys are kept that a profile gets from elsewhere, before they are asked for again."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
"""More than AWS allows today: buckets of old, and other servers, have such names."""
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = ("credentials", "endpoint", "insecure", "profile", "region")


def open_s3(location: Location) -> tuple[S3Store, Whereabouts]:
    """The store of a bucket, and where it is; nothing is asked of the network yet."""
    location.refuse_others(_OPTIONS)
    bucket = _bucket(location)
    endpoint = location.text("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        check_endpoint(endpoint, insecure=location.flag("insecure"))
    credentials, profile = location.text("credentials"), location.text("profile")
    keys = find_keys(credentials=credentials, profile=profile)
    region = location.text("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = region or (keys.region if keys else "") or "us-east-1"
    if not _REGION.fullmatch(region):
        raise ConfigError(f"region of s3://{bucket} is {region[:40]!r}; give one such as eu-west-1")
    where = Whereabouts(
        f"s3://{bucket}{'/' * bool(location.path)}{location.path}", bucket=bucket, region=region,
        endpoint=endpoint or "", keys_from=source_of_keys(credentials=credentials, profile=profile),
    )  # fmt: skip
    store = S3Store(
        bucket,
        prefix=location.path or None,
        region=region,
        # Keys that are handed over by themselves are mixed with nothing in the environment.
        **({"credential_provider": _provider(keys)} if keys else {}),  # type: ignore[arg-type]
        **({"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}),  # type: ignore[arg-type]
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=30),
        },
        retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=_PATIENCE_S)},
    )
    return store, where


def _bucket(location: Location) -> str:
    if len(location.hosts) != 1:
        raise ConfigError("s3:// names no bucket; write s3://BUCKET/PATH")
    name, port = location.hosts[0]
    if port is not None or not _BUCKET.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is no name of a bucket; write s3://BUCKET/PATH, BUCKET of a-z 0-9 . -")
    return name


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
    return _asked(keys)


def _asked(profile: Profile) -> "Callable[[], S3Credential]":
    """Keys of a role, a single sign-on or a program, asked for again before they are over."""
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = botocore.session.Session(profile=profile.name)
        if profile.file:
            session.set_config_variable("credentials_file", profile.file)
        return Boto3CredentialProvider(session, ttl=_ASKED_FOR)
    except (BotoCoreError, ClientError, ValueError) as error:
        raise ConfigError(f"profile [{profile.name}] gives no keys: {error}; log in, or correct it") from None
