"""Columns of chunks as Arrow arrays and back, bit for bit."""

import math
from typing import Any

import numpy as np

from understudy.app.exchange.extra import extra
from understudy.core.tensors import DTYPE_NAMES, Array

_TYPES = {
    "BOOL": "bool_", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def arrow_type(dtype: np.dtype[Any], shape: tuple[int, ...], *, may_miss: bool = False) -> Any:
    """The Arrow type of one row: a number, or lists of fixed sizes inside one another.

    `may_miss`: for columns that not every chunk has. Parquet's reader refuses nulls among lists of fixed size, so
    these are plain lists.
    """
    pa = extra("pyarrow")
    made = getattr(pa, _TYPES[DTYPE_NAMES[dtype]])()
    for size in reversed(shape):
        made = pa.list_(made) if may_miss else pa.list_(made, size)
    return made


def to_arrow(rows: Array, *, may_miss: bool = False) -> Any:
    """A column of n rows as an Arrow array of n values."""
    pa = extra("pyarrow")
    made = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for at in reversed(range(1, rows.ndim)):
        size, count = rows.shape[at], math.prod(rows.shape[:at])
        if may_miss:
            made = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(size)), made)
        else:
            made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def from_arrow(values: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
    """The rows of an Arrow array without nulls, or None when they have another shape."""
    n_rows, sizes_of = len(values), extra("pyarrow.compute").list_value_length
    for size in shape:
        if values.null_count or not (sizes_of(values).to_numpy(zero_copy_only=False) == size).all():
            return None
        values = values.flatten()
    if values.null_count:
        return None
    rows = np.asarray(values.to_numpy(zero_copy_only=False))
    return rows.astype(dtype, copy=False).reshape(n_rows, *shape) if rows.dtype.newbyteorder("<") == dtype else None
