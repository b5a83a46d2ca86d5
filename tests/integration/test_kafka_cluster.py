"""Three brokers, of which one dies: leaders move, and data on two brokers are never lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.kafka import WAIT_TIMEOUT_S, Topic
from tests.integration.kafka_table import Table, run
from understudy.dev import servers
from understudy.dev.process import HOST, free_ports
from understudy.dev.recipes import RECIPES, ServerFolder, prepare_kafka

NODES = ("1", "2", "3")
_VOTERS = "controller.quorum.voters"


def prepare(place: ServerFolder, *, voters: str) -> None:
    """One of three; its number is the name of its folder."""
    prepare_kafka(place)
    settings = place.folder / "server.properties"
    own = place.folder.name
    text = settings.read_text().replace("node.id=1", f"node.id={own}")
    text = text.replace(
        f"controller.quorum.voters=1@{HOST}:{place.ports['controller']}", f"{_VOTERS}={voters}"
    )
    settings.write_text(text)
    meta = place.folder / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1\n", f"node.id={own}\n"))


class Cluster:
    """What a topic of the tests needs to know of a server, for three of them."""

    is_alive = True
    pid = 0

    def __init__(self, nodes: list[servers.Server]) -> None:
        self.nodes = nodes
        self.address = ",".join(node.address for node in nodes)
        self.credentials_file = nodes[0].credentials_file


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    if reason := servers.unavailable_reason("kafka"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    ports = free_ports([*(f"a{one}" for one in NODES), *NODES])
    voters = ",".join(f"{one}@{HOST}:{ports[one]}" for one in NODES)
    recipe = replace(RECIPES["kafka"], prepare=lambda place: prepare(place, voters=voters))
    monkeypatch.setitem(RECIPES, "kafka", recipe)
    secret = servers.new_credentials(is_aws=False)
    monkeypatch.setattr(servers, "new_credentials", lambda **_: secret)  # one login for all of them

    def start(one: str) -> servers.Server:
        return servers.start(
            "kafka", folder / one, ports={"client": ports[f"a{one}"], "controller": ports[one]}
        )

    nodes: list[servers.Server] = []
    try:
        with ThreadPoolExecutor(3) as pool:  # none answers before a second one is there
            nodes += pool.map(start, NODES)
        yield Cluster(nodes)
    finally:
        for node in nodes:
            node.kill()  # the last one of them would wait for the others
            node.stop()


def test_a_leader_dies_and_nothing_acknowledged_is_lost(cluster: Cluster, tmp_path: Path):
    topic = Topic(cluster, partitions=4, replication=3)
    before = leaders(topic)
    after: list[int] = []

    def trouble(table: Table) -> None:
        table.wait_for(100)
        cluster.nodes[before[0] - 1].kill()
        table.wait_for(300)  # by the other two
        after.extend(leaders(topic))

    found = run(topic, tmp_path, trouble)
    assert before[0] not in after, "no leader moved: nobody of importance died"
    assert (found.lost, max(found.stored.values())) == (0, 1)
    assert (found.audit.duplicate_chunks, found.audit.gap_chunks, found.audit.quarantined) == (
        0,
        0,
        0,
    )
    print(
        f"acked {len(found.acked)}, lost 0, doubled in the stream {found.doubled_in_stream}, "
        "stored twice 0"
    )


def leaders(topic: Topic) -> list[int]:
    found = (
        topic.admin.list_topics(topic.name, timeout=WAIT_TIMEOUT_S).topics[topic.name].partitions
    )
    return [one.leader for _, one in sorted(found.items())]
