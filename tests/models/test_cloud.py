"""Objects at a URL: what is away for now is told from what was refused, and no error shows a
secret."""

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.small_s3 import SmallS3, Trouble, small_s3
from understudy.core.errors import ConfigError, StorageFailed, Unreachable
from understudy.models.cloud import CloudObjects

pytest.importorskip("boto3", reason="pip install 'understudy[aws]'")

CALLS: dict[str, Callable[[CloudObjects], Any]] = {
    "read": lambda objects: objects.get("games/cart/1.json"),
    "list": lambda objects: objects.list("games"),
    "create": lambda objects: objects.create("games/cart/2.json", b"two"),
    "delete": lambda objects: objects.delete("games/cart/3.json"),
}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    with small_s3(monkeypatch) as server:
        yield server


@pytest.mark.parametrize("doing", CALLS)
@pytest.mark.parametrize("trouble", [500, 503, 429, "cut"])
def test_an_unavailable_server_is_unreachable_and_works_again_later(
    s3: SmallS3, doing: str, trouble: Trouble
):
    objects = CloudObjects(s3.url)
    objects.create("games/cart/1.json", b"one")
    s3.trouble = trouble
    with pytest.raises(
        Unreachable, match=rf"cannot {doing} games.* \(http://127.*check that the server is running"
    ):
        CALLS[doing](objects)
    s3.trouble = ""
    CALLS[doing](objects)
    assert objects.get("games/cart/1.json") == b"one"


def test_a_bucket_without_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in ("boto3", "botocore.session", "obstore.auth.boto3"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'understudy\[aws\]'"):
        CloudObjects("s3://bots")


def test_a_truncated_object_is_an_error(s3: SmallS3):
    objects = CloudObjects(s3.url)
    s3.trouble = "half"
    with pytest.raises(Unreachable):
        objects.get("games/cart/1.json")


@pytest.mark.parametrize("doing", CALLS)
def test_a_refused_connection_is_unreachable_with_the_address(
    monkeypatch: pytest.MonkeyPatch, s3: SmallS3, doing: str
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        objects = CloudObjects(f"s3://models/x?endpoint={gone}")
        with pytest.raises(
            Unreachable,
            match=rf"s3://models/x \({gone}, region \S+\): .*Connection refused.*; check that",
        ):
            CALLS[doing](objects)


@pytest.mark.parametrize("doing", CALLS)
@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_rejected_call_is_reported_at_once_without_retries(s3: SmallS3, doing: str, status: int):
    objects = CloudObjects(s3.url)
    s3.trouble = status
    with pytest.raises(StorageFailed, match=f"{status}.*check the permissions") as caught:
        CALLS[doing](objects)
    assert not isinstance(caught.value, Unreachable)
    assert len(s3.calls) == 1
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("doing", CALLS)
def test_a_response_of_a_proxy_does_not_make_an_object_look_missing(s3: SmallS3, doing: str):
    objects = CloudObjects(s3.url)
    objects.create("games/cart/1.json", b"one")
    s3.trouble = "proxy"
    with pytest.raises(
        StorageFailed, match=rf"cannot {doing} games.* 404 Not Found.*; correct endpoint="
    ):
        CALLS[doing](objects)
    s3.trouble = ""
    assert objects.get("games/cart/1.json") == b"one"
    assert objects.get("games/cart/9.json") is None


def test_missing_keys_are_unreachable_since_they_may_appear_later(
    s3: SmallS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        objects = CloudObjects(s3.url)
        with pytest.raises(
            Unreachable,
            match=r"cannot read games.*; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ):
            objects.get("games/cart/1.json")
    assert objects.get("games/cart/1.json") is None


@pytest.mark.parametrize(
    "url",
    [
        "nowhere://somebody:hush-hush@account/models",
        "nowhere://account/models?sig=hush-hush",
        "az://account/models?sig=hush-hush",
    ],
)
def test_no_error_shows_secrets_of_an_address(url: str):
    with pytest.raises(ConfigError, match="cannot store models") as caught:
        CloudObjects(url)
    assert "hush" not in str(caught.value)
