"""NaN, infinities and 1e30 in a training: it finishes with finite weights and names bad chunks."""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.card import Card
from tests.faults import bad_numbers
from tests.faults.bad_numbers import Poison, is_bad, lot
from tests.faults.profiles import sizes
from tests.faults.trainings import differences, traces
from understudy.act.actor import Actor
from understudy.core.clock import SystemClock
from understudy.core.errors import LearningFailed
from understudy.learn import learner as learner_module
from understudy.learn.learner import Learner
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import ReplaySource
from understudy.learn.rollouts import RolloutQueue
from understudy.stores.local import LocalStore
from understudy.training.env_info import GameChoice, inspect_env
from understudy.training.events import Event, Guarded
from understudy.training.run_store import RunStore
from understudy.training.train import Run, TrainOptions, train
from understudy.training.training_job import Checkpoint, Checkpoints

SETTINGS: dict[str, Any] = {
    "widths": [8],
    "checkpoint_every": 512,
    "eval_every": 2048,
    "eval_episodes": 5,
    "epochs": 2,
    "minibatches": 2,
    "envs": 4,
    "collect": 16,
    "capacity": 768,
    "min_inserts": 256,
    "samples_per_insert": 4.0,
    "updates_per_call": 8,
    "batch": 16,
    "rollout": 16,
    "learning_rate": 1e-3,
}
OF_PPO = {"epochs", "minibatches", "rollout"}
OF_DQN = {
    "collect",
    "capacity",
    "min_inserts",
    "samples_per_insert",
    "updates_per_call",
    "batch",
    "learning_rate",
}
STEPS = 4096
OCCASIONS = 50


@dataclass(slots=True)
class Watch:
    """Looks at every policy an actor plays with and at every checkpoint, and hears every event."""

    events: list[Guarded] = field(default_factory=list)
    policies: int = 0
    checkpoints: int = 0
    rates: list[float] = field(default_factory=list)
    learner: Learner | None = None

    def handle_event(self, event: Event) -> None:
        if isinstance(event, Guarded):
            self.events.append(event)

    @property
    def named(self) -> set[str]:
        return {name for event in self.events for name in event.chunks}

    def put_on(self, patch: pytest.MonkeyPatch) -> None:
        collect = Actor.collect
        save = Checkpoints.save
        current = Learner.current

        def watched_collect(actor: Actor, policy: Any, steps: int, **how: Any) -> Any:
            self.policies += 1
            assert all(np.isfinite(array).all() for array in policy.weights.values()), (
                "a bad policy was published"
            )
            return collect(actor, policy, steps, **how)

        def watched_save(checkpoints: Checkpoints, checkpoint: Checkpoint) -> Path:
            self.checkpoints += 1
            state = {
                name: array
                for name, array in checkpoint.arrays.items()
                if name.startswith("state.")
            }
            assert state
            assert all(np.isfinite(array).all() for array in state.values()), (
                "a bad state was checkpointed"
            )
            return save(checkpoints, checkpoint)

        def watched_current(learner: Learner) -> Any:
            self.learner = learner
            self.rates.append(learner.counts.rate_scale)
            return current(learner)

        patch.setattr(Actor, "collect", watched_collect)
        patch.setattr(Checkpoints, "save", watched_save)
        patch.setattr(Learner, "current", watched_current)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarantine is read in pages; small ones, so that no run here has only one."""
    real = LocalStore.quarantined
    monkeypatch.setattr(
        LocalStore,
        "quarantined",
        lambda store, *, after_id=0: real(store, after_id=after_id, limit=7),
    )


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    watch.put_on(monkeypatch)
    return watch


def settings_of(algorithm: Any) -> dict[str, Any]:
    others = OF_DQN if algorithm == "ppo" else OF_PPO
    return {name: value for name, value in SETTINGS.items() if name not in others}


def train_watched(watch: Watch, out: Path, algorithm: Any = "dqn", **settings: Any) -> Run:
    chosen = {**settings_of(algorithm), "steps": STEPS, **settings}
    return train(
        "CartPole-v1",
        algorithm=algorithm,
        seed=3,
        until=400,
        out=out,
        settings=chosen,
        on_event=watch.handle_event,
    )


def poison(*, among: int, seed: int, occasions: int = OCCASIONS) -> Poison:
    rng = np.random.default_rng(seed)
    return Poison(set(rng.choice(among, occasions, replace=False).tolist()), rng)


def names_of(ids: Any) -> set[str]:
    return {f"{session}/{number}" for session, number in ids}


def quarantined(run: Path) -> set[str]:
    game = inspect_env(GameChoice(game="CartPole-v1")).spec
    with contextlib.closing(RunStore(run / "store", game, clock=SystemClock())) as history:
        return names_of(history.quarantined)


# --- Chunks, ring, gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_bad_numbers_in_chunks(
    algorithm: str,
    watch: Watch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    card: Card,
) -> None:
    bad = poison(among=STEPS // 64, seed=seed)
    collect = Actor.collect
    bad.columns += ("logp",) if algorithm == "ppo" else ()
    monkeypatch.setattr(
        Actor, "collect", lambda *given, **how: bad.collected(collect(*given, **how))
    )
    run = train_watched(watch, tmp_path / "run", algorithm)
    assert len(bad.chunks) == OCCASIONS
    assert run.result["env_steps"] == STEPS
    assert watch.named == names_of(bad.chunks)
    if algorithm == "dqn":
        assert quarantined(run.folder) == watch.named
        assert run.result["skipped_updates"] == 0
    card.line(
        "NaN, infinities and 1e30 in chunks: refused and named", tried=OCCASIONS, held=OCCASIONS
    )


@pytest.mark.parametrize("prioritised", [True, False], ids=["prioritised", "uniform"])
def test_bad_numbers_in_the_replays_ring(
    prioritised: bool,
    watch: Watch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    card: Card,
) -> None:
    bad = poison(among=100, seed=seed)
    draw = ReplaySource.draw
    met: set[Any] = set()

    def poisoned_draw(source: ReplaySource, call_no: int, *, importance_exponent: float) -> Any:
        assert isinstance(source.replay, HostReplay)
        bad.ring(source.replay)
        batches = draw(source, call_no, importance_exponent=importance_exponent)
        assert source._drawn is not None
        # 1e30 in an observation may fall on deaf units; whatever else is bad spoils its update for
        # sure.
        numbers = [batches.reward[..., None], batches.obs["obs"], batches.next_obs["obs"]]
        surely = is_bad(numbers[0]).any(-1) | np.any(
            [~np.isfinite(one).all(-1) for one in numbers], axis=0
        )
        met.update(source.replay.chunks_of(source._drawn.rows[surely]))
        return batches

    monkeypatch.setattr(ReplaySource, "draw", poisoned_draw)
    run = train_watched(watch, tmp_path / "run", prioritised=prioritised)
    assert run.result["env_steps"] == STEPS
    assert run.result["skipped_updates"] > 0
    assert len(met) > 20
    assert names_of(met) <= watch.named == quarantined(run.folder)
    assert len(watch.named) <= 2 * OCCASIONS  # a row's window may reach into the chunk before
    card.line(
        "NaN, infinities and 1e30 in the ring: skipped and named", tried=OCCASIONS, held=OCCASIONS
    )


@sizes("steps", short=STEPS, full=4 * STEPS)
def test_bad_numbers_in_rollouts(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, card: Card, steps: int
) -> None:
    # Few of the rollouts: ten bad ones in a row would restore a checkpoint.
    occasions = min(20 * steps // STEPS, OCCASIONS)
    bad = poison(among=steps // 64, seed=seed, occasions=occasions)
    draw = RolloutQueue.draw

    def poisoned_draw(source: RolloutQueue, call_no: int, *, importance_exponent: float) -> Any:
        rollout = draw(source, call_no, importance_exponent=importance_exponent)
        return bad.rollout(rollout, source._played)

    monkeypatch.setattr(RolloutQueue, "draw", poisoned_draw)
    run = train_watched(watch, tmp_path / "run", "ppo", steps=steps)
    assert run.result["skipped_updates"] == occasions
    assert watch.named == names_of(bad.chunks)
    card.line(
        "NaN, infinities and 1e30 in rollouts: skipped and named", tried=occasions, held=occasions
    )


def test_bad_gradients_are_skipped_without_blaming_a_chunk(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: Card
) -> None:
    draw = ReplaySource.draw
    expected = []

    def counted_draw(source: ReplaySource, call_no: int, *, importance_exponent: float) -> Any:
        batches = draw(source, call_no, importance_exponent=importance_exponent)
        expected.append(int((lot(batches.reward, batches.action) % 11 == 0).sum()))
        return batches

    monkeypatch.setattr(ReplaySource, "draw", counted_draw)
    run = train_watched(watch, tmp_path / "run", bad_numbers.SometimesSpoiled)
    assert run.result["skipped_updates"] == sum(expected) > OCCASIONS
    assert (watch.named, quarantined(run.folder)) == (set(), set())
    assert watch.checkpoints > 5
    card.line(
        "NaN, infinities and 1e30 in the gradient: skipped", tried=sum(expected), held=sum(expected)
    )


# --- Going back -----------------------------------------------------------------------------------


def test_ten_skips_in_a_row_restore_the_last_checkpoint_and_halve_the_rate(
    watch: Watch, tmp_path: Path
) -> None:
    run = train_watched(watch, tmp_path / "run", bad_numbers.SpoiledWhileFast, steps=1536)
    (event,) = watch.events  # and no chunk is blamed for weights that are off in every row
    assert "weights of step" in event.what
    assert "learning rate halved" in event.what
    assert set(watch.rates) == {1.0, 0.5}
    assert 10 <= run.result["skipped_updates"] < 10 + SETTINGS["updates_per_call"]
    assert run.result["env_steps"] == 1536


def test_three_restores_end_a_training_that_stays_bad(watch: Watch, tmp_path: Path) -> None:
    with pytest.raises(
        LearningFailed, match=r"not finite after 3 restores; check the rewards.*learning_rate"
    ):
        # A rate that is still too high after three restores.
        train_watched(watch, tmp_path / "run", bad_numbers.SpoiledWhileFast, learning_rate=1e-2)
    assert ["restored" in event.what for event in watch.events] == [True] * 3
    assert min(watch.rates) == 1 / 8
    assert watch.learner is not None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(watch.learner.state))


def test_without_the_guard_the_same_numbers_reach_the_weights(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: Card
) -> None:
    def unguarded(algorithm: Any) -> Any:
        def call(state: Any, batches: Any, knobs: Any) -> Any:
            return jax.lax.scan(
                lambda state, batch: algorithm.update(state, batch, knobs), state, batches
            )

        return call

    monkeypatch.setattr(learner_module, "_guarded", unguarded)
    monkeypatch.setattr(learner_module, "_programs", deque())  # no guarded program is reused
    with pytest.raises(
        LearningFailed, match="not finite"
    ):  # seen when published, or after three restores
        train_watched(watch, tmp_path / "run", bad_numbers.SometimesSpoiled)
    assert watch.learner is not None
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(watch.learner.state))
    card.line("controls: without the guard weights are not finite", tried=1, held=1)


# --- A game that is bad itself --------------------------------------------------------------------


@contextlib.contextmanager
def dying_at(step: int | None) -> Iterator[Any]:
    """What hears a training and ends it at a step, as a kill would."""

    class Killed(BaseException):
        pass

    def handle_event(event: Event) -> None:
        if step is not None and event.env_steps > step:
            raise Killed

    with contextlib.suppress(Killed):
        yield handle_event


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_game_of_bad_numbers_is_trained_to_the_end_and_resumed_to_the_same_bits(
    algorithm: str, watch: Watch, tmp_path: Path
) -> None:
    words: dict[str, Any] = {
        "algorithm": algorithm,
        "seed": 3,
        "steps": 2048,
        "settings": settings_of(algorithm),
        "options": TrainOptions(wrapper="tests.faults.bad_numbers:BadGame"),
    }
    train("CartPole-v1", out=tmp_path / "whole", on_event=watch.handle_event, **words)
    assert len(watch.named) > 10
    for step in (700, 1300, None):
        with dying_at(step) as handle_event:
            train("CartPole-v1", out=tmp_path / "run", resume=True, on_event=handle_event, **words)
    assert not differences(traces(tmp_path / "whole"), traces(tmp_path / "run"))
    if algorithm == "dqn":
        assert (
            len(quarantined(tmp_path / "whole"))
            == len(quarantined(tmp_path / "run"))
            == len(watch.named)
        )
