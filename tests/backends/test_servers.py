"""Every server for tests is a real one: it answers who may ask, refuses who may not, and keeps what it said it has."""

import pytest
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import Cluster, NoHostAvailable
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from understudy.dev import aws
from understudy.dev.process import identify
from understudy.dev.servers import Server, start

PORT_S = 10.0


def cassandra(server: Server, user: str, password: str) -> Cluster:
    host, port = server.address.split(":")
    return Cluster([host], port=int(port), auth_provider=PlainTextAuthProvider(user, password), protocol_version=5)


def kafka(server: Server, password: str) -> AdminClient:
    return AdminClient({
        "bootstrap.servers": server.address, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN",
        "sasl.username": server.credentials["username"], "sasl.password": password, "log_level": 0,
    })  # fmt: skip


@pytest.mark.parametrize(("user", "password"), [("cassandra", "cassandra"), ("understudy", "wrong")])
def test_cassandra_refuses_the_default_role_and_wrong_passwords(cassandra_server, user, password):
    cluster = cassandra(cassandra_server, user, password)
    with pytest.raises(NoHostAvailable, match=r"AuthenticationFailed|Bad credentials"):
        cluster.connect()
    cluster.shutdown()


def test_cassandra_answers_who_has_the_password(cassandra_server):
    who = cassandra_server.credentials
    cluster = cassandra(cassandra_server, who["username"], who["password"])
    assert cluster.connect().execute("SELECT release_version FROM system.local").one().release_version.startswith("5.")
    cluster.shutdown()


def test_kafka_answers_who_has_the_password_and_nobody_else(kafka_server):
    assert kafka(kafka_server, kafka_server.credentials["password"]).list_topics(timeout=PORT_S).brokers
    with pytest.raises(KafkaException):
        kafka(kafka_server, "wrong").list_topics(timeout=2.0)


def test_both_kinesis_servers_take_and_give_a_record(kinesis_server, kinesalite_server):
    for server in (kinesis_server, kinesalite_server):
        client = aws.client("kinesis", server.place)
        client.create_stream(StreamName="one", ShardCount=1)
        client.get_waiter("stream_exists").wait(StreamName="one", WaiterConfig={"Delay": 1})
        put = client.put_record(StreamName="one", Data=b"frame", PartitionKey="session")
        iterator = client.get_shard_iterator(
            StreamName="one", ShardId=put["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        assert [record["Data"] for record in client.get_records(ShardIterator=iterator)["Records"]] == [b"frame"]


def test_no_process_is_left_after_stop(tmp_path):
    server = start("kinesalite", tmp_path)
    pid = server.pid
    server.stop()
    assert identify(pid) is None
