"""How to configure, launch and probe each kind of server.

Kinesis has two: `kinesis-local` reshards like the real one, `kinesalite` is much faster. Neither
checks credentials. Both would listen on every address of the machine; a script that Node loads
first restricts them to loopback. S3 is versitygw on a folder, or moto in memory without versitygw.
"""

import contextlib
import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.core.errors import ServerFailed
from understudy.dev.packages import (
    client_problem,
    find,
    java_problem,
    missing,
    must_find,
    server_environment,
)
from understudy.dev.process import HOST

BUCKET = "understudy"
"""A bucket that is created with the S3 server."""
_ASK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFolder:
    """The files of one server: its data, ports, credentials, and the package that it runs from."""

    folder: Path
    package: Path
    ports: Mapping[str, int]
    credentials: Mapping[str, str]
    credentials_file: Path

    @property
    def address(self) -> str:
        return f"{HOST}:{self.ports['client']}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and extra environment; secrets are in files or the environment only."""

    words: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to configure, launch and probe one kind of server."""

    ports: Sequence[str] = ("client",)
    """Names of the ports it needs; "client" is the one that clients connect to."""
    keeps_data: bool = True
    """Whether acknowledged data outlive the process."""
    problem: Callable[[], str | None]
    """Why it cannot run here, even if it is cached; None if it can."""
    prepare: Callable[[ServerFolder], None] = lambda place: None
    """Write its settings before every start; existing data stay."""
    launch: Callable[[ServerFolder], Launch]
    """The command that runs it in the foreground."""
    probe: Callable[[ServerFolder], None]
    """Send a real request; raises the client's error while the server does not respond."""
    initialise: Callable[[ServerFolder], None] = lambda place: None
    """Set the server up once it responds: once per data folder, or after every start if it keeps no
    data. Must be idempotent."""


# Apache Cassandra: one node with passwords; a write is acknowledged when its commit log is synced.

_DEFAULT_ROLE = "cassandra"
"""Both the name and the password of the superuser that a new node creates."""

_CASSANDRA_YAML = """\
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
_CASSANDRA_JVM = (
    "-Xms64m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "--add-opens",
    "java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens",
    "java.base/java.io=ALL-UNNAMED",
    "--add-exports",
    "java.base/jdk.internal.ref=ALL-UNNAMED",
)
_CASSANDRA_SETTINGS = {
    "cassandra-foreground": "yes",
    "cassandra.memtable.row_overhead_size": "180",
    "cassandra.superuser_setup_delay_ms": "0",
    "cassandra.ring_delay_ms": "0",
    "cassandra.skip_wait_for_gossip_to_settle": "0",
    "cassandra.shutdown_announce_in_ms": "0",
}


def prepare_cassandra(place: ServerFolder) -> None:
    (place.folder / "cassandra.yaml").write_text(_CASSANDRA_YAML.format(host=HOST, **place.ports))
    (place.folder / "logback.xml").write_text(_LOGBACK)


def _launch_cassandra(place: ServerFolder) -> Launch:
    jars = place.package / "lib"
    (agent,) = jars.glob("jamm-*.jar")
    settings = {
        **_CASSANDRA_SETTINGS,
        "logback.configurationFile": (place.folder / "logback.xml").as_uri(),
        "cassandra.config": (place.folder / "cassandra.yaml").as_uri(),
        "cassandra.storagedir": str(place.folder / "data"),
    }
    return Launch(
        [
            must_find("java"),
            *_CASSANDRA_JVM,
            f"-javaagent:{agent}",
            "-cp",
            f"{jars}/*",
            *(f"-D{name}={value}" for name, value in settings.items()),
            "org.apache.cassandra.service.CassandraDaemon",
        ]
    )


def probe_cassandra(place: ServerFolder, *, tls: ssl.SSLContext | None = None) -> None:
    with _cassandra_session(place, place.credentials, tls) as session:
        session.execute("SELECT release_version FROM system.local")


def init_cassandra(place: ServerFolder, *, tls: ssl.SSLContext | None = None) -> None:
    """Create our own superuser, and drop the default one, whose password is public."""
    own = place.credentials
    try:
        probe_cassandra(place, tls=tls)
    except Exception:
        with _cassandra_session(
            place, {"username": _DEFAULT_ROLE, "password": _DEFAULT_ROLE}, tls
        ) as session:
            session.execute(
                f"CREATE ROLE IF NOT EXISTS {own['username']} WITH SUPERUSER = true "
                f"AND LOGIN = true AND PASSWORD = '{own['password']}'"
            )
    with _cassandra_session(place, own, tls) as session:
        session.execute(f"DROP ROLE IF EXISTS {_DEFAULT_ROLE}")


@contextlib.contextmanager
def _cassandra_session(
    place: ServerFolder, user: Mapping[str, str], tls: ssl.SSLContext | None
) -> Iterator[Any]:
    """A session of one user, for a few statements."""
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
    from cassandra.policies import WhiteListRoundRobinPolicy

    # Until the server responds, the driver logs a lot, which Python prints if no handler is set.
    logging.getLogger("cassandra").addHandler(logging.NullHandler())
    profile = ExecutionProfile(
        load_balancing_policy=WhiteListRoundRobinPolicy([HOST]), request_timeout=_ASK_S
    )
    cluster = Cluster(
        [HOST],
        port=place.ports["client"],
        auth_provider=PlainTextAuthProvider(user["username"], user["password"]),
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        connect_timeout=_ASK_S,
        control_connection_timeout=_ASK_S,
        schema_metadata_enabled=False,
        token_metadata_enabled=False,
        protocol_version=5,
        ssl_context=tls,
    )
    try:
        yield cluster.connect()
    finally:
        cluster.shutdown()


# Apache Kafka: one node that is broker and controller; clients log in with a password (SASL/PLAIN).

_KAFKA_CLUSTER = "AAAAAAAAQACAAAAAAAAAAA"
_KAFKA_ASK_S = 3.0
_SILENT = logging.Logger("kafka probe", level=logging.CRITICAL + 1)
_KAFKA_FORMAT_S = 120.0
_KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=CLIENT://{host}:{client},CONTROLLER://{host}:{controller}
advertised.listeners=CLIENT://{host}:{client}
listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=CLIENT
controller.listener.names=CONTROLLER
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.client.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required \
username="{username}" password="{password}" user_{username}="{password}";
log.dirs=data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=300
log.cleaner.dedupe.buffer.size=2097152
auto.create.topics.enable=false
"""
_LOG4J = """\
<Configuration status="WARN">
  <Appenders>
    <Console name="OUT"><PatternLayout pattern="%d %-5level %c{1}: %m%n"/></Console>
  </Appenders>
  <Loggers><Root level="INFO"><AppenderRef ref="OUT"/></Root></Loggers>
</Configuration>
"""


def prepare_kafka(place: ServerFolder) -> None:
    settings = place.folder / "server.properties"
    data = place.folder / "data"
    # Paths in the file are relative: Kafka splits at commas and misreads non-ASCII characters.
    text = _KAFKA_PROPERTIES.format(host=HOST, **place.ports, **place.credentials)
    with os.fdopen(os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    (place.folder / "log4j2.xml").write_text(_LOG4J)
    if not (data / "meta.properties").exists():
        words: list[str | Path] = [
            must_find("java"),
            "-Xmx128m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{place.package / 'lib'}/*",
            "kafka.tools.StorageTool",
            "format",
            "-t",
            _KAFKA_CLUSTER,
            "-c",
            settings,
        ]
        done = subprocess.run(
            words,
            cwd=place.folder,
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            timeout=_KAFKA_FORMAT_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(
                f"kafka could not format its data folder {data}; correct what its output reports:\n"
                f"{done.stdout[-2000:].strip()}"
            )


def _launch_kafka(place: ServerFolder) -> Launch:
    return Launch(
        [
            must_find("java"),
            "-Xms64m",
            "-Xmx256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-XX:+ExitOnOutOfMemoryError",
            f"-Dlog4j2.configurationFile={place.folder / 'log4j2.xml'}",
            "-cp",
            f"{place.package / 'lib'}/*",
            "kafka.Kafka",
            place.folder / "server.properties",
        ]
    )


def _probe_kafka(place: ServerFolder) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(
        {
            "bootstrap.servers": place.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": place.credentials["username"],
            "sasl.password": place.credentials["password"],
            "log_level": 0,
        },
        logger=_SILENT,
    )
    if not admin.list_topics(timeout=_KAFKA_ASK_S).brokers:
        raise ServerFailed("kafka responded without a broker; it is still starting")


# Servers with AWS APIs.

_LOOPBACK = """\
const net = require('net'), listen = net.Server.prototype.listen
net.Server.prototype.listen = function (port, ...rest) {
  if (typeof port !== 'number' && typeof port !== 'string')
    return listen.call(this, { ...port, host: 'HOST' }, ...rest)
  if (typeof rest[0] === 'string') rest.shift()
  return listen.call(this, Number(port), 'HOST', ...rest)
}
""".replace("HOST", HOST)
_KINESIS_ACTIONS = (
    "CREATE_STREAM",
    "DELETE_STREAM",
    "MERGE_SHARDS",
    "SPLIT_SHARD",
    "UPDATE_SHARD_COUNT",
    "REGISTER_STREAM_CONSUMER",
    "DEREGISTER_STREAM_CONSUMER",
    "START_STREAM_ENCRYPTION",
    "STOP_STREAM_ENCRYPTION",
    "UPDATE_STREAM_MODE",
)


def aws_client(service: str, url: str, credentials: Mapping[str, str]) -> Any:
    """A boto3 client with short timeouts, no retries and no settings from the environment."""
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(
        aws_access_key_id=credentials["access_key_id"],
        aws_secret_access_key=credentials["secret_access_key"],
        region_name=credentials["region"],
    )
    config = Config(
        connect_timeout=_ASK_S,
        read_timeout=_ASK_S,
        retries={"total_max_attempts": 1},
        proxies={},
        s3={"addressing_style": "path"},
    )
    return session.client(service, endpoint_url=url, config=config)


def _node_problem() -> str | None:
    return (None if find("node") else missing("node")) or client_problem("boto3")


def _prepare_node(place: ServerFolder) -> None:
    (place.folder / "loopback.cjs").write_text(_LOOPBACK)


def _launch_kinesis_local(place: ServerFolder) -> Launch:
    package = place.package / "node_modules" / "kinesis-local"
    env = {
        "KINESIS_MOCK_CERT_PATH": str(package / "server.json"),
        "KINESIS_MOCK_PLAIN_PORT": str(place.ports["client"]),
        "KINESIS_MOCK_TLS_PORT": str(place.ports["tls"]),
        "AWS_REGION": place.credentials["region"],
        "LOG_LEVEL": "WARN",
        "SHARD_LIMIT": "100",
        **{f"{action}_DURATION": "50ms" for action in _KINESIS_ACTIONS},
    }
    return Launch(
        [must_find("node"), "--require", place.folder / "loopback.cjs", package / "main.js"], env
    )


def _launch_kinesalite(place: ServerFolder) -> Launch:
    return Launch(
        [
            must_find("node"),
            "--require",
            place.folder / "loopback.cjs",
            place.package / "node_modules" / "kinesalite" / "cli.js",
            "--port",
            str(place.ports["client"]),
            "--path",
            place.folder / "data",
            "--shardLimit",
            "100",
            "--createStreamMs",
            "50",
            "--deleteStreamMs",
            "50",
            "--updateStreamMs",
            "50",
        ]
    )


def _probe_kinesis(place: ServerFolder) -> None:
    aws_client("kinesis", place.url, place.credentials).list_streams(Limit=1)


def _prepare_versity(place: ServerFolder) -> None:
    for name in ("data", "facts"):
        (place.folder / name).mkdir(exist_ok=True)


def _launch_versity(place: ServerFolder) -> Launch:
    # Object metadata are stored in extended file attributes, or in a folder if those are missing.
    facts: list[str | Path] = ["--sidecar", place.folder / "facts"]
    probe = place.folder / ".attributes"
    probe.touch()
    with contextlib.suppress(OSError, AttributeError):
        os.setxattr(probe, "user.understudy", b"1")
        facts = []
    probe.unlink(missing_ok=True)
    own = place.credentials
    return Launch(
        [
            place.package / "versitygw",
            "--quiet",
            "--region",
            own["region"],
            "--port",
            place.address,
            "posix",
            *facts,
            place.folder / "data",
        ],
        {"ROOT_ACCESS_KEY": own["access_key_id"], "ROOT_SECRET_KEY": own["secret_access_key"]},
    )


def _launch_moto(place: ServerFolder) -> Launch:
    return Launch(
        [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(place.ports["client"])]
    )


def _probe_s3(place: ServerFolder) -> None:
    aws_client("s3", place.url, place.credentials).list_buckets()


def _welcome_s3(place: ServerFolder) -> None:
    client = aws_client("s3", place.url, place.credentials)
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)


RECIPES = {
    "cassandra": Recipe(
        ports=("client", "peers"),
        problem=lambda: java_problem(range(17, 18)) or client_problem("cassandra"),
        prepare=prepare_cassandra,
        launch=_launch_cassandra,
        probe=probe_cassandra,
        initialise=init_cassandra,
    ),
    "kafka": Recipe(
        ports=("client", "controller"),
        problem=lambda: java_problem(range(17, 100)) or client_problem("confluent_kafka"),
        prepare=prepare_kafka,
        launch=_launch_kafka,
        probe=_probe_kafka,
    ),
    "kinesis": Recipe(
        ports=("client", "tls"),
        keeps_data=False,
        problem=_node_problem,
        prepare=_prepare_node,
        launch=_launch_kinesis_local,
        probe=_probe_kinesis,
    ),
    "kinesalite": Recipe(
        problem=_node_problem,
        prepare=_prepare_node,
        launch=_launch_kinesalite,
        probe=_probe_kinesis,
    ),
    "s3": Recipe(
        problem=lambda: client_problem("boto3"),
        prepare=_prepare_versity,
        launch=_launch_versity,
        probe=_probe_s3,
        initialise=_welcome_s3,
    ),
}
MOTO = Recipe(
    keeps_data=False,
    problem=lambda: client_problem("boto3") or client_problem("moto"),
    launch=_launch_moto,
    probe=_probe_s3,
    initialise=_welcome_s3,
)
