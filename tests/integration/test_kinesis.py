"""The Kinesis stream fulfils the Stream contract on real servers of its API, also under faults."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.kinesis import KinesisHarness
from tests.servers.fault_proxy import FaultProxy, Rates
from understudy.ports import Stream
from understudy.testing.streams import StreamContract, read_all


class _OnAServer(StreamContract):
    def make(self) -> Stream:
        self.harness = KinesisHarness(self.server, url=self.url)
        self.harnesses.append(self.harness)
        return self.harness.open()

    def reopen(self, stream: Stream) -> Stream:
        return self.harness.open()

    def end(self, stream: Stream) -> Stream:
        stream.close()
        self.harness.split_all()
        return self.harness.open()

    server: Any
    url = ""
    harness: KinesisHarness
    harnesses: list[KinesisHarness]


def _run(test: _OnAServer, server: Any, url: str = "") -> Iterator[None]:
    test.server = server
    test.url = url
    test.harnesses = []
    yield
    for one in test.harnesses:
        one.close()


class TestKinesisLocal(_OnAServer):
    @pytest.fixture(autouse=True)
    def on_a_server(self, kinesis_server: Any) -> Iterator[None]:
        yield from _run(self, kinesis_server)


class _BehindAProxy(_OnAServer):
    """Trimmed by the proxy: no local server forgets anything within a day."""

    proxy: FaultProxy

    def trim(self, stream: Stream, partition: str) -> Stream:
        records = read_all(stream)[partition]
        self.proxy.hidden.update(record.position for record in records[:-2])
        stream.close()
        return self.harness.open()


class TestKinesalite(_BehindAProxy):
    """The proxy passes everything on, except for the records that a test has trimmed."""

    @pytest.fixture(autouse=True)
    def on_a_server(self, kinesalite_server: Any) -> Iterator[None]:
        with FaultProxy(kinesalite_server.url) as self.proxy:
            yield from _run(self, kinesalite_server, self.proxy.url)


@pytest.fixture(scope="module")
def failing_proxy(kinesalite_server: Any) -> Iterator[FaultProxy]:
    """Every fault but those that put a record into the stream twice: the contract counts them."""
    rates = Rates(throttle=0.1, partial=0.2, expired=0.1, repeat=0.3, empty=0.2, delay=0.1)
    with FaultProxy(kinesalite_server.url, rates, seed=7) as proxy:
        yield proxy
        print(f"faults: {dict(proxy.fired)} in {dict(proxy.calls)}")
        proxy.assert_fired()


class TestBehindAProxyThatFails(_BehindAProxy):
    @pytest.fixture(autouse=True)
    def on_a_server(self, kinesalite_server: Any, failing_proxy: FaultProxy) -> Iterator[None]:
        self.proxy = failing_proxy
        yield from _run(self, kinesalite_server, failing_proxy.url)
