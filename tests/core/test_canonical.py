"""JSON: written in one canonical form, read strictly."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import Refused

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(values)
def test_a_value_is_read_back_and_written_as_the_same_bytes(value: Any) -> None:
    raw = canonical_json(value)
    assert strict_json(raw) == value
    assert strict_json(raw.decode()) == value
    assert canonical_json(strict_json(raw)) == raw


def test_the_order_of_keys_does_not_matter() -> None:
    assert (
        canonical_json({"b": 1, "a": [True, None, "ü"]}) == '{"a":[true,null,"ü"],"b":1}'.encode()
    )
    assert canonical_json({"a": [True, None, "ü"], "b": 1}) == canonical_json(
        {"b": 1, "a": [True, None, "ü"]}
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_not_written(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json([number])


HOSTILE = [
    ("empty", b""),
    ("not JSON", b"yes"),
    ("two values", b"1 2"),
    ("not UTF-8", b'"\xff"'),
    ("overlong UTF-8", b'"\xc0\xaf"'),
    ("a surrogate in UTF-8", b'"\xed\xa0\x80"'),
    ("half a surrogate pair", b'{"a":"\\ud800"}'),
    ("half a pair as key", b'{"\\uDFFF":1}'),
    ("key twice", b'{"a":1,"a":1}'),
    ("key twice, one escaped", b'{"a":1,"\\u0061":2}'),
    ("key twice, deep down", b'[{"x":{"a":1,"a":2}}]'),
    ("NaN", b"[NaN]"),
    ("Infinity", b"[-Infinity]"),
    ("deep nesting", b"[" * 100_000 + b"]" * 100_000),
    ("a number of 5,000 digits", b"1" * 5_000),
    ("a raw line break in text", b'"a\nb"'),
    ("byte order mark", b"\xef\xbb\xbf{}"),
]


@pytest.mark.parametrize("raw", [row[1] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_ambiguous_json_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        strict_json(raw)
    assert caught.value.reason == "bad_json"
    assert len(caught.value.detail) <= 200


def test_a_whole_surrogate_pair_is_one_character() -> None:
    assert strict_json(b'"\\ud83d\\ude00"') == "😀"
