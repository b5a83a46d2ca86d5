"""Three nodes with three replicas: one dies during writes and restarts, then another dies."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.integration.keyspaces import Keyspace
from tests.integration.source import Key, Source, faults_in, insist
from understudy.core.errors import Unreachable
from understudy.core.location import parse_location
from understudy.dev import servers
from understudy.dev.process import HOST, free_ports, listens
from understudy.dev.recipes import RECIPES, ServerFolder, prepare_cassandra
from understudy.stores.cassandra.wire import Wire, read_options

pytestmark = pytest.mark.slow
NODES = ("1", "2", "3")
_TOGETHER_S = 60.0


def prepare(place: ServerFolder, *, seed: int) -> None:
    """One of three nodes with the first as seed; without passwords, whose table has one replica."""
    prepare_cassandra(place)
    settings = place.folder / "cassandra.yaml"
    text = settings.read_text().replace(f"{HOST}:{place.ports['peers']}", f"{HOST}:{seed}")
    text = text.replace("PasswordAuthenticator", "AllowAllAuthenticator")
    settings.write_text(text.replace("CassandraAuthorizer", "AllowAllAuthorizer"))


class Cluster:
    """What a keyspace needs to know of a server, for three of them."""

    def __init__(self, nodes: list[servers.Server]) -> None:
        self.nodes = nodes
        self.address = ",".join(node.address for node in nodes)
        self.credentials_file = nodes[0].credentials_file

    def await_all(self) -> None:
        """Wait until every node knows that all of them are up."""
        deadline = time.monotonic() + _TOGETHER_S
        for node in self.nodes:
            while self._known_to(node) != [True] * len(self.nodes):
                assert time.monotonic() < deadline, f"{node.address} does not see the others"
                time.sleep(0.5)

    def _known_to(self, node: servers.Server) -> list[bool]:
        wire = Wire(read_options(parse_location(f"cassandra://{node.address}/none")))
        try:
            return [bool(host.is_up) for host in wire.session.cluster.metadata.all_hosts()]
        finally:
            wire.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := servers.unavailable_reason("cassandra"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    ports = free_ports([*(f"a{one}" for one in NODES), *NODES])

    def start(one: str) -> servers.Server:
        while one != NODES[0] and not listens(ports[NODES[0]]):
            time.sleep(0.2)  # whoever finds nobody to ask gives up
        return servers.start(
            "cassandra", folder / one, ports={"client": ports[f"a{one}"], "peers": ports[one]}
        )

    nodes: list[servers.Server] = []
    secret = servers.new_credentials(is_aws=False)
    recipe = replace(
        RECIPES["cassandra"],
        prepare=lambda place: prepare(place, seed=ports[NODES[0]]),
        initialise=lambda place: None,  # there are no users
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "cassandra", recipe)
        patch.setattr(servers, "new_credentials", lambda *, is_aws: secret)
        try:
            with ThreadPoolExecutor(3) as pool:
                nodes += pool.map(start, NODES)
            made = Cluster(nodes)
            made.await_all()
            yield made
        finally:
            for node in nodes:
                node.kill()
                node.stop()


def test_one_of_three_nodes_dies_mid_write_and_nothing_is_lost_or_duplicated(
    cluster: Cluster,
) -> None:
    keyspace = Keyspace(cluster, cluster.credentials_file, "copies", replication=3)
    sources = [Source(one, n_sessions=6, n_chunks=40) for one in (1, 2, 3)]
    acked: list[Key] = []
    begun = threading.Event()
    threads = [
        threading.Thread(target=insist, args=(source, keyspace, acked, begun)) for source in sources
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60.0)
    cluster.nodes[0].kill()
    before = len(acked)
    for thread in threads:
        thread.join(180.0)
        assert not thread.is_alive()
    assert len(acked) - before > 100, "by the other two, while one was away"
    assert len(acked) == len(set(acked))
    with keyspace.open() as reader:
        assert faults_in(reader, *sources) == [], "two nodes know everything"
    cluster.nodes[0].restart()
    cluster.await_all()
    cluster.nodes[1].kill()
    with keyspace.open() as reader:
        assert faults_in(reader, *sources) == [], "so do the one that was away and one that was not"
    print(f"acked {len(acked)}, {len(acked) - before} of them with one node down; lost 0, twice 0")
    keyspace.close()


def test_two_of_three_nodes_down_is_reported_and_recovers(cluster: Cluster) -> None:
    keyspace = Keyspace(cluster, cluster.credentials_file, "few", replication=3)
    source = Source(1)
    with keyspace.open(options="&retry_s=4&timeout_s=3") as store:
        claim = store.claim(source.name, owner="test", ttl_s=60.0)
        for node in cluster.nodes[1:]:
            node.kill()
        with pytest.raises(Unreachable) as caught:
            store.write(source.batch(claim.epoch, None, 6))
        assert "\n" not in str(caught.value)
        for node in cluster.nodes[1:]:
            node.restart()
        cluster.await_all()
        source.drain(store, 6)
        assert faults_in(store, source) == []
    keyspace.close()
