"""SegmentReader on stores that are being written, sealed and erased."""

from pathlib import Path

import numpy as np
import pytest

from understudy.core.chunk import Chunk, RowKind
from understudy.core.errors import ConfigError
from understudy.core.game import game_spec
from understudy.core.meta import ChunkMeta, EpisodeNote
from understudy.core.names import new_session
from understudy.core.ports import Candidate, Forgotten, Stored, WriteBatch
from understudy.core.spaces import Box
from understudy.core.tensors import DTYPES, Array
from understudy.stores.local import LocalStore
from understudy.stores.reader import RowFilter, SegmentReader, Window
from understudy.stores.view import StoreView
from understudy.testing import ManualClock

SPEC = game_spec("tag", obs=2, actions=3)
ADA, BOB = b"a" * 16, b"b" * 16


class Writer:
    """Writes episodes whose observation is (serial, step), so that every row can be told from every other."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.store = LocalStore(folder, clock=self.clock)
        self.epoch = self.store.claim("p", owner="test", ttl_s=60).epoch
        self._serial = 0

    def episode(
        self, steps: int = 10, *, player: bytes = ADA, spec=SPEC, kind="player", consent="granted", **optional
    ) -> float:
        self._serial += 1
        rows = steps + 1
        columns: dict[str, Array] = {
            "obs": np.stack([np.full(rows, self._serial), np.arange(rows)], axis=1).astype(np.float32),
            "action": np.zeros(rows, np.int32), "reward": np.ones(rows, np.float32),
            "terminated": np.arange(rows) == steps - 1, "truncated": np.zeros(rows, np.bool_),
            "is_first": np.arange(rows) == 0, "row": (np.arange(rows) == steps).astype(np.uint8),
        }  # fmt: skip
        columns |= {name: np.full(rows, value, dtype) for name, (value, dtype) in optional.items()}
        return self._write(columns, steps, player=player, spec=spec, kind=kind, consent=consent)

    def open_episode(self, steps: int) -> float:
        """An episode that may still go on: its last row is a bootstrap row."""
        self._serial += 1
        rows = steps + 1
        columns: dict[str, Array] = {
            "obs": np.stack([np.full(rows, self._serial), np.arange(rows)], axis=1).astype(np.float32),
            "action": np.zeros(rows, np.int32), "reward": np.ones(rows, np.float32),
            "terminated": np.zeros(rows, np.bool_), "truncated": np.zeros(rows, np.bool_),
            "is_first": np.arange(rows) == 0, "row": 2 * (np.arange(rows) == steps).astype(np.uint8),
        }  # fmt: skip
        return self._write(columns, steps, player=ADA, spec=SPEC, kind="player", consent="granted")

    def _write(self, columns, steps, *, player, spec, kind, consent) -> float:
        session = new_session(self.clock.now())
        meta = ChunkMeta(
            game=spec.game, schema=spec.schema, session=session, chunk_no=0, first_step=0, n_steps=steps, kind=kind,
            consent=consent, episodes=(EpisodeNote(row=0),),
        )  # fmt: skip
        chunk = Chunk(meta, columns).validate()
        frame = chunk.frame().stamped(player, int(self.clock.now()))
        receipt = self.store.write(WriteBatch("p", self.epoch, None, [Candidate(frame, chunk)]))
        assert receipt.fates == ["new"]
        return float(self._serial)


@pytest.fixture
def writer(tmp_path: Path):
    made = Writer(tmp_path)
    yield made
    made.store.close()


def serials(reader: SegmentReader, batch: int = 400, **arguments) -> set[float]:
    sampled = reader.sample(batch, rng=np.random.default_rng(0), **arguments)
    return set(sampled.obs["obs"][:, 0].tolist())


def test_new_steps_can_be_sampled_at_once_and_stay_so_when_sealed(writer: Writer) -> None:
    first = writer.episode()
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    assert serials(reader) == {first}
    second = writer.episode()
    reader.refresh()
    assert serials(reader) == {first, second}
    writer.store.freeze(wait=True)
    third = writer.episode()
    reader.refresh()
    assert serials(reader) == {first, second, third}
    assert reader.n_rows == 33


def test_batches_are_uniform_over_steps_not_over_episodes(writer: Writer) -> None:
    writer.episode(5)
    writer.store.freeze(wait=True)
    writer.episode(50)
    writer.episode(100)
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    batch = reader.sample(31_000, rng=np.random.default_rng(3))
    cells, counts = np.unique(batch.obs["obs"], axis=0, return_counts=True)
    assert len(cells) == 155
    expected = 31_000 / 155
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 230, "far outside of what chance gives for 154 degrees of freedom"


def test_a_transition_is_exact_and_terminated_is_never_bootstrapped(writer: Writer) -> None:
    writer.episode(4)
    batch = SegmentReader(writer.store.folder, clock=writer.clock).sample(100, rng=np.random.default_rng(0))
    step = batch.obs["obs"][:, 1]
    np.testing.assert_array_equal(batch.next_obs["obs"][:, 1], step + 1)
    np.testing.assert_array_equal(batch.terminated, step == 3)
    np.testing.assert_allclose(batch.factor, np.where(step == 3, 0, 0.99))


def test_recent_batches_come_from_the_newest_chunks(writer: Writer) -> None:
    for _ in range(20):
        last = writer.episode(10)
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    assert serials(reader, recent=11) == {last}
    assert serials(reader, recent=30) == {last, last - 1, last - 2}
    assert len(serials(reader, batch=2000, recent=10**9)) == 20


def test_filters_by_player_kind_consent_time_decider_and_version(writer: Writer) -> None:
    ada = writer.episode(player=ADA, by=(1, np.uint8))
    bob = writer.episode(player=BOB, by=(2, np.uint8), version=(7, np.uint32))
    actor = writer.episode(kind="actor", by=(2, np.uint8), version=(9, np.uint32))
    denied = writer.episode(consent="denied")
    writer.store.freeze(wait=True)
    writer.clock.advance(100)
    late = writer.episode(player=BOB)
    every = {ada, bob, actor, denied, late}

    def found(**wanted) -> set[float]:
        with SegmentReader(writer.store.folder, rows=RowFilter(**wanted), clock=writer.clock) as reader:
            return serials(reader)

    assert found() == every - {denied}, "nobody samples what a player did not consent to, unless told"
    assert found(consent=("granted", "denied", "unknown")) == every
    assert found(player=BOB) == {bob, late}
    assert found(kind="actor") == {actor}
    assert found(consent=("denied",)) == {denied, actor}, "actors need no consent"
    assert found(since_s=writer.clock.now() - 50) == {late}
    assert found(until_s=writer.clock.now() - 50) == every - {late, denied}
    assert found(by=(1,)) == {ada}
    assert found(by=(2,), min_version=8) == {actor}
    assert found(min_version=7, max_version=7) == {bob}
    with pytest.raises(ConfigError, match="give one of"):
        RowFilter(kind="ghost")


def test_a_forgotten_player_is_not_sampled_from_the_next_refresh_on(writer: Writer) -> None:
    ada, bob = writer.episode(player=ADA), writer.episode(player=BOB)
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    assert serials(reader) == {ada, bob}
    writer.store.forget(ADA)
    reader.refresh()
    assert serials(reader) == {bob}
    again = writer.episode(player=BOB)
    reader.refresh()
    assert serials(reader) == {bob, again}


def test_optional_columns_read_as_their_default_where_a_chunk_had_none(writer: Writer) -> None:
    writer.episode(version=(7, np.uint32))
    writer.store.freeze(wait=True)
    writer.episode()
    batch = SegmentReader(writer.store.folder, clock=writer.clock).sample(
        200, rng=np.random.default_rng(0), extras=["version"]
    )
    assert set(batch.extras["version"].tolist()) == {0, 7}


def test_several_schemas_must_be_told_apart(writer: Writer) -> None:
    writer.episode()
    writer.episode(spec=game_spec("tag", obs=["x", "y"], actions=3))
    writer.store.freeze(wait=True)
    with pytest.raises(ConfigError, match="name one with schema="):
        SegmentReader(writer.store.folder, clock=writer.clock)
    with SegmentReader(writer.store.folder, schema=SPEC.schema, clock=writer.clock) as reader:
        assert serials(reader) == {1.0}


def test_an_empty_store_says_what_to_do(writer: Writer) -> None:
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    with pytest.raises(ConfigError, match="record more first"):
        reader.sample(1, rng=np.random.default_rng(0))
    writer.episode()
    reader.refresh()
    assert serials(reader) == {1.0}


def test_n_step_windows_shorten_only_at_real_ends(writer: Writer) -> None:
    writer.episode(6)
    batch = SegmentReader(writer.store.folder, clock=writer.clock).sample(
        200, rng=np.random.default_rng(0), window=Window(n_step=4, discount=0.5)
    )
    step = batch.obs["obs"][:, 1].astype(int)
    length = np.minimum(4, 6 - step)
    np.testing.assert_allclose(batch.reward, 2 - 0.5 ** (length - 1.0), rtol=1e-6)
    np.testing.assert_array_equal(batch.next_obs["obs"][:, 1], step + length)


def test_data_may_be_larger_than_memory(tmp_path: Path) -> None:
    spec = game_spec("pixels", obs=Box((84, 84), DTYPES["U8"]), actions=2)
    writer = Writer(tmp_path)
    rows = 257
    for serial in range(40):
        columns: dict[str, Array] = {
            "obs": np.full((rows, 84, 84), serial, np.uint8), "action": np.zeros(rows, np.int32),
            "reward": np.zeros(rows, np.float32), "terminated": np.zeros(rows, np.bool_),
            "truncated": np.zeros(rows, np.bool_), "is_first": np.arange(rows) == 0,
            "row": np.where(np.arange(rows) == rows - 1, RowKind.BOOTSTRAP, 0).astype(np.uint8),
        }  # fmt: skip
        meta = ChunkMeta(
            game=spec.game, schema=spec.schema, session=new_session(writer.clock.now()), chunk_no=0, first_step=0,
            n_steps=rows - 1, consent="granted", episodes=(EpisodeNote(row=0),),
        )  # fmt: skip
        chunk = Chunk(meta, columns).validate()
        frame = chunk.frame().stamped(ADA, int(writer.clock.now()))
        writer.store.write(WriteBatch("p", writer.epoch, None, [Candidate(frame, chunk)]))
    writer.store.freeze(wait=True)
    writer.store.close()
    before = own_memory_bytes()
    with SegmentReader(tmp_path, clock=writer.clock) as reader:
        for seed in range(20):
            batch = reader.sample(64, rng=np.random.default_rng(seed), window=Window(stack=4))
            assert batch.obs["obs"].shape == (64, 4, 84, 84)
        stored = sum(path.stat().st_size for path in tmp_path.glob("segments/*"))
        assert stored > 70_000_000
        assert own_memory_bytes() - before < stored // 3


def own_memory_bytes() -> int:
    """Memory of this process that no file backs; mapped segments do not count."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_what_expired_is_remembered_until_its_sessions_are_too_old_to_come_back(writer: Writer) -> None:
    for _ in range(5):
        writer.episode()
    writer.clock.advance(86_400)
    late = writer.episode()
    assert writer.store.expire(writer.clock.now() - 3600) == 5
    items = writer.store.tail(None, max_items=100, wait_s=0).items
    assert [item.arrival_no for item in items] == [1, 2, 3, 4, 5, 6]
    rows = "SELECT count(*) FROM arrivals", "SELECT count(*) FROM sessions"
    with StoreView(writer.store.folder) as view:
        assert [view.catalogue.one(query)[0] for query in rows] == [6, 6]
        writer.clock.advance(16 * 86_400 - 3600)
        assert writer.store.expire(0.0) == 0
        assert [view.catalogue.one(query)[0] for query in rows] == [1, 1]
    first, last = writer.store.tail(None, max_items=100, wait_s=0).items
    assert first == Forgotten(1, 5, "expired")
    assert last.arrival_no == 6
    with SegmentReader(writer.store.folder, clock=writer.clock) as reader:
        assert serials(reader) == {late}


def test_a_quarantined_chunk_hides_only_itself(writer: Writer) -> None:
    first, second = writer.episode(player=ADA), writer.episode(player=ADA)
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    assert serials(reader) == {first, second}
    (one, *_) = [item for item in writer.store.tail(None, max_items=10, wait_s=0).items if isinstance(item, Stored)]
    assert writer.store.quarantine([(one.frame.session, 0)], reason="poison") == 1
    reader.refresh()
    assert serials(reader) == {second}
    items = writer.store.tail(None, max_items=10, wait_s=0).items
    gone = [item for item in items if isinstance(item, Forgotten)]
    assert [item.reason for item in gone] == ["quarantined", "quarantined"]
    assert all(item.chunks == ((one.frame.session, 0),) for item in gone), "a learner is told what to evict"


def test_a_session_that_falls_silent_is_not_waited_for_longer_than_a_minute(writer: Writer) -> None:
    writer.open_episode(4)
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    window = Window(n_step=3)
    rng = np.random.default_rng(0)
    assert set(reader.sample(100, rng=rng, window=window).obs["obs"][:, 1].tolist()) == {0.0, 1.0}
    writer.clock.advance(61)
    reader.refresh()
    assert set(reader.sample(100, rng=rng, window=window).obs["obs"][:, 1].tolist()) == {0.0, 1.0, 2.0, 3.0}


def test_an_idle_refresh_lays_nothing_out_again(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.episode()
    reader = SegmentReader(writer.store.folder, clock=writer.clock)
    laid_out: list[None] = []
    monkeypatch.setattr(reader, "_lay_out", lambda: laid_out.append(None))
    for _ in range(5):
        reader.refresh()
    assert laid_out == []


@pytest.mark.parametrize("wrong", [{"n_step": 0}, {"stack": 0}, {"discount": 1.5}])
def test_windows_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="from 1"):
        Window(**wrong)  # type: ignore[arg-type]
