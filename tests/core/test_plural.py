"""Nouns after a number."""

from understudy.cli.options import count_of
from understudy.core.plural import plural


def test_one_thing_is_singular():
    assert [plural(number, "step") for number in (0, 1, 1.5, 2)] == [
        "steps",
        "step",
        "steps",
        "steps",
    ]
    assert plural(2, "entry", "entries") == "entries"
    assert count_of(1, "model") == "1 model"
    assert count_of(12_345, "entry", "entries") == "12 345 entries"
