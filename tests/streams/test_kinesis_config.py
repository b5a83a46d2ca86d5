"""Addresses of Kinesis streams: what they mean, and what is rejected before any request."""

import importlib.util
import sys

import pytest

from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.location import parse_location
from understudy.streams.kinesis import open_kinesis
from understudy.streams.kinesis_client import KinesisConfig, kinesis_config

has_boto3 = pytest.mark.skipif(
    importlib.util.find_spec("boto3") is None, reason="the extra aws is not installed"
)


def config_of(text: str) -> KinesisConfig:
    return kinesis_config(parse_location(text))


def test_an_address_names_stream_region_and_endpoint():
    config = config_of(
        "kinesis://Play-1.x?region=eu-west-1&endpoint=http://127.0.0.1:4567&poll_s=0.5&profile=me"
    )
    assert config == KinesisConfig(
        stream="Play-1.x",
        region="eu-west-1",
        endpoint="http://127.0.0.1:4567",
        poll_s=0.5,
        profile="me",
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("kinesis://play?regoin=eu-west-1", "did you mean region"),
        ("kinesis://play:80", "no port or path"),
        ("kinesis://play/more", "no port or path"),
        ("kinesis://", "has one stream name"),
        ("kinesis://a,b", "has one stream name"),
        ("kinesis://pl%20ay", "not a valid name of a Kinesis stream"),
        ("kinesis://play?poll_s=-1", "poll_s"),
        ("kinesis://play?timeout_s=0", "timeout_s"),
        ("kinesis://play?insecure=perhaps", "true or false"),
        ("kinesis://play?endpoint=127.0.0.1:80", "give http://127.0.0.1:PORT"),
        ("kinesis://play?endpoint=ftp://127.0.0.1", "give http://127.0.0.1:PORT"),
        ("kinesis://play?endpoint=http://127.0.0.1:99999", "give http://127.0.0.1:PORT"),
        ("kinesis://play?endpoint=http://me:secret@127.0.0.1:80", "without a user"),
        ("kinesis://play?endpoint=http://10.0.0.7:4567", "insecure=true"),
        ("kinesis://play?endpoint=http://kinesis.example:4567", "insecure=true"),
    ],
)
def test_an_invalid_address_is_rejected_with_a_correction(address: str, words: str):
    with pytest.raises(ConfigError, match=words):
        config_of(address)


@pytest.mark.parametrize(
    "endpoint",
    ["http://localhost:1", "http://[::1]:1", "http://127.3.2.1:1", "https://far.example"],
)
def test_plain_http_stays_on_this_machine(endpoint: str):
    assert config_of(f"kinesis://play?endpoint={endpoint}").endpoint == endpoint


def test_plain_http_leaves_the_machine_only_with_insecure():
    assert config_of("kinesis://play?endpoint=http://10.0.0.7:4567&insecure=true").insecure


def test_without_boto3_the_error_shows_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(MissingExtra, match=r"pip install 'understudy\[aws\]'"):
        open_kinesis(parse_location("kinesis://play?region=eu-west-1"))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No AWS settings in the environment."""
    for name in (
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@has_boto3
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("kinesis://play", "no AWS region"),
        (
            "kinesis://play?region=eu-west-1&endpoint=http://127.0.0.1:1",
            "locate credentials; set AWS_ACCESS",
        ),
        (
            "kinesis://play?region=eu west&endpoint=http://127.0.0.1:1",
            "is 'eu west'; use a region such as eu-west-1",
        ),
        (
            "kinesis://play?region=eu-west-1&profile=nobody",
            r"profile \[nobody\] has no AWS keys: .*\(nobody\)",
        ),
        (
            "kinesis://play?region=eu-west-1&credentials=/nowhere/keys",
            "keys has no AWS keys: .*aws_access_key_id",
        ),
    ],
)
def test_invalid_aws_settings_are_reported(bare, address: str, words: str):
    with pytest.raises(ConfigError, match=words):
        open_kinesis(parse_location(address))
