"""Whose keys are taken: from one place, never from two, and from nobody else when that place is not there."""

from pathlib import Path

import pytest

from understudy.core.aws_keys import AwsKeys, Profile, find_keys, source_of_keys
from understudy.core.errors import ConfigError

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "env", "AWS_SECRET_ACCESS_KEY": "env-secret", "AWS_SESSION_TOKEN": "env-token"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose shared files have the profiles `default`, `games` and `role`."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = shared\naws_secret_access_key = s1\n"
        "[games]\naws_access_key_id = games\naws_secret_access_key = 100%s2\naws_session_token = t2\n"
        "[half]\naws_access_key_id = half\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile games]\nregion = eu-north-1\ns3 =\n  max_concurrent_requests = 20\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = games\nregion = ap-south-1\n"
        "[profile plain]\naws_access_key_id = plain\naws_secret_access_key = s3\n"
    )
    (tmp_path / "own").write_text("[default]\naws_access_key_id = own\naws_secret_access_key = s4\n")
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }  # fmt: skip


def test_a_named_file_goes_before_all_others_and_takes_nothing_of_them(home, tmp_path):
    own = str(tmp_path / "own")
    around = {**home, **ENVIRONMENT, "AWS_PROFILE": "games"}
    assert find_keys(credentials=own, profile="", environ=around) == AwsKeys("own", "s4")
    shared = str(tmp_path / "credentials")
    assert find_keys(credentials=shared, profile="games", environ=around) == AwsKeys("games", "100%s2", "t2")
    with pytest.raises(ConfigError, match=r"own has no section \[games\]; it must have a section \[games\] with"):
        find_keys(credentials=own, profile="games", environ=around)


def test_a_named_profile_goes_before_keys_in_the_environment(home):
    found = find_keys(credentials="", profile="games", environ={**home, **ENVIRONMENT})
    assert found == AwsKeys("games", "100%s2", "t2", "eu-north-1")
    assert find_keys(credentials="", profile="plain", environ={**home, **ENVIRONMENT}) == AwsKeys("plain", "s3")


def test_without_either_the_environment_goes_before_the_shared_files(home):
    with_profile = {**home, **ENVIRONMENT, "AWS_PROFILE": "games"}
    assert find_keys(credentials="", profile="", environ=with_profile) == AwsKeys("env", "env-secret", "env-token")
    assert find_keys(credentials="", profile="", environ={**home, "AWS_PROFILE": "games"}) == AwsKeys(
        "games", "100%s2", "t2", "eu-north-1"
    )


def test_a_token_of_the_environment_is_not_taken_for_the_keys_of_a_file(home):
    around = {**home, "AWS_SESSION_TOKEN": "env-token"}
    assert find_keys(credentials="", profile="", environ=around) == AwsKeys("shared", "s1", None, "eu-west-1")


def test_a_profile_that_asks_elsewhere_is_told_apart(home):
    assert find_keys(credentials="", profile="role", environ=home) == Profile("role", "ap-south-1")


def test_where_nothing_is_the_machines_own_role_is_meant(tmp_path):
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no"), "AWS_CONFIG_FILE": str(tmp_path / "none")}
    assert find_keys(credentials="", profile="", environ=nowhere) is None
    (tmp_path / "none").write_text("[default]\nregion = eu-west-1\n")
    assert find_keys(credentials="", profile="", environ=nowhere) is None


@pytest.mark.parametrize("around", [{}, ENVIRONMENT])
def test_a_profile_that_is_not_there_is_told_and_nobody_elses_keys_are_taken(home, around):
    with pytest.raises(ConfigError, match=r"no profile \[nobody\] in .*credentials or .*config; add it"):
        find_keys(credentials="", profile="nobody", environ={**home, **around})
    with pytest.raises(ConfigError, match=r"profile \[half\] lacks a key or its secret"):
        find_keys(credentials="", profile="half", environ={**home, **around})


def test_aws_profile_that_names_nobody_is_told(home):
    with pytest.raises(ConfigError, match=r"no profile \[nobody\]"):
        find_keys(credentials="", profile="", environ={**home, "AWS_PROFILE": "nobody"})


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_of_the_keys_in_the_environment_is_told(home, name):
    with pytest.raises(ConfigError, match=f"{name} is set and AWS_.* is not; set both"):
        find_keys(credentials="", profile="", environ={**home, name: "x"})


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (None, "is not there; correct credentials=FILE"),
        (b"no file of this kind, hush", "is no credentials file"),
        (b"\xff\xfe\x00", "is no credentials file"),
        (b"[default]\naws_access_key_id = hush\n", "lacks a key or its secret"),
        (b'username = "hush"\npassword = "hush"\n', "is no credentials file"),
    ],
)
def test_a_named_file_that_holds_no_keys_is_told_and_never_quoted(tmp_path, inside, said):
    if inside is not None:
        (tmp_path / "c").write_bytes(inside)
    with pytest.raises(ConfigError, match=said) as caught:
        find_keys(credentials=str(tmp_path / "c"), profile="", environ=ENVIRONMENT)
    assert "hush" not in str(caught.value)
    assert "aws_access_key_id = ..." in str(caught.value)


def test_a_section_of_a_named_file_may_get_its_keys_from_elsewhere(tmp_path):
    (tmp_path / "c").write_text("[default]\ncredential_process = cat keys\nregion = eu-north-1\n")
    file = str(tmp_path / "c")
    assert find_keys(credentials=file, profile="", environ=ENVIRONMENT) == Profile("default", "eu-north-1", file)


def test_no_text_of_keys_shows_a_secret(home):
    assert "s2" not in repr(find_keys(credentials="", profile="games", environ=home))
    assert "t2" not in repr(find_keys(credentials="", profile="games", environ=home))


def test_where_keys_come_from_is_told_as_they_are_found():
    assert source_of_keys(credentials="F", profile="games") == "[games] of credentials file F"
    assert source_of_keys(credentials="F", profile="") == "[default] of credentials file F"
    assert source_of_keys(credentials="", profile="games") == "profile [games]"
    assert "AWS_ACCESS_KEY_ID" in source_of_keys(credentials="", profile="")
