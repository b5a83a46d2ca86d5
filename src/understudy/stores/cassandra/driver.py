"""cassandra-driver, imported in one place: how to connect, and what its errors mean (its own text, and one hint)."""

import re
import ssl
import time
from collections import Counter
from collections.abc import Mapping

from understudy.core.errors import ConfigError, MissingExtra, StorageFailed, UnderstudyError, Unreachable
from understudy.stores.cassandra.options import Options

try:
    from cassandra import DependencyException
except ImportError as error:
    raise MissingExtra(f"cassandra:// needs the package {error.name}; pip install 'understudy[cassandra]'") from error
try:
    from cassandra import (
        AuthenticationFailed,
        ConsistencyLevel,
        DriverException,
        InvalidRequest,
        Unauthorized,
    )
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
    from cassandra.connection import ConnectionException, DefaultEndPoint
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
        TokenAwarePolicy,
    )
    from cassandra.protocol import ErrorMessage, RequestValidationException
    from cassandra.query import BatchStatement, BatchType
except DependencyException as error:
    raise MissingExtra(
        "cassandra-driver finds no event loop in this Python; pip install --force-reinstall cassandra-driver from a "
        "wheel, which brings libev"
    ) from error

__all__ = ["BatchStatement", "BatchType", "ConsistencyLevel", "NoHostAvailable", "Unauthorized"]

FAILED = (DriverException, NoHostAvailable, ErrorMessage, ConnectionException)
"""Whatever the driver raises."""
REFUSED = (InvalidRequest, RequestValidationException)
"""The server understood the request and rejected it."""
_WRAPPED = re.compile(r'Error from server: code=\d+ \[[^\]]*\] message="(.*)"', re.DOTALL)
"""How the driver wraps what a server said."""
_LOGIN_S = 2.0
"""How long a refused login is tried again: a new server opens its port before it knows its first user."""


def connect(options: Options) -> tuple[Cluster, Session]:
    """A session without a keyspace; one line says why there is none."""
    start_s = time.monotonic()
    pause_s = 0.05
    while True:
        cluster = _cluster(options)
        try:
            return cluster, cluster.connect()
        except (*FAILED, OSError) as error:
            cluster.shutdown()
            trouble = no_connection(error, options, nodes_of(cluster))
            patience_s = _LOGIN_S if isinstance(trouble, ConfigError) else options.patience_s
            if time.monotonic() - start_s + pause_s > min(patience_s, options.patience_s):
                raise trouble from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)


def nodes_of(cluster: Cluster) -> Mapping[str, int]:
    """How many nodes each datacenter of a cluster has, up or down; none before the first connection."""
    return Counter(host.datacenter for host in cluster.metadata.all_hosts() if host.datacenter)


def _cluster(options: Options) -> Cluster:
    level = ConsistencyLevel.name_to_value[options.consistency]
    policy = TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=options.datacenter))
    profile = ExecutionProfile(
        load_balancing_policy=policy, retry_policy=FallthroughRetryPolicy(), consistency_level=level,
        serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL, request_timeout=options.timeout_s,
    )  # fmt: skip
    credentials = options.credentials
    return Cluster(
        contact_points=[DefaultEndPoint(name, port) for name, port in options.hosts],
        auth_provider=PlainTextAuthProvider(credentials.username, credentials.password) if credentials else None,
        ssl_context=_tls(options) if options.tls else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=ExponentialReconnectionPolicy(0.25, 5.0),
        connect_timeout=options.timeout_s,
        control_connection_timeout=options.timeout_s,
        idle_heartbeat_interval=15,
        compression=False,
        protocol_version=options.protocol,
    )


def _tls(options: Options) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.certificate:
            context.load_cert_chain(options.certificate, options.key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"a TLS file of cassandra:// cannot be read: {error}; check ca, certificate and key"
        ) from None
    context.check_hostname = options.check_hostname
    return context


def short(error: BaseException) -> str:
    """The driver's text in one line of at most 200 characters; that of the first host where several failed."""
    errors = getattr(error, "errors", None)
    first = next(iter(errors.values())) if isinstance(errors, dict) and errors else error
    text = str(first).rpartition("Last error: ")[2]
    wrapped = _WRAPPED.search(text)
    return " ".join((wrapped[1] if wrapped else f"{type(first).__name__}: {text}").split())[:200]


def lasting(error: BaseException) -> UnderstudyError | None:
    """What is raised for an error that a second try does not fix; None when it may."""
    if isinstance(error, Unauthorized):
        return ConfigError(f"the Cassandra user lacks permission: {short(error)}; grant it, or use other credentials")
    if isinstance(error, REFUSED):
        return StorageFailed(
            f"Cassandra rejected a request: {short(error)}; check that its tables are as init made them"
        )
    return None


def too_long(error: BaseException, options: Options) -> Unreachable:
    """What is raised when an error did not pass in time."""
    return Unreachable(
        f"Cassandra at {options.address} did not answer for {options.patience_s:g} s ({short(error)}); nothing written "
        "since counts, try again when enough of its nodes are back"
    )


def no_connection(error: BaseException, options: Options, nodes: Mapping[str, int]) -> UnderstudyError:
    """Why there is no connection; `nodes` are those that were seen before it failed, by datacenter."""
    if nodes and options.datacenter and options.datacenter not in nodes:
        return no_datacenter(options.datacenter, nodes)
    # The driver lists hosts instead of reasons when its policy allows none of them.
    reasons = getattr(error, "errors", None)
    causes = list(reasons.values()) if isinstance(reasons, dict) else [error]
    said = f"Cassandra at {options.address} cannot be reached ({short(error)})"
    if any(isinstance(cause, AuthenticationFailed) for cause in causes):
        return ConfigError(f"{said}; check credentials=FILE")
    if any("CERTIFICATE_VERIFY_FAILED" in str(cause) for cause in causes):
        return ConfigError(f"{said}; check ca=FILE, and that the certificate holds this host's name or check_hostname")
    return Unreachable(f"{said}; check host and port, that it runs, and the options tls, ca, certificate and key")


def no_datacenter(name: str, nodes: Mapping[str, int]) -> ConfigError:
    """What is raised for a datacenter that a cluster does not have."""
    listed = ", ".join(f"{count} in {place}" for place, count in sorted(nodes.items()))
    return ConfigError(f"this cluster has no datacenter {name!r}, its nodes are {listed}; name one of those")
