"""Rewriting segments keeps every byte, and never gives damage a fresh checksum."""

from pathlib import Path

import numpy as np
import pytest

from understudy.core.ports import Candidate, Stored, WriteBatch
from understudy.core.tensors import parse_header
from understudy.stores.local import LocalStore
from understudy.stores.segments import Segment
from understudy.testing.samples import OTHER_PLAYER, PLAYER, cart_spec, random_session, stamped

SPEC = cart_spec()


def write_segments(store: LocalStore, count: int, *, player: bytes = PLAYER, seed: int = 0) -> list[bytes]:
    """One small segment after another; the bodies of what was written."""
    rng, bodies = np.random.default_rng(seed), []
    epoch = store.claim("p", owner="test", ttl_s=60).epoch
    for _ in range(count):
        chunks = random_session(SPEC, rng, n_chunks=3, optional=["by", "version"])
        frames = list(stamped(chunks, player=player))
        receipt = store.write(
            WriteBatch("p", epoch, None, [Candidate(*pair) for pair in zip(frames, chunks, strict=True)])
        )
        assert set(receipt.fates) == {"new"}
        bodies += [frame.body for frame in frames]
        store.freeze(wait=True)
    return bodies


def segment_files(store: LocalStore) -> list[Path]:
    return sorted((store.folder / "segments").glob("*.safetensors"))


def test_many_small_segments_become_few_and_nothing_changes(tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        bodies = write_segments(store, 30)
        assert len(segment_files(store)) < 10
        items = store.tail(None, max_items=1000, wait_s=0).items
        assert [item.frame.body for item in items if isinstance(item, Stored)] == bodies
        audit = store.audit()
        assert (audit.chunks, audit.corrupt, audit.duplicate_chunks) == (90, (), 0)


@pytest.mark.parametrize("where", ["obs", "metadata", "received", "presence"])
def test_damage_is_not_laundered_by_a_rewrite(where: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    with LocalStore(tmp_path) as store:
        epoch = store.claim("p", owner="test", ttl_s=60).epoch
        for player in (PLAYER, OTHER_PLAYER):
            chunks = random_session(SPEC, rng, n_chunks=2)
            pairs = zip(stamped(chunks, player=player), chunks, strict=True)
            store.write(WriteBatch("p", epoch, None, [Candidate(*pair) for pair in pairs]))
        store.freeze(wait=True)
        (path,) = segment_files(store)
        flip(path, where, player=OTHER_PLAYER)
        assert len(store.audit().corrupt) >= 1
        assert store.forget(PLAYER) == 2
        after = store.audit()
        assert after.chunks == 1
        assert len(after.corrupt) == 1, "the damaged chunk was not given a fresh checksum"
        items = store.tail(None, max_items=100, wait_s=0).items
        assert [item.arrival_no for item in items] == [1, 2, 3, 4, 5]


def flip(path: Path, where: str, *, player: bytes) -> None:
    """Change one byte of a player's first chunk: of an observation, its metadata, or its row in the table."""
    segment = Segment(path)
    index = [bytes(one) for one in segment.table["player"]].index(player)
    ends = [0, *segment.table["metadata_end"].tolist()]
    at = {
        "obs": 16 * int(segment.table["first_row"][index]), "metadata": int(ends[index]) + 40,
        "received": 4 * index, "presence": 8 * index,
    }[where]  # fmt: skip
    segment.close()
    raw = bytearray(path.read_bytes())
    layout = parse_header(bytes(raw), total_bytes=len(raw), max_header_bytes=len(raw))
    name = where if where == "obs" else f"chunk.{where}"
    raw[layout.data_start + layout.entries[name].start + at] ^= 0x01
    path.write_bytes(raw)
