"""Videos of a policy, and games that cannot be filmed."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import understudy
from tests.platform.switches import GAME, QUICK, Switches
from understudy.core.errors import ConfigError, MissingExtra
from understudy.training.env_info import GameChoice
from understudy.training.video import check_video


def test_a_run_films_its_best_policy(tmp_path: Path):
    options = understudy.TrainOptions(video=2)
    run = understudy.train(GAME, steps=256, settings=QUICK, out=tmp_path / "R", options=options)
    first, second = run.result["videos"]
    assert [first, second] == [
        str(tmp_path / "R" / "videos" / f"episode-{number}.gif") for number in (1, 2)
    ]
    with Image.open(first) as film:
        assert film.size == (400, 30)  # scaled down from 800 x 60
        assert (
            2 <= getattr(film, "n_frames", 1) <= 7
        )  # every second of 11 frames (50 a second), equal ones are joined
        assert film.info["duration"] % 40 == 0
        assert film.info["loop"] == 0


def test_a_finished_run_can_be_filmed_later(tmp_path: Path):
    understudy.train(GAME, steps=256, settings=QUICK, out=tmp_path / "R")
    options = understudy.TrainOptions(video=1)
    run = understudy.train(out=tmp_path / "R", resume=True, options=options)
    assert len(run.result["videos"]) == 1


def test_an_env_object_is_filmed_if_it_renders_arrays(tmp_path: Path):
    check_video(GameChoice(game=Switches("rgb_array")))
    options = understudy.TrainOptions(video=1)
    with pytest.raises(ConfigError, match="render_mode is None"):
        understudy.train(Switches(), steps=256, out=tmp_path / "R", options=options)
    assert not (tmp_path / "R").exists()


class Odd(Switches):
    def render(self) -> Any:
        return np.zeros((3, 3))


class Broken(Switches):
    def render(self) -> Any:
        raise ImportError("no module named 'pretty'")


def test_frames_of_another_shape_are_rejected():
    with pytest.raises(ConfigError, match=r"returned \(3, 3\), expected uint8"):
        check_video(GameChoice(game=lambda: Odd("rgb_array")))
    with pytest.raises(MissingExtra, match="no module named 'pretty'; install the package"):
        check_video(GameChoice(game=lambda: Broken("rgb_array")))


@pytest.mark.skipif(
    importlib.util.find_spec("pygame") is not None, reason="pygame is here, so CartPole renders"
)
def test_a_game_without_its_renderer_is_rejected_before_training(tmp_path: Path):
    options = understudy.TrainOptions(video=1)
    with pytest.raises(MissingExtra, match="pygame"):
        understudy.train("CartPole-v1", steps=256, out=tmp_path / "R", options=options)
    assert list(tmp_path.iterdir()) == []
