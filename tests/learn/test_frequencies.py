"""How often each of a million rows is drawn, after a million mixed inserts, evictions and
updates."""

import numpy as np
import pytest

from tests.learn.sessions import GAME, session_id
from understudy.algorithm import Transitions
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote
from understudy.learn.replay import HostReplay
from understudy.replay import ReplayConfig

N_STEPS = 512
ALPHA = 0.6


def chunk(number: int, priority: np.ndarray) -> Chunk:
    """512 steps whose observations are numbers that no other chunk has."""
    n_rows = N_STEPS + 1
    ids = number * N_STEPS + np.arange(n_rows)
    flags = {name: np.zeros(n_rows, np.bool_) for name in ("is_first", "terminated", "truncated")}
    columns = {
        "obs": np.stack([ids, ids], axis=1).astype(np.float32),
        "action": np.zeros(n_rows, np.int32),
        "reward": np.zeros(n_rows, np.float32),
        "row": np.r_[np.zeros(N_STEPS, np.uint8), np.uint8(2)],
        "priority": priority,
        **flags,
    }
    meta = ChunkMeta(
        game=GAME.game,
        schema=GAME.schema,
        session=session_id(number),
        chunk_no=1,
        first_step=0,
        n_steps=N_STEPS,
        episodes=(EpisodeNote(row=0),),
    )
    return Chunk(meta, columns)


def worked(*, prioritised: bool) -> tuple[HostReplay, np.ndarray]:
    """A replay of 2^20 rows with a past, and the priority each step should have by now (0:
    gone)."""
    rng = np.random.default_rng(0)
    held = HostReplay(
        GAME,
        Transitions(batch=512, prioritised=prioritised),
        ReplayConfig(capacity=1 << 20, alpha=ALPHA),
    )
    n_chunks = 2_200
    wanted = np.zeros(n_chunks * N_STEPS)
    for number in range(n_chunks):
        priority = rng.gamma(1.0, size=N_STEPS + 1).astype(np.float32)
        wanted[number * N_STEPS :][:N_STEPS] = np.maximum(priority[:-1], 1e-6)
        held.insert(chunk(number, priority))
        if number % 4 == 0:
            drawn = held.draw(4, rng=rng)
            updated = rng.gamma(1.0, size=drawn.rows.shape)
            held.feedback(drawn.rows, drawn.stamps, updated)
            wanted[drawn.batches.obs["obs"][..., 0].astype(int).ravel()] = np.maximum(
                updated.ravel(), 1e-6
            )
        if number % 50 == 49:
            gone = int(rng.integers(max(0, number - 1_000), number))
            if held.evict(session_id(gone), 1):
                wanted[gone * N_STEPS :][:N_STEPS] = 0
    spans = (1 << 20) // (N_STEPS + 16)
    wanted[: (n_chunks - spans) * N_STEPS] = 0  # the ring took their place
    return held, wanted if prioritised else (wanted > 0).astype(np.float64)


@pytest.mark.parametrize("prioritised", [True, False])
def test_rows_are_drawn_as_often_as_their_masses_say(prioritised):
    held, wanted = worked(prioritised=prioritised)
    assert held.n_sampleable == np.count_nonzero(wanted)
    rng = np.random.default_rng(1)
    counts = np.zeros(len(wanted))
    for _ in range(64):
        ids = held.draw(64, rng=rng).batches.obs["obs"][..., 0].astype(np.int64)
        counts += np.bincount(ids.ravel(), minlength=len(wanted))
    assert counts[wanted == 0].sum() == 0
    due = wanted**ALPHA / (wanted**ALPHA).sum() * counts.sum()
    by_place = due.reshape(-1, 32).sum(axis=1), counts.reshape(-1, 32).sum(axis=1)
    order = np.argsort(due, kind="stable")
    by_mass = (
        due[order].reshape(-1, 1_024).sum(axis=1),
        counts[order].reshape(-1, 1_024).sum(axis=1),
    )
    for expected, got in (by_place, by_mass):
        expected, got = expected[expected > 0], got[expected > 0]
        freedom = len(expected) - 1
        chi_square = ((got - expected) ** 2 / expected).sum()
        assert chi_square < freedom + 5 * np.sqrt(2 * freedom)  # five standard deviations
