"""A warm start keeps what a policy does where the next version of its game is alike."""

from typing import Any

import jax
import numpy as np
import pytest

from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn.algorithms.bc import Bc, BcConfig
from understudy.learn.warm_start import fitting_weights, keeps_play, warm_start
from understudy.nn.policy import Policy

ROWS = 32


def bc_of(game: GameSpec, **config: Any) -> Bc:
    return Bc(game, BcConfig(**{"widths": (16, 16), **config}))


def trained(game: GameSpec, **config: Any) -> Policy:
    """A policy whose weights are all unlike those of a new one."""
    bc = bc_of(game, **config)
    policy = bc.policy(bc.init(jax.random.PRNGKey(1)))
    rng = np.random.default_rng(1)
    weights = {
        name: array + rng.uniform(0.1, 1, array.shape).astype(np.float32)
        for name, array in policy.weights.items()
    }
    return Policy(game, policy.network, weights, policy.head)


def started(old: Policy, game: GameSpec, **config: Any) -> Policy:
    bc = bc_of(game, **config)
    start = warm_start(old, game, network=bc.network, head=bc.head)
    return bc.policy(bc.init(jax.random.PRNGKey(2), start))


def observed(game: GameSpec, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(space.start, space.start + space.n, ROWS).astype(space.dtype)
        if isinstance(space, Discrete)
        else rng.normal(size=(ROWS, *space.shape)).astype(space.dtype)
        for name, space in game.obs_columns.items()
    }


def logits(policy: Policy, obs: dict[str, Any]) -> Any:
    return policy.outputs(obs)["logits"]


COLUMNS: dict[str, Any] = {"pole": 3, "room": Discrete(4), "map": Box((6, 6, 2), np.dtype("f4"))}
OLD = game_spec("cart", obs=COLUMNS, actions=3)


def test_a_new_column_changes_nothing_at_first():
    old = trained(OLD)
    game = game_spec("cart", obs={"wind": 2, **COLUMNS, "a": 1}, actions=3)
    new = started(old, game)
    obs = observed(game)
    before = {name: obs[name] for name in OLD.obs_columns}
    np.testing.assert_allclose(logits(new, obs), logits(old, before), rtol=1e-4, atol=1e-4)
    other_wind = {**obs, "obs.wind": obs["obs.wind"] + 7}
    assert (logits(new, other_wind) == logits(new, obs)).all()


@pytest.mark.parametrize(
    ("obs", "actions", "is_kept"),
    [
        ({**COLUMNS, "wind": 2}, 3, True),
        ({**COLUMNS, "wind": 2}, 4, False),
        ({"pole": 3, "map": COLUMNS["map"], "wind": 2}, 3, False),
    ],
)
def test_play_is_kept_if_all_that_was_observed_is_and_actions_are_the_same(
    obs: dict[str, Any], actions: int, is_kept: bool
):
    bc = bc_of(game_spec("cart", obs=obs, actions=actions))
    assert keeps_play(trained(OLD), bc.game, network=bc.network, head=bc.head) is is_kept


def test_of_a_removed_or_changed_column_only_its_own_rows_are_lost():
    old = trained(OLD)
    game = game_spec("cart", obs={**COLUMNS, "room": Discrete(5)}, actions=3)
    new = started(old, game)
    assert (new.weights["trunk.0.kernel"][-5:] == 0).all(), "another number of rooms"
    without = game_spec("cart", obs={"pole": 3, "map": COLUMNS["map"]}, actions=3)
    for policy in (new, started(old, without)):
        for name in ("trunk.2.kernel", "heads.logits.0.kernel", "inputs.obs.pole.0.mean"):
            assert (policy.weights[name] == old.weights[name]).all()
        kernel = policy.weights["trunk.0.kernel"]
        n_same = old.network.widths()["obs.map"] + 3
        assert (kernel[:n_same] == old.weights["trunk.0.kernel"][:n_same]).all()


@pytest.mark.parametrize("observation_norm", [True, False])
def test_numbers_with_names_are_found_in_another_order(observation_norm: bool):
    config = {"observation_norm": observation_norm}
    before = game_spec("cart", obs=["x", "speed", "angle"], actions=3)
    old = trained(before, **config)
    game = game_spec("cart", obs=["wind", "angle", "x", "speed"], actions=3)
    new = started(old, game, **config)
    obs = observed(game)["obs"]
    same = {"obs": obs[:, [2, 3, 1]]}
    np.testing.assert_allclose(logits(new, {"obs": obs}), logits(old, same), rtol=1e-4, atol=1e-4)
    if observation_norm:
        assert new.weights["inputs.obs.0.count"] == 0, "the new number's scale is to be found"
        reordered = game_spec("cart", obs=["angle", "x", "speed"], actions=3)
        count = started(old, reordered, **config).weights["inputs.obs.0.count"]
        assert count == old.weights["inputs.obs.0.count"] > 0


@pytest.mark.parametrize("actions", [4, ["left", "right", "jump"]])
def test_with_other_actions_the_last_layers_are_new(actions: Any):
    old = trained(OLD)
    game = game_spec("cart", obs=COLUMNS, actions=actions)
    bc = bc_of(game)
    start = warm_start(old, game, network=bc.network, head=bc.head)
    assert start.keys() == {name for name in old.weights if not name.startswith("heads.")}


@pytest.mark.parametrize(
    ("game", "config"),
    [
        (game_spec("cart", obs=4, actions=3), {}),  # no name tells which number is new
        (game_spec("cart", obs={"other": 3}, actions=3), {}),
        (game_spec("cart", obs={**COLUMNS, "wind": 1}, actions=3), {"widths": (16, 8)}),
        (game_spec("cart", obs={**COLUMNS, "wind": 1}, actions=3), {"widths": ()}),
    ],
)
def test_nothing_is_kept_of_another_observation_or_network(game: GameSpec, config: dict[str, Any]):
    bc = bc_of(game, **config)
    assert warm_start(trained(OLD), game, network=bc.network, head=bc.head) == {}


def test_a_grid_shown_from_a_cell_is_kept_only_with_the_same_other_columns():
    """Its layers see the other columns too."""
    centre = "obs.map 1"
    old = trained(OLD, centre=centre)
    game = game_spec("cart", obs={**COLUMNS, "wind": 1}, actions=3)
    new = started(old, game, centre=centre)
    assert (new.weights["trunk.0.kernel"][: new.network.widths()["obs.map"]] == 0).all()
    masked = game_spec("cart", obs=COLUMNS, actions=3, has_action_mask=True)
    same = started(old, masked, centre=centre)
    assert all((same.weights[name] == old.weights[name]).all() for name in old.weights)


@pytest.mark.parametrize("lost", ["mean", "var"])
def test_the_count_of_statistics_fits_only_together_with_them(lost: str):
    old = trained(OLD)
    norm = "inputs.obs.pole.0."
    assert {norm + "mean", norm + "var", norm + "count"} <= {
        *fitting_weights(old.weights, old.network)
    }
    start = {**old.weights, norm + lost: np.zeros(7, np.float32)}
    fit = fitting_weights(start, old.network)
    assert norm + "count" not in fit
    assert "inputs.obs.map.0.count" in fit, "that of another input"
