"""What the Kafka library says only on the side, made into one error with the next step."""

import re
import threading
from typing import Any

from understudy.core.errors import ConfigError, MissingExtra, UnderstudyError, Unreachable
from understudy.streams.kafka_config import KafkaConfig

_REFUSED = ("TOPIC_EXCEPTION", "INVALID_PARTITIONS", "INVALID_REPLICATION_FACTOR", "INVALID_CONFIG", "POLICY_VIOLATION")
"""What brokers say to a topic that they will never make."""
_HTTP = f"Invalid response size {int.from_bytes(b'HTTP')}"
"""What the library makes of the first letters that a web server answers with."""
_ASIDE = re.compile(r"^(\w+://)?[^/\s]+/\w+: | \(after \d+ms in state \w+(, \d+ [^)]*\(s\) suppressed)?\)")
"""What the library adds for itself: which connection, and how far it came."""
_TLS_WORDS = ("SSL handshake", "SSL alert", "SSL routines")


def kafka_library() -> Any:
    """The module `confluent_kafka`; MissingExtra names the command that installs it."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(
            f"a Kafka stream needs the package confluent-kafka ({error}); pip install 'understudy[kafka]'"
        ) from None
    return confluent_kafka


class Trouble:
    """The newest complaint of a client; calls themselves fail with nothing but "transport failure"."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._name = self._detail = ""

    def note(self, error: Any) -> None:
        """Called by the library; that all brokers are down says less than why."""
        name = error.name()
        if name != "_ALL_BROKERS_DOWN":
            with self._lock:
                self._name, self._detail = name, _ASIDE.sub("", error.str())

    def clear(self) -> None:
        """Something was answered, so that older complaints explain nothing."""
        with self._lock:
            self._name = self._detail = ""

    @property
    def is_refusal(self) -> bool:
        """Whether a broker answered that we may not come in: waiting longer helps nobody."""
        return self._name == "_AUTHENTICATION"

    @property
    def is_misunderstood(self) -> bool:
        """Whether who listens there speaks another language: no Kafka, or with TLS, or without."""
        return self._is_about_tls or _HTTP in self._detail

    @property
    def _is_about_tls(self) -> bool:
        return self._name == "_SSL" or any(word in self._detail for word in _TLS_WORDS)

    def explained(self, doing: str, error: Any = None, *, at_start: bool = False) -> UnderstudyError:
        """The error to raise, or to show, when something did not work; `error` is what the call itself said.

        ConfigError at the start, where whoever gave the address is still there to mend it. Later on everything may
        come right by itself, also a broker that has just started and knows neither users nor topics yet.
        """
        config, topic = self._config, self._config.topic
        with self._lock:
            name, detail = self._name, self._detail
        code = "" if error is None else error.name()
        lasting = ConfigError if at_start else Unreachable
        if code == "UNKNOWN_TOPIC_OR_PART":
            return lasting(
                f"{doing}: there is no topic {topic!r} at {config.where}; make it with the partitions you want for "
                "good (`understudy stream init URL --partitions 4`, or kafka-topics.sh), or mend the address"
            )
        if code in _REFUSED:
            return lasting(
                f"{doing}: {config.where} makes no topic {topic!r} ({error.str()}); mend the address, or make it with "
                "kafka-topics.sh"
            )
        if code.endswith("_AUTHORIZATION_FAILED"):
            return lasting(
                f"{doing}: {self._user()} may not do that at {config.where} ({code}); it needs Describe, Read and "
                f"Write on topic {topic!r} and Describe on group understudy-{topic}"
            )
        if code == "MSG_SIZE_TOO_LARGE":
            return lasting(f"{doing}: topic {topic!r} takes no records of 1 MB; set its max.message.bytes to 1048588")
        if name == "_AUTHENTICATION":
            return lasting(
                f"{doing}: {config.where} refused {self._user()} ({detail}); check the credentials file and mechanism="
            )
        if _HTTP in detail:
            return lasting(f"{doing}: {config.where} is a web server, no broker of Kafka; mend host and port")
        if self._is_about_tls:
            return lasting(
                f"{doing}: TLS with {config.where} failed ({detail}); check that this listener speaks TLS, that ca= "
                "names the authority of its certificate, that this names the host, and whether it wants certificate="
            )
        # What a call says when no broker is there, such as that it waited for one, explains less than why.
        said = "" if error is None or (detail and code.startswith("_")) else error.str()
        what = "; ".join(text for text in (detail, said) if text) or "no answer in time"
        return Unreachable(
            f"{doing}: no broker at {config.where} served us for topic {topic!r} ({what}); check that it runs, that "
            f"this is its port for clients, and whether it wants {self._wanted()}"
        )

    def _user(self) -> str:
        return f"user {self._config.credentials.username!r}" if self._config.credentials else "us, who gave no user,"

    def _wanted(self) -> str:
        """What a listener may want that we do not give: then it hangs up without a word."""
        missing = [] if self._config.credentials else ["a user (credentials=FILE)"]
        missing += [] if self._config.tls else ["TLS (tls=true)"]
        return " or ".join(missing) or "another user, mechanism= or ca="
