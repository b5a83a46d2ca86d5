"""The canonical writer against the safetensors library, and a reader that is stricter than it."""

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.core.errors import Refused
from understudy.core.tensors import ALIGNMENT, DTYPES, MAX_HEADER_BYTES, decode, encode

names = st.from_regex(r"[a-z][a-z0-9_.]{0,9}", fullmatch=True)
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(
        DTYPES[name], hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)
tables = st.dictionaries(names, arrays, max_size=5)
metadatas = st.dictionaries(
    st.text(max_size=9).filter(lambda key: key != "__metadata__"), st.text(max_size=9), max_size=3
)


@given(tables, metadatas)
def test_the_library_reads_what_we_write(columns: dict[str, Any], metadata: dict[str, str]) -> None:
    raw = encode(columns, metadata)
    assert (8 + int.from_bytes(raw[:8], "little")) % ALIGNMENT == 0
    theirs = safetensors.numpy.load(raw)
    ours, found = decode(raw)
    assert found == metadata
    assert ours.keys() == theirs.keys() == columns.keys()
    for name, column in columns.items():
        for read in (ours[name], theirs[name]):
            assert read.dtype == column.dtype
            assert read.shape == column.shape
            assert read.tobytes() == column.tobytes()
        assert not ours[name].flags.writeable


@given(tables, metadatas)
def test_we_read_what_the_library_writes(columns: dict[str, Any], metadata: dict[str, str]) -> None:
    raw = safetensors.numpy.save(columns, metadata or None)
    ours, found = decode(raw)
    assert found == metadata
    assert {name: column.tobytes() for name, column in ours.items()} == {
        n: c.tobytes() for n, c in columns.items()
    }


@given(tables, metadatas, st.randoms())
def test_equal_content_yields_equal_bytes(
    columns: dict[str, Any], metadata: dict[str, str], random: Any
) -> None:
    order = random.sample(sorted(columns), len(columns))
    strided = {name: np.repeat(columns[name][..., None], 2, axis=-1)[..., 0] for name in order}
    keys = random.sample(sorted(metadata), len(metadata))
    assert encode(strided, {key: metadata[key] for key in keys}) == encode(columns, metadata)


GRID = np.arange(24, dtype=np.int32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "array",
    [
        GRID.T,
        GRID[:, ::2],
        GRID[::-1],
        np.asfortranarray(GRID),
        GRID.transpose(1, 0, 2),
        np.broadcast_to(GRID[0, 0], (3, 4)),
    ],
    ids=["transposed", "strided", "backwards", "Fortran", "permuted", "broadcast"],
)
def test_arrays_are_restored_whatever_their_strides(array: Any) -> None:
    raw = encode({"x": array}, {})
    assert (decode(raw)[0]["x"] == array).all()
    assert (safetensors.numpy.load(raw)["x"] == array).all()
    assert raw == encode({"x": np.ascontiguousarray(array)}, {})


def test_the_bytes_of_one_small_table_never_change() -> None:
    raw = encode(
        {"b": np.array([True, False]), "a": np.array([1.5], np.float32)}, {"k": "v", "é": "ü"}
    )
    header = (
        '{"__metadata__":{"k":"v","é":"ü"},"a":{"data_offsets":[0,4],"dtype":"F32","shape":[1]},'
        '"b":{"data_offsets":[4,6],"dtype":"BOOL","shape":[2]}}'
    ).encode()
    padded = header + b" " * (184 - len(header))
    assert raw == (184).to_bytes(8, "little") + padded + bytes.fromhex("0000c03f0100")


def bytes_of(header: str | bytes, data: bytes = b"", *, claim: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if claim is None else claim).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: str = "[4]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


FOUR = b"\0\1\0\1"

ACCEPTED_BY_LIBRARY: list[tuple[str, bytes]] = [
    ("tensor name twice", bytes_of(f'{{"x":{entry()},"x":{entry()}}}', FOUR)),
    (
        "metadata key twice",
        bytes_of(f'{{"__metadata__":{{"session":"a","session":"b"}},"x":{entry()}}}', FOUR),
    ),
    (
        "metadata key twice, one escaped",
        bytes_of(f'{{"__metadata__":{{"a":"1","\\u0061":"2"}},"x":{entry()}}}', FOUR),
    ),
    ("BOOL byte 2", bytes_of(f'{{"x":{entry("BOOL")}}}', b"\0\1\2\1")),
    ("extra key in an entry", bytes_of(f'{{"x":{entry()[:-1]},"code":"rm"}}}}', FOUR)),
    ("space before the brace", bytes_of(f' {{"x":{entry()}}}', FOUR)),
    ("a name with ../", bytes_of(f'{{"../x":{entry()}}}', FOUR)),
    ("a name with NUL", bytes_of(f'{{"x\\u0000":{entry()}}}', FOUR)),
    ("an empty name", bytes_of(f'{{"":{entry()}}}', FOUR)),
]
"""The library reads these; chunks must not."""


@pytest.mark.parametrize(
    "raw", [row[1] for row in ACCEPTED_BY_LIBRARY], ids=[row[0] for row in ACCEPTED_BY_LIBRARY]
)
def test_we_refuse_what_the_library_accepts(raw: bytes) -> None:
    safetensors.numpy.load(raw)
    with pytest.raises(Refused) as caught:
        decode(raw)
    assert caught.value.reason in ("bad_tensors", "bad_json")


def test_values_are_not_checked_and_no_tensors_are_fine() -> None:
    # chunk.py rejects NaN and an empty table, since it knows what a row must have.
    assert np.isnan(decode(encode({"x": np.array([np.nan])}, {}))[0]["x"]).all()
    assert decode(encode({}, {})) == ({}, {})


BROKEN: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("half a length", b"\1\0\0\0"),
    ("a length and no header", bytes_of("", claim=2)),
    ("a claim of 200 MB", bytes_of("{}", claim=200_000_000)),
    ("a claim of 2^63", bytes_of("{}", claim=1 << 63)),
    ("a header over our limit", bytes_of("{" + " " * MAX_HEADER_BYTES + "}")),
    ("no JSON", bytes_of("{x}")),
    ("a list", bytes_of("[]")),
    ("text behind the JSON", bytes_of('{"x":1}}')),
    ("a line break behind the JSON", bytes_of(f'{{"x":{entry()}}}\n', FOUR)),
    ("not UTF-8", bytes_of(b'{"\xff":1}')),
    ("metadata no object", bytes_of('{"__metadata__":[]}')),
    ("metadata not text", bytes_of('{"__metadata__":{"a":1}}')),
    ("entry no object", bytes_of('{"x":[]}')),
    ("no dtype", bytes_of('{"x":{"shape":[0],"data_offsets":[0,0]}}')),
    ("unknown dtype", bytes_of(f'{{"x":{entry("C64")}}}', FOUR)),
    ("dtype BF16", bytes_of(f'{{"x":{entry("BF16", "[2]")}}}', FOUR)),
    ("dtype no text", bytes_of('{"x":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}}', FOUR)),
    ("shape no list", bytes_of(f'{{"x":{entry(shape="4")}}}', FOUR)),
    ("shape of floats", bytes_of(f'{{"x":{entry(shape="[4.0]")}}}', FOUR)),
    ("shape of true", bytes_of(f'{{"x":{entry(shape="[true,4]")}}}', FOUR)),
    ("negative shape", bytes_of(f'{{"x":{entry(shape="[-2,-2]")}}}', FOUR)),
    (
        "shape that overflows",
        bytes_of(f'{{"x":{entry(shape=f"[{1 << 60},16]", offsets="[0,0]")}}}'),
    ),
    ("shape of 9 dimensions", bytes_of(f'{{"x":{entry(shape="[4,1,1,1,1,1,1,1,1]")}}}', FOUR)),
    ("shape and bytes differ", bytes_of(f'{{"x":{entry(shape="[3]")}}}', FOUR)),
    ("negative offsets", bytes_of(f'{{"x":{entry(offsets="[-4,0]")}}}', FOUR)),
    ("offsets turned round", bytes_of(f'{{"x":{entry(offsets="[4,0]")}}}', FOUR)),
    ("three offsets", bytes_of(f'{{"x":{entry(offsets="[0,4,4]")}}}', FOUR)),
    ("a hole before", bytes_of(f'{{"x":{entry(offsets="[1,5]")}}}', b"\0" + FOUR)),
    (
        "a hole between",
        bytes_of(f'{{"x":{entry()},"y":{entry(offsets="[5,9]")}}}', FOUR + b"\0" + FOUR),
    ),
    ("an overlap", bytes_of(f'{{"x":{entry()},"y":{entry(offsets="[2,6]")}}}', FOUR + b"\0\0")),
    ("the same bytes twice", bytes_of(f'{{"x":{entry()},"y":{entry()}}}', FOUR)),
    ("bytes behind", bytes_of(f'{{"x":{entry()}}}', FOUR + b"\0")),
    ("too few bytes", bytes_of(f'{{"x":{entry()}}}', FOUR[:3])),
    ("bytes and no tensor", bytes_of("{}", b"\0")),
    ("a name too long", bytes_of(f'{{"{"x" * 129}":{entry()}}}', FOUR)),
]


@pytest.mark.parametrize("raw", [row[1] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_bytes_that_are_not_exactly_the_format_are_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode(raw)
    assert caught.value.reason in ("bad_tensors", "bad_json")


@given(st.binary(max_size=60), st.integers(0, 300), st.integers(0, 255))
def test_random_damage_is_refused_or_harmless(tail: bytes, position: int, value: int) -> None:
    raw = bytearray(
        encode({"x": np.arange(6, dtype=np.int16), "b": np.ones(3, np.bool_)}, {"a": "b"}) + tail
    )
    raw[position % len(raw)] = value
    try:
        columns, _ = decode(bytes(raw))
    except Refused:
        return
    assert sum(column.nbytes for column in columns.values()) <= len(raw)


@pytest.mark.parametrize(
    "array", [np.zeros(2, ">f4"), np.zeros(2, np.complex64), np.array(["a"]), np.array([None])]
)
def test_unsupported_types_are_not_written(array: Any) -> None:
    with pytest.raises(Refused, match="cannot be written"):
        encode({"x": array}, {})


@pytest.mark.parametrize("name", ["", "../x", "x\0", "__metadata__", "1x", "x" * 129])
def test_names_that_the_reader_refuses_are_not_written(name: str) -> None:
    with pytest.raises(Refused, match="not allowed"):
        encode({name: np.zeros(1)}, {})
