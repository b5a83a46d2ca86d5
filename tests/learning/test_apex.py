"""Ape-X learns on every engine: one preset, with a ladder of epsilons over the whole team.

The engine `inline` ends with the same bits (tests/training/test_engines.py), so only the full
profile trains with it, too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.which_way import WhichWay
from understudy.act.vector import game_of, make_envs
from understudy.training.train import TrainOptions, train
from understudy.training.train_request import TrainRequest, resolve


@pytest.mark.parametrize("engine", [pytest.param("inline", marks=pytest.mark.slow), "process"])
def test_cartpole_is_solved(tmp_path: Path, engine: str):
    """May take more than 20 seconds: it is a whole training, from random weights to the goal."""
    result = train(
        "CartPole-v1",
        seed=1,
        settings={"actors": 2},
        out=tmp_path / "run",
        options=TrainOptions(preset="apex", engine=engine),
    ).result
    assert result["solved"], result
    assert result["return_mean"] >= 475


@pytest.mark.parametrize(("game", "stack"), [("CartPole-v1", 1), (WhichWay, 4)])
def test_the_preset_fits_the_kind_of_game(game: Any, stack: int):
    settings = resolve(TrainRequest(preset="apex"), game_of(make_envs(game, 1)))
    config = settings.config
    assert (config.stack, settings.run.ladder) == (stack, True)
    assert config.double
    assert config.dueling
    assert config.prioritised
    assert config.n_step == 3
    assert "epsilon" not in replace(settings, run=replace(settings.run, steps=10)).cut_schedules()
