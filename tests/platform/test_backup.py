"""Backup and restore: created while others write, verified byte by byte, rejected if damaged."""

import json
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.test_deployment import GAME, a_run
from understudy.backends.data import DataFolder, stats
from understudy.backends.deployment import open_deployment
from understudy.cli.root import run as run_command
from understudy.client.connect import connect
from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.experience.intake import key_file
from understudy.platform import backup
from understudy.platform.backup import FORMAT, back_up, restore, verify_backup
from understudy.platform.config import Config, ModelsSection
from understudy.platform.ingest import IngestRole, open_own_ingest
from understudy.platform.platform import Platform
from understudy.release.gatekeeper import release_run


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def play(data: Path, *, steps: int = 40) -> None:
    with connect("pong", obs=6, actions=3, data=str(data), consent="granted") as game:
        episode = game.episode("ada")
        for at in range(steps):
            episode.acted([float(at)] * 6, at % 3)
            episode.reward(1.0)
        episode.end([0.0] * 6)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a deployment with a model, a key and 40 stored steps."""
    folder = tmp_path_factory.mktemp("deployed")
    data = DataFolder(folder / "D")
    opened = open_deployment(data)
    opened.keys.create(["play"])
    release_run(opened, a_run(folder / "run"))
    play(data.root)
    with IngestRole(data) as role:
        role.service.drain()
    return data.root


@pytest.fixture
def deployed(template: Path, tmp_path: Path) -> DataFolder:
    shutil.copytree(template, tmp_path / "D")
    return DataFolder(tmp_path / "D")


@pytest.fixture(scope="module")
def shared_backup(template: Path) -> Path:
    """One backup for all tests that do not change it."""
    folder = template.with_name("B")
    back_up(DataFolder(template), folder)
    return folder


def test_a_backup_is_restored_to_the_same_steps_models_and_keys(
    deployed: DataFolder, tmp_path: Path
):
    proof = back_up(deployed, tmp_path / "B")
    assert (proof.steps, proof.models, proof.keys) == (40, 1, 1)
    assert stat.S_IMODE((tmp_path / "B").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "B" / "signing.key").stat().st_mode) == 0o600
    new = DataFolder(tmp_path / "E")
    assert restore(tmp_path / "B", new) == proof
    assert stats(new)["steps"] == 40
    opened = open_deployment(new)
    before = open_deployment(deployed)
    assert opened.signer.key_id == before.signer.key_id
    assert opened.registry.policy("pong", 1) == before.registry.policy("pong", 1)
    # It goes on from there: positions of a stream that is not here are in nobody's way.
    play(new.root)
    with IngestRole(new) as role:
        role.service.drain()
        role.trim(0.0)
    assert stats(new)["steps"] == 80
    assert list((deployed.root / "snapshots").iterdir()) == [deployed.root / "snapshots" / ".lock"]


def test_frames_in_the_stream_are_in_the_backup_that_a_running_ingest_creates(
    deployed: DataFolder, tmp_path: Path
):
    stop = threading.Event()
    with IngestRole(deployed) as role:
        running = threading.Thread(target=role.run, args=(stop,))
        running.start()
        try:
            play(deployed.root, steps=25)
            proof = back_up(deployed, tmp_path / "B", timeout_s=60)
        finally:
            stop.set()
            running.join()
    assert proof.steps == 65


def test_a_changed_missing_or_added_byte_is_detected(deployed: DataFolder, tmp_path: Path):
    backup = tmp_path / "B"
    back_up(deployed, backup)
    database = backup / "store" / "experience.sqlite"
    raw = database.read_bytes()
    database.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(Corrupt, match="was changed"):
        verify_backup(backup)
    with pytest.raises(Corrupt):
        restore(backup, DataFolder(tmp_path / "E"))
    assert not (tmp_path / "E").exists()
    database.write_bytes(raw)
    assert verify_backup(backup).steps == 40
    (backup / "extra").write_text("x")
    with pytest.raises(Corrupt, match="extra"):
        verify_backup(backup)
    (backup / "extra").unlink()
    (backup / "key").unlink()
    with pytest.raises(Corrupt, match="key in"):
        verify_backup(backup)


def test_a_damaged_model_is_reported_and_everything_else_is_backed_up(
    deployed: DataFolder, tmp_path: Path
):
    (blob,) = (deployed.root / "models" / "blobs").iterdir()
    for damage in (lambda: blob.write_bytes(blob.read_bytes()[:-1]), blob.unlink):
        damage()
        backup = tmp_path / f"B{blob.exists()}"
        new = DataFolder(tmp_path / f"E{blob.exists()}")
        proof = back_up(deployed, backup)
        assert (proof.damaged, proof.steps, proof.models) == (("pong/1",), 40, 1)
        assert restore(backup, new).damaged == ("pong/1",)


@pytest.mark.parametrize("journal", ["registry/pong", "keys"])
def test_a_journal_with_a_lost_entry_is_named_and_everything_else_is_backed_up(
    deployed: DataFolder, tmp_path: Path, journal: str
):
    keys = open_deployment(deployed).keys
    for _ in range(2):
        keys.create(["play"])
    first = min((deployed.root / "models" / journal).iterdir())
    first.rename(tmp_path / "lost")
    proof = back_up(deployed, tmp_path / "B")
    assert proof.damaged == (("keys",) if journal == "keys" else ("the journal of pong",))
    assert proof.steps == 40
    assert restore(tmp_path / "B", DataFolder(tmp_path / "E")).damaged == proof.damaged


def test_a_key_of_another_deployment_is_not_backed_up_as_if_it_were_good(
    deployed: DataFolder, tmp_path: Path
):
    key = (deployed.root / "key").read_bytes()
    (deployed.root / "key").write_bytes(key_file(b"another key of thirty-two bytes."))
    with pytest.raises(ConfigError, match="differs from the key that this deployment"):
        back_up(deployed, tmp_path / "B")
    (deployed.root / "key").write_bytes(key)
    back_up(deployed, tmp_path / "B")
    new = DataFolder(tmp_path / "E")
    restore(tmp_path / "B", new)
    assert (new.root / "key.id").read_bytes() == (deployed.root / "key.id").read_bytes()


def test_a_file_that_does_not_belong_into_a_journal_is_named_by_the_backup(
    deployed: DataFolder, tmp_path: Path
):
    misplaced = deployed.root / "models" / "keys" / "0999999999.json"
    misplaced.write_bytes(b"{}")
    with pytest.raises(Corrupt, match=r"0999999999.json exists, but .* move it away"):
        back_up(deployed, tmp_path / "B")
    assert not (tmp_path / "B").exists()
    misplaced.unlink()
    assert back_up(deployed, tmp_path / "B").damaged == ()


def test_keys_that_were_revoked_after_the_backup_stay_revoked_if_the_restore_revokes_all(
    deployed: DataFolder, tmp_path: Path
):
    keys = open_deployment(deployed).keys
    admin, key = keys.create(["admin"])
    back_up(deployed, tmp_path / "B")
    keys.revoke(key.id)
    for revokes in (False, True):
        new = DataFolder(tmp_path / f"E{revokes}")
        assert restore(tmp_path / "B", new, revoke_keys=revokes).keys == (0 if revokes else 2)
        opened = open_deployment(new).keys
        opened.follow()
        if revokes:
            with pytest.raises(Refused, match="was revoked"):
                opened.check(admin)
            text, _ = opened.create(["play"])
            opened.follow()
            opened.check(text)
        else:
            opened.check(admin)
        assert opened.damage() == ""
        assert open_deployment(new).registry.damage("pong") == {}
    assert verify_backup(tmp_path / "B").keys == 2, "a backup that was read is unchanged"


def test_machines_that_have_read_newer_entries_accept_models_restored_to_the_same_place(
    tmp_path: Path,
):
    place = tmp_path / "elsewhere"
    url = f"file://{place}"
    data = DataFolder(tmp_path / "D")
    opened = open_deployment(data, models=url)
    opened.keys.create(["play"])
    release_run(opened, a_run(tmp_path / "run"))
    back_up(data, tmp_path / "B", config=Config(models=ModelsSection(url=url)))
    opened.keys.create(["read"])
    opened.registry.takeover("pong", owner="a")
    place.rename(tmp_path / "lost")
    with pytest.raises(Corrupt, match="this machine has read entry 2"):
        open_deployment(data, models=url).keys.follow()
    restore(tmp_path / "B", DataFolder(tmp_path / "E"), models=url)
    for keys in (opened.keys, open_deployment(data, models=url).keys):
        keys.follow()
        assert (len(keys.all()), keys.damage()) == (1, "")
    for registry in (opened.registry, open_deployment(data, models=url).registry):
        assert sorted(registry.catalogue("pong").models) == [1]


@pytest.mark.parametrize("name", ["key", "signing.key"])
def test_a_damaged_secret_is_not_backed_up_as_if_it_were_good(
    deployed: DataFolder, tmp_path: Path, name: str
):
    raw = (deployed.root / name).read_bytes()
    (deployed.root / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        back_up(deployed, tmp_path / "B")
    assert not (tmp_path / "B").exists()


def test_damaged_journals_are_named_and_everything_else_is_backed_up(
    deployed: DataFolder, tmp_path: Path
):
    for journal, number in (("keys", 1), ("registry/pong", 1)):
        (deployed.root / "models" / journal / f"{number:010d}.json").write_bytes(b"")
    (deployed.games / "unplayed").mkdir()
    (deployed.games / "unplayed" / f"{GAME.schema}.json").write_bytes(b"")
    proof = back_up(deployed, tmp_path / "B")
    assert proof.damaged == ("keys", "the journal of pong", "the spec of unplayed")
    assert (proof.models, proof.keys) == (1, 0)
    new = DataFolder(tmp_path / "E")
    restore(tmp_path / "B", new, revoke_keys=True)
    open_deployment(new).keys.follow()


def test_files_of_a_killed_backup_are_removed_and_are_not_a_backup(
    deployed: DataFolder, tmp_path: Path
):
    snapshots = deployed.root / "snapshots"
    for name in ("0123456789abcdef", "mine"):
        (snapshots / name / "store").mkdir(parents=True)
    back_up(deployed, tmp_path / "B")
    assert [path.name for path in snapshots.iterdir() if path.is_dir()] == ["mine"]
    (tmp_path / "B" / "backup.json").unlink()
    with pytest.raises(ConfigError, match="is not a backup"):
        verify_backup(tmp_path / "B")


def test_a_target_with_files_and_a_source_without_data_are_rejected(
    deployed: DataFolder, tmp_path: Path
):
    with pytest.raises(ConfigError, match="not empty"):
        back_up(deployed, deployed.root)
    with pytest.raises(ConfigError, match="is inside the data folder"):
        back_up(deployed, deployed.root / "copy")
    with pytest.raises(ConfigError, match="nothing to back up"):
        back_up(DataFolder(tmp_path / "nothing"), tmp_path / "B")
    back_up(deployed, tmp_path / "B")
    with pytest.raises(ConfigError, match="holds a deployment already"):
        restore(tmp_path / "B", deployed)
    assert not deployed.restoring.exists()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.txt", "b.txt", "lost+found"):
        (other / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"holds other files \(a.txt, b.txt\); pass an empty"):
        restore(tmp_path / "B", DataFolder(other))
    assert sorted(path.name for path in other.iterdir()) == ["a.txt", "b.txt", "lost+found"]
    with pytest.raises(ConfigError, match="is inside the backup"):
        restore(tmp_path / "B", DataFolder(tmp_path / "B" / "x"))
    with pytest.raises(ConfigError, match="is a backup, which would be changed; restore it"):
        open_deployment(DataFolder(tmp_path / "B"))
    assert verify_backup(tmp_path / "B").steps == 40


@pytest.mark.parametrize(
    "command",
    [
        "ingest --until-empty",
        "data verify",
        "data compact",
        "data quarantine replay",
        "data forget somebody",
        "simulate CartPole-v1 --players 1 --seconds 1",
        "config init",
        "up",
    ],
)
def test_no_command_changes_a_backup(
    shared_backup: Path, capsys: pytest.CaptureFixture[str], command: str
):
    assert run_command([*command.split(), "--data", str(shared_backup)]) == 2
    assert "is a backup, which would be changed; restore it" in capsys.readouterr().err
    assert verify_backup(shared_backup).steps == 40


def test_no_game_records_into_a_backup(shared_backup: Path):
    with pytest.raises(ConfigError, match="is a backup, which would be changed; restore it"):
        connect(GAME, data=shared_backup, consent="granted")
    assert verify_backup(shared_backup).steps == 40


def test_a_restore_that_fails_leaves_nothing_that_looks_like_a_deployment(
    deployed: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    back_up(deployed, tmp_path / "B")
    (tmp_path / "E").mkdir()
    (tmp_path / "E" / "understudy.toml").write_text("# mine\n")
    (tmp_path / "E" / "lost+found").mkdir()

    def full(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as broken:
        broken.setattr("understudy.platform.backup._sync_tree", full)
        with pytest.raises(OSError, match="no room"):
            restore(tmp_path / "B", DataFolder(tmp_path / "E"))
    left = {path.name for path in (tmp_path / "E").iterdir()}
    assert left == {"understudy.toml", "lost+found", ".restore.lock"}
    assert restore(tmp_path / "B", DataFolder(tmp_path / "E")).steps == 40
    assert (tmp_path / "E" / "understudy.toml").read_text() == "# mine\n"


RESTORES = """
import os, sys
from pathlib import Path
from understudy.backends.data import DataFolder
from understudy.platform import backup
def die(*_, **__):
    os.kill(os.getpid(), 9)
rename = Path.rename
def rename_but_not_the_key(path, target):
    return die() if path.name == "signing.key" else rename(path, target)
if sys.argv[3] == "rename":
    Path.rename = rename_but_not_the_key
else:
    backup.__dict__[sys.argv[3]] = die
backup.restore(Path(sys.argv[1]), DataFolder(Path(sys.argv[2])), revoke_keys=True)
"""


@pytest.mark.parametrize(
    "killed_at", ["_copy_objects", "_restart_journals", "sync_folder", "rename"]
)
def test_a_killed_restore_brings_no_revoked_key_back_and_can_be_repeated(
    deployed: DataFolder, tmp_path: Path, killed_at: str
):
    admin, _ = open_deployment(deployed).keys.create(["admin"])
    back_up(deployed, tmp_path / "B")
    new = DataFolder(tmp_path / "E")
    command = [sys.executable, "-c", RESTORES, str(tmp_path / "B"), str(new.root), killed_at]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    unfinished = "run 'understudy restore' with the same backup again"
    with pytest.raises(ConfigError, match=unfinished):
        Platform(Config(data=str(new.root)), on_state_change=lambda *_: None)
    with pytest.raises(ConfigError, match=unfinished):
        open_own_ingest(new, Config(data=str(new.root)))
    (new.root / "notes.txt").write_text("created since then, and kept")
    assert restore(tmp_path / "B", new, revoke_keys=True).steps == 40
    assert not new.restoring.exists()
    assert stats(new)["steps"] == 40
    keys = open_deployment(new).keys
    keys.follow()
    with pytest.raises(Refused, match="was revoked"):
        keys.check(admin)


def test_a_restore_that_continues_replaces_nothing(deployed: DataFolder, tmp_path: Path):
    back_up(deployed, tmp_path / "B")
    new = DataFolder(tmp_path / "E")
    command = [sys.executable, "-c", RESTORES, str(tmp_path / "B"), str(new.root), "rename"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    key = new.root / "signing.key"
    key.write_text("created by somebody else")
    with pytest.raises(ConfigError, match=r"signing\.key was created after this restore was inter"):
        restore(tmp_path / "B", new, revoke_keys=True)
    assert key.read_text() == "created by somebody else"
    key.unlink()
    assert restore(tmp_path / "B", new, revoke_keys=True).steps == 40


def test_a_restore_to_a_url_that_was_killed_after_its_journals_began_anew_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = DataFolder(tmp_path / "D")
    release_run(open_deployment(data), a_run(tmp_path / "run"))
    key, _ = open_deployment(data).keys.create(["play"])
    back_up(data, tmp_path / "B")
    url = f"file://{tmp_path / 'elsewhere'}"
    new = DataFolder(tmp_path / "E")

    class Killed(BaseException):
        pass

    def reach(self: Any, stage: str) -> None:
        if stage == "ready":
            raise Killed
        before(self, stage)

    before = backup._Restore.reach
    with monkeypatch.context() as killed:
        killed.setattr(backup._Restore, "reach", reach)
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            restore(tmp_path / "B", new, models=url, revoke_keys=True)
    assert restore(tmp_path / "B", new, models=url, revoke_keys=True).models == 1
    keys = open_deployment(new, models=url).keys
    keys.follow()
    with pytest.raises(Refused, match="was revoked"):
        keys.check(key)


@pytest.mark.parametrize(
    "facts",
    [
        {"format": FORMAT, "at_s": "now", "files": {}},
        {"format": FORMAT, "at_s": 1.0, "files": [1]},
        {"format": FORMAT, "at_s": 1.0},
        {"format": FORMAT, "files": {"key": 3}, "at_s": 1.0},
    ],
)
def test_a_damaged_table_of_contents_is_refused(tmp_path: Path, facts: dict[str, object]):
    (tmp_path / "backup.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="is not a backup"):
        verify_backup(tmp_path)
    (tmp_path / "backup.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not a backup"):
        verify_backup(tmp_path)


def test_remote_models_are_backed_up_and_restored_to_a_url(tmp_path: Path):
    data = DataFolder(tmp_path / "D")
    url = f"file://{tmp_path / 'elsewhere'}"
    release_run(open_deployment(data, models=url), a_run(tmp_path / "run"))
    assert back_up(data, tmp_path / "B", config=Config(models=ModelsSection(url=url))).models == 1
    other = f"file://{tmp_path / 'other'}"
    assert restore(tmp_path / "B", DataFolder(tmp_path / "E"), models=other).models == 1
    assert (tmp_path / "other" / "blobs").is_dir()
    assert not (tmp_path / "E" / "models").exists()


def test_the_commands_report_what_they_copied(
    deployed: DataFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    data = str(deployed.root)
    backup = str(tmp_path / "B")
    assert run_command(["backup", backup, "--data", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40
    assert run_command(["backup", backup, "--data", data]) == 2
    assert run_command(["restore", backup, "--data", str(tmp_path / "E")]) == 2
    assert "--keys" in capsys.readouterr().err
    assert not (tmp_path / "E").exists()
    assert run_command(["restore", backup, "--keys", "keep", "--data", str(tmp_path / "E")]) == 0
    said = capsys.readouterr().out
    assert "restored 40 steps, 1 model and 1 key" in said
    assert "keys that were revoked after the backup are valid again" in said
    assert run_command(["restore", backup, "--keys", "revoke", "--data", str(tmp_path / "G")]) == 0
    assert "restored 40 steps, 1 model and 0 keys" in capsys.readouterr().out
    none = [str(tmp_path / "none"), "--keys", "keep", "--data", str(tmp_path / "F"), "--json"]
    assert run_command(["restore", *none]) == 2
    assert "is not a backup" in capsys.readouterr().err
    for command in ("backup", "restore"):
        assert run_command([command, "--help"]) == 0
        assert capsys.readouterr().out.count("understudy ") >= 3
