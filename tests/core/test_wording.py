"""Messages: lists and long texts as people write them."""

import pytest

from understudy.core.wording import joined, pairs, shortened, sized


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "none"),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (("a", "b", "c"), "a, b and c"),
        (range(15), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more"),
        ({"c", "b", "a"}, "a, b and c"),
        (["", "two\nlines"], r"'' and 'two\nlines'"),
    ],
)
def test_names_are_joined_as_in_a_sentence(names: list[str], text: str):
    assert joined(names) == text


def test_values_have_their_names():
    assert pairs({"lives": 3, "level": "hard"}) == "lives 3 and level 'hard'"


@pytest.mark.parametrize(
    ("shape", "text"),
    [((), "one number"), ((1,), "one number"), ((4,), "4 numbers"), ((7, 7), "7x7 numbers")],
)
def test_a_shape_is_a_number_of_numbers(shape: tuple[int, ...], text: str):
    assert sized(shape) == text


def test_a_long_text_keeps_its_begin_and_its_end():
    text = f"steps is {'9' * 500}; give a number"
    short = shortened(text, 60)
    assert len(short) == 60
    assert short.startswith("steps is 9")
    assert short.endswith("9; give a number")
    assert shortened(text, 600) == text
    assert len(joined(["x" * 500])) == 80
