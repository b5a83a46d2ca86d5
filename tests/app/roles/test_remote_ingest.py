"""Ingest into a store elsewhere: it goes on after trouble, and a stop while nothing answers is a clean one."""

import threading
from pathlib import Path
from typing import Any

import pytest

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import IngestRole
from understudy.app.roles.remote_ingest import RemoteIngestRole
from understudy.core.errors import Locked, Unreachable
from understudy.core.game import GameSpec
from understudy.core.ports import Position, Read
from understudy.stores.local import LocalStore
from understudy.streams.memory import MemoryStream
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec
from understudy.testing.streams import sample_frames

SPEC = cart_spec()


class Specs:
    def spec(self, game: str, schema: str) -> GameSpec | None:
        return SPEC if (game, schema) == (SPEC.game, SPEC.schema) else None

    def knows(self, game: str) -> bool:
        return game == SPEC.game


class Away(MemoryStream):
    """A stream that does not answer some of the times it is read."""

    def __init__(self, away: int) -> None:
        super().__init__(clock=ManualClock())
        self.away = away

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        if self.away:
            self.away -= 1
            raise Unreachable("nobody answers; try again")
        return super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.app.roles.ingest._TROUBLE_S", 0.01)


def role_of(folder: Path, stream: MemoryStream) -> RemoteIngestRole:
    return RemoteIngestRole(
        DataFolder(folder), specs=Specs(), open_stream=lambda: stream,
        open_store=lambda: LocalStore(folder / "there", specs=Specs()),
    )  # fmt: skip


def test_a_stream_that_comes_back_is_stored_once(tmp_path: Path, quick: None):
    stream, frames, stop = Away(5), sample_frames(6), threading.Event()
    stream.append(frames)
    with role_of(tmp_path, stream) as role:
        runner = threading.Thread(target=role.run, args=(stop,))
        runner.start()
        while role.service.stats.frames < 6 and runner.is_alive():
            stop.wait(0.01)
        stop.set()
        runner.join(20.0)
        audit = role.store.audit()
    assert not runner.is_alive()
    assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks) == (6, 0, 0)


def test_a_stop_while_nobody_answers_leaves_the_rest_to_the_next_start(tmp_path: Path, quick: None):
    stream, stop = Away(10_000), threading.Event()
    stream.append(sample_frames(3))
    stop.set()
    with role_of(tmp_path, stream) as role:
        role.run(stop)
        assert role.store.audit().chunks == 0
    again = Away(0)
    again.append(sample_frames(3))
    with role_of(tmp_path, again) as role:
        role.run(stop)
        assert role.store.audit().chunks == 3


class Opened:
    """What was opened here, and what of it was closed again."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stream(self) -> MemoryStream:
        opened = self.names
        opened.append("stream")

        class Told(MemoryStream):
            def close(self) -> None:
                super().close()
                opened.remove("stream")

        return Told()


def fails() -> Any:
    raise Unreachable("nobody answers")


def test_a_second_one_in_the_same_folder_is_refused_before_anything_is_opened(tmp_path: Path):
    with role_of(tmp_path, MemoryStream()), pytest.raises(Locked):
        RemoteIngestRole(
            DataFolder(tmp_path), specs=Specs(), open_stream=fails, open_store=lambda: LocalStore(tmp_path / "x")
        )
    assert not (tmp_path / "x").exists()


def test_what_was_opened_is_closed_when_the_rest_cannot_be_opened(tmp_path: Path):
    opened, data = Opened(), DataFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(Unreachable):
            RemoteIngestRole(data, specs=Specs(), open_stream=opened.stream, open_store=fails)
        with pytest.raises(Unreachable):
            RemoteIngestRole(data, specs=Specs(), open_stream=fails, open_store=fails)
        with pytest.raises(Unreachable):
            IngestRole(data, specs=Specs(), open_stream=fails)
        assert opened.names == []
    with IngestRole(data, specs=Specs(), open_stream=opened.stream):
        assert opened.names == ["stream"]
    assert opened.names == []
    with role_of(tmp_path, MemoryStream()):
        """Nobody holds its lock any more."""
