"""Duels: the same serves from both sides, and the names of sides."""

import json
from pathlib import Path

import pytest

from tests.act.policies import random_policy
from understudy.act.vector import game_of, make_envs
from understudy.arena.duel import Side, duel
from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment
from understudy.cli.arena import side_of
from understudy.cli.models import export
from understudy.cli.root import run as run_command
from understudy.core.errors import ConfigError
from understudy.experience.game import game_spec
from understudy.models.manifest import Lineage

RALLY = game_of(make_envs("rally", 1))


def nobody() -> Deployment:
    raise AssertionError("no deployment is needed")


def test_a_better_side_wins_and_swapping_the_sides_mirrors_the_result():
    strong, casual = (side_of(name, nobody) for name in ("strong", "casual"))
    there = duel(strong, casual, serves=200)
    back = duel(casual, strong, serves=200)
    assert there.low is not None
    assert there.low > 0.6
    assert there.won + there.lost + there.undecided == there.serves == 200
    assert back.share == pytest.approx(1 - there.share), (
        "the same serves and the same luck, told from the other side"
    )


def test_equal_sides_get_half_of_the_points(tmp_path: Path):
    (tmp_path / "p.safetensors").write_bytes(random_policy(RALLY, "argmax", seed=1).encode())
    for name in ("good", str(tmp_path / "p.safetensors")):
        found = duel(side_of(name, nobody), side_of(name, nobody), serves=100)
        assert (found.share, found.won) == (0.5, found.lost)


def test_the_same_seed_gives_the_same_duel_and_another_seed_another():
    good, strong = (side_of(name, nobody) for name in ("good", "strong"))
    found = duel(good, strong, serves=200, seed=3)
    assert found == duel(good, strong, serves=200, seed=3)
    assert found.won != duel(good, strong, serves=200, seed=4).won


def test_models_aliases_files_and_skills_can_play(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    deployed = open_deployment(DataFolder(tmp_path / "D"))
    registry = deployed.registry
    registry.register(RALLY)
    epoch = registry.takeover("rally", owner="test")
    manifest = registry.release(
        random_policy(RALLY, "argmax", seed=1), Lineage(algorithm="dqn"), epoch=epoch
    )
    with pytest.raises(ConfigError, match="has no champion"):
        side_of("champion", lambda: deployed)
    registry.set_alias("rally", "champion", manifest.model_no, why="test")
    for name in ("champion", "rally/1"):
        assert isinstance(side_of(name, lambda: deployed), Side)
    assert (
        run_command(
            ["arena", "duel", "rally/1", "strong", "--data", str(tmp_path / "D"), "--serves", "40"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "better: strong" in said
    line = [
        "arena",
        "duel",
        "champion",
        "strong",
        "--data",
        str(tmp_path / "D"),
        "--serves",
        "4",
        "--json",
    ]
    assert run_command(line) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["a"], told["a_model"], told["a_policy_sha256"]) == (
        "champion",
        "rally/1",
        manifest.policy_sha256,
    )
    assert (told["b"], told["b_model"], told["b_policy_sha256"]) == ("strong", None, None)
    assert run_command(line[:-1]) == 0
    assert "champion (rally/1) wins" in capsys.readouterr().out
    export(registry, manifest, kind="json", out=tmp_path / "p.json")
    export(registry, manifest, kind="safetensors", out=tmp_path / "p.safetensors")
    with pytest.raises(
        ConfigError,
        match="it is JSON; give a file written by a training run or by 'models export --safetensor",
    ):
        side_of(str(tmp_path / "p.json"), nobody)
    assert side_of(str(tmp_path / "p.safetensors"), nobody).policy_sha256 == manifest.policy_sha256
    (tmp_path / "bad").write_bytes(b"no policy")
    for name, why in (
        ("nobody", "unknown rally player 'nobody'"),
        ("rally/9", "does not exist"),
        (str(tmp_path / "bad"), "is not a policy"),
    ):
        with pytest.raises(ConfigError, match=why):
            side_of(name, lambda: deployed)
    (tmp_path / "cart").write_bytes(
        random_policy(game_spec("cart", obs=4, actions=2), "argmax", seed=1).encode()
    )
    with pytest.raises(ConfigError, match="plays cart"):
        side_of(str(tmp_path / "cart"), nobody)


@pytest.mark.parametrize("shape", [{"obs": 6, "actions": 5}, {"obs": 5, "actions": 3}])
def test_a_policy_of_another_rally_is_rejected(shape: dict[str, int], tmp_path: Path):
    other = game_spec("rally", obs=shape["obs"], actions=shape["actions"])
    (tmp_path / "other").write_bytes(random_policy(other, "argmax", seed=1).encode())
    with pytest.raises(ConfigError, match=r"a different rally.*6 observed numbers and 3 actions"):
        side_of(str(tmp_path / "other"), nobody)


@pytest.mark.parametrize("serves", [-1, 0, 1, 3, 10**9])
def test_invalid_numbers_of_serves_are_rejected(serves: int):
    good = side_of("good", nobody)
    with pytest.raises(ConfigError, match="even number"):
        duel(good, good, serves=serves)


@pytest.mark.parametrize("name", ["", "x" * 300, "x/" * 3000 + "1"])
def test_unknown_names_are_rejected(name: str, tmp_path: Path):
    with pytest.raises(ConfigError):
        side_of(name, lambda: open_deployment(DataFolder(tmp_path / "D")))


def test_a_file_too_large_for_a_policy_is_not_read(tmp_path: Path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="the limit is"):
        side_of(str(tmp_path / "huge"), nobody)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("good good --serves 20", "neither; they play alike"),
        (
            "good strong --serves 4",
            "(too few serves for an interval)\nbetter: neither; more serves",
        ),
    ],
)
def test_an_undecided_duel_explains_why(line: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(["arena", "duel", *line.split()]) == 0
    assert said in capsys.readouterr().out
