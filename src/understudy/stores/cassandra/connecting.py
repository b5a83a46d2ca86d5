"""Connecting to the servers: who we are, by TLS or not, tried again while that may help."""

import ssl
import time
from collections import Counter
from collections.abc import Mapping

from understudy.core.errors import ConfigError
from understudy.stores.cassandra.driver import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ConsistencyLevel,
    DCAwareRoundRobinPolicy,
    DefaultEndPoint,
    ExecutionProfile,
    ExponentialReconnectionPolicy,
    FallthroughRetryPolicy,
    PlainTextAuthProvider,
    Session,
    TokenAwarePolicy,
    UnresolvableContactPoints,
)
from understudy.stores.cassandra.failures import FAILED, places, refusal
from understudy.stores.cassandra.options import Options

SETTLE_S = 2.0
"""How long a refused login is tried again: a new server opens its port before it knows its first user."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


def connect(options: Options) -> tuple[Cluster, Session]:
    """A session without a keyspace; one line says why there is none."""
    start, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        cluster = _cluster(options)
        try:
            return cluster, cluster.connect()
        except UnresolvableContactPoints as error:
            raise ConfigError(f"no host of {places(options)} has an address; check the host names") from error
        except (*FAILED, OSError) as error:
            cluster.shutdown()
            trouble = refusal(error, options, nodes(cluster))
            patience_s = SETTLE_S if isinstance(trouble, ConfigError) else options.patience_s
            if time.monotonic() - start + pause_s > min(patience_s, options.patience_s):
                raise trouble from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def nodes(cluster: Cluster) -> Mapping[str, int]:
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
