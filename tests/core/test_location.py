"""Addresses of backends, and the files that hold their secrets."""

from pathlib import Path

import pytest

from understudy.core.errors import ConfigError
from understudy.core.location import Credentials, Location, parse_location, read_credentials


def test_an_address_is_taken_apart():
    found = parse_location("cassandra://a:9042,b,[::1]:7/games?consistency=QUORUM&tls=true&ttl_s=5")
    assert found.hosts == (("a", 9042), ("b", None), ("::1", 7))
    assert (found.scheme, found.path) == ("cassandra", "games")
    assert (found.text("consistency"), found.flag("tls"), found.number("ttl_s", 0)) == ("QUORUM", True, 5.0)
    assert parse_location("kinesis://steps") == Location("kinesis", (("steps", None),))


@pytest.mark.parametrize("odd", ["plain", "a b", "a&b=c", "a#b?c", "100%41", "a+b", "Zürich/ö", "a;b'\"c", "[x]:@"])
def test_an_address_that_was_written_is_read_back_whatever_is_in_it(odd: str):
    one = Location(
        "cassandra", (("a", 9042), ("b", None), ("::1", 7)), f"x/{odd}", {"credentials": f"/{odd}/c", odd: "1"}
    )
    assert parse_location(one.url) == one
    assert " " not in one.url
    assert Location("kinesis", (("steps", None),)).url == "kinesis://steps"
    url = "s3://bots/games?endpoint=http://127.0.0.1:9000&credentials=/srv/me/c"
    assert parse_location(url).url == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere", "write it as"),
        ("kafka://u:secret@h:1/t", "credentials=FILE"),
        ("kafka://h:port/t", "write HOST:PORT"),
        ("kafka://h:99999/t", "write HOST:PORT"),
        ("kafka://h/t?a=1&a=2", "given twice"),
        ("kafka://h/t?a", "cannot be read"),
    ],
)
def test_what_is_no_address_is_refused_without_its_secret(text: str, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_location(text)
    assert "secret" not in str(caught.value)


def test_options_that_do_not_fit_are_refused():
    given = parse_location("kafka://h/t?tsl=true&linger_s=x")
    with pytest.raises(ConfigError, match="did you mean tls"):
        given.refuse_others({"tls", "linger_s"})
    with pytest.raises(ConfigError, match="linger_s"):
        given.number("linger_s", 1.0)
    with pytest.raises(ConfigError, match="true or false"):
        parse_location("kafka://h/t?tls=1").flag("tls")


def test_whole_numbers_are_digits_within_their_range():
    given = parse_location(f"kafka://h/t?a=64&b=2.5&c=-1&d=99&e=²&f={'0' * 20}99&g={'9' * 5000}&h=")
    assert (given.whole("a", 1, most=64), given.whole("none", 7, least=5, most=9)) == (64, 7)
    for name in "bcdefgh":
        with pytest.raises(ConfigError, match=f"{name} of kafka:// is .*; give a whole number from 1 to 64, such as 8"):
            given.whole(name, 8, least=1, most=64)


def test_credentials_come_from_a_file_and_are_not_shown(tmp_path: Path):
    path = tmp_path / "credentials.toml"
    path.write_text('username = "u"\npassword = "hush"\n')
    found = read_credentials(path)
    assert found == Credentials("u", "hush")
    assert "hush" not in repr(found)


@pytest.mark.parametrize("content", [None, "hush =", 'password = "hush"', "username = 1\npassword = 'hush'"])
def test_a_bad_credentials_file_is_named_and_not_shown(tmp_path: Path, content: str | None):
    path = tmp_path / "credentials.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="two lines") as caught:
        read_credentials(path)
    assert "hush" not in str(caught.value)
