"""The device form against the host form: the same rows, the same masses, the same distribution."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.profiles import sizes
from tests.learn.sessions import DISCOUNT, GAME, deliveries, session_id
from tests.learn.test_replay_state import Stored, assert_equal, piece, through_a_file
from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box
from understudy.learn import device_replay
from understudy.learn.device_replay import (
    NO_ROW,
    DeviceReplay,
    empty_levels,
    find,
    levels_of,
    set_leaves,
)
from understudy.learn.replay import HostReplay
from understudy.replay import ReplayConfig


def needs(**more: Any) -> Transitions:
    return Transitions(**{"batch": 8, "discount": DISCOUNT, "prioritised": True, **more})


def masses_of(held: DeviceReplay) -> Any:
    return np.asarray(held.ring.levels[0])


@pytest.mark.parametrize(
    "wanted", [needs(n_step=3, stack=2), needs(prioritised=False), needs(n_step=2, stack=4)]
)
def test_the_same_chunks_have_the_same_rows_and_masses_as_on_the_host(wanted):
    config = ReplayConfig(capacity=192)
    host = HostReplay(GAME, wanted, config)
    device = DeviceReplay(GAME, wanted, config)

    shifts = itertools.count(10, 10)

    @settings(max_examples=12, deadline=None)
    @given(deliveries(), st.integers(0, 5))
    def check(order, evicted):
        shift = next(shifts)  # the rings go on from example to example, so that they wrap
        for number, one in enumerate(order):
            chunk = one.__class__(one.session + shift, one.chunk_no, one.steps).chunk()
            if chunk.n_rows > 90:
                continue
            assert host.insert(chunk) == device.insert(chunk)
            if number == evicted:
                assert host.evict(chunk.meta.session, one.chunk_no) == device.evict(
                    chunk.meta.session, one.chunk_no
                )
        for session in range(2):  # the third stays open
            closed = session_id(session + shift)
            assert host.close(closed) == device.close(closed)
        assert host.n_sampleable == device.n_sampleable
        assert host.n_steps_inserted == device.n_steps_inserted
        assert_same_rows(host, device)

    check()


def assert_same_rows(host: HostReplay, device: DeviceReplay) -> None:
    rows = np.flatnonzero(masses_of(device))
    arrays, _ = host.state()
    if host.needs.prioritised:
        np.testing.assert_allclose(
            masses_of(device)[: len(arrays["masses"])], arrays["masses"], rtol=1e-6
        )
    else:
        assert sorted(arrays["masses"].tolist()) == rows.tolist()
    batch = host._gather(host._look_up(rows))
    columns = {name: np.asarray(column) for name, column in device.ring.columns.items()}
    np.testing.assert_array_equal(columns["returns"][rows], batch.reward)
    np.testing.assert_array_equal(columns["discount"][rows], batch.discount)
    np.testing.assert_array_equal(columns["action"][rows], batch.action)
    following = rows + columns["ahead"][rows]
    for at, obs in ((rows, batch.obs["obs"]), (following, batch.next_obs["obs"])):
        back = np.minimum(np.arange(host.needs.stack - 1, -1, -1), columns["behind"][at][:, None])
        np.testing.assert_array_equal(
            columns["obs"][(at[:, None] - back).reshape(obs.shape[:-1])], obs
        )


@sizes("n_chunks", short=200, full=1_000)
def test_random_chunk_lengths_cause_at_most_two_compilations(n_chunks: int):
    held = DeviceReplay(GAME, needs(n_step=3), ReplayConfig(capacity=4_096))
    rng = np.random.default_rng(0)
    programs: Any = (device_replay._insert, device_replay._set_masses)
    before = sum(program._cache_size() for program in programs)
    for number in range(n_chunks):
        held.insert(piece(0, session=number, n=int(rng.integers(1, 513))).chunk())
    assert sum(program._cache_size() for program in programs) - before <= 2
    assert held.n_sampleable > 2_000


def test_draws_have_the_shapes_of_the_contract_and_feedback_moves_them():
    held = DeviceReplay(GAME, needs(n_step=3, stack=2), ReplayConfig(capacity=192))
    with pytest.raises(ConfigError, match="n_sampleable"):
        held.draw(1, rng=np.random.default_rng(0))
    assert held.insert(piece(0, n=10).chunk(), weight=2.0) == 8
    assert held.close(session_id(0)) == 2
    drawn = held.draw(3, rng=np.random.default_rng(0))
    assert drawn.batches.obs["obs"].shape == (3, 8, 2, 2)
    assert drawn.batches.weight.shape == drawn.rows.shape == drawn.stamps.shape == (3, 8)
    assert held.chunks_of(np.asarray(drawn.rows)) == [(session_id(0), 0)]
    rows = jnp.arange(10)
    held.feedback(rows, jnp.full(10, 1), jnp.arange(10.0))
    held.feedback(rows, jnp.full(10, 1), jnp.array([jnp.nan, jnp.inf, -1.0] + [jnp.nan] * 7))
    held.feedback(rows, jnp.full(10, 7), jnp.full(10, 1e5))  # of an evicted span
    np.testing.assert_allclose(
        masses_of(held)[:10], 2 * np.maximum(np.arange(10.0), 1e-6) ** 0.6, rtol=1e-6
    )
    assert (masses_of(held)[10:] == 0).all()
    with pytest.raises(ConfigError, match="weight is -1"):
        held.insert(piece(1, n=10).chunk(), weight=-1.0)


def test_a_whole_update_runs_inside_one_scan_over_frames():
    game = game_spec("rally", obs=Box((4, 4), DTYPES["U8"]), actions=3, has_action_mask=True)
    held = DeviceReplay(game, needs(stack=4, n_step=2), ReplayConfig(capacity=128))
    frames = np.arange(51 * 16, dtype=np.uint8).reshape(51, 4, 4)
    held.insert(piece(0, n=50).chunk(game=game, obs=frames))

    def update(ring: Any, key: Any) -> Any:
        batch, rows = held.sample(ring, key, 0.4)
        priorities = jnp.where(batch.obs["obs"][:, -1, 0, 0] == 16 * 7, 1e3, 1e-3)
        return held.write_back(ring, rows, priorities), (
            rows,
            batch.obs["obs"].mean(dtype=jnp.float32),
            batch.action_mask,
        )

    scanned = jax.jit(lambda ring, keys: jax.lax.scan(update, ring, keys))
    held.ring, (rows, means, action_mask) = scanned(
        held.ring, jax.random.split(jax.random.key(0), 64)
    )
    assert (np.asarray(rows[-1]) % 16 == 7).all()  # the frames that begin with 112
    assert np.isfinite(np.asarray(means)).all()
    assert action_mask.all()


def test_a_restored_device_replay_draws_the_same_bits():
    wanted = needs(n_step=3, stack=2)
    stored = Stored()
    held, again = (DeviceReplay(GAME, wanted, ReplayConfig(capacity=192)) for _ in range(2))
    for number in range(7):
        held.insert(stored.keep(piece(number).chunk()))
        held.insert(stored.keep(piece(number, session=1).chunk()))
        drawn = held.draw(3, rng=np.random.default_rng(number), beta=0.7)
        held.feedback(drawn.rows, drawn.stamps, drawn.rows % 8)
    again.restore(*through_a_file(held.state()), stored.read)
    assert held.close(session_id(0)) == again.close(session_id(0)) == 2
    assert_equal(held, again)


# --- The tree -------------------------------------------------------------------------------------


def test_any_history_of_a_tree_ends_in_the_bits_of_its_leaves():
    rng = np.random.default_rng(0)
    levels = empty_levels(5_000)
    change = jax.jit(set_leaves)
    for _ in range(50):
        rows = np.where(rng.random(64) < 0.1, NO_ROW, rng.permutation(5_000)[:64])
        levels = change(
            levels, jnp.asarray(rows, jnp.int32), jnp.asarray(rng.random(64), jnp.float32)
        )
    for one, fresh in zip(levels, jax.jit(levels_of)(levels[0], levels), strict=True):
        np.testing.assert_array_equal(one, fresh)
    assert float(levels[-1].sum()) == pytest.approx(float(levels[0].sum()), rel=1e-5)


@pytest.mark.parametrize("capacity", [16, 5_000, 1 << 20])
def test_rows_are_found_as_often_as_they_weigh(capacity):
    rng = np.random.default_rng(1)
    masses = np.where(rng.random(capacity) < 0.3, 0.0, rng.random(capacity) ** 3).astype(np.float32)
    empty = empty_levels(capacity)
    levels = jax.jit(levels_of)(np.resize(masses, empty[0].shape), empty)
    masses = np.asarray(levels[0], np.float64)
    look = jax.jit(jax.vmap(lambda levels, key: find(levels, key, 1_024), in_axes=(None, 0)))
    counts = np.zeros(len(masses))
    for keys in jax.random.split(jax.random.key(0), (1 + capacity // 200_000, 200)):
        counts += np.bincount(np.asarray(look(levels, keys)).ravel(), minlength=len(masses))
    assert counts[masses == 0].sum() == 0
    rows = np.flatnonzero(masses)
    counts, wanted = counts[rows], (masses / masses.sum() * counts.sum())[rows]
    by_mass = np.empty(len(rows))
    by_mass[np.argsort(wanted)] = np.cumsum(np.sort(wanted)) // 20
    # All rows are counted three times: with their neighbours, with those at the same place of their
    # 256 rows, and with those that weigh alike, where a heavy one is alone. Stratified draws vary
    # less than chi-square allows.
    for pools in (rows // 16, rows % 256, by_mass):
        _, pool = np.unique(pools, return_inverse=True)
        got, due = (np.bincount(pool, weights=one) for one in (counts, wanted))
        assert ((got - due) ** 2 / due).mean() < 1 + 5 * np.sqrt(2 / len(due))
    # Where the draw's steps are coarser than a light row, few of those are found, again and again.
    light = wanted < 0.02
    again = (counts * (counts - 1) / 2)[light].sum()
    due = (wanted**2 / 2)[light].sum()
    assert again <= due + 5 * np.sqrt(due)
