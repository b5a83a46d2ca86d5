"""JSON that is written in one canonical form and read strictly."""

import json
import re
from collections.abc import Sequence
from typing import Any

from understudy.core.errors import Refused
from understudy.core.wording import shortened


def canonical_json(value: object) -> bytes:
    """Compact JSON with sorted keys: equal values yield equal bytes; rejects NaN and infinity."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def strict_json(raw: bytes | str) -> Any:
    """Parse JSON; Refused for duplicate keys, NaN, infinity, lone surrogates or deep nesting."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "strict")
        value = _STRICT.decode(text)
        # Other texts cannot contain a surrogate; the search takes longer than parsing the JSON.
        if ("\\u" in text or not text.isascii()) and _SURROGATE.search(text):
            canonical_json(value)  # raises for a lone surrogate, which cannot be encoded
        return value
    except (ValueError, RecursionError) as error:
        raise Refused("bad_json", shortened(str(error), 200)) from None


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice in the same object")
    return fields


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed; numbers must be finite")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
