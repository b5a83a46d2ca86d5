"""Thousands of mutated frames: each ends as a candidate that is what it says, refused, or
parked."""

from zlib import crc32

from hypothesis import strategies as st

from tests.faults.profiles import property_of
from tests.ingest.test_check import ARM, CLOSE, GOOD, REPORT, SESSION, judge, sample
from understudy.ingest.check import UNREADABLE

BASES = [GOOD, REPORT.encode(), CLOSE.encode(), sample(ARM).frame().encode()]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """Frames changed at random, with checksums made right again half of the time so that deep
    checks are reached."""
    raw = bytearray(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw) - 1))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "double", "text"])):
            case "flip":
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                raw[at : at + 8] = draw(st.binary(min_size=8, max_size=8))
            case "cut":
                del raw[at : at + draw(st.integers(1, 400))]
            case "insert":
                raw[at:at] = draw(st.binary(max_size=64))
            case "double":
                raw[at:at] = raw[at : at + draw(st.integers(1, 200))]
            case "text":
                raw[at : at + 4] = draw(
                    st.sampled_from([b"1e99", b"null", b"-1,9", b'"":0', b"\xff\xfe\x00{"])
                )
        raw = raw or bytearray(b"x")
    if len(raw) > 64 and draw(st.booleans()):
        raw[:6] = b"UNDY\x01" + bytes([draw(st.sampled_from([0, 0, 0, 1, 2]))])
        raw[6:8] = b"\x00\x00"
        raw[8:12] = (len(raw) - 64).to_bytes(4, "little")
        raw[12:16] = crc32(raw[64:]).to_bytes(4, "little")
        raw[16:32] = SESSION.bytes
        raw[60:64] = crc32(raw[:60]).to_bytes(4, "little")
    return bytes(raw)


@property_of(short=400, full=2_500, raw=mutants())
def test_no_mutant_raises_or_fools_a_check(raw: bytes):
    checked = judge(raw)
    assert checked.outcome in ("candidate", "refused", "parked")
    if checked.outcome == "candidate":
        assert checked.candidate is not None
        assert checked.candidate.frame.encode() == raw
    else:
        assert checked.refusal is not None
        assert checked.refusal.raw == raw
        assert checked.refusal.reason != UNREADABLE, checked.refusal.detail
