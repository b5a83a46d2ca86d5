"""Every file of a data folder removed, aged, cut and flipped in turn, and files of others in it.

Afterwards the same steps are readable, or an error says what to do; nothing else is deleted.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.card import Card
from tests.faults import sabotage
from tests.faults.recording import cart, playing
from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, connect, local_link
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, Corrupt, UnderstudyError
from understudy.experience.frame import FrameKind
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.platform.backup import back_up, restore
from understudy.platform.config import Config, example, resolve, save_last_start
from understudy.platform.erase import forget_player
from understudy.platform.ingest import IngestRole
from understudy.platform.requests import remove_stale_answers
from understudy.ports import Ack, Stored
from understudy.simulation.verify import tail_items, verify
from understudy.stores.database import FILE_NAME
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView, read_head

ADVICE = ("restore", "delete", "remove", "move", "correct", "put the newest")
STRAYS = (".DS_Store", "old.log", "desktop (1).ini")
KEY = "key"
"""The deployment's key: tests of keys flip it."""

Digests = dict[tuple[str, int], str]


class Away:
    """A platform that answers nothing: recorded frames stay in the spool."""

    recording_rate = 1.0

    def send(self, frames: object, players: object, *, skipped_steps: int = 0) -> list[Ack]:
        raise TimeoutError("away")

    def register(self, spec: object) -> None: ...
    def close(self) -> None: ...

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> None:
        return None


@pytest.fixture(scope="module")
def folders(seed: int) -> Iterator[tuple[Path, Path]]:
    """A real data folder, and a copy of it from an earlier time.

    It holds stored frames, frames that only the stream has, and frames that only the spool has.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield recorded(Path(folder), seed)


def recorded(root: Path, seed: int) -> tuple[Path, Path]:
    data = DataFolder(root / "data")
    rng = np.random.default_rng(seed)
    for stage in ("older", "newer"):
        with IngestRole(data) as role, playing(data, ["ada", "bob"], rng) as table:
            for _ in range(4):
                table.play()
                role.service.drain()
        (data.root / "understudy.toml").write_text(example())
        save_last_start(Config(data=str(data.root)))
        if stage == "older":
            shutil.copytree(data.root, root / "older")
    with playing(data, ["eve"], rng) as table:
        for _ in range(4):
            table.play()
    config = ClientConfig(link=Away(), background=False, spool=data.spool)  # type: ignore[arg-type]
    game = connect(cart(), consent="granted", config=config)
    episode = game.episode(player="zoe")
    for _ in range(20):
        episode.acted([0.0, 0.0, 0.0, 0.0], 1)
    game.close()
    assert list(data.spool.glob("*/*/*.log"))
    return data.root, root / "older"


@pytest.fixture
def copy(folders: tuple[Path, Path], quick_path: Path) -> DataFolder:
    shutil.copytree(folders[0], quick_path / "data")
    return DataFolder(quick_path / "data")


def steps_of(data: DataFolder) -> Digests:
    """The stored steps, without drop reports and closes: a repeated one changes no step."""
    with StoreView(data.store) as view:
        return {
            (str(item.frame.session), item.frame.chunk_no): item.frame.body.hex()
            for item in tail_items(lambda cursor: view.tail(cursor, max_items=512, wait_s=0.0))
            if isinstance(item, Stored) and item.frame.kind is FrameKind.DATA
        }


def outcome(data: DataFolder) -> Digests | str:
    """The stored steps after `verify`, or what it complained of."""
    try:
        found = verify(data, config=resolve({"data": str(data.root)}, environ={}).config)
        if found.exit_code == 1:
            # The command names a backup as the next step after every loss.
            return "; ".join(found.corrupt) or f"lost {found.lost_steps}: restore a backup"
        if found.unreadable_spools:
            return f"restore spool.json in {found.unreadable_spools}"
        return steps_of(data)
    except UnderstudyError as error:
        return str(error)


def remove(path: Path, older: Path | None) -> None:
    path.unlink()


def age(path: Path, older: Path | None) -> None:
    assert older is not None
    shutil.copyfile(older, path)


def cut(path: Path, older: Path | None) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, older: Path | None) -> None:
    sabotage.flip(path, path.stat().st_size // 2)


def cases(root: Path, older: Path) -> Iterator[tuple[Path, Callable[[Path, Path | None], None]]]:
    """Each file of a data folder with each way to damage it."""
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root)
        if name.parts[0] == "spool" and name.suffix == ".log":
            continue  # frames that were never acknowledged: their game reports them as dropped
        yield name, remove
        if path.stat().st_size and name.name != "reserve":
            yield name, cut
        if path.stat().st_size and name.name != "reserve" and str(name) != KEY:
            yield name, flip
        if (older / name).exists() and (older / name).read_bytes() != path.read_bytes():
            yield name, age


def test_each_file_removed_aged_cut_or_flipped_costs_no_step_or_is_named(
    folders: tuple[Path, Path], quick_path: Path, card: Card
) -> None:
    root, older = folders
    whole = outcome(DataFolder(shutil.copytree(root, quick_path / "whole")))
    assert isinstance(whole, dict)
    assert len({session for session, _ in whole}) == 6
    held = dict.fromkeys(("remove", "age", "cut", "flip"), 0)
    tried = dict(held)
    for name, damage in cases(root, older):
        data = DataFolder(shutil.copytree(root, quick_path / "data"))
        damage(data.root / name, older / name)
        kept = {path for path in data.root.rglob("*") if path.is_file() and is_kept(path, data)}
        found = outcome(data)
        what = f"{damage.__name__} {name}: {found if isinstance(found, str) else 'other steps'}"
        tried[damage.__name__] += 1
        is_told = isinstance(found, str) and any(word in found for word in ADVICE)
        held[damage.__name__] += found == whole or is_told
        assert found == whole or is_told, what
        gone = [path for path in kept if not path.exists() and not set_aside(path)]
        assert gone == [], f"{what}; and it removed {gone}"
        shutil.rmtree(data.root)
    note = ", ".join(f"{kind} {count}" for kind, count in tried.items())
    card.line(
        "files of a data folder removed, aged, cut or flipped",
        tried=sum(tried.values()),
        held=sum(held.values()),
        note=note,
    )


def is_kept(path: Path, data: DataFolder) -> bool:
    """Whether no recovery may remove a file: all but what the spool has sent, and SQLite's own."""
    return data.spool not in path.parents and not path.name.endswith(("-wal", "-shm", ".lock"))


def set_aside(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.stem}.damaged-*"))


# --- Files of other programs ----------------------------------------------------------------------


def scatter(root: Path) -> list[Path]:
    """Put stray files into every folder."""
    everywhere = [folder for folder in [root, *root.rglob("*")] if folder.is_dir()]
    strays = [folder / name for folder in everywhere for name in STRAYS]
    for path in strays:
        path.write_bytes(b"Bud1")
    for folder in ("requests", "snapshots"):
        (root / folder / "Holiday pictures").mkdir(parents=True)
        strays.append(root / folder / "Holiday pictures" / "beach.jpg")
        strays[-1].write_bytes(b"sand")
    return strays


def test_files_of_other_programs_stop_nothing_and_stay(
    copy: DataFolder, quick_path: Path, card: Card
) -> None:
    whole = outcome(DataFolder(shutil.copytree(copy.root, quick_path / "whole")))
    strays = [path for path in scatter(copy.root) if copy.spool not in path.parents]
    assert outcome(copy) == whole
    with IngestRole(copy) as role:
        role.trim(0.0)
        remove_stale_answers(copy.requests, older_than_s=-1.0)
        role.step()
    assert forget_player(copy, "ada", game=None, timeout_s=5.0)["chunks"] == 8
    assert isinstance(whole, dict)
    assert back_up(copy, quick_path / "backup").chunks == len(whole) - 8
    restore(quick_path / "backup", DataFolder(quick_path / "again"))
    registry = Registry(FolderObjects(copy.root / "models"), trusted={})
    assert (registry.games(), registry.specs("cart")) == (["cart"], [cart()])
    assert copy.game_names() == ["cart"]
    assert [path for path in strays if not path.exists()] == []
    card.line("files of other programs in every folder", tried=len(strays), held=len(strays))


# --- Older copies of the database -----------------------------------------------------------------


def test_an_older_database_is_completed_from_the_stream(
    folders: tuple[Path, Path], copy: DataFolder
) -> None:
    shutil.copyfile(folders[1] / "store" / FILE_NAME, copy.store / FILE_NAME)
    with IngestRole(copy) as role:
        role.service.drain()
    whole = DataFolder(folders[0])
    assert steps_of(whole).items() <= steps_of(copy).items()


@pytest.mark.parametrize("change", ["trimmed", "forgotten"])
def test_an_older_database_that_the_stream_cannot_complete_is_rejected(
    folders: tuple[Path, Path], copy: DataFolder, change: str
) -> None:
    with IngestRole(copy) as role:
        role.service.drain()
        if change == "trimmed":
            assert role.trim(-1.0) > 0
        else:
            role.store.forget(bytes(16))
    newest = (copy.store / FILE_NAME).read_bytes()
    shutil.copyfile(folders[1] / "store" / FILE_NAME, copy.store / FILE_NAME)
    for opening in (LocalStore, StoreView):
        with pytest.raises(Corrupt, match=r"is an older copy: it ends at .* put the newest"):
            opening(copy.store)
    (copy.store / FILE_NAME).write_bytes(newest)
    LocalStore(copy.store).close()
    shutil.copyfile(folders[1] / "store" / FILE_NAME, copy.store / FILE_NAME)
    (copy.store / "store.json").unlink()
    LocalStore(copy.store).close()


def test_a_lost_database_is_created_again_from_the_stream_once_the_rest_is_moved_away(
    copy: DataFolder,
) -> None:
    whole = steps_of(copy)
    (copy.store / FILE_NAME).unlink()
    with pytest.raises(Corrupt, match="move the store's folder away"):
        LocalStore(copy.store)
    copy.store.rename(copy.root / "store.away")
    with IngestRole(copy) as role:
        role.service.drain()
    assert whole.items() <= steps_of(copy).items()


def test_a_folder_that_does_not_fit_together_is_rejected_and_left_as_it_is(
    copy: DataFolder,
) -> None:
    with sabotage.database(copy) as db:
        head = read_head(db)
        sabotage.put(db, "head", 1, *head._replace(next_arrival=2))
    before = (copy.store / FILE_NAME).read_bytes()
    with pytest.raises(Corrupt, match="are inconsistent"):
        LocalStore(copy.store)
    assert (copy.store / FILE_NAME).read_bytes() == before


# --- Specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [remove, flip])
def test_a_lost_spec_is_written_again_from_the_store_or_by_the_next_game(
    copy: DataFolder, damage: Callable[[Path, Path | None], None]
) -> None:
    (path,) = copy.games.glob("*/*.json")
    whole = path.read_bytes()
    damage(path, None)
    with IngestRole(copy) as role:
        role.service.drain()
        assert role.store.quarantined() == []
    assert path.read_bytes() == whole
    damage(path, None)
    link = local_link(copy.root, cart(), SystemClock())
    link.register(cart())
    link.close()
    assert path.read_bytes() == whole
    if damage is flip:
        assert len(set_aside(path)) == 1


def test_a_damaged_key_file_is_rejected(copy: DataFolder) -> None:
    cut(copy.root / "key", None)
    with pytest.raises(ConfigError, match="restore it from a backup"):
        local_link(copy.root, cart(), SystemClock())
