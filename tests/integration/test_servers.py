"""Every test server is real: it checks credentials, and keeps what it acknowledged."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.dev.process import HOST, identify, is_free
from understudy.dev.recipes import BUCKET, aws_client
from understudy.dev.servers import SERVERS, Server, start, unavailable_reason

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0
NESTED = """
import time
from pathlib import Path

def test_waits(kinesalite_server):
    Path(__file__).with_name("pid").write_text(f"{kinesalite_server.pid} ")
    time.sleep(120)
"""


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    """Each of ours in turn."""
    found = request.getfixturevalue(f"{request.param}_server")
    if not isinstance(found, Server):
        pytest.skip(f"{request.param} is somebody else's: its process cannot be looked at")
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ANSWER_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


# Who may ask.


def cassandra(server: Any, user: str, password: str) -> Any:
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
    from cassandra.policies import RoundRobinPolicy

    host, port = server.address.split(":")
    profile = ExecutionProfile(load_balancing_policy=RoundRobinPolicy(), request_timeout=ANSWER_S)
    return Cluster(
        [host],
        port=int(port),
        auth_provider=PlainTextAuthProvider(user, password),
        protocol_version=5,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        connect_timeout=ANSWER_S,
    )


def kafka_settings(server: Any, **other: Any) -> dict[str, Any]:
    who = server.credentials
    return {
        "bootstrap.servers": server.address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": who["username"],
        "sasl.password": who["password"],
        "log_level": 0,
        **other,
    }


@pytest.mark.parametrize(
    ("user", "password"), [("cassandra", "cassandra"), ("understudy", "wrong")]
)
def test_cassandra_rejects_the_default_role_and_wrong_passwords(cassandra_server, user, password):
    from cassandra.cluster import NoHostAvailable

    cluster = cassandra(cassandra_server, user, password)
    with pytest.raises(NoHostAvailable, match="Bad credentials"):
        cluster.connect()
    cluster.shutdown()


def test_kafka_accepts_only_clients_with_the_password(kafka_server):
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    assert AdminClient(kafka_settings(kafka_server)).list_topics(timeout=ANSWER_S).brokers
    wrong = (
        {"sasl.password": "wrong"},
        {"sasl.username": "somebody"},
        {"security.protocol": "PLAINTEXT"},
    )
    for settings in wrong:
        with pytest.raises(KafkaException):
            AdminClient(kafka_settings(kafka_server, **settings)).list_topics(timeout=3.0)


def test_s3_rejects_a_wrong_secret_and_an_unknown_key(s3_server):
    from botocore.exceptions import ClientError

    if isinstance(s3_server, Server) and not s3_server.place.package.name.startswith("s3-"):
        pytest.skip(
            "moto takes any credentials; install Go for versitygw, then: understudy dev servers "
            "fetch s3"
        )
    assert [
        one["Name"]
        for one in aws_client("s3", s3_server.url, s3_server.credentials).list_buckets()["Buckets"]
    ]
    for name, reason in (
        ("secret_access_key", "SignatureDoesNotMatch"),
        ("access_key_id", "No user exists"),
    ):
        wrong = {**s3_server.credentials, name: "WRONG" * 4}
        with pytest.raises(ClientError, match=reason):
            aws_client("s3", s3_server.url, wrong).list_buckets()


# What outlives kill -9.


def test_cassandra_has_what_it_acknowledged_after_a_kill(cassandra_server):
    who = cassandra_server.credentials
    keyspace = f"k{uuid.uuid4().hex[:8]}"
    cluster = cassandra(cassandra_server, who["username"], who["password"])
    session = cluster.connect()
    session.execute(
        f"CREATE KEYSPACE {keyspace} WITH replication = {{'class': 'SimpleStrategy', "
        f"'replication_factor': 1}}"
    )
    session.execute(f"CREATE TABLE {keyspace}.steps (id int PRIMARY KEY, body blob)")
    for number in range(50):
        session.execute(f"INSERT INTO {keyspace}.steps (id, body) VALUES ({number}, 0x00ff)")
    cassandra_server.kill()
    cluster.shutdown()
    cassandra_server.restart()
    cluster = cassandra(cassandra_server, who["username"], who["password"])
    session = cluster.connect()
    assert session.execute(f"SELECT count(*) FROM {keyspace}.steps").one()[0] == 50
    session.execute(f"DROP KEYSPACE {keyspace}")
    cluster.shutdown()


def test_kafka_has_what_it_acknowledged_after_a_kill(kafka_server):
    from confluent_kafka import Consumer, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    topic = f"t-{uuid.uuid4().hex[:8]}"
    failed = []
    admin = AdminClient(kafka_settings(kafka_server))
    admin.create_topics([NewTopic(topic, 1)])[topic].result(ANSWER_S)
    producer = Producer(kafka_settings(kafka_server, **{"enable.idempotence": True}))
    for number in range(50):
        producer.produce(
            topic, str(number).encode(), on_delivery=lambda error, _: failed.append(error)
        )
    assert producer.flush(ANSWER_S) == 0
    assert failed == [None] * 50
    kafka_server.kill()
    kafka_server.restart()
    consumer = Consumer(
        kafka_settings(kafka_server, **{"group.id": topic, "enable.auto.commit": False})
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []

    def all_came() -> bool:
        found.extend(one.value() for one in consumer.consume(50, 1.0))
        return len(found) >= 50

    assert eventually(all_came)
    assert found == [str(number).encode() for number in range(50)]
    consumer.close()


def put_record(client: Any, stream: str) -> str:
    client.create_stream(StreamName=stream, ShardCount=1)
    client.get_waiter("stream_exists").wait(StreamName=stream, WaiterConfig={"Delay": 1})
    return str(
        client.put_record(StreamName=stream, Data=b"frame", PartitionKey="session")["ShardId"]
    )


def records(client: Any, stream: str, shard: str) -> list[bytes]:
    found = client.get_shard_iterator(
        StreamName=stream, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
    )
    return [
        one["Data"] for one in client.get_records(ShardIterator=found["ShardIterator"])["Records"]
    ]


def test_kinesalite_has_what_it_acknowledged_after_a_kill(kinesalite_server):
    client = aws_client("kinesis", kinesalite_server.url, kinesalite_server.credentials)
    stream = f"s-{uuid.uuid4().hex[:8]}"
    shard = put_record(client, stream)
    kinesalite_server.kill()
    kinesalite_server.restart()
    assert records(client, stream, shard) == [b"frame"]


def test_kinesis_returns_what_was_put_and_is_empty_after_a_kill(kinesis_server):
    client = aws_client("kinesis", kinesis_server.url, kinesis_server.credentials)
    stream = f"s-{uuid.uuid4().hex[:8]}"
    assert records(client, stream, put_record(client, stream)) == [b"frame"]
    kinesis_server.kill()
    kinesis_server.restart()
    assert client.list_streams()["StreamNames"] == []


def test_s3_has_what_it_acknowledged_after_a_kill_and_supports_conditional_writes(s3_server):
    from botocore.exceptions import ClientError

    client = aws_client("s3", s3_server.url, s3_server.credentials)
    key = uuid.uuid4().hex
    client.put_object(Bucket=BUCKET, Key=key, Body=b"weights", IfNoneMatch="*")
    s3_server.kill()
    s3_server.restart()
    if isinstance(s3_server, Server) and not s3_server.place.package.name.startswith("s3-"):
        pytest.skip("moto keeps everything in memory; install Go for versitygw")
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"weights"
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"others", IfNoneMatch="*")


# What is true of all of them.


def test_it_listens_on_loopback_only(server):
    if not Path("/proc/net/tcp").exists():
        pytest.skip("there is no /proc to see who listens where")
    found = listening(server.pid)
    assert found
    assert {address for address, _ in found} <= {"0100007F", "0000000000000000FFFF00000100007F"}, (
        found
    )
    assert int(server.address.split(":")[1]) in {port for _, port in found}


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports on which a process takes connections."""
    links = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(one))
        except OSError:
            continue  # closed meanwhile
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_its_secret_is_in_no_log_and_on_no_command_line(server):
    secret = server.credentials.get("password") or server.credentials["secret_access_key"]
    words = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True
    ).stdout
    assert words.strip()
    assert secret not in words
    assert secret not in server.log.read_text(errors="replace")


# Servers that take most of a minute to start are restarted in the full profile only; other tests of
# this folder kill them, too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("cassandra", "kafka") else name
        for name in SERVERS
    ],
)
def test_a_server_restarted_by_a_thread_survives_it_and_stop_leaves_no_process_and_no_port(
    name, tmp_path
):
    if reason := unavailable_reason(name):
        pytest.skip(reason)
    folder = tmp_path / "A & B, 100%41 #1+2 Zürich"
    with start(name, folder) as server:
        server.kill()
        thread = threading.Thread(target=server.restart)
        thread.start()
        thread.join(240.0)
        assert server.is_alive
        pid = server.pid
        ports = server.place.ports
    assert list(tmp_path.iterdir()) == [folder]
    assert identify(pid) is None
    rows = subprocess.run(
        ["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True
    ).stdout.splitlines()
    assert [row for row in rows if row.split()[0] == str(pid) and "Z" not in row] == []
    assert all(is_free(port) for port in ports.values())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_pytest_however_it_ends(tmp_path, how):
    if reason := unavailable_reason("kinesalite"):
        pytest.skip(reason)
    (tmp_path / "test_nested.py").write_text(NESTED)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.integration.conftest",
        "-o",
        "addopts=--import-mode=importlib",
        "--rootdir",
        ROOT,
        "--basetemp",
        tmp_path / "base",
        tmp_path / "test_nested.py",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "UNDERSTUDY_TEST_KINESIS"
    }
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as nested:
        try:
            told = tmp_path / "pid"
            assert eventually(lambda: told.exists() and told.read_text().endswith(" "))
            pid = int(told.read_text())
            assert identify(pid) is not None
            nested.send_signal(how)
            nested.wait(ANSWER_S)
        finally:
            nested.kill()
    assert eventually(lambda: identify(pid) is None)


def test_the_command_starts_the_usual_four_and_stops_them(tmp_path):
    if reasons := [reason for name in SERVERS if (reason := unavailable_reason(name))]:
        pytest.skip(reasons[0])
    command = [str(Path(sys.executable).with_name("understudy")), "dev", "servers"]
    place = ["--folder", str(tmp_path), "--json"]

    def say(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [*command, *words, *place], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    try:
        started = say("start")
        assert list(started) == ["cassandra", "kafka", "kinesis", "s3"]
        for one in started.values():
            assert one["address"].startswith(f"{HOST}:")
            assert Path(one["credentials_file"]).stat().st_mode & 0o777 == 0o600
            assert identify(one["pid"]) is not None
        assert say("start") == started
    finally:
        stopped = say("stop")
    assert [name for name, one in stopped.items() if one["stopped"]] == list(started)
    assert all(identify(one["pid"]) is None for one in started.values())


def test_the_example_of_the_page_runs_unchanged(tmp_path):
    if reason := unavailable_reason("s3"):
        pytest.skip(reason)
    text = (ROOT / "docs" / "servers.md").read_text()
    (example,) = re.findall(r"^```python\n(from.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"http://{HOST}:\d+ \S+/s3-data/credentials\n", done.stdout)
