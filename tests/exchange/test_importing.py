"""Importing: each step is stored once, whatever the store holds and however often repeated."""

import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.exchange.exports import file_of_steps, from_parquet, steps_in, stored, to_parquet
from understudy.backends.data import DataFolder
from understudy.client.local import LocalLink
from understudy.core.errors import ConfigError, Locked
from understudy.core.log import FileLock
from understudy.core.names import player_name, session_time_s
from understudy.exchange import importing
from understudy.exchange.destination import LocalTarget
from understudy.exchange.importing import Plan, accepted_id, assign_session
from understudy.exchange.incoming import content_session_id, random_part_of, survey
from understudy.exchange.parquet import ParquetFile
from understudy.experience.intake import deployment_key, pseudonym
from understudy.experience.session import DAY_S
from understudy.platform.erase import forget_player
from understudy.platform.ingest import IngestRole
from understudy.ports import Ack, SessionFilter, SessionInfo
from understudy.simulation.verify import verify
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec

SPEC = cart_spec()
ADA = player_name("ada")


def sessions(data: DataFolder) -> list[SessionInfo]:
    with StoreView(data.store) as view:
        return list(view.sessions(SessionFilter()))


def test_a_file_imported_twice_is_stored_once_and_the_result_shows_it(tmp_path: Path) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC)
    data = DataFolder(tmp_path / "D")
    first = from_parquet(data, path, player=ADA)
    assert (first.stored_steps, first.there_steps, first.sessions) == (n_steps, 0, 3)
    again = from_parquet(data, path, player=ADA)
    assert (again.stored_steps, again.there_steps, again.there_sessions) == (0, n_steps, 3)
    other = from_parquet(data, path, path, player=player_name("bob"))
    assert (other.stored_steps, other.there_steps) == (0, n_steps)
    assert {info.player for info in sessions(data)} == {
        pseudonym(deployment_key(data.root), SPEC.game, ADA)
    }
    assert all(info.closed and not info.missing for info in sessions(data))
    found = verify(data)
    assert (found.exit_code, found.steps, found.ledger_steps, found.gap_steps) == (
        0,
        n_steps,
        n_steps,
        0,
    )


def test_steps_recorded_here_are_not_imported_again(tmp_path: Path) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC)
    source = DataFolder(tmp_path / "source")
    assert from_parquet(source, path).there_steps == n_steps
    # Also by the way of another folder, in which the sessions have other times.
    elsewhere = DataFolder(tmp_path / "D")
    from_parquet(elsewhere, path)
    to_parquet(elsewhere, tmp_path / "b.parquet")
    result = from_parquet(source, tmp_path / "b.parquet")
    assert (result.stored_steps, result.there_steps) == (0, n_steps)


def test_old_sessions_get_the_time_of_the_import_and_young_ones_keep_theirs(tmp_path: Path) -> None:
    path, _ = file_of_steps(tmp_path, SPEC)
    now_s = time.time()
    data = DataFolder(tmp_path / "D")
    from_parquet(data, path)
    assert all(abs(session_time_s(info.session) - now_s) < 60 for info in sessions(data))
    source = {random_part_of(info.session) for info in sessions(DataFolder(tmp_path / "source"))}
    assert {random_part_of(info.session) for info in sessions(data)} == source
    (tmp_path / "young").mkdir()
    path, _ = file_of_steps(tmp_path / "young", SPEC, began_s=now_s - 3 * DAY_S)
    young = DataFolder(tmp_path / "young" / "D")
    from_parquet(young, path)
    origin = {info.session for info in sessions(DataFolder(tmp_path / "young" / "source"))}
    assert {info.session for info in sessions(young)} == origin


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_a_killed_import_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC)
    whole = DataFolder(tmp_path / "whole")
    from_parquet(whole, path)
    data = DataFolder(tmp_path / "D")
    sends = [0]
    send = LocalLink.send

    def kill(link: LocalLink, *arguments: Any, **named: Any) -> Sequence[Ack]:
        sends[0] += 1
        if sends[0] > after:
            raise Killed
        return send(link, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(LocalLink, "send", kill)
        patched.setattr(importing, "MAX_FRAMES_PER_SEND", 4)
        patched.setattr(LocalTarget, "step", lambda _: None)  # killed before ingest came round
        with pytest.raises(Killed):
            from_parquet(data, path)
    result = from_parquet(data, path)
    assert result.stored_steps + result.there_steps == n_steps
    assert result.refused_steps == 0
    assert all(info.closed and not info.missing for info in sessions(data))
    for name, folder in (("whole", whole), ("D", data)):
        to_parquet(folder, tmp_path / f"{name}.parquet")
    assert (
        steps_in(tmp_path / "whole.parquet") == steps_in(tmp_path / "D.parquet") == steps_in(path)
    )
    assert verify(data).exit_code == 0


def test_a_narrower_export_keeps_its_gaps_and_is_not_mixed_with_a_fuller_one(
    tmp_path: Path,
) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC, n_sessions=1)
    table = pq.read_table(path)
    numbers = np.array(table.column("chunk_no").to_pylist())
    narrow = tmp_path / "narrow.parquet"
    pq.write_table(table.filter(pa.array((numbers == 1) | (numbers >= 3))), narrow)
    left_out = int(((numbers == 0) | (numbers == 2)).sum())
    data = DataFolder(tmp_path / "D")
    assert from_parquet(data, narrow).stored_steps == n_steps - left_out
    (info,) = sessions(data)
    assert (info.dropped_steps, info.missing, info.closed) == (left_out, (), True)
    assert verify(data).exit_code == 0
    assert {chunk.meta.chunk_no for chunk in stored(data)} == {1, 3, 4}
    with pytest.raises(ConfigError, match="narrower export"):
        from_parquet(data, path)
    assert from_parquet(data, narrow).there_steps == n_steps - left_out


def test_players_of_a_file_with_pseudonyms_stay_separate_and_can_be_erased(tmp_path: Path) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC)
    source = DataFolder(tmp_path / "source")
    to_parquet(source, tmp_path / "named.parquet", with_player=True)
    data = DataFolder(tmp_path / "D")
    from_parquet(data, tmp_path / "named.parquet")
    (player,) = {info.player for info in sessions(source)}
    name = f"imported-{player.hex()}"
    assert {info.player for info in sessions(data)} == {
        pseudonym(deployment_key(data.root), SPEC.game, name)
    }
    assert forget_player(data, name, game=None, timeout_s=60.0)["chunks"] == 15
    # Asked to, it comes back.
    assert from_parquet(data, path, player=ADA).stored_steps == n_steps


def test_an_unfinished_import_that_is_too_old_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC, n_sessions=1)
    data = DataFolder(tmp_path / "D")
    from_parquet(data, path)
    info = sessions(data)[0]
    later = time.time() + 30 * DAY_S
    # Finished ones are there for ever.
    assert from_parquet(data, path, clock=ManualClock(later)).there_steps == n_steps
    unfinished = SessionInfo(
        session=info.session,
        game=info.game,
        player=info.player,
        n_chunks=2,
        n_steps=3,
        high=2,
        missing=(),
        dropped_steps=0,
        closed=False,
        last_received_s=info.last_received_s,
    )
    plan = Plan(
        0, survey(ParquetFile(path))[random_part_of(info.session)], importing.UNKNOWN_PLAYER
    )
    with pytest.raises(ConfigError, match="too old to resume"):
        assign_session(plan, unfinished, info.player, now_s=later)
    with pytest.raises(ConfigError, match="another name"):
        assign_session(plan, unfinished, b"other" + bytes(11), now_s=time.time())
    assert assign_session(plan, unfinished, info.player, now_s=time.time()).session == info.session


def test_a_process_that_has_the_store_open_stores_an_import(tmp_path: Path) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC)
    data = DataFolder(tmp_path / "D")
    stop = threading.Event()
    data.root.mkdir()
    with IngestRole(data) as role:
        running = threading.Thread(target=role.run, args=(stop,))
        running.start()
        try:
            result = from_parquet(data, path)
            assert (result.stored_steps, result.by_running_ingest) == (n_steps, True)
            assert from_parquet(data, path).there_steps == n_steps
        finally:
            stop.set()
            running.join()


def test_a_session_that_is_still_played_is_not_closed_by_an_import_of_its_own_export(
    tmp_path: Path,
) -> None:
    path, n_steps = file_of_steps(tmp_path, SPEC, n_sessions=1, began_s=time.time() - 60)
    source = DataFolder(tmp_path / "source")
    (played,) = sessions(source)
    plan = Plan(0, survey(ParquetFile(path))[random_part_of(played.session)], ADA)
    assert assign_session(plan, played, played.player, now_s=time.time()).session is None
    assert from_parquet(source, path, player=ADA).there_steps == n_steps
    assert not sessions(source)[0].closed


def test_two_imports_at_once_take_turns(tmp_path: Path) -> None:
    path, _ = file_of_steps(tmp_path, SPEC)
    data = DataFolder(tmp_path / "D")
    with (
        FileLock(data.root / "import.lock", what="an import"),
        pytest.raises(Locked, match="in use"),
    ):
        from_parquet(data, path)


def test_sessions_of_equal_content_have_equal_random_parts() -> None:
    assert content_session_id("a", b"b") == content_session_id("a", b"b")
    assert content_session_id("a", b"b") != content_session_id("ab", b"")
    assert content_session_id("a").version == 7
    retimed = accepted_id(content_session_id("a"), time.time())
    assert random_part_of(retimed) == random_part_of(content_session_id("a"))
    assert uuid.UUID(str(retimed)).version == 7
