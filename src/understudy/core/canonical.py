"""JSON with one form per value on the way out, and nothing ambiguous on the way in."""

import json
import re
from collections.abc import Sequence
from typing import Any

from understudy.core.errors import Refused


def canonical_json(value: object) -> bytes:
    """Compact JSON with sorted keys: equal values give equal bytes; NaN and infinities are
    refused."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def strict_json(raw: bytes | str) -> Any:
    """JSON without duplicate keys, NaN, infinities, half characters or deep nesting; Refused
    otherwise."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "strict")
        value = _STRICT.decode(text)
        # Looked for only where there can be one: a search takes longer than reading the JSON.
        if ("\\u" in text or not text.isascii()) and _SURROGATE.search(text):
            canonical_json(value)  # half of a surrogate pair could be written nowhere
        return value
    except (ValueError, RecursionError) as error:
        raise Refused("bad_json", str(error)[:200]) from None


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
