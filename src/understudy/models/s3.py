"""Objects of S3 and of what speaks its API: where it is, and with whose keys.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

Keys come from the file that `credentials` names, else from the profile that `profile` names, else from where the
vendor's tools look; see `core/aws.py`. They are never part of the address.
"""

import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.store import S3Store

from understudy.core.aws import aws_session, check_endpoint, source_of_keys
from understudy.core.errors import ConfigError
from understudy.core.location import Location
from understudy.models.cloud_trouble import Whereabouts

if TYPE_CHECKING:
    from obstore.store import S3Credential

_PATIENCE_S = 15.0
"""How long a call that fails is tried again; whoever called decides what then."""
_KEYS_FOR = timedelta(minutes=5)
"""How long keys are used before botocore is asked for them again, which renews those that expire."""
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
    session = aws_session("s3", credentials=credentials, profile=profile, region=location.text("region"))
    region = session.get_config_variable("region") or "us-east-1"
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
        credential_provider=_keys_of(session),
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


def _keys_of(session: Any) -> "Callable[[], S3Credential]":
    """The keys of a session, looked for with the first request: the role of a machine is asked over the network."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    provider = functools.cache(lambda: Boto3CredentialProvider(session, ttl=_KEYS_FOR))
    return lambda: provider()()
