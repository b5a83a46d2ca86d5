"""The inline engine: rounds in lock-step or with an actor that plays ahead, and its sessions
after a resume."""

import contextlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.learn.worlds import Move, chunk_of
from understudy.core.errors import ConfigError, GameFailed
from understudy.experience.chunk import Chunk
from understudy.experience.game import game_spec
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay_source import LimiterConfig, ReplaySource
from understudy.nn.policy import Policy
from understudy.ports import Collected
from understudy.replay import ReplayConfig
from understudy.stores.local import LocalStore
from understudy.testing.clock import ManualClock
from understudy.training.events import Event, Update
from understudy.training.inline import Inline, InlineConfig
from understudy.training.run_store import RunStore

GAME = game_spec("line", obs=3, actions=2)
N = 16
N_STEP = 3
PROGRAMS: dict[str, Any] = {}


class Playing:
    """An actor of one env whose episode never ends; plays `rounds` of them, then its game fails."""

    num_envs = 1

    def __init__(self, incarnation: int = 0, rounds: int = 1000) -> None:
        self._session = incarnation
        self._number = 0
        self._rounds = rounds
        self.versions: list[int] = []
        self.has_failed = threading.Event()

    def collect(self, policy: Policy, steps: int, *, round_no: int, explore: Any) -> Collected:
        if self._number == self._rounds:
            self.has_failed.set()
            raise GameFailed("the game is broken")
        self.versions.append(policy.version)
        made = self._chunk(steps, policy.version)
        self._number += 1
        return Collected([made], [], steps)

    def _chunk(self, steps: int, version: int) -> Chunk:
        first = self._number * steps
        moves = [
            Move([t, 0, 1], t % 2, 1.0, [t + 1, 0, 1], None, t == 0)
            for t in range(first, first + steps)
        ]
        made = chunk_of(GAME, moves, session=self._session, chunk_no=self._number, version=version)
        return replace(made, meta=replace(made.meta, first_step=first))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def restore(self, arrays: Any, facts: Any) -> None: ...


def engine(
    folder: Path,
    actor: Playing,
    *,
    heard: list[Event] | None = None,
    samples_per_insert: float = 8.0,
    **how: Any,
) -> Inline:
    limiter = LimiterConfig(samples_per_insert=samples_per_insert, min_inserts=0)
    config = LearnerConfig(limiter=limiter, updates_per_call=4, replay=ReplayConfig(capacity=512))
    algorithm = Dqn(GAME, DqnConfig(widths=(8,), batch=16, n_step=N_STEP))
    learner = Learner(algorithm, DqnKnobs(), root_seed=5, config=config)
    learner._call = PROGRAMS.setdefault("dqn", learner._call)  # one compilation for all
    history = RunStore(folder / "store", GAME, clock=ManualClock())
    events = [] if heard is None else heard
    return Inline(
        learner,
        actor,  # type: ignore[arg-type]
        config=InlineConfig(steps=1000, collect=N, **how),
        history=history,
        on_event=events.append,
    )


def n_sampleable(one: Inline) -> int:
    assert isinstance(one.learner.source, ReplaySource)
    return one.learner.source.replay.n_sampleable


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resume_continues_open_sessions_in_lock_step_and_ends_them_when_episodes_restart(
    tmp_path: Path, asynchronous: bool
):
    waiting = N_STEP - 1
    with contextlib.closing(engine(tmp_path, Playing(), is_asynchronous=asynchronous)) as one:
        for _ in range(2):
            assert one.step()
        arrays, facts = one.checkpoint()
        assert n_sampleable(one) == 2 * N - waiting
    again = Playing(incarnation=1) if asynchronous else Playing()
    if not asynchronous:
        again._number = 2
    with contextlib.closing(engine(tmp_path, again, is_asynchronous=asynchronous)) as other:
        other.restore(arrays, facts)
        assert n_sampleable(other) == 2 * N - waiting  # a checkpoint taken now would be the same
        assert other.step()
        assert n_sampleable(other) == 3 * N - waiting
        assert other.steps == other.learner.counts.inserted_steps == 3 * N


def test_a_round_publishes_one_version_in_lock_step_and_several_when_asynchronous(tmp_path: Path):
    versions = {}
    for asynchronous in (False, True):
        heard: list[Event] = []
        how: dict[str, Any] = {
            "is_asynchronous": asynchronous,
            "calls_per_version": 2,
            "samples_per_insert": 20.0,
        }
        with contextlib.closing(
            engine(tmp_path / str(asynchronous), Playing(), heard=heard, **how)
        ) as one:
            assert one.step()
            assert one.learner.counts.calls == 5  # 16 steps owe 320 rows, and a call takes 64
            assert one.policy.version == one.learner.counts.version
        versions[asynchronous] = [event.version for event in heard if isinstance(event, Update)]
    assert versions == {
        False: [2],
        True: [2, 3, 4],
    }  # version 1 is what the first round is played with


def test_an_actor_that_fails_while_it_plays_ahead_ends_the_training_with_its_error(tmp_path: Path):
    actor = Playing(rounds=1)
    with contextlib.closing(engine(tmp_path, actor, is_asynchronous=True)) as one:
        assert one.step()
        with pytest.raises(GameFailed, match="the game is broken"):
            one.step()
    assert actor.has_failed.is_set()
    assert actor.versions == [1]


class Late(Playing):
    """An actor whose weights are older than those it is given."""

    def collect(self, policy: Policy, steps: int, *, round_no: int, explore: Any) -> Collected:
        older = replace(policy, version=max(0, policy.version - 2))
        return super().collect(older, steps, round_no=round_no, explore=explore)


def test_the_lag_of_chunks_is_reported(tmp_path: Path):
    heard: list[Event] = []
    with contextlib.closing(engine(tmp_path, Late(), heard=heard)) as one:
        for _ in range(4):
            assert one.step()
        assert one.learner.counts.stale_chunks == 0
    assert [event.lag_versions for event in heard if isinstance(event, Update)] == [1, 2, 2, 2]


def test_a_resume_reads_only_what_the_replay_still_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with contextlib.closing(engine(tmp_path, Playing())) as one:
        for _ in range(40):
            assert one.step()
        saved = one.checkpoint()
    read = list[int]()
    tail = LocalStore.tail

    def counted(store: LocalStore, cursor: Any, **how: Any) -> Any:
        page = tail(store, cursor, **how)
        read.append(len(page.items))
        return page

    monkeypatch.setattr(LocalStore, "tail", counted)
    with contextlib.closing(engine(tmp_path, Playing())) as other:
        other.restore(*saved)
        assert n_sampleable(other) == n_sampleable(one)
    assert read == [
        512 // 32 + 1
    ]  # of 40: those that are held, and the one that the oldest's lead-in repeats


@dataclass(frozen=True)
class OneRate:
    """Knobs of an algorithm that forgot what its head plays with."""

    learning_rate: float = 1e-3
    target_rate: float = 1.0


def test_an_epsilon_greedy_head_without_epsilon_is_rejected_when_the_engine_is_created(
    tmp_path: Path,
):
    learner = Learner(
        Dqn(GAME, DqnConfig(widths=(8,), batch=16, n_step=N_STEP)), OneRate(), root_seed=5
    )
    made: dict[str, Any] = {"history": None, "on_event": [].append}
    with pytest.raises(ConfigError, match="Knobs have no epsilon"):
        Inline(learner, Playing(), config=InlineConfig(steps=1000), **made)  # type: ignore[arg-type]
    Inline(learner, Playing(), config=InlineConfig(steps=1000, has_ladder=True), **made).step()  # type: ignore[arg-type]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="calls_per_version is 0"):
        InlineConfig(steps=1, calls_per_version=0)
