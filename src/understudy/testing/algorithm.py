"""The contract of the Algorithm port, as tests to subclass.

class TestMine(AlgorithmContract):
    def make(self) -> Algorithm:
        return Mine(cart_spec(), MineConfig(batch=64))

Keep the network small: each program is compiled once for all tests of a class. Define `make_masked`
too if the algorithm supports games with action masks. This module needs JAX; `understudy.testing`
itself does not import it.
"""

import dataclasses
import unittest
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from understudy.algorithm import Algorithm, Batch, Range, Rollout, Rollouts, Schedule, Transitions
from understudy.core.tensors import Array
from understudy.nn.heads import LOG_STD, Decision
from understudy.nn.policy import Policy, decode_policy
from understudy.testing.samples import random_rows

LANES = 3
ROWS = 64


class AlgorithmContract:
    """Tests of an Algorithm: subclass, define `make`, and run with pytest."""

    lane_tolerance = 0.0
    """How far a lane, one of several runs in one program, may differ from the same run alone after
    ten updates. Networks of width 64 with batches of 64 meet 0; set 1e-4 for other sizes."""
    scan_tolerance = 0.0
    """How far a scan of a hundred updates may differ from a hundred single ones."""

    def make(self) -> Algorithm:
        """Create the algorithm for a game of your choice."""
        raise NotImplementedError(
            "a subclass of AlgorithmContract must define make(): the algorithm under test"
        )

    def make_masked(self) -> Algorithm:
        """Create the algorithm for a game with action masks."""
        raise unittest.SkipTest("this algorithm supports no games with action masks")

    # --- Same arguments, same bits ----------------------------------------------------------------

    def test_the_same_key_gives_the_same_bits(self) -> None:
        kit = _kit(type(self))
        first, again, other = (kit.algorithm.init(jax.random.PRNGKey(seed)) for seed in (7, 7, 8))
        assert _distance(first, again) == 0.0
        assert _distance(first, other) > 0.0
        updates = [kit.update(first, kit.batch(1), kit.knobs) for _ in range(2)]
        assert _distance(*updates) == 0.0
        updated, _ = updates[0]
        decisions = [kit.act(updated, kit.obs(1), jax.random.PRNGKey(3), 0.3) for _ in range(2)]
        assert _distance(*decisions) == 0.0

    def test_an_update_changes_what_a_policy_does(self) -> None:
        kit = _kit(type(self))
        before, after = (
            kit.policy(state).outputs(kit.obs(2)) for state in (kit.state, kit.learned)
        )
        assert any((before[name] != after[name]).any() for name in before)

    # --- The exported policy ----------------------------------------------------------------------

    def test_the_exported_policy_does_what_the_live_one_does(self) -> None:
        kit = _kit(type(self))
        policy = kit.policy(kit.learned)
        obs = kit.obs(3)
        for seed in range(4):
            live = kit.act(kit.learned, obs, jax.random.PRNGKey(seed), 0.5)
            _check_same(policy, obs, jax.tree.map(np.asarray, live))

    def test_the_exported_policy_survives_encoding(self) -> None:
        kit = _kit(type(self))
        policy = kit.policy(kit.learned)
        obs = kit.obs(4)
        decoded = decode_policy(policy.encode())
        np.testing.assert_array_equal(
            decoded.decide(obs, None, deterministic=True).action,
            policy.decide(obs, None, deterministic=True).action,
        )

    # --- One program for many runs or updates -----------------------------------------------------

    def test_a_lane_equals_the_same_run_alone(self) -> None:
        kit = _kit(type(self))
        keys = jax.random.split(jax.random.PRNGKey(5), LANES + 1)
        lanes = jax.jit(jax.vmap(kit.algorithm.init))(keys[:LANES])
        alone = [kit.algorithm.init(key) for key in keys]
        for lane in range(LANES):
            assert _distance(_at(lanes, lane), alone[lane]) == 0.0, (
                "a lane starts from other bits than the run alone"
            )
        knobs = {name: np.full(LANES, value) for name, value in kit.knobs.items()}
        for number in range(10):
            if number == 5:  # the lane in the middle starts again
                alone[1] = alone[LANES]
                first, _, last = (_at(lanes, lane) for lane in range(LANES))
                lanes = _stacked([first, alone[1], last])
            batches = [kit.batch(100 + LANES * number + index) for index in range(LANES)]
            lanes, _ = kit.update_lanes(lanes, _stacked(batches), knobs)
            for lane in range(LANES):
                alone[lane], _ = kit.update(alone[lane], batches[lane], kit.knobs)
        for lane in range(LANES):
            assert _distance(_at(lanes, lane), alone[lane]) <= self.lane_tolerance

    def test_a_scan_of_updates_equals_single_updates(self) -> None:
        kit = _kit(type(self))
        batches = [kit.batch(number % 4) for number in range(100)]
        single = kit.state
        scanned, _ = kit.update_many(kit.state, _stacked(batches), kit.knobs)
        for batch in batches:
            single, _ = kit.update(single, batch, kit.knobs)
        assert _distance(scanned, single) <= self.scan_tolerance

    # --- Feedback ---------------------------------------------------------------------------------

    def test_feedback_of_a_good_batch_is_good(self) -> None:
        kit = _kit(type(self))
        _, feedback = kit.update(kit.state, kit.batch(1), kit.knobs)
        assert bool(feedback.ok)
        assert feedback.row_ok.shape == (kit.rows,)
        assert feedback.row_ok.dtype == bool
        assert bool(feedback.row_ok.all())
        assert feedback.metrics
        assert all(value.shape == () and np.isfinite(value) for value in feedback.metrics.values())
        if isinstance(kit.algorithm.needs, Rollouts):
            assert feedback.ratio_error is not None
            assert float(feedback.ratio_error) <= 1e-3
        elif kit.algorithm.needs.prioritised:
            assert feedback.priorities.shape == (kit.rows,)
            assert bool((feedback.priorities >= 0).all())

    def test_a_batch_that_is_not_finite_is_reported_with_its_rows(self) -> None:
        kit = _kit(type(self))
        clean, _ = kit.update(kit.state, kit.batch(1), kit.knobs)
        for name, bad in [
            (name, bad) for name in kit.number_fields for bad in (np.nan, np.inf, -np.inf)
        ]:
            spoiled, row = _spoiled(kit.batch(1), name, bad)
            updated, feedback = kit.update(kit.state, spoiled, kit.knobs)
            if bool(feedback.ok):  # the field is not read, or is clipped before it does harm
                assert not np.isnan(bad) or _distance(updated, clean) == 0.0, (
                    f"the update learned from {bad} in {name}"
                )
                assert _is_finite(updated), f"{bad} in {name} broke the state, and ok is True"
                continue
            assert not feedback.row_ok[row], f"row_ok is True for the row with {bad} in {name}"
            assert bool(feedback.row_ok.any()), f"row_ok is False for every row: {bad} in {name}"

    # --- Masks ------------------------------------------------------------------------------------

    def test_invalid_actions_are_never_taken(self) -> None:
        kit = _Kit(self.make_masked())
        rng = np.random.default_rng(0)
        state = kit.state
        policy = kit.policy(state)
        for seed in range(20):
            obs = kit.obs(seed)
            action_mask = random_masks(ROWS, policy.head.size, rng)
            for explore in (0.0, 0.5, 1.0):
                live = np.asarray(
                    kit.act(state, obs, jax.random.PRNGKey(seed), explore, action_mask).action
                )
                decided = policy.decide(
                    obs, policy.head.noise(rng, ROWS), explore=explore, action_mask=action_mask
                ).action
                greedy = policy.decide(
                    obs, None, action_mask=action_mask, deterministic=True
                ).action
                for taken in (live, decided, greedy):
                    assert action_mask[np.arange(ROWS), taken].all()

    # --- Settings ---------------------------------------------------------------------------------

    def test_every_default_is_within_its_range(self) -> None:
        algorithm = _kit(type(self)).algorithm
        for settings in (algorithm.Config(), algorithm.Knobs()):
            for field in dataclasses.fields(settings):
                limits = field.metadata.get("range")
                value = getattr(settings, field.name)
                ends = (value.start, value.end) if isinstance(value, Schedule) else (value,)
                if isinstance(limits, Range):
                    assert limits.description
                    assert all(limits.low <= number <= limits.high for number in ends), field.name


# --- Test data ------------------------------------------------------------------------------------


_KITS: dict[Any, "_Kit"] = {}
"""The kit of each contract class, so that its functions are compiled once for all tests."""


def _kit(contract: type[AlgorithmContract]) -> "_Kit":
    if contract not in _KITS:
        _KITS[contract] = _Kit(contract().make())
    return _KITS[contract]


class _Kit:
    """An algorithm with its compiled functions and random data for them."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.update: Any = jax.jit(algorithm.update)
        self.act: Any = jax.jit(algorithm.act)
        self.state = algorithm.init(jax.random.PRNGKey(0))
        knobs = algorithm.Knobs()
        values = {field.name: getattr(knobs, field.name) for field in dataclasses.fields(knobs)}
        self.knobs = {name: np.float32(_now(value)) for name, value in values.items()}
        self._batches: dict[int, Any] = {}

    @cached_property
    def update_lanes(self) -> Any:
        return jax.jit(jax.vmap(self.algorithm.update))

    @cached_property
    def update_many(self) -> Any:
        def many(state: Any, batches: Any, knobs: Any) -> Any:
            return jax.lax.scan(
                lambda state, batch: self.algorithm.update(state, batch, knobs), state, batches
            )

        return jax.jit(many)

    @cached_property
    def learned(self) -> Any:
        """A state after three updates."""
        state = self.state
        for number in range(3):
            state, _ = self.update(state, self.batch(number), self.knobs)
        return state

    def policy(self, state: Any) -> Policy:
        return self.algorithm.policy(state)

    @property
    def rows(self) -> int:
        needs = self.algorithm.needs
        return needs.batch if isinstance(needs, Transitions) else needs.steps * needs.envs

    def obs(self, seed: int) -> dict[str, Array]:
        return random_obs(self.algorithm, np.random.default_rng([9, seed]), (ROWS,))

    def batch(self, seed: int) -> Any:
        """Random data for one update; the same for the same seed."""
        if seed not in self._batches:
            rng = np.random.default_rng([1, seed])
            is_rollout = isinstance(self.algorithm.needs, Rollouts)
            self._batches[seed] = (
                random_rollout(self.algorithm, self.state, rng)
                if is_rollout
                else random_batch(self.algorithm, rng)
            )
        return self._batches[seed]

    @property
    def number_fields(self) -> Iterator[str]:
        """The fields of a batch that contain floats; `obs.NAME` for a column."""
        for name, value in self.batch(1)._asdict().items():
            if name in ("action", "weight"):
                continue  # computed by the platform: an action by a head, a weight by the replay
            for key, column in value.items() if isinstance(value, Mapping) else [("", value)]:
                if column is not None and column.dtype.kind == "f":
                    yield f"{name}.{key}" if key else name


def random_obs(
    algorithm: Algorithm, rng: np.random.Generator, shape: tuple[int, ...]
) -> dict[str, Array]:
    """Random observation columns of shape [*shape, (stack,) *space.shape]."""
    stack = algorithm.needs.stack
    shape = (*shape, stack) if stack > 1 else shape
    columns = algorithm.game.obs_columns.items()
    return {
        name: random_rows(space, int(np.prod(shape)), rng).reshape(*shape, *space.shape)
        for name, space in columns
    }


def random_masks(n: int, size: int, rng: np.random.Generator) -> Array:
    """bool[n, size] with at least one valid action per row."""
    action_mask: Array = rng.random((n, size)) < 0.4
    action_mask[np.arange(n), rng.integers(0, size, n)] = True
    return action_mask


def random_batch(algorithm: Algorithm, rng: np.random.Generator) -> Batch:
    """Random transitions of the algorithm's game, with valid actions only."""
    needs = algorithm.needs
    game = algorithm.game
    assert isinstance(needs, Transitions)
    n = needs.batch
    action_mask = None
    next_action_mask = None
    if game.discrete is None:
        action: Array = random_rows(game.action[""], n, rng).reshape(n, -1).astype(np.float32)
    else:
        size = game.discrete.n
        action_mask, next_action_mask = (random_masks(n, size, rng) for _ in range(2))
        action = np.where(action_mask, rng.random((n, size)), -1.0).argmax(1).astype(np.int32)
    has_ended = rng.random(n) < 0.1
    return Batch(
        obs=random_obs(algorithm, rng, (n,)),
        action=action,
        reward=rng.normal(0, 1, n).astype(np.float32),
        next_obs=random_obs(algorithm, rng, (n,)),
        discount=np.where(has_ended, 0.0, needs.discount**needs.n_step).astype(np.float32),
        weight=rng.uniform(0.2, 1.0, n).astype(np.float32)
        if needs.prioritised
        else np.ones(n, np.float32),
        action_mask=action_mask if game.has_action_mask else None,
        next_action_mask=next_action_mask if game.has_action_mask else None,
        extras={name: rng.normal(0, 1, n).astype(np.float32) for name in needs.extras},
    )


def random_rollout(algorithm: Algorithm, state: Any, rng: np.random.Generator) -> Rollout:
    """The decisions of the state's policy for random observations, with their probabilities."""
    needs = algorithm.needs
    policy = algorithm.policy(state)
    assert isinstance(needs, Rollouts)
    shape = (needs.steps, needs.envs)
    n = needs.steps * needs.envs
    obs = random_obs(algorithm, rng, shape)
    action_mask = random_masks(n, policy.head.size, rng) if algorithm.game.has_action_mask else None
    flat = {name: column.reshape(n, *column.shape[2:]) for name, column in obs.items()}
    decision = policy.decide(flat, policy.head.noise(rng, n), action_mask=action_mask)
    chosen = decision.action if policy.head.is_discrete else decision.raw_action
    return Rollout(
        obs=obs,
        action=chosen.reshape(*shape, *chosen.shape[1:]),
        reward=rng.normal(0, 1, shape).astype(np.float32),
        next_obs=random_obs(algorithm, rng, shape),
        terminated=rng.random(shape) < 0.1,
        truncated=rng.random(shape) < 0.1,
        logp=decision.logp.reshape(shape),
        action_mask=None if action_mask is None else action_mask.reshape(*shape, -1),
    )


def _now(knob: Any) -> float:
    return knob.at(0.0) if isinstance(knob, Schedule) else float(knob)


def _at(tree: Any, lane: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[lane], tree)


def _stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def _distance(left: Any, right: Any) -> float:
    """The largest difference between two trees; 0 only if every bit is equal."""
    largest = 0.0
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        first = np.asarray(a)
        second = np.asarray(b)
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        if first.tobytes() != second.tobytes():
            difference = np.abs(first.astype(np.float64) - second.astype(np.float64)).max()
            largest = max(largest, float(difference) if np.isfinite(difference) else np.inf, 1e-300)
    return largest


def _is_finite(tree: Any) -> bool:
    floats = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return all(np.isfinite(leaf).all() for leaf in floats if leaf.dtype.kind == "f")


def _spoiled(batch: Any, name: str, bad: float) -> tuple[Any, int]:
    """A copy of a batch with a bad number in one row of a field, and that row."""
    field, _, key = name.partition(".")
    value = getattr(batch, field)
    column = np.array(value[key] if key else value)
    is_rollout = isinstance(batch, Rollout)
    at = (column.shape[0] // 2, column.shape[1] // 2) if is_rollout else (column.shape[0] // 2,)
    column[at] = bad
    changed = {**value, key: column} if key else column
    return batch._replace(**{field: changed}), int(
        np.ravel_multi_index(at, column.shape[: len(at)])
    )


def _check_same(policy: Policy, obs: Mapping[str, Array], live: Decision) -> None:
    """Assert that the exported policy makes these decisions, given noise that leads to them."""
    head = policy.head
    outputs = policy.outputs(obs)
    rows = np.arange(len(live.logp))
    if head.kind == "epsilon_greedy":
        lots = np.zeros((len(rows), 1 + head.size), np.float32)
        lots[rows, 1 + live.action] = 1.0  # the first number is below epsilon, so the lots decide
        own = policy.decide(obs, lots, explore=0.5)
    elif head.kind == "categorical":
        pushes = np.zeros((len(rows), head.size), np.float32)
        pushes[rows, live.action] = 1e6
        own = policy.decide(obs, pushes)
    elif head.is_discrete:
        own = policy.decide(obs, None)
    else:
        std = np.exp(np.clip(outputs["log_std"], *LOG_STD))
        own = policy.decide(obs, ((live.raw_action - outputs["mean"]) / std).astype(np.float32))
    np.testing.assert_allclose(own.action, live.action, atol=0 if head.is_discrete else 1e-4)
    np.testing.assert_allclose(own.logp, live.logp, atol=1e-4)
    assert (own.action.dtype, own.logp.dtype) == (live.action.dtype, live.logp.dtype)
