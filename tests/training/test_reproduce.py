"""A run is reproduced bit for bit from the preset in its folder and its seed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.platform.switches import GAME, QUICK, Brighter, Switches
from tests.training.arguments import with_options
from understudy.core.errors import ConfigError
from understudy.learn.architecture import network_for
from understudy.nn.network import Dense
from understudy.training.folder import RunFolder
from understudy.training.train import Run

STEPS = 512


def train(out: Path, game: Any = GAME, **asked: Any) -> Run:
    return understudy.train(
        game,
        out=out,
        algorithm="ppo",
        seed=5,
        steps=STEPS,
        settings=QUICK,
        **with_options(asked),
    )


def again(run: Run, out: Path, game: Any = GAME, **asked: Any) -> Run:
    asked["preset"] = str(run.folder / "preset.toml")
    return understudy.train(game, out=out, seed=5, **with_options(asked))


def own_network(run: Run) -> Any:
    return network_for(
        run.policy.game, heads={"logits": (Dense(2),), "value": (Dense(1),)}, widths=(7, 6)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("plain") / "R")


@pytest.mark.parametrize("what", ["network", "frame_skip", "wrapper", "env_kwargs", "init_from"])
def test_a_run_is_reproduced_from_its_preset_and_seed(what: str, tmp_path: Path, plain: Run):
    other = tmp_path / "other"
    shutil.copytree(plain.folder, other)
    asked = {
        "network": own_network(plain),
        "frame_skip": 3,
        "wrapper": Brighter,
        "env_kwargs": {"presses": 4},
        "init_from": other,
    }[what]
    first = train(tmp_path / "R", **{what: asked})
    shutil.rmtree(other)
    second = again(first, tmp_path / "S")
    assert second.policy.network == first.policy.network
    for name in ("last", "best"):
        weights = [
            (run.folder / f"{name}.safetensors").read_bytes() for run in (first, second, plain)
        ]
        assert weights[0] == weights[1]
        assert weights[0] != weights[2]


def test_arguments_override_those_of_the_run(tmp_path: Path, plain: Run):
    first = train(tmp_path / "R", network=own_network(plain), frame_skip=3)
    second = again(first, tmp_path / "S", network=(64, 64), frame_skip=2)
    assert second.policy.network == plain.policy.network
    assert RunFolder(second.folder).facts()["frame_skip"] == 2


def test_a_preset_that_was_copied_elsewhere_is_only_settings(tmp_path: Path):
    first = train(tmp_path / "R", frame_skip=3)
    shutil.copy(first.folder / "preset.toml", tmp_path / "preset.toml")
    options = understudy.TrainOptions(preset=str(tmp_path / "preset.toml"))
    second = understudy.train(GAME, out=tmp_path / "S", options=options)
    assert RunFolder(second.folder).facts()["frame_skip"] == 1


def test_a_run_on_an_env_object_is_reproduced_only_if_the_object_is_passed_again(tmp_path: Path):
    first = train(tmp_path / "R", Switches(presses=4), wrapper=Brighter)
    with pytest.raises(ConfigError, match="which cannot be stored; pass it again in Python"):
        again(first, tmp_path / "S")
    second = again(first, tmp_path / "S", Switches(presses=4))
    last = [(run.folder / "last.safetensors").read_bytes() for run in (first, second)]
    assert last[0] == last[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"R/preset\.toml contains no settings; .* restore the file from a copy"),
        ('algorithm = "dqn"\n', "is for dqn, and run.json beside it for ppo; restore"),
        ("[run]\nsteps = 512\n", "is for no algorithm, and run.json beside it for ppo"),
    ],
)
def test_a_preset_that_does_not_match_its_run_is_rejected(
    text: str, said: str, tmp_path: Path, plain: Run
):
    shutil.copytree(plain.folder, tmp_path / "R")
    preset = tmp_path / "R" / "preset.toml"
    preset.write_text(text)
    options = understudy.TrainOptions(preset=str(preset))
    with pytest.raises(ConfigError, match=said):
        understudy.train(GAME, out=tmp_path / "S", options=options)
    with pytest.raises(ConfigError, match=said):
        understudy.train(out=tmp_path / "R", resume=True, steps=2 * STEPS)
    assert not (tmp_path / "S").exists()
