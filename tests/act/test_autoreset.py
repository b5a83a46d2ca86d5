"""Vector envs that reset themselves: no step across a reset is recorded, counted or sampled."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorRewardWrapper, VectorWrapper

from tests.act.envs import MixedEnv
from tests.act.policies import random_policy
from tests.act.test_vector import Halved
from tests.faults.profiles import sizes
from understudy.act.actor import Actor
from understudy.act.evaluate import evaluate
from understudy.act.live import LiveEnvs
from understudy.act.vector import game_of, make_envs, single_game
from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError, GameFailed
from understudy.experience.chunk import Chunk, RowKind
from understudy.experience.game import GameSpec
from understudy.learn.replay import HostReplay
from understudy.nn.policy import InitialPriority
from understudy.ports import Collected

SELF_RESETTING = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]
NUM_ENVS = 5


class Counting(gymnasium.Env[Any, Any]):
    """Observations are the numbers of env, episode and step; lengths depend only on these."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(4, start=1)

    def __init__(self, number: int, length: int | None = None, *, has_masks: bool = False) -> None:
        self.number = number
        self.length = length
        self.has_masks = has_masks
        self.episode = -1
        self.at = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # The second reset with a seed starts over: the first one only inspected the env.
        self.episode = 0 if self.episode == 0 and self.at == 0 else self.episode + 1
        self.at = 0
        rng = np.random.default_rng([self.number, self.episode])
        self.last = self.length or int(rng.choice([1, 1, 2, 3, 7, 30]))
        self.is_terminated, self.is_truncated = [(True, False), (False, True), (True, True)][
            rng.integers(3)
        ]
        return self.observe(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.at < self.last, "a step after the end"
        assert not self.has_masks or self.mask()[action - 1], "an invalid action"
        self.at += 1
        is_over = self.at == self.last
        ends = (is_over and self.is_terminated, is_over and self.is_truncated)
        return self.observe(), self.at + float(action) / 8, *ends, self.info()

    def observe(self) -> Any:
        return np.array([self.number, self.episode, self.at], np.float32)

    def mask(self) -> Any:
        if self.at == self.last:
            return np.zeros(4, np.int8)  # nothing is valid after the end
        return np.array([(self.at + k) % 3 != 0 for k in range(4)], np.int8)

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask()} if self.has_masks else {}


def vector(mode: AutoresetMode, **options: Any) -> Any:
    """Five counting envs."""
    makers = [partial(Counting, number, **options) for number in range(NUM_ENVS)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def actor_of(envs: Any, game: GameSpec | None = None) -> tuple[Actor, GameSpec]:
    game = game or game_of(envs, name="counting")
    return Actor(envs, game, root_seed=5, created_ms=1_700_000_000_000), game


def chunks_of(collected: list[Collected], actor: Actor, env: int) -> list[Chunk]:
    return [
        chunk
        for part in collected
        for chunk in part.chunks
        if chunk.meta.session == actor.sessions[env]
    ]


def joined_steps(chunks: list[Chunk]) -> dict[str, Any]:
    """The columns of all steps, without final and bootstrap rows."""
    return {
        name: np.concatenate(
            [chunk.columns[name][chunk.columns["row"] == RowKind.STEP] for chunk in chunks]
        )
        for name in chunks[0].columns
    }


def assert_equal_to_a_plain_loop(
    chunks: list[Chunk], env: Any, seed: int | None = None
) -> list[tuple[float, int]]:
    """Check every row against a single env; return the return and length of ended episodes."""
    ended: list[tuple[float, int]] = []
    rewards: list[float] = []
    obs, info = None, {}
    for chunk in chunks:
        chunk.validate()
        assert all(note.seed is None for note in chunk.meta.episodes)
        for row in range(chunk.n_rows):
            cells = {name: column[row] for name, column in chunk.columns.items()}
            if cells["is_first"]:
                obs, info = env.reset(seed=None if ended else seed)
                rewards = []
            assert cells["obs"].tobytes() == np.asarray(obs).tobytes()
            if "action_mask" in cells:
                assert cells["action_mask"].tolist() == info["action_mask"].astype(bool).tolist()
            if cells["row"] != RowKind.STEP:
                continue
            obs, reward, terminated, truncated, info = env.step(cells["action"])
            assert cells["reward"] == np.float32(reward)
            assert (cells["terminated"], cells["truncated"]) == (terminated, truncated)
            rewards.append(float(reward))
            if terminated or truncated:
                ended.append((sum(rewards), len(rewards)))
                assert chunk.columns["row"][row + 1] == RowKind.FINAL
    return ended


def rounds(total: int) -> list[int]:
    """Random sizes of collects that play at least `total` steps in five envs."""
    rng = np.random.default_rng(1)
    sizes = [1, 1, 1, 2]
    while sum(sizes) * NUM_ENVS < total:
        sizes.append(int(rng.choice([1, 2, 3, 17, 700])))  # a chunk has at most 512 steps
    return sizes


@pytest.mark.parametrize("mode", SELF_RESETTING)
@pytest.mark.parametrize("length", [None, 1, 4], ids=["random", "always 1", "all at once"])
@pytest.mark.parametrize("has_masks", [False, True])
@sizes("n_steps", short=3_000, full=10_000)
def test_thousands_of_steps_equal_those_of_a_plain_loop(
    n_steps: int, mode: AutoresetMode, length: int | None, has_masks: bool
):
    actor, game = actor_of(vector(mode, length=length, has_masks=has_masks))
    policy = random_policy(game, "epsilon_greedy")
    lengths = rounds(n_steps)
    collected = [
        actor.collect(policy, n, round_no=number, explore=0.5) for number, n in enumerate(lengths)
    ]
    recorded = 0
    for env in range(NUM_ENVS):
        chunks = chunks_of(collected, actor, env)
        ended = assert_equal_to_a_plain_loop(chunks, Counting(env, length, has_masks=has_masks))
        played = [one for part in collected for one in part.episodes if one.env == env]
        assert [(one.return_, one.length) for one in played] == ended
        assert all(one.seed is None for one in played)
        assert [chunk.meta.chunk_no for chunk in chunks] == list(range(len(chunks)))
        for before, after in pairwise(chunks):
            assert after.meta.first_step == before.meta.first_step + before.meta.n_steps
        steps = joined_steps(chunks)["obs"]
        recorded += len(steps)
        # NEXT_STEP spends one step of the vector env on each reset; it is not recorded.
        spent = len(ended) if mode is AutoresetMode.NEXT_STEP else 0
        assert len(steps) + spent - sum(lengths) in (0, 1)
    assert sum(part.env_steps for part in collected) == recorded


@pytest.mark.parametrize("has_masks", [False, True])
def test_same_step_envs_record_the_same_rows_as_envs_that_the_actor_resets(has_masks: bool):
    recorded = {}
    for mode in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
        actor, game = actor_of(vector(mode, has_masks=has_masks))
        policy = random_policy(
            game, "epsilon_greedy", stack=3, priority=InitialPriority("n_step_td", 3, 0.9)
        )
        recorded[mode] = [
            (chunk.meta.first_step, {name: c.tobytes() for name, c in chunk.columns.items()})
            for number, n in enumerate([1, 40, 7])
            for chunk in actor.collect(policy, n, round_no=number, explore=0.4).chunks
        ]
    assert recorded[AutoresetMode.SAME_STEP] == recorded[AutoresetMode.DISABLED]


@pytest.mark.parametrize("has_masks", [False, True])
def test_next_step_envs_record_the_same_steps_as_envs_that_the_actor_resets(has_masks: bool):
    steps = {}
    for mode in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP):
        actor, game = actor_of(vector(mode, has_masks=has_masks))
        policy = random_policy(
            game, "epsilon_greedy", stack=3, priority=InitialPriority("n_step_td", 1, 0.9)
        )
        collected = [
            actor.collect(policy, n, round_no=number, deterministic=True)
            for number, n in enumerate([1, 40, 7, 60])
        ]
        steps[mode] = [
            joined_steps(chunks_of(collected, actor, env)) for env in range(actor.num_envs)
        ]
    for here, there in zip(*steps.values(), strict=True):
        assert len(here["obs"]) > len(there["obs"]) > 30
        for name, column in there.items():
            np.testing.assert_allclose(column, here[name][: len(column)], rtol=1e-6)


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_no_sampled_transition_crosses_a_reset(mode: AutoresetMode):
    actor, game = actor_of(vector(mode))
    policy = random_policy(game, "epsilon_greedy")
    replay = HostReplay(game, Transitions(batch=256, n_step=3, discount=0.5))
    n_steps = 0
    for number, n in enumerate(rounds(3_000)):
        collected = actor.collect(policy, n, round_no=number, explore=0.5)
        n_steps += collected.env_steps
        for chunk in collected.chunks:
            replay.insert(chunk)
    for session in actor.sessions:
        replay.close(session)
    assert replay.n_sampleable == n_steps
    batch = replay.draw(40, rng=np.random.default_rng(0)).batches
    env, episode, at = batch.obs["obs"].reshape(-1, 3).T
    next_env, next_episode, next_at = batch.next_obs["obs"].reshape(-1, 3).T
    discount = batch.discount.ravel()
    action = batch.action.ravel() + 1
    reward = batch.reward.ravel()
    bootstraps = discount > 0
    assert 0 < bootstraps.mean() < 1
    assert (next_env == env)[bootstraps].all()
    assert (next_episode == episode)[bootstraps].all()
    assert ((next_at > at) & (next_at <= at + 3))[bootstraps].all()
    np.testing.assert_array_equal(discount[bootstraps], 0.5 ** (next_at - at)[bootstraps])
    is_one = bootstraps & (next_at == at + 1)
    np.testing.assert_array_equal(reward[is_one], (at + 1 + action / 8)[is_one])


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_cartpole_episodes_equal_those_of_single_envs_with_the_same_seeds(mode: AutoresetMode):
    envs = gymnasium.make_vec(
        "CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    actor, game = actor_of(envs)
    policy = random_policy(game, "epsilon_greedy")
    collected = [actor.collect(policy, 500, round_no=0, explore=1.0)]
    seeds: Any = envs.np_random_seed
    for env, seed in enumerate(seeds):
        assert 0 <= seed < 2**31, "these seeds are held out"
        chunks = chunks_of(collected, actor, env)
        ended = assert_equal_to_a_plain_loop(chunks, gymnasium.make("CartPole-v1"), seed)
        assert len(ended) > 5
        played = [one for one in collected[0].episodes if one.env == env]
        assert [(one.return_, one.length) for one in played] == ended


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_nested_final_observations_are_stored(mode: AutoresetMode):
    recorded = {}
    for of in (AutoresetMode.DISABLED, mode):
        envs = SyncVectorEnv([MixedEnv] * 2, autoreset_mode=of)
        actor, game = actor_of(envs)
        collected = actor.collect(random_policy(game, "gaussian_tanh"), 60, round_no=0)
        recorded[of] = [chunks_of([collected], actor, env)[0].columns for env in range(2)]
    for columns in recorded[mode]:
        finals = columns["row"] == RowKind.FINAL
        assert finals.sum() > 2
        # Random pictures: a final one equals neither that before it nor that after it.
        pictures = columns["obs.picture"][:, 0].tolist()
        assert len({tuple(row) for row in pictures}) == len(pictures)


class Fee(VectorRewardWrapper[Any, Any, Any]):
    """Subtracts 1 from every reward, also from that of a step that only resets."""

    def rewards(self, rewards: Any) -> Any:
        return rewards - 1.0


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_the_reward_of_a_step_that_only_resets_is_ignored(mode: AutoresetMode):
    actor, game = actor_of(Fee(vector(mode, length=3)))
    collected = actor.collect(random_policy(game, "epsilon_greedy"), 40, round_no=0, explore=0.5)
    for env in range(NUM_ENVS):
        steps = joined_steps(chunks_of([collected], actor, env))
        played = [one for one in collected.episodes if one.env == env]
        np.testing.assert_array_equal(
            steps["reward"][: 3 * len(played)].reshape(-1, 3).sum(1),
            [one.return_ for one in played],
        )
        np.testing.assert_array_equal(steps["reward"], steps["obs"][:, 2] + steps["action"] / 8)


def test_a_vector_env_never_counts_on_to_seeds_that_are_held_out():
    envs: Any = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    live = LiveEnvs(envs, game_of(envs))
    live.reset([2**31 - 1] * 3)
    assert max(envs.np_random_seed) < 2**31


# --- What is rejected -----------------------------------------------------------------------------


class Changed(VectorWrapper[Any, Any, Any, Any, Any]):
    """Changes what a vector env says about itself, or what its steps return."""

    def __init__(self, env: Any, metadata: dict[str, Any], change: Callable[..., Any]) -> None:
        super().__init__(env)
        self.metadata = metadata
        self._change = change

    def step(self, actions: Any) -> Any:
        return self._change(*self.env.step(actions))


def without_finals(obs: Any, reward: Any, terminated: Any, truncated: Any, infos: Any) -> Any:
    infos.pop("final_obs", None)
    return obs, reward, terminated, truncated, infos


@pytest.mark.parametrize(
    ("mode", "said_mode", "says"),
    [
        (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP, "no final_obs"),
        (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, "ended again in the step that resets"),
        (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, "no final_obs"),
    ],
)
def test_an_env_that_does_not_reset_itself_as_its_metadata_says_is_named(
    mode: AutoresetMode, said_mode: AutoresetMode, says: str
):
    envs = Changed(vector(mode, length=1), {"autoreset_mode": said_mode}, without_finals)
    actor, game = actor_of(envs)
    with pytest.raises(GameFailed, match=rf"{says}.*metadata\['autoreset_mode'\]"):
        actor.collect(random_policy(game, "epsilon_greedy"), 5, round_no=0, explore=0.0)


def test_only_the_observations_of_all_envs_at_once_are_accepted():
    class Half(VectorWrapper[Any, Any, Any, Any, Any]):
        def reset(self, **options: Any) -> Any:
            obs, infos = self.env.reset(**options)
            return obs[:2], infos

    envs = Half(vector(AutoresetMode.NEXT_STEP))
    actor, game = actor_of(envs, game_of(vector(AutoresetMode.NEXT_STEP), name="counting"))
    with pytest.raises(ConfigError, match=r"2 of its 5 envs.*batch_size"):
        actor.collect(random_policy(game, "epsilon_greedy"), 5, round_no=0, explore=0.0)


@pytest.mark.parametrize("metadata", [{}, {"autoreset_mode": "NextStep"}])
def test_a_vector_env_that_does_not_tell_how_it_resets_is_rejected(metadata: dict[str, Any]):
    envs = Changed(vector(AutoresetMode.NEXT_STEP), metadata, without_finals)
    with pytest.raises(ConfigError, match=r"Changed.*metadata.*AutoresetMode"):
        make_envs(envs, NUM_ENVS, may_autoreset=True)


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_evaluations_and_saved_states_need_envs_that_the_caller_resets(mode: AutoresetMode):
    envs = vector(mode)
    actor, game = actor_of(envs)
    policy = random_policy(game, "epsilon_greedy")
    with pytest.raises(ConfigError, match=r"resets itself.*AutoresetMode\.DISABLED"):
        evaluate(policy, envs, seeds=[1, 2])
    actor.collect(policy, 5, round_no=0, explore=0.0)
    with pytest.raises(ConfigError, match=r"resets itself.*AutoresetMode\.DISABLED"):
        actor.state()


# --- Vector envs as games -------------------------------------------------------------------------


def make_counting(num_envs: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return SyncVectorEnv([partial(Counting, n) for n in range(num_envs)], autoreset_mode=mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_function_of_num_envs_creates_the_vector_env(mode: AutoresetMode):
    envs = make_envs(partial(make_counting, mode=mode), 3, may_autoreset=True)
    assert envs.num_envs == 3
    assert envs.metadata["autoreset_mode"] is mode
    with warnings.catch_warnings(action="ignore"):
        cartpole = make_envs(
            partial(gymnasium.make_vec, "CartPole-v1"),
            2,
            env_kwargs={"vectorization_mode": "vector_entry_point"},
            may_autoreset=True,
        )
    assert type(cartpole).__name__ == "CartPoleVectorEnv"


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        (make_counting, {}, r"resets its envs itself .*AutoresetMode\.DISABLED"),
        (lambda num_envs: Counting(num_envs), {}, "returned a Counting.*VectorEnv"),
        (lambda num_envs: make_counting(num_envs + 1), {}, "has 3 envs, and 2 were requested"),
        (make_counting, {"frame_skip": 2}, "where you create it"),
        (make_counting, {"wrappers": ["tests.act.test_vector:Halved"]}, "where you create it"),
    ],
)
def test_vector_envs_that_do_not_fit_are_rejected(game: Any, settings: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        make_envs(game, 2, may_autoreset=bool(settings) or game is not make_counting, **settings)


# --- Single envs like those of a vector env -------------------------------------------------------


def test_the_single_game_of_a_vector_env_has_its_changes_limits_and_arguments():
    envs: Any = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    envs.envs[0].unwrapped.gravity = 99.0
    copied: Any = make_envs(single_game(envs), 1)
    assert copied.envs[0].unwrapped.gravity == 99.0
    entry_point: Any = gymnasium.make_vec(
        "CartPole-v1",
        2,
        vectorization_mode="vector_entry_point",
        max_episode_steps=7,
        sutton_barto_reward=True,
    )
    created: Any = make_envs(single_game(entry_point), 1)
    assert created.envs[0].spec.max_episode_steps == 7
    assert created.envs[0].unwrapped._sutton_barto_reward


def test_where_an_env_cannot_be_copied_the_single_game_is_that_of_its_spec(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Held-v0", entry_point="tests.act.test_vector:Held")
    envs = gymnasium.make_vec("Held-v0", 2, vectorization_mode="sync", pull=3.0)
    envs.reset(seed=1)
    created: Any = make_envs(single_game(envs), 1)
    assert created.envs[0].unwrapped.pull == 3.0


def test_wrappers_that_a_spec_does_not_have_are_not_left_out_silently():
    envs: Any = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="async", wrappers=[Halved])
    try:
        with pytest.raises(ConfigError, match=r"does not have its wrappers.*'sync'"):
            single_game(envs)
    finally:
        envs.close()
