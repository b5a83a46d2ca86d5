"""Wrong addresses and keys with S3, and servers that are not S3: one-line errors with a fix."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.web_page import web_page
from understudy.core.errors import StorageFailed
from understudy.models.cloud import CloudObjects

SOON_S = 30.0
"""A call without an answer takes longer; a rejected one is retried for half of it."""
CALLS: dict[str, Callable[[CloudObjects], Any]] = {
    "read": lambda objects: objects.get("a"),
    "list": lambda objects: objects.list("a"),
    "create": lambda objects: objects.create("a", b"b"),
}


def told(url: str, doing: str = "read") -> str:
    """The error of a call: one line, quickly."""
    began_s = time.monotonic()
    with pytest.raises(StorageFailed) as caught:
        CALLS[doing](CloudObjects(url))
    assert time.monotonic() - began_s < SOON_S
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"cannot {doing} a at s3://")
    assert "hush-hush" not in line
    return line


@pytest.mark.parametrize("doing", CALLS)
def test_a_missing_bucket_is_reported_with_the_command_that_creates_it(
    bucket: str, s3_server: Any, doing: str
):
    line = told(bucket.replace("models-", "nowhere-"), doing)
    assert line.startswith(f"cannot {doing} a at s3://nowhere-")
    assert f"({s3_server.url}, region us-east-1): " in line
    assert line.endswith("; create the bucket, or correct the address")


@pytest.mark.parametrize("doing", CALLS)
def test_an_unknown_key_is_not_mistaken_for_a_missing_object(
    bucket: str, monkeypatch: pytest.MonkeyPatch, doing: str
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    line = told(bucket, doing)
    assert (
        "check AWS_ACCESS_KEY_ID, AWS_PROFILE or the role of this machine, and the permissions in "
        "docs/s3.md" in line
    )


def test_a_wrong_secret_is_reported_with_its_file(bucket: str, s3_server: Any, tmp_path: Path):
    wrong = tmp_path / "keys"
    key = s3_server.credentials["access_key_id"]
    wrong.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = hush-hush\n")
    line = told(f"{bucket}&credentials={wrong}")
    assert "SignatureDoesNotMatch" in line
    assert f"check [default] of credentials file {wrong}" in line


def test_a_wrong_region_is_reported_with_the_buckets_region(bucket: str):
    line = told(bucket.replace("region=us-east-1", "region=eu-x-1"))
    assert "region eu-x-1): " in line
    assert line.endswith("; set region= to the region of the bucket")
    assert "us-east-1" in line


def test_tls_with_a_plaintext_server_is_reported(bucket: str):
    assert "the endpoint does not use TLS; use http:// in endpoint=" in told(
        bucket.replace("http://", "https://")
    )


@pytest.mark.parametrize("doing", ["read", "create"])
def test_a_web_server_is_reported_as_such(bucket: str, s3_server: Any, doing: str):
    with web_page() as page:
        line = told(bucket.replace(s3_server.url, page), doing)
    assert f"({page}, region us-east-1): " in line
    assert line.endswith("the endpoint is not S3-compatible; correct endpoint=")


def test_servers_of_other_kinds_are_reported(
    bucket: str, s3_server: Any, kinesis_server: Any, kafka_server: Any
):
    line = told(bucket.replace(s3_server.url, kinesis_server.url), "create")
    assert "404 Not Found" in line
    assert line.endswith("the endpoint is not S3-compatible; correct endpoint=")
    line = told(bucket.replace(s3_server.url, f"http://{kafka_server.address}"))
    assert "(IncompleteMessage); check that the server is running" in line
