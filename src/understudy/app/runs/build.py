"""Builds a training from a run's facts and settings: envs, algorithm, learner, actor, engine."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.act.actor import Actor
from understudy.app.runs.choice import GameChoice, Seen
from understudy.app.runs.evaluation import Judge, judge_of
from understudy.app.runs.folder import RunFolder
from understudy.app.runs.settings import Settings
from understudy.app.runs.training import Training
from understudy.core.algorithm import Rollouts, Transitions
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError
from understudy.core.events import Event, OnEvent
from understudy.core.game import GameSpec
from understudy.engines.follower import StoreFollower
from understudy.engines.from_store import FromStore
from understudy.engines.history import History
from understudy.engines.inline import Inline, InlineConfig
from understudy.learn.learner import Learner, LearnerConfig


def build(
    folder: RunFolder, settings: Settings, facts: Mapping[str, Any], *, seen: Seen, choice: GameChoice,
    on_event: OnEvent | None, opened: contextlib.ExitStack,
) -> Training:  # fmt: skip
    """A training that plays the game itself; what it opened is closed with `opened`."""
    algorithm = settings.algorithm_type(seen.spec, settings.config)
    needs, part, seed = algorithm.needs, settings.run, facts["seed"]
    is_on_policy = isinstance(needs, Rollouts)
    envs = opened.enter_context(contextlib.closing(choice.make(needs.envs if is_on_policy else part.envs)))
    learner = _learner(algorithm, folder, settings, facts=facts, config=settings.learner_config())
    history = None
    if not is_on_policy:
        history = opened.enter_context(contextlib.closing(History(folder.store, seen.spec, clock=SystemClock())))
    listener = Listener()
    engine = Inline(
        learner, Actor(envs, seen.spec, root_seed=seed, created_ms=facts["created_ms"], incarnation=facts["starts"]),
        history=history, on_event=listener,
        config=InlineConfig(
            steps=part.steps, collect=needs.steps if is_on_policy else part.collect,
            is_asynchronous=part.asynchronous, has_ladder=part.ladder,
        ),
    )  # fmt: skip
    opened.callback(engine.close)
    return _listening(Training(
        engine, folder, part, judge=judge_of(choice, seen, part.eval_episodes, opened), until=facts["until"],
        on_event=on_event, extensions=facts.get("extensions", 0),
    ), listener)  # fmt: skip


def build_from_store(
    folder: RunFolder, settings: Settings, facts: Mapping[str, Any], *, spec: GameSpec, judge: Judge,
    on_event: OnEvent | None, opened: contextlib.ExitStack,
) -> Training:  # fmt: skip
    """A training that only reads a store; the game need not be installed."""
    algorithm = settings.algorithm_type(spec, settings.config)
    if not isinstance(algorithm.needs, Transitions):
        raise ConfigError(
            f"{settings.algorithm} learns only from what it plays itself; use bc or dqn with --from-store"
        )
    config = replace(settings.learner_config(), limiter=None)
    learner = _learner(algorithm, folder, settings, facts=facts, config=config)
    listener = Listener()
    follower = StoreFollower(Path(facts["from_store"]))
    engine = FromStore(learner, follower, steps=settings.run.steps, clock=SystemClock(), on_event=listener)
    opened.callback(engine.close)
    return _listening(Training(
        engine, folder, settings.run, judge=judge, until=facts["until"], on_event=on_event,
        extensions=facts.get("extensions", 0),
    ), listener)  # fmt: skip


class Listener:
    """Passes events on to whoever is there when they happen; an engine is made before its training."""

    def __init__(self) -> None:
        self.hear: OnEvent = lambda event: None

    def __call__(self, event: Event) -> object:
        return self.hear(event)


def _listening(training: Training, listener: Listener) -> Training:
    listener.hear = training.hear
    return training


def _learner(
    algorithm: Any, folder: RunFolder, settings: Settings, *, facts: Mapping[str, Any], config: LearnerConfig
) -> Learner:
    start = None if facts["init_from"] is None else folder.start().weights
    return Learner(algorithm, settings.knobs, root_seed=facts["seed"], config=config, start=start)
