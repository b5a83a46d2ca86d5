"""`data verify` on a damaged folder exits 1; without a ledger 2; on an intact folder 0."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.card import Card
from tests.faults import sabotage
from tests.faults.processes import understudy, understudy_here
from tests.faults.profiles import sizes
from tests.faults.recording import playing
from understudy.backends.data import DataFolder
from understudy.platform.ingest import IngestRole

SABOTAGES: list[Callable[[DataFolder], None]] = [
    sabotage.delete_a_chunk,
    sabotage.delete_a_chunk_and_close_up,
    sabotage.delete_the_end,
    sabotage.store_a_chunk_twice,
    sabotage.take_a_chunk_for_another,
    sabotage.drop_the_bytes_of_a_chunk,
    sabotage.change_a_session,
    sabotage.change_a_position,
    sabotage.remove_the_database,
    sabotage.empty_the_database,
    sabotage.cut_the_database,
    sabotage.flip_in_a_body,
    sabotage.flip_in_a_session_id,
    sabotage.flip_in_the_header,
    sabotage.flip_in_store_json,
    sabotage.promise_what_was_never_stored,
    sabotage.promise_other_bytes,
    sabotage.remove_store_and_stream,
    sabotage.cut_stream_before_it_is_stored,
    sabotage.flip_in_stream_before_it_is_stored,
    sabotage.flip_in_the_streams_last_entry,
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A folder with stored frames and frames that only the stream has."""
    data = DataFolder(tmp_path_factory.mktemp("recorded") / "data")
    rng = np.random.default_rng(seed)
    with IngestRole(data) as role:
        for _ in range(2):
            with playing(data, ["ada", "bob"], rng) as table:
                for _ in range(8):
                    table.play()
                    role.service.drain()
            role.service.drain()
    with playing(data, ["eve"], rng) as table:
        for _ in range(8):
            table.play()
    return data.root


@pytest.fixture
def data(recorded: Path, tmp_path: Path) -> DataFolder:
    shutil.copytree(recorded, tmp_path / "data")
    return DataFolder(tmp_path / "data")


def test_an_undamaged_folder_exits_0(data: DataFolder) -> None:
    answer = understudy("data", "verify", "--data", data.root)
    assert answer.code == 0, answer
    assert answer.fields["ok"]
    assert answer.fields["ledger_steps"] == answer.fields["steps"] == 320


def test_without_a_ledger_it_exits_2_and_still_audits(data: DataFolder) -> None:
    shutil.rmtree(data.ledger)
    answer = understudy_here("data", "verify", "--data", data.root)
    assert answer.code == 2, answer
    assert answer.fields["steps"] == 320
    assert answer.fields["ledger_chunks"] == 0


def test_without_a_ledger_damage_still_exits_1(data: DataFolder) -> None:
    shutil.rmtree(data.ledger)
    sabotage.flip_in_a_body(data)
    assert understudy_here("data", "verify", "--data", data.root).code == 1


@pytest.mark.parametrize("damage", SABOTAGES, ids=lambda damage: damage.__name__)
def test_damage_exits_1(data: DataFolder, damage: Callable[[DataFolder], None], card: Card) -> None:
    damage(data)
    answer = understudy_here("data", "verify", "--data", data.root)
    card.line("verify sabotaged", tried=1, held=int(answer.code == 1), note=damage.__name__)
    assert answer.code == 1, answer
    assert not answer.fields["ok"]


@sizes("flips", short=6, full=100)
def test_a_flipped_byte_anywhere_is_caught_or_changes_nothing(
    recorded: Path, tmp_path: Path, flips: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    fine = understudy_here(
        "data", "verify", "--data", shutil.copytree(recorded, tmp_path / "fine")
    ).fields
    caught = harmless = 0
    for number in range(flips):
        data = DataFolder(Path(shutil.copytree(recorded, tmp_path / str(number))))
        files = [path for path in data.store.rglob("*") if path.is_file() and path.stat().st_size]
        path = rng.choice(files)
        at = rng.randrange(path.stat().st_size)
        sabotage.flip(path, at)
        answer = understudy_here("data", "verify", "--data", data.root)
        if answer.code == 1 and answer.fields:
            caught += 1
        else:
            assert (answer.code, answer.fields) == (0, fine), (
                f"byte {at} of {path.relative_to(data.root)}: {answer}"
            )
            harmless += 1
        shutil.rmtree(data.root)
    card.line(
        "bytes flipped at random in a store",
        tried=flips,
        held=caught + harmless,
        note=f"{caught} caught",
    )
