"""Addresses of backends, and the files that contain their secrets."""

import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.location import (
    Credentials,
    Location,
    aws_session,
    check_endpoint,
    parse_location,
    read_credentials,
    source_of_keys,
    without_secrets,
)


def test_an_address_is_parsed():
    url = "cassandra://a:9042,b,[::1]:7/games?consistency=QUORUM&tls=true&ttl_s=5"
    location = parse_location(url)
    assert location.hosts == (("a", 9042), ("b", None), ("::1", 7))
    assert (location.scheme, location.path) == ("cassandra", "games")
    assert location.text("consistency") == "QUORUM"
    assert location.flag("tls") is True
    assert location.number("ttl_s", 0) == 5.0
    assert parse_location("kinesis://steps") == Location("kinesis", (("steps", None),))


@pytest.mark.parametrize(
    "odd", ["plain", "a b", "a&b=c", "a#b?c", "100%41", "a+b", "Zürich/ö", "a;b'\"c", "[x]:@"]
)
def test_an_address_is_read_back_with_any_characters(odd: str):
    location = Location(
        "cassandra",
        (("a", 9042), ("b", None), ("::1", 7)),
        f"x/{odd}",
        {"credentials": f"/{odd}/c", odd: "1"},
    )
    assert parse_location(location.url) == location
    assert " " not in location.url
    assert Location("kinesis", (("steps", None),)).url == "kinesis://steps"
    url = "s3://bots/games?endpoint=http://127.0.0.1:9000&credentials=/srv/me/c"
    assert parse_location(url).url == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere", "write it as"),
        ("kafka://u:secret@h:1/t", "credentials=FILE"),
        ("kafka://h:port/t", "write HOST:PORT"),
        ("kafka://h:99999/t", "write HOST:PORT"),
        ("kafka://h/t?a=1&a=2", "given twice"),
        ("kafka://h/t?a", "cannot be read"),
    ],
)
def test_a_malformed_address_is_refused_without_showing_its_secret(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_location(text)
    assert "secret" not in str(caught.value)


def test_invalid_options_are_refused():
    location = parse_location("kafka://h/t?tsl=true&linger_s=x")
    with pytest.raises(ConfigError, match="did you mean tls"):
        location.check_options({"tls", "linger_s"})
    with pytest.raises(ConfigError, match="linger_s"):
        location.number("linger_s", 1.0)
    with pytest.raises(ConfigError, match="true or false"):
        parse_location("kafka://h/t?tls=1").flag("tls")


def test_whole_numbers_are_digits_within_their_range():
    location = parse_location(
        f"kafka://h/t?a=64&b=2.5&c=-1&d=99&e=²&f={'0' * 20}99&g={'9' * 5000}&h="
    )
    assert location.integer("a", 1, most=64) == 64
    assert location.integer("none", 7, least=5, most=9) == 7
    for name in "bcdefgh":
        with pytest.raises(
            ConfigError,
            match=f"{name} of kafka:// is .*; give a whole number from 1 to 64, such as 8",
        ):
            location.integer(name, 8, least=1, most=64)


def test_credentials_come_from_a_file_and_are_not_shown(tmp_path: Path):
    path = tmp_path / "credentials.toml"
    path.write_text('username = "u"\npassword = "hush"\n')
    credentials = read_credentials(path)
    assert credentials == Credentials("u", "hush")
    assert "hush" not in repr(credentials)


@pytest.mark.parametrize(
    "content", [None, "hush =", 'password = "hush"', "username = 1\npassword = 'hush'"]
)
def test_a_bad_credentials_file_is_named_and_not_shown(tmp_path: Path, content: str | None):
    path = tmp_path / "credentials.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="two lines") as caught:
        read_credentials(path)
    assert "hush" not in str(caught.value)


pytest.importorskip("botocore", reason="pip install 'understudy[aws]'")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without keys, whose shared files have the profiles `default`, `games`,
    `half`, `role`, `asks`."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = shared\naws_secret_access_key = s1\n"
        "[games]\naws_access_key_id = games\naws_secret_access_key = 100%s2\naws_session_token = "
        "t2\n"
        "[half]\naws_access_key_id = half\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile games]\nregion = eu-north-1\ns3 =\n  "
        "max_concurrent_requests = 20\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = games\nregion = "
        "ap-south-1\n"
        "[profile empty]\nregion = eu-west-1\n"
    )
    (tmp_path / "own").write_text(
        "[default]\naws_access_key_id = own\naws_secret_access_key = s4\n"
    )
    for name in (
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")


def keys(**named: str) -> tuple[str, str, str | None]:
    frozen: Any = aws_session("s3", **named).get_credentials().get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token


@pytest.mark.usefixtures("keys_around")
def test_a_named_file_is_the_only_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_PROFILE", "games")
    assert keys(credentials=str(tmp_path / "own")) == ("own", "s4", None)
    assert keys(credentials=str(tmp_path / "credentials"), profile="games") == (
        "games",
        "100%s2",
        "t2",
    )
    with pytest.raises(
        ConfigError, match=r"\[games\] of credentials file .*own has no AWS keys.*aws_access_key_id"
    ):
        keys(credentials=str(tmp_path / "own"), profile="games")


@pytest.mark.usefixtures("keys_around")
def test_a_named_profile_takes_precedence_over_keys_in_the_environment():
    assert keys(profile="games") == ("games", "100%s2", "t2")
    assert aws_session("s3", profile="games").get_config_variable("region") == "eu-north-1"


@pytest.mark.usefixtures("keys_around")
def test_without_either_the_environment_takes_precedence_over_the_shared_files(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AWS_PROFILE", "games")
    assert keys() == ("env", "env-secret", "env-token")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert keys() == ("games", "100%s2", "t2")


def test_a_token_of_the_environment_is_not_used_with_the_keys_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    assert keys() == ("shared", "s1", None)


def test_a_region_comes_from_the_address_then_the_environment_then_the_profile(
    monkeypatch: pytest.MonkeyPatch,
):
    assert aws_session("s3").get_config_variable("region") == "eu-west-1"
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert aws_session("s3").get_config_variable("region") == "eu-central-1"
    assert aws_session("s3", region="us-west-2").get_config_variable("region") == "us-west-2"


def test_without_named_credentials_the_role_of_the_machine_stays_in_the_chain(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no"))
    session = aws_session("s3")
    methods = {
        provider.METHOD for provider in session.get_component("credential_provider").providers
    }
    assert {"env", "iam-role", "container-role"} <= methods


def test_the_keys_of_a_role_are_not_requested_when_a_session_is_created():
    assert aws_session("s3", profile="role").get_credentials().method == "assume-role"


@pytest.mark.parametrize("profile", ["nobody", "half", "empty"])
@pytest.mark.parametrize("around", [False, True])
def test_a_named_profile_without_keys_is_refused_and_no_other_keys_are_used(
    request, profile: str, around: bool
):
    if around:
        request.getfixturevalue("keys_around")
    with pytest.raises(
        ConfigError, match=rf"profile \[{profile}\] has no AWS keys: .*; it needs aws_access_key_id"
    ):
        aws_session("s3", profile=profile)


def test_an_unknown_aws_profile_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"config profile \(nobody\) could not be found"):
        aws_session("s3")


def test_a_key_without_its_secret_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hush")
    with pytest.raises(ConfigError, match="missing: AWS_SECRET_ACCESS_KEY"):
        aws_session("s3")


@pytest.mark.parametrize(
    "inside",
    [
        None,
        b"no file of this kind, hush",
        b"\xff\xfe\x00hush",
        b"",
        b"[default]\naws_access_key_id = hush\n",
        b"[default]\naws_access_key_id = hush\naws_access_key_id = hush\n",
        b'username = "hush"\npassword = "hush"\n',
        b"[default]\ncredential_process = no-such-program-anywhere\n",
    ],
)
@pytest.mark.usefixtures("keys_around")
def test_a_named_file_without_keys_is_refused_and_never_quoted(
    tmp_path: Path, inside: bytes | None
):
    if inside is not None:
        (tmp_path / "c").write_bytes(inside)
    with pytest.raises(
        ConfigError, match=r"\[default\] of credentials file \S+c has no AWS keys: "
    ) as caught:
        aws_session("s3", credentials=str(tmp_path / "c"))
    assert "hush" not in str(caught.value)


def test_without_the_package_the_install_command_is_in_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(
        MissingExtra, match=r"s3:// needs the package boto3 .*; pip install 'understudy\[aws\]'"
    ):
        aws_session("s3")


def test_the_source_of_keys_is_named_as_they_are_found():
    assert source_of_keys(credentials="F", profile="games") == "[games] of credentials file F"
    assert source_of_keys(credentials="F", profile="") == "[default] of credentials file F"
    assert source_of_keys(credentials="", profile="games") == "profile [games]"
    assert "AWS_ACCESS_KEY_ID" in source_of_keys(credentials="", profile="")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host:1/path", "https://host:1/path"),
        ("https://name:hush@host/path?token=hush", "https://host/path"),
        ("https://name:hu@sh@host", "https://host"),
        ("name:hush@host", "host"),
        ("", ""),
        ("https://" + "a" * 200, "https://" + "a" * 72),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str):
    assert without_secrets(url) == shown


@pytest.mark.parametrize("text", ["name:hush@host", "name:hush@host?token=hush"])
def test_no_error_about_an_address_shows_a_password(text: str):
    with pytest.raises(ConfigError) as parsed:
        parse_location(text)
    with pytest.raises(ConfigError) as checked:
        check_endpoint(text, insecure=True)
    assert "hush" not in f"{parsed.value} {checked.value}"
