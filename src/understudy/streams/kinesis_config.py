"""Which Kinesis stream, where, and how patiently: the settings behind `kinesis://STREAM?region=...`."""

import math
import re
from dataclasses import dataclass, fields

from understudy.core.aws import check_endpoint, is_here, source_of_keys
from understudy.core.errors import ConfigError
from understudy.core.location import Location

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORM = "kinesis://STREAM?region=eu-west-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KinesisConfig:
    """A stream's name and place, and how long to try."""

    stream: str
    """The stream's name, without its ARN."""
    region: str = ""
    """The AWS region; empty: from AWS_REGION, AWS_DEFAULT_REGION or the profile."""
    endpoint: str = ""
    """Another address than that of AWS, for a local server or a VPC endpoint."""
    profile: str = ""
    """A profile of the AWS configuration; empty: the usual chain of credentials."""
    credentials: str = ""
    """An AWS shared-credentials file that goes before the usual chain."""
    insecure: bool = False
    """Whether plain http may leave this machine."""
    poll_s: float = 0.2
    """The shortest time between two reads of a shard; AWS allows five a second."""
    list_s: float = 30.0
    """How old the list of shards may be; an ended shard or an unknown one renews it at once."""
    retry_s: float = 8.0
    """How long a call is tried again before its caller is told."""
    append_s: float = 3.0
    """The same for records that were not taken: their sender keeps them and comes back."""
    timeout_s: float = 5.0
    """How long the server may take for one answer."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.stream):
            raise ConfigError(
                f"{self.stream[:80]!r} is no name of a Kinesis stream; give 1 to 128 of A-Z a-z 0-9 _ . - as in {_FORM}"
            )
        for name, least in (("poll_s", 0.0), ("list_s", 0.0), ("retry_s", 0.0), ("append_s", 0.0), ("timeout_s", 0.1)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"{name} is {value}; give a number of seconds from {least:g}")
        if self.endpoint:
            check_endpoint(self.endpoint, insecure=self.insecure)

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine."""
        return bool(self.endpoint) and is_here(self.endpoint)

    @property
    def place(self) -> str:
        """Where the stream is looked for, for people."""
        return self.endpoint or f"AWS region {self.region or 'of the environment'}"

    @property
    def keys_from(self) -> str:
        """Where its keys come from, for people."""
        return source_of_keys(credentials=self.credentials, profile=self.profile)


def kinesis_config(location: Location) -> KinesisConfig:
    """The settings in a `kinesis://` address; ConfigError for what cannot work."""
    location.refuse_others([field.name for field in fields(KinesisConfig) if field.name != "stream"])
    if len(location.hosts) != 1 or location.hosts[0][1] is not None or location.path:
        raise ConfigError(f"a kinesis:// address names one stream and no port or path; write {_FORM}")
    return KinesisConfig(
        stream=location.hosts[0][0],
        region=location.text("region"),
        endpoint=location.text("endpoint"),
        profile=location.text("profile"),
        credentials=location.text("credentials"),
        insecure=location.flag("insecure"),
        poll_s=location.number("poll_s", 0.2, most=60.0),
        list_s=location.number("list_s", 30.0, most=3600.0),
        retry_s=location.number("retry_s", 8.0, most=600.0),
        append_s=location.number("append_s", 3.0, most=600.0),
        timeout_s=location.number("timeout_s", 5.0, least=0.1, most=600.0),
    )
