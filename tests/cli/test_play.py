"""Watching a registered bot play a Gymnasium env."""

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.act.policies import random_policy
from tests.platform.switches import GAME
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.cli import play as play_module
from understudy.cli.play import Moment, watch
from understudy.cli.root import run as run_command
from understudy.experience.game import game_spec
from understudy.models.manifest import Lineage
from understudy.training.env_info import GameChoice, inspect_env


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def data(tmp_path: Path) -> str:
    registry = open_deployment(DataFolder(tmp_path / "D")).registry
    for env in (GAME, "CartPole-v1"):
        spec = inspect_env(GameChoice(game=env)).spec
        registry.register(spec)
        epoch = registry.takeover(spec.game, owner="test")
        registry.release(random_policy(spec, "argmax"), Lineage(algorithm="dqn"), epoch=epoch)
        registry.set_alias(spec.game, "champion", 1, why="test")
    other = game_spec("Switches-v0", obs=3, actions=2)
    registry.release(random_policy(other, "argmax"), Lineage(algorithm="dqn"), epoch=1)
    return str(tmp_path / "D")


def test_a_bot_plays_the_same_seeds_to_the_same_returns_and_is_filmed(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def played(*more: str) -> dict[str, Any]:
        assert (
            run_command(
                ["play", GAME, "--episodes", "3", "--seed", "5", "--data", data, "--json", *more]
            )
            == 0
        )
        fields = json.loads(capsys.readouterr().out)
        assert isinstance(fields, dict)
        return fields

    first = played()
    again = played("--bot", "1", "--gif", str(tmp_path / "films"))
    assert first["returns"] == again["returns"] == played("--bot", "Switches-v0/1")["returns"]
    assert (first["bot"], len(first["returns"])) == ("Switches-v0/1", 3)
    assert [Path(path).read_bytes()[:3] for path in again["videos"]] == [b"GIF"] * 3


def test_without_a_terminal_each_episode_is_a_line(data: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(["play", "CartPole-v1", "--episodes", "2", "--data", data]) == 0
    said = capsys.readouterr().out
    assert "episode 2: return" in said
    assert "CartPole-v1/1: mean return" in said


def test_in_a_terminal_frames_are_drawn(data: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(play_module, "_FPS", 10_000)
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, height=40
    )
    monkeypatch.setattr(play_module, "console", lambda *, as_json: screen)
    assert run_command(["play", GAME, "--data", data]) == 0
    assert isinstance(screen.file, io.StringIO)
    assert "▀" in screen.file.getvalue()
    assert "step 10, return" in screen.file.getvalue()


def test_an_image_is_drawn_with_two_pixels_per_character():
    frame = np.zeros((60, 800, 3), np.uint8)
    frame[:30] = 255
    lines = play_module.image_as_text(frame, 72).plain.splitlines()
    assert lines == ["▀" * 72] * 2
    assert play_module.image_as_text(frame[:, :3]).plain.splitlines()[0] == "▀" * 3


def test_moments_add_up(data: str):
    seen: list[Moment] = []
    policy = open_deployment(DataFolder(Path(data))).registry.policy("Switches-v0", 1)
    choice = GameChoice(game=GAME)
    (total,) = watch(
        choice, policy, seeds=[0], shows_frames=False, see=lambda _, moment: seen.append(moment)
    )
    assert sum(moment.reward for moment in seen) == seen[-1].total == total
    assert [moment.has_ended for moment in seen] == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([GAME, "--bot", "canary"], "has no canary now"),
        ([GAME, "--bot", "7"], "does not exist"),
        ([GAME, "--bot", "best"], "GAME/NUMBER"),
        ([GAME, "--bot", "CartPole-v1/1"], "a model of CartPole-v1"),
        ([GAME, "--bot", "2"], "with other spaces than this env"),
        (["Nope-v1"], "Nope"),
        ([GAME, "--env-kwargs", "{"], "--env-kwargs"),
        ([GAME, "--episodes", "0"], "episodes"),
    ],
)
def test_a_bot_or_game_that_cannot_play_is_reported(
    data: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["play", *arguments, "--data", data]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("game", "missing", "command"),
    [("CartPole-v1", "pygame", "pip install"), (GAME, "PIL", "pip install pillow")],
)
def test_a_gif_without_its_packages_names_the_flag_and_the_package_to_install(
    game: str,
    missing: str,
    command: str,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(sys.modules, missing, None)
    films = tmp_path / "films"
    assert run_command(["play", game, "--gif", str(films), "--data", data]) == 2
    said = capsys.readouterr().err
    assert command in said
    assert "omit --gif" in said
    assert "video" not in said
    assert not films.exists()


def test_help_has_two_examples(capsys: pytest.CaptureFixture[str]):
    assert run_command(["play", "--help"]) == 0
    assert capsys.readouterr().out.count("understudy ") >= 3
