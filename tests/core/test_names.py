"""Names: which become a path component, and a corpus of hostile ones that are refused."""

import unicodedata
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import ConfigError, InvalidName
from understudy.core.names import (
    game_name,
    game_name_of_env,
    new_session,
    player_name,
    session_time_s,
)

HOSTILE_GAMES: list[Any] = [
    "",
    ".",
    "..",
    "...",
    "../etc",
    "a/b",
    "a\\b",
    "/abs",
    "C:",
    "C:x",
    "a:b",
    "~",
    "~root",
    "-rf",
    "_x",
    ".hidden",
    "a.",
    "a..",
    "a b",
    " a",
    "a ",
    "a\n",
    "a\r\n",
    "a\0b",
    "\0",
    "a\tb",
    "a\x1b[31m",
    "a%2e%2e",
    "a%00",
    "$(id)",
    "`id`",
    "a;b",
    "a|b",
    "a&b",
    "a'b",
    'a"b',
    "a*b",
    "a?b",
    "a<b",
    "a>b",
    "é",
    "\uff41",
    "\u0430",
    "a\u200b",
    "a\u202eb",
    "\ud800",
    "😀",
    "x" * 64,
    "con",
    "CON",
    "con.txt",
    "Nul",
    "aux.a.b",
    "prn",
    "com1",
    "COM9.x",
    "lpt0",
    None,
    7,
    b"game",
    ["a"],
    True,
]


@pytest.mark.parametrize("text", HOSTILE_GAMES, ids=[ascii(text)[:30] for text in HOSTILE_GAMES])
def test_a_hostile_game_name_is_refused(text: Any) -> None:
    with pytest.raises(InvalidName) as caught:
        game_name(text)
    assert "such as" in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "rally",
        "CartPole-v1",
        "my-game",
        "2048",
        "a.b_c-d",
        "x" * 63,
        "console",
        "com10",
        "nulls",
    ],
)
def test_a_plain_game_name_is_accepted(text: str) -> None:
    assert game_name(text) == text


@given(st.text(max_size=70))
def test_a_game_name_is_one_safe_path_component(text: str) -> None:
    try:
        name = game_name(text)
    except InvalidName:
        return
    assert name.isascii()
    assert not set(name) & set("/\\:\0 ")
    assert name[0].isalnum()
    assert 1 <= len(name) <= 63


def test_gymnasium_ids_become_names() -> None:
    assert game_name_of_env("CartPole-v1") == "CartPole-v1"
    assert game_name_of_env("ALE/Pong-v5") == "ALE-Pong-v5"
    assert game_name_of_env("my.module:Game-v0") == "my.module-Game-v0"
    with pytest.raises(InvalidName):
        game_name_of_env("")


@pytest.mark.parametrize(
    "text", ["p-17", "Änne", "名前", "a b", "../../etc/passwd", "x" * 256, "😀"]
)
def test_a_player_may_have_any_printable_name(text: str) -> None:
    assert player_name(text) == text


@pytest.mark.parametrize(
    "text", ["", "a\n", "\0", "\x1b[31m", "\u202e", "\ud800", "x" * 257, "é" * 129, None, 17, b"p"]
)
def test_a_player_name_that_is_not_printable_or_too_long_is_refused(text: Any) -> None:
    with pytest.raises(InvalidName, match="1 to 256 bytes"):
        player_name(text)


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))
def test_a_session_is_a_uuid_of_version_7_with_its_time(millis: int, random: bytes) -> None:
    session = new_session(millis / 1000, random)
    assert session.version == 7
    assert session.variant == uuid.RFC_4122
    assert abs(session_time_s(session) - millis / 1000) < 1e-6 * max(1, millis / 1000)


def test_sessions_differ_and_sort_by_time() -> None:
    assert len({new_session(1.0) for _ in range(1000)}) == 1000
    assert new_session(1.0) < new_session(1.001) < new_session(2.0)
    assert new_session(1.0, bytes(10)) == new_session(1.0, bytes(10))
    assert session_time_s(new_session()) > 1_700_000_000


def test_the_forms_of_a_players_name_are_one_name():
    composed = unicodedata.normalize("NFC", "Zoë Åström 각")
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert player_name(decomposed) == player_name(composed) == composed
    assert player_name("\N{ANGSTROM SIGN}") == "\N{LATIN CAPITAL LETTER A WITH RING ABOVE}"


def test_the_limit_of_a_players_name_is_that_of_its_composed_form():
    assert len(player_name(unicodedata.normalize("NFD", "é" * 128)).encode()) == 256
    with pytest.raises(InvalidName):
        player_name("é" * 129)
    with pytest.raises(InvalidName):
        player_name("e" + "\N{COMBINING ACUTE ACCENT}" * 100_000)
