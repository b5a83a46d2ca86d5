"""Chunks: bit-exact round trips, every rule broken once, bombs, and splitting."""

import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.experience.chunks import SESSION, chunk_with, chunks, small_columns
from tests.experience.trajectories import Step, joined, rows_of
from understudy.core import tensors
from understudy.core.errors import Refused
from understudy.experience.chunk import (
    MAX_DECODED_BYTES,
    MAX_STEPS,
    Chunk,
    EpisodeNote,
    chunk_of,
    decode_chunk,
    read_note,
    split_chunk,
)
from understudy.experience.frame import CloseReport, close_frame, data_frame, decode_frame

slow_data = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None
)


@slow_data
@given(chunks())
def test_a_chunk_is_restored_bit_for_bit(chunk: Chunk) -> None:
    body = chunk.encode()
    decoded = decode_chunk(body)
    assert decoded.meta == chunk.meta
    assert decoded.columns.keys() == chunk.columns.keys()
    for name, column in chunk.columns.items():
        assert decoded.columns[name].dtype == column.dtype
        assert decoded.columns[name].shape == column.shape
        assert decoded.columns[name].tobytes() == column.tobytes()
    assert decoded == chunk
    assert decoded.encode() == body
    assert chunk_of(decode_frame(chunk.frame().encode())) == chunk


@slow_data
@given(chunks(min_steps=2))
def test_splitting_keeps_every_step_and_returns_valid_chunks(chunk: Chunk) -> None:
    left, right = (half.validate() for half in split_chunk(chunk))
    assert (left.meta.chunk_no, right.meta.chunk_no) == (
        chunk.meta.chunk_no,
        chunk.meta.chunk_no + 1,
    )
    assert right.meta.first_step == left.meta.first_step + left.meta.n_steps
    whole = joined([left.columns, right.columns])
    for name, column in chunk.columns.items():
        assert whole[name].tobytes() == column.tobytes()


def test_splitting_marks_only_the_part_where_the_episode_was_cut() -> None:
    steps = [Step(i, i + 1, 1.0, 0, i == 0, "cut" if i == 3 else None) for i in range(4)]
    columns = rows_of(steps) | {"action": np.zeros(5, np.int32)}
    left, right = split_chunk(
        chunk_with(columns, episodes=(EpisodeNote(row=0, match="m", cut=True),)).validate()
    )
    assert left.meta.episodes == (EpisodeNote(row=0, match="m"),)
    assert right.meta.episodes == (EpisodeNote(row=0, match="m", cut=True),)


def test_a_single_step_cannot_be_split() -> None:
    columns = {name: column[:2] for name, column in small_columns().items()}
    with pytest.raises(Refused) as caught:
        split_chunk(chunk_with(columns))
    assert caught.value.reason == "too_large"


def test_equal_chunks_are_equal_and_hash_alike() -> None:
    first = chunk_with(small_columns())
    second = chunk_with(small_columns())
    assert first == second
    assert hash(first) == hash(second)
    assert first != chunk_with(small_columns() | {"reward": np.zeros(6, np.float32)})
    assert first != "a chunk"
    assert (first.n_rows, first.size_bytes) == (6, 6 * (8 + 4 + 4 + 1 + 3))


def column(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda columns: {**columns, name: value}


def at(name: str, index: int, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(columns: dict[str, Any]) -> dict[str, Any]:
        copy = columns[name].copy()
        copy[index] = value
        return {**columns, name: copy}

    return change


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda columns: {key: value for key, value in columns.items() if key != name}


def first_rows(n: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda columns: {key: value[:n] for key, value in columns.items()}


NAN = np.float32("nan")
INF = np.float32("inf")

BROKEN_ROWS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    *((f"no {name}", without(name), "bad_columns") for name in small_columns()),
    ("reward of float64", column("reward", np.zeros(6)), "bad_columns"),
    ("row of int64", column("row", np.zeros(6, np.int64)), "bad_columns"),
    ("flag as byte", column("terminated", np.zeros(6, np.uint8)), "bad_columns"),
    ("reward of two per row", column("reward", np.zeros((6, 2), np.float32)), "bad_columns"),
    ("column of other length", column("obs", np.zeros((5, 2), np.float32)), "bad_columns"),
    ("column without rows", column("obs", np.float32(1).reshape(())), "bad_columns"),
    ("unknown column", column("secret", np.zeros(6, np.float32)), "bad_columns"),
    ("unknown part", column("reward.x", np.zeros(6, np.float32)), "bad_columns"),
    ("obs and its part", column("obs.x", np.zeros(6, np.float32)), "bad_columns"),
    ("action and its part", column("action.x", np.zeros(6, np.int32)), "bad_columns"),
    ("logp of float64", column("logp", np.zeros(6)), "bad_columns"),
    ("version of two per row", column("version", np.zeros((6, 2), np.uint32)), "bad_columns"),
    ("action mask as bytes", column("action_mask", np.zeros((6, 3), np.uint8)), "bad_columns"),
    ("action mask of one per row", column("action_mask", np.zeros(6, np.bool_)), "bad_columns"),
    ("no rows", first_rows(0), "bad_rows"),
    ("one row", first_rows(1), "bad_rows"),
    ("ends with a step", first_rows(3), "bad_rows"),
    ("starts with a final row", at("row", 0, 1), "bad_rows"),
    ("row of kind 3", at("row", 5, 3), "bad_rows"),
    ("two ends in a row", at("row", 2, 2), "bad_rows"),
    ("no reset after an end", at("is_first", 2, False), "bad_rows"),
    ("reset on an end", at("is_first", 5, True), "bad_rows"),
    ("terminated before a bootstrap", at("terminated", 4, True), "bad_rows"),
    ("truncated before a bootstrap", at("truncated", 4, True), "bad_rows"),
    ("final row without an end", at("terminated", 0, False), "bad_rows"),
    ("bootstrap after an end", at("row", 1, 2), "bad_rows"),
    ("final row that terminates", at("terminated", 1, True), "bad_rows"),
    ("last row that truncates", at("truncated", 5, True), "bad_rows"),
    ("reward NaN", at("reward", 0, NAN), "not_finite"),
    ("reward infinite on padding", at("reward", 5, INF), "not_finite"),
    ("logp NaN", column("logp", np.full(6, NAN)), "not_finite"),
    ("value infinite", column("value", np.full(6, INF)), "not_finite"),
    ("priority infinite", column("priority", np.full(6, -INF)), "not_finite"),
    ("raw_action NaN", column("raw_action", np.full((6, 2), NAN)), "not_finite"),
    ("by of 4", column("by", np.full(6, 4, np.uint8)), "bad_rows"),
]


@pytest.mark.parametrize(
    ("change", "reason"), [row[1:] for row in BROKEN_ROWS], ids=[row[0] for row in BROKEN_ROWS]
)
def test_each_broken_rule_of_rows_is_refused(
    change: Callable[..., dict[str, Any]], reason: str
) -> None:
    good = chunk_with(small_columns())
    assert decode_chunk(good.encode()) == good
    broken = Chunk(good.meta, change(dict(good.columns)))
    with pytest.raises(Refused) as caught:
        broken.validate()
    assert caught.value.reason == reason
    with pytest.raises(Refused):
        decode_chunk(tensors.encode(broken.columns, broken.meta.to_metadata()))


def test_a_reset_in_the_middle_of_an_episode_is_refused() -> None:
    columns = rows_of([Step(i, i + 1, 0.0, 0, i == 0, None) for i in range(3)]) | {
        "action": np.zeros(4, np.int32)
    }
    with pytest.raises(Refused, match="is_first must be set exactly"):
        chunk_with(at("is_first", 1, True)(columns)).validate()


NOTES = (
    [EpisodeNote(row=row) for row in rows]
    for rows in ([], [0], [0, 2], [0, 2, 5], [0, 2, 4, 5], [1, 2, 4])
)
BROKEN_META: list[tuple[str, dict[str, Any]]] = [
    ("too many steps", {"n_steps": 4}),
    ("too few steps", {"n_steps": 2}),
    ("chunk 0 that starts later", {"first_step": 1}),
    (
        "a cut episode that ended",
        {"episodes": (EpisodeNote(row=0, cut=True), EpisodeNote(row=2), EpisodeNote(row=4))},
    ),
    *((f"episodes at {[n.row for n in notes]}", {"episodes": tuple(notes)}) for notes in NOTES),
]


@pytest.mark.parametrize(
    "change", [row[1] for row in BROKEN_META], ids=[row[0] for row in BROKEN_META]
)
def test_metadata_that_contradicts_the_rows_is_refused(change: dict[str, Any]) -> None:
    good = chunk_with(small_columns()).validate()
    with pytest.raises(Refused) as caught:
        replace(good, meta=replace(good.meta, **change)).validate()
    assert caught.value.reason == "bad_metadata"


def test_the_first_chunk_starts_an_episode_and_later_ones_need_not() -> None:
    columns = at("is_first", 0, False)(small_columns())
    assert chunk_with(columns, chunk_no=1).validate().meta.chunk_no == 1
    with pytest.raises(Refused, match="chunk 0 must start an episode"):
        chunk_with(columns).validate()


def test_more_steps_than_a_chunk_may_hold_are_refused() -> None:
    for n, fits in ((MAX_STEPS, True), (MAX_STEPS + 1, False)):
        columns = rows_of([Step(i, i + 1, 0.0, 0, i == 0, None) for i in range(n)])
        chunk = chunk_with(columns | {"action": np.zeros(n + 1, np.int32)})
        if fits:
            assert chunk.validate() is chunk
        else:
            with pytest.raises(Refused, match="at most 512"):
                chunk.validate()


def metadata_with(**changes: str | None) -> dict[str, str]:
    fields: dict[str, str | None] = {**chunk_with(small_columns()).meta.to_metadata(), **changes}
    return {name: value for name, value in fields.items() if value is not None}


def notes_with(more: str) -> str:
    return '[{"row":0,"seat":0,' + more + '},{"row":2,"seat":0},{"row":4,"seat":0}]'


BROKEN_TEXT: list[tuple[str, dict[str, Any], str]] = [
    ("a missing key", {"kind": None}, "bad_metadata"),
    ("an unknown key", {"player": "p-17"}, "bad_metadata"),
    ("another format", {"format": "understudy-chunk/2"}, "bad_version"),
    ("unknown kind", {"kind": "bot"}, "bad_metadata"),
    ("unknown consent", {"consent": "maybe"}, "bad_metadata"),
    ("long client", {"client": "x" * 129}, "bad_metadata"),
    ("short schema", {"schema": "0" * 63}, "bad_metadata"),
    ("schema that is no hash", {"schema": "../" + "0" * 61}, "bad_metadata"),
    ("bad game", {"game": "../x"}, "bad_metadata"),
    ("bad session", {"session": "p-17"}, "bad_metadata"),
    ("session in capitals", {"session": str(SESSION).upper()}, "bad_metadata"),
    ("session in braces", {"session": f"{{{SESSION}}}"}, "bad_metadata"),
    *(
        (f"chunk_no {n!r}", {"chunk_no": n}, "bad_metadata")
        for n in ("", "-1", "01", "1.0", "٣", "x", " 1", "1" * 20)
    ),
    ("chunk_no past 63 bits", {"chunk_no": str(1 << 63)}, "bad_metadata"),
    ("first_step past 48 bits", {"chunk_no": "1", "first_step": str(1 << 48)}, "bad_metadata"),
    ("episodes no JSON", {"episodes": "["}, "bad_json"),
    ("episodes no list", {"episodes": "{}"}, "bad_metadata"),
    ("episodes of text", {"episodes": '["row"]'}, "bad_metadata"),
    ("a key twice", {"episodes": notes_with('"seat":1')}, "bad_json"),
    ("half a surrogate pair", {"episodes": notes_with('"match":"\\ud800"')}, "bad_json"),
    *(
        (f"note with {more}", {"episodes": notes_with(more)}, "bad_metadata")
        for more in (
            '"name":"p-17"',
            '"match":1',
            '"match":null',
            '"match":"' + "x" * 129 + '"',
            '"model":[]',
            '"opponents":"person"',
            '"opponents":[1]',
            '"opponents":["a"' + ',"a"' * 64 + "]",
            '"result":true',
            '"result":[1]',
            '"result":"' + "x" * 65 + '"',
            '"result":1e301',
            '"seed":-1',
            '"seed":1.5',
            f'"seed":{1 << 64}',
            '"cut":1',
        )
    ),
    (
        "note without seat",
        {"episodes": '[{"row":0},{"row":2,"seat":0},{"row":4,"seat":0}]'},
        "bad_metadata",
    ),
    ("propensity 0", {"episodes": '[{"row":0,"seat":0,"propensity":0}]'}, "bad_metadata"),
    *(
        (
            f"ticket {ticket[:9]}",
            {"episodes": f'[{{"row":0,"seat":0,"ticket":{ticket}}}]'},
            "bad_metadata",
        )
        for ticket in ("1", "null", "[]", f'"{"t" * 129}"')
    ),
    ("propensity a text", {"episodes": '[{"row":0,"seat":0,"propensity":"1"}]'}, "bad_metadata"),
    *(
        (f"note with {field}", {"episodes": f'[{{"row":0,"seat":0,{field}}}]'}, "bad_metadata")
        for field in (
            '"skill":"hard"',
            '"skill":[]',
            '"noise":1.5',
            '"noise":true',
            '"temperature":0',
            '"temperature":"1"',
        )
    ),
    ("note with seat true", {"episodes": '[{"row":0,"seat":true}]'}, "bad_metadata"),
    ("note with row -1", {"episodes": '[{"row":-1,"seat":0}]'}, "bad_metadata"),
    ("result not a number", {"episodes": '[{"row":0,"seat":0,"result":NaN}]'}, "bad_json"),
]


@pytest.mark.parametrize(
    ("change", "reason"), [row[1:] for row in BROKEN_TEXT], ids=[row[0] for row in BROKEN_TEXT]
)
def test_each_broken_rule_of_metadata_is_refused(
    change: dict[str, str | None], reason: str
) -> None:
    with pytest.raises(Refused) as caught:
        decode_chunk(tensors.encode(small_columns(), metadata_with(**change)))
    assert caught.value.reason == reason


def test_a_wrong_field_of_a_note_is_named_with_what_is_allowed() -> None:
    with pytest.raises(Refused, match="noise of an episode must be a number from 0 to 1, got 2"):
        read_note({"row": 0, "seat": 0, "noise": 2})


def test_notes_are_restored_with_every_field() -> None:
    note = EpisodeNote(
        row=0,
        seat=3,
        match="m-1",
        opponents=("person", "rally/7"),
        result=-1.5,
        seed=(1 << 64) - 1,
        model="rally/6",
        propensity=0.05,
    )
    notes = (
        note,
        EpisodeNote(row=2, result="won", skill="even", noise=0.25, ticket="t" * 128),
        EpisodeNote(row=4, cut=True, temperature=2.0),
    )
    assert [note.is_released_play for note in notes] == [True, False, False]
    chunk = chunk_with(
        small_columns(), episodes=notes, client="µ-game 1.2", kind="actor", consent="granted"
    )
    assert decode_chunk(chunk.encode()).meta == chunk.meta


def image_chunk() -> Chunk:
    frames = np.zeros((6, 32, 32), np.uint8)
    frames[:, ::3] = 200
    return chunk_with(small_columns() | {"obs": frames})


def with_codec(codec: str) -> bytes:
    return tensors.encode(small_columns(), metadata_with(codec=codec))


def packed(
    raw: bytes, *, dtype: str = '"U8"', shape: str = "[6,32,32]", codec: str = "zlib"
) -> bytes:
    columns = small_columns() | {"obs": np.frombuffer(raw, np.uint8)}
    return tensors.encode(columns, metadata_with(codec=f'{{"obs":["{codec}",{dtype},{shape}]}}'))


def test_images_are_compressed() -> None:
    chunk = image_chunk()
    assert len(chunk.encode()) < chunk.size_bytes / 2
    assert decode_chunk(chunk.encode()) == chunk


IMAGE = zlib.compress(bytes(6 * 32 * 32))
BOMB = zlib.compress(bytes(MAX_DECODED_BYTES + 1), 9)
BROKEN_CODECS: list[tuple[str, bytes, str]] = [
    ("not zlib", packed(b"no zlib at all"), "bad_codec"),
    ("cut short", packed(IMAGE[:-2]), "bad_codec"),
    ("checksum wrong", packed(IMAGE[:-1] + bytes([IMAGE[-1] ^ 1])), "bad_codec"),
    ("bytes behind", packed(IMAGE + b"more"), "bad_codec"),
    ("shorter than announced", packed(zlib.compress(bytes(6 * 32 * 32 - 1))), "bad_codec"),
    ("longer than announced", packed(zlib.compress(bytes(6 * 32 * 32 + 1))), "bad_codec"),
    ("a bomb that announces little", packed(BOMB), "bad_codec"),
    ("a bomb that announces itself", packed(BOMB, shape=f"[{MAX_DECODED_BYTES + 1}]"), "too_large"),
    (
        "a shape past memory",
        packed(IMAGE, shape=f"[{(1 << 32) - 1},{(1 << 32) - 1},6]"),
        "too_large",
    ),
    ("unknown codec", packed(IMAGE, codec="zstd"), "bad_codec"),
    ("unknown dtype", packed(IMAGE, dtype='"C64"'), "bad_codec"),
    ("dtype no text", packed(IMAGE, dtype="8"), "bad_codec"),
    ("negative shape", packed(IMAGE, shape="[-6,-32,32]"), "bad_codec"),
    ("shape of floats", packed(IMAGE, shape="[6.0,32,32]"), "bad_codec"),
    ("shape of many ones", packed(IMAGE, shape=f"[6,32,32{',1' * 80}]"), "bad_codec"),
    ("odd booleans", packed(zlib.compress(bytes([2]) * 6144), dtype='"BOOL"'), "bad_tensors"),
    ("no rows", packed(zlib.compress(b"\1"), shape="[]"), "bad_columns"),
    ("codec of an unknown column", with_codec('{"x":["zlib","U8",[6]]}'), "bad_codec"),
    ("codec of a float column", with_codec('{"reward":["zlib","F32",[6]]}'), "bad_codec"),
    ("codec a list", with_codec("[]"), "bad_codec"),
    ("codec no JSON", with_codec("zlib"), "bad_json"),
]


@pytest.mark.parametrize(
    ("body", "reason"), [row[1:] for row in BROKEN_CODECS], ids=[row[0] for row in BROKEN_CODECS]
)
def test_each_broken_codec_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        decode_chunk(body)
    assert caught.value.reason == reason


def test_a_frame_and_its_chunk_must_have_the_same_identity() -> None:
    body = chunk_with(small_columns()).encode()
    with pytest.raises(Refused) as caught:
        chunk_of(data_frame(SESSION, 1, body))
    assert caught.value.reason == "identity_mismatch"
    with pytest.raises(Refused) as caught:
        chunk_of(close_frame(SESSION, 1, CloseReport(1, 3)))
    assert caught.value.reason == "bad_kind"


def test_an_interrupt_cannot_get_lost_while_a_chunk_is_decoded() -> None:
    """NumPy drops what a signal handler raises in the attribute lookup of an enum."""
    sent = chunk_with(small_columns()).frame()
    files = set[str]()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        chunk_of(sent)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("chunk.py") for name in files)
    assert not [name for name in files if name.endswith("enum.py")]
