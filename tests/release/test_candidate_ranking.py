"""The candidates of a game, ranked on recorded steps before one is released."""

import numpy as np
import pytest

from understudy.algorithm import Batch
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn.algorithms.bc import Bc
from understudy.nn.policy import Policy
from understudy.release.candidate_ranking import CandidateRanking, may_rank

U8 = np.dtype(np.uint8)
F32 = np.dtype(np.float32)
PLACES = game_spec("places", obs=Discrete(2), actions=2)


@pytest.mark.parametrize(
    ("game", "stack", "expected"),
    [
        (PLACES, 1, True),
        (PLACES, 2, False),
        (game_spec("pole", obs=Box((4,), F32), actions=2), 1, True),
        (game_spec("arm", obs=Box((4,), F32), actions=Box((2,), F32, -1, 1)), 1, False),
        (game_spec("grid", obs=Box((6, 6, 3), U8, 0, 1), actions=2), 1, False),
        (game_spec("image", obs=Box((64, 64, 3), U8), actions=2), 1, False),
    ],
)
def test_games_with_discrete_actions_and_small_networks_are_ranked(
    game: GameSpec, stack: int, expected: bool
):
    assert may_rank(game, stack=stack) is expected


def test_the_candidate_whose_choices_were_rewarded_is_the_best():
    """Action 1 is worth 1, action 0 nothing; the clone prefers 0, iql prefers 1."""
    rng = np.random.default_rng(0)
    action = rng.integers(2, size=1_000).astype(np.int32)
    obs = {"obs": rng.integers(2, size=1_000)}
    ones = np.ones(1_000, np.float32)
    steps = Batch(obs, action, action.astype(np.float32), obs, 0.5 * ones, ones)
    policies = {"bc": _preferring(0), "iql": _preferring(1)}
    ranking = CandidateRanking(policies, steps, temperature=0.1, updates=256, seed=0)
    while ranking.step():
        pass
    best = ranking.best()
    assert best is not None
    # The recorded players choose 1 in 27 % of the steps, so that it has support.
    assert (best.algorithm, best.temperature) in (("iql", 0.05), ("iql", 0.1))
    assert best.policy == policies["iql"].at_temperature(best.temperature)
    values = {(row["algorithm"], row["temperature"]): row["value"] for row in ranking.facts()}
    assert len(values) == 10
    assert values["iql", 0.05] == pytest.approx(2.0, abs=0.2)
    assert values["bc", 0.05] == pytest.approx(0.0, abs=0.2)


def _preferring(action: int) -> Policy:
    algorithm = Bc(PLACES)
    shapes = algorithm.network.shapes()
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    weights["heads.logits.0.bias"][action] = 1.0
    return Policy(PLACES, algorithm.network, weights, algorithm.head)
