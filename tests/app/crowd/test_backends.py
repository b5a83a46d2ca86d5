"""Addresses of a demonstration's servers, before any of them runs."""

from pathlib import Path

import pytest

from understudy.app.crowd import backends
from understudy.core.location import parse_location
from understudy.dev.process import Identity, Process
from understudy.dev.recipes import Place
from understudy.dev.servers import Server

ODD = Path("/srv/A & B/100%41 #1+2/Zürich=?")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    """Servers that do not run, in a folder of odd characters; nothing is made on them."""
    monkeypatch.setattr(backends, "create_stream", lambda url, *, partitions: None)
    monkeypatch.setattr(backends, "init_store", lambda url: None)
    return {name: server(name) for name in ("kinesalite", "kafka", "cassandra", "s3")}


def server(name: str) -> Server:
    place = Place(
        folder=ODD / name, package=ODD, ports={"client": 20_001}, credentials={"region": "us-east-1"},
        credentials_file=ODD / name / "credentials",
    )  # fmt: skip
    return Server(name, place, process=Process(Identity(0, "")))


def test_addresses_lead_to_the_credentials_whatever_the_folder_is_called(servers):
    found = {
        "kinesalite": parse_location(backends._stream("kinesis", servers, "x")),
        "kafka": parse_location(backends._stream("kafka", servers, "x")),
        "cassandra": parse_location(backends._store("cassandra", servers, "x")),
        "s3": parse_location(backends._models("s3", servers, "x")),
    }
    for name, one in found.items():
        assert one.text("credentials") == str(ODD / name / "credentials")
    assert [one.hosts for one in found.values()] == [
        (("demo-x", None),), (("127.0.0.1", 20_001),), (("127.0.0.1", 20_001),), (("understudy", None),)
    ]  # fmt: skip
    assert [one.path for one in found.values()] == ["", "demo-x", "demo_x", "demo-x"]
    assert {found[name].text("endpoint") for name in ("kinesalite", "s3")} == {"http://127.0.0.1:20001"}


def test_words_for_what_is_in_the_data_folder_are_no_addresses(servers):
    assert backends._stream("file", servers, "x") == ""
    assert backends._store("local", servers, "x") == ""
    assert backends._models("folder", servers, "x") == ""
    assert backends._stream("kafka://h:1/t?credentials=F", servers, "x") == "kafka://h:1/t?credentials=F"
