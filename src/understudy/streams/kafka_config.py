"""How a Kafka stream is reached: its address taken apart, checked, and as the client library wants it."""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.location import Credentials, Location, read_credentials

FORM = "kafka://HOST:PORT,HOST:PORT/TOPIC?credentials=FILE&tls=true"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PORT = 9092
_SOCKET_S = 15
_FETCH_WAIT_MS = 100
_SILENT = logging.Logger("understudy.kafka.library", level=logging.CRITICAL + 1)
_OF_KAFKA = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Where a topic is, who we are, and how long to wait."""

    servers: tuple[str, ...] = ("localhost:9092",)
    """Brokers to begin with, as HOST:PORT; they name the others."""
    topic: str = "understudy"
    """It must exist; it is never made behind your back."""
    credentials: Credentials | None = None
    """None: the brokers ask for no user."""
    mechanism: str = "PLAIN"
    """How the password is shown. PLAIN sends it as it is, so use it with TLS."""
    tls: bool = False
    """Whether the listener speaks TLS."""
    ca: str = ""
    """A PEM file with the authority that signed the brokers' certificates; empty: those of the system."""
    certificate: str = ""
    """A PEM file with our own certificate and its key, where brokers ask for one."""
    partitions: int = 0
    """Use the first ones of a topic that has more; 0: all."""
    timeout_s: float = 5.0
    """How long a frame may wait for the brokers; `append` returns at most 2 s later."""
    open_timeout_s: float = 10.0
    """How long opening waits for the first answer."""
    queue_mb: float = 64.0
    """How many MB of frames may wait for the brokers; more are asked to come back later."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError(f"a Kafka address names no broker; write {FORM}")
        if not 0 < len(self.topic) <= 249 or not _LETTERS.issuperset(self.topic) or self.topic in (".", ".."):
            shown = self.topic if len(self.topic) <= 80 else f"{self.topic[:80]}..."
            raise ConfigError(f"{shown!r} is no name of a topic; write {FORM}, TOPIC of 1 to 249 of A-Z a-z 0-9 . _ -")
        if self.topic in _OF_KAFKA:
            raise ConfigError(f"topic {self.topic!r} is Kafka's own, and no stream; name another one")
        if self.mechanism not in MECHANISMS:
            raise ConfigError(f"mechanism of kafka:// is {self.mechanism!r}; give one of {', '.join(MECHANISMS)}")
        if not self.tls and (self.ca or self.certificate):
            raise ConfigError("kafka:// has ca or certificate and no TLS; add tls=true")
        for name in ("ca", "certificate"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(f"{name} of kafka:// is {path!r}, where there is no file; give a PEM file")
        if self.partitions < 0:
            raise ConfigError(f"partitions of kafka:// is {self.partitions}; give 1 or more, or leave it out for all")
        for field in fields(self):
            if field.name in ("timeout_s", "open_timeout_s", "queue_mb") and not 0 < getattr(self, field.name) <= 2000:
                raise ConfigError(f"{field.name} of kafka:// is {getattr(self, field.name)}; give one above 0, to 2000")

    @property
    def where(self) -> str:
        """The brokers, for people."""
        return ", ".join(self.servers)

    def client(self) -> dict[str, Any]:
        """Settings that every client of the library shares."""
        protocol = ("SASL_" if self.credentials else "") + ("SSL" if self.tls else "PLAINTEXT")
        settings: dict[str, Any] = {
            "bootstrap.servers": ",".join(self.servers),
            "client.id": "understudy",
            "security.protocol": protocol,
            # It would fill stderr while a broker is away; `Trouble` keeps what matters.
            "log_level": 0,
            "logger": _SILENT,
            "socket.timeout.ms": _SOCKET_S * 1000,
            "socket.keepalive.enable": True,
            "reconnect.backoff.max.ms": 1000,
            "allow.auto.create.topics": False,
        }
        if self.credentials is not None:
            settings |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.credentials.username,
                "sasl.password": self.credentials.password,
            }
        if self.ca:
            settings["ssl.ca.location"] = self.ca
        if self.certificate:
            settings |= {"ssl.certificate.location": self.certificate, "ssl.key.location": self.certificate}
        return settings

    def producer(self) -> dict[str, Any]:
        """Settings of whoever appends: nothing is called durable before every replica in sync has it."""
        return {
            **_without(self.client(), "allow.auto.create.topics"),
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": int(self.timeout_s * 1000),
            "queue.buffering.max.kbytes": max(1, int(self.queue_mb * 1e6 / 1024)),
            "queue.buffering.max.messages": 1_000_000,
            "linger.ms": min(2.0, self.timeout_s * 100),
        }

    def consumer(self) -> dict[str, Any]:
        """Settings of whoever reads: no group decides who reads what, and no position is kept by the brokers."""
        return {
            **self.client(),
            "group.id": f"understudy-{self.topic}",  # the library wants a name; nobody joins it
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_uncommitted",
            # A jump to another position waits for the fetch that is under way.
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            "fetch.error.backoff.ms": 100,
            "queued.max.messages.kbytes": 8 * 1024,
        }


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


_OPTIONS = frozenset(field.name for field in fields(KafkaConfig)) - {"servers", "topic"}


def kafka_config(location: Location) -> KafkaConfig:
    """What an address says; ConfigError for an option that nobody reads, or a file that is not there."""
    location.refuse_others(_OPTIONS)
    if not location.hosts or not location.path:
        raise ConfigError(f"kafka:// lacks {'a topic' if location.hosts else 'a broker'}; write {FORM}")
    credentials = location.text("credentials")
    return KafkaConfig(
        servers=tuple(f"{_bracketed(name)}:{port or _PORT}" for name, port in location.hosts),
        topic=location.path,
        credentials=read_credentials(credentials) if credentials else None,
        mechanism=location.text("mechanism", "PLAIN").upper(),
        tls=location.flag("tls"),
        ca=location.text("ca"),
        certificate=location.text("certificate"),
        partitions=location.whole("partitions", 0, most=100_000),
        timeout_s=location.number("timeout_s", 5.0, least=0.1, most=300.0),
        open_timeout_s=location.number("open_timeout_s", 10.0, least=0.1, most=300.0),
        queue_mb=location.number("queue_mb", 64.0, least=1.0, most=2000.0),
    )


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name
