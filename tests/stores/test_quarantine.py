"""Quarantine is bounded: bad clients must not fill the disk."""

from pathlib import Path

import pytest

from understudy.ports import RefusedFrame, WriteBatch
from understudy.stores import local
from understudy.stores.local import LocalStore


def test_the_oldest_refused_bytes_are_dropped_first_and_their_reasons_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUARANTINE_BYTES", 5_000)
    with LocalStore(tmp_path) as store:
        epoch = store.claim("p", owner="test", ttl_s=60).epoch
        for number in range(20):
            refused = RefusedFrame(bytes([number]) * 1_000, "bad_magic", "for a test", 1.0)
            store.write(WriteBatch("p", epoch, None, refused=[refused]))
        kept = [one.raw[0] for one in store.quarantined()]
        assert kept == [15, 16, 17, 18, 19]
        assert store.audit().quarantined == 20
