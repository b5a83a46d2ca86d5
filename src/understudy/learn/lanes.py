"""Lanes: many runs of one algorithm in one compiled program, each with its own settings and data.

    a round of every lane:  play ─► insert into the lane's ring ─► draw ─► update, if one is due

Game, replay and updates are on the device. What a lane computes depends on its seed and settings
only, not on other lanes or on its place among them, so a lane can be refilled at any time, and one
whose updates are not finite changes no other.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from understudy.algorithm import Algorithm, Batch, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.games import cartpole
from understudy.learn.learner import guarded_update
from understudy.nn.policy import Policy

PURE_GAMES: Mapping[str, Any] = {"CartPole-v0": cartpole, "CartPole-v1": cartpole}
"""Games that a program can play: by name, modules with `first_state` and `step`.

A state is an array [numbers, envs], which is also the observation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """What the lanes of a program have in common, besides the algorithm."""

    lanes: int
    envs: int
    """Envs of each lane."""
    collect: int
    """Steps per env and round."""
    capacity: int
    """Rows of each lane's ring."""
    max_rounds: int = 256
    """Rounds in one compiled call, at most."""
    updates: int | None = None
    """Updates of each round, at most; None: each round says how many.

    With a number, the lengths of all loops are constants of the program, so that a GPU does not
    wait for the host before each round and update; each number of rounds in a call is compiled.
    """


class Rounds(NamedTuple):
    """What lanes do in consecutive rounds."""

    explore: Any  # float32[rounds, lanes]: epsilon of the round's actions
    updates: Any  # int32[rounds, lanes]: how many follow the round's steps
    knobs: Mapping[str, Any]  # float32[rounds, lanes] by name


class LaneState(NamedTuple):
    """The state of one lane, without its ring; in a program, every array has a leading axis."""

    learner: Any
    key: Any  # uint32[2]
    discount: Any  # float32: per step
    game: Any  # float32[numbers, envs]
    age: Any  # int32[envs]: steps of the open episodes
    rounds: Any  # int32
    steps: Any  # int32: per env
    skips: Any  # int32: updates in a row that were not finite


class LaneProgram:
    """Lanes of one algorithm and plan; all programs of an equal algorithm and plan are alike."""

    def __init__(self, algorithm: Algorithm, plan: LanePlan) -> None:
        self.algorithm = algorithm
        self.plan = plan
        needs = algorithm.needs
        if reason := why_not(algorithm):
            raise ConfigError(f"this algorithm cannot train in lanes: {reason}; train it alone")
        assert isinstance(needs, Transitions)
        if plan.capacity < plan.envs * (plan.collect + needs.n_step):
            raise ConfigError(
                f"capacity is {plan.capacity}, which has no room for the steps of a round; give at "
                f"least {plan.envs * (plan.collect + needs.n_step)}"
            )
        self._state: Any = None  # LaneState of arrays, while there are runs
        self._ring: Any = None
        self._call = jax.jit(
            _call_of(algorithm, plan),
            donate_argnums=(0, 1),
            static_argnums=() if plan.updates is None else 3,
        )

    def start(self, lane: int, *, seed: int, discount: float) -> None:
        """Start a new run in a lane; what the lane's ring holds is never drawn again."""
        first = self._first_state(seed=seed, discount=discount)
        if self._state is None:
            lanes = self.plan.lanes
            self._state = jax.tree.map(
                lambda leaf: jnp.asarray(np.zeros((lanes, *leaf.shape), leaf.dtype)), first
            )
            self._ring = self._empty_ring(first)
        self._state = _put(self._state, lane, first)

    def start_all(self, seeds: Sequence[int], discounts: Sequence[float]) -> None:
        """Start a new run in every lane: the same as `start` for each, and much faster."""
        if not len(seeds) == len(discounts) == self.plan.lanes:
            raise ConfigError(
                f"{len(seeds)} seeds and {len(discounts)} discounts for {self.plan.lanes} lanes; "
                "give one of each for every lane"
            )
        pairs = zip(seeds, discounts, strict=True)
        with _on_the_host():
            firsts = [self._first_state(seed=seed, discount=discount) for seed, discount in pairs]
        self.free()  # a ring of thousands of lanes takes gigabytes
        self._state = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *firsts)
        self._ring = self._empty_ring(firsts[0])

    def free(self) -> None:
        """Free the memory of the lanes, whose runs have ended; what is compiled is kept."""
        self._state = None
        self._ring = None

    def run(self, rounds: Rounds, is_active: Array) -> None:
        """Play rounds in the active lanes, bool[lanes]; at most `max_rounds` of them."""
        n_rounds = len(rounds.explore)
        if self.plan.updates is None:
            if spare := self.plan.max_rounds - n_rounds:
                rounds = jax.tree.map(lambda column: np.pad(column, ((0, spare), (0, 0))), rounds)
            count: Any = np.int32(n_rounds)
        else:
            count = n_rounds
        self._state, self._ring = self._call(self._state, self._ring, rounds, count, is_active)

    def wait(self) -> None:
        """Wait until the rounds are played; `run` may return before that."""
        jax.block_until_ready((self._state, self._ring))

    def state(self, lane: int) -> LaneState:
        """The lane's state as NumPy arrays."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[lane].copy(), self._state)

    @property
    def skips(self) -> Array:
        """int32[lanes]: updates in a row that were not finite, and changed nothing."""
        return np.array(self._state.skips)

    def policy(self, lane: int) -> Policy:
        """The policy of the lane's current weights."""
        learner = jax.tree.map(lambda leaf: np.asarray(leaf)[lane].copy(), self._state.learner)
        return self.algorithm.policy(learner)

    def _empty_ring(self, first: LaneState) -> Any:
        plan = self.plan
        width = 2 * first.game.shape[0] + 4
        shape = (plan.lanes, plan.capacity // plan.envs, plan.envs, width)
        return jnp.asarray(np.zeros(shape, np.float32))

    def _first_state(self, *, seed: int, discount: float) -> LaneState:
        envs = self.plan.envs
        game = PURE_GAMES[self.algorithm.game.game]
        # As `jax.random.PRNGKey` computes it, but without a compilation; the other key is unused
        # elsewhere.
        init_key, key = np.array([[0, seed], [1, seed]], np.uint32)
        uniforms = np.random.default_rng([seed, _FIRST_STREAM]).random((game.N_FIRST, envs))
        return LaneState(
            learner=self.algorithm.init(init_key),
            key=key,
            discount=np.float32(discount),
            game=game.first_state(uniforms).astype(np.float32),
            age=np.zeros(envs, np.int32),
            rounds=np.int32(0),
            steps=np.int32(0),
            skips=np.int32(0),
        )


_FIRST_STREAM = 1
"""The key of the first states among the random streams of a lane's seed."""


def _on_the_host() -> contextlib.AbstractContextManager[Any]:
    """A block whose arrays are created on the CPU, unless JAX_PLATFORMS excludes the CPU."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return contextlib.nullcontext()
    return jax.default_device(host)


@partial(jax.jit, donate_argnums=0)
def _put(lanes: LaneState, lane: Any, state: LaneState) -> LaneState:
    return jax.tree.map(lambda all_lanes, own: all_lanes.at[lane].set(own), lanes, state)


def why_not(algorithm: Algorithm) -> str:
    """Why an algorithm cannot train in lanes; empty if it can."""
    needs = algorithm.needs
    if not isinstance(needs, Transitions):
        return "it is on-policy, and lanes draw from a replay"
    if algorithm.game.game not in PURE_GAMES:
        return f"{algorithm.game.game} is not one of {joined(PURE_GAMES)}, which run on a device"
    if needs.is_cloning or needs.best_share < 1:
        return "it clones recorded play"
    if needs.prioritised:
        return "it draws by priority, and lanes draw uniformly: set prioritised=false"
    if needs.stack > 1 or needs.extras:
        return "it needs stacked observations or more columns than a lane keeps"
    return ""


def _call_of(algorithm: Algorithm, plan: LanePlan) -> Callable[..., tuple[LaneState, jax.Array]]:
    """The function of one call: rounds of all lanes."""
    needs = algorithm.needs
    assert isinstance(needs, Transitions)
    n_step = needs.n_step
    update = guarded_update(algorithm)
    game = PURE_GAMES[algorithm.game.game]
    column = next(iter(algorithm.game.obs_columns))
    limit = algorithm.game.max_episode_steps
    n_times = plan.capacity // plan.envs

    def play(lane: LaneState, key: Any, explore: Any, is_active: Any) -> tuple[LaneState, Any]:
        """One step in each env, and the ring's rows of it, float32[envs, width]."""
        act_key, first_key = jax.random.split(key)
        obs = lane.game.T
        action = algorithm.act(lane.learner, {column: obs}, act_key, explore).action
        after, reward, terminated = game.step(jnp, lane.game, action)
        age = lane.age + 1
        ended = terminated if limit is None else terminated | (age >= limit)
        numbers = jnp.stack([action.astype(jnp.float32), reward, 1.0 - terminated, 1.0 - ended], 1)
        rows = jnp.concatenate([obs, after.T, numbers], axis=1)
        first = game.first_state(jax.random.uniform(first_key, (game.N_FIRST, plan.envs)))
        return lane._replace(
            game=jnp.where(is_active, jnp.where(ended, first, after), lane.game),
            age=jnp.where(is_active, jnp.where(ended, 0, age), lane.age),
            steps=lane.steps + is_active,
        ), rows

    def drawn(lane: LaneState, ring: Any, key: Any) -> Batch:
        """A batch of the steps that are not among the newest, whose windows are incomplete."""
        n_drawable = (jnp.minimum(lane.steps, n_times) - (n_step - 1)) * plan.envs
        chance = jax.random.uniform(key, (needs.batch,))
        number = jnp.minimum((chance * n_drawable).astype(jnp.int32), n_drawable - 1)
        first = lane.steps - n_step - number // plan.envs  # the newest step is steps - 1
        env = number % plan.envs
        rows = ring[first % n_times, env]
        obs, following, action, reward, goes_on, continues = _columns(rows)
        discount = lane.discount * goes_on
        factor = lane.discount
        for later in range(1, n_step):
            rows = ring[(first + later) % n_times, env]
            _, later_obs, _, later_reward, goes_on, later_continues = _columns(rows)
            reward += factor * continues * later_reward
            factor *= lane.discount
            following = jnp.where(continues[:, None] > 0, later_obs, following)
            discount = jnp.where(continues > 0, factor * goes_on, discount)
            continues *= later_continues
        return Batch(
            obs={column: obs},
            action=action.astype(jnp.int32),
            reward=reward,
            next_obs={column: following},
            discount=discount,
            weight=jnp.ones(needs.batch, jnp.float32),
        )

    def learn(lane: LaneState, ring: Any, key: Any, knobs: Any, is_due: Any) -> LaneState:
        is_due &= lane.steps >= n_step
        learner, feedback = update(lane.learner, drawn(lane, ring, key), knobs)
        learner = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), learner, lane.learner)
        skips = jnp.where(feedback.ok, 0, lane.skips + 1)
        return lane._replace(learner=learner, skips=jnp.where(is_due, skips, lane.skips))

    def call(
        lanes: LaneState, ring: Any, rounds: Rounds, n_rounds: Any, is_active: Any
    ) -> tuple[LaneState, Any]:
        places = jnp.arange(plan.lanes)
        fold_in = jax.vmap(jax.random.fold_in)

        def one_round(at: Any, carry: Any) -> Any:
            lanes, ring = carry
            explore, updates, knobs = jax.tree.map(lambda rows: rows[at], rounds)
            updates = jnp.where(is_active, updates, 0)
            keys = fold_in(lanes.key, lanes.rounds)

            def play_all(at: Any, carry: Any) -> Any:
                lanes, ring = carry
                position = jnp.where(is_active, lanes.steps % n_times, n_times)
                step_keys = fold_in(keys, jnp.full(plan.lanes, at))
                lanes, rows = jax.vmap(play)(lanes, step_keys, explore, is_active)
                return lanes, ring.at[places, position].set(rows, mode="drop")

            def learn_all(at: Any, lanes: LaneState) -> LaneState:
                update_keys = fold_in(keys, jnp.full(plan.lanes, plan.collect + at))
                return jax.vmap(learn)(lanes, ring, update_keys, knobs, at < updates)

            lanes, ring = jax.lax.fori_loop(0, plan.collect, play_all, (lanes, ring))
            n_updates = updates.max() if plan.updates is None else plan.updates
            lanes = jax.lax.fori_loop(0, n_updates, learn_all, lanes)
            return lanes._replace(rounds=lanes.rounds + is_active), ring

        return jax.lax.fori_loop(0, n_rounds, one_round, (lanes, ring))

    return call


def _columns(rows: Any) -> tuple[Any, ...]:
    """Of the ring's rows: obs, next obs, action, reward, and 0 at a termination, 0 at any end."""
    width = (rows.shape[1] - 4) // 2
    return rows[:, :width], rows[:, width:-4], *jnp.unstack(rows[:, -4:], axis=1)
