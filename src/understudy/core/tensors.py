"""safetensors bytes, written canonically and read strictly.

The writer of the `safetensors` package returns different bytes for equal content and writes strided
arrays wrongly; its reader accepts duplicate names, invalid booleans and extra keys. Here, hashes
and deduplication need equal bytes, and clients are not trusted, so this module writes and reads the
format itself.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import Refused
from understudy.core.wording import joined

Array = NDArray[Any]

ALIGNMENT = 64
MAX_HEADER_BYTES = 256 * 1024
MAX_DIMENSIONS = 8

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
    }.items()
}
"""Every column type that may be transferred or stored, by its safetensors name."""

DTYPE_NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")


def encode(columns: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Canonical safetensors bytes: equal content yields equal bytes, regardless of strides."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = sorted(columns)
    at = 0
    for name in names:
        column = columns[name]
        if column.dtype not in DTYPE_NAMES:
            raise Refused(
                "bad_tensors",
                f"{name!r} of type {column.dtype} cannot be written; use one of {joined(DTYPES)}",
            )
        _check_name(name)
        end = at + column.nbytes
        header[name] = {
            "data_offsets": [at, end],
            "dtype": DTYPE_NAMES[column.dtype],
            "shape": list(column.shape),
        }
        at = end
    text = canonical_json(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    # tobytes() copies in C order, so transposed and strided arrays are written correctly.
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(columns[name].tobytes() for name in names)]
    )


def decode(
    raw: bytes | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, Array], dict[str, str]]:
    """All tensors as read-only views, and the metadata; Refused unless the format is exact."""
    if len(raw) < 8:
        raise Refused(
            "bad_tensors", f"{len(raw)} bytes are too few: the length of the header takes 8"
        )
    length = int.from_bytes(raw[:8], "little")
    if length > max_header_bytes or 8 + length > len(raw):
        raise Refused(
            "bad_tensors",
            f"a header of {length} bytes in {len(raw)}; at most {max_header_bytes} are accepted",
        )
    text = bytes(raw[8 : 8 + length])
    if not text.startswith(b"{"):
        raise Refused("bad_tensors", "the header does not start with '{'")
    if not text.rstrip(b" ").endswith(b"}"):
        raise Refused("bad_tensors", "only spaces may follow the header's JSON")
    fields = strict_json(text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise Refused("bad_tensors", "__metadata__ must map text to text")
    for name, entry in fields.items():
        _check_entry(name, entry)
    at = 0
    for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        if start != at:
            raise Refused(
                "bad_tensors",
                f"{name!r} starts at {start}; expected {at}, the end of the one before",
            )
        at = end
    if 8 + length + at != len(raw):
        raise Refused(
            "bad_tensors",
            f"tensors end at {at} of {len(raw) - 8 - length} bytes; expected none after them",
        )
    columns = {}
    for name, entry in fields.items():
        dtype = DTYPES[entry["dtype"]]
        shape = entry["shape"]
        start = 8 + length + entry["data_offsets"][0]
        column = np.frombuffer(raw, dtype=dtype, count=math.prod(shape), offset=start).reshape(
            shape
        )
        if column.flags.writeable:
            column.flags.writeable = False
        check_bool(name, column)
        columns[name] = column
    return columns, metadata


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Refused(
            "bad_tensors",
            f"column name {name[:40]!r} is not allowed; use letters, digits, _ . and -",
        )


def _check_entry(name: str, fields: Any) -> None:
    _check_name(name)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(
            "bad_tensors", f"{name!r} must have dtype, shape and data_offsets, and nothing else"
        )
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if dtype is None:
        raise Refused(
            "bad_tensors",
            f"{name!r} has dtype {str(fields['dtype'])[:20]!r}; known are {joined(DTYPES)}",
        )
    if (
        not _counts(shape)
        or len(shape) > MAX_DIMENSIONS
        or not _counts(offsets)
        or len(offsets) != 2
    ):
        raise Refused(
            "bad_tensors",
            f"{name!r} must have at most {MAX_DIMENSIONS} dimensions, and two whole numbers "
            "from 0 as data_offsets",
        )
    if dtype.itemsize * math.prod(shape) != offsets[1] - offsets[0]:
        raise Refused(
            "bad_tensors",
            f"{name!r} has {offsets[1] - offsets[0]} bytes; shape {shape} of "
            f"{fields['dtype']} needs {dtype.itemsize * math.prod(shape)}",
        )


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )


def check_bool(name: str, array: Array) -> None:
    """Raise Refused for a boolean column that contains a byte other than 0 and 1."""
    if array.dtype == np.bool_ and array.size and int(array.view(np.uint8).max()) > 1:
        raise Refused("bad_tensors", f"{name!r} is BOOL and contains a byte other than 0 and 1")


def arrays_under(arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """The arrays whose name begins with `name.`, with that prefix removed."""
    return {
        key[len(name) + 1 :]: array for key, array in arrays.items() if key.startswith(f"{name}.")
    }
