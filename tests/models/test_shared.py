"""Journals: each entry vouches for those before it; none can be cut, replaced or skipped unseen."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.processes import FORKED
from tests.models.small_s3 import SmallS3, small_s3
from tests.models.test_registry import LINEAGE, SIGNER, TRUSTED, policy
from understudy.core.errors import Corrupt, Fenced, Refused, StorageFailed
from understudy.core.signed import Signer
from understudy.models.keys import Keys
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.models.shared import Journal
from understudy.ports import Objects
from understudy.testing.clock import ManualClock


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
}


class Machine:
    """A deployment's keys and models as one machine opens them; the journals are shared."""

    def __init__(self, folder: Path, name: str, clock: ManualClock, objects: Objects) -> None:
        self.memory = folder / name
        self._clock = clock
        self._objects = objects

    def keys(self) -> Keys:
        memory = FolderObjects(self.memory)
        return Keys(self._objects, trusted=TRUSTED, signer=SIGNER, clock=self._clock, memory=memory)

    def registry(self) -> Registry:
        memory = FolderObjects(self.memory)
        return Registry(
            self._objects, trusted=TRUSTED, signer=SIGNER, clock=self._clock, memory=memory
        )

    def remembers(self, journal: str) -> int:
        """The number of the newest entry that the machine remembers."""
        (path,) = (self.memory / journal).iterdir()
        return int(path.name.split("-")[1])


class Deployment:
    """Journals in a folder, and any number of machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.models = folder / "models"
        self.clock = ManualClock()

    def machine(self, name: str) -> Machine:
        return Machine(self._folder, name, self.clock, FolderObjects(self.models))

    def entry(self, journal: str, number: int) -> Path:
        return self.models / journal / f"{number:010d}.json"


@pytest.fixture
def made(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def reason(keys: Keys, text: str) -> str:
    with pytest.raises(Refused) as refused:
        keys.check(text)
    return refused.value.reason


# --- The chain ------------------------------------------------------------------------------------


def test_each_entry_names_the_hash_of_the_one_before(made: Deployment):
    keys = made.machine("a").keys()
    for _ in range(3):
        keys.create(["play"])
    before = ""
    for number in (1, 2, 3):
        raw = made.entry("keys", number).read_bytes()
        assert json.loads(raw)["entry"]["before"] == before
        before = hashlib.sha256(raw).hexdigest()


def test_an_old_signed_entry_in_the_place_of_another_is_reported(made: Deployment, tmp_path: Path):
    """The signer wrote both, with one number: only the hash in the next entry tells them apart."""
    keys = made.machine("a").keys()
    keys.create(["play"])
    shutil.copytree(made.models, tmp_path / "copy")
    keys.create(["read"])
    keys.create(["work"])
    other = Deployment(tmp_path / "b")
    shutil.copytree(tmp_path / "copy", other.models)
    other.machine("b").keys().create(["admin"])
    shutil.copy(other.entry("keys", 2), made.entry("keys", 2))
    assert "entry 2: it is not the one that entry 3 follows" in made.machine("new").keys().damage()


# --- One damaged entry costs that entry -----------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_entry_of_a_game_that_is_damaged_costs_only_itself(tmp_path: Path, damage: str):
    whole = Deployment(tmp_path / "whole")
    ours = whole.machine("a").registry()
    epoch = ours.takeover("pong", owner="a")
    for seed in range(2):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
        ours.set_alias("pong", "champion", seed + 1, why="test")
    newer = ours.takeover("pong", owner="b")
    ours.release(policy(2), LINEAGE, epoch=newer)
    ours.set_alias("pong", "canary", 3, why="test")
    expected = {
        1: ([1, 2, 3], 2, 3),  # the takeover
        2: ([2, 3], 2, 3),  # model 1, and with it the alias that pointed to it
        3: ([1, 2, 3], 2, 3),
        4: ([1, 3], 1, 3),
        5: ([1, 2, 3], 1, 3),
        6: ([1, 2, 3], 2, 3),
        7: ([1, 2], 2, 0),
    }
    for number, seen in expected.items():
        made = Deployment(tmp_path / str(number))
        shutil.copytree(whole.models, made.models)
        DAMAGE[damage](made.entry("registry/pong", number))
        fresh = made.machine("new").registry()
        now = fresh.catalogue("pong")
        assert (sorted(now.models), now.model_of("champion"), now.model_of("canary")) == seen
        assert f"entry {number}: " in fresh.damage("pong")["journal"] or number in (2, 4, 7)
        with pytest.raises(Fenced):
            fresh.release(policy(9), LINEAGE, epoch=epoch)
        latest = fresh.takeover("pong", owner="c")
        assert latest > newer
        assert fresh.release(policy(9), LINEAGE, epoch=latest).model_no > 3
        assert fresh.catalogue("pong").models.keys() >= set(seen[0])


@pytest.mark.parametrize("damage", ["flipped", "empty"])
def test_the_number_of_a_model_whose_entry_is_damaged_is_not_used_again(
    made: Deployment, damage: str
):
    ours = made.machine("a").registry()
    epoch = ours.takeover("pong", owner="a")
    for seed in range(2):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    DAMAGE[damage](made.entry("registry/pong", 3))
    for machine in ("a", "new"):
        fresh = made.machine(machine).registry()
        assert sorted(fresh.catalogue("pong").models) == [1]
        assert "journal" in fresh.damage("pong")
    number = fresh.release(policy(3), LINEAGE, epoch=epoch).model_no
    assert number == 3
    # A learner that still runs knows the entry that is damaged now, and agrees.
    assert sorted(ours.catalogue("pong").models) == [1, 2, 3]


def test_a_restored_entry_counts_again_without_a_restart_of_the_process(made: Deployment):
    made.machine("a").registry().takeover("pong", owner="a")
    path = made.entry("registry/pong", 1)
    raw = path.read_bytes()
    flip(path)
    fresh = made.machine("new").registry()
    assert fresh.catalogue("pong").epoch == 0
    path.write_bytes(raw)
    assert (fresh.catalogue("pong").epoch, fresh.damage("pong")) == (1, {})


def test_a_stray_file_with_a_high_number_is_named(made: Deployment):
    made.machine("a").registry().takeover("pong", owner="a")
    shutil.copy(made.entry("registry/pong", 1), made.entry("registry/pong", 9_999_999_999))
    (made.models / "registry" / "pong" / "notes.txt").write_text("x")
    damage = made.machine("new").registry().damage("pong")["journal"]
    assert "9999999999.json exists" in damage


# --- A revoked key stays revoked ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "damage"),
    # A machine that never read an entry cannot know that it is missing.
    [("a", "flipped"), ("a", "empty"), ("a", "missing"), ("new", "flipped"), ("new", "empty")],
)
def test_a_damaged_last_revocation_brings_no_key_back(made: Deployment, machine: str, damage: str):
    keys = made.machine("a").keys()
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    raw = made.entry("keys", 2).read_bytes()
    DAMAGE[damage](made.entry("keys", 2))
    opened = made.machine(machine).keys()
    with pytest.raises(Corrupt, match="understudy keys repair"):
        opened.follow()
    assert reason(opened, admin) == "keys_damaged"
    assert not opened.allows_origin("https://game.example")
    assert "understudy keys repair" in opened.damage()
    for write in (lambda: opened.create(["play"]), lambda: opened.revoke(key.id)):
        with pytest.raises(Corrupt, match="understudy keys repair"):
            write()
    # Restoring the entry is one way out.
    made.entry("keys", 2).write_bytes(raw)
    opened.follow()
    assert reason(opened, admin) == "revoked_key"
    assert opened.damage() == ""


def test_a_missing_revocation_before_a_damaged_entry_brings_no_key_back(made: Deployment):
    """A missing entry shows only in a listing, and not every read lists the journal."""
    keys = made.machine("a").keys()
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    keys.create(["play"])
    made.entry("keys", 2).unlink()
    flip(made.entry("keys", 3))
    opened = made.machine("new").keys()
    for _ in range(10):
        with pytest.raises(Corrupt, match="understudy keys repair"):
            opened.follow()
        assert reason(opened, admin) == "keys_damaged"
        assert "understudy keys repair" in opened.damage()
        made.clock.advance(7.0)
    assert opened.repair(revoke=True)
    opened.follow()
    assert reason(opened, admin) == "revoked_key"
    assert opened.damage() == ""


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_key_is_revoked_or_kept_by_a_repair(made: Deployment, damage: str):
    keys = made.machine("a").keys()
    play, _ = keys.create(["play"])
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    DAMAGE[damage](made.entry("keys", 3))
    fresh = made.machine("a").keys()
    assert fresh.repair(revoke=True)
    assert not fresh.repair(revoke=True)
    new, _ = fresh.create(["play"])
    for opened in (fresh, keys, made.machine("b").keys(), made.machine("a").keys()):
        opened.follow()
        assert [reason(opened, text) for text in (play, admin)] == ["revoked_key"] * 2
        opened.check(new)
    DAMAGE[damage](made.entry("keys", len(list((made.models / "keys").iterdir()))))
    kept = made.machine("a").keys()
    assert kept.repair(revoke=False)
    kept.follow()
    assert reason(kept, admin) == "revoked_key", "each entry repeats the revocations before it"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_revocation_before_other_entries_brings_no_key_back(
    made: Deployment, damage: str
):
    keys = made.machine("a").keys()
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    play, _ = keys.create(["play"])
    DAMAGE[damage](made.entry("keys", 2))
    for machine in ("a", "new"):
        opened = made.machine(machine).keys()
        opened.follow()
        opened.check(play)
        assert reason(opened, admin) == "revoked_key"
        assert "entry 2: " in opened.damage()


def test_very_many_damaged_entries_in_a_row_close_the_keys(made: Deployment):
    keys = made.machine("a").keys()
    texts = [keys.create(["play"]) for _ in range(33)]
    for _, key in texts:
        keys.revoke(key.id)
    keys.create(["read"])
    for number in range(35, 67):
        made.entry("keys", number).write_bytes(b"")
    opened = made.machine("new").keys()
    opened.follow()
    assert all(reason(opened, text) == "revoked_key" for text, _ in texts)
    made.entry("keys", 34).write_bytes(b"")
    opened = made.machine("new").keys()
    with pytest.raises(Corrupt, match="no key is accepted"):
        opened.follow()
    assert opened.repair(revoke=False)
    opened.follow()
    assert reason(opened, texts[-1][0]) == "revoked_key"


def test_a_running_gateway_keeps_what_it_read_before_an_entry_was_damaged(made: Deployment):
    keys = made.machine("a").keys()
    play, _ = keys.create(["play"])
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    keys.follow()
    flip(made.entry("keys", 3))
    keys.follow()
    keys.check(play)
    assert reason(keys, admin) == "revoked_key"
    keys.create(["read"])
    fresh = made.machine("new").keys()
    fresh.follow()
    assert reason(fresh, admin) == "revoked_key", "the next entry repeats the revocation"


# --- What was read before -------------------------------------------------------------------------


def test_a_journal_that_was_cut_is_closed_until_it_is_restored_or_accepted(made: Deployment):
    running = made.machine("a").registry()
    epoch = running.takeover("pong", owner="a")
    for seed in range(2):
        running.release(policy(seed), LINEAGE, epoch=epoch)
    assert made.machine("b").registry().catalogue("pong").number == 3
    cut = [made.entry("registry/pong", number) for number in (2, 3)]
    raws = [path.read_bytes() for path in cut]
    for path in cut:
        path.unlink()
    for registry in (running, made.machine("a").registry(), made.machine("b").registry()):
        with pytest.raises(Corrupt, match="ends at entry 1, but this machine has read entry 3"):
            registry.catalogue("pong")
        with pytest.raises(Corrupt, match="understudy models repair pong"):
            registry.release(policy(2), LINEAGE, epoch=epoch)
        assert "understudy models repair pong" in registry.damage("pong")["journal"]
    for path, raw in zip(cut, raws, strict=True):
        path.write_bytes(raw)
    assert sorted(running.catalogue("pong").models) == [1, 2]
    assert not running.repair("pong")
    for path in cut:
        path.unlink()
    repaired = made.machine("b").registry()
    assert repaired.repair("pong")
    number = repaired.release(policy(5), LINEAGE, epoch=epoch).model_no
    assert number > 2, "the numbers of the lost models are not used again"
    assert repaired.catalogue("pong").number > 3, "clients ignore numbers below those they know"
    for registry in (running, made.machine("a").registry(), made.machine("new").registry()):
        assert registry.damage("pong") == {}
        assert registry.policy("pong", number) == policy(5)


def test_entries_that_another_machine_wrote_after_a_cut_are_not_taken_for_the_old_ones(
    made: Deployment,
):
    running = made.machine("a").keys()
    admin, key = running.create(["admin"])
    running.revoke(key.id)
    running.follow()
    made.entry("keys", 2).unlink()
    # A machine without a memory cannot see the cut, and writes in the place of the revocation.
    new = made.machine("new").keys()
    for _ in range(3):
        new.create(["play"])
    new.follow()
    new.check(admin)
    for keys in (running, made.machine("a").keys()):
        with pytest.raises(Corrupt, match="has an entry 2 that differs from the one this machine"):
            keys.follow()
        assert reason(keys, admin) == "keys_damaged"
    assert made.machine("a").keys().repair(revoke=True)
    for keys in (running, new):
        keys.follow()
        assert reason(keys, admin) == "revoked_key"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_does_not_hide_that_the_newest_entry_read_was_replaced(
    made: Deployment, damage: str, tmp_path: Path
):
    keys = made.machine("a").keys()
    admin, key = keys.create(["admin"])
    keys.revoke(key.id)
    keys.follow()
    shutil.copytree(made.models, tmp_path / "whole")
    made.entry("keys", 2).unlink()
    for _ in range(2):
        made.machine("new").keys().create(["play"])
    DAMAGE[damage](made.entry("keys", 2))
    opened = made.machine("a").keys()
    for _ in range(3):
        with pytest.raises(Corrupt, match="has an entry 2 that differs from the one this machine"):
            opened.follow()
        assert reason(opened, admin) == "keys_damaged"
        made.clock.advance(31.0)
    assert made.machine("a").remembers("keys") == 2
    shutil.rmtree(made.models)
    shutil.copytree(tmp_path / "whole", made.models)
    made.clock.advance(31.0)
    opened.follow()
    assert reason(opened, admin) == "revoked_key"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_newest_entry_read_costs_only_that_entry(made: Deployment, damage: str):
    remembering = made.machine("a").keys()
    text, _ = remembering.create(["play"])
    lost, _ = remembering.create(["read"])
    remembering.follow()
    later, _ = made.machine("b").keys().create(["work"])
    DAMAGE[damage](made.entry("keys", 2))
    opened = made.machine("a").keys()
    opened.follow()
    assert opened.check(text).scopes == ("play",)
    assert opened.check(later).scopes == ("work",)
    assert reason(opened, lost) == "wrong_key"
    assert opened.damage().startswith("1 invalid entry, ignored")
    assert made.machine("a").remembers("keys") == 3


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_newest_entry_read_and_the_next_one_leaves_a_doubt(
    made: Deployment, damage: str
):
    made.machine("a").keys().create(["play"])
    admin, key = made.machine("a").keys().create(["admin"])
    made.machine("a").keys().follow()
    other = made.machine("b").keys()
    other.revoke(key.id)
    other.create(["play"])
    for number in (2, 3):
        DAMAGE[damage](made.entry("keys", number))
    opened = made.machine("a").keys()
    with pytest.raises(Corrupt, match="has unreadable entries from 2 to 3, and this machine has"):
        opened.follow()
    assert reason(opened, admin) == "keys_damaged"
    assert opened.repair(revoke=False)
    opened.follow()
    assert opened.damage() == ""


def test_damage_after_a_repair_is_reported_also_that_of_the_repair_itself(made: Deployment):
    keys = made.machine("a").keys()
    keys.create(["play"])
    keys.create(["play"])
    flip(made.entry("keys", 1))
    keys = made.machine("b").keys()
    assert keys.repair(revoke=False)
    for _ in range(3):
        keys.create(["play"])
    assert made.machine("new").keys().damage() == ""
    flip(made.entry("keys", 4))
    assert made.machine("new").keys().damage().startswith("1 invalid entry, ignored")
    flip(made.entry("keys", 3))
    assert made.machine("new").keys().damage().startswith("3 invalid entries, ignored")


@pytest.mark.parametrize("damage", ["flipped", "empty"])
def test_a_game_continues_behind_a_damaged_entry_that_its_writer_could_not_read_either(
    made: Deployment, damage: str
):
    ours = made.machine("a").registry()
    ours.takeover("pong", owner="first")
    ours.takeover("pong", owner="second")
    DAMAGE[damage](made.entry("registry/pong", 2))
    made.machine("b").registry().takeover("pong", owner="third")
    assert made.machine("a").registry().catalogue("pong").owner == "third"


def test_other_files_in_a_journal_stop_nothing(made: Deployment):
    keys = made.machine("a").keys()
    text, _ = keys.create(["play"])
    folder = made.models / "keys"
    for name in ("7", "8.json", "0000000009.json.bak", "old.log"):
        (folder / name).write_bytes(b"stray")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "0000000005.json").symlink_to(folder / "0000000005.json")
    opened = made.machine("new").keys()
    opened.follow()
    assert opened.check(text).scopes == ("play",)
    assert opened.damage() == ""


def test_a_folder_in_the_place_of_an_entry_is_named(made: Deployment):
    keys = made.machine("a").keys()
    keys.create(["play"])
    made.entry("keys", 2).mkdir()
    with pytest.raises(StorageFailed, match=r"0000000002\.json is a folder.*; move it away"):
        keys.create(["play"])
    made.entry("keys", 2).rmdir()
    keys.create(["play"])


def test_an_old_copy_of_the_models_folder_is_noticed_and_an_old_repair_does_not_admit_it(
    made: Deployment, tmp_path: Path
):
    keys = made.machine("a").keys()
    keys.create(["play"])
    made.entry("keys", 1).unlink()
    assert keys.repair(revoke=False)
    shutil.copytree(made.models, tmp_path / "old")
    _, key = keys.create(["admin"])
    keys.revoke(key.id)
    shutil.rmtree(made.models)
    shutil.copytree(tmp_path / "old", made.models)
    with pytest.raises(Corrupt, match="this machine has read entry"):
        made.machine("a").keys().follow()


def _create_six_keys(folder: Path) -> None:
    keys = Deployment(folder).machine("a").keys()
    for _ in range(6):
        keys.create(["play"])


def test_processes_of_one_machine_remember_the_newest_entry_that_any_of_them_read(
    made: Deployment, tmp_path: Path
):
    machine = made.machine("a")
    started = [FORKED.Process(target=_create_six_keys, args=(tmp_path,)) for _ in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * 3
    assert len(machine.keys().all()) == 18
    assert machine.remembers("keys") == 18
    assert machine.keys().damage() == ""


def test_a_memory_that_cannot_be_written_stops_nothing(made: Deployment):
    made.machine("a").memory.mkdir()
    (made.machine("a").memory / "keys").write_text("a file in its place")
    keys = made.machine("a").keys()
    text, _ = keys.create(["play"])
    keys.follow()
    keys.check(text)


# --- On object storage ----------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    pytest.importorskip("boto3", reason="pip install 'understudy[aws]'")
    with small_s3(monkeypatch) as server:
        yield server


def test_a_cut_and_a_hole_are_noticed_on_object_storage(s3: SmallS3, tmp_path: Path):
    from understudy.models.cloud import CloudObjects

    clock = ManualClock()

    def machine(name: str) -> Machine:
        return Machine(tmp_path, name, clock, CloudObjects(s3.url))

    running = machine("a").keys()
    admin, key = running.create(["admin"])
    running.revoke(key.id)
    play, _ = running.create(["play"])
    running.follow()
    calls = len(s3.calls)
    clock.advance(1.0)
    running.follow()
    assert len(s3.calls) - calls == 2, "the last entry, and the one after it"
    (second,) = (name for name in s3.objects if name.endswith("keys/0000000002.json"))
    del s3.objects[second]
    fresh = machine("new").keys()
    fresh.follow()
    fresh.check(play)
    assert reason(fresh, admin) == "revoked_key"
    del s3.objects[second.replace("02.json", "03.json")]
    clock.advance(1.0)
    for keys in (running, machine("a").keys()):
        with pytest.raises(Corrupt, match="ends at entry 1"):
            keys.follow()
        assert reason(keys, play) == "keys_damaged"
    assert machine("a").keys().repair(revoke=True)
    clock.advance(1.0)
    running.follow()
    assert [reason(running, text) for text in (play, admin)] == ["wrong_key", "revoked_key"]


def test_a_running_process_finds_entries_after_one_that_was_removed_before_it_read_it(
    made: Deployment,
):
    running = made.machine("a").keys()
    text, key = running.create(["play"])
    running.follow()
    other = made.machine("b").keys()
    other.create(["read"])
    other.revoke(key.id)
    made.entry("keys", 2).unlink()
    made.clock.advance(60.0)
    running.follow()
    assert reason(running, text) == "revoked_key"


def test_a_stranger_cannot_accept_a_cut_journal(made: Deployment):
    keys = made.machine("a").keys()
    keys.create(["admin"])
    keys.create(["play"])
    made.entry("keys", 2).unlink()
    stranger = Signer(b"x" * 32)
    position = {"journal": "keys", "number": 2, "at_s": 0.0, "line": 10**15, "before": ""}
    restart = stranger.sign({"kind": "restart", "revoked": [], **position})
    assert Journal(FolderObjects(made.models), "keys").append(2, restart)
    with pytest.raises(Corrupt):
        made.machine("a").keys().follow()
