"""Readers in other processes follow a store while its writer writes, forgets, exits or restarts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.profiles import sizes
from tests.stores.local_stores import local, local_harness, sessions
from understudy.core.errors import ConfigError, Corrupt
from understudy.experience.session import tombstone_of
from understudy.ports import Cursor, Forgotten
from understudy.stores.view import StoreView
from understudy.testing.samples import OTHER_PLAYER, PLAYER

ROOT = Path(__file__).resolve().parents[2]


def start_reader(folder: Path, last: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.stores.tailing", str(folder), str(last)]
    reader = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    return reader


@sizes("n_readers", short=1, full=2)
def test_a_reader_in_another_process_gets_every_number_once_and_in_order(
    tmp_path: Path, n_readers: int
):
    harness = local_harness(tmp_path)
    many = sessions(60, 3)
    stay = {(str(one.meta.session), one.meta.chunk_no) for chunks in many[1::2] for one in chunks}
    # 60 sessions of 3 chunks and a close, and 3 forgets that each take a number.
    last = 60 * 4 + 3
    readers = [start_reader(tmp_path, last) for _ in range(n_readers)]
    for turn, chunks in enumerate(many):
        # Even sessions belong to somebody who will be forgotten: a name a third, so that each
        # forget hits some.
        player = OTHER_PLAYER if turn % 2 else bytes([turn // 20]) * 16
        for chunk in chunks:
            harness.put(chunk, player=player)
        close = harness.close_frame(chunks[0].meta.session, 3)
        harness.write([type(close)(close.frame.stamped(player, int(harness.clock.now())), None)])
        if turn % 20 == 19:
            harness.store.forget(bytes([turn // 20]) * 16)
        if turn % 15 == 14:
            harness.reopen()
    for reader in readers:
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err
        lines = [line.split() for line in out.splitlines()]
        assert [int(line[0]) for line in lines] == list(range(1, last + 1))
        seen = {tuple(line[2].rsplit("/", 1)) for line in lines if "/" in line[2]}
        assert {(session, int(number)) for session, number in seen} >= stay
    everything = harness.everything()
    assert sum(isinstance(item, Forgotten) for item in everything) == 30 * 4 + 3
    harness.store.close()


def test_a_view_shows_writes_at_once_and_after_the_writer_has_exited(tmp_path: Path):
    harness = local_harness(tmp_path)
    (chunks,) = sessions(1, 4)
    with StoreView(tmp_path) as view:
        cursor = None
        for chunk in chunks:
            harness.put(chunk)
            tail = view.tail(cursor, max_items=10, wait_s=0.0)
            assert [item.chunk for item in tail.items if not isinstance(item, Forgotten)] == [chunk]
            cursor = tail.cursor
        harness.store.close()
        assert len(view.tail(None, max_items=10, wait_s=0.0).items) == 4
    with StoreView(tmp_path) as view:
        assert len(view.tail(None, max_items=10, wait_s=0.0).items) == 4


def test_a_view_of_a_new_store_waits_for_the_first_chunk(tmp_path: Path):
    harness = local_harness(tmp_path)
    with StoreView(tmp_path) as view:
        assert list(view.tail(None, max_items=10, wait_s=0.0).items) == []
        harness.put(*sessions(1, 1)[0])
        assert len(view.tail(None, max_items=10, wait_s=5.0).items) == 1
    harness.store.close()


def test_a_player_is_hidden_from_open_views_as_soon_as_the_tombstone_is_durable(
    tmp_path: Path, monkeypatch
):
    harness = local_harness(tmp_path)
    mine, others = sessions(2, 2)
    harness.put(*mine)
    harness.put(*others, player=OTHER_PLAYER)
    with StoreView(tmp_path) as view:
        assert len(view.tail(None, max_items=10, wait_s=0.0).items) == 4
        monkeypatch.setattr(local(harness), "erase", lambda: 0)
        harness.store.forget(PLAYER)
        items = view.tail(None, max_items=10, wait_s=0.0).items
        assert [isinstance(item, Forgotten) for item in items] == [True, True, False, False, True]
        assert items[-1].player == tombstone_of(PLAYER)  # type: ignore[union-attr]
    harness.store.close()


def test_invalid_cursors_and_folders_are_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match="no store"):
        StoreView(tmp_path)
    harness = local_harness(tmp_path)
    with pytest.raises(ConfigError, match="not a cursor of a local store"):
        harness.store.tail(Cursor("p0:17"), max_items=1, wait_s=0.0)
    with pytest.raises(Corrupt, match="cursor 1 is ahead of the store"):
        harness.store.tail(Cursor("1"), max_items=1, wait_s=0.0)
    assert list(harness.store.tail(Cursor("0"), max_items=1, wait_s=0.0).items) == []
    harness.store.close()
