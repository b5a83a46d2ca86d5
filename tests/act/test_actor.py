"""An actor returns the same steps as a plain loop over the envs."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv
from tests.act.policies import random_policy
from tests.experience.trajectories import joined, walked
from understudy.act.actor import Actor
from understudy.act.chance import episode_seeds, episode_starts
from understudy.act.vector import game_of, make_envs, obs_splitter
from understudy.core.errors import ConfigError, GameFailed, Refused
from understudy.core.names import session_time_s
from understudy.experience.chunk import By, Chunk, RowKind, decode_chunk
from understudy.experience.game import GameSpec
from understudy.ingest.check import check_against_spec
from understudy.nn.policy import InitialPriority, Policy
from understudy.ports import Collected

CREATED_MS = 1_700_000_000_000
KINDS = [
    (PlainEnv, "epsilon_greedy"),
    (PlainEnv, "categorical"),
    (MaskedEnv, "epsilon_greedy"),
    (MaskedEnv, "categorical"),
    (MixedEnv, "gaussian_clipped"),
    (MixedEnv, "gaussian_tanh"),
]


def actor_of(make: Any, num_envs: int = 3, **settings: Any) -> tuple[Actor, GameSpec]:
    envs = make_envs(make, num_envs)
    game = game_of(envs)
    return Actor(envs, game, root_seed=5, created_ms=CREATED_MS, **settings), game


def collect(
    actor: Actor, policy: Policy, rounds: list[int], first_round: int = 0
) -> list[Collected]:
    explore = np.linspace(0.1, 0.6, actor.num_envs, dtype=np.float32)
    return [
        actor.collect(policy, n, round_no=first_round + i, explore=explore)
        for i, n in enumerate(rounds)
    ]


def by_env(collected: list[Collected], actor: Actor) -> list[list[Chunk]]:
    return [
        [chunk for one in collected for chunk in one.chunks if chunk.meta.session == s]
        for s in actor.sessions
    ]


def flat(game: GameSpec, obs: Any) -> dict[str, Any]:
    return {name: np.asarray(part)[0] for name, part in obs_splitter(game)(_batched(obs)).items()}


def _batched(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {key: _batched(part) for key, part in obs.items()}
    return (
        tuple(_batched(part) for part in obs) if isinstance(obs, tuple) else np.asarray(obs)[None]
    )


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_chunks_equal_the_steps_of_a_plain_loop(make: Any, kind: str):
    actor, game = actor_of(make)
    collected = collect(actor, random_policy(game, kind), [7, 1, 40, 12])
    for env, chunks in enumerate(by_env(collected, actor)):
        rows = replay_by_hand(make(), game, chunks, env)
        done = [one for part in collected for one in part.episodes if one.env == env]
        assert [(one.length, one.seed) for one in done] == [
            (length, seed) for _, length, seed in rows
        ]
        np.testing.assert_allclose([one.return_ for one in done], [total for total, _, _ in rows])
    assert [one.env_steps for one in collected] == [21, 3, 120, 36]
    assert sum(len(one.episodes) for one in collected) > 5


def replay_by_hand(
    env: Any, game: GameSpec, chunks: list[Chunk], index: int
) -> list[tuple[float, int, int]]:
    """Check every row against the env; yields return, length and seed of each ended episode."""
    episodes: list[tuple[float, int, int]] = []
    rewards: list[float] = []
    seed = -1
    obs = None
    info = {}
    starts = episode_starts(5, first_env=index, num_envs=1)
    for chunk in chunks:
        columns = chunk.columns
        notes = {note.row: note for note in chunk.meta.episodes}
        for row in range(chunk.n_rows):
            kind = columns["row"][row]
            if columns["is_first"][row]:
                seed = int(episode_seeds(starts, np.array([len(episodes)]), n=1)[0, 0])
                (obs, info), rewards = env.reset(seed=seed), []
            if row in notes:
                assert notes[row].seed == seed
            for name, value in flat(game, obs).items():
                assert columns[name][row].tobytes() == value.astype(columns[name].dtype).tobytes()
            if game.has_action_mask:
                assert (
                    columns["action_mask"][row].tolist()
                    == info["action_mask"].astype(bool).tolist()
                )
            if kind == RowKind.STEP:
                action = columns["action"][row]
                obs, reward, terminated, truncated, info = env.step(action)
                assert columns["reward"][row] == np.float32(reward)
                assert (columns["terminated"][row], columns["truncated"][row]) == (
                    terminated,
                    truncated,
                )
                rewards.append(float(reward))
                if terminated or truncated:
                    episodes.append((sum(rewards), len(rewards), seed))
    return episodes


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_chunks_are_valid_and_survive_encoding_unchanged(make: Any, kind: str):
    actor, game = actor_of(make)
    chunks = [
        chunk for one in collect(actor, random_policy(game, kind), [600, 5]) for chunk in one.chunks
    ]
    assert len(chunks) == 3 * 3
    for chunk in chunks:
        chunk.validate()
        assert decode_chunk(chunk.encode()) == chunk
        check_against_spec(chunk, game)
        assert (chunk.meta.kind, chunk.meta.consent) == ("actor", "granted")
        is_step = chunk.columns["row"] == RowKind.STEP
        assert (chunk.columns["version"] == np.where(is_step, 3, 0)).all()
        assert (chunk.columns["by"] == np.where(is_step, By.BOT, 0)).all()
        assert ("raw_action" in chunk.columns) == (make is MixedEnv)


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_logp_and_raw_action_are_the_policys_own(make: Any, kind: str):
    actor, game = actor_of(make, 2)
    policy = random_policy(game, kind)
    for env, chunk in enumerate(collect(actor, policy, [50])[0].chunks):
        columns = chunk.columns
        steps = columns["row"] == RowKind.STEP
        obs = {name: columns[name][steps] for name in game.obs_columns}
        action_mask = columns["action_mask"][steps] if game.has_action_mask else None
        outputs = policy.outputs(obs)
        if kind == "epsilon_greedy":
            epsilon = np.float32([0.1, 0.6][env])
            best = policy.head.sample(
                outputs, None, action_mask=action_mask, deterministic=True
            ).action
            n_valid = game.discrete.n if action_mask is None else action_mask.sum(1)  # type: ignore[union-attr]
            is_best = columns["action"][steps] - game.discrete.start == best  # type: ignore[union-attr]
            np.testing.assert_allclose(
                columns["logp"][steps],
                np.log(epsilon / n_valid + (1 - epsilon) * is_best),
                1e-4,
                1e-6,
            )
        elif kind != "categorical":
            raw = columns["raw_action"][steps].reshape(-1, policy.head.size)
            given = policy.head.action_of(raw.astype(np.float32)).reshape(-1, 2, 2)
            np.testing.assert_allclose(columns["action"][steps], given, rtol=1e-5)
            noise = (raw - outputs["mean"]) / np.exp(outputs["log_std"])
            logp = (-0.5 * noise**2 - outputs["log_std"] - 0.5 * np.log(2 * np.pi)).sum(1)
            np.testing.assert_allclose(columns["logp"][steps], logp, rtol=1e-3, atol=1e-3)


def test_sessions_and_numbers_continue_from_collect_to_collect():
    actor, game = actor_of(PlainEnv)
    collected = collect(actor, random_policy(game, "categorical"), [5, 1100, 3])
    assert len(set(actor.sessions)) == 3
    for session, chunks in zip(actor.sessions, by_env(collected, actor), strict=True):
        assert (session.version, session_time_s(session)) == (7, CREATED_MS / 1000)
        assert [chunk.meta.chunk_no for chunk in chunks] == [0, 1, 2, 3, 4]
        assert [chunk.meta.first_step for chunk in chunks] == [0, 5, 517, 1029, 1105]
        assert [chunk.meta.n_steps for chunk in chunks] == [5, 512, 512, 76, 3]
        assert len(joined([chunk.columns for chunk in chunks])["row"]) == 1108 + sum(
            int((chunk.columns["row"] == RowKind.FINAL).sum()) for chunk in chunks
        ) + int(chunks[-1].columns["row"][-1] == RowKind.BOOTSTRAP)


def test_an_actor_is_a_function_of_its_seed_and_rounds():
    first, second = (collect(actor_of(MaskedEnv)[0], policy_for_masks(), [20, 9]) for _ in range(2))
    assert [one.chunks for one in first] == [one.chunks for one in second]
    later = actor_of(MaskedEnv, incarnation=1)[0]
    other = collect(later, policy_for_masks(), [20, 9])
    assert (
        other[0].chunks[0].columns["obs"].tobytes() != first[0].chunks[0].columns["obs"].tobytes()
    )
    assert other[0].chunks[0].meta.session != first[0].chunks[0].meta.session
    shifted = collect(actor_of(MaskedEnv, env_index0=3)[0], policy_for_masks(), [20])
    assert {one.env for one in shifted[0].episodes} <= {3, 4, 5}
    assert (
        shifted[0].chunks[0].columns["obs"][0].tobytes()
        != first[0].chunks[0].columns["obs"][0].tobytes()
    )


def policy_for_masks() -> Policy:
    return random_policy(game_of(make_envs(MaskedEnv, 1)), "categorical")


def test_rounds_differ_in_their_noise():
    plain = [actor_of(PlainEnv) for _ in range(2)]
    policy = random_policy(plain[0][1], "categorical")
    first, second = (
        collect(actor, policy, [30], first_round=at)[0] for at, (actor, _) in enumerate(plain)
    )
    assert (
        first.chunks[0].columns["action"].tobytes() != second.chunks[0].columns["action"].tobytes()
    )


def test_deterministic_play_takes_the_best_action():
    actor, game = actor_of(MaskedEnv)
    policy = random_policy(game, "categorical")
    for chunk in actor.collect(policy, 30, round_no=0, deterministic=True).chunks:
        steps = chunk.columns["row"] == RowKind.STEP
        obs = {"obs": chunk.columns["obs"][steps]}
        action_mask = chunk.columns["action_mask"][steps]
        best = np.where(action_mask, policy.outputs(obs)["logits"], -np.inf).argmax(1)
        assert (chunk.columns["action"][steps] + 1 == best).all()


class LateMaskEnv(MaskedEnv):
    """Has an action mask only from its first step on."""

    def check(self, action: Any) -> None: ...

    def info(self) -> dict[str, Any]:
        return super().info() if self.n_steps else {}


def test_a_mask_that_the_first_reset_did_not_have_is_an_error():
    actor, game = actor_of(LateMaskEnv)
    with pytest.raises(
        ConfigError,
        match="LateMaskEnv has an action_mask, but the info of its first reset had none",
    ):
        collect(actor, random_policy(game, "categorical"), [20])


@pytest.mark.parametrize("make", [PlainEnv, MaskedEnv])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_first_priorities_are_the_n_step_errors_of_the_chunk(make: Any, n: int):
    actor, game = actor_of(make)
    policy = random_policy(game, "epsilon_greedy", priority=InitialPriority("n_step_td", n, 0.9))
    assert game.discrete is not None
    for chunk in [chunk for one in collect(actor, policy, [30, 4, 1]) for chunk in one.chunks]:
        columns = chunk.columns
        q = policy.outputs({"obs": columns["obs"]})["q"]
        best = (
            np.where(columns["action_mask"], q, -np.inf).max(1)
            if game.has_action_mask
            else q.max(1)
        )
        for start in np.flatnonzero(columns["row"] == RowKind.STEP).tolist():
            returns, factor, following = walked(columns, start, n=n, discount=0.9)
            target = returns + (factor * best[following] if factor else 0.0)
            taken = q[start, columns["action"][start] - game.discrete.start]
            assert columns["priority"][start] == pytest.approx(
                abs(target - taken), rel=1e-4, abs=1e-5
            )
        assert (columns["priority"][columns["row"] != RowKind.STEP] == 0).all()


def test_frame_stacks_equal_windows_of_the_observations():
    actor, game = actor_of(PlainEnv)
    policy = random_policy(
        game, "epsilon_greedy", stack=3, priority=InitialPriority("n_step_td", 1, 0.9)
    )
    collected = collect(actor, policy, [10, 3, 25])
    for chunks in by_env(collected, actor):
        frames: list[Any] = []
        for chunk in chunks:
            columns = chunk.columns
            values = []
            for row in range(chunk.n_rows):
                if columns["is_first"][row]:
                    frames = [columns["obs"][row]] * 3
                elif row > 0:
                    frames = [*frames[1:], columns["obs"][row]]
                values.append(policy.outputs({"obs": np.stack(frames)[None]})["q"][0])
            step = np.flatnonzero(columns["row"] == RowKind.STEP)
            q = np.array(values)
            after = np.where(columns["terminated"][step], 0, q[step + 1].max(1))
            error = columns["reward"][step] + 0.9 * after - q[step, columns["action"][step] - 2]
            np.testing.assert_allclose(
                columns["priority"][step], np.abs(error), rtol=1e-4, atol=1e-5
            )


def test_large_observations_are_cut_into_chunks_below_the_size_limit():
    class Pictures(PlainEnv):
        observation_space: Any = spaces.Box(0, 255, (84, 84), np.uint8)

        def observe(self) -> Any:
            return self.np_random.integers(256, size=(84, 84)).astype(np.uint8)

    actor, game = actor_of(Pictures, 1)
    chunks = actor.collect(random_policy(game, "epsilon_greedy"), 150, round_no=0).chunks
    assert sum(chunk.meta.n_steps for chunk in chunks) == 150
    assert all(len(chunk.frame().body) <= 448 * 1024 for chunk in chunks)


def test_actions_that_actors_cannot_play_are_rejected():
    actor, game = actor_of(PlainEnv)
    with pytest.raises(ConfigError, match="at least 1"):
        actor.collect(random_policy(game, "categorical"), 0, round_no=0)
    with pytest.raises(ConfigError, match="a policy with the spaces of this actor's game PlainEnv"):
        actor.collect(policy_for_masks(), 1, round_no=0)
    with pytest.raises(ConfigError, match="need a head 'q'"):
        actor.collect(random_policy(game, "categorical", priority=InitialPriority()), 1, round_no=0)


def test_an_env_that_allows_nothing_is_named():
    class Stuck(MaskedEnv):
        def info(self) -> dict[str, Any]:
            return {"action_mask": self.mask * (self.n_steps < 3)}

    actor, game = actor_of(Stuck, 2)
    with pytest.raises(ConfigError, match=r"env \d of Stuck allows no action"):
        actor.collect(random_policy(game, "categorical"), 50, round_no=0)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("kind", ["epsilon_greedy", "categorical"])
def test_invalid_numbers_are_in_the_chunks_for_the_replay_to_reject(odd: float, kind: str):
    class Odd(PlainEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, *rest = super().step(action)
            return obs * np.float32(odd), reward * odd * odd, *rest

    actor, game = actor_of(Odd)
    priority = InitialPriority() if kind == "epsilon_greedy" else None
    for chunk in collect(actor, random_policy(game, kind, priority=priority), [20])[0].chunks:
        with pytest.raises(Refused, match="not_finite"):
            chunk.validate()


def test_actions_of_a_wider_type_stay_inside_the_box():
    class Wide(PlainEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-0.1, 0.1, (2,), np.float64)  # type: ignore[assignment]

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            assert self.action_space.contains(np.asarray(action)), action
            return super().step(action)

    actor, game = actor_of(Wide)
    chunks = actor.collect(random_policy(game, "gaussian_clipped"), 40, round_no=0).chunks
    assert all(np.abs(chunk.columns["action"]).max() <= 0.1 for chunk in chunks)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (ValueError("the engine died"), "the engine died"),
        (None, "env 0 of Failing returned an 'obs' of object"),
        (np.zeros(7, np.float32), r"an 'obs' of float32\[7\] in step\(\), not of float32\[3\]"),
    ],
    ids=["raises", "nothing", "another shape"],
)
def test_the_error_of_a_failing_env_names_the_env_and_its_cause(gives: Any, said: str):
    class Failing(PlainEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if isinstance(gives, Exception):
                raise gives
            return gives, 0.0, False, False, {}

    actor, game = actor_of(Failing)
    with pytest.raises(GameFailed, match=said) as caught:
        actor.collect(random_policy(game, "categorical"), 5, round_no=0)
    assert caught.value.__cause__ is not None
    assert "Failing" in str(caught.value)
