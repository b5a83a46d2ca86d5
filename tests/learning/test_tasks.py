"""Each algorithm learns its tasks on one seed; the full card adds Acrobot and a second seed."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.tasks import TASKS, Task, pixels
from bench.which_way import GUESSING
from tests.faults.profiles import sizes


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            task, id=task.name, marks=[pytest.mark.slow] if task.game == "Acrobot-v1" else []
        )
        for task in TASKS
    ],
)
def test_it_is_learned(task: Task, seed: int, tmp_path: Path) -> None:
    """May take more than 20 seconds: it is a whole training, from random weights to the goal."""
    result = task.train(tmp_path, seed)
    assert result["solved"], result
    assert result["episodes"] == 100


@sizes("steps", short=2_560, full=5_120)
def test_without_a_stack_the_pixel_game_stays_a_guess(steps: int, tmp_path: Path) -> None:
    """Even the short training is twice as long as the one that a stack of four needs."""
    task = pixels(1)
    task = replace(task, settings={**task.settings, "steps": steps})
    result = task.train(tmp_path, 0)
    assert not result["solved"]
    assert abs(result["return_mean"] - GUESSING) < 2.5, "one frame must not tell the direction"
