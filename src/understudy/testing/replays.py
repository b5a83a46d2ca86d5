"""The contract of the Replay port, as tests to subclass.

class TestMine(ReplayContract):
    def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
        return MyReplay(game, needs, config)

Every test creates its own replays, both for prioritised and for uniform batches. A replay that is
always uniform passes too: it ignores priorities, and every weight of its batches is 1.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from understudy.algorithm import Batch, Transitions
from understudy.core import tensors
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId, RowKind
from understudy.experience.game import GameSpec, game_spec
from understudy.replay import Drawn, Replay, ReplayConfig
from understudy.testing.samples import cart_spec, random_session

BATCH = 16
K = 4
"""Batches per draw: one number, since replays on devices compile a program for each."""
CAPACITY = 512
DISCOUNT = 0.9
_KINDS = ((1, False), (3, True))
"""n_step, and whether batches are prioritised."""
_MASKED = game_spec("cards", obs=5, actions=6, has_action_mask=True)


class _Window(NamedTuple):
    """What a replay must know of the n steps that start with one observation."""

    chunks: frozenset[ChunkId]
    action: int
    reward: float
    discount: float
    next_obs: bytes


class ReplayContract:
    """Tests of a Replay: subclass, define `make`, and run with pytest."""

    def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
        """Create an empty replay."""
        raise NotImplementedError(
            "a subclass of ReplayContract must define make(): the replay under test"
        )

    def _made(
        self, *, n_step: int = 1, prioritised: bool = False, capacity: int = CAPACITY
    ) -> Replay:
        needs = Transitions(batch=BATCH, n_step=n_step, discount=DISCOUNT, prioritised=prioritised)
        return self.make(cart_spec(), needs, ReplayConfig(capacity=capacity))

    # --- What is drawn ----------------------------------------------------------------------------

    def test_an_empty_replay_has_nothing_to_draw(self) -> None:
        replay = self._made()
        assert replay.n_sampleable == 0
        assert list(replay.chunk_ids()) == []
        assert replay.needs.batch == BATCH
        _assert_raises(ConfigError, lambda: replay.draw(K, rng=_rng(0), beta=0.4))

    def test_every_step_is_drawn_as_it_was_recorded(self) -> None:
        for n_step, prioritised in _KINDS:
            replay = self._made(n_step=n_step, prioritised=prioritised)
            sessions = [_session(seed) for seed in range(3)]
            n_sampleable = sum(replay.insert(chunk) for chunks in sessions for chunk in chunks)
            n_sampleable += sum(replay.close(chunks[0].meta.session) for chunks in sessions)
            windows = _windows(sessions, n_step)
            assert n_sampleable == replay.n_sampleable == len(windows), (
                "after the end of their sessions, all steps are sampleable"
            )
            assert _drawn_obs(replay, windows) == windows.keys()

    def test_batches_have_the_shapes_and_types_of_the_port(self) -> None:
        for n_step, prioritised in _KINDS:
            replay = self._made(n_step=n_step, prioritised=prioritised)
            _fill(replay)
            drawn = replay.draw(K, rng=_rng(0), beta=0.5)
            batches = drawn.batches
            shapes = [np.shape(array) for array in (batches.obs["obs"], batches.next_obs["obs"])]
            assert shapes == [(K, BATCH, 4)] * 2
            small = {
                name: np.asarray(getattr(batches, name))
                for name in ("action", "reward", "discount", "weight")
            }
            assert {array.shape for array in small.values()} == {(K, BATCH)}
            assert small.pop("action").dtype == np.int32
            assert {array.dtype for array in small.values()} == {np.dtype(np.float32)}
            assert _are_weights(small["weight"])
            assert prioritised or (small["weight"] == 1).all()
            assert np.shape(drawn.rows) == np.shape(drawn.stamps) == (K, BATCH)
            assert batches.action_mask is None
            assert batches.next_action_mask is None

    def test_masks_come_with_their_steps(self) -> None:
        replay = self.make(_MASKED, Transitions(batch=BATCH), ReplayConfig(capacity=CAPACITY))
        masks: dict[bytes, Array] = {}
        for chunk in _session(0, _MASKED):
            replay.insert(chunk)
            masks |= dict(
                zip(_keys(chunk.columns["obs"]), chunk.columns["action_mask"], strict=True)
            )
        batches = replay.draw(K, rng=_rng(0), beta=0.4).batches
        for obs, action_mask in (
            (batches.obs, batches.action_mask),
            (batches.next_obs, batches.next_action_mask),
        ):
            flat = np.asarray(action_mask).reshape(-1, 6)
            expected = [masks[key] for key in _keys(np.asarray(obs["obs"]).reshape(-1, 5))]
            np.testing.assert_array_equal(flat, expected)

    # --- What enters and leaves -------------------------------------------------------------------

    def test_a_chunk_is_inserted_once(self) -> None:
        replay = self._made()
        chunks = _fill(replay)
        before = replay.n_sampleable, list(replay.chunk_ids())
        _assert_raises(Refused, lambda: replay.insert(chunks[0]))
        assert (replay.n_sampleable, list(replay.chunk_ids())) == before

    def test_an_invalid_chunk_changes_nothing(self) -> None:
        replay = self._made(n_step=3)
        first, second, *_ = _session(0)
        replay.insert(first)
        before = replay.n_sampleable
        for name in ("reward", "obs"):
            columns = {key: column.copy() for key, column in second.columns.items()}
            columns[name][0] = np.nan
            invalid = Chunk(second.meta, columns)
            _assert_raises(Refused, lambda invalid=invalid: replay.insert(invalid))
        _assert_raises(Refused, lambda: replay.insert(_session(1, _MASKED)[0]))
        assert (replay.n_sampleable, list(replay.chunk_ids())) == (before, [first.meta.id])
        replay.insert(second)

    def test_chunks_make_room_for_others(self) -> None:
        for n_step, prioritised in _KINDS:
            replay = self._made(n_step=n_step, prioritised=prioritised)
            sessions = [_session(seed) for seed in range(40)]
            inserted = [chunk for chunks in sessions for chunk in chunks]
            for chunk in inserted:
                replay.insert(chunk)
            kept = list(replay.chunk_ids())
            assert 0 < len(kept) < len(inserted)
            assert 0 < replay.n_sampleable <= CAPACITY
            assert kept == [chunk.meta.id for chunk in inserted if chunk.meta.id in kept], (
                "the oldest chunk comes first"
            )
            windows = _windows(sessions, n_step)
            for obs in _drawn_obs(replay, windows):
                assert windows[obs].chunks & set(kept)

    def test_an_evicted_chunk_is_never_drawn_again(self) -> None:
        for n_step, prioritised in _KINDS:
            replay = self._made(n_step=n_step, prioritised=prioritised)
            chunks = _fill(replay)
            evicted = chunks[1].meta.id
            assert replay.evict(*evicted)
            assert not replay.evict(*evicted), "it has no rows left"
            assert not replay.evict(uuid.uuid4(), 0)
            assert evicted not in replay.chunk_ids()
            windows = _windows([chunks], n_step)
            for obs in _drawn_obs(replay, windows):
                assert evicted not in windows[obs].chunks

    def test_rows_name_the_chunks_of_their_steps(self) -> None:
        replay = self._made(n_step=3, prioritised=True)
        sessions = [_session(seed) for seed in range(2)]
        for chunks in sessions:
            for chunk in chunks:
                replay.insert(chunk)
        windows = _windows(sessions, 3)
        drawn = replay.draw(K, rng=_rng(0), beta=0.4)
        rows = np.asarray(drawn.rows).ravel()
        obs = _keys(np.asarray(drawn.batches.obs["obs"]).reshape(-1, 4))
        for row, key in zip(rows, obs, strict=True):
            assert windows[key].chunks <= set(replay.chunks_of(np.array([row])))
        named = replay.chunks_of(rows)
        assert len(named) == len(set(named))

    # --- Chance and priorities --------------------------------------------------------------------

    def test_equal_histories_and_chance_draw_equal_bits(self) -> None:
        for n_step, prioritised in _KINDS:
            twins = [self._made(n_step=n_step, prioritised=prioritised) for _ in range(2)]
            for twin in twins:
                _fill(twin)
            for seed in range(3):
                one, other = (twin.draw(K, rng=_rng(seed), beta=0.7) for twin in twins)
                _assert_equal(one, other)
                for twin, drawn in zip(twins, (one, other), strict=True):
                    twin.feedback(drawn.rows, drawn.stamps, _priorities(drawn))

    def test_feedback_ignores_evicted_rows_and_invalid_priorities(self) -> None:
        replay = self._made(n_step=3, prioritised=True)
        chunks = _fill(replay)
        drawn = replay.draw(K, rng=_rng(0), beta=0.4)
        for bad in (np.nan, np.inf, -1.0):
            replay.feedback(
                drawn.rows, drawn.stamps, np.full(np.shape(drawn.rows), bad, np.float32)
            )
        replay.feedback(drawn.rows[:0], drawn.stamps[:0], np.ones((0, BATCH), np.float32))
        replay.evict(*chunks[0].meta.id)
        replay.feedback(drawn.rows, drawn.stamps, _priorities(drawn))
        windows = _windows([chunks], 3)
        for obs in _drawn_obs(replay, windows):
            assert chunks[0].meta.id not in windows[obs].chunks
        drawn = replay.draw(K, rng=_rng(1), beta=1.0)
        assert _are_weights(np.asarray(drawn.batches.weight))

    # --- Checkpoints ------------------------------------------------------------------------------

    def test_a_restored_replay_continues_with_the_same_bits(self) -> None:
        for n_step, prioritised in _KINDS:
            saved = self._made(n_step=n_step, prioritised=prioritised)
            sessions = [_session(seed) for seed in range(20)]
            stored = {chunk.meta.id: chunk for chunks in sessions for chunk in chunks}
            for chunks in sessions[:16]:
                for chunk in chunks[:3]:  # the sessions stay open
                    saved.insert(chunk)
            drawn = saved.draw(K, rng=_rng(0), beta=0.4)
            saved.feedback(drawn.rows, drawn.stamps, _priorities(drawn))
            restored = self._made(n_step=n_step, prioritised=prioritised)
            needed = {key: stored[key] for key in saved.needed_chunks()}
            restored.restore(*_through_a_file(saved.state()), _reader(needed))
            for later, seed in zip([sessions[15][3], *sessions[16]], range(1, 6), strict=False):
                draws = []
                for twin in (saved, restored):
                    twin.insert(later)
                    twin.close(sessions[14][0].meta.session)
                    draws.append(twin.draw(K, rng=_rng(seed), beta=0.4))
                    twin.feedback(draws[-1].rows, draws[-1].stamps, _priorities(draws[-1]))
                _assert_equal(*draws)
            assert saved.n_sampleable == restored.n_sampleable
            assert list(saved.chunk_ids()) == list(restored.chunk_ids())

    def test_a_chunk_that_is_gone_is_not_restored(self) -> None:
        saved = self._made(n_step=3, prioritised=True)
        chunks = _fill(saved)
        stored = {chunk.meta.id: chunk for chunk in chunks}
        gone = chunks[1].meta.id
        del stored[gone]
        restored = self._made(n_step=3, prioritised=True)
        restored.restore(*_through_a_file(saved.state()), _reader(stored))
        assert gone not in restored.chunk_ids()
        windows = _windows([chunks], 3)
        for obs in _drawn_obs(restored, windows):
            assert gone not in windows[obs].chunks

    def test_a_state_of_other_settings_is_rejected(self) -> None:
        saved = self._made()
        stored = {chunk.meta.id: chunk for chunk in _fill(saved)}
        state = _through_a_file(saved.state())
        for other in (self._made(capacity=4_096), self._made(n_step=2)):
            _assert_raises(ConfigError, lambda other=other: other.restore(*state, _reader(stored)))


# --- Sessions, and the windows that a replay must find in them ------------------------------------


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _session(seed: int, game: GameSpec | None = None) -> list[Chunk]:
    """Chunks of one session; equal seeds give equal chunks."""
    return random_session(game or cart_spec(), _rng(seed), n_chunks=5, max_steps=8)


def _fill(replay: Replay) -> list[Chunk]:
    """Insert a session, end it, and return its chunks."""
    chunks = _session(7)
    for chunk in chunks:
        replay.insert(chunk)
    replay.close(chunks[0].meta.session)
    return chunks


def _keys(obs: Array) -> list[bytes]:
    """A key for each observation; the random ones are all different."""
    return [row.tobytes() for row in np.asarray(obs, np.float32)]


def _windows(sessions: Sequence[Sequence[Chunk]], n_step: int) -> dict[bytes, _Window]:
    """The window of each step, by the step's observation, from a plain walk over the steps."""
    windows = {}
    for chunks in sessions:
        steps = [step for chunk in chunks for step in _steps(chunk)]
        for at, (obs, action, *_) in enumerate(steps):
            reward = 0.0
            discount = 1.0
            touched = set()
            for _, _, gain, following, is_over, terminated, chunk_id in steps[at : at + n_step]:
                reward += discount * gain
                discount *= DISCOUNT * (not terminated)
                touched.add(chunk_id)
                next_obs = following
                if is_over:
                    break
            windows[obs] = _Window(frozenset(touched), action, reward, discount, next_obs)
    return windows


def _steps(chunk: Chunk) -> Iterator[tuple[bytes, int, float, bytes, bool, bool, ChunkId]]:
    columns = chunk.columns
    keys = _keys(columns["obs"])
    for row in np.flatnonzero(columns["row"] == RowKind.STEP):
        is_cut = row + 2 < chunk.n_rows and columns["row"][row + 1] == RowKind.BOOTSTRAP
        terminated = bool(columns["terminated"][row])
        is_over = bool(terminated or columns["truncated"][row] or is_cut)
        yield (
            keys[row],
            int(columns["action"][row]),
            float(columns["reward"][row]),
            keys[row + 1],
            is_over,
            terminated,
            chunk.meta.id,
        )


def _drawn_obs(replay: Replay, windows: Mapping[bytes, _Window]) -> set[bytes]:
    """The observations of all steps that can be drawn; each must show its true window."""
    seen: set[bytes] = set()
    for seed in range(100):
        batches = replay.draw(K, rng=_rng(seed), beta=0.4).batches
        for key, action, reward, discount, next_obs in _shown(batches):
            window = windows[key]
            assert (action, next_obs) == (window.action, window.next_obs)
            np.testing.assert_allclose(reward, window.reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(discount, window.discount, rtol=1e-5)
            seen.add(key)
        if seed > 4 and len(seen) >= replay.n_sampleable:
            break
    return seen


def _shown(batches: Batch) -> Iterator[tuple[bytes, int, float, float, bytes]]:
    numbers = (
        np.asarray(part).ravel() for part in (batches.action, batches.reward, batches.discount)
    )
    obs, next_obs = (
        _keys(np.asarray(part["obs"]).reshape(-1, 4)) for part in (batches.obs, batches.next_obs)
    )
    return zip(obs, *numbers, next_obs, strict=True)


def _priorities(drawn: Drawn) -> Array:
    """Priorities that depend on what was drawn."""
    priorities: Array = 0.1 + np.abs(np.asarray(drawn.batches.reward))
    return priorities


def _are_weights(weight: Array) -> bool:
    return bool(np.isfinite(weight).all() and (weight > 0).all() and (weight <= 1).all())


def _assert_equal(one: Drawn, other: Drawn) -> None:
    parts = [
        [drawn.rows, drawn.stamps, *drawn.batches.obs.values(), *drawn.batches.next_obs.values()]
        for drawn in (one, other)
    ]
    for drawn, arrays in zip((one, other), parts, strict=True):
        batches = drawn.batches
        arrays += [batches.action, batches.reward, batches.discount, batches.weight]
    for first, second in zip(*parts, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def _through_a_file(state: tuple[dict[str, Array], dict[str, Any]]) -> tuple[Any, Any]:
    """A state as a checkpoint stores it."""
    arrays, facts = state
    return tensors.decode(tensors.encode(arrays, {}))[0], json.loads(json.dumps(facts))


def _reader(stored: Mapping[ChunkId, Chunk]) -> Any:
    return lambda ids: (stored[key] for key in ids if key in stored)


def _assert_raises(error: type[Exception], call: Any) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")
