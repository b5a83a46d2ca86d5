"""Shared parts of a Kafka stream: its address, client settings, errors and partition offsets."""

import contextlib
import logging
import re
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError, MissingExtra, UnderstudyError, Unreachable
from understudy.core.location import Credentials, Location, read_credentials

FORM = "kafka://HOST:PORT,HOST:PORT/TOPIC?credentials=FILE&tls=true"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PORT = 9092
_SOCKET_S = 15
_FETCH_WAIT_MS = 100
_SILENT = logging.Logger("understudy.kafka.library", level=logging.CRITICAL + 1)
_INTERNAL_TOPICS = (
    "__consumer_offsets",
    "__transaction_state",
    "__share_group_state",
    "__cluster_metadata",
)
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """How to reach a topic: its address, credentials and timeouts."""

    servers: tuple[str, ...] = ("localhost:9092",)
    """Bootstrap servers, as HOST:PORT; the client discovers the other brokers from them."""
    topic: str = "understudy"
    """An existing topic; it is never created automatically."""
    credentials: Credentials | None = None
    """SASL user and password; None: the brokers need no authentication."""
    mechanism: str = "PLAIN"
    """SASL mechanism. PLAIN sends the password in clear text, so use it with TLS."""
    tls: bool = False
    """Whether the listener uses TLS."""
    ca: str = ""
    """PEM file of the CA that signed the brokers' certificates; empty: the system's CAs."""
    certificate: str = ""
    """PEM file with the client certificate and its key, for brokers that require one."""
    partitions: int = 0
    """Use only this many of a topic's partitions, the first ones; 0: all."""
    timeout_s: float = 5.0
    """How long a frame may wait for the brokers; `append` returns at most 2 s later."""
    open_timeout_s: float = 10.0
    """How long each request of opening the stream waits for its response."""
    queue_mb: float = 64.0
    """MB of frames that may wait for the brokers; when full, `append` asks to retry later."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError(f"a Kafka address has no broker; write {FORM}")
        if (
            not 0 < len(self.topic) <= 249
            or not _LETTERS.issuperset(self.topic)
            or self.topic in (".", "..")
        ):
            topic = self.topic if len(self.topic) <= 80 else f"{self.topic[:80]}..."
            raise ConfigError(
                f"{topic!r} is not a valid topic name; write {FORM}, with a TOPIC of 1 to 249 "
                "characters from A-Z a-z 0-9 . _ -"
            )
        if self.topic in _INTERNAL_TOPICS:
            raise ConfigError(f"topic {self.topic!r} is internal to Kafka; use another topic")
        if self.mechanism not in MECHANISMS:
            raise ConfigError(
                f"mechanism of kafka:// is {self.mechanism!r}; use one of {', '.join(MECHANISMS)}"
            )
        if not self.tls and (self.ca or self.certificate):
            raise ConfigError("kafka:// has ca or certificate but no TLS; add tls=true")
        for name in ("ca", "certificate"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(
                    f"{name} of kafka:// is {path!r}, which is not a file; use the path of a PEM "
                    "file"
                )
        if self.partitions < 0:
            raise ConfigError(
                f"partitions of kafka:// is {self.partitions}; use 1 or more, or omit it to use all"
            )
        for field in fields(self):
            if (
                field.name in ("timeout_s", "open_timeout_s", "queue_mb")
                and not 0 < getattr(self, field.name) <= 2000
            ):
                raise ConfigError(
                    f"{field.name} of kafka:// is {getattr(self, field.name)}; use a number above "
                    "0, up to 2000"
                )

    @property
    def where(self) -> str:
        """The brokers as text, for error messages."""
        return ", ".join(self.servers)

    def client(self) -> dict[str, Any]:
        """confluent-kafka settings that producer, consumer and admin client share."""
        protocol = ("SASL_" if self.credentials else "") + ("SSL" if self.tls else "PLAINTEXT")
        settings: dict[str, Any] = {
            "bootstrap.servers": ",".join(self.servers),
            "client.id": "understudy",
            "security.protocol": protocol,
            # The library would fill stderr while a broker is down; `LastError` keeps the cause.
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
            settings |= {
                "ssl.certificate.location": self.certificate,
                "ssl.key.location": self.certificate,
            }
        return settings

    def producer(self) -> dict[str, Any]:
        """Settings of a producer: a frame is durable once every in-sync replica has it."""
        return {
            **{
                name: value
                for name, value in self.client().items()
                if name != "allow.auto.create.topics"
            },
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": int(self.timeout_s * 1000),
            "queue.buffering.max.kbytes": max(1, int(self.queue_mb * 1e6 / 1024)),
            "queue.buffering.max.messages": 1_000_000,
            "linger.ms": min(2.0, self.timeout_s * 100),
        }

    def consumer(self) -> dict[str, Any]:
        """Settings of a consumer: no group assignment, and no offsets stored by the brokers."""
        return {
            **self.client(),
            "group.id": f"understudy-{self.topic}",  # required by the library, but never joined
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_uncommitted",
            # A seek waits for the fetch in progress.
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            "fetch.error.backoff.ms": 100,
            "queued.max.messages.kbytes": 8 * 1024,
        }


_OPTIONS = frozenset(field.name for field in fields(KafkaConfig)) - {"servers", "topic"}


def kafka_config(location: Location) -> KafkaConfig:
    """Parse a `kafka://` address; ConfigError for an unknown option or a missing file."""
    location.check_options(_OPTIONS)
    if not location.hosts or not location.path:
        raise ConfigError(
            f"kafka:// lacks {'a topic' if location.hosts else 'a broker'}; write {FORM}"
        )
    credentials = location.text("credentials")
    return KafkaConfig(
        servers=tuple(
            f"{f'[{name}]' if ':' in name else name}:{port or _PORT}"
            for name, port in location.hosts
        ),
        topic=location.path,
        credentials=read_credentials(credentials) if credentials else None,
        mechanism=location.text("mechanism", "PLAIN").upper(),
        tls=location.flag("tls"),
        ca=location.text("ca"),
        certificate=location.text("certificate"),
        partitions=location.integer("partitions", 0, most=100_000),
        timeout_s=location.number("timeout_s", 5.0, least=0.1, most=300.0),
        open_timeout_s=location.number("open_timeout_s", 10.0, least=0.1, most=300.0),
        queue_mb=location.number("queue_mb", 64.0, least=1.0, most=2000.0),
    )


def kafka_library() -> Any:
    """The module `confluent_kafka`; MissingExtra with the install command if it is missing."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(
            f"a Kafka stream needs the package confluent-kafka ({error}); pip install "
            "'understudy[kafka]'"
        ) from None
    return confluent_kafka


_HINTS = {
    "UNKNOWN_TOPIC_OR_PART": "create it with `understudy stream init URL --partitions 4` or "
    "kafka-topics.sh, or correct the address",
    "INVALID_TOPIC": "correct the address, or create the topic with kafka-topics.sh",
    "AUTHORIZATION_FAILED": "the user lacks permission; it needs Describe, Read and Write on the "
    "topic, and Describe on group understudy-TOPIC",
    "MSG_SIZE_TOO_LARGE": "set max.message.bytes of the topic to 1048588",
    "_AUTHENTICATION": "check the credentials file and mechanism=",
    "_SSL": "check that this listener uses TLS, that ca= is the CA of its certificate, that the "
    "certificate matches the host name, and whether the listener requires certificate=",
    "HTTP": "this is a web server, not a Kafka broker; correct host and port",
}
"""The next step for each kind of error that waiting does not resolve."""
_AWAY_HINT = (
    "check that a broker is running there, that this is its client port, and whether it requires "
)
_INVALID_TOPIC = frozenset(
    (
        "TOPIC_EXCEPTION",
        "INVALID_PARTITIONS",
        "INVALID_REPLICATION_FACTOR",
        "INVALID_CONFIG",
        "POLICY_VIOLATION",
    )
)
_TLS_WORDS = ("SSL handshake", "SSL alert", "SSL routines")
_HTTP_SIZE = f"Invalid response size {int.from_bytes(b'HTTP')}"
"""How the library reports a response that starts with "HTTP"."""
_CONNECTION_DETAILS = re.compile(
    r"^(\w+://)?[^/\s]+/\w+: | \(after \d+ms in state \w+(, \d+ [^)]*\(s\) suppressed)?\)"
)
"""Connection name and state that the library adds to its messages."""


def _condition(name: str, text: str) -> str:
    """The key of `_HINTS` for an error of the library; empty for others, such as no broker."""
    if name in _INVALID_TOPIC:
        return "INVALID_TOPIC"
    if name.endswith("_AUTHORIZATION_FAILED"):
        return "AUTHORIZATION_FAILED"
    if _HTTP_SIZE in text:
        return "HTTP"
    if any(word in text for word in _TLS_WORDS):
        return "_SSL"
    return name if name in _HINTS else ""


class LastError:
    """The newest error that the library reported by callback, since failed calls omit the cause."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._name = ""
        self._text = ""

    def note(self, error: Any) -> None:
        """Callback of the library; ignores "all brokers down", which does not name the cause."""
        name = error.name()
        if name != "_ALL_BROKERS_DOWN":
            with self._lock:
                self._name = name
                self._text = _CONNECTION_DETAILS.sub("", error.str())

    def clear(self) -> None:
        """Forget older errors: a broker has responded since."""
        with self._lock:
            self._name = ""
            self._text = ""

    @property
    def condition(self) -> str:
        """The key of `_HINTS` for the last error; empty if waiting may resolve it, or no error."""
        with self._lock:
            return _condition(self._name, self._text)

    def explained(
        self, doing: str, error: Any = None, *, at_start: bool = False
    ) -> UnderstudyError:
        """The error to raise or show for a failed operation; `error` is the error of the call.

        ConfigError only `at_start`, when the operator can still correct the address. Later it is
        Unreachable, because the problem may resolve by itself, for example when a broker has just
        started and has not loaded its users and topics yet.
        """
        config = self._config
        with self._lock:
            name = self._name
            text = self._text
        code = "" if error is None else error.name()
        condition = _condition(code, "") or _condition(name, text)
        # Without a broker, the error of the call ("timed out") explains less than the callback's.
        if error is not None and (not text or not code.startswith("_")):
            text = "; ".join(filter(None, (error.str(), text if not _condition(code, "") else "")))
        hint = _HINTS.get(condition, "").replace("TOPIC", config.topic)
        if not condition:
            options = [] if config.credentials else ["a user (credentials=FILE)"]
            options += [] if config.tls else ["TLS (tls=true)"]
            hint = _AWAY_HINT + (" or ".join(options) or "another user, mechanism= or ca=")
        user = f" as user {config.credentials.username!r}" if config.credentials else ""
        kind = ConfigError if at_start and condition else Unreachable
        what = f"{doing} Kafka topic {config.topic!r} at {config.where}{user} failed"
        return kind(f"{what}: {text or 'timed out'}; {hint}")


_RETRY_PAUSE_S = 0.05
_REQUEST_TIMEOUT_S = 1.0


def _slice_s(remaining_s: float) -> float:
    return min(_REQUEST_TIMEOUT_S, max(_RETRY_PAUSE_S, remaining_s))


class OffsetBounds:
    """Queries first and end offsets on its own connection, where no fetch delays the request."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._kafka = kafka_library()
        self._last_error = LastError(config)
        self._lock = threading.Lock()
        self._consumer: Any = None

    def query(self, number: int, *, timeout_s: float, at_start: bool = False) -> tuple[int, int]:
        """First and end offset of a partition; raises when its leader does not respond in time."""
        consumer = self._client()
        partition = self._kafka.TopicPartition(self._config.topic, number)
        give_up_s = time.monotonic() + timeout_s
        while True:
            remaining_s = give_up_s - time.monotonic()
            try:
                first, end = consumer.get_watermark_offsets(
                    partition, timeout=_slice_s(remaining_s)
                )
                self._last_error.clear()
                return int(first), int(end)
            except self._kafka.KafkaException as error:
                consumer.poll(0.0)  # error callbacks run only during a poll
                # Other errors may resolve by themselves, such as a leader election, or a topic that
                # some brokers do not know yet.
                is_unauthorized = error.args[0].name().endswith("_AUTHORIZATION_FAILED")
                if remaining_s < 2 * _RETRY_PAUSE_S or is_unauthorized:
                    raise self._last_error.explained(
                        "reading", error.args[0], at_start=at_start
                    ) from None
                # Refresh the metadata: by itself the library keeps asking the former leader.
                with contextlib.suppress(self._kafka.KafkaException):
                    consumer.list_topics(self._config.topic, timeout=_slice_s(remaining_s))
                time.sleep(_RETRY_PAUSE_S)

    def _client(self) -> Any:
        with self._lock:
            if self._consumer is None:
                self._consumer = self._kafka.Consumer(
                    {**self._config.consumer(), "error_cb": self._last_error.note}
                )
            return self._consumer

    def close(self) -> None:
        """Close the connection; the caller sends no requests afterwards."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
