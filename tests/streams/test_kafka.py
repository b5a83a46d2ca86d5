"""The Kafka stream without a broker: addresses, settings, errors and timeouts."""

import math
import random
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest

from understudy.core.errors import Closed, ConfigError, MissingExtra, PositionGone, Unreachable
from understudy.core.location import Credentials, parse_location
from understudy.ports import Ack, Position
from understudy.streams.kafka import (
    GRACE_S,
    KafkaWriter,
    PartitionReader,
    PendingAppend,
    create_kafka,
    offset_after,
    open_kafka,
    partition_of,
    position_text,
)
from understudy.streams.kafka_client import KafkaConfig, LastError, kafka_config
from understudy.testing.clock import ManualClock
from understudy.testing.streams import sample_frames

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")
AdminClient = pytest.importorskip("confluent_kafka.admin").AdminClient


def config_of(text: str) -> KafkaConfig:
    return kafka_config(parse_location(text))


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A port that accepts connections and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


# --- addresses ------------------------------------------------------------------------------------


def test_an_address_names_brokers_topic_user_and_tls(tmp_path: Path):
    (tmp_path / "kafka.toml").write_text('username = "ada"\npassword = "secret"\n')
    (tmp_path / "ca.pem").write_text("")
    config = config_of(
        f"kafka://one:9093,two/plays?credentials={tmp_path}/kafka.toml&mechanism=scram-sha-512&tls=true&ca={tmp_path}/ca.pem"
    )
    assert config.servers == ("one:9093", "two:9092")
    assert (config.topic, config.credentials) == ("plays", Credentials("ada", "secret"))
    settings = config.client()
    assert settings["bootstrap.servers"] == "one:9093,two:9092"
    assert (settings["security.protocol"], settings["sasl.mechanism"]) == (
        "SASL_SSL",
        "SCRAM-SHA-512",
    )
    assert settings["ssl.ca.location"] == f"{tmp_path}/ca.pem"
    assert "secret" not in repr(config)


def test_a_record_is_durable_only_once_all_in_sync_replicas_have_it():
    settings = config_of("kafka://one/plays").producer()
    assert (settings["acks"], settings["enable.idempotence"]) == ("all", True)


def test_a_consumer_reports_a_lost_offset_and_commits_nothing():
    settings = config_of("kafka://one/plays").consumer()
    assert (settings["auto.offset.reset"], settings["enable.auto.commit"]) == ("error", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kafka://one:9092", "lacks a topic"),
        ("kafka:///plays", "lacks a broker"),
        ("kafka://one/a/b", "not a valid topic name"),
        ("kafka://one/plays?credential=x", "did you mean credentials?"),
        ("kafka://one/plays?mechanism=GSSAPI", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("kafka://one/plays?credentials=/no/such/file", "cannot be read"),
        ("kafka://one/plays?tls=true&ca=/no/such/file", "which is not a file; use the path"),
        ("kafka://one/plays?ca=/no/such/file", "add tls=true"),
        ("kafka://one/plays?timeout_s=never", "give a number from 0.1 to 300"),
        ("kafka://one/plays?partitions=-1", "partitions"),
        ("kafka://one/plays?partitions=2.5", "give a whole number"),
        (f"kafka://one/{'a' * 250}", "aaa...' is not a valid topic name"),
        ("kafka://one/пьеса", "TOPIC of 1 to 249 characters from A-Z a-z 0-9 . _ -"),
        ("kafka://one/__consumer_offsets", "is internal to Kafka"),
        ("kafka://ada:secret@one/plays", "credentials=FILE"),
    ],
)
def test_an_invalid_address_is_rejected_with_the_next_step(text: str, expected: str):
    with pytest.raises(ConfigError) as raised:
        config_of(text)
    assert expected in str(raised.value)


def test_an_invalid_certificate_file_is_a_clear_error(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError) as raised:
        open_kafka(parse_location(f"kafka://127.0.0.1:1/plays?tls=true&ca={tmp_path}/ca.pem"))
    assert "correct the address" in str(raised.value)


def test_without_the_package_the_error_shows_the_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra) as raised:
        open_kafka(parse_location("kafka://127.0.0.1:1/plays"))
    assert "pip install 'understudy[kafka]'" in str(raised.value)


# --- positions ------------------------------------------------------------------------------------


def test_a_session_stays_in_its_partition_and_sessions_spread():
    sessions = [uuid.UUID(int=number << 64 | number).bytes for number in range(400)]
    partitions = [partition_of(session, 4) for session in sessions]
    assert partitions == [partition_of(session, 4) for session in sessions]
    assert all(60 < partitions.count(number) < 140 for number in range(4))


def test_a_position_with_another_partition_count_is_rejected():
    assert offset_after(position_text(6, 4), 4, topic="plays") == 7
    with pytest.raises(ConfigError) as raised:
        offset_after(position_text(6, 4), 8, topic="plays")
    assert "partitions=4" in str(raised.value)


@pytest.mark.parametrize("text", ["", "7", "a/4", "1:2:3"])
def test_a_position_of_another_stream_is_rejected(text: str):
    with pytest.raises(ConfigError):
        offset_after(Position(text), 4, topic="plays")


# --- errors ---------------------------------------------------------------------------------------


def explained(
    name: str, text: str = "", *, of_call: bool = False, at_start: bool = True
) -> Exception:
    last_error = LastError(KafkaConfig(credentials=Credentials("ada", "secret")))
    error = confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, name), text)
    if of_call:
        return last_error.explained("reading", error, at_start=at_start)
    last_error.note(error)
    last_error.note(
        confluent_kafka.KafkaError(
            confluent_kafka.KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"
        )
    )
    return last_error.explained("reading", at_start=at_start)


@pytest.mark.parametrize(
    ("name", "of_call", "kind", "expected"),
    [
        (
            "_AUTHENTICATION",
            False,
            ConfigError,
            "as user 'ada' failed: why; check the credentials file and mechanism=",
        ),
        ("_SSL", False, ConfigError, "ca= is the CA of its certificate"),
        ("_RESOLVE", False, Unreachable, ": why; check that a broker is running"),
        (
            "TOPIC_EXCEPTION",
            True,
            ConfigError,
            "'understudy' at localhost:9092 as user 'ada' failed: why; correct",
        ),
        ("_TRANSPORT", False, Unreachable, "whether it requires TLS (tls=true)"),
        (
            "UNKNOWN_TOPIC_OR_PART",
            True,
            ConfigError,
            "'understudy' at localhost:9092 as user 'ada' failed: why; create",
        ),
        ("TOPIC_AUTHORIZATION_FAILED", True, ConfigError, "needs Describe, Read and Write"),
    ],
)
def test_a_failure_becomes_one_error_with_the_next_step(
    name: str, of_call: bool, kind: type[Exception], expected: str
):
    error = explained(name, "why", of_call=of_call)
    assert type(error) is kind
    assert expected in str(error)
    assert "secret" not in str(error)
    assert type(explained(name, "why", of_call=of_call, at_start=False)) is Unreachable, (
        "later it is retried"
    )


def test_connection_details_of_the_library_are_removed_from_messages():
    text = (
        "sasl_ssl://one:9093/bootstrap: Connect to one:9093 failed: Connection refused (after "
        "12ms in state CONNECT)"
    )
    for more in ("", ", 17 identical error(s) suppressed"):
        message = str(explained("_TRANSPORT", text.replace("CONNECT", f"CONNECT{more}")))
        assert "failed: Connect to one:9093 failed: Connection refused; check" in message


def test_a_response_clears_older_errors():
    last_error = LastError(KafkaConfig())
    last_error.note(confluent_kafka.KafkaError(confluent_kafka.KafkaError._RESOLVE, "no such host"))
    last_error.clear()
    assert "no such host" not in str(last_error.explained("reading"))


# --- no response -------------------------------------------------------------------------------


def test_opening_times_out_without_a_response(silent_server: str):
    began_s = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        open_kafka(parse_location(f"kafka://{silent_server}/plays?open_timeout_s=0.5"))
    assert time.monotonic() - began_s < 3.0
    assert f"opening Kafka topic 'plays' at {silent_server} failed: " in str(raised.value)
    assert "; check that a broker is running there" in str(raised.value)


def test_an_interrupt_ends_an_admin_request_at_any_moment(silent_server: str):
    location = parse_location(f"kafka://{silent_server}/plays?open_timeout_s=60")
    delays_s = random.Random(1)

    def create_interrupted() -> None:
        delay_s = delays_s.uniform(0, 0.004)
        threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT]).start()
        create_kafka(location)

    for _ in range(50):
        with pytest.raises(KeyboardInterrupt):
            create_interrupted()


def test_an_error_while_opening_does_not_keep_the_admin_client():
    """Freed later by the garbage collector in its own thread, it would abort the process."""
    with pytest.raises(Unreachable) as failed:
        open_kafka(parse_location("kafka://127.0.0.1:1/plays?open_timeout_s=0.5"))
    errors: list[BaseException] = [failed.value]
    while (cause := errors[-1].__context__) is not None:
        errors.append(cause)
    frames = [frame for error in errors for frame, _ in walk_tb(error.__traceback__)]
    assert any(frame.f_code.co_name == "_admin_request" for frame in frames)
    kept = [value for frame in frames for value in frame.f_locals.values()]
    assert not [value for value in kept if isinstance(value, AdminClient)]


def test_opening_reports_a_refused_connection():
    with pytest.raises(Unreachable) as raised:
        open_kafka(parse_location("kafka://127.0.0.1:1/plays?open_timeout_s=0.5"))
    assert "Connection refused" in str(raised.value)


def test_appending_times_out_without_a_response_and_nothing_is_durable(silent_server: str):
    config = config_of(f"kafka://{silent_server}/plays?timeout_s=0.5")
    writer = KafkaWriter(config, 4, clock=ManualClock())
    began_s = time.monotonic()
    outcomes = writer.append(sample_frames(3))
    assert time.monotonic() - began_s < 0.5 + GRACE_S + 1.0
    assert [outcome.accepted for outcome in outcomes] == [False] * 3
    assert all(outcome.retry_after_s > 0 and outcome.error for outcome in outcomes)
    writer.close()
    with pytest.raises(Closed):
        writer.append(sample_frames(1))


def test_a_full_queue_asks_to_retry_later(silent_server: str):
    config = config_of(f"kafka://{silent_server}/plays?timeout_s=0.5&queue_mb=1")
    writer = KafkaWriter(config, 4, clock=ManualClock())
    frames = sample_frames(1) * 2000
    errors = [outcome.error or "" for outcome in writer.append(frames)]
    assert len(errors) == 2000
    # On a slow machine, the first frames time out and leave room for the last ones.
    assert any("too many frames are waiting" in error for error in errors)
    assert all(errors)
    writer.close()


def test_the_first_append_after_a_fatal_error_reconnects(silent_server: str):
    writer = KafkaWriter(
        config_of(f"kafka://{silent_server}/plays?timeout_s=0.3"), 4, clock=ManualClock()
    )
    writer.append(sample_frames(1))
    first = writer._sender
    assert first is not None
    fatal = confluent_kafka.KafkaError(confluent_kafka.KafkaError._FATAL, "fenced", fatal=True)
    waiting = PendingAppend(1)
    writer._report(first, waiting, 0, fatal)
    (outcome,) = waiting.outcomes(0.0, unanswered=lambda: Ack(True))
    assert (outcome.accepted, outcome.retry_after_s > 0) == (False, True)
    writer.append(sample_frames(1))
    assert writer._sender is not first
    writer.close()


# --- reading --------------------------------------------------------------------------------------


class Message:
    """What a consumer of the library returns: a record, or an error instead of one."""

    def __init__(self, offset: int, error: str = "") -> None:
        self._offset = offset
        self._error = (
            confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, error))
            if error
            else None
        )

    def error(self) -> object:
        return self._error

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return f"record {self._offset}".encode()

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_760_000_000_000


class Script:
    """A scripted partition: what its consumer returns, and its first and end offsets."""

    def __init__(self, *messages: Message, first: int = 0, end: int) -> None:
        self.messages = list(messages)
        self.first = first
        self.end = end
        self.asked = 0

    def assign(self, places: object) -> None: ...

    def poll(self, wait_s: float) -> Message | None:
        return self.messages.pop(0) if self.messages else None

    def query(self, number: int, *, timeout_s: float) -> tuple[int, int]:
        self.asked += 1
        return self.first, self.end

    def reader(self, clock: ManualClock) -> PartitionReader:
        bounds: Any = self
        reader = PartitionReader(
            config_of("kafka://one/plays"),
            0,
            1,
            bounds=bounds,
            clock=clock,
            closed=threading.Event(),
        )
        reader._consumer = self
        return reader


def test_records_already_read_are_returned_when_the_following_ones_are_trimmed():
    script = Script(Message(0), Message(1), Message(2, "_AUTO_OFFSET_RESET"), end=9)
    reader = script.reader(ManualClock())
    read = reader.read(None, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [b"record 0", b"record 1"]
    script.first = 5
    with pytest.raises(PositionGone) as raised:
        reader.read(read.next, max_bytes=1 << 20, wait_s=0.0)
    assert raised.value.earliest == position_text(4, 1)


def test_a_read_reports_when_it_last_reached_the_end_even_if_records_never_pause():
    clock = ManualClock()
    script = Script(*(Message(number) for number in range(9)), end=3)
    reader = script.reader(clock)
    began_s = clock.monotonic()
    position = None
    complete_to_s = []
    for _ in range(6):
        read = reader.read(position, max_bytes=1, wait_s=0.0)
        position = read.next
        complete_to_s.append(read.complete_to_s)
        clock.advance(0.4)
        script.end += 1
    assert complete_to_s[:2] == [-math.inf] * 2, "three records exist"
    assert complete_to_s[2] == began_s
    assert complete_to_s[-1] is not None
    assert complete_to_s[-1] > began_s + 1.0
    assert script.asked == 2, "not with every read"
