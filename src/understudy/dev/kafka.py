"""Apache Kafka: one node that is broker and controller; clients log in with a password (SASL/PLAIN)."""

import logging
import os
import subprocess
from pathlib import Path

from understudy.core.errors import ServerFailed
from understudy.dev.ports import HOST
from understudy.dev.recipe import Launch, Place
from understudy.dev.tools import client_trouble, java_trouble, must_find, plain_environment

_CLUSTER = "AAAAAAAAQACAAAAAAAAAAA"
_ASK_S = 3.0
_SILENT = logging.Logger("kafka probe", level=logging.CRITICAL + 1)
_FORMAT_S = 120.0
_PROPERTIES = """\
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
listener.name.client.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
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
  <Appenders><Console name="OUT"><PatternLayout pattern="%d %-5level %c{1}: %m%n"/></Console></Appenders>
  <Loggers><Root level="INFO"><AppenderRef ref="OUT"/></Root></Loggers>
</Configuration>
"""


class Kafka:
    """The recipe of one Kafka node."""

    ports = ("client", "controller")
    keeps_data = True

    def trouble(self) -> str | None:
        return java_trouble(range(17, 100)) or client_trouble("confluent_kafka")

    def prepare(self, place: Place) -> None:
        settings, data = place.folder / "server.properties", place.folder / "data"
        # Paths in it are relative: Kafka would read a comma as a list, and other letters than English ones wrongly.
        text = _PROPERTIES.format(host=HOST, **place.ports, **place.credentials)
        with os.fdopen(os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        (place.folder / "log4j2.xml").write_text(_LOG4J)
        if not (data / "meta.properties").exists():
            words: list[str | Path] = [
                must_find("java"), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", f"{place.package / 'lib'}/*",
                "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", settings,
            ]  # fmt: skip
            done = subprocess.run(
                words, cwd=place.folder, env=plain_environment(), stdin=subprocess.DEVNULL, timeout=_FORMAT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise ServerFailed(f"kafka could not make its data folder {data}:\n{done.stdout[-2000:].strip()}")

    def launch(self, place: Place) -> Launch:
        return Launch([
            must_find("java"), "-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-XX:+ExitOnOutOfMemoryError", f"-Dlog4j2.configurationFile={place.folder / 'log4j2.xml'}",
            "-cp", f"{place.package / 'lib'}/*", "kafka.Kafka", place.folder / "server.properties",
        ])  # fmt: skip

    def ask(self, place: Place) -> None:
        from confluent_kafka.admin import AdminClient

        who = place.credentials
        admin = AdminClient({
            "bootstrap.servers": place.address, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN",
            "sasl.username": who["username"], "sasl.password": who["password"], "log_level": 0,
        }, logger=_SILENT)  # fmt: skip
        found = admin.list_topics(timeout=_ASK_S)
        if not found.brokers:
            raise ServerFailed("kafka answered and named no broker yet")

    def welcome(self, place: Place) -> None:
        """Nothing: the password stands in its settings."""
