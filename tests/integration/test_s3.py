"""Models on a real S3 API: the object store contract, races, right and wrong keys."""

import socket

import pytest
import urllib3

from understudy.core.errors import ConfigError, StorageFailed, Unreachable
from understudy.models.cloud import CloudObjects
from understudy.testing.objects import ObjectsContract


class TestS3(ObjectsContract):
    """The contract of Objects."""

    @pytest.fixture(autouse=True)
    def _place(self, bucket: str) -> None:
        self._url = bucket

    def make(self) -> CloudObjects:
        return CloudObjects(self._url)


def test_a_signed_url_grants_access_to_one_object(bucket: str):
    objects = CloudObjects(bucket)
    objects.create("bots/7.safetensors", b"weights")
    url = objects.signed_url("bots/7.safetensors", for_s=60)
    answer = urllib3.request("GET", url)
    assert (answer.status, answer.data) == (200, b"weights")
    assert urllib3.request("GET", url.partition("?")[0]).status in (401, 403)
    assert urllib3.request("GET", url.replace("7.safetensors", "8.safetensors")).status in (
        401,
        403,
    )


def test_the_keys_of_a_named_file_override_the_environment(bucket: str, s3_server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "others")
    monkeypatch.setenv("AWS_PROFILE", "others")
    objects = CloudObjects(f"{bucket}&credentials={s3_server.credentials_file}")
    assert objects.create("a", b"b")
    assert objects.get("a") == b"b"


def test_wrong_keys_a_missing_bucket_and_an_unreachable_server_are_reported(
    bucket: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(StorageFailed, match=r"NoSuchBucket.*create the bucket"):
        CloudObjects(bucket.replace("models-", "nowhere-")).create("a", b"b")
    with pytest.raises(ConfigError, match="could not be found"):
        CloudObjects(f"{bucket}&profile=nobody")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match="check that the server is running"):
            CloudObjects(f"s3://models/x?endpoint={gone}").create("a", b"b")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    with pytest.raises(StorageFailed) as caught:
        CloudObjects(bucket).create("a", b"b")
    assert "hush-hush" not in str(caught.value)
