"""Addresses of buckets, before anything is asked of the network."""

from pathlib import Path

import pytest

from understudy.core.errors import ConfigError
from understudy.models.cloud import CloudObjects

pytest.importorskip("boto3", reason="pip install 'understudy[aws]'")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "has no bucket"),
        ("s3://bucket?regoin=x", "did you mean region"),
        ("s3://bucket?endpoint=http://elsewhere:9000", "insecure=true"),
        ("s3://bucket?endpoint=nonsense", "give http://127.0.0.1:PORT"),
        ("s3://bucket?endpoint=http://127.0.0.1:99999", "give http://127.0.0.1:PORT"),
        ("s3://bucket?endpoint=http://me:secret@127.0.0.1:9", "without a user"),
        (
            "s3://bucket?region=eu west",
            "region of s3://bucket is 'eu west'; use a region such as eu-west-1",
        ),
        ("s3://My Bucket/x", "'My Bucket' is not a valid bucket name"),
        ("s3://ведро/x", "is not a valid bucket name; write s3://BUCKET/PATH"),
        ("s3://bucket:80/x", "is not a valid bucket name"),
        ("s3://key:secret@bucket/path", "credentials=FILE"),
    ],
)
def test_an_invalid_address_is_rejected(url: str, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        CloudObjects(url)
    assert "secret" not in str(caught.value)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared credentials file, and an environment with other keys."""
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = e\n"
        "[games]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "others-token")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return path


def signed(options: str) -> str:
    url = f"s3://bucket/path?endpoint=http://127.0.0.1:9{options}"
    return CloudObjects(url).signed_url("x/1", for_s=60)


def test_named_keys_replace_all_keys_of_the_environment(
    keys: Path, monkeypatch: pytest.MonkeyPatch
):
    for options, key in ((f"&credentials={keys}", "d"), ("&profile=games", "a")):
        found = signed(options)
        assert found.startswith("http://127.0.0.1:9/bucket/path/x/1?")
        assert f"X-Amz-Credential={key}%2F" in found
        assert "others-token" not in found
    monkeypatch.setenv("AWS_PROFILE", "games")
    assert "X-Amz-Credential=d%2F" in signed(f"&credentials={keys}")


@pytest.mark.usefixtures("keys")
def test_without_a_name_the_keys_and_token_of_the_environment_are_used(
    monkeypatch: pytest.MonkeyPatch,
):
    found = signed("")
    assert "X-Amz-Credential=other%2F" in found
    assert "X-Amz-Security-Token=others-token" in found
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = signed("")
    assert "X-Amz-Credential=d%2F" in found
    assert "others-token" not in found


def test_a_missing_file_or_profile_is_a_clear_error(keys: Path):
    with pytest.raises(ConfigError, match=r"config profile \(other\) could not be found"):
        signed("&profile=other")
    with pytest.raises(ConfigError, match=r"credentials file \S+nowhere has no AWS keys"):
        signed(f"&credentials={keys.with_name('nowhere')}")


def test_a_named_file_may_get_its_keys_from_a_program(keys: Path, tmp_path: Path):
    said = tmp_path / "said.json"
    said.write_text('{"Version": 1, "AccessKeyId": "asked", "SecretAccessKey": "s"}')
    (tmp_path / "own").write_text(f"[default]\ncredential_process = cat {said}\n")
    assert "X-Amz-Credential=asked%2F" in signed(f"&credentials={tmp_path / 'own'}")


def test_a_profile_may_get_its_keys_from_a_program(keys: Path, tmp_path: Path):
    said = tmp_path / "said.json"
    said.write_text(
        '{"Version": 1, "AccessKeyId": "asked", "SecretAccessKey": "s", "SessionToken": "its-own"}'
    )
    (tmp_path / "config").write_text(
        f"[profile asks]\ncredential_process = cat {said}\nregion = eu-north-1\n"
    )
    found = signed("&profile=asks")
    assert "X-Amz-Credential=asked%2F" in found
    assert "%2Feu-north-1%2F" in found
    assert "X-Amz-Security-Token=its-own" in found
