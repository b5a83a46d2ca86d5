"""An address of a place on a server is read back as it was, whatever its folder is called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core.location import parse_location
from understudy.dev.servers import on_aws, on_host


@dataclass(frozen=True)
class Somewhere:
    address: str = "127.0.0.1:9042"
    url: str = "http://127.0.0.1:9042"
    credentials: Mapping[str, str] = field(default_factory=lambda: {"region": "here"})
    credentials_file: Path = Path("/my keys & more/100%?/file")


def test_an_address_is_read_back_whatever_the_folder_is_called():
    store = on_host(Somewhere(), "cassandra", "games", replication="1")
    models = on_aws(Somewhere(), "s3", "bots", "a b")
    for one in (store, models):
        assert parse_location(one.url) == one
        assert one.options["credentials"] == "/my keys & more/100%?/file"
    assert (store.hosts, store.options["replication"]) == ((("127.0.0.1", 9042),), "1")
    assert (models.hosts, models.path, models.options["region"]) == (
        (("bots", None),),
        "a b",
        "here",
    )
