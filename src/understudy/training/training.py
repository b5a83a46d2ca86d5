"""The training loop: rounds, evaluations and checkpoints, from the first step to the result."""

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.act.evaluate import Evaluated
from understudy.act.process_team import process_team
from understudy.act.ray_team import ray_team
from understudy.act.team import LocalTeam, TeamPlan
from understudy.algorithm import Rollouts, Transitions
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, LearningFailed
from understudy.core.statistics import mean
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn.learner import Learner
from understudy.nn.policy import Policy
from understudy.ports import Team
from understudy.training.env_info import GameChoice
from understudy.training.evaluation import AT_THE_END, CONFIRMING, WHILE_TRAINING, Evaluator
from understudy.training.events import (
    CheckpointSaved,
    EpisodeEnded,
    Evaluation,
    Event,
    Guarded,
    HoldInterrupts,
    OnEvent,
    Stop,
)
from understudy.training.folder import RunFolder
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore
from understudy.training.inline import Inline, InlineConfig
from understudy.training.run_store import RunStore
from understudy.training.settings import RunPart, RunSettings
from understudy.training.training_job import Engine, TrainingJob

if TYPE_CHECKING:
    from understudy.workers.team import WorkerTeam


@dataclass(slots=True)
class Clocks:
    """Time spent, in seconds."""

    train_s: float = 0.0
    eval_s: float = 0.0
    compile_s: float = 0.0
    startup_s: float = 0.0


class Training:
    """Repeats rounds until the steps are done, the goal is reached, or a listener stops it."""

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        part: RunPart,
        *,
        evaluator: Evaluator,
        until: float | None,
        on_event: OnEvent | None,
        extensions: int = 0,
        history: RunStore | None = None,
    ) -> None:
        """`extensions`: how often the run had finished before and was extended.

        `history`: the run's store, which is trimmed after each checkpoint; None keeps everything.
        """
        self.engine = engine
        self.folder = folder
        self._part = part
        self._evaluator = evaluator
        self._until = until
        self._listener = on_event
        self._extensions = extensions
        self._history = history
        self._job = TrainingJob(engine, folder.checkpoints, on_event=self.handle_event)
        self.workers: WorkerTeam | None = None
        """The team, if it consists of workers."""
        self.clocks = Clocks()
        self.resumed_at_step = 0
        self.best_mean = -math.inf
        self.is_solved = False
        self._final: Array | None = None
        self.final_cut = 0
        """Episodes of the final test that were cut after `eval_max_steps` steps."""
        self.episodes = 0
        self.guarded_chunks = 0
        self._recent: deque[float] = deque(maxlen=100)
        self._next_eval = part.eval_every
        self._next_checkpoint = 0
        self.confirmations = 0
        self._best_extension = 0
        """The number of extensions when the best policy was found."""
        self._must_stop = False
        self.evaluated_steps = -1
        """The step of the last evaluation."""
        self.hold_interrupts: HoldInterrupts = contextlib.nullcontext
        """Entered around each round and checkpoint, which an interrupt would leave incomplete."""
        self._is_between_rounds = True

    def handle_event(self, event: Event) -> None:
        """Handle an event of the run and pass it on to the listener."""
        if isinstance(event, EpisodeEnded):
            self._recent.append(event.return_)
            self.episodes += 1
        if isinstance(event, Guarded):
            self.guarded_chunks += len(event.chunks)
            self.folder.add_guarded(event)
        if self._listener is not None and self._listener(event) is Stop:
            self._must_stop = True

    # --- The loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end; after an exception or a kill, the last checkpoint can be resumed.

        An interrupt between two rounds saves one first. LearningFailed if it ends without a single
        update, because chunks or updates were rejected.
        """
        try:
            if self.engine.steps >= self._next_eval:
                self._evaluate()  # it was due when the run was interrupted
            while not (self.engine.is_done or self.is_solved or self._must_stop):
                self.step()
            if self.workers is not None:
                self.workers.finish()
            if self.evaluated_steps != self.engine.steps:
                self._evaluate()
            self._save()  # also if solved: the run may be extended from here
        except KeyboardInterrupt:
            if self._is_between_rounds and self.engine.steps > max(0, self._job.saved_steps):
                self._save()
            raise
        counts = self.engine.learner.counts
        n_rejected = self.guarded_chunks + counts.skipped_updates
        if counts.updates == counts.skipped_updates and n_rejected and not self._must_stop:
            raise LearningFailed(
                f"nothing was learned: {self.guarded_chunks} chunks were rejected and "
                f"{counts.skipped_updates} updates skipped; correct the game's rewards and "
                f"observations ({self.folder.guarded} has the reasons), then train again"
            )

    def step(self) -> None:
        """One round, then the evaluation and the checkpoint that are due."""
        started_s = time.perf_counter()
        began_at = self.engine.steps
        compiled_s = self.engine.learner.compile_s
        with self.hold_interrupts():
            self._is_between_rounds = False
            self._job.step()
            self._is_between_rounds = True
        compiled_s = self.engine.learner.compile_s - compiled_s
        self.clocks.compile_s += compiled_s
        self.clocks.train_s += time.perf_counter() - started_s - compiled_s
        if self.engine.steps >= self._next_eval:
            self._evaluate()
        # Saved now if the next round would pass the mark: a kill costs at most one interval.
        if 2 * self.engine.steps - began_at > self._next_checkpoint and not self.is_solved:
            started_s = time.perf_counter()
            self._save()
            self.clocks.train_s += time.perf_counter() - started_s

    def _evaluate(self) -> None:
        started_s = time.perf_counter()
        env_steps = self.engine.steps
        played = self._evaluator.play(
            self.engine.policy, episodes=self._part.eval_episodes, series=WHILE_TRAINING
        )
        if played is None or not len(returns := self._finite(played.returns)):
            self._set_evaluated()
            return
        estimate = mean(returns)
        all_finite = len(returns) == len(played.returns)
        is_best = all_finite and estimate.value > self.best_mean
        reaches = all_finite and self._until is not None and estimate.value >= self._until
        confirming = self._confirming() if reaches else None
        if is_best or confirming is not None:
            self.folder.save_policy("best", self.engine.policy)
        recent = [value for value in self._recent if math.isfinite(value)]
        low, high = (math.nan if end is None else end for end in (estimate.low, estimate.high))
        self.folder.add_to_curve(
            {
                "env_steps": env_steps,
                "updates": self.engine.learner.counts.updates,
                "train_s": self.clocks.train_s,
                "return_mean": estimate.value,
                "return_low": low,
                "return_high": high,
                "train_return": float(np.mean(recent)) if recent else math.nan,
            }
        )
        # Only now, and all of it: a run that is interrupted before evaluates again.
        if is_best:
            self.best_mean = estimate.value
            self._best_extension = self._extensions
        if reaches:
            self.confirmations += 1
        if confirming is not None:
            self.is_solved = True
            self._final = confirming.returns
            self.final_cut = confirming.n_cut
        self.clocks.eval_s += time.perf_counter() - started_s
        self._set_evaluated()
        self.handle_event(
            Evaluation(
                env_steps=env_steps,
                returns=returns.tolist(),
                mean=estimate.value,
                low=estimate.low,
                high=estimate.high,
                is_best=is_best,
                n_cut=played.n_cut,
            )
        )

    def _set_evaluated(self) -> None:
        self._next_eval = self.engine.steps + self._part.eval_every
        self.evaluated_steps = self.engine.steps

    def _confirming(self) -> Evaluated | None:
        """Episodes on unused seeds that reach the goal again; None if they do not."""
        assert self._until is not None
        tested = self._tested(self.engine.policy, series=CONFIRMING, attempt=self.confirmations)
        return None if tested is None or tested.returns.mean() < self._until else tested

    def final_returns(self) -> Array | None:
        """The best policy's returns in its final test, on new seeds; None unless all are finite.

        No evaluation has used the seeds. For a solved run, these are the episodes that confirmed
        it.
        """
        if self._final is None:
            # The same policy always gets the same seeds, however often its run is extended, so
            # that it has only one final test.
            tested = self._tested(
                self.folder.policy(), series=AT_THE_END, attempt=self._best_extension
            )
            if tested is None:
                return None
            self._final = tested.returns
            self.final_cut = tested.n_cut
            # Solved only if the goal was reached twice: in an evaluation and here.
            if self._until is not None:
                self.is_solved = min(self.best_mean, float(self._final.mean())) >= self._until
        return self._final

    @property
    def why_no_return(self) -> str:
        """Why there is no final return, if there is none."""
        return self._evaluator.why_not or "returns of its final episodes are not finite"

    def _tested(self, policy: Policy, *, series: int, attempt: int = 0) -> Evaluated | None:
        tested = self._evaluator.play(
            policy, episodes=self._part.test_episodes, series=series, attempt=attempt
        )
        if tested is None or len(self._finite(tested.returns)) < len(tested.returns):
            return None
        return tested

    def _finite(self, returns: Array) -> Array:
        """The finite returns; a Guarded event reports NaN and infinite ones."""
        is_finite = np.isfinite(returns)
        if not is_finite.all():
            self.handle_event(
                Guarded(
                    env_steps=self.engine.steps,
                    what=f"{(~is_finite).sum()} of {len(returns)} evaluation episodes returned "
                    "NaN or infinity: they are ignored, and the others count neither as best nor "
                    "towards the goal",
                )
            )
        return returns[is_finite]

    # --- Checkpoints ------------------------------------------------------------------------------

    def _save(self) -> None:
        with self.hold_interrupts():
            self._save_now()

    def _save_now(self) -> None:
        env_steps = self.engine.steps
        self._next_checkpoint = env_steps + self._part.checkpoint_every
        # As arrays: a game may return NaN and infinities, which JSON cannot hold.
        arrays: dict[str, Array] = {
            "training.best_mean": np.array(self.best_mean),
            "training.recent": np.array(self._recent, float),
        }
        if self._final is not None:
            arrays["training.final"] = self._final
        facts = {
            "is_solved": self.is_solved,
            "extensions": self._extensions,
            "next_eval": self._next_eval,
            "evaluated_steps": self.evaluated_steps,
            "episodes": self.episodes,
            "guarded_chunks": self.guarded_chunks,
            "confirmations": self.confirmations,
            "final_cut": self.final_cut,
            "best_extension": self._best_extension,
            "train_s": self.clocks.train_s,
            "eval_s": self.clocks.eval_s,
            "compile_s": self.clocks.compile_s,
        }
        path = self._job.save(arrays, {"training": facts})
        if self._history is not None:
            self._history.trim(self.engine.learner.source.needed_chunks())
        self.folder.save_policy("last", self.engine.policy)
        self.handle_event(CheckpointSaved(env_steps=env_steps, path=str(path)))

    def resume(self) -> bool:
        """Resume from the newest checkpoint; False if there is none yet."""
        checkpoint = self._job.resume()
        if checkpoint is None:
            return False
        facts = checkpoint.facts["training"]
        self.best_mean = float(checkpoint.arrays["training.best_mean"])
        self._recent.extend(checkpoint.arrays["training.recent"].tolist())
        self._next_eval = facts["next_eval"]
        self.evaluated_steps = facts["evaluated_steps"]
        self.episodes = facts["episodes"]
        self.guarded_chunks = facts["guarded_chunks"]
        self.confirmations = facts["confirmations"]
        self._best_extension = facts.get("best_extension", 0)
        self.clocks.compile_s = facts.get("compile_s", 0.0)
        self.clocks.train_s = facts["train_s"]
        self.clocks.eval_s = facts["eval_s"]
        if facts.get("is_solved") and facts["extensions"] == self._extensions:
            # Killed between its last checkpoint and its result, and not extended since.
            self.is_solved = True
            self._final = checkpoint.arrays["training.final"]
            self.final_cut = facts.get("final_cut", 0)
        self.resumed_at_step = checkpoint.env_steps
        self._next_checkpoint = checkpoint.env_steps + self._part.checkpoint_every
        return True


# --- Construction: algorithm, learner, team, engine -----------------------------------------------


def build(
    folder: RunFolder,
    settings: RunSettings,
    facts: Mapping[str, Any],
    *,
    spec: GameSpec,
    choice: GameChoice,
    evaluator: Evaluator,
    on_event: OnEvent | None,
    opened: contextlib.ExitStack,
) -> Training:
    """Build the training that a run's facts describe; its resources are closed with `opened`.

    It plays the game or, without needing the game installed, only reads a store.
    """
    part = settings.run
    algorithm = settings.algorithm_type(spec, settings.config)
    config = settings.learner_config()
    is_played = facts["from_store"] is None
    if not is_played:
        config = replace(config, limiter=None)
        if not isinstance(algorithm.needs, Transitions):
            raise ConfigError(
                f"{settings.algorithm} is on-policy and learns only from its own play; use bc, "
                "iql or dqn to train from a store"
            )
    start = None if facts["init_from"] is None else folder.start().weights
    learner = Learner(
        algorithm, settings.knobs, root_seed=facts["seed"], config=config, start=start
    )

    def handle_event(event: Event) -> None:  # the engine is created before its training
        training.handle_event(event)

    engine: Engine
    history = None
    workers: WorkerTeam | None = None
    if is_played:
        needs = algorithm.needs
        num_envs = part.envs
        collect = part.collect
        if isinstance(needs, Rollouts):
            num_envs = needs.envs
            collect = needs.steps
        team: Team
        if facts.get("engine") == "workers":
            # Imported late: other engines need no server.
            from understudy.training.worker_team import make_worker_team

            team = workers = make_worker_team(choice, facts, part, game=spec, folder=folder)
        else:
            team = make_team(choice, facts, part, game=spec, num_envs=num_envs)
        opened.enter_context(contextlib.closing(team))
        if not learner.is_on_policy:
            history = opened.enter_context(
                contextlib.closing(RunStore(folder.store, spec, clock=SystemClock()))
            )
        engine = Inline(
            learner,
            team,
            history=history,
            on_event=handle_event,
            config=InlineConfig(
                steps=part.steps,
                horizon=part.horizon,
                collect=collect,
                is_asynchronous=part.asynchronous,
                has_ladder=part.ladder,
            ),
        )
    else:
        follower = StoreFollower(Path(facts["from_store"]))
        opened.enter_context(contextlib.closing(follower.view))
        engine = FromStore(
            learner,
            follower,
            steps=part.steps,
            horizon=part.horizon,
            clock=SystemClock(),
            on_event=handle_event,
        )
    opened.callback(engine.close)
    training = Training(
        engine,
        folder,
        part,
        evaluator=evaluator,
        until=facts["until"],
        on_event=on_event,
        extensions=facts.get("extensions", 0),
        history=None if part.keep_history else history,
    )
    training.workers = workers
    return training


def make_team(
    choice: GameChoice, facts: Mapping[str, Any], part: RunPart, *, game: GameSpec, num_envs: int
) -> Team:
    """Create the actors of a run, where its engine plays."""
    engine = facts.get("engine", "inline")
    if choice.num_envs is not None and (engine != "inline" or part.actors > 1):
        raise ConfigError(
            f"the game is a vector env ({choice.name}), which one actor plays in this process; "
            "pass a function of num_envs that creates one, or omit engine and actors"
        )
    plan = TeamPlan(
        make_envs=functools.partial(choice.make, is_training=True),
        game=game,
        root_seed=facts["seed"],
        created_ms=facts["created_ms"],
        num_envs=num_envs,
        num_actors=part.actors,
        incarnation=facts["starts"],
        owns_envs=choice.num_envs is None,
    )
    if engine == "process":
        return process_team(plan, is_asynchronous=part.asynchronous)
    if engine == "ray":
        return ray_team(plan, address=facts.get("address"), is_asynchronous=part.asynchronous)
    return LocalTeam(plan)
