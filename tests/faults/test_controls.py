"""Controls: each safeguard is removed in turn, and the suite must detect it.

A test that cannot fail proves nothing. The power cut's control (no fsync) is in
`test_power_cut.py`.
"""

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from tests.card import Card
from tests.faults import sabotage
from tests.faults.recording import playing
from understudy.backends.data import DataFolder
from understudy.core import log as log_module
from understudy.core.errors import StorageFailed
from understudy.experience import frame as frame_module
from understudy.experience import session as session_module
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind, decode_frame
from understudy.experience.intake import deployment_key
from understudy.experience.session import Arrival, SessionState
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.platform.ingest import IngestRole
from understudy.ports import ExperienceStore, Link, Receipt, Stored, WriteBatch
from understudy.simulation.verify import Verification, verify
from understudy.stores import database, draft
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.streams.file import FileStream
from understudy.testing import Crash, Faults, FaultyLink

CHUNKS = 6


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "data")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def record(
    data: DataFolder, rng: np.random.Generator, wrap: Callable[[Link], Link] | None = None
) -> None:
    with playing(data, ["ada", "bob"], rng, wrap=wrap) as table:
        for _ in range(CHUNKS):
            table.play()


# --- Dedup ----------------------------------------------------------------------------------------


def record_everything_twice(data: DataFolder, rng: np.random.Generator) -> None:
    record(data, rng, lambda link: FaultyLink(link, Faults(duplicate=1.0), rng))


def test_duplicates_are_stored_once(data: DataFolder, rng: np.random.Generator) -> None:
    record_everything_twice(data, rng)
    found = verify(data)
    assert (found.exit_code, found.duplicate_steps, found.steps) == (0, 0, found.ledger_steps)


def without_dedup(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen before is taken for new."""
    admit = session_module.admit

    def admit_again(state: SessionState | None, arrival: Arrival) -> tuple[SessionState, str]:
        after, verdict = admit(state, arrival)
        return after, "" if verdict == "seen" else verdict

    monkeypatch.setattr(draft, "admit", admit_again)


def test_without_dedup_the_store_itself_rejects_a_second_copy(
    data: DataFolder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_dedup(monkeypatch)
    record_everything_twice(data, rng)
    with pytest.raises(StorageFailed, match="UNIQUE"):
        verify(data)


def test_without_dedup_and_a_unique_key_verify_detects_duplicates(
    data: DataFolder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, card: Card
) -> None:
    without_dedup(monkeypatch)
    monkeypatch.setattr(
        database, "_SCHEMA", database._SCHEMA.replace("CREATE UNIQUE INDEX", "CREATE INDEX")
    )
    record_everything_twice(data, rng)
    found = verify(data)
    went_red = found.exit_code == 1 and found.duplicate_steps > 0
    card.line("control: dedup off goes red", tried=1, held=int(went_red))
    assert went_red, found


# --- Positions with their data --------------------------------------------------------------------


class PositionFirst:
    """Commits its position before the data, as many consumers do, and dies in between once."""

    def __init__(self, store: LocalStore, *, dies_at: int) -> None:
        self._store = store
        self._left = dies_at

    def write(self, batch: WriteBatch) -> Receipt:
        self._store.write(WriteBatch(batch.partition, batch.epoch, batch.position))
        self._left -= 1
        if self._left == 0:
            raise Crash("between position and data")
        return self._store.write(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class DataFirst(PositionFirst):
    """The real order, with a death right after the commit, before it is acknowledged."""

    def write(self, batch: WriteBatch) -> Receipt:
        receipt = self._store.write(batch)
        self._left -= 1
        if self._left == 0:
            raise Crash("after the commit")
        return receipt


def crash_while_storing(
    data: DataFolder, rng: np.random.Generator, wrap: Callable[[LocalStore], PositionFirst]
) -> Verification:
    deployment_key(data.root)
    stream = FileStream(data.stream)
    specs = SpecFolder(data.games)
    with LocalStore(data.store, specs=specs) as store:
        wrapped: ExperienceStore = wrap(store)  # type: ignore[assignment]
        service = IngestService(stream, wrapped, specs, owner="test")
        with playing(data, ["ada", "bob"], rng) as table:
            try:
                for _ in range(CHUNKS):
                    table.play()
                    service.drain()
            except Crash:
                table.play()
                return verify_after(store, data)
    raise AssertionError("nobody died")


def verify_after(store: LocalStore, data: DataFolder) -> Verification:
    """What a new start finds."""
    store.close()
    return verify(data)


def test_a_death_after_the_commit_loses_nothing(data: DataFolder, rng: np.random.Generator) -> None:
    found = crash_while_storing(data, rng, lambda store: DataFirst(store, dies_at=2))
    assert (found.exit_code, found.lost_steps, found.duplicate_steps) == (0, 0, 0)


def test_with_positions_before_data_verify_detects_the_loss(
    data: DataFolder, rng: np.random.Generator, card: Card
) -> None:
    found = crash_while_storing(data, rng, lambda store: PositionFirst(store, dies_at=2))
    went_red = found.exit_code == 1 and found.lost_steps > 0
    card.line("control: positions before data goes red", tried=1, held=int(went_red))
    assert went_red, found


# --- Checksums ------------------------------------------------------------------------------------


def stored_observations(data: DataFolder) -> set[bytes]:
    """Every observation that a reader of the store is given."""
    found: set[bytes] = set()
    with StoreView(data.store) as view:
        page = view.tail(None, max_items=10_000, wait_s=0.0)
        for item in page.items:
            if isinstance(item, Stored) and item.chunk is not None:
                found.update(row.tobytes() for row in item.chunk.columns["obs"])
    return found


def recorded_observations(data: DataFolder) -> set[bytes]:
    """Every observation in the stream, before anything was damaged."""
    found: set[bytes] = set()
    for path in data.stream.glob("*/*.log"):
        for raw in sabotage.frames_in(path):
            frame = decode_frame(raw)
            if frame.kind is FrameKind.DATA:
                found.update(row.tobytes() for row in chunk_of(frame).columns["obs"])
    return found


def flip_an_observation(folder: Path, obs: bytes) -> None:
    """Flip a bit of an observation in the one file of a folder that holds it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(obs)) >= 0:
            sabotage.flip(path, at + 1)
            return
    raise AssertionError(f"no file under {folder} holds it")


class AlwaysRight(int):
    """A checksum that equals every other one."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def skip_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checksum of log and frame is taken for right."""
    monkeypatch.setattr(log_module, "crc32", lambda raw, start=0: AlwaysRight(crc32(raw, start)))
    monkeypatch.setattr(frame_module, "crc32", lambda raw: AlwaysRight(crc32(raw)))


PLACES = ("stream", "store")


def damage(data: DataFolder, place: str, rng: np.random.Generator) -> set[bytes]:
    """Record, let one bit flip in a place, and give back what was recorded."""
    record(data, rng)
    truth = recorded_observations(data)
    if place != "stream":
        with IngestRole(data) as role:
            role.service.drain()
    victim = sorted(truth)[len(truth) // 2]
    flip_an_observation(data.stream if place == "stream" else data.store, victim)
    return truth


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_caught_by_a_checksum(
    data: DataFolder, rng: np.random.Generator, place: str
) -> None:
    damage(data, place, rng)
    assert verify(data).exit_code == 1


@pytest.mark.parametrize("place", PLACES)
def test_without_checksums_the_flipped_bit_reaches_readers(
    data: DataFolder,
    rng: np.random.Generator,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    card: Card,
) -> None:
    truth = damage(data, place, rng)
    skip_checksums(monkeypatch)
    verify(data)
    went_red = not stored_observations(data) <= truth
    card.line(f"control: checksums skipped ({place}) goes red", tried=1, held=int(went_red))
    assert went_red
