"""A deployment on real servers goes on with them when it is started again without a flag, and every command agrees."""

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.platforms import Sender, Up
from understudy.app.backends import create_stream, init_store
from understudy.core.location import Location
from understudy.dev.s3 import BUCKET

ROLES = ("--role", "gateway,ingest")


def test_a_start_without_flags_goes_on_with_the_same_servers(kinesalite_server, cassandra_server, s3_server, tmp_path):
    data, mark = tmp_path / "D", secrets.token_hex(4)
    host, _, port = cassandra_server.address.rpartition(":")
    file = str(cassandra_server.credentials_file)
    stream = Location("kinesis", ((f"used-{mark}", None),), options=aws(kinesalite_server)).url
    store = Location("cassandra", ((host, int(port)),), f"used_{mark}", {"credentials": file, "replication": "1"}).url
    models = Location("s3", ((BUCKET, None),), f"used-{mark}", aws(s3_server)).url
    create_stream(stream, partitions=2)
    init_store(store)
    with Up(data, *ROLES, "--stream", stream, "--store", store, "--models", models) as first:
        steps = send(first)
    with Up(data, *ROLES) as second:
        assert second.ready["key"] == first.ready["key"]
        steps += send(second)
        assert say(data, "status")["elsewhere"] == {
            "stream": f"kinesis://used-{mark}?***", "store": f"cassandra://{host}:{port}/used_{mark}?***",
            "models": f"s3://{BUCKET}/used-{mark}?***",
        }  # fmt: skip
    say(data, "ingest", "--until-empty")
    assert say(data, "data", "stats")["steps"] == steps
    assert say(data, "data", "verify")["steps"] == steps
    found = {one["name"]: one for one in say(data, "doctor")["checks"]}
    assert {found[name]["colour"] for name in ("stream", "store", "models")} == {"green"}
    assert "2 partitions at kinesis://" in found["stream"]["found"]
    assert not any((data / name).exists() for name in ("stream", "store", "models"))


def aws(server: Any) -> dict[str, str]:
    return {
        "endpoint": server.url, "region": server.credentials["region"], "credentials": str(server.credentials_file)
    }  # fmt: skip


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
