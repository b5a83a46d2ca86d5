"""A forgotten player's bytes are in no file of the store, wherever they were."""

from pathlib import Path

import numpy as np
import pytest

from tests.stores.desks import files_with, local, local_desk, sessions
from understudy.core.chunk import Chunk
from understudy.core.ports import RefusedFrame, Stored
from understudy.stores.view import StoreView
from understudy.testing.desk import Desk
from understudy.testing.samples import OTHER_PLAYER, PLAYER

CANARY = np.frombuffer(b"canary-of-seventeen-that-sings!!", np.float32)


def with_canary(chunk: Chunk) -> Chunk:
    obs = chunk.columns["obs"].copy()
    obs[0], obs[1] = CANARY[:4], CANARY[4:]
    return Chunk(chunk.meta, {**chunk.columns, "obs": obs}).validate()


def the_bird(folder: Path) -> list[str]:
    return files_with(folder, CANARY.tobytes())


def put_unsealed(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)


def put_sealed(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)
    local(desk).freeze(wait=True)


def put_refused(desk: Desk, chunks: list[Chunk]) -> None:
    desk.write(refused=[desk.refusal(chunk) for chunk in chunks])


def put_parked(desk: Desk, chunks: list[Chunk]) -> None:
    desk.write(parked=[desk.refusal(chunk, "unknown_schema") for chunk in chunks])
    local(desk).freeze(wait=True)


def put_with_a_broken_header(desk: Desk, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        raw = bytearray(chunk.frame().stamped(PLAYER, int(desk.clock.now())).encode())
        raw[60] ^= 1
        desk.write(refused=[RefusedFrame(bytes(raw), "bad_header_checksum", "", desk.clock.now())])


def put_and_quarantine(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)
    desk.store.quarantine([(chunk.meta.session, chunk.meta.chunk_no) for chunk in chunks], reason="guard")


def put_and_replay(desk: Desk, chunks: list[Chunk]) -> None:
    put_parked(desk, chunks)
    desk.store.replay([one.id for one in desk.store.quarantined()], [desk.candidate(chunk) for chunk in chunks])


def put_everywhere(desk: Desk, chunks: list[Chunk]) -> None:
    put_sealed(desk, chunks[:1])
    put_parked(desk, chunks[1:2])
    put_unsealed(desk, chunks[2:])


@pytest.mark.parametrize(
    "put",
    [
        put_unsealed, put_sealed, put_refused, put_parked, put_with_a_broken_header, put_and_quarantine,
        put_and_replay, put_everywhere,
    ],
)  # fmt: skip
def test_no_file_holds_a_forgotten_players_observations(tmp_path: Path, put):
    desk = local_desk(tmp_path)
    mine, others = sessions(2, 3)
    mine = [with_canary(chunk) if chunk.n_rows > 1 else chunk for chunk in mine]
    desk.put(*others, player=OTHER_PLAYER)
    put(desk, mine)
    assert the_bird(tmp_path), "it sang before"
    desk.store.forget(PLAYER)
    assert the_bird(tmp_path) == []
    desk.write([desk.candidate(chunk) for chunk in mine], refused=[desk.refusal(chunk) for chunk in mine])
    assert the_bird(tmp_path) == []
    desk.reopen()
    assert the_bird(tmp_path) == []
    assert desk.chunks() == others
    audit = desk.store.audit()
    assert (list(audit.corrupt), audit.chunks, audit.gap_chunks) == ([], 3, 0)
    desk.store.close()
    assert the_bird(tmp_path) == []


def test_a_forget_that_was_cut_short_is_finished_at_the_next_start(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    mine, others = sessions(2, 2)
    desk.put(*[with_canary(chunk) for chunk in mine])
    local(desk).freeze(wait=True)
    desk.put(*others, player=OTHER_PLAYER)
    with monkeypatch.context() as patch:
        patch.setattr(local(desk), "erase", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            desk.store.forget(PLAYER)
    assert the_bird(tmp_path)
    with StoreView(tmp_path) as view:
        items = view.tail(None, max_items=99, wait_s=0.0).items
    assert not any(isinstance(item, Stored) and item.frame.player == PLAYER for item in items), "hidden at once"
    desk.reopen()
    assert the_bird(tmp_path) == []
    assert desk.chunks() == others
    desk.store.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_reader_in_the_middle_of_a_look_only_delays_the_last_bytes(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    (mine,) = sessions(1, 2)
    desk.write(refused=[desk.refusal(with_canary(chunk)) for chunk in mine])
    local(desk).freeze(wait=True)
    monkeypatch.setattr("understudy.stores.catalogue._TRUNCATE_MS", 10)
    with StoreView(tmp_path) as view:
        with view.snapshot():
            desk.store.forget(PLAYER)
            assert the_bird(tmp_path), "the reader's snapshot keeps the write-ahead log"
        local(desk).erase()
        assert the_bird(tmp_path) == []
    desk.store.close()


def test_expired_bytes_are_gone_too(tmp_path: Path):
    desk = local_desk(tmp_path)
    mine, parked = sessions(2, 2)
    desk.put(*[with_canary(chunk) for chunk in mine])
    desk.write(parked=[desk.refusal(with_canary(chunk)) for chunk in parked])
    desk.clock.advance(100.0)
    assert desk.store.expire(desk.clock.now() - 1.0) == 2
    assert the_bird(tmp_path) == []
    desk.store.close()
