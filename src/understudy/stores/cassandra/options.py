"""What an address `cassandra://HOST:PORT,HOST/KEYSPACE?option=value` says, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from understudy.core.errors import ConfigError
from understudy.core.location import Credentials, Location, read_credentials

PORT = 9042
_KNOWN = (
    "ca", "certificate", "check_hostname", "consistency", "credentials", "datacenter", "in_flight", "key",
    "patience_s", "protocol", "replication", "timeout_s", "tls", "ttl_s",
)  # fmt: skip
_CONSISTENCIES = ("ONE", "LOCAL_ONE", "QUORUM", "LOCAL_QUORUM", "EACH_QUORUM", "ALL")
_KEYSPACE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,47}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to reach a keyspace, and how to write and read there."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    credentials: Credentials | None = None
    datacenter: str = ""
    """Whose nodes are asked; empty: that of the first host that answers."""
    consistency: str = "LOCAL_QUORUM"
    replication: Mapping[str, int] | int = 3
    """Copies, or copies per datacenter; used by `init` alone."""
    ttl_s: int | None = None
    """How long chunks are kept; 0: for ever; None: as it is, at first for ever. Used by `init` and `migrate` alone."""
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    check_hostname: bool = True
    """Whether a node's certificate must hold the name or address by which the node is reached."""
    patience_s: float = 20.0
    """How long a call tries again while no server answers."""
    timeout_s: float = 10.0
    """How long one request may take."""
    protocol: int = 5
    """The version of the native protocol; 4 for servers that know no newer one."""
    in_flight: int = 64
    """How many requests are on their way at once."""

    @property
    def address(self) -> str:
        """The hosts, as text."""
        return ",".join(f"{name}:{port}" for name, port in self.hosts)


def read_options(location: Location) -> Options:
    """The options of an address; ConfigError says which one is wrong."""
    location.refuse_others(_KNOWN)
    if not location.hosts:
        raise ConfigError("cassandra:// names no host; write cassandra://HOST:PORT,HOST2/KEYSPACE")
    for host, port in location.hosts:
        if port == 0:
            raise ConfigError(f"{host}:0 has no port to connect to; give the port of a node, such as {host}:{PORT}")
    if not _KEYSPACE.fullmatch(location.path):
        raise ConfigError(
            f"keyspace {location.path[:80]!r} is not allowed; give 1 to 48 letters, digits and _, such as "
            f"cassandra://{location.hosts[0][0]}/understudy"
        )
    if location.path.lower().partition("_")[0] == "system":
        raise ConfigError(f"keyspace {location.path} is one of Cassandra's own; give another name, such as understudy")
    if location.text("key") and not location.text("certificate"):
        raise ConfigError("key of cassandra:// is given without a certificate; add certificate=FILE")
    consistency = location.text("consistency", "LOCAL_QUORUM").upper()
    if consistency not in _CONSISTENCIES:
        raise ConfigError(f"consistency {consistency!r} is unknown; give one of {', '.join(_CONSISTENCIES)}")
    credentials = location.text("credentials")
    return Options(
        hosts=tuple((name, PORT if port is None else port) for name, port in location.hosts),
        keyspace=location.path.lower(),
        credentials=read_credentials(credentials) if credentials else None,
        datacenter=location.text("datacenter"),
        consistency=consistency,
        replication=_replication(location.text("replication", "3")),
        ttl_s=location.whole("ttl_s", 7_776_000, most=630_000_000) if "ttl_s" in location.options else None,
        tls=location.flag("tls", default=bool(location.text("ca") or location.text("certificate"))),
        ca=location.text("ca"),
        certificate=location.text("certificate"),
        key=location.text("key"),
        check_hostname=location.flag("check_hostname", default=True),
        patience_s=location.number("patience_s", 20.0, least=0.0, most=3600.0),
        timeout_s=location.number("timeout_s", 10.0, least=0.1, most=600.0),
        protocol=location.whole("protocol", 5, least=4, most=5),
        in_flight=location.whole("in_flight", 64, least=1, most=4096),
    )


def _replication(text: str) -> Mapping[str, int] | int:
    """`3`, or `dc1:3,dc2:2`."""
    try:
        if text.isdigit() and 0 < int(text) < 1000:
            return int(text)
        pairs = [part.split(":") for part in text.split(",")]
        copies = {name: int(count) for name, count in pairs}
        if len(copies) < len(pairs):
            raise ConfigError(f"replication {text[:80]!r} names a datacenter twice; name it once")
    except ValueError:
        copies = {}
    if not copies or any(
        not 0 < count < 1000 or not re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name, count in copies.items()
    ):
        raise ConfigError(f"replication {text[:80]!r} cannot be read; give copies, such as 3, or dc1:3,dc2:2")
    return copies
