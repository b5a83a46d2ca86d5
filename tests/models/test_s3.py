"""Addresses of buckets, before anything is asked of the network."""

from pathlib import Path

import pytest

from understudy.core.errors import ConfigError
from understudy.models.cloud import CloudObjects


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3://bucket?regoin=x", "did you mean region"),
        ("s3://bucket?endpoint=http://elsewhere:9000", "insecure=true"),
        ("s3://key:secret@bucket/path", "credentials=FILE"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        CloudObjects(url)
    assert "secret" not in str(caught.value)


def test_keys_come_from_the_shared_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    path.write_text("[games]\naws_access_key_id = a\naws_secret_access_key = b\n")
    signed = CloudObjects("s3://bucket/path?profile=games&endpoint=http://127.0.0.1:9").signed_url("x/1", for_s=60)
    assert signed.startswith("http://127.0.0.1:9/bucket/path/x/1?")
    assert "X-Amz-Credential=a%2F" in signed
    with pytest.raises(ConfigError, match=r"no profile \[other\]"):
        CloudObjects("s3://bucket/path?profile=other")
    path.write_text("no file of this kind")
    with pytest.raises(ConfigError, match="no credentials file"):
        CloudObjects("s3://bucket/path?profile=games")
