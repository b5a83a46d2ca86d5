"""No file of the store contains bytes of a forgotten player."""

from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.stores.desks import files_with, local, local_desk, sessions
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.ports import RefusedFrame, Stored
from understudy.stores.view import StoreView
from understudy.testing.desk import SPEC, Desk
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_session

CANARY = np.frombuffer(b"canary-of-seventeen-that-sings!!", np.float32)


def with_canary(chunk: Chunk) -> Chunk:
    obs = chunk.columns["obs"].copy()
    obs[0] = CANARY[:4]
    obs[1] = CANARY[4:]
    return Chunk(chunk.meta, {**chunk.columns, "obs": obs}).validate()


def the_bird(folder: Path) -> list[str]:
    return files_with(folder, CANARY.tobytes())


def put(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)


def put_and_reopen(desk: Desk, chunks: list[Chunk]) -> None:
    """Checkpoint the write-ahead log into the database."""
    desk.put(*chunks)
    desk.reopen()


def put_and_close(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)
    desk.write([desk.close(chunks[0].meta.session, len(chunks))])


def put_and_expire_some(desk: Desk, chunks: list[Chunk]) -> None:
    """The record of an expired chunk contains its session."""
    desk.put(chunks[0])
    desk.clock.advance(100.0)
    desk.put(*chunks[1:])
    desk.store.expire(desk.clock.now() - 50.0)


def put_refused(desk: Desk, chunks: list[Chunk]) -> None:
    desk.write(refused=[desk.refusal(chunk) for chunk in chunks])


def put_parked(desk: Desk, chunks: list[Chunk]) -> None:
    desk.write(parked=[desk.refusal(chunk, "unknown_schema") for chunk in chunks])


def put_with_a_broken_header(desk: Desk, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        raw = bytearray(chunk.frame().stamped(PLAYER, int(desk.clock.now())).encode())
        raw[60] ^= 1
        desk.write(refused=[RefusedFrame(bytes(raw), "bad_header_checksum", "", desk.clock.now())])


def put_and_quarantine(desk: Desk, chunks: list[Chunk]) -> None:
    desk.put(*chunks)
    desk.store.quarantine(
        [(chunk.meta.session, chunk.meta.chunk_no) for chunk in chunks], reason="guard"
    )


def put_and_replay(desk: Desk, chunks: list[Chunk]) -> None:
    put_parked(desk, chunks)
    desk.store.replay(
        [one.id for one in desk.store.quarantined()], [desk.candidate(chunk) for chunk in chunks]
    )


def put_everywhere(desk: Desk, chunks: list[Chunk]) -> None:
    put_and_reopen(desk, chunks[:1])
    put_parked(desk, chunks[1:2])
    put(desk, chunks[2:])


@pytest.mark.parametrize(
    "record",
    [
        put,
        put_and_reopen,
        put_and_close,
        put_and_expire_some,
        put_refused,
        put_parked,
        put_with_a_broken_header,
        put_and_quarantine,
        put_and_replay,
        put_everywhere,
    ],
)
def test_no_file_holds_a_byte_of_a_forgotten_player(tmp_path: Path, record):
    desk = local_desk(tmp_path)
    mine, others = sessions(2, 3)
    mine = [with_canary(chunk) if chunk.n_rows > 1 else chunk for chunk in mine]
    theirs = (CANARY.tobytes(), PLAYER, mine[0].meta.session.bytes)
    desk.put(*others, player=OTHER_PLAYER)
    record(desk, mine)
    assert len(set(files_with(tmp_path, CANARY.tobytes()))) > 0, "it sang before"
    desk.store.forget(PLAYER)
    assert files_with(tmp_path, *theirs) == []
    desk.write(
        [desk.candidate(chunk) for chunk in mine], refused=[desk.refusal(chunk) for chunk in mine]
    )
    assert files_with(tmp_path, *theirs) == []
    desk.reopen()
    assert files_with(tmp_path, *theirs) == []
    assert desk.chunks() == [chunk for chunk in others if record is not put_and_expire_some]
    audit = desk.store.audit()
    assert (list(audit.corrupt), audit.gap_chunks) == ([], 0)
    desk.store.close()
    assert files_with(tmp_path, *theirs) == []


def test_pages_and_indexes_contain_nothing_of_many_forgotten_players(tmp_path: Path, rng):
    desk = local_desk(tmp_path)
    players = [bytes([number]) * 12 + b"name" for number in range(40)]
    lives: dict[bytes, list[bytes]] = {player: [] for player in players}
    gone: list[bytes] = []
    for turn in range(400):
        player = players[int(rng.integers(len(players)))]
        if turn % 20 == 19:
            desk.clock.advance(1.0)
            desk.store.forget(player)
            desk.clock.advance(1.0)
            gone += [player[:12] * 1 + b"name", *lives.pop(player)]
            players.remove(player)
            continue
        for chunk in random_session(
            SPEC, rng, session=new_session(desk.clock.now(), rng.bytes(10)), n_chunks=2
        ):
            desk.put(chunk, player=player)
        lives[player].append(chunk.meta.session.bytes)
    assert len(gone) > 100
    assert files_with(tmp_path, *gone) == []
    audit = desk.store.audit()
    assert (list(audit.corrupt), audit.duplicate_chunks) == ([], 0)
    desk.store.close()
    assert files_with(tmp_path, *gone) == []


def test_an_interrupted_forget_is_finished_at_the_next_start(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    mine, others = sessions(2, 2)
    desk.put(*[with_canary(chunk) for chunk in mine])
    desk.put(*others, player=OTHER_PLAYER)
    with monkeypatch.context() as patch:
        patch.setattr(local(desk), "erase", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            desk.store.forget(PLAYER)
    assert the_bird(tmp_path)
    with StoreView(tmp_path) as view:
        items = view.tail(None, max_items=99, wait_s=0.0).items
    assert not any(isinstance(item, Stored) and item.frame.player == PLAYER for item in items), (
        "hidden at once"
    )
    desk.reopen()
    assert the_bird(tmp_path) == []
    assert desk.chunks() == others
    desk.store.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_frames_that_arrive_during_a_forget_are_refused(tmp_path: Path, monkeypatch):
    (chunks,) = sessions(1, 1)
    desk = local_desk(tmp_path)
    store = local(desk)
    fates: list[str] = []
    writer = Thread(target=lambda: fates.extend(desk.put(*chunks)))
    forget = store.known.forget

    def late(tombstone: bytes, at_s: float) -> None:
        writer.start()
        writer.join(0.3)  # long enough for a commit that nothing holds up
        forget(tombstone, at_s)

    monkeypatch.setattr(store.known, "forget", late)
    store.forget(PLAYER, at_s=desk.clock.now() + 1.0)
    writer.join()
    assert fates == ["refused"]
    assert not desk.chunks()
    store.close()


def test_an_open_read_transaction_delays_only_the_last_bytes(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    (mine,) = sessions(1, 2)
    desk.write(refused=[desk.refusal(with_canary(chunk)) for chunk in mine])
    monkeypatch.setattr("understudy.stores.database._TRUNCATE_MS", 10)
    with StoreView(tmp_path) as view:
        with view.looking() as db:
            db.execute("SELECT count(*) FROM frames").fetchone()
            desk.store.forget(PLAYER)
            assert local(desk).is_erasing
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
