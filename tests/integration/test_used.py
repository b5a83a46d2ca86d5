"""A deployment on real servers keeps using them when it is restarted without flags."""

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.platforms import Sender, Up
from understudy.backends.addresses import create_stream, init_store
from understudy.dev.recipes import BUCKET
from understudy.dev.servers import aws_location, host_location

ROLES = ("--role", "gateway,ingest")


def test_a_start_without_flags_uses_the_same_servers(
    kinesalite_server, cassandra_server, s3_server, tmp_path
):
    data = tmp_path / "D"
    mark = secrets.token_hex(4)
    stream = aws_location(kinesalite_server, "kinesis", f"used-{mark}").url
    store = host_location(cassandra_server, "cassandra", f"used_{mark}", replication="1").url
    models = aws_location(s3_server, "s3", BUCKET, f"used-{mark}").url
    create_stream(stream, partitions=2)
    init_store(store)
    with Up(data, *ROLES, "--stream", stream, "--store", store, "--models", models) as first:
        steps = send(first)
    with Up(data, *ROLES) as second:
        assert second.ready["key"] == first.ready["key"]
        steps += send(second)
        assert say(data, "status")["elsewhere"] == {
            "stream": f"kinesis://used-{mark}?***",
            "store": f"cassandra://{cassandra_server.address}/used_{mark}?***",
            "models": f"s3://{BUCKET}/used-{mark}?***",
        }
    say(data, "ingest", "--until-empty")
    assert say(data, "data", "stats")["steps"] == steps
    assert say(data, "data", "verify")["steps"] == steps
    found = {one["name"]: one for one in say(data, "doctor")["checks"]}
    assert {found[name]["colour"] for name in ("stream", "store", "models")} == {"green"}
    assert "2 partitions at kinesis://" in found["stream"]["result"]
    assert not any((data / name).exists() for name in ("stream", "store", "models"))


def send(up: Up) -> int:
    """Steps that a player was promised."""
    sender = Sender(up.ready["url"], up.ready["key"], seed=secrets.randbelow(1 << 30))
    sender.register()
    sender.send_session()
    return sender.acked_steps


def say(data: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "understudy.cli.main", *words, "--data", str(data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
