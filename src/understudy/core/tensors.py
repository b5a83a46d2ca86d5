"""safetensors bytes, written canonically and read strictly.

The library's writer gives different bytes for equal content and writes strided arrays wrongly; its reader lets
duplicate names, odd booleans and extra keys through. Both matter here, so this page writes and reads the format.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import Refused

Array = NDArray[Any]

ALIGNMENT = 64
MAX_HEADER_BYTES = 256 * 1024
MAX_DIMENSIONS = 8

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
        "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    }.items()
}  # fmt: skip
"""Every column type a boundary may carry, by its safetensors name."""

DTYPE_NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies, relative to the start of the data."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked header: entries by name, metadata, and where the data starts."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    data_bytes: int


def encode_header(columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The length and JSON header for columns laid out in name order, padded so that the data is 64-aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in sorted(columns):
        dtype, shape = columns[name]
        if dtype not in DTYPE_NAMES:
            raise Refused("bad_tensors", f"{name!r} of type {dtype} cannot be written; use one of {list(DTYPES)}")
        _check_name(name)
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"data_offsets": [at, at + size], "dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
        at += size
    text = canonical_json(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def encode(columns: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Canonical safetensors bytes: equal content gives equal bytes, whatever the arrays' strides."""
    head = encode_header({name: (column.dtype, column.shape) for name, column in columns.items()}, metadata)
    # tobytes() copies in C order, so a transposed or strided array comes out right.
    return b"".join([head, *(columns[name].tobytes() for name in sorted(columns))])


def parse_header(raw: bytes | memoryview, *, total_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES) -> Layout:
    """The checked layout of safetensors bytes of which `raw` is at least the header; Refused when not exact."""
    if len(raw) < 8:
        raise Refused("bad_tensors", f"{len(raw)} bytes; a header length takes 8")
    length = int.from_bytes(raw[:8], "little")
    if length > max_header_bytes or 8 + length > min(len(raw), total_bytes):
        raise Refused("bad_tensors", f"a header of {length} bytes in {total_bytes}; at most {max_header_bytes} taken")
    text = bytes(raw[8 : 8 + length])
    if not text.startswith(b"{"):
        raise Refused("bad_tensors", "the header does not start with '{'")
    if not text.rstrip(b" ").endswith(b"}"):
        raise Refused("bad_tensors", "only spaces may follow the header's JSON")
    fields = strict_json(text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused("bad_tensors", "__metadata__ must map text to text")
    data_bytes = total_bytes - 8 - length
    entries = {name: _entry(name, fields[name]) for name in fields}
    at = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != at:
            raise Refused("bad_tensors", f"{entry.name!r} starts at {entry.start}; the one before ends at {at}")
        at = entry.end
    if at != data_bytes:
        raise Refused("bad_tensors", f"tensors end at {at} of {data_bytes} bytes")
    return Layout(entries, metadata, 8 + length, data_bytes)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Refused("bad_tensors", f"column name {name[:40]!r} is not allowed; use letters, digits, _ . and -")


def _entry(name: str, fields: Any) -> Entry:
    _check_name(name)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused("bad_tensors", f"{name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    shape, offsets = fields["shape"], fields["data_offsets"]
    if dtype is None:
        raise Refused("bad_tensors", f"{name!r} has dtype {str(fields['dtype'])[:20]!r}; known are {list(DTYPES)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS or not _counts(offsets) or len(offsets) != 2:
        raise Refused("bad_tensors", f"{name!r} has a bad shape or data_offsets")
    if dtype.itemsize * math.prod(shape) != offsets[1] - offsets[0]:
        raise Refused("bad_tensors", f"{name!r} has {offsets[1] - offsets[0]} bytes for shape {shape}")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def view(data: bytes | memoryview, entry: Entry, *, data_start: int) -> Array:
    """The tensor as a read-only view into the bytes; booleans are checked to be 0 or 1."""
    size = math.prod(entry.shape)
    array = np.frombuffer(data, dtype=entry.dtype, count=size, offset=data_start + entry.start).reshape(entry.shape)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def part(arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """The arrays whose name begins with `name.`, without it."""
    return {key[len(name) + 1 :]: array for key, array in arrays.items() if key.startswith(f"{name}.")}


def check_bool(name: str, array: Array) -> None:
    """Refuse boolean columns that hold a byte other than 0 and 1."""
    if array.dtype == np.bool_ and array.size and int(array.view(np.uint8).max()) > 1:
        raise Refused("bad_tensors", f"{name!r} is BOOL and holds a byte other than 0 and 1")


def decode(
    raw: bytes | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, Array], dict[str, str]]:
    """All tensors as read-only views, and the metadata; Refused unless the bytes are exactly in the format."""
    layout = parse_header(raw, total_bytes=len(raw), max_header_bytes=max_header_bytes)
    columns = {name: view(raw, entry, data_start=layout.data_start) for name, entry in layout.entries.items()}
    for name, column in columns.items():
        check_bool(name, column)
    return columns, dict(layout.metadata)
