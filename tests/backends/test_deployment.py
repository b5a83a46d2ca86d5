"""A data folder's signing key, and releasing a run by hand."""

import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.act.policies import random_policy
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment, signing_key
from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.experience.game import game_spec
from understudy.experience.intake import key_file
from understudy.release.gatekeeper import release_run
from understudy.training.folder import RunFolder

GAME = game_spec("pong", obs=6, actions=3)


def a_run(folder: Path, *, seed: int = 0, has_ended: bool = True) -> Path:
    run = RunFolder(folder)
    run.create({"algorithm": "dqn", "seed": seed, "game": "pong"}, "")
    run.save_policy("best", random_policy(GAME, "argmax", seed=seed))
    if has_ended:
        run.write_json("result.json", {"return_mean": 12.5, "solved": True, "nothing": None})
    return folder


def test_concurrent_processes_create_each_key_once_readable_by_its_owner_only(
    tmp_path: Path,
):
    data = DataFolder(tmp_path / "D")
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_deployment(data), range(8)))
    assert len({one.signer.key_id for one in opened}) == 1
    assert stat.S_IMODE(signing_key(data).stat().st_mode) == 0o600
    names = sorted(path.name for path in data.root.iterdir())
    assert names == ["key", "key.id", "models", "signing.key"]
    assert [path.name for path in (data.root / "models").iterdir()] == ["deployment.json"]


def test_a_lost_signing_key_is_an_error_and_not_replaced(tmp_path: Path):
    data = DataFolder(tmp_path)
    open_deployment(data).keys.create(["play"])
    signing_key(data).unlink()
    with pytest.raises(ConfigError, match="restore it from a backup"):
        open_deployment(data)
    signing_key(data).write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes, expected 40"):
        open_deployment(data)


@pytest.mark.parametrize("at", [0, 31, 32, 39])
def test_a_flipped_signing_key_is_an_error_and_not_a_new_deployment(tmp_path: Path, at: int):
    data = DataFolder(tmp_path)
    open_deployment(data).keys.create(["play"])
    raw = bytearray(signing_key(data).read_bytes())
    raw[at] ^= 1
    signing_key(data).write_bytes(raw)
    with pytest.raises(ConfigError, match=r"signing.key is damaged: .* restore it from a backup"):
        open_deployment(data)


def test_a_lost_or_replaced_signing_key_is_noticed_before_any_entry_was_signed(tmp_path: Path):
    data = DataFolder(tmp_path)
    key_id = open_deployment(data).signer.key_id
    raw = signing_key(data).read_bytes()
    signing_key(data).unlink()
    with pytest.raises(ConfigError, match=r"missing .*signing.key, .*restore it from a backup"):
        open_deployment(data)
    assert not signing_key(data).exists()
    signing_key(data).write_bytes(key_file(b"another key of thirty-two bytes."))
    with pytest.raises(ConfigError, match="key differs from the key that this deployment"):
        open_deployment(data)
    signing_key(data).write_bytes(raw)
    assert open_deployment(data).signer.key_id == key_id


def test_a_damaged_name_in_the_fingerprints_is_noticed(tmp_path: Path):
    data = DataFolder(tmp_path)
    open_deployment(data)
    path = tmp_path / "models" / "deployment.json"
    path.write_bytes(path.read_bytes().replace(b'"pseudonyms"', b'"psetdonyms"'))
    with pytest.raises(ConfigError, match=r"deployment.json beside the models is damaged"):
        open_deployment(data)


def test_a_lost_or_replaced_pseudonym_key_is_noticed_where_only_models_are_local(tmp_path: Path):
    data = DataFolder(tmp_path)
    open_deployment(data)
    raw = (tmp_path / "key").read_bytes()
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match=r"missing .*key, .*restore it from a backup"):
        open_deployment(data)
    assert not (tmp_path / "key").exists()
    (tmp_path / "key").write_bytes(key_file(b"another key of thirty-two bytes."))
    with pytest.raises(ConfigError, match="key differs from the key that this deployment"):
        open_deployment(data)
    (tmp_path / "key").write_bytes(raw)
    open_deployment(data)


def test_a_deployment_without_a_fingerprint_of_its_pseudonym_key_is_opened(tmp_path: Path):
    data = DataFolder(tmp_path)
    key_id = open_deployment(data).signer.key_id
    (tmp_path / "models" / "deployment.json").write_text(f'{{"signatures": "{key_id}"}}')
    (tmp_path / "key").unlink()
    assert open_deployment(data).signer.key_id == key_id
    assert not (tmp_path / "key").exists(), "it is created by the first process that needs it"


def test_the_signing_key_of_a_deployment_that_has_only_models_is_not_replaced(tmp_path: Path):
    data = DataFolder(tmp_path)
    open_deployment(data).registry.takeover("pong", owner="a")
    (tmp_path / "models" / "deployment.json").unlink()
    signing_key(data).unlink()
    with pytest.raises(ConfigError, match="would invalidate its keys, models and players"):
        open_deployment(data)


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{"])
def test_damaged_fingerprints_are_named(tmp_path: Path, raw: bytes):
    data = DataFolder(tmp_path)
    open_deployment(data)
    (tmp_path / "models" / "deployment.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"deployment.json beside the models is damaged"):
        open_deployment(data)


def test_entries_that_this_machine_has_read_are_remembered_per_location_of_the_models(
    tmp_path: Path,
):
    data = DataFolder(tmp_path / "D")
    url = f"file://{tmp_path / 'elsewhere'}"
    open_deployment(data).keys.create(["play"])
    moved = open_deployment(data, models=url).keys
    moved.follow()
    assert moved.all() == []
    moved.create(["play"])
    (tmp_path / "elsewhere" / "keys" / "0000000001.json").unlink()
    with pytest.raises(Corrupt, match="this machine has read entry 1"):
        open_deployment(data, models=url).keys.follow()
    open_deployment(data).keys.follow()


def test_models_may_be_at_a_url(tmp_path: Path):
    url = f"file://{tmp_path / 'elsewhere'}"
    opened = open_deployment(DataFolder(tmp_path / "D"), models=url)
    opened.registry.register(GAME)
    assert open_deployment(DataFolder(tmp_path / "D"), models=url).registry.games() == ["pong"]
    assert open_deployment(DataFolder(tmp_path / "D")).registry.games() == []


def test_a_key_that_was_rejected_is_not_recorded_as_the_right_one(tmp_path: Path):
    url = f"file://{tmp_path / 'elsewhere'}"
    first = DataFolder(tmp_path / "D")
    second = DataFolder(tmp_path / "E")
    open_deployment(first, models=url)
    second.root.mkdir()
    shutil.copy(first.root / "signing.key", second.root)
    (second.root / "key").write_bytes(key_file(b"another key of thirty-two bytes."))
    with pytest.raises(ConfigError, match="copy the key of its other machines here"):
        open_deployment(second, models=url)
    shutil.copy(first.root / "key", second.root)
    open_deployment(second, models=url)


@pytest.mark.parametrize("name", ["key", "signing.key"])
def test_a_machine_whose_keys_differ_from_the_deployments_does_not_start(tmp_path: Path, name: str):
    url = f"file://{tmp_path / 'elsewhere'}"
    first = DataFolder(tmp_path / "D")
    second = DataFolder(tmp_path / "E")
    open_deployment(first, models=url)
    second.root.mkdir()
    for one in ("key", "signing.key"):
        shutil.copy(first.root / one, second.root / one)
    open_deployment(second, models=url)
    (second.root / name).unlink()
    with pytest.raises(ConfigError, match=f"missing .*{name}, .*from another machine"):
        open_deployment(second, models=url)
    assert not (second.root / name).exists()
    (second.root / name).write_bytes(key_file(b"another key of thirty-two bytes."))
    with pytest.raises(ConfigError, match=f"{name} differs from the key .* machines here"):
        open_deployment(second, models=url)
    shutil.copy(first.root / name, second.root / name)
    open_deployment(second, models=url)


def test_the_first_added_run_becomes_champion_and_the_next_waits(tmp_path: Path):
    opened = open_deployment(DataFolder(tmp_path / "D"))
    first = release_run(opened, a_run(tmp_path / "one"))
    second = release_run(opened, a_run(tmp_path / "two", seed=1))
    assert (first.manifest.name, first.is_champion) == ("pong/1", True)
    assert (second.manifest.name, second.is_champion) == ("pong/2", False)
    lineage = first.manifest.lineage
    assert (lineage.algorithm, lineage.metrics["return_mean"]) == ("dqn", 12.5)
    catalogue = opened.registry.catalogue("pong")
    assert (catalogue.model_of("champion"), catalogue.epoch) == (1, 1)
    assert opened.registry.policy("pong", 2) == random_policy(GAME, "argmax", seed=1)


def test_adding_a_run_does_not_fence_the_games_learner(tmp_path: Path):
    opened = open_deployment(DataFolder(tmp_path / "D"))
    epoch = opened.registry.takeover("pong", owner="the learner")
    release_run(opened, a_run(tmp_path / "one"))
    assert opened.registry.catalogue("pong").epoch == epoch


def test_an_unfinished_or_invalid_run_is_not_released(tmp_path: Path):
    opened = open_deployment(DataFolder(tmp_path / "D"))
    with pytest.raises(ConfigError, match="has not finished"):
        release_run(opened, a_run(tmp_path / "one", has_ended=False))
    with pytest.raises(ConfigError, match="is not a run"):
        release_run(opened, tmp_path / "nothing")
    assert opened.registry.games() == []


def test_a_run_with_non_finite_outputs_is_rejected_and_leaves_no_model(tmp_path: Path):
    run = a_run(tmp_path / "one")
    opened = open_deployment(DataFolder(tmp_path / "D"))
    policy = random_policy(GAME, "argmax")
    huge = {name: np.full_like(array, 3e38) for name, array in policy.weights.items()}
    RunFolder(run).save_policy("best", replace(policy, weights=huge))
    with np.errstate(all="ignore"), pytest.raises(Refused, match="are not finite"):
        release_run(opened, run)
    assert opened.registry.games() == []
