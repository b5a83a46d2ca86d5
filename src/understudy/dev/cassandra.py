"""Apache Cassandra: one node with passwords; a write is acknowledged when its commit log is synced."""

import logging
import ssl
from typing import Any

from understudy.dev.ports import HOST
from understudy.dev.recipe import Launch, Place
from understudy.dev.tools import client_trouble, java_trouble, must_find

_DEFAULT = "cassandra"
"""The superuser that a new node makes itself, and its password."""
_ASK_S = 5.0

_YAML = """\
cluster_name: understudy
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "{host}:{peers}"
listen_address: {host}
rpc_address: {host}
native_transport_port: {client}
storage_port: {peers}
num_tokens: 1
auto_bootstrap: false
storage_compatibility_mode: NONE
authenticator: PasswordAuthenticator
authorizer: CassandraAuthorizer
role_manager: CassandraRoleManager
credentials_validity: 0ms
commitlog_sync: group
commitlog_sync_group_window: 5ms
commitlog_segment_size: 16MiB
concurrent_compactors: 1
memtable_flush_writers: 1
auto_snapshot: false
disk_failure_policy: die
commit_failure_policy: die
"""
_LOGBACK = """\
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{ISO8601} %-5level %logger{0}: %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="OUT"/></root>
</configuration>
"""
_JVM = (
    "-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError",
    "--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens", "java.base/java.io=ALL-UNNAMED",
    "--add-exports", "java.base/jdk.internal.ref=ALL-UNNAMED",
)  # fmt: skip
_SETTINGS = {
    "cassandra-foreground": "yes",
    "cassandra.memtable.row_overhead_size": "180",
    "cassandra.superuser_setup_delay_ms": "0",
    "cassandra.ring_delay_ms": "0",
    "cassandra.skip_wait_for_gossip_to_settle": "0",
    "cassandra.shutdown_announce_in_ms": "0",
}


class Cassandra:
    """The recipe of one Cassandra node."""

    ports = ("client", "peers")
    keeps_data = True
    tls: ssl.SSLContext | None = None
    """How it is asked where its settings want TLS."""

    def trouble(self) -> str | None:
        return java_trouble(range(17, 18)) or client_trouble("cassandra")

    def prepare(self, place: Place) -> None:
        (place.folder / "cassandra.yaml").write_text(_YAML.format(host=HOST, **place.ports))
        (place.folder / "logback.xml").write_text(_LOGBACK)

    def launch(self, place: Place) -> Launch:
        jars, here = place.package / "lib", place.folder
        (agent,) = jars.glob("jamm-*.jar")
        settings = {
            **_SETTINGS, "logback.configurationFile": (here / "logback.xml").as_uri(),
            "cassandra.config": (here / "cassandra.yaml").as_uri(), "cassandra.storagedir": str(here / "data"),
        }  # fmt: skip
        return Launch([
            must_find("java"), *_JVM, f"-javaagent:{agent}", "-cp", f"{jars}/*",
            *(f"-D{name}={value}" for name, value in settings.items()), "org.apache.cassandra.service.CassandraDaemon",
        ])  # fmt: skip

    def ask(self, place: Place) -> None:
        who = place.credentials
        with _Session(place, who["username"], who["password"], tls=self.tls) as session:
            session.execute("SELECT release_version FROM system.local")

    def welcome(self, place: Place) -> None:
        """Make our own superuser, and leave none whose password everybody knows; may be done again."""
        who = place.credentials
        try:
            self.ask(place)
        except Exception:
            self._make_role(place)
        with _Session(place, who["username"], who["password"], tls=self.tls) as session:
            session.execute(f"DROP ROLE IF EXISTS {_DEFAULT}")

    def _make_role(self, place: Place) -> None:
        who = place.credentials
        with _Session(place, _DEFAULT, _DEFAULT, tls=self.tls) as session:
            session.execute(
                f"CREATE ROLE IF NOT EXISTS {who['username']} WITH SUPERUSER = true AND LOGIN = true "
                f"AND PASSWORD = '{who['password']}'"
            )


class _Session:
    """A session for a few statements, as one user."""

    def __init__(self, place: Place, user: str, password: str, *, tls: ssl.SSLContext | None) -> None:
        from cassandra.auth import PlainTextAuthProvider
        from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
        from cassandra.policies import WhiteListRoundRobinPolicy

        # Until the server is there, the driver has much to say to whoever takes no logs.
        logging.getLogger("cassandra").addHandler(logging.NullHandler())
        profile = ExecutionProfile(load_balancing_policy=WhiteListRoundRobinPolicy([HOST]), request_timeout=_ASK_S)
        self._cluster = Cluster(
            [HOST], port=place.ports["client"], auth_provider=PlainTextAuthProvider(user, password),
            execution_profiles={EXEC_PROFILE_DEFAULT: profile}, connect_timeout=_ASK_S,
            control_connection_timeout=_ASK_S, schema_metadata_enabled=False, token_metadata_enabled=False,
            protocol_version=5, ssl_context=tls,
        )  # fmt: skip

    def __enter__(self) -> Any:
        try:
            return self._cluster.connect()
        except BaseException:
            self._cluster.shutdown()
            raise

    def __exit__(self, *_error: object) -> None:
        self._cluster.shutdown()
