"""What every part of a Kafka stream uses: its address, the library's settings and errors, where
partitions end."""

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
_OF_KAFKA = (
    "__consumer_offsets",
    "__transaction_state",
    "__share_group_state",
    "__cluster_metadata",
)
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
    """A PEM file with the authority that signed the brokers' certificates; empty: those of the
    system."""
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
        if (
            not 0 < len(self.topic) <= 249
            or not _LETTERS.issuperset(self.topic)
            or self.topic in (".", "..")
        ):
            shown = self.topic if len(self.topic) <= 80 else f"{self.topic[:80]}..."
            raise ConfigError(
                f"{shown!r} is no name of a topic; write {FORM}, TOPIC of 1 to 249 of A-Z a-z 0-9 "
                ". _ -"
            )
        if self.topic in _OF_KAFKA:
            raise ConfigError(
                f"topic {self.topic!r} is Kafka's own, and no stream; name another one"
            )
        if self.mechanism not in MECHANISMS:
            raise ConfigError(
                f"mechanism of kafka:// is {self.mechanism!r}; give one of {', '.join(MECHANISMS)}"
            )
        if not self.tls and (self.ca or self.certificate):
            raise ConfigError("kafka:// has ca or certificate and no TLS; add tls=true")
        for name in ("ca", "certificate"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(
                    f"{name} of kafka:// is {path!r}, where there is no file; give a PEM file"
                )
        if self.partitions < 0:
            raise ConfigError(
                f"partitions of kafka:// is {self.partitions}; give 1 or more, or leave it out for "
                "all"
            )
        for field in fields(self):
            if (
                field.name in ("timeout_s", "open_timeout_s", "queue_mb")
                and not 0 < getattr(self, field.name) <= 2000
            ):
                raise ConfigError(
                    f"{field.name} of kafka:// is {getattr(self, field.name)}; give one above 0, "
                    "to 2000"
                )

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
            # It would fill stderr while a broker is away; `LastError` keeps what matters.
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
        """Settings of whoever appends: nothing is called durable before every replica in sync
        has it."""
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
        """Settings of whoever reads: no group decides who reads what, and no position is kept by
        the brokers."""
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


_OPTIONS = frozenset(field.name for field in fields(KafkaConfig)) - {"servers", "topic"}


def kafka_config(location: Location) -> KafkaConfig:
    """What an address says; ConfigError for an option that nobody reads, or a file that is not
    there."""
    location.refuse_others(_OPTIONS)
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
        partitions=location.whole("partitions", 0, most=100_000),
        timeout_s=location.number("timeout_s", 5.0, least=0.1, most=300.0),
        open_timeout_s=location.number("open_timeout_s", 10.0, least=0.1, most=300.0),
        queue_mb=location.number("queue_mb", 64.0, least=1.0, most=2000.0),
    )


def kafka_library() -> Any:
    """The module `confluent_kafka`; MissingExtra names the command that installs it."""
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
    "kafka-topics.sh, or "
    "correct the address",
    "INVALID_TOPIC": "correct the address, or create the topic with kafka-topics.sh",
    "AUTHORIZATION_FAILED": "this user needs Describe, Read and Write on the topic, and Describe "
    "on group "
    "understudy-TOPIC",
    "MSG_SIZE_TOO_LARGE": "set max.message.bytes of the topic to 1048588",
    "_AUTHENTICATION": "check the credentials file and mechanism=",
    "_SSL": "check that this listener speaks TLS, that ca= names the authority of its certificate, "
    "that this names the "
    "host, and whether it wants certificate=",
    "HTTP": "this is a web server, no Kafka broker; correct host and port",
}
"""What to do about a condition that lasts."""
_AWAY_HINT = (
    "check that a broker runs there, that this is its port for clients, and whether it wants "
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
"""What the library makes of the first letters that a web server answers with."""
_ASIDE = re.compile(
    r"^(\w+://)?[^/\s]+/\w+: | \(after \d+ms in state \w+(, \d+ [^)]*\(s\) suppressed)?\)"
)
"""What the library adds for itself: which connection, and how far it came."""


def _condition(name: str, text: str) -> str:
    """Which of `_HINTS` an error of the library means; empty: no broker serves us now."""
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
    """The newest error of a client, which the library only calls back with; its calls fail with
    "transport failure"."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._name = self._text = ""

    def note(self, error: Any) -> None:
        """Called by the library; that all brokers are down says less than why."""
        name = error.name()
        if name != "_ALL_BROKERS_DOWN":
            with self._lock:
                self._name = name
                self._text = _ASIDE.sub("", error.str())

    def clear(self) -> None:
        """Something was answered, so that older errors explain nothing."""
        with self._lock:
            self._name = self._text = ""

    @property
    def condition(self) -> str:
        """What waiting longer does not help against, as a key of `_HINTS`; empty: it may help."""
        with self._lock:
            return _condition(self._name, self._text)

    def explained(
        self, doing: str, error: Any = None, *, at_start: bool = False
    ) -> UnderstudyError:
        """The error to raise, or to show, when something did not work; `error` is what the call
        itself said.

        ConfigError at the start, where whoever gave the address is still there to correct it. Later
        on everything may come right by itself, also a broker that has just started and knows
        neither users nor topics yet.
        """
        config = self._config
        with self._lock:
            name = self._name
            text = self._text
        code = "" if error is None else error.name()
        condition = _condition(code, "") or _condition(name, text)
        # What a call says when no broker is there, such as that it waited for one, explains less
        # than why.
        if error is not None and (not text or not code.startswith("_")):
            text = "; ".join(filter(None, (error.str(), text if not _condition(code, "") else "")))
        hint = _HINTS.get(condition, "").replace("TOPIC", config.topic)
        if not condition:
            wanted = [] if config.credentials else ["a user (credentials=FILE)"]
            wanted += [] if config.tls else ["TLS (tls=true)"]
            hint = _AWAY_HINT + (" or ".join(wanted) or "another user, mechanism= or ca=")
        user = f" as user {config.credentials.username!r}" if config.credentials else ""
        kind = ConfigError if at_start and condition else Unreachable
        what = f"{doing} Kafka topic {config.topic!r} at {config.where}{user} failed"
        return kind(f"{what}: {text or 'no answer in time'}; {hint}")


_AGAIN_S = 0.05
_QUESTION_S = 1.0


def _slice_s(left_s: float) -> float:
    return min(_QUESTION_S, max(_AGAIN_S, left_s))


class OffsetBounds:
    """Asks leaders on a connection of its own: on one that fetches, every question waits for the
    fetch before it."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._kafka = kafka_library()
        self._last_error = LastError(config)
        self._lock = threading.Lock()
        self._consumer: Any = None

    def ask(self, number: int, *, timeout_s: float, at_start: bool = False) -> tuple[int, int]:
        """First offset and end of a partition; Unreachable when its leader says nothing in time."""
        consumer = self._client()
        partition = self._kafka.TopicPartition(self._config.topic, number)
        give_up_s = time.monotonic() + timeout_s
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                first, end = consumer.get_watermark_offsets(partition, timeout=_slice_s(left_s))
                self._last_error.clear()
                return int(first), int(end)
            except self._kafka.KafkaException as error:
                consumer.poll(0.0)  # it tells what troubles it only while it is polled
                # A leader that moves, or a topic that not every broker has heard of yet, comes
                # right by itself.
                if left_s < 2 * _AGAIN_S or error.args[0].name().endswith("_AUTHORIZATION_FAILED"):
                    raise self._last_error.explained(
                        "reading", error.args[0], at_start=at_start
                    ) from None
                self._find_leaders(consumer, _slice_s(left_s))
                time.sleep(_AGAIN_S)

    def _find_leaders(self, consumer: Any, timeout_s: float) -> None:
        """Ask anybody who leads now: by itself the library goes on asking who did."""
        with contextlib.suppress(self._kafka.KafkaException):
            consumer.list_topics(self._config.topic, timeout=timeout_s)

    def _client(self) -> Any:
        with self._lock:
            if self._consumer is None:
                self._consumer = self._kafka.Consumer(
                    {**self._config.consumer(), "error_cb": self._last_error.note}
                )
            return self._consumer

    def close(self) -> None:
        """Let go of the connection; nobody asks any more."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
