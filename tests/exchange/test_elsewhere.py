"""Imports into a remote store: ingest stores them from the stream, and each step counts once."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.exchange.exports import file_of_steps
from understudy.backends.data import DataFolder
from understudy.backends.unfinished_imports import SendingSession, UnfinishedImports
from understudy.client.local import LocalLink
from understudy.core.errors import ConfigError, Corrupt, StorageFailed, Unreachable
from understudy.core.names import new_session, player_name
from understudy.exchange import importing
from understudy.exchange.destination import Destination
from understudy.exchange.importing import Imported, import_files
from understudy.exchange.parquet import ParquetFile
from understudy.experience.frame import Frame
from understudy.experience.session import DAY_S
from understudy.ingest.specs import SpecFolder
from understudy.platform.config import Config, StoreSection
from understudy.platform.erase import forget_in_remote_store
from understudy.platform.ingest import IngestRole
from understudy.ports import Ack, Audit, SessionFilter, SessionInfo
from understudy.stores.database import has_store
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.streams.file import FileStream
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.samples import cart_spec

SPEC = cart_spec()
ADA = player_name("ada")


class There:
    """The store elsewhere as an import sees it: it reads, others write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_away = False

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        if self.is_away:
            raise Unreachable("nobody answers")
        if not has_store(self._folder):
            return
        with StoreView(self._folder) as view:
            yield from view.sessions(wanted)

    def close(self) -> None:
        pass


class Deployment:
    """A data folder whose config puts the store elsewhere."""

    def __init__(self, root: Path, path: Path) -> None:
        self.data = DataFolder(root / "D")
        self.folder = root / "there"
        self.path = path
        self.there = There(self.folder)
        self.place = Destination(
            self.data, Config(store=StoreSection(url="cassandra://there/games")), wait_s=0.0
        )

    def bring(self, **options: Any) -> Imported:
        """Import the file."""
        return import_files(self.place, [ParquetFile(self.path)], **options)

    @contextmanager
    def ingest(self) -> Iterator[IngestRole]:
        specs = SpecFolder(self.data.games)
        with IngestRole(
            self.data,
            specs=specs,
            open_stream=lambda: FileStream(self.data.stream),
            open_store=lambda: LocalStore(self.folder, specs=specs),
        ) as role:
            yield role

    def drained(self) -> Audit:
        """What is stored once ingest has run."""
        with self.ingest() as role:
            role.service.drain()
            return role.store.audit()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    path, _ = file_of_steps(tmp_path, SPEC)
    deployment = Deployment(tmp_path, path)
    monkeypatch.setattr(
        "understudy.exchange.destination.open_store", lambda *_, **__: deployment.there
    )
    return deployment


def test_steps_not_stored_yet_are_reported_with_the_next_step_and_stored_once(
    made: Deployment,
) -> None:
    first = made.bring()
    assert (first.stored_steps, first.refused_steps, first.waiting_steps) == (0, 0, first.steps)
    assert f"understudy ingest --data {made.data.root}" in made.place.next_step()
    again = made.bring()
    assert (again.stored_steps, again.waiting_steps) == (0, first.steps)
    audit = made.drained()
    assert (audit.steps, audit.sessions, audit.duplicate_steps, audit.gap_steps) == (
        first.steps,
        3,
        0,
        0,
    )
    last = made.bring()
    assert (last.stored_steps, last.there_steps, last.waiting_steps) == (0, first.steps, 0)
    assert not UnfinishedImports(made.data.root).sessions
    assert made.drained().steps == first.steps


def test_control_without_saved_ids_everything_is_stored_twice(
    made: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnfinishedImports, "add", lambda *_: None)
    first = made.bring()
    made.bring()
    assert made.drained().steps == 2 * first.steps


def test_while_ingest_runs_an_import_waits_until_all_is_stored(made: Deployment) -> None:
    stop = threading.Event()
    place = Destination(made.data, made.place.config, wait_s=30.0)
    with made.ingest() as role:
        assert "understudy status" in made.place.next_step()
        runner = threading.Thread(target=role.run, args=(stop,))
        runner.start()
        try:
            result = import_files(place, [ParquetFile(made.path)], player=ADA)
        finally:
            stop.set()
            runner.join()
    assert (result.stored_steps, result.waiting_steps, result.by_running_ingest) == (
        result.steps,
        0,
        True,
    )
    assert not (made.data.root / "import.json").exists()


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("stores_between", [False, True])
def test_a_killed_import_that_is_repeated_stores_each_step_once(
    made: Deployment, monkeypatch: pytest.MonkeyPatch, after: int, stores_between: bool
) -> None:
    sends = [0]
    send = LocalLink.send

    def kill(link: LocalLink, *arguments: Any, **named: Any) -> Sequence[Ack]:
        sends[0] += 1
        acks = send(link, *arguments, **named)
        if sends[0] > after:
            raise Killed  # in the stream, and nobody has heard of it
        return acks

    with monkeypatch.context() as patched:
        patched.setattr(LocalLink, "send", kill)
        patched.setattr(importing, "MAX_FRAMES_PER_SEND", 4)
        with pytest.raises(Killed):
            made.bring()
    if stores_between:
        made.drained()
    result = made.bring()
    audit = made.drained()
    assert (audit.steps, audit.sessions, audit.duplicate_steps, audit.gap_steps) == (
        result.steps,
        3,
        0,
        0,
    )
    assert made.bring().there_steps == result.steps


def test_a_player_erased_before_the_import_is_stored_may_be_imported_again(
    made: Deployment,
) -> None:
    made.bring(player=ADA)
    with made.ingest() as role:
        forget_in_remote_store(made.data, role.store, "ada", registered=[SPEC.game], game=None)
    assert made.drained().steps == 0, "what was sent before is refused"
    result = made.bring(player=ADA)
    assert made.drained().steps == result.steps


def test_resuming_an_import_with_another_name_or_too_late_is_rejected(made: Deployment) -> None:
    made.bring(player=ADA)
    with pytest.raises(ConfigError, match="pass the same --player"):
        made.bring(player=player_name("bob"))
    sessions = UnfinishedImports(made.data.root).sessions
    old = {
        noise: SendingSession(new_session(START_S - 30 * DAY_S, bytes(10)), one.player)
        for noise, one in sessions.items()
    }
    UnfinishedImports(made.data.root).add(old)
    with pytest.raises(ConfigError, match="too old to resume"):
        made.bring(player=ADA)


def test_an_unreachable_store_does_not_end_a_waiting_import(
    made: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Destination(made.data, made.place.config, wait_s=30.0)
    clock = ManualClock(time.time())
    waits = [0]
    wait = clock.wait

    def come_back(event: threading.Event, timeout_s: float) -> bool:
        """The store is away for three questions, then ingest has stored everything."""
        waits[0] += 1
        made.there.is_away = waits[0] < 3
        if waits[0] == 3:
            made.drained()
        return wait(event, timeout_s)

    monkeypatch.setattr(clock, "wait", come_back)
    result = import_files(place, [ParquetFile(made.path)], clock=clock)
    assert (result.stored_steps, result.waiting_steps) == (result.steps, 0)
    assert waits[0] == 3


class Busy(FileStream):
    """A stream that takes every third frame, as one does that is throttled."""

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        taken = super().append(frames[::3])
        return [
            taken[at // 3] if at % 3 == 0 else Ack(False, None, 0.1, "slow down")
            for at in range(len(frames))
        ]


class Shut(FileStream):
    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        raise Unreachable("the broker does not answer")


def test_a_busy_stream_is_retried_and_an_unreachable_one_is_reported(
    made: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(time.time())
    with monkeypatch.context() as patched:
        patched.setattr(
            "understudy.backends.deployment.open_stream", lambda _, data: Shut(data.stream)
        )
        with pytest.raises(
            StorageFailed, match="the broker does not answer; fix that, then run the same command"
        ):
            made.bring(clock=clock)
    monkeypatch.setattr(
        "understudy.backends.deployment.open_stream", lambda _, data: Busy(data.stream)
    )
    result = made.bring(clock=clock)
    audit = made.drained()
    assert (audit.steps, audit.duplicate_steps, audit.gap_steps) == (result.steps, 0, 0)


def test_a_damaged_file_of_unfinished_imports_is_reported(made: Deployment) -> None:
    made.data.root.mkdir()
    for raw in (b"{", b"[]", b'{"a": 1}', b'{"zz": ["", ""]}'):
        (made.data.root / "import.json").write_bytes(raw)
        with pytest.raises(Corrupt, match=r"import.json is damaged"):
            made.bring()
