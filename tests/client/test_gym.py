"""Wrapped envs behave as before, and the recorded steps equal those of a plain loop."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.fakes import MemoryLink, Transition, as_bytes, chunks, client, episodes
from understudy.client.gym import RecordedVectorEnv, record, record_vector
from understudy.core.errors import ConfigError
from understudy.experience.game import spec_from_gymnasium


class Script(gymnasium.Env[Any, Any]):
    """Plays episodes of set lengths and ends; observations encode their origin in one buffer."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = spaces.Discrete(4)

    def __init__(
        self, lengths: list[int], is_truncated: list[bool], number: int = 0, *, reuses: bool = True
    ) -> None:
        self.lengths = lengths
        self.is_truncated = is_truncated
        self.number = number
        self.reuses = reuses
        self.episode = -1
        self.at = 0
        self._buffer: dict[str, np.ndarray] = {
            "where": np.zeros(3, np.float32),
            "pixels": np.zeros((2, 2), np.uint8),
        }

    def _obs(self) -> dict[str, np.ndarray]:
        self._buffer["where"][:] = (self.number, self.episode, self.at)
        self._buffer["pixels"][:] = (self.number * 64 + self.episode * 8 + self.at) % 256
        return self._buffer if self.reuses else copy(self._buffer)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode = self.episode + 1
        self.at = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        which = self.episode % len(self.lengths)
        is_over = self.at >= self.lengths[which]
        reward = float(self.at * 10 + int(action))
        return (
            self._obs(),
            reward,
            is_over and not self.is_truncated[which],
            is_over and self.is_truncated[which],
            {},
        )


def plain(env: Any, actions: np.ndarray) -> list[list[Transition]]:
    """Return the transitions that a plain loop over one env sees."""
    found: list[list[Transition]] = []
    obs = copy(env.reset()[0])
    found.append([])
    for action in actions:
        after, reward, terminated, truncated, _ = env.step(action)
        after = copy(after)
        found[-1].append(
            Transition(
                as_bytes(obs),
                (np.int32(action).tobytes(),),
                reward,
                as_bytes(after),
                terminated,
                truncated,
            )
        )
        obs = after
        if terminated or truncated:
            obs = copy(env.reset()[0])
            found.append([])
    return [steps for steps in found if steps]


def copy(obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in obs.items()}


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(LENGTHS, min_size=1, max_size=3),
    mode=st.sampled_from(list(AutoresetMode)),
    n_steps=st.integers(1, 30),
    seed=st.integers(0, 2**16),
    copies=st.booleans(),
)
def test_a_vector_env_in_each_autoreset_mode_equals_a_plain_loop(
    scripts, mode, n_steps, seed, copies
):
    def make(number: int) -> Script:
        # In SAME_STEP mode, Gymnasium itself does not copy the final observation.
        reuses = mode is not AutoresetMode.SAME_STEP
        return Script(
            [n for n, _ in scripts[number]],
            [cut for _, cut in scripts[number]],
            number,
            reuses=reuses,
        )

    rng = np.random.default_rng(seed)
    link = MemoryLink()
    taken: list[list[int]] = [[] for _ in scripts]
    with TemporaryDirectory() as folder:
        env = SyncVectorEnv(
            [partial(make, n) for n in range(len(scripts))], autoreset_mode=mode, copy=copies
        )
        game = client(link, Path(folder), game=spec_from_gymnasium(env, game="script"))
        recorded = record_vector(env, game)
        drive(recorded, mode, n_steps, rng, taken)
        recorded.close()
        game.close()
    stored = {e[0][0].obs: e for e in (episodes(frames) for frames in link.by_session().values())}
    for number, actions in enumerate(taken):
        true = plain(make(number), np.array(actions))
        assert stored[true[0][0].obs] == true


def drive(
    env: RecordedVectorEnv, mode: AutoresetMode, n_steps: int, rng: Any, taken: list[list[int]]
) -> None:
    """Step with random actions and note which of them each env executed."""
    env.reset()
    over = np.zeros(env.num_envs, np.bool_)
    for _ in range(n_steps):
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over.copy()})
            over[:] = False
        actions = rng.integers(0, 4, env.num_envs)
        for number, action in enumerate(actions):
            if not (mode is AutoresetMode.NEXT_STEP and over[number]):
                taken[number].append(int(action))
        _, _, terminations, truncations, _ = env.step(actions)
        over = terminations | truncations


def test_cartpole_is_recorded_in_one_line_and_behaves_as_before(tmp_path):
    link = MemoryLink()
    spec_env = gymnasium.make("CartPole-v1")
    game = client(link, tmp_path, game=spec_from_gymnasium(spec_env))
    env = record(gymnasium.make("CartPole-v1"), game, by="script")
    twin = gymnasium.make("CartPole-v1")
    seen: list[tuple[np.ndarray, int, float, np.ndarray, bool, bool]] = []
    rng = np.random.default_rng(3)
    for seed in range(4):
        obs, _ = env.reset(seed=seed)
        assert np.array_equal(obs, twin.reset(seed=seed)[0])
        is_over = False
        while not is_over:
            action = rng.integers(2)
            after, reward, terminated, truncated, _ = env.step(action)
            assert np.array_equal(after, twin.step(action)[0])
            seen.append((obs, int(action), float(reward), after, terminated, truncated))
            obs = after
            is_over = terminated or truncated
    env.close()
    game.close()
    (frames,) = link.by_session().values()
    assert [one for episode in episodes(frames) for one in episode] == [
        Transition((s.tobytes(),), (np.int32(a).tobytes(),), r, (n.tobytes(),), te, tr)
        for s, a, r, n, te, tr in seen
    ]
    notes = [note for chunk in chunks(frames) for note in chunk.meta.episodes]
    assert [note.seed for note in notes] == [0, 1, 2, 3]
    assert set(chunks(frames)[0].columns["by"]) == {3, 0}


def test_an_env_reset_in_mid_episode_loses_no_step(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path, game=spec_from_gymnasium(Script([9], [False]), game="script"))
    env = record(Script([9], [False]), game)
    for _ in range(2):
        env.reset()
        for _ in range(3):
            env.step(1)
    env.close()
    game.close()
    (frames,) = link.by_session().values()
    assert [len(episode) for episode in episodes(frames)] == [3, 3]
    assert [note.cut for chunk in chunks(frames) for note in chunk.meta.episodes] == [True, True]


class Masked(Script):
    """Has an action mask in its infos."""

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset()[0], {"action_mask": np.array([True, False, True, False])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return (*super().step(action)[:4], {"action_mask": np.array([False, True, False, True])})


def test_action_masks_from_info_are_recorded(tmp_path):
    link = MemoryLink()
    spec = spec_from_gymnasium(Masked([2], [False]), game="masked", has_action_mask=True)
    game = client(link, tmp_path, game=spec)
    env = record(Masked([2], [False]), game)
    env.reset()
    env.step(2)
    env.step(3)
    env.close()
    game.close()
    (frames,) = link.by_session().values()
    assert chunks(frames)[0].columns["action_mask"].tolist() == [
        [True, False, True, False],
        [False, True, False, True],
        [False, True, False, True],
    ]


def test_settings_for_a_connected_game_are_rejected(tmp_path):
    game = client(
        MemoryLink(), tmp_path, game=spec_from_gymnasium(Script([1], [False]), game="script")
    )
    with pytest.raises(ConfigError, match="consent"):
        record(Script([1], [False]), game, consent="granted")
    game.close()


def test_a_tuple_space_is_flattened(tmp_path):
    class Pair(gymnasium.Env[Any, Any]):
        observation_space = spaces.Tuple((spaces.Discrete(5), spaces.Box(0, 1, (2,), np.float64)))
        action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)))

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return (3, np.array([0.1, 0.2])), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (4, np.array([0.3, 0.4])), 1.0, True, False, {}

    link = MemoryLink()
    game = client(link, tmp_path, game=spec_from_gymnasium(Pair(), game="pair"))
    env = record(Pair(), game)
    env.reset()
    env.step((np.int64(2), np.array([0.5], np.float32)))
    env.close()
    game.close()
    (frames,) = link.by_session().values()
    columns = chunks(frames)[0].columns
    assert columns["obs.0"].tolist() == [3, 4]
    assert columns["obs.1"].dtype == np.float64
    assert columns["obs.1"].tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert (columns["action.0"][0], columns["action.1"].tolist()[0]) == (2, [0.5])
