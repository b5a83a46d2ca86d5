"""`understudy up` with a Kafka that is unreachable or lacks the topic."""

import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.cli.platforms import Up
from tests.integration.kafka import WAIT_TIMEOUT_S, Topic


def test_a_missing_topic_ends_it_with_the_command_that_creates_one(
    kafka_server: Any, tmp_path: Path
):
    url = f"kafka://{kafka_server.address}/nowhere?credentials={kafka_server.credentials_file}"
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "up",
        "--data",
        str(tmp_path / "D"),
        "--port",
        "0",
    ]
    ended = subprocess.run(
        [*command, "--role", "gateway,ingest", "--stream", url],
        capture_output=True,
        text=True,
        timeout=4 * WAIT_TIMEOUT_S,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert "topic 'nowhere' at" in line
    assert "`understudy stream init URL --partitions 4`" in line


def test_an_unreachable_broker_is_reported_once_and_retried(kafka_server: Any, tmp_path: Path):
    url = Topic(kafka_server, partitions=2).location(open_timeout_s=4).url
    kafka_server.kill()
    errors = tmp_path / "D.err"
    while_away = ""

    def bring_it_back() -> None:
        nonlocal while_away
        deadline = time.monotonic() + 120.0
        while (
            not all(words in while_away for words in (" did; ", "as before"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
            while_away = errors.read_text() if errors.exists() else ""
        kafka_server.restart()

    bringing = threading.Thread(target=bring_it_back)
    bringing.start()
    try:
        with Up(tmp_path / "D", "--role", "gateway,ingest", "--stream", url) as up:
            assert up.ready["url"]
            said = up.errors
    finally:
        bringing.join()
    assert while_away.count("opening Kafka topic") == 1, said
    assert " did; restart 1 in 0.1 s" in said
    # While it comes up there may be other reasons, and each of those is news.
    reasons = re.findall(r"opening Kafka topic .*(?=; restart \d)", said)
    assert all(one != next_one for one, next_one in pairwise(reasons)), said
    assert "startup failed" not in said
