"""A parcel carries frames and names; whatever else the bytes are, it says so."""

import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import Refused
from understudy.core.frame import Frame
from understudy.core.names import player_name
from understudy.core.parcel import decode_parcel, encode_parcel
from understudy.testing.samples import cart_spec, random_session


def frames(count: int = 3) -> list[Frame]:
    return [chunk.frame() for chunk in random_session(cart_spec(), np.random.default_rng(0), n_chunks=count)]


def test_a_parcel_comes_out_as_it_went_in():
    sent = frames()
    players = {sent[0].session: player_name("Ada Λ"), uuid.UUID(int=7): player_name("nobody here")}
    got = decode_parcel(encode_parcel(sent, players, 41))
    assert list(got.frames) == sent
    assert got.players == {sent[0].session: "Ada Λ"}
    assert got.skipped_steps == 41


def test_a_broken_frame_does_not_spoil_the_others():
    sent = frames()
    raw = bytearray(encode_parcel(sent, {}))
    raw[-1] ^= 1
    got = decode_parcel(bytes(raw)).frames
    assert list(got[:-1]) == sent[:-1]
    assert isinstance(got[-1], Refused)
    assert got[-1].reason == "bad_body_checksum"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"UNPA", b"UNPA\xff\xff\xff\xff", b"UNPA\x02\0\0\0{}", b"UNPA\x02\0\0\0[]", b"POST\x02\0\0\0{}",
        encode_parcel(frames(1), {}) + b"x", encode_parcel(frames(1), {})[:-1], encode_parcel(frames(1) * 65, {}),
        encode_parcel([], {}).replace(b"0}", b"-1}"),
    ],
)  # fmt: skip
def test_what_is_no_parcel_is_refused(raw: bytes):
    with pytest.raises(Refused):
        decode_parcel(raw)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_a_parcel_or_refused(noise: bytes, at: int):
    raw = encode_parcel(frames(1), {})
    for wrong in (noise, raw[:at] + noise, raw[:at] + noise + raw[at + len(noise) :]):
        try:
            decode_parcel(wrong)
        except Refused:
            continue
