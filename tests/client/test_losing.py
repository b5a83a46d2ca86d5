"""Losses between the game and its spool are counted and reported, never silent."""

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client
from understudy.client import RecordingWarning
from understudy.client.spool import Spool
from understudy.core.log import FileLock
from understudy.core.names import new_session, player_name
from understudy.core.tensors import DTYPES
from understudy.experience.builder import encode_block
from understudy.experience.frame import FrameKind, data_frame, read_close, read_drop
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box

SPEC = game_spec("my-game", obs=2, actions=3)


def play(ep, n):
    for at in range(n):
        ep.acted(np.array([at, -at], np.float32), at % 3)


def test_a_block_that_cannot_be_encoded_is_counted_and_reported(tmp_path, monkeypatch):
    link = MemoryLink()
    n_calls = 0

    def encode(block, **settings):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise RuntimeError("cannot encode")
        return encode_block(block, **settings)

    monkeypatch.setattr("understudy.client.sender.encode_block", encode)
    game = client(link, tmp_path)
    ep = game.episode(player="anna")
    play(ep, 1500)
    ep.end()
    with pytest.warns(RecordingWarning) as caught:
        assert game.close()
    assert any("cannot encode" in str(one.message) for one in caught)
    (frames,) = link.by_session().values()
    reports = [read_drop(frame) for frame in frames.values() if frame.kind is FrameKind.DROP]
    assert [(report.ranges, report.n_steps) for report in reports] == [(((1, 1),), 512)]
    assert sum(chunk.meta.n_steps for chunk in chunks(frames)) == 1500 - 512
    assert read_close(frames[max(frames)]).n_steps == 1500
    assert game.stats().dropped_steps == 512
    assert "cannot encode" in game.stats().last_error
    assert game._sessions.handoff.waiting_bytes == 0


def test_a_block_that_fails_half_way_loses_only_its_rest(tmp_path, monkeypatch):
    def encode(block, **settings):
        yield next(encode_block(block, **settings))
        raise RuntimeError("unforeseen")

    monkeypatch.setattr("understudy.client.sender.encode_block", encode)
    link = MemoryLink()
    rng = np.random.default_rng(0)
    game = client(link, tmp_path, obs=Box((64, 64), DTYPES["U8"]))
    ep = game.episode(player="anna")
    for at in range(300):
        ep.acted(rng.integers(0, 256, (64, 64), np.uint8), at % 3)
    ep.end()
    with pytest.warns(RecordingWarning):
        game.close()
    (frames,) = link.by_session().values()
    assert [frames[number].kind for number in sorted(frames)] == [
        FrameKind.DATA,
        FrameKind.DROP,
        FrameKind.CLOSE,
    ]
    stored = chunks(frames)[0].meta.n_steps
    report = read_drop(frames[2])
    assert 0 < stored < 300
    assert "unforeseen" in game.stats().last_error
    assert (report.ranges, report.n_steps, game.stats().dropped_steps) == (
        ((1, 1),),
        300 - stored,
        300 - stored,
    )
    assert read_close(frames[max(frames)]).n_steps == 300


def test_an_interrupt_while_encoding_is_reported(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    play(ep, 10)
    clock.advance(2)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.client.sender.encode_block", interrupted)
        with pytest.warns(RecordingWarning, match="dropped"), pytest.raises(KeyboardInterrupt):
            game.pump()
    ep.end()
    game.close()
    assert (game.stats().dropped_steps, game.stats().acked_steps) == (9, 1)


def test_an_error_while_a_session_is_ended_does_not_leave_it_open(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    link = MemoryLink()
    game = client(link, tmp_path)
    play(game.episode(player="anna"), 10)
    game.end_session("anna")
    with monkeypatch.context() as patch:
        patch.setattr("understudy.client.sender.encode_block", interrupted)
        with pytest.warns(RecordingWarning, match="dropped"), pytest.raises(KeyboardInterrupt):
            game.pump()
    assert game.close()
    assert [frame.kind for frame in link.frames] == [FrameKind.DROP, FrameKind.CLOSE]


def test_a_spool_folder_that_cannot_be_locked_loses_nothing(tmp_path):
    session = new_session(FakeClock().now())
    spool = Spool(tmp_path)
    one = spool.create(session, player=player_name("anna"), spec=SPEC)
    entry = one.add(data_frame(session, 0, b"body"), 3)
    with FileLock(tmp_path / str(session) / ".lock", what="a look"):
        assert spool.write() == 0
        assert "in use" in spool.error
        assert one.read(entry) is not None
    assert spool.memory_bytes == entry.size_bytes
    assert spool.write() == 3, "the next write tries again"
    assert (spool.memory_bytes, spool.error) == (0, "")
    spool.remove(one)
    assert list(tmp_path.iterdir()) == []
