"""The seed's pipeline, rebuilt from its description: one JSON record or one row per step."""

import json
from typing import Any

from understudy.dev.servers import Server

_TABLE = (
    "CREATE TABLE IF NOT EXISTS by_step (pk uuid, episode int, step int, state list<float>, "
    "action int, reward float, next_state list<float>, done boolean, game_id text, "
    "PRIMARY KEY ((game_id), episode, step, pk)) "
    "WITH CLUSTERING ORDER BY (episode DESC, step DESC, pk DESC)"
)


def record(step: int) -> bytes:
    """An array of one object, as the seed's client sent it."""
    row = {
        "episode": 1,
        "step": step,
        "state": [0.0123456789] * 4,
        "action": 1,
        "reward": 1.0,
        "next_state": [0.0123456789] * 4,
        "done": False,
        "game_id": "CartPole-v0",
    }
    return json.dumps([row]).encode()


def put_steps(client: Any, stream: str, steps: int) -> None:
    """Send to Kinesis like the seed's client: one call per step with a constant key."""
    for step in range(steps):
        client.put_records(
            StreamName=stream, Records=[{"Data": record(step), "PartitionKey": "game_records"}]
        )


def producer(server: Server) -> Any:
    """A producer as durable as ours, with the library's own batching."""
    from confluent_kafka import Producer

    login = server.credentials
    return Producer(
        {
            "bootstrap.servers": server.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": login["username"],
            "sasl.password": login["password"],
            "enable.idempotence": True,
            "log_level": 0,
        }
    )


def produce_steps(producer: Any, topic: str, steps: int) -> None:
    """Send to Kafka, batched by the producer, until the broker has acknowledged each record."""
    failed = list[object]()

    def heard(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    for step in range(steps):
        producer.produce(topic, record(step), partition=0, on_delivery=heard)
        producer.poll(0)
    assert not producer.flush(60.0), "the peer's records were not acknowledged"
    assert not failed, failed[0]


class Rows:
    """The seed's table in Cassandra, written as fast as its rows allow."""

    def __init__(self, server: Server, keyspace: str) -> None:
        from cassandra.auth import PlainTextAuthProvider
        from cassandra.cluster import Cluster

        host, _, port = server.address.partition(":")
        login = PlainTextAuthProvider(
            server.credentials["username"], server.credentials["password"]
        )
        self._cluster = Cluster([host], port=int(port), auth_provider=login, protocol_version=5)
        self._session = self._cluster.connect(keyspace)
        self._session.execute(_TABLE)
        self._insert = self._session.prepare(
            "INSERT INTO by_step "
            "(pk, episode, step, state, action, reward, next_state, done, game_id) "
            "VALUES (uuid(), ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        self._episode = 0

    def write(self, steps: int) -> None:
        """Write one row per step of another episode, 64 concurrently."""
        from cassandra.concurrent import execute_concurrent_with_args

        self._episode += 1
        rows = [
            (self._episode, step, [0.1] * 4, 1, 1.0, [0.1] * 4, False, "CartPole-v0")
            for step in range(steps)
        ]
        execute_concurrent_with_args(self._session, self._insert, rows, concurrency=64)

    def close(self) -> None:
        """Close the connections."""
        self._cluster.shutdown()
