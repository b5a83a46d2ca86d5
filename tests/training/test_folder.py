"""A run's folder: names, files, and what a kill may leave behind."""

import json
from pathlib import Path

import pytest

from understudy.core.errors import ConfigError
from understudy.training.events import Guarded
from understudy.training.folder import CURVE, RunFolder, default_folder, is_empty, seed_folders

FACTS = {
    "game": "CartPole-v1",
    "name": "CartPole-v1",
    "env_kwargs": {},
    "wrappers": [],
    "frame_skip": 1,
    "algorithm": "ppo",
    "seed": 1,
    "until": None,
    "starts": 0,
    "extensions": 0,
    "created_ms": 7,
    "schema": "s",
    "from_store": None,
    "init_from": None,
}


def row(env_steps: float) -> dict[str, float]:
    return {name: float("nan") if name == "train_return" else env_steps for name in CURVE}


def test_folders_are_numbered_by_game_and_algorithm(tmp_path: Path):
    assert default_folder(tmp_path / "none", "CartPole-v1", "dqn").name == "CartPole-v1-dqn-1"
    for name in ("CartPole-v1-dqn-1", "CartPole-v1-dqn-3"):
        (tmp_path / name).mkdir()
    assert default_folder(tmp_path, "CartPole-v1", "dqn").name == "CartPole-v1-dqn-2"
    assert default_folder(tmp_path, "ALE/Pong-v5", "my.module:Algo").name == "ALE-Pong-v5-algo-1"


def test_a_folder_is_empty_until_it_holds_a_run_or_anything_else(tmp_path: Path):
    root = tmp_path / "R"
    assert is_empty(root)
    root.mkdir()
    for name in (".lock", "preset.toml", "network.json", "start.safetensors", ".run.json.123.tmp"):
        (root / name).touch()
        assert is_empty(root)
    assert not RunFolder(root).exists
    RunFolder(root).create(FACTS, "[run]\n")
    assert RunFolder(root).facts() == FACTS
    assert not is_empty(root)
    assert not is_empty(root / "run.json")


def test_a_curve_is_read_up_to_a_torn_line_and_cut_at_a_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.curve_rows() == []
    folder.cut_curve(0)
    for steps in (10, 20, 30):
        folder.add_to_curve(row(steps))
    with folder.curve.open("a") as file:
        file.write("40,1")
    assert [one["env_steps"] for one in folder.curve_rows()] == [10, 20, 30]
    assert [one["env_steps"] for one in folder.cut_curve(20)] == [10, 20]
    folder.add_to_curve(row(30))
    assert [one["env_steps"] for one in folder.curve_rows()] == [10, 20, 30]


def test_steps_of_a_long_run_stay_exact_in_the_curve(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.cut_curve(0)
    folder.add_to_curve(row(12_345_678))
    folder.cut_curve(99_999_999)
    assert folder.curve_rows()[0]["env_steps"] == 12_345_678


def test_what_the_guard_did_is_kept_and_cut_at_a_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.cut_guarded(5)
    assert not folder.guarded.exists()
    for steps in (10, 20):
        folder.add_guarded(Guarded(env_steps=steps, what="a chunk, refused", chunks=["s/1", "s/2"]))
    with folder.guarded.open("a") as file:
        file.write("30")
    folder.cut_guarded(10)
    assert folder.guarded.read_text().splitlines() == [
        "env_steps,what,chunks",
        '10,"a chunk, refused",s/1 s/2',
    ]


def test_a_folder_without_run_or_policy_is_reported(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run"):
        RunFolder(tmp_path).facts()
    with pytest.raises(ConfigError, match="has no policy yet"):
        RunFolder(tmp_path).policy()
    (tmp_path / "best.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFolder(tmp_path).policy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seed": 1', "is damaged: .*; restore it from a copy"),
        ("\0\ufffd", "is damaged"),
        ("[1]", r"expected an object, got \[1\]"),
        (json.dumps({**FACTS, "seed": "x"}), "seed is 'x', expected int"),
        (json.dumps({**FACTS, "frame_skip": True}), "frame_skip is True, expected int"),
        (
            json.dumps({**FACTS, "until": "soon"}),
            "until is 'soon', expected int or float or null",
        ),
        (
            json.dumps({name: value for name, value in FACTS.items() if name != "schema"}),
            "schema is missing",
        ),
    ],
)
def test_a_damaged_run_json_is_reported_with_its_error(text: str, said: str, tmp_path: Path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(
        ConfigError, match=f"run.json is damaged: .*{said}" if "damaged" not in said else said
    ):
        RunFolder(tmp_path).facts()


def test_a_run_of_before_there_were_extensions_is_read(tmp_path: Path):
    facts = {name: value for name, value in FACTS.items() if name != "extensions"}
    RunFolder(tmp_path).create(facts, "")
    assert RunFolder(tmp_path).facts() == facts


def test_the_newest_checkpoint_is_where_a_run_resumes(tmp_path: Path):
    run = RunFolder(tmp_path)
    assert run.saved_steps() is None
    run.checkpoints.mkdir()
    for name in (
        "000000000256.safetensors",
        "000000001024.safetensors",
        ".000000002048.safetensors.7.tmp",
    ):
        (run.checkpoints / name).touch()
    assert run.saved_steps() == 1_024


def test_where_no_evaluation_found_a_best_policy_the_last_one_is_the_runs(tmp_path: Path):
    for name in ("last", "best"):
        (tmp_path / f"{name}.safetensors").touch()
        assert RunFolder(tmp_path).policy_path() == tmp_path / f"{name}.safetensors"
    assert RunFolder(tmp_path).policy_path("last") == tmp_path / "last.safetensors"


def test_seeds_are_sorted_as_numbers_and_other_folders_are_left_alone(tmp_path: Path):
    assert seed_folders(tmp_path) == [tmp_path]
    for name in ("seed-10", "seed-9", "seed-old", "videos"):
        (tmp_path / name).mkdir()
    assert [path.name for path in seed_folders(tmp_path)] == ["seed-9", "seed-10"]
