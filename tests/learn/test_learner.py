"""The learner: guard, lag, limiter, versions, and going on from a checkpoint as if nothing had
happened."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learn.sessions import session_id
from tests.learn.worlds import Move, chunk_of
from understudy.algorithm import Feedback, Schedule
from understudy.core import tensors
from understudy.core.errors import ConfigError, LearningFailed, Refused
from understudy.core.tensors import arrays_under
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import game_spec
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.algorithms.ppo import Ppo, PpoConfig, PpoKnobs
from understudy.learn.learner import (
    Learner,
    LearnerConfig,
    Report,
    state_from_arrays,
    state_to_arrays,
)
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import LimiterConfig, ReplaySource
from understudy.replay import ReplayConfig

GAME = game_spec("line", obs=3, actions=2)
ROLLOUT = 8
ENVS = 2
STACK = 2
PROGRAMS: dict[str, Any] = {}


def compiled_once(learner: Learner, program: str) -> Learner:
    """Learners whose updates are the same share one compilation."""
    learner._call = PROGRAMS.setdefault(program, learner._call)
    return learner


def dqn(*, prioritised: bool = True, limiter: LimiterConfig | None = None, **how: Any) -> Learner:
    config = DqnConfig(widths=(8,), batch=16, n_step=2, prioritised=prioritised)
    settings: dict[str, Any] = {"updates_per_call": 4, "replay": ReplayConfig(capacity=512), **how}
    made = LearnerConfig(limiter=limiter, **settings)
    return compiled_once(
        Learner(Dqn(GAME, config), DqnKnobs(), root_seed=5, config=made), f"dqn {settings}"
    )


def ppo() -> Learner:
    config = PpoConfig(
        widths=(8,), rollout=ROLLOUT, envs=ENVS, epochs=2, minibatches=2, stack=STACK
    )
    return compiled_once(Learner(Ppo(GAME, config), PpoKnobs(), root_seed=5), "ppo")


def replay_of(learner: Learner) -> HostReplay:
    assert isinstance(learner.source, ReplaySource)
    assert isinstance(learner.source.replay, HostReplay)
    return learner.source.replay


def played(
    number: int, *, env: int = 0, n: int = 12, version: int | None = None, **more: Any
) -> Chunk:
    """The chunk of a number, of an episode that goes on for ever; each step sees numbers of its
    own."""

    def seen(at: int) -> list[float]:
        return [np.sin(at + env), np.cos(2.0 * at), 0.1 * env]

    moves = [
        Move(seen(at), at % 2, float(at % 3), seen(at + 1), None, at == 0)
        for at in range(n * number, n * number + n)
    ]
    return chunk_of(GAME, moves, session=env, chunk_no=number, version=version, **more)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# --- Guard ----------------------------------------------------------------------------------------


def spoil(learner: Learner, chunk_no: int, bad: float) -> None:
    """Numbers go bad inside the ring, behind every check at the door."""
    replay = replay_of(learner)
    span = replay._ring.spans[session_id(0), chunk_no]
    replay._columns["obs"][span.start + span.lead + 2 : span.start + span.n_rows - 2] = bad


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_an_update_on_bad_rows_is_skipped_and_its_chunk_reported_and_evicted(bad):
    learner = dqn()
    for number in range(4):
        learner.insert(played(number))
    learner.step(0.0)
    spoil(learner, 1, bad)
    named: list[ChunkId] = []
    while not named:
        report = learner.step(0.0)
        named += report.bad_chunks
    skipped = learner.counts.skipped_updates
    assert skipped > 0
    assert (session_id(0), 1) in named
    assert {number for _, number in named} <= {
        0,
        1,
        2,
    }  # windows reach from chunk 0 and into chunk 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.state))
    for _ in range(5):
        learner.step(0.0)
    assert learner.counts.skipped_updates == skipped  # what was bad is gone
    assert not report.must_restore


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_where_every_row_fails_the_state_keeps_its_bits_and_no_chunk_is_blamed(bad):
    learner = dqn()
    learner.insert(played(0))
    replay_of(learner)._columns["obs"][:] = bad
    before = bits(learner.state)
    reports = [learner.step(0.0) for _ in range(3)]
    assert bits(learner.state) == before
    assert learner.counts.skipped_updates == learner.counts.skips_in_a_row == 12
    assert [report.must_restore for report in reports] == [False, False, True]
    assert [report.bad_chunks for report in reports] == [[], [], []]
    assert [report.metrics for report in reports] == [
        {},
        {},
        {},
    ]  # nothing was said that is a number
    assert replay_of(learner).n_sampleable > 0


def test_bad_chunks_are_rejected_on_insertion():
    learner = dqn()
    for name, bad in (("obs", np.nan), ("reward", 1e30)):
        chunk = played(0)
        chunk.columns[name][1] = bad
        with pytest.raises(Refused, match="not_finite"):
            learner.insert(chunk)
    assert learner.counts.inserted_steps == 0
    assert not learner.may_step


def test_good_updates_end_a_row_of_skips():
    learner = dqn()
    for ok, row in (([0, 1, 0, 0], 2), ([0, 0, 0, 0], 6), ([0, 0, 1, 1], 0), ([1, 0, 0, 0], 3)):
        learner._count_skips(np.array(ok, np.bool_))
        assert learner.counts.skips_in_a_row == row
    assert learner.counts.skipped_updates == 3 + 4 + 2 + 3


def test_going_back_takes_the_weights_of_a_checkpoint_and_halves_the_rate():
    learner = dqn()
    learner.insert(played(0))
    arrays, _ = learner.checkpoint()
    before = bits(learner.state)
    kept = {name: array.tobytes() for name, array in arrays.items()}
    for _ in range(3):
        learner.step(0.0)
    assert kept == {name: array.tobytes() for name, array in arrays.items()}, (
        "a checkpoint changed behind its back"
    )
    learner.counts.skips_in_a_row = 10
    learner.restore_weights(arrays)
    assert bits(learner.state) == before
    assert (learner.counts.rate_scale, learner.counts.skips_in_a_row, learner.counts.updates) == (
        0.5,
        0,
        12,
    )
    assert learner.knobs_at(0.0)["learning_rate"] == np.float32(5e-4)
    learner.step(0.0)


def test_weights_that_are_not_finite_are_never_published():
    learner = dqn()
    learner.state = jax.tree.map(
        lambda leaf: leaf * np.nan if leaf.dtype.kind == "f" else leaf, learner.state
    )
    with pytest.raises(LearningFailed, match="not finite"):
        learner.publish()


# --- Who may teach --------------------------------------------------------------------------------


def test_chunks_of_actors_with_too_much_lag_are_skipped_and_those_of_players_never():
    learner = dqn(max_lag_versions=2)
    for _ in range(5):
        learner.publish()
    assert [learner.lag_of(played(0, version=version)) for version in (5, 3, 1, 9)] == [0, 2, 4, 0]
    assert [
        learner.insert(played(number, version=version)) for number, version in enumerate((5, 3, 2))
    ] == [12, 12, 0]
    assert learner.insert(played(0, env=1)) == 12
    assert (learner.counts.stale_chunks, learner.counts.inserted_steps) == (1, 36)


def test_priorities_are_believed_from_the_runs_own_actors_only():
    learner = dqn()
    learner.insert(played(0, version=0, priority=[100.0] * 12))
    for env, version in ((1, None), (2, 0)):
        chunk = played(0, env=env, version=version, priority=[1e6] * 12)
        learner.insert(chunk, is_own=False)
    masses = learner.checkpoint()[0]["source.masses"]
    assert sorted(set(masses.tolist())) == pytest.approx([0.0, 100.0**0.6])


@pytest.mark.parametrize("name", ["host", "device", "tests.learn.replays:FifoReplay"])
def test_any_replay_serves_a_learner_and_its_checkpoints(name: str):
    learner, restored = (dqn(replay_name=name) for _ in range(2))
    chunks = {}
    for number in range(4):
        chunk = played(number, version=0)
        chunks[chunk.meta.id] = chunk
        learner.insert(chunk)
        learner.step(0.0)
    arrays, facts = learner.checkpoint()
    restored.restore(arrays, facts, lambda ids: (chunks[key] for key in ids))
    for twin in (learner, restored):
        twin.insert(played(4, version=0))
        for _ in range(3):
            report = twin.step(0.5)
            assert report.metrics["loss"] > 0
    assert bits(learner.state) == bits(restored.state)


@pytest.mark.parametrize("name", ["host", "device", "tests.learn.replays:FifoReplay"])
def test_any_replay_evicts_the_chunks_that_make_updates_fail(name: str):
    source = dqn(replay_name=name).source
    assert isinstance(source, ReplaySource)
    for env in range(3):
        source.insert(played(0, env=env))
    drawn = source.draw(0, importance_exponent=0.5)
    row_ok = np.asarray(drawn.obs["obs"])[..., 2] < 0.15  # all but those of the last session
    ok = row_ok.all(axis=1)
    assert not ok.all()
    bad = source.feedback(Feedback({}, ok, row_ok, priorities=np.ones(row_ok.shape, np.float32)))
    assert list(bad) == [(session_id(2), 0)]
    assert list(source.replay.chunk_ids()) == [(session_id(0), 0), (session_id(1), 0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hots", "there is no replay 'hots'; did you mean 'host'"),
        ("nowhere:Replay", "'nowhere:Replay' cannot be imported: No module .* give module:Class"),
        ("tests.learn.replays:Fifo", "cannot be imported: .* has no attribute 'Fifo'"),
        (
            "tests.learn.replays:HalfAReplay",
            "lacks draw, needed_chunks, state and restore; a replay has needs, .*: add them as",
        ),
        ("tests.learn.replays:WithoutArguments", "cannot be created: .* of three arguments"),
    ],
)
def test_what_is_not_a_replay_is_refused(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        dqn(replay_name=name)


def test_on_policy_only_the_newest_version_teaches():
    learner = ppo()
    learner.publish()
    logp = [-0.7] * ROLLOUT
    assert learner.insert(played(0, n=ROLLOUT, version=1, logp=logp)) == ROLLOUT
    learner.publish()
    assert learner.insert(played(0, env=1, n=ROLLOUT, version=1, logp=logp)) == 0
    assert not learner.may_step


def test_the_limiter_decides_when_updates_are_due():
    learner = dqn(limiter=LimiterConfig(samples_per_insert=8.0, min_inserts=12))
    calls = []
    for number in range(4):
        learner.insert(played(number))
        calls.append(0)
        while learner.may_step:
            learner.step(0.0)
            calls[-1] += 1
    assert calls == [
        0,
        1,
        2,
        1,
    ]  # 96 rows are owed for each chunk behind the first; a call takes 64
    assert learner.counts.replay_ratio == 4 * 64 / 48


def test_versions_count_what_was_published_and_knobs_follow_their_schedules():
    learner = dqn()
    assert [learner.publish().version for _ in range(3)] == [1, 2, 3]
    assert learner.current().version == 3
    knobs = DqnKnobs(epsilon=Schedule(1.0, 0.0, 0.5), learning_rate=0.25)
    learner._knobs = knobs
    assert [float(learner.knobs_at(at)["epsilon"]) for at in (0.0, 0.25, 0.5, 1.0)] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert learner.knobs_at(0.7)["learning_rate"] == np.float32(0.25)


# --- Going on -------------------------------------------------------------------------------------


class Run:
    """A learner with what its actors have played, as a store would keep it."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.chunks: dict[ChunkId, Chunk] = {}

    def round(self, number: int) -> list[Any]:
        policy = self.learner.publish()
        told: list[Any] = []
        for env in range(ENVS):
            chunk = self._played(policy, number, env)
            self.chunks[chunk.meta.session, chunk.meta.chunk_no] = chunk
            self.learner.insert(chunk)
        while self.learner.may_step and len(told) < 3:
            told.append(self.learner.step(number / 10).metrics)
        return told

    def _played(self, policy: Any, number: int, env: int) -> Chunk:
        if policy.head.kind == "epsilon_greedy":
            return played(number, env=env, version=policy.version)
        chunk = played(number, env=env, n=ROLLOUT, version=policy.version, logp=[0.0] * ROLLOUT)
        before = played(number - 1, env=env, n=ROLLOUT) if number else None
        obs = chunk.columns["obs"]
        past = obs[:1] if before is None else before.columns["obs"][-2:-1]
        stacks = np.stack([np.concatenate([past, obs[:-2]]), obs[:-1]], axis=1)
        noise = np.zeros((ROLLOUT, 2), np.float32)
        noise[np.arange(ROLLOUT), chunk.columns["action"][:-1]] = 1e6
        chunk.columns["logp"][:-1] = policy.decide({"obs": stacks}, noise).logp
        return chunk

    def resumed(self, fresh: Learner) -> "Run":
        arrays, facts = self.learner.checkpoint()
        decoded, _ = tensors.decode(tensors.encode(arrays, {}))
        fresh.restore(decoded, json.loads(json.dumps(facts)), self._read)
        run = Run(fresh)
        run.chunks = dict(self.chunks)
        return run

    def _read(self, ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        return (self.chunks[one] for one in ids)


@pytest.mark.parametrize("kind", ["prioritised", "uniform", "ppo"])
def test_a_restored_learner_continues_bit_identical(kind):
    def make() -> Learner:
        limiter = LimiterConfig(samples_per_insert=6.0, min_inserts=20)
        return ppo() if kind == "ppo" else dqn(prioritised=kind == "prioritised", limiter=limiter)

    run = Run(make())
    for number in range(3):
        run.round(number)
    again = run.resumed(make())
    assert bits(again.learner.state) == bits(run.learner.state)
    for number in range(3, 7):
        assert run.round(number) == again.round(number) != []
    assert again.learner.counts == run.learner.counts
    assert bits(again.learner.state) == bits(run.learner.state)
    one, other = (each.learner.checkpoint() for each in (run, again))
    assert one[1] == other[1]
    assert all(one[0][name].tobytes() == array.tobytes() for name, array in other[0].items())


def test_a_rollout_that_is_not_finite_is_skipped_and_its_env_reported():
    run = Run(ppo())
    run.round(0)
    before = bits(run.learner.state)
    policy = run.learner.publish()
    for env in range(ENVS):
        chunk = run._played(policy, 1, env)
        if env == 1:
            chunk.columns["reward"][3] = 1e19  # finite, but its square is not
        run.learner.insert(chunk)
    report = run.learner.step(0.0)
    assert report.bad_chunks == [(session_id(1), 1)]
    assert bits(run.learner.state) == before
    assert run.round(2) != []
    assert run.learner.counts.skips_in_a_row == 0


def test_a_checkpoint_of_other_settings_is_rejected():
    arrays, facts = dqn().checkpoint()
    other = Learner(Dqn(GAME, DqnConfig(widths=(9,), batch=16)), DqnKnobs(), root_seed=0)
    with pytest.raises(ConfigError, match="does not fit"):
        other.restore(arrays, facts, lambda _: iter(()))


def test_learners_of_equal_algorithms_share_one_program_and_others_do_not():
    def program(**settings: Any) -> Any:
        return Learner(Dqn(GAME, DqnConfig(**settings)), DqnKnobs(), root_seed=0)._call

    assert program(widths=(8,)) is program(widths=(8,))
    assert program(widths=(8,)) is not program(widths=(9,))
    assert program(discount=1.0) is not program(discount=1), "the text differs"
    assert program(double=True) is not program(double=False)


@pytest.mark.parametrize(
    ("name", "value"), [("updates_per_call", 0), ("max_lag_versions", -1), ("max_skips", 0)]
)
def test_invalid_settings_are_rejected_when_they_are_created(name: str, value: int):
    settings: Any = {name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}; give a whole number from"):
        LearnerConfig(**settings)


class Silent:
    """An algorithm that leaves something out of its feedback."""

    def __init__(self, algorithm: Any, field: str) -> None:
        self._algorithm = algorithm
        self._field = field

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def update(self, state: Any, batch: Any, knobs: Any) -> Any:
        updated, told = self._algorithm.update(state, batch, knobs)
        return updated, told._replace(**{self._field: None})


@pytest.mark.parametrize(("make", "field"), [(dqn, "priorities"), (ppo, "ratio_error")])
def test_an_algorithm_without_required_feedback_is_rejected(make, field):
    whole = make()
    run = Run(
        Learner(Silent(whole.algorithm, field), whole._knobs, root_seed=5, config=whole.config)
    )
    with pytest.raises(ConfigError, match=f"no {field}, but the algorithm"):
        run.round(0)
    assert run.learner.counts.calls == 0


# --- Running --------------------------------------------------------------------------------------


class Listening:
    """A watcher that writes down what it hears; the progress is a tenth per call."""

    def __init__(self) -> None:
        self.compilations = 0
        self.versions = list[int]()
        self.blamed = list[ChunkId]()
        self.metrics = list[Any]()
        self.asked = 0
        self.threads = set[int]()

    @property
    def progress(self) -> float:
        self.asked += 1
        return self.asked / 10

    def compiling(self) -> None:
        self.compilations += 1

    def blame(self, chunks: Sequence[ChunkId]) -> None:
        self.blamed += chunks

    def take(self, policy: Any, metrics: Any) -> None:
        self.versions.append(policy.version)
        self.metrics.append(metrics)
        self.threads.add(threading.get_ident())


def never() -> bool:
    return False


def test_a_run_is_its_steps_and_ends_with_what_is_due():
    run, alone = (
        dqn(limiter=LimiterConfig(samples_per_insert=8.0, min_inserts=12)) for _ in range(2)
    )
    for number in range(4):
        run.insert(played(number))
        alone.insert(played(number))
    heard = Listening()
    assert run.run(never, heard)
    told = [alone.step((call + 1) / 10).metrics for call in range(4)]
    assert not alone.may_step
    assert not run.may_step
    assert bits(run.state) == bits(alone.state)
    assert run.counts == replace(alone.counts, version=1)
    assert (heard.compilations, heard.versions, heard.asked) == (1, [1], 4)
    assert heard.metrics == [{name: np.mean([one[name] for one in told]) for name in told[0]}]
    assert run.run(never, heard)  # nothing is due, nothing is published
    assert (heard.compilations, heard.versions) == (1, [1])


@pytest.mark.parametrize(
    ("calls_per_version", "versions"), [(1, 5), (2, 3), (5, 1), (9, 1), (None, 1)]
)
def test_a_run_publishes_every_so_many_calls_and_what_is_left_when_it_is_stopped(
    calls_per_version: int | None, versions: int
):
    learner = dqn()
    heard = Listening()
    learner.insert(played(0))
    assert learner.run(
        lambda: learner.counts.calls == 5, heard, calls_per_version=calls_per_version
    )
    assert heard.versions == list(range(1, versions + 1))
    assert bits(learner.current().weights) == bits(learner.algorithm.policy(learner.state).weights)


def test_a_run_that_must_restore_ends_at_once_and_publishes_nothing():
    learner = dqn()
    heard = Listening()
    learner.insert(played(0))
    arrays, _ = learner.checkpoint()
    sound = replay_of(learner)._columns["obs"].copy()
    replay_of(learner)._columns["obs"][:] = np.nan
    assert not learner.run(never, heard, calls_per_version=4)
    assert (learner.counts.calls, learner.counts.skips_in_a_row, heard.versions) == (3, 12, [])
    learner.restore_weights(arrays)
    replay_of(learner)._columns["obs"][:] = sound
    assert learner.run(lambda: learner.counts.calls == 7, heard, calls_per_version=4)
    assert (heard.versions, learner.counts.skips_in_a_row) == ([1], 0)


def test_a_call_whose_updates_were_all_skipped_does_not_count_in_the_means_of_its_version():
    learner = dqn()
    heard = Listening()
    learner.insert(played(0))
    told = list[Any]()
    step = learner.step

    def spoiled_at_first(progress: float) -> Any:
        column = replay_of(learner)._columns["obs"]
        sound = column.copy()
        if not told:
            column[:] = np.nan
        told.append(step(progress).metrics)
        column[:] = sound
        return Report(told[-1])

    learner.step = spoiled_at_first  # type: ignore[method-assign]
    assert learner.run(lambda: learner.counts.calls == 3, heard, calls_per_version=2)
    assert [bool(one) for one in told] == [False, True, True]
    assert heard.metrics == told[1:]
    assert np.isfinite([value for one in heard.metrics for value in one.values()]).all()


def test_a_run_names_the_chunks_that_spoiled_its_updates():
    learner = dqn()
    heard = Listening()
    for number in range(4):
        learner.insert(played(number))
    spoil(learner, 1, np.nan)
    assert learner.run(lambda: bool(heard.blamed), heard)
    assert (session_id(0), 1) in heard.blamed


def test_a_run_in_a_thread_ends_on_stop_and_the_learner_can_continue():
    learner = dqn()
    heard = Listening()
    stop = threading.Event()
    learner.insert(played(0))
    thread = threading.Thread(
        target=learner.run, args=(stop.is_set, heard), kwargs={"calls_per_version": 1}
    )
    thread.start()
    while learner.counts.version < 3 and thread.is_alive():
        thread.join(0.01)
    stop.set()
    thread.join(60.0)
    assert not thread.is_alive()
    assert heard.versions == list(range(1, learner.counts.version + 1))
    assert heard.threads == {thread.ident}
    assert learner.counts.updates == 4 * learner.counts.calls
    learner.step(0.5)


# --- States ---------------------------------------------------------------------------------------


class State(NamedTuple):
    weights: dict[str, Any]
    key: Any
    count: Any


def state(width: int = 3) -> State:
    weights = {"b": jnp.arange(width, dtype=jnp.float32), "a": jnp.full((2, width), jnp.nan)}
    return State(weights, jax.random.PRNGKey(3), jnp.zeros((), jnp.int32))


def test_a_state_is_restored_in_its_structure():
    again = state_from_arrays(state(), state_to_arrays(state()))
    assert (type(again), again.weights.keys()) == (State, {"a", "b"})
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state()), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda arrays: arrays | {"leaf0001": np.zeros(4, np.float32)},
            r"leaf 1 is float32.4., expected float32.3.",
        ),
        (lambda arrays: arrays | {"leaf0003": np.zeros((), np.int64)}, "leaf 3 is int64"),
        (lambda arrays: arrays | {"leaf0004": np.zeros(1)}, "does not fit"),
        (
            lambda arrays: {name: one for name, one in arrays.items() if name != "leaf0002"},
            "does not fit",
        ),
    ],
)
def test_a_state_of_another_shape_is_rejected(change, says):
    with pytest.raises(ConfigError, match=says):
        state_from_arrays(state(), change(state_to_arrays(state())))


def test_part_takes_what_begins_with_a_name():
    assert arrays_under({"a.b.c": np.ones(1), "ab.c": np.zeros(1)}, "a") == {"b.c": np.ones(1)}
