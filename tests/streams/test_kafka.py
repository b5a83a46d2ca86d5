"""The Kafka stream where no broker is needed: addresses, settings, errors, and what happens when
nobody answers."""

import math
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import Closed, ConfigError, MissingExtra, PositionGone, Unreachable
from understudy.core.location import Credentials, parse_location
from understudy.ports import Ack, Position
from understudy.streams.kafka import (
    GRACE_S,
    KafkaLane,
    KafkaWriter,
    PendingAppend,
    lane_of,
    offset_behind,
    open_kafka,
    position_text,
)
from understudy.streams.kafka_client import KafkaConfig, LastError, kafka_config
from understudy.testing.clock import ManualClock
from understudy.testing.streams import sample_frames

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")


def config_of(text: str) -> KafkaConfig:
    return kafka_config(parse_location(text))


@pytest.fixture
def nobody() -> Iterator[str]:
    """A port where connections are taken and nothing is ever said."""
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


def test_no_record_is_called_durable_before_all_replicas_in_sync_have_it():
    settings = config_of("kafka://one/plays").producer()
    assert (settings["acks"], settings["enable.idempotence"]) == ("all", True)


def test_a_reader_that_lost_its_place_is_told_so_and_commits_nothing():
    settings = config_of("kafka://one/plays").consumer()
    assert (settings["auto.offset.reset"], settings["enable.auto.commit"]) == ("error", False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("kafka://one:9092", "lacks a topic"),
        ("kafka:///plays", "lacks a broker"),
        ("kafka://one/a/b", "no name of a topic"),
        ("kafka://one/plays?credential=x", "did you mean credentials?"),
        ("kafka://one/plays?mechanism=GSSAPI", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("kafka://one/plays?credentials=/no/such/file", "cannot be read"),
        ("kafka://one/plays?tls=true&ca=/no/such/file", "there is no file"),
        ("kafka://one/plays?ca=/no/such/file", "add tls=true"),
        ("kafka://one/plays?timeout_s=never", "give a number from 0.1 to 300"),
        ("kafka://one/plays?partitions=-1", "partitions"),
        ("kafka://one/plays?partitions=2.5", "give a whole number"),
        (f"kafka://one/{'a' * 250}", "aaa...' is no name of a topic"),
        ("kafka://one/пьеса", "TOPIC of 1 to 249 of A-Z a-z 0-9 . _ -"),
        ("kafka://one/__consumer_offsets", "is Kafka's own"),
        ("kafka://ada:secret@one/plays", "credentials=FILE"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_the_next_step(text: str, wanted: str):
    with pytest.raises(ConfigError) as raised:
        config_of(text)
    assert wanted in str(raised.value)


def test_a_certificate_file_without_a_certificate_is_a_clear_error(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError) as raised:
        open_kafka(parse_location(f"kafka://127.0.0.1:1/plays?tls=true&ca={tmp_path}/ca.pem"))
    assert "correct the address" in str(raised.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra) as raised:
        open_kafka(parse_location("kafka://127.0.0.1:1/plays"))
    assert "pip install 'understudy[kafka]'" in str(raised.value)


# --- positions ------------------------------------------------------------------------------------


def test_a_session_stays_in_its_partition_and_sessions_spread():
    sessions = [uuid.UUID(int=number << 64 | number).bytes for number in range(400)]
    lanes = [lane_of(session, 4) for session in sessions]
    assert lanes == [lane_of(session, 4) for session in sessions]
    assert all(60 < lanes.count(lane) < 140 for lane in range(4))


def test_a_position_of_another_number_of_partitions_is_refused():
    assert offset_behind(position_text(6, 4), 4, topic="plays") == 7
    with pytest.raises(ConfigError) as raised:
        offset_behind(position_text(6, 4), 8, topic="plays")
    assert "partitions=4" in str(raised.value)


@pytest.mark.parametrize("text", ["", "7", "a/4", "1:2:3"])
def test_a_position_of_another_stream_is_refused(text: str):
    with pytest.raises(ConfigError):
        offset_behind(Position(text), 4, topic="plays")


# --- trouble --------------------------------------------------------------------------------------


def explained(
    name: str, text: str = "", *, of_call: bool = False, at_start: bool = True
) -> Exception:
    trouble = LastError(KafkaConfig(credentials=Credentials("ada", "secret")))
    error = confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, name), text)
    if of_call:
        return trouble.explained("reading", error, at_start=at_start)
    trouble.note(error)
    trouble.note(
        confluent_kafka.KafkaError(
            confluent_kafka.KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"
        )
    )
    return trouble.explained("reading", at_start=at_start)


@pytest.mark.parametrize(
    ("name", "of_call", "kind", "wanted"),
    [
        (
            "_AUTHENTICATION",
            False,
            ConfigError,
            "as user 'ada' failed: why; check the credentials file and mechanism=",
        ),
        ("_SSL", False, ConfigError, "ca= names the authority"),
        ("_RESOLVE", False, Unreachable, ": why; check that a broker runs"),
        (
            "TOPIC_EXCEPTION",
            True,
            ConfigError,
            "'understudy' at localhost:9092 as user 'ada' failed: why; correct",
        ),
        ("_TRANSPORT", False, Unreachable, "whether it wants TLS (tls=true)"),
        (
            "UNKNOWN_TOPIC_OR_PART",
            True,
            ConfigError,
            "'understudy' at localhost:9092 as user 'ada' failed: why; create",
        ),
        ("TOPIC_AUTHORIZATION_FAILED", True, ConfigError, "needs Describe, Read and Write"),
    ],
)
def test_trouble_becomes_one_error_with_the_next_step(
    name: str, of_call: bool, kind: type[Exception], wanted: str
):
    error = explained(name, "why", of_call=of_call)
    assert type(error) is kind
    assert wanted in str(error)
    assert "secret" not in str(error)
    assert type(explained(name, "why", of_call=of_call, at_start=False)) is Unreachable, (
        "later on it is tried again"
    )


def test_what_the_library_adds_for_itself_is_left_out():
    text = (
        "sasl_ssl://one:9093/bootstrap: Connect to one:9093 failed: Connection refused (after "
        "12ms in state CONNECT)"
    )
    for more in ("", ", 17 identical error(s) suppressed"):
        said = str(explained("_TRANSPORT", text.replace("CONNECT", f"CONNECT{more}")))
        assert "failed: Connect to one:9093 failed: Connection refused; check" in said


def test_an_answer_ends_old_trouble():
    trouble = LastError(KafkaConfig())
    trouble.note(confluent_kafka.KafkaError(confluent_kafka.KafkaError._RESOLVE, "no such host"))
    trouble.clear()
    assert "no such host" not in str(trouble.explained("reading"))


# --- nobody answers -------------------------------------------------------------------------------


def test_opening_ends_in_time_when_nobody_answers(nobody: str):
    began_s = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        open_kafka(parse_location(f"kafka://{nobody}/plays?open_timeout_s=0.5"))
    assert time.monotonic() - began_s < 3.0
    assert f"opening Kafka topic 'plays' at {nobody} failed: " in str(raised.value)
    assert "; check that a broker runs there" in str(raised.value)


def test_a_closed_port_is_named_at_opening():
    with pytest.raises(Unreachable) as raised:
        open_kafka(parse_location("kafka://127.0.0.1:1/plays?open_timeout_s=0.5"))
    assert "Connection refused" in str(raised.value)


def test_appending_to_nobody_ends_in_time_and_calls_nothing_durable(nobody: str):
    config = config_of(f"kafka://{nobody}/plays?timeout_s=0.5")
    writer = KafkaWriter(config, 4, clock=ManualClock())
    began_s = time.monotonic()
    outcomes = writer.append(sample_frames(3))
    assert time.monotonic() - began_s < 0.5 + GRACE_S + 1.0
    assert [outcome.accepted for outcome in outcomes] == [False] * 3
    assert all(outcome.retry_after_s > 0 and outcome.error for outcome in outcomes)
    writer.close()
    with pytest.raises(Closed):
        writer.append(sample_frames(1))


def test_a_full_queue_asks_to_come_back_later(nobody: str):
    config = config_of(f"kafka://{nobody}/plays?timeout_s=0.5&queue_mb=1")
    writer = KafkaWriter(config, 4, clock=ManualClock())
    frames = sample_frames(1) * 2000
    errors = [outcome.error or "" for outcome in writer.append(frames)]
    assert len(errors) == 2000
    assert "too many frames wait" in errors[-1]
    writer.close()


def test_after_a_fatal_error_the_next_append_begins_anew(nobody: str):
    writer = KafkaWriter(config_of(f"kafka://{nobody}/plays?timeout_s=0.3"), 4, clock=ManualClock())
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


class Said:
    """What a consumer of the library hands out: a record, or an error instead of one."""

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
    """A partition in the words of the library, and where it begins and ends."""

    def __init__(self, *said: Said, first: int = 0, end: int) -> None:
        self.said = list(said)
        self.first = first
        self.end = end
        self.asked = 0

    def assign(self, places: object) -> None: ...

    def poll(self, wait_s: float) -> Said | None:
        return self.said.pop(0) if self.said else None

    def ask(self, number: int, *, timeout_s: float) -> tuple[int, int]:
        self.asked += 1
        return self.first, self.end

    def lane(self, clock: ManualClock) -> KafkaLane:
        bounds: Any = self
        lane = KafkaLane(
            config_of("kafka://one/plays"),
            0,
            1,
            bounds=bounds,
            clock=clock,
            closed=threading.Event(),
        )
        lane._consumer = self
        return lane


def test_records_in_hand_are_not_lost_when_those_behind_them_are_trimmed():
    script = Script(Said(0), Said(1), Said(2, "_AUTO_OFFSET_RESET"), end=9)
    lane = script.lane(ManualClock())
    read = lane.read(None, max_bytes=1 << 20, wait_s=0.0)
    assert [record.raw for record in read.records] == [b"record 0", b"record 1"]
    script.first = 5
    with pytest.raises(PositionGone) as told:
        lane.read(read.next, max_bytes=1 << 20, wait_s=0.0)
    assert told.value.earliest == position_text(4, 1)


def test_a_read_says_since_when_it_knows_that_it_reached_the_end_also_when_records_never_pause():
    clock = ManualClock()
    script = Script(*(Said(number) for number in range(9)), end=3)
    lane = script.lane(clock)
    began_s = clock.monotonic()
    position = None
    said = []
    for _ in range(6):
        read = lane.read(position, max_bytes=1, wait_s=0.0)
        position = read.next
        said.append(read.complete_to_s)
        clock.advance(0.4)
        script.end += 1
    assert said[:2] == [-math.inf] * 2, "three were there"
    assert said[2] == began_s
    assert said[-1] is not None
    assert said[-1] > began_s + 1.0
    assert script.asked == 2, "not with every read"
