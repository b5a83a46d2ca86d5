"""`understudy stream init` on a real Kafka: existing and requested topics, one-line errors."""

import signal
import socket
import time
import uuid
from typing import Any

import pytest

from tests.integration.commands import four_at_once, started
from tests.integration.kafka import Topic
from understudy.cli.root import run
from understudy.core.errors import ConfigError
from understudy.streams.kafka import create_kafka, open_kafka

OPEN_S = 120.0
"""How long some addresses wait for an answer: what no waiting mends is told long before that."""


@pytest.fixture
def topic(kafka_server: Any) -> Topic:
    return Topic(kafka_server, partitions=3)


def new_url(server: Any, **options: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"kafka://{server.address}/made-{uuid.uuid4().hex[:12]}?credentials={server.credentials_file}{more}"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A command's exit code and its only line."""
    code = run(["stream", "init", *words])
    out, err = capsys.readouterr()
    (line,) = (out + err).strip().splitlines()
    return code, line


def test_an_existing_topic_is_used_unchanged_unless_another_number_is_requested(
    topic: Topic, capsys
):
    url = topic.location().url
    code, line = said(capsys, url)
    assert (code, "is ready with 3 partitions" in line) == (0, True)
    code, line = said(capsys, url, "--partitions", "2")
    assert code == 2
    assert "already exists with 3 partitions, but 2 were requested" in line
    assert "add partitions=2 to the address to use the first 2" in line
    code, line = said(capsys, url, "--partitions", "5")
    assert (code, "omit the number to use it as it is, or use another topic" in line) == (2, True)


def test_a_url_with_a_partition_count_uses_the_first_partitions(topic: Topic, capsys):
    code, line = said(capsys, topic.location(partitions=2).url)
    assert (code, "is ready with 2 partitions" in line) == (0, True)
    code, line = said(capsys, topic.location(partitions=4).url)
    assert (code, "already exists with 3 partitions, but 4 were requested" in line) == (2, True)


def test_contradicting_partition_counts_create_nothing(kafka_server: Any, capsys):
    url = new_url(kafka_server, partitions=3)
    code, line = said(capsys, url, "--partitions", "5")
    assert (
        code,
        "the address has partitions=3, but 5 were requested; use only one" in line,
    ) == (2, True)
    code, line = said(capsys, url, "--json")
    assert (code, '"partitions": 3}' in line) == (0, True)


def test_a_missing_topic_is_reported_with_the_command_that_creates_it(topic: Topic):
    location = topic.location()
    topic.name = "nowhere"
    with pytest.raises(ConfigError, match="`understudy stream init URL --partitions 4`"):
        open_kafka(topic.location())
    assert create_kafka(location) == 3


def test_a_colliding_topic_name_is_rejected_by_the_broker_in_one_line(kafka_server: Any, capsys):
    url = new_url(kafka_server).replace("made-", "made_")
    assert said(capsys, url, "--partitions", "1")[0] == 0
    code, line = said(capsys, url.replace("made_", "made."), "--partitions", "1")
    assert (code, "collides with existing topic" in line) == (2, True)


def test_a_server_of_another_kind_is_reported_quickly(s3_server: Any, kafka_server: Any, capsys):
    url = new_url(kafka_server, open_timeout_s=OPEN_S)
    began_s = time.monotonic()
    code, line = said(capsys, url.replace(kafka_server.address, s3_server.address))
    assert (code, "this is a web server, not a Kafka broker; correct host and port" in line) == (
        2,
        True,
    )
    assert time.monotonic() - began_s < OPEN_S / 2


def test_tls_with_a_plaintext_listener_is_reported_quickly(topic: Topic):
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match="check that this listener uses TLS"):
        topic.open(tls="true", open_timeout_s=OPEN_S)
    assert time.monotonic() - began_s < OPEN_S / 2


def test_four_concurrent_inits_create_one_topic(kafka_server: Any):
    for code, text in four_at_once("stream", "init", new_url(kafka_server), "--partitions", "2"):
        assert (code, "is ready with 2 partitions" in text) == (0, True), text


def test_ctrl_c_while_the_server_does_not_respond_exits_with_130(kafka_server: Any):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(OPEN_S)
        url = new_url(kafka_server, open_timeout_s=OPEN_S)
        url = url.replace(kafka_server.address, f"127.0.0.1:{listener.getsockname()[1]}")
        with started("stream", "init", url) as waiting:
            listener.accept()[0].close()  # it asks: from here on nobody is there any more
            listener.close()
            waiting.send_signal(signal.SIGINT)
            assert waiting.communicate(timeout=OPEN_S / 2)[0].strip() == "interrupted"
    assert waiting.returncode == 130
