"""The URL of a location on a server parses back to the same location."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core.location import parse_location
from understudy.dev.servers import aws_location, host_location


@dataclass(frozen=True)
class Somewhere:
    address: str = "127.0.0.1:9042"
    url: str = "http://127.0.0.1:9042"
    credentials: Mapping[str, str] = field(default_factory=lambda: {"region": "here"})
    credentials_file: Path = Path("/my keys & more/100%?/file")


def test_a_url_parses_back_whatever_characters_the_folder_has():
    store = host_location(Somewhere(), "cassandra", "games", replication="1")
    models = aws_location(Somewhere(), "s3", "bots", "a b")
    for location in (store, models):
        assert parse_location(location.url) == location
        assert location.options["credentials"] == "/my keys & more/100%?/file"
    assert (store.hosts, store.options["replication"]) == ((("127.0.0.1", 9042),), "1")
    assert (models.hosts, models.path, models.options["region"]) == (
        (("bots", None),),
        "a b",
        "here",
    )
