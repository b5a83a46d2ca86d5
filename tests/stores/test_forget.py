"""No file of the store contains bytes of a forgotten player."""

from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.faults.profiles import sizes
from tests.stores.local_stores import files_with, local, local_harness, sessions
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.ports import RefusedFrame, Stored
from understudy.stores.view import StoreView
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness

CANARY = np.frombuffer(b"canary-of-seventeen-that-sings!!", np.float32)


def with_canary(chunk: Chunk) -> Chunk:
    obs = chunk.columns["obs"].copy()
    obs[0] = CANARY[:4]
    obs[1] = CANARY[4:]
    return Chunk(chunk.meta, {**chunk.columns, "obs": obs}).validate()


def the_bird(folder: Path) -> list[str]:
    return files_with(folder, CANARY.tobytes())


def put(harness: StoreHarness, chunks: list[Chunk]) -> None:
    harness.put(*chunks)


def put_and_reopen(harness: StoreHarness, chunks: list[Chunk]) -> None:
    """Checkpoint the write-ahead log into the database."""
    harness.put(*chunks)
    harness.reopen()


def put_and_close(harness: StoreHarness, chunks: list[Chunk]) -> None:
    harness.put(*chunks)
    harness.write([harness.close_frame(chunks[0].meta.session, len(chunks))])


def put_and_expire_some(harness: StoreHarness, chunks: list[Chunk]) -> None:
    """The record of an expired chunk contains its session."""
    harness.put(chunks[0])
    harness.clock.advance(100.0)
    harness.put(*chunks[1:])
    harness.store.expire(harness.clock.now() - 50.0)


def put_refused(harness: StoreHarness, chunks: list[Chunk]) -> None:
    harness.write(refused=[harness.refusal(chunk) for chunk in chunks])


def put_parked(harness: StoreHarness, chunks: list[Chunk]) -> None:
    harness.write(parked=[harness.refusal(chunk, "unknown_schema") for chunk in chunks])


def put_with_a_broken_header(harness: StoreHarness, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        raw = bytearray(chunk.frame().stamped(PLAYER, int(harness.clock.now())).encode())
        raw[60] ^= 1
        harness.write(
            refused=[RefusedFrame(bytes(raw), "bad_header_checksum", "", harness.clock.now())]
        )


def put_and_quarantine(harness: StoreHarness, chunks: list[Chunk]) -> None:
    harness.put(*chunks)
    harness.store.quarantine(
        [(chunk.meta.session, chunk.meta.chunk_no) for chunk in chunks], reason="guard"
    )


def put_and_replay(harness: StoreHarness, chunks: list[Chunk]) -> None:
    put_parked(harness, chunks)
    harness.store.replay(
        [one.id for one in harness.store.quarantined()],
        [harness.candidate(chunk) for chunk in chunks],
    )


def put_everywhere(harness: StoreHarness, chunks: list[Chunk]) -> None:
    put_and_reopen(harness, chunks[:1])
    put_parked(harness, chunks[1:2])
    put(harness, chunks[2:])


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
    harness = local_harness(tmp_path)
    mine, others = sessions(2, 3)
    mine = [with_canary(chunk) if chunk.n_rows > 1 else chunk for chunk in mine]
    theirs = (CANARY.tobytes(), PLAYER, mine[0].meta.session.bytes)
    harness.put(*others, player=OTHER_PLAYER)
    record(harness, mine)
    assert len(set(files_with(tmp_path, CANARY.tobytes()))) > 0, "it sang before"
    harness.store.forget(PLAYER)
    assert files_with(tmp_path, *theirs) == []
    harness.write(
        [harness.candidate(chunk) for chunk in mine],
        refused=[harness.refusal(chunk) for chunk in mine],
    )
    assert files_with(tmp_path, *theirs) == []
    harness.reopen()
    assert files_with(tmp_path, *theirs) == []
    assert harness.chunks() == [chunk for chunk in others if record is not put_and_expire_some]
    audit = harness.store.audit()
    assert (list(audit.corrupt), audit.gap_chunks) == ([], 0)
    harness.store.close()
    assert files_with(tmp_path, *theirs) == []


@sizes("turns", short=100, full=400)
def test_pages_and_indexes_contain_nothing_of_many_forgotten_players(
    tmp_path: Path, rng, turns: int
):
    harness = local_harness(tmp_path)
    players = [bytes([number]) * 12 + b"name" for number in range(turns // 10)]
    lives: dict[bytes, list[bytes]] = {player: [] for player in players}
    gone: list[bytes] = []
    for turn in range(turns):
        player = players[int(rng.integers(len(players)))]
        if turn % 20 == 19:
            harness.clock.advance(1.0)
            harness.store.forget(player)
            harness.clock.advance(1.0)
            gone += [player[:12] * 1 + b"name", *lives.pop(player)]
            players.remove(player)
            continue
        for chunk in random_session(
            SPEC, rng, session=new_session(harness.clock.now(), rng.bytes(10)), n_chunks=2
        ):
            harness.put(chunk, player=player)
        lives[player].append(chunk.meta.session.bytes)
    assert len(gone) > turns // 4
    assert files_with(tmp_path, *gone) == []
    audit = harness.store.audit()
    assert (list(audit.corrupt), audit.duplicate_chunks) == ([], 0)
    harness.store.close()
    assert files_with(tmp_path, *gone) == []


def test_an_interrupted_forget_is_finished_at_the_next_start(tmp_path: Path, monkeypatch):
    harness = local_harness(tmp_path)
    mine, others = sessions(2, 2)
    harness.put(*[with_canary(chunk) for chunk in mine])
    harness.put(*others, player=OTHER_PLAYER)
    with monkeypatch.context() as patch:
        patch.setattr(local(harness), "erase", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            harness.store.forget(PLAYER)
    assert the_bird(tmp_path)
    with StoreView(tmp_path) as view:
        items = view.tail(None, max_items=99, wait_s=0.0).items
    assert not any(isinstance(item, Stored) and item.frame.player == PLAYER for item in items), (
        "hidden at once"
    )
    harness.reopen()
    assert the_bird(tmp_path) == []
    assert harness.chunks() == others
    harness.store.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_frames_that_arrive_during_a_forget_are_refused(tmp_path: Path, monkeypatch):
    (chunks,) = sessions(1, 1)
    harness = local_harness(tmp_path)
    store = local(harness)
    fates: list[str] = []
    writer = Thread(target=lambda: fates.extend(harness.put(*chunks)))
    forget = store.lookup.forget

    def late(tombstone: bytes, at_s: float) -> None:
        writer.start()
        writer.join(0.3)  # long enough for a commit that nothing holds up
        forget(tombstone, at_s)

    monkeypatch.setattr(store.lookup, "forget", late)
    store.forget(PLAYER, at_s=harness.clock.now() + 1.0)
    writer.join()
    assert fates == ["refused"]
    assert not harness.chunks()
    store.close()


def test_an_open_read_transaction_delays_only_the_last_bytes(tmp_path: Path, monkeypatch):
    harness = local_harness(tmp_path)
    (mine,) = sessions(1, 2)
    harness.write(refused=[harness.refusal(with_canary(chunk)) for chunk in mine])
    monkeypatch.setattr("understudy.stores.database._TRUNCATE_MS", 10)
    with StoreView(tmp_path) as view:
        with view.snapshot() as db:
            db.execute("SELECT count(*) FROM frames").fetchone()
            harness.store.forget(PLAYER)
            assert local(harness).is_erasing
            assert the_bird(tmp_path), "the reader's snapshot keeps the write-ahead log"
        local(harness).erase()
        assert the_bird(tmp_path) == []
    harness.store.close()


def test_expired_bytes_are_gone_too(tmp_path: Path):
    harness = local_harness(tmp_path)
    mine, parked = sessions(2, 2)
    harness.put(*[with_canary(chunk) for chunk in mine])
    harness.write(parked=[harness.refusal(with_canary(chunk)) for chunk in parked])
    harness.clock.advance(100.0)
    assert harness.store.expire(harness.clock.now() - 1.0) == 2
    assert the_bird(tmp_path) == []
    harness.store.close()
