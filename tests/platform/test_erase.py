"""What `forget` erases besides the store, and that it names every place it could not erase."""

import json
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, Game, connect, local_link
from understudy.core.clock import SystemClock
from understudy.core.errors import Locked
from understudy.core.log import FileLock
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key, pseudonym
from understudy.platform.config import Config, StreamSection
from understudy.platform.erase import forget_in_remote_store, forget_player
from understudy.platform.ingest import IngestRole
from understudy.release.store_stats import StoreStats
from understudy.stores.local import LocalStore
from understudy.training.follower import StoreFollower

SPEC = game_spec("tag", obs=3, actions=["left", "right"])


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "D")


def game_of(data: DataFolder) -> Game:
    link = local_link(data.root, SPEC, SystemClock())
    config = ClientConfig(link=link, spool=data.spool)
    return connect(SPEC, consent="granted", config=config)


def play(game: Game, player: str, steps: int = 50) -> None:
    rng = np.random.default_rng(steps)
    episode = game.episode(player=player)
    for _ in range(steps):
        episode.acted(rng.normal(size=3).astype(np.float32), int(rng.integers(2)))
        episode.reward(1.0)
    episode.end(result="win")


def record(data: DataFolder, player: str) -> bytes:
    """Store steps of a player; returns the pseudonym."""
    with game_of(data) as game:
        play(game, player)
    with IngestRole(data) as role:
        role.service.drain()
    return pseudonym(deployment_key(data.root), SPEC.game, player)


def test_a_name_is_found_in_whichever_form_it_is_typed(data: DataFolder) -> None:
    name = "Zoë"
    record(data, unicodedata.normalize("NFD", name))
    answer = forget_player(data, unicodedata.normalize("NFC", name), game=None, timeout_s=5)
    assert (answer["chunks"], answer["is_finished"], answer["left"]) == (1, True, {})


def test_a_player_of_a_game_whose_spec_was_deleted_is_found(data: DataFolder) -> None:
    record(data, "ada")
    shutil.rmtree(data.root / "models" / "games")
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert (answer["chunks"], answer["games"], answer["is_finished"]) == (1, [SPEC.game], True)


def test_nothing_stays_in_the_stream_of_a_process_that_is_still_connected(data: DataFolder) -> None:
    with game_of(data) as game:
        play(game, "ada")
        assert game.flush(timeout_s=30.0)
        ada = pseudonym(deployment_key(data.root), SPEC.game, "ada")
        assert any(ada in path.read_bytes() for path in data.stream.glob("*/*.log"))
        answer = forget_player(data, "ada", game=None, timeout_s=5)
        assert (answer["chunks"], set(answer["left"])) == (1, {"spool"})
        assert not any(ada in path.read_bytes() for path in data.stream.glob("*/*.log"))
        # The same session is rejected and another player is stored.
        play(game, "bob")
    with IngestRole(data) as role:
        role.service.drain()
        assert role.store.audit().chunks == 1
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert (answer["left"], answer["is_finished"]) == ({}, True)


def test_a_request_that_times_out_may_still_be_carried_out_and_says_so(data: DataFolder) -> None:
    record(data, "ada")
    with LocalStore(data.store) as store:
        with pytest.raises(Locked, match=r"it may still carry it out; to check, run this command"):
            forget_player(data, "ada", game=None, timeout_s=0.05)
        store.forget(pseudonym(deployment_key(data.root), SPEC.game, "ada"))
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert (answer["chunks"], len(answer["earlier"][SPEC.game])) == (0, 1)


def test_spooled_sessions_of_a_running_game_are_named(data: DataFolder) -> None:
    record(data, "ada")
    with game_of(data) as game:
        play(game, "ada")
        assert game.flush(timeout_s=30.0)
        answer = forget_player(data, "ada", game=None, timeout_s=5)
        assert not answer["is_finished"]
        assert "its game is running; end the game" in answer["left"]["spool"]


def test_the_copy_of_a_killed_backup_is_deleted_and_a_running_backup_is_named(
    data: DataFolder,
) -> None:
    record(data, "ada")
    copy = data.root / "snapshots" / "0123456789abcdef"
    with LocalStore(data.store) as store:
        store.back_up(copy)
    with FileLock(data.root / "snapshots" / ".lock", what="a backup"):
        answer = forget_player(data, "ada", game=None, timeout_s=5)
        assert set(answer["left"]) == {"snapshots"}
        assert copy.exists()
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert (answer["left"], answer["is_finished"]) == ({}, True)
    assert not copy.exists()


def test_the_learners_copy_of_a_remote_store_is_erased_unless_the_learner_does_it(
    data: DataFolder, tmp_path: Path
) -> None:
    ada = record(data, "ada")
    window = data.root / "window"
    with LocalStore(data.store) as store:
        store.back_up(window)
    with LocalStore(window), LocalStore(data.store) as store:
        answer = forget_in_remote_store(data, store, "ada", registered=[SPEC.game], game=None)
        assert set(answer["left"]) == {"store", "stream", "window"}
    database = window / "experience.sqlite"
    assert ada in database.read_bytes()
    with LocalStore(data.store) as store:
        answer = forget_in_remote_store(
            data, store, "ada", registered=[SPEC.game], game=None, stream="kinesis://games"
        )
    assert (set(answer["left"]), answer["is_finished"]) == ({"store", "stream"}, False)
    assert "until its retention ends" in answer["left"]["stream"]
    assert ada not in database.read_bytes()


def test_a_damaged_copy_of_a_remote_store_does_not_prevent_the_erasure(data: DataFolder) -> None:
    ada = record(data, "ada")
    window = data.root / "window"
    with LocalStore(data.store) as store:
        store.back_up(window)
        (window / "experience.sqlite").write_bytes(b"damaged" * 1000)
        answer = forget_in_remote_store(data, store, "ada", registered=[SPEC.game], game=None)
    assert answer["chunks"] > 0
    assert answer["earlier"] == {}
    assert f"delete {window}" in answer["left"]["window"]
    assert ada not in (data.store / "experience.sqlite").read_bytes()


def test_a_remote_stream_and_checkpoints_that_name_the_player_are_named(data: DataFolder) -> None:
    ada = record(data, "ada")
    checkpoint = data.root / "learner" / "tag" / "dqn-1" / "000000000001.safetensors"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text(ada.hex())
    config = Config(stream=StreamSection(url="kafka://broker:9092/games"))
    answer = forget_player(data, "ada", game=None, timeout_s=5, config=config)
    assert answer["chunks"] == 1
    assert set(answer["left"]) == {"stream", "learner"}
    assert str(checkpoint) in answer["left"]["learner"]
    assert not answer["is_finished"]


def test_checkpoints_of_another_store_are_deleted_if_they_name_the_player(data: DataFolder) -> None:
    ada = record(data, "ada")
    aside = data.root / "learner-0123" / "tag" / "dqn-1"
    aside.mkdir(parents=True)
    for number, text in enumerate((ada.hex(), "another player")):
        (aside / f"{number:012d}.safetensors").write_text(text)
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert (answer["left"], answer["is_finished"]) == ({}, True)
    assert [path.name for path in aside.iterdir()] == ["000000000001.safetensors"]


def test_returns_in_the_learners_statistics_are_named(data: DataFolder) -> None:
    ada = record(data, "ada")
    statistics = data.root / "learner" / "store_stats.json"
    statistics.parent.mkdir()
    stats = StoreStats(StoreFollower(data.store))
    while stats.follow():
        pass
    statistics.write_text(json.dumps(stats.state()))
    answer = forget_player(data, "ada", game=None, timeout_s=5)
    assert set(answer["left"]) == {"learner"}
    assert "has returns of the player's episodes" in answer["left"]["learner"]
    while stats.follow():
        pass
    statistics.write_text(json.dumps(stats.state()))
    stats.close()
    assert ada.hex() not in statistics.read_text()
    assert forget_player(data, "ada", game=None, timeout_s=5)["is_finished"]
