"""Frames: an exact header of 64 bytes, each field checked, consistent reports; frame batches."""

import struct
import uuid
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import Refused
from understudy.core.names import player_name
from understudy.experience.frame import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_COUNT,
    CloseReport,
    DropReport,
    Frame,
    FrameKind,
    announced_size,
    close_frame,
    data_frame,
    decode_frame,
    decode_frame_batch,
    drop_frame,
    encode_frame_batch,
    identity_of,
    read_close,
    read_drop,
)
from understudy.testing.samples import cart_spec, random_session

SESSION = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_the_bytes_of_one_frame_never_change() -> None:
    frame = data_frame(SESSION, 0x0102030405, b"body").stamped(bytes(range(16)), 0x65000000)
    parts = [
        "554e44590100000004000000b20ba8db",
        "01890a5dac96774bbcceb302099a8057",
        "0504030201000000",
        "000102030405060708090a0b0c0d0e0f",
        "00000065",
        "5aa797fe",
        "626f6479",
    ]  # fixed fields, session, chunk_no, player, time, header checksum, body
    assert frame.encode().hex() == "".join(parts)
    assert len(frame.header()) == HEADER_BYTES == 64


frames = st.builds(
    lambda kind, session, number, body, player, received_s: Frame(
        kind=kind,
        session=session,
        chunk_no=number,
        body=body,
        body_crc=crc32(body),
        player=player,
        received_s=received_s,
    ),
    st.sampled_from([FrameKind.DATA, FrameKind.DROP, FrameKind.CLOSE]),
    st.uuids(),
    st.integers(0, MAX_COUNT - 1),
    st.binary(max_size=80),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 32) - 1),
)


@given(st.lists(frames, max_size=4))
def test_frames_are_restored_and_announce_their_size_in_the_header(sent: list[Frame]) -> None:
    assert [decode_frame(frame.encode()) for frame in sent] == sent
    assert [announced_size(frame.header()) for frame in sent] == [
        frame.size_bytes for frame in sent
    ]


@given(frames, st.integers(0, 8 * (HEADER_BYTES + 80) - 1))
def test_any_flipped_bit_is_refused(frame: Frame, bit: int) -> None:
    raw = bytearray(frame.encode())
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    with pytest.raises(Refused):
        decode_frame(bytes(raw))


@given(frames, st.integers(1, 143))
def test_a_frame_cut_anywhere_is_refused(frame: Frame, missing: int) -> None:
    raw = frame.encode()
    with pytest.raises(Refused) as caught:
        decode_frame(raw[: max(0, len(raw) - missing)])
    assert caught.value.reason == "truncated"


@given(st.binary(max_size=200))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused):
        decode_frame(raw)


GOOD: dict[str, Any] = {
    "magic": b"UNDY",
    "version": 1,
    "kind": 0,
    "flags": 0,
    "body_len": 4,
    "body_crc": crc32(b"body"),
    "session": SESSION.bytes,
    "chunk_no": 3,
    "player": bytes(16),
    "received_s": 0,
}


def raw_frame(body: bytes = b"body", *, header_crc: int | None = None, **changes: Any) -> bytes:
    head = struct.pack("<4sBBHII16sQ16sI", *(GOOD | changes).values())
    return head + (crc32(head) if header_crc is None else header_crc).to_bytes(4, "little") + body


BROKEN: list[tuple[str, bytes, str]] = [
    ("magic", raw_frame(magic=b"UNDx"), "bad_magic"),
    ("version 0", raw_frame(version=0), "bad_version"),
    ("version 2", raw_frame(version=2), "bad_version"),
    ("kind 3, reserved", raw_frame(kind=3), "reserved_kind"),
    ("kind 4", raw_frame(kind=4), "bad_kind"),
    ("flags", raw_frame(flags=1), "bad_kind"),
    ("header checksum", raw_frame(header_crc=0), "bad_header_checksum"),
    ("body checksum", raw_frame(body_crc=1), "bad_body_checksum"),
    ("body too short", raw_frame(body_len=5), "truncated"),
    ("body too long", raw_frame(body_len=3, body_crc=crc32(b"bod")), "trailing_bytes"),
    ("body past the limit", raw_frame(body_len=MAX_BODY_BYTES + 1), "too_large"),
    ("body of 4 GiB", raw_frame(body_len=(1 << 32) - 1), "too_large"),
    ("chunk_no past 48 bits", raw_frame(chunk_no=MAX_COUNT), "bad_number"),
    ("chunk_no of 64 bits", raw_frame(chunk_no=(1 << 64) - 1), "bad_number"),
]


@pytest.mark.parametrize(
    ("raw", "reason"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_each_field_of_the_header_is_checked(raw: bytes, reason: str) -> None:
    assert decode_frame(raw_frame()).chunk_no == 3
    with pytest.raises(Refused) as caught:
        decode_frame(raw)
    assert caught.value.reason == reason


@given(frames)
def test_an_intact_header_identifies_its_frame_whatever_the_body(frame: Frame) -> None:
    identity = (frame.session.bytes, frame.chunk_no, frame.player)
    assert identity_of(frame.encode()) == identity_of(frame.header() + b"other") == identity


@given(frames, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_damaged_header_identifies_nothing(frame: Frame, bit: int) -> None:
    raw = bytearray(frame.encode())
    raw[bit // 8] ^= 1 << bit % 8
    zeros = (bytes(16), 0, bytes(16))
    assert identity_of(bytes(raw)) == identity_of(bytes(raw[: HEADER_BYTES - 1])) == zeros
    assert identity_of(replace(frame, chunk_no=MAX_COUNT).encode()) == zeros


@given(frames)
def test_an_invalid_frame_still_announces_its_size(frame: Frame) -> None:
    odd = replace(frame, kind=FrameKind.LATE_REWARD, chunk_no=(1 << 64) - 1)
    assert (
        announced_size(odd.header()) == announced_size(memoryview(odd.encode())) == odd.size_bytes
    )
    assert announced_size(frame.header()[:11]) == HEADER_BYTES


def test_a_body_over_the_limit_is_refused() -> None:
    assert data_frame(SESSION, 0, bytes(MAX_BODY_BYTES)).size_bytes == 512 * 1024
    with pytest.raises(Refused) as caught:
        data_frame(SESSION, 0, bytes(MAX_BODY_BYTES + 1))
    assert caught.value.reason == "too_large"


def test_stamping_changes_only_player_and_time() -> None:
    frame = data_frame(SESSION, 7, b"body")
    stamped = frame.stamped(b"p" * 16, 9)
    assert (frame.player, frame.received_s) == (bytes(16), 0)
    assert (stamped.player, stamped.received_s) == (b"p" * 16, 9)
    assert stamped.stamped(bytes(16), 0) == frame
    assert stamped.encode()[:40] == frame.encode()[:40]
    assert stamped.body == frame.body


def test_reports_are_restored() -> None:
    dropped = DropReport(((0, 0), (2, 5)), 99)
    assert read_drop(decode_frame(drop_frame(SESSION, 6, dropped).encode())) == dropped
    closed = CloseReport(7, 99)
    assert read_close(decode_frame(close_frame(SESSION, 7, closed).encode())) == closed
    assert drop_frame(SESSION, 6, dropped).body == b'{"n_steps":99,"ranges":[[0,0],[2,5]]}'
    assert close_frame(SESSION, 7, closed).body == b'{"n_chunks":7,"n_steps":99}'


def report(kind: FrameKind, body: str, chunk_no: int = 6) -> Frame:
    return Frame(
        kind=kind,
        session=SESSION,
        chunk_no=chunk_no,
        body=body.encode(),
        body_crc=crc32(body.encode()),
    )


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"n_steps":1}',
        '{"n_steps":1,"ranges":[[0,1]],"more":1}',
        '{"n_steps":1,"ranges":[]}',
        '{"n_steps":1,"ranges":{}}',
        '{"n_steps":1,"ranges":[0]}',
        '{"n_steps":1,"ranges":[[0]]}',
        '{"n_steps":1,"ranges":[[0,1,2]]}',
        '{"n_steps":1,"ranges":[[0,1.0]]}',
        '{"n_steps":1,"ranges":[[true,true]]}',
        '{"n_steps":1,"ranges":[[-1,0]]}',
        '{"n_steps":1,"ranges":[[2,1]]}',
        '{"n_steps":1,"ranges":[[2,3],[3,4]]}',
        '{"n_steps":1,"ranges":[[2,3],[0,1]]}',
        '{"n_steps":1,"ranges":[[0,6]]}',
        '{"n_steps":-1,"ranges":[[0,1]]}',
        '{"n_steps":"1","ranges":[[0,1]]}',
        f'{{"n_steps":{MAX_COUNT},"ranges":[[0,1]]}}',
        '{"n_steps":1,"n_steps":1,"ranges":[[0,1]]}',
    ],
)
def test_a_drop_report_that_contradicts_itself_is_refused(body: str) -> None:
    with pytest.raises(Refused) as caught:
        read_drop(report(FrameKind.DROP, body))
    assert caught.value.reason in ("bad_report", "bad_json")


def test_a_drop_report_has_at_most_1024_ranges() -> None:
    ranges = [(2 * n, 2 * n) for n in range(1025)]
    assert (
        len(read_drop(drop_frame(SESSION, 4000, DropReport(tuple(ranges[:1024]), 1))).ranges)
        == 1024
    )
    with pytest.raises(Refused):
        read_drop(drop_frame(SESSION, 4000, DropReport(tuple(ranges), 1)))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        '{"n_chunks":6}',
        '{"n_chunks":5,"n_steps":1}',
        '{"n_chunks":6,"n_steps":-1}',
        '{"n_chunks":"6","n_steps":1}',
    ],
)
def test_a_close_that_contradicts_its_number_is_refused(body: str) -> None:
    with pytest.raises(Refused) as caught:
        read_close(report(FrameKind.CLOSE, body))
    assert caught.value.reason in ("bad_report", "bad_json")


def test_a_report_is_read_only_from_a_frame_of_its_kind() -> None:
    with pytest.raises(Refused) as caught:
        read_drop(close_frame(SESSION, 7, CloseReport(7, 99)))
    assert caught.value.reason == "bad_report"
    with pytest.raises(Refused) as caught:
        read_close(report(FrameKind.DATA, '{"n_chunks":6,"n_steps":1}'))
    assert caught.value.reason == "bad_report"


# --- Frame batches --------------------------------------------------------------------------------


def sent_frames(count: int = 3) -> list[Frame]:
    return [
        chunk.frame()
        for chunk in random_session(cart_spec(), np.random.default_rng(0), n_chunks=count)
    ]


def test_a_frame_batch_is_decoded_as_it_was_encoded():
    sent = sent_frames()
    players = {sent[0].session: player_name("Ada Λ"), uuid.UUID(int=7): player_name("nobody here")}
    got = decode_frame_batch(encode_frame_batch(sent, players, 41))
    assert list(got.frames) == sent
    assert got.players == {sent[0].session: "Ada Λ"}
    assert got.skipped_steps == 41


def test_a_broken_frame_does_not_affect_the_others():
    sent = sent_frames()
    raw = bytearray(encode_frame_batch(sent, {}))
    raw[-1] ^= 1
    got = decode_frame_batch(bytes(raw)).frames
    assert list(got[:-1]) == sent[:-1]
    assert isinstance(got[-1], Refused)
    assert got[-1].reason == "bad_body_checksum"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"UNPA",
        b"UNPA\xff\xff\xff\xff",
        b"UNPA\x02\0\0\0{}",
        b"UNPA\x02\0\0\0[]",
        b"POST\x02\0\0\0{}",
        encode_frame_batch(sent_frames(1), {}) + b"x",
        encode_frame_batch(sent_frames(1), {})[:-1],
        encode_frame_batch(sent_frames(1) * 65, {}),
        encode_frame_batch([], {}).replace(b"0}", b"-1}"),
    ],
)
def test_bytes_that_are_not_a_frame_batch_are_refused(raw: bytes):
    with pytest.raises(Refused):
        decode_frame_batch(raw)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_a_frame_batch_or_refused(noise: bytes, at: int):
    raw = encode_frame_batch(sent_frames(1), {})
    for wrong in (noise, raw[:at] + noise, raw[:at] + noise + raw[at + len(noise) :]):
        try:
            decode_frame_batch(wrong)
        except Refused:
            continue
