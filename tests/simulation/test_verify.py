"""verify on folders of a real client; digests are equal only for equal steps."""

import contextlib
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from understudy.backends.data import DataFolder, data_folder, stats
from understudy.cli.root import run as run_command
from understudy.client.connect import ClientConfig, connect, local_link
from understudy.client.local import LocalLink
from understudy.client.receipts import AckedFrame, read_receipts
from understudy.client.sender import send_unsent_frames
from understudy.client.spool import count_spooled
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, Corrupt
from understudy.core.names import new_session, player_name
from understudy.experience.chunk import Chunk
from understudy.experience.frame import CloseReport, close_frame
from understudy.experience.game import GameSpec, game_spec
from understudy.platform.erase import forget_player, replay_quarantine
from understudy.platform.ingest import IngestRole
from understudy.ports import Ack, Cursor, LiveModels, Tail, TicketBatch
from understudy.simulation.ledger import LedgerLink, read_ledger
from understudy.simulation.verify import combined_digest, digests, verify
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.store_harness import StoreFactory, StoreHarness

SPEC = game_spec("tag", obs=3, actions=["left", "right"])


def record(
    data: DataFolder, *, player: str, steps: int, spec: GameSpec = SPEC, ledger: bool = True
) -> None:
    link = local_link(data.root, spec, SystemClock())
    config = ClientConfig(link=LedgerLink(link, data.ledger) if ledger else link, spool=data.spool)
    with connect(spec, consent="granted", config=config) as game:
        rng = np.random.default_rng(steps)
        episode = game.episode(player=player)
        for _ in range(steps):
            episode.acted(rng.normal(size=3).astype(np.float32), int(rng.integers(2)))
            episode.reward(1.0)
        episode.end(result="win")


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "D")


def test_every_acknowledgement_is_checked_against_the_stored_bytes(data: DataFolder) -> None:
    record(data, player="ada", steps=1200)
    verification = verify(data)
    assert (
        verification.exit_code,
        verification.lost_steps,
        verification.duplicate_steps,
        verification.gap_steps,
    ) == (
        0,
        0,
        0,
        0,
    )
    assert verification.steps == verification.ledger_steps == 1200


def test_without_a_ledger_there_is_nothing_to_check(data: DataFolder) -> None:
    record(data, player="ada", steps=100, ledger=False)
    verification = verify(data)
    assert verification.exit_code == 2
    assert verification.steps == 100


def test_a_promise_without_data_is_a_loss(data: DataFolder) -> None:
    record(data, player="ada", steps=100)
    line = next(data.ledger.glob("*.jsonl"))
    text = line.read_text()
    line.write_text(text + text.splitlines()[0].replace('"chunk_no": 0', '"chunk_no": 77') + "\n")
    verification = verify(data)
    assert verification.exit_code == 1
    assert verification.lost_steps == 100


def test_an_incomplete_last_ledger_line_is_skipped_but_a_broken_line_is_an_error(
    data: DataFolder,
) -> None:
    record(data, player="ada", steps=10)
    path = next(data.ledger.glob("*.jsonl"))
    text = path.read_text()
    path.write_text(text + '{"session": "00')
    assert len(list(read_ledger(data.ledger))) == len(text.splitlines())
    path.write_text("nonsense\n" + text)
    with pytest.raises(Corrupt, match="line 1"):
        list(read_ledger(data.ledger))


def test_verify_works_beside_a_live_writer(data: DataFolder) -> None:
    import threading

    record(data, player="ada", steps=600)
    stop = threading.Event()
    with IngestRole(data) as role:
        thread = threading.Thread(target=role.run, args=(stop,))
        thread.start()
        try:
            record(data, player="bob", steps=300)
            verification = verify(data)
        finally:
            stop.set()
            thread.join()
    assert verification.live_writer
    assert (verification.exit_code, verification.steps) == (0, 900)


def test_chunks_that_only_a_close_frame_names_are_gaps_for_which_no_backup_is_advised(
    data: DataFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    record(data, player="ada", steps=100)
    session = new_session(SystemClock().now())
    frame = close_frame(session, 5, CloseReport(n_chunks=5, n_steps=50))
    with contextlib.closing(local_link(data.root, SPEC, SystemClock())) as link:
        assert link.send([frame], {session: player_name("eve")})[0].accepted
    verification = verify(data)
    assert (verification.lost_steps, verification.gap_chunks) == (0, 5)
    assert verification.has_only_gaps
    assert run_command(["data", "verify", "--data", str(data.root)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 chunks never arrived, of sessions with missing chunks" in shown
    assert "(understudy restore" not in shown
    line = next(data.ledger.glob("*.jsonl"))
    text = line.read_text()
    line.write_text(text + text.splitlines()[0].replace('"chunk_no": 0', '"chunk_no": 77') + "\n")
    assert not verify(data).has_only_gaps


def test_erasing_a_player_keeps_the_others_and_passes_verification(data: DataFolder) -> None:
    record(data, player="ada", steps=600)
    record(data, player="bob", steps=300)
    verify(data)
    found = forget_player(data, "ada", game=None, timeout_s=60)
    assert found["chunks"] >= 2
    verification = verify(data)
    assert (verification.exit_code, verification.steps, verification.lost_steps) == (0, 300, 0)
    with pytest.raises(ConfigError, match="registered games: tag"):
        forget_player(data, "ada", game="nope", timeout_s=60)


def test_erasing_a_player_includes_the_spool_of_a_killed_game(data: DataFolder) -> None:
    record(data, player="bob", steps=10)

    class Away(LedgerLink):
        def send(self, frames, players, *, skipped_steps=0):
            raise TimeoutError("away")

    link = Away(local_link(data.root, SPEC, SystemClock()), data.ledger)
    game = connect(SPEC, config=ClientConfig(link=link, spool=data.spool))
    episode = game.episode(player="ada")
    for _ in range(20):
        episode.acted([0.0, 0.0, 0.0], 1)
    game.close(timeout_s=0.2)
    assert forget_player(data, "ada", game=None, timeout_s=60)["spooled_sessions"] == 1
    assert count_spooled(data.spool) == 0
    assert verify(data).steps == 10


def test_parked_frames_are_stored_once_their_schema_is_registered(data: DataFolder) -> None:
    record(data, player="bob", steps=10)
    newer = game_spec("tag", obs=4, actions=["left", "right"])
    link = local_link(data.root, newer, SystemClock())
    with connect(newer, config=ClientConfig(link=link, spool=data.spool)) as game:
        episode = game.episode(player="ada")
        for _ in range(50):
            episode.acted([0.0] * 4, 0)
        episode.end()
    spec_file = data.games / "tag" / f"{newer.schema}.json"
    text = spec_file.read_bytes()
    spec_file.unlink()
    with IngestRole(data) as role:
        role.service.drain()
    assert stats(data)["parked"] == 1
    spec_file.write_bytes(text)
    assert replay_quarantine(data, None, timeout_s=60) == {
        "tried": 1,
        "stored": 1,
        "still_refused": 0,
        "duplicates": 0,
    }
    assert stats(data)["steps"] == 60
    assert replay_quarantine(data, None, timeout_s=60)["tried"] == 0


def test_a_data_folder_must_be_named_and_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    with pytest.raises(ConfigError, match="UNDERSTUDY_DATA"):
        data_folder(None)
    monkeypatch.setenv("UNDERSTUDY_DATA", str(tmp_path))
    assert data_folder(None).root == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        data_folder(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="holds no recorded data"):
        DataFolder(tmp_path / "nowhere").must_exist()


def test_unsent_frames_of_a_game_without_a_ledger_create_no_ledger(data: DataFolder) -> None:
    record(data, player="ada", steps=150, ledger=False)

    class Away:
        recording_rate = 1.0

        def __init__(self, link: LocalLink) -> None:
            self._link = link

        def register(self, spec: GameSpec) -> None:
            self._link.register(spec)

        def send(self, frames: object, players: object, *, skipped_steps: int = 0) -> Sequence[Ack]:
            raise TimeoutError("away")

        def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
            return None

        def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
            return TicketBatch(entry=0)

        def policy(self, model_no: int) -> bytes:
            raise KeyError(model_no)

        def close(self) -> None:
            self._link.close()

    link = Away(local_link(data.root, SPEC, SystemClock()))
    game = connect(SPEC, config=ClientConfig(link=link, spool=data.spool))
    episode = game.episode(player="bob")
    for _ in range(50):
        episode.acted([0.0, 0.0, 0.0], 1)
    game.close(timeout_s=0.2)
    verification = verify(data)
    assert verification.recovered_frames > 0
    assert (verification.exit_code, verification.ledger_chunks) == (2, 0)


def test_a_ledger_line_truncated_by_a_full_disk_does_not_affect_the_rest(data: DataFolder) -> None:
    record(data, player="ada", steps=10)
    path = next(data.ledger.glob("*.jsonl"))
    text = path.read_text()
    path.write_text(text + '{"session": "00\n' + text)
    assert len(list(read_ledger(data.ledger))) == 2 * len(text.splitlines())


def test_one_flipped_bit_in_the_store_counts_as_a_loss(data: DataFolder) -> None:
    record(data, player="ada", steps=30)
    assert verify(data).exit_code == 0
    database = data.store / "experience.sqlite"
    raw = bytearray(database.read_bytes())
    raw[raw.index(b"understudy-chunk/1") + 200] ^= 0x10
    database.write_bytes(raw)
    assert verify(data).exit_code == 1


def test_steps_that_are_set_aside_do_not_count_as_stored(data: DataFolder) -> None:
    record(data, player="ada", steps=100)
    shutil.rmtree(data.games)
    verification = verify(data)
    assert (verification.exit_code, verification.steps, verification.set_aside_steps) == (0, 0, 100)


def test_a_store_without_its_key_is_not_opened_with_a_new_one(data: DataFolder) -> None:
    record(data, player="ada", steps=10)
    verify(data)
    (data.root / "key").unlink()
    with pytest.raises(ConfigError, match="restore the key"):
        forget_player(data, "ada", game=None, timeout_s=60)
    with pytest.raises(ConfigError, match="restore the key"):
        record(data, player="ada", steps=10)
    assert not (data.root / "key").exists()


def test_a_damaged_ledger_is_reported_without_a_traceback(data: DataFolder) -> None:
    record(data, player="ada", steps=10)
    path = next(data.ledger.glob("*.jsonl"))
    raw = bytearray(path.read_bytes())
    raw[12] ^= 0x80
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match="not readable"):
        verify(data)


class _Factory(StoreFactory):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def make(self, clock):
        self._count += 1
        return LocalStore(self._folder / str(self._count), clock=clock)


def _digests(harness: StoreHarness) -> dict[str, str]:
    def page(cursor: Cursor | None) -> Tail:
        return harness.store.tail(cursor, max_items=2, wait_s=0.0)

    return digests(page)


def test_the_order_of_arrival_and_repeats_do_not_change_digests(tmp_path: Path):
    factory = _Factory(tmp_path)
    one = factory.harness()
    other = factory.harness()
    chunks = factory.chunks(4)
    more = factory.chunks(2)
    one.put(*chunks, *more)
    other.put(*more[::-1])
    other.put(*chunks[2:], *chunks)
    assert len(_digests(one)) == 2
    assert _digests(one) == _digests(other)
    assert combined_digest(_digests(one)) == combined_digest(_digests(other))


def test_any_changed_bit_changes_the_digest(tmp_path: Path):
    factory = _Factory(tmp_path)
    factory.harness()
    (chunk,) = factory.chunks(1)
    obs = chunk.columns["obs"]
    others = [
        Chunk(chunk.meta, {**chunk.columns, "obs": obs + 1}),
        Chunk(chunk.meta, {name: column for name, column in chunk.columns.items() if name != "by"}),
        Chunk(
            replace(
                chunk.meta, consent="unknown" if chunk.meta.consent != "unknown" else "granted"
            ),
            chunk.columns,
        ),
    ]
    found = set()
    for one in [chunk, *others]:
        harness = factory.harness()
        harness.put(one)
        found.add(combined_digest(_digests(harness)))
    assert len(found) == len({one.encode() for one in [chunk, *others]})


def test_each_receipt_is_stored_quarantined_expired_forgotten_evicted_or_missing(
    data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(player: str) -> list[AckedFrame]:
        path = tmp_path / f"{player}.jsonl"
        config = ClientConfig(spool=data.spool)
        with connect(SPEC, consent="granted", data=data.root, receipts=path, config=config) as game:
            episode = game.episode(player=player)
            for _ in range(20):
                episode.acted([0.0, 0.0, 0.0], 1)
            episode.end()
        return list(read_receipts(path))

    receipts = {player: keep(player) for player in ("ada", "bob", "cid", "dan")}
    verify(data)
    forget_player(data, "bob", game=None, timeout_s=5)
    with LocalStore(data.store) as store:
        session = uuid.UUID(bytes=receipts["cid"][0].session)
        assert store.quarantine([(session, 0)], reason="guard") == 1
    never = AckedFrame(new_session().bytes, 0, 10, 0)
    other = receipts["ada"][0]._replace(length=1)
    sent = [acked for player in ("ada", "bob", "cid") for acked in receipts[player]]
    found = verify(data, receipts=[*sent, *sent, never, other])
    assert found.receipt_fates == {
        "stored": len(receipts["ada"]) + len(receipts["cid"]) - 1,
        "quarantined": 1,
        "expired": 0,
        "forgotten": len(receipts["bob"]),
        "evicted": 0,
        "missing": 2,
    }
    assert found.exit_code == 1
    assert verify(data, receipts=sent).exit_code == 0
    monkeypatch.setattr("understudy.stores.local.QUARANTINE_BYTES", 0)
    with LocalStore(data.store) as store:
        session = uuid.UUID(bytes=receipts["ada"][0].session)
        assert store.quarantine([(session, 0)], reason="guard") == 1
    found = verify(data, receipts=sent)
    assert (found.receipt_fates["quarantined"], found.receipt_fates["evicted"]) == (0, 2)
    assert (found.exit_code, found.evicted_chunks) == (1, 2)
    with LocalStore(data.store) as store:
        store.expire(time.time() + 100.0)
    found = verify(data, receipts=receipts["dan"])
    assert found.receipt_fates["expired"] > 0
    assert (found.receipt_fates["missing"], found.exit_code) == (0, 0)
    assert found.to_json()["receipts"][0]["fate"] == "expired"


def test_frames_that_no_stream_accepts_are_left_in_the_spool_after_a_few_tries(
    data: DataFolder,
) -> None:
    link = local_link(data.root, SPEC, SystemClock())
    config = ClientConfig(link=link, spool=data.spool, background=False)
    game = connect(SPEC, config=config)
    link.send = lambda *_, **__: []  # type: ignore[method-assign]
    episode = game.episode(player="ada")
    for _ in range(20):
        episode.acted([0.0, 0.0, 0.0], 1)
    game.close()
    sends = 0

    class Full(LocalLink):
        def send(self, frames, players, *, skipped_steps=0):
            nonlocal sends
            sends += 1
            return [Ack(False, error="no room for writing: No space left on device")] * len(frames)

    def link_to(spec: GameSpec) -> LocalLink:
        return Full(FileStream(data.stream), intake=link._intake, specs_folder=data.games)

    (folder,) = data.spool.iterdir()
    assert send_unsent_frames(folder, link_to) == 0
    assert 1 <= sends <= 3
    assert list(folder.glob("*/*.log"))
