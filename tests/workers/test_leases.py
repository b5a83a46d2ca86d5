"""What the bytes of a round may contain, and cost, before they are checked against its lease."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.workers.runs import SPEC, team_plan
from understudy.act.actor import Actor
from understudy.act.team import encode_collected
from understudy.act.vector import game_of, make_envs
from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.clock import SystemClock
from understudy.core.errors import Refused
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.game import GameSpec
from understudy.ports import Collected
from understudy.workers.leases import Leases, check_round, read_round


class Bandit(gymnasium.Env[Any, Any]):
    """Each episode has one step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Wide(Bandit):
    observation_space = gymnasium.spaces.Box(-1, 1, (600,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(600, np.float32), {}


def empty_columns(names: list[str], *, n_chunks: int) -> bytes:
    """A round whose columns have rows, but no bytes."""
    columns = {f"column.{name}": np.zeros((2 * n_chunks, 0), np.uint8) for name in names}
    arrays = {
        **columns,
        "rows": np.full(n_chunks, 2),
        "sessions": np.zeros((n_chunks, 16), np.uint8),
        "numbers": np.zeros((n_chunks, 3), np.int64),
        "returns": np.zeros(0),
        "episodes": np.zeros((0, 3), np.int64),
    }
    facts = {"shared": {"game": "g", "schema": "s"}, "notes": [[]] * n_chunks, "env_steps": 1}
    return tensors.encode(arrays, {"collected": canonical_json(facts).decode()})


@pytest.mark.parametrize(
    ("names", "n_chunks", "reason"),
    [([f"a{number}" for number in range(500)], 64, "bad_columns"), (["obs"], 3_000, "bad_rows")],
    ids=["columns", "chunks"],
)
def test_columns_without_bytes_are_rejected_before_they_are_cut_into_chunks(
    monkeypatch: pytest.MonkeyPatch, names: list[str], n_chunks: int, reason: str
):
    def cut(*arguments: Any) -> Collected:
        raise AssertionError("the columns were cut")

    monkeypatch.setattr("understudy.workers.leases.collected_of", cut)
    with pytest.raises(Refused) as caught:
        read_round(empty_columns(names, n_chunks=n_chunks), game=SPEC, max_steps=64)
    assert caught.value.reason == reason


def test_a_round_of_many_episodes_of_one_step_is_read():
    n_envs = 32
    steps = 800
    envs = make_envs(Bandit, n_envs)
    game = game_of(envs, name="bandit")
    actor = Actor(envs, game, root_seed=1, created_ms=1_700_000_000_000)
    policy = random_policy(game, "epsilon_greedy", seed=1, version=1)
    raw = encode_collected(actor.collect(policy, steps, round_no=0, explore=0.5))
    assert read_round(raw, game=game, max_steps=steps * n_envs).env_steps == steps * n_envs


def test_a_chunk_that_does_not_fit_into_a_frame_is_rejected():
    """The run's store could not keep it, and the run would end at its next checkpoint."""
    game = game_of(make_envs(Wide, 1), name="wide")
    lease = Leases(
        team_plan(game=game, num_envs=1, num_actors=1), lease_s=30.0, clock=SystemClock()
    ).join(version=1)
    for n_steps, is_too_large in ((128, False), (512, True)):
        chunk = chunk_of_noise(game, lease.sessions[0], n_steps)
        raw = encode_collected(Collected([chunk], [], n_steps))
        played = read_round(raw, game=game, max_steps=512)
        if is_too_large:
            with pytest.raises(Refused, match="too_large"):
                check_round(played, lease, game, newest=1)
        else:
            check_round(played, lease, game, newest=1)


def chunk_of_noise(game: GameSpec, session: Any, n_steps: int) -> Chunk:
    n_rows = n_steps + 1
    is_step = np.arange(n_rows) < n_steps
    meta = ChunkMeta(
        game=game.game,
        schema=game.schema,
        session=session,
        chunk_no=0,
        first_step=0,
        n_steps=n_steps,
        kind="actor",
        consent="granted",
        episodes=(EpisodeNote(row=0),),
    )
    columns = {
        "obs": np.random.default_rng(0).random((n_rows, 600), np.float32),
        "action": np.zeros(n_rows, game.action_columns["action"].dtype),
        "reward": np.zeros(n_rows, np.float32),
        "terminated": np.zeros(n_rows, np.bool_),
        "truncated": np.zeros(n_rows, np.bool_),
        "is_first": np.arange(n_rows) == 0,
        "row": np.where(is_step, RowKind.STEP, RowKind.BOOTSTRAP).astype(np.uint8),
        "version": is_step.astype(np.uint32),
    }
    return Chunk(meta, columns)
