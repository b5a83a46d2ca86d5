"""The closed loop: URLs of its servers, before any of them runs, and its result."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import ConfigError
from understudy.core.location import parse_location
from understudy.core.statistics import Estimate
from understudy.dev.process import Identity, Process
from understudy.dev.recipes import ServerFolder
from understudy.dev.servers import Server
from understudy.simulation import loop
from understudy.simulation.loop import LoopConfig, LoopResult
from understudy.simulation.verify import Verification

ODD = Path("/srv/A & B/100%41 #1+2/Zürich=?")
COUNTS: dict[str, Any] = {field.name: 0 for field in fields(Verification)} | {
    "corrupt": (),
    "live_writer": False,
}
VERIFICATION = Verification(**COUNTS | {"steps": 120, "ledger_steps": 100})
RESULT = LoopResult(
    first=Estimate(-0.7, -0.7999999999999999, -0.6),
    last=Estimate(0.1, None, None),
    is_match=True,
    judged_on="serves",
    improved=True,
    verification=VERIFICATION,
    model_versions=[1, 2],
    killed=None,
    restarts=0,
    seconds=60.1,
)
NO_BOT = replace(
    RESULT, first=None, last=None, judged_on=None, improved=False, model_versions=[], seconds=134.2
)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    """Servers that do not run, in a folder of odd characters; nothing is made on them."""
    monkeypatch.setattr(loop, "create_stream", lambda url, *, partitions: None)
    monkeypatch.setattr(loop, "init_store", lambda url: None)
    return {name: server(name) for name in ("kinesalite", "kafka", "cassandra", "s3")}


def server(name: str) -> Server:
    place = ServerFolder(
        folder=ODD / name,
        package=ODD,
        ports={"client": 20_001},
        credentials={"region": "us-east-1"},
        credentials_file=ODD / name / "credentials",
    )
    return Server(name, place, process=Process(Identity(0, "")))


def test_urls_name_the_credentials_file_whatever_the_folder_is_called(servers):
    found = {
        "kinesalite": parse_location(loop.address("kinesis", servers, "x")),
        "kafka": parse_location(loop.address("kafka", servers, "x")),
        "cassandra": parse_location(loop.address("cassandra", servers, "x")),
        "s3": parse_location(loop.address("s3", servers, "x")),
    }
    for name, one in found.items():
        assert one.text("credentials") == str(ODD / name / "credentials")
    assert [one.hosts for one in found.values()] == [
        (("demo-x", None),),
        (("127.0.0.1", 20_001),),
        (("127.0.0.1", 20_001),),
        (("understudy", None),),
    ]
    assert [one.path for one in found.values()] == ["", "demo-x", "demo_x", "demo-x"]
    assert {found[name].text("endpoint") for name in ("kinesalite", "s3")} == {
        "http://127.0.0.1:20001"
    }


def test_options_for_the_data_folder_have_no_url(servers):
    assert loop.address("file", servers, "x") == ""
    assert loop.address("local", servers, "x") == ""
    assert loop.address("folder", servers, "x") == ""
    assert (
        loop.address("kafka://h:1/t?credentials=F", servers, "x") == "kafka://h:1/t?credentials=F"
    )


@pytest.mark.parametrize("min_seconds", [-1.0, 86_401.0, float("nan")])
def test_a_shortest_time_that_cannot_be_played_is_rejected(min_seconds: float):
    with pytest.raises(ConfigError, match="pass a number from 0 to 86400, such as 30"):
        LoopConfig(min_seconds=min_seconds)


def test_numbers_are_rounded():
    told = RESULT.to_json()
    assert (told["first_share"], told["first_share_low"], told["first_low"]) == (0.15, 0.1, -0.8)
    assert told["last_low"] == told["last_high"] == told["last_return"] == 0.1


def test_a_loop_without_a_bot_has_the_same_fields():
    told = NO_BOT.to_json()
    assert set(told) == set(RESULT.to_json())
    assert told["improved"] is False
    assert told["first_share"] is told["last_low"] is None
    assert (told["acked_steps"], told["stored_steps"], told["lost_steps"]) == (100, 120, 0)
