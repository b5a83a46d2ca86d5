"""Batches and rollouts that were made apart, as one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from understudy.core.tensors import Array


def side_by_side(parts: Sequence[Any], join: Callable[[Sequence[Array]], Array]) -> Any:
    """One of what `parts` are (named tuples and mappings, however deep), its arrays joined; what is None stays None."""
    one = parts[0]
    if isinstance(one, Mapping):
        return {name: side_by_side([part[name] for part in parts], join) for name in one}
    if isinstance(one, tuple):
        return type(one)(*(side_by_side(values, join) for values in zip(*parts, strict=True)))
    return None if one is None else join(parts)
