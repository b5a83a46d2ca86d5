"""A training from its first step to its result: rounds, evaluations, checkpoints, in this order
and no other."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.act.actor import Actor
from understudy.algorithm import Rollouts, Transitions
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError
from understudy.core.statistics import mean
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn.learner import Learner
from understudy.nn.policy import Policy
from understudy.training.env_info import GameChoice
from understudy.training.evaluation import AT_THE_END, CONFIRMING, WHILE_TRAINING, Judge
from understudy.training.events import (
    CheckpointSaved,
    EpisodeEnded,
    Evaluation,
    Event,
    Guarded,
    OnEvent,
    Stop,
)
from understudy.training.folder import RunFolder
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore
from understudy.training.inline import Inline, InlineConfig, RunStore
from understudy.training.settings import RunPart, RunSettings
from understudy.training.training_job import Engine, TrainingJob

FINAL_EPISODES = 100


@dataclass(slots=True)
class Clocks:
    """Where the time went, in seconds."""

    train_s: float = 0.0
    eval_s: float = 0.0
    compile_s: float = 0.0
    startup_s: float = 0.0


class Training:
    """Repeats rounds until the steps are done, the goal is reached, or somebody says stop."""

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        part: RunPart,
        *,
        judge: Judge,
        until: float | None,
        on_event: OnEvent | None,
        extensions: int = 0,
    ) -> None:
        """`extensions`: how often the run had ended before, and was asked to go on."""
        self.engine = engine
        self.folder = folder
        self._part = part
        self._judge = judge
        self._until = until
        self._listener = on_event
        self._extensions = extensions
        self._job = TrainingJob(engine, folder.checkpoints, on_event=self.hear)
        self.clocks = Clocks()
        self.resumed_at_step = 0
        self.best_mean = -math.inf
        self.is_solved = False
        self._final: Array | None = None
        self.episodes = self.guarded_chunks = 0
        self._recent: deque[float] = deque(maxlen=100)
        self._next_eval = part.eval_every
        self._next_checkpoint = 0
        self.confirmations = 0
        self._best_extension = 0
        """How often the run had been extended when its best policy was found."""
        self._asked_to_stop = False
        self.judged_steps = -1
        """When the last evaluation was."""

    def hear(self, event: Event) -> None:
        """Every event of the run passes here."""
        if isinstance(event, EpisodeEnded):
            self._recent.append(event.return_)
            self.episodes += 1
        if isinstance(event, Guarded):
            self.guarded_chunks += len(event.chunks)
            self.folder.add_guarded(event)
        if self._listener is not None and self._listener(event) is Stop:
            self._asked_to_stop = True

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end; an exception or a kill leaves the last checkpoint to go on from."""
        while not (self.engine.is_done or self.is_solved or self._asked_to_stop):
            self.step()
        if self.judged_steps != self.engine.steps:
            self._evaluate()
        self._save()  # also where it is solved: it may be asked to go on from here

    def step(self) -> None:
        """One round, then what is due after it."""
        started_s = time.perf_counter()
        began_at = self.engine.steps
        compiled_s = self.engine.learner.compile_s
        self._job.step()
        compiled_s = self.engine.learner.compile_s - compiled_s
        self.clocks.compile_s += compiled_s
        self.clocks.train_s += time.perf_counter() - started_s - compiled_s
        if self.engine.steps >= self._next_eval:
            self._evaluate()
        # Before the mark would be passed: whoever is killed repeats no more than an interval.
        if 2 * self.engine.steps - began_at > self._next_checkpoint and not self.is_solved:
            started_s = time.perf_counter()
            self._save()
            self.clocks.train_s += time.perf_counter() - started_s

    def _evaluate(self) -> None:
        started_s = time.perf_counter()
        env_steps = self.engine.steps
        self._next_eval = env_steps + self._part.eval_every
        self.judged_steps = env_steps
        played = self._judge.returns(
            self.engine.policy, episodes=self._part.eval_episodes, series=WHILE_TRAINING
        )
        if played is None or not len(returns := self._finite(played)):
            return
        found = mean(returns)
        is_whole = len(returns) == len(played)
        is_best = is_whole and found.value > self.best_mean
        if is_best:
            self.best_mean = found.value
            self._best_extension = self._extensions
            self.folder.save_policy("best", self.engine.policy)
        if is_whole and self._until is not None and found.value >= self._until:
            self._confirm(self._until)
        self.clocks.eval_s += time.perf_counter() - started_s
        recent = [value for value in self._recent if math.isfinite(value)]
        low, high = (math.nan if end is None else end for end in (found.low, found.high))
        self.folder.add_to_curve(
            {
                "env_steps": env_steps,
                "updates": self.engine.learner.counts.updates,
                "train_s": self.clocks.train_s,
                "return_mean": found.value,
                "return_low": low,
                "return_high": high,
                "train_return": float(np.mean(recent)) if recent else math.nan,
            }
        )
        self.hear(
            Evaluation(
                env_steps=env_steps,
                returns=returns.tolist(),
                mean=found.value,
                low=found.low,
                high=found.high,
                is_best=is_best,
            )
        )

    def _confirm(self, until: float) -> None:
        """Whoever reaches the goal must reach it on seeds that were never used before; only then
        the run is solved."""
        returns = self._hundred(self.engine.policy, series=CONFIRMING, attempt=self.confirmations)
        self.confirmations += 1
        if returns is not None and returns.mean() >= until:
            self.is_solved = True
            self._final = returns
            self.folder.save_policy("best", self.engine.policy)

    def final_returns(self) -> Array | None:
        """100 episodes of the best policy on seeds that no evaluation before has used; None unless
        all are finite.

        Of a run that is solved, they are those that confirmed it.
        """
        if self._final is None:
            # The same policy has the same seeds, however often its run is extended: there is one
            # last test, not many.
            self._final = self._hundred(
                self.folder.policy(), series=AT_THE_END, attempt=self._best_extension
            )
            # The goal counts when it was reached twice: in an evaluation, and here.
            if self._final is not None and self._until is not None:
                self.is_solved = min(self.best_mean, float(self._final.mean())) >= self._until
        return self._final

    def _hundred(self, policy: Policy, *, series: int, attempt: int = 0) -> Array | None:
        returns = self._judge.returns(
            policy, episodes=FINAL_EPISODES, series=series, attempt=attempt
        )
        return None if returns is None or len(self._finite(returns)) < len(returns) else returns

    def _finite(self, returns: Array) -> Array:
        """Without what a game said that is NaN or infinite, which is told."""
        is_finite = np.isfinite(returns)
        if not is_finite.all():
            self.hear(
                Guarded(
                    env_steps=self.engine.steps,
                    what=f"{(~is_finite).sum()} of {len(returns)} evaluated episodes returned "
                    "NaN or infinity: they are left out, and the others count neither as best nor "
                    "towards the goal",
                )
            )
        return returns[is_finite]

    # --- checkpoints ------------------------------------------------------------------------------

    def _save(self) -> None:
        env_steps = self.engine.steps
        self._next_checkpoint = env_steps + self._part.checkpoint_every
        # Returns may be anything a game says, also what JSON cannot: NaN, infinities.
        recent = np.array(self._recent, float)
        arrays: dict[str, Array] = {
            "training.best_mean": np.array(self.best_mean),
            "training.recent": recent,
        }
        if self._final is not None:
            arrays["training.final"] = self._final
        facts = {
            "is_solved": self.is_solved,
            "extensions": self._extensions,
            "next_eval": self._next_eval,
            "judged_steps": self.judged_steps,
            "episodes": self.episodes,
            "guarded_chunks": self.guarded_chunks,
            "confirmations": self.confirmations,
            "best_extension": self._best_extension,
            "train_s": self.clocks.train_s,
            "eval_s": self.clocks.eval_s,
            "compile_s": self.clocks.compile_s,
        }
        path = self._job.save(arrays, {"training": facts})
        self.folder.save_policy("last", self.engine.policy)
        self.hear(CheckpointSaved(env_steps=env_steps, path=str(path)))

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False when there is none yet."""
        checkpoint = self._job.resume()
        if checkpoint is None:
            return False
        facts = checkpoint.facts["training"]
        self.best_mean = float(checkpoint.arrays["training.best_mean"])
        self._recent.extend(checkpoint.arrays["training.recent"].tolist())
        self._next_eval = facts["next_eval"]
        self.judged_steps = facts["judged_steps"]
        self.episodes = facts["episodes"]
        self.guarded_chunks = facts["guarded_chunks"]
        self.confirmations = facts["confirmations"]
        self._best_extension = facts.get("best_extension", 0)
        self.clocks.compile_s = facts.get("compile_s", 0.0)
        self.clocks.train_s = facts["train_s"]
        self.clocks.eval_s = facts["eval_s"]
        if facts.get("is_solved") and facts["extensions"] == self._extensions:
            # It was killed between its last checkpoint and its result; nobody has asked for more.
            self.is_solved = True
            self._final = checkpoint.arrays["training.final"]
        self.resumed_at_step = checkpoint.env_steps
        self._next_checkpoint = checkpoint.env_steps + self._part.checkpoint_every
        return True


# --- Building: envs, algorithm, learner, actor, engine --------------------------------------------


def build(
    folder: RunFolder,
    settings: RunSettings,
    facts: Mapping[str, Any],
    *,
    spec: GameSpec,
    choice: GameChoice,
    judge: Judge,
    on_event: OnEvent | None,
    opened: contextlib.ExitStack,
) -> Training:
    """The training that a run's facts describe; what it opened is closed with `opened`.

    It plays the game itself, or only reads a store, for which the game need not be installed.
    """
    part = settings.run
    algorithm = settings.algorithm_type(spec, settings.config)
    config = settings.learner_config()
    is_played = facts["from_store"] is None
    if not is_played:
        config = replace(config, limiter=None)
        if not isinstance(algorithm.needs, Transitions):
            raise ConfigError(
                f"{settings.algorithm} learns only from what it plays itself; use bc or dqn with "
                "--from-store"
            )
    start = None if facts["init_from"] is None else folder.start().weights
    learner = Learner(
        algorithm, settings.knobs, root_seed=facts["seed"], config=config, start=start
    )

    def hear(event: Event) -> None:  # an engine is made before its training
        training.hear(event)

    engine: Engine
    if is_played:
        needs = algorithm.needs
        num_envs = part.envs
        collect = part.collect
        if isinstance(needs, Rollouts):
            num_envs = needs.envs
            collect = needs.steps
        envs = opened.enter_context(contextlib.closing(choice.make(num_envs)))
        history = None
        if not learner.is_on_policy:
            history = opened.enter_context(
                contextlib.closing(RunStore(folder.store, spec, clock=SystemClock()))
            )
        engine = Inline(
            learner,
            history=history,
            on_event=hear,
            actor=Actor(
                envs,
                spec,
                root_seed=facts["seed"],
                created_ms=facts["created_ms"],
                incarnation=facts["starts"],
            ),
            config=InlineConfig(
                steps=part.steps,
                collect=collect,
                is_asynchronous=part.asynchronous,
                has_ladder=part.ladder,
            ),
        )
    else:
        follower = StoreFollower(Path(facts["from_store"]))
        engine = FromStore(learner, follower, steps=part.steps, clock=SystemClock(), on_event=hear)
    opened.callback(engine.close)
    training = Training(
        engine,
        folder,
        part,
        judge=judge,
        until=facts["until"],
        on_event=on_event,
        extensions=facts.get("extensions", 0),
    )
    return training
