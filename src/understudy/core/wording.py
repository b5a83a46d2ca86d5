"""Lists and long texts in messages, as people write them: a, b and c."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, break lines or reverse text where a name is displayed."""
_MAX_NAME = 80
"""A schema has 64 characters."""


def joined(names: Iterable[object], *, most: int = 12) -> str:
    """The names as in a sentence, such as `a, b and c`; after `most`, only how many more.

    Those of a set are sorted.
    """
    ordered = sorted(names, key=str) if isinstance(names, Set) else names
    texts = [_shown(str(name)) for name in ordered]
    if len(texts) > most:
        texts[most:] = [f"{len(texts) - most} more"]
    if len(texts) < 2:
        return texts[0] if texts else "none"
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def pairs(values: Mapping[str, object]) -> str:
    """The values with their names, such as `lives 3 and level 'hard'`."""
    return joined(f"{name} {value!r}" for name, value in values.items())


def sized(shape: Sequence[int]) -> str:
    """A shape in words: `one number`, `4 numbers` or `7x7 numbers`."""
    return f"{'x'.join(map(str, shape))} numbers" if math.prod(shape) > 1 else "one number"


def shortened(text: str, limit: int) -> str:
    """The text with at most `limit` characters: the middle of a longer one is left out.

    The end of a message says what to do.
    """
    if len(text) <= limit:
        return text
    end = limit // 2
    return f"{text[: limit - end - 1]}…{text[-end:]}"


def _shown(name: str) -> str:
    return shortened(name if name and name.isprintable() else repr(name), _MAX_NAME)
