"""Counts in messages: 1 model, 2 models."""


def plural(number: float, noun: str, nouns: str = "") -> str:
    """The noun in the form for this number of things; `nouns`: its plural, if not with an s."""
    return noun if number == 1 else nouns or f"{noun}s"
