"""Trains one algorithm on one game from the store, and what the trainings of all games share."""

import hashlib
import math
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import understudy
from understudy.algorithm import Batch
from understudy.backends.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.chunk import CONSENTS
from understudy.experience.game import GameSpec
from understudy.experience.skill import MAX_EXPLORE_SHARE
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.algorithms.iql import IqlKnobs
from understudy.learn.centre import find_centre, may_have_centre
from understudy.learn.held_out import Choice, symmetry_choice
from understudy.learn.learner import Learner
from understudy.learn.symmetry import find_symmetry
from understudy.learn.warm_start import keeps_play, warm_start
from understudy.models.gate import Bounds, ModelCheck
from understudy.models.manifest import Lineage, number_of
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.release.gatekeeper import Gatekeeper
from understudy.release.model_check import Budget
from understudy.release.people_check import check_with_people
from understudy.release.schedule import (
    ALGORITHMS,
    LearningSchedule,
)
from understudy.release.store_stats import StoreStats
from understudy.training.events import Event, Guarded, Update
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore
from understudy.training.settings import RunSettings
from understudy.training.training_job import Checkpoints, TrainingJob

_CHOICE_STEPS = 16_384
"""Steps on which clones are trained to choose among settings."""
_ADVANTAGE_WEIGHTS = (1.5, 0.5)
"""Those of iql's candidates in turn, unless another one is set. A high one is needed where most
people play badly; a low one is better where most play well. Recorded steps do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerServiceConfig:
    """The settings of the learner service, for all games of a deployment."""

    learn_from: tuple[str, ...] = ("granted",)
    """Consents whose steps are learned from: `granted`, `unknown` or both, never `denied`."""
    schedule: LearningSchedule = field(default_factory=LearningSchedule)
    bounds: Bounds = field(default_factory=Bounds)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by algorithm (bc, iql, dqn) and by name; they override the preset."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """Gymnasium id by game; candidates of these games play held-out seeds instead of live games."""
    checkpoint_every_s: float = 10.0
    explore_share: float = 0.05
    """The share of bots' episodes in which they explore, if iql or dqn can learn from them."""

    def __post_init__(self) -> None:
        if not self.learn_from or not set(self.learn_from) <= set(CONSENTS) - {"denied"}:
            raise ConfigError(
                f"learn_from is {self.learn_from}; give 'granted', or 'granted' and 'unknown'"
            )
        if unknown := self.settings.keys() - set(ALGORITHMS):
            raise ConfigError(
                f"settings are given for {joined(unknown)}; give only those of "
                f"{', '.join(ALGORITHMS)}"
            )
        if not 0 < self.checkpoint_every_s < 1e6:
            raise ConfigError(
                f"checkpoint_every_s is {self.checkpoint_every_s}; give seconds, such as 10"
            )
        if not 0 <= self.explore_share <= MAX_EXPLORE_SHARE:
            raise ConfigError(
                f"explore_share is {self.explore_share}; give a number from 0 to "
                f"{MAX_EXPLORE_SHARE}"
            )


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What the learners of all games share."""

    data: DataFolder
    registry: Registry
    keeper: Gatekeeper
    follower: StoreFollower
    store_stats: StoreStats
    config: LearnerServiceConfig
    clock: Clock


@dataclass(frozen=True, slots=True)
class Marks:
    """The last release of a training, and the training's counts at that time."""

    model_no: int = 0
    """The last released model, the parent of the next one; 0: none yet."""
    updates: int = 0
    steps: int = 0
    is_admitted: bool = True
    """Whether the gate has decided what becomes of it."""
    read_no: int = 0
    """The highest arrival number that was read when the current weights were new."""
    n_released: int = 0
    """Releases of this training so far."""


class GameTraining:
    """Trains one algorithm on one game from the store, from a start or its last checkpoint."""

    def __init__(
        self,
        spec: GameSpec,
        settings: RunSettings,
        context: ServiceContext,
        *,
        on_guarded: Callable[[Guarded], object],
        start: tuple[str, Policy] | None = None,
    ) -> None:
        """`start`: a model of another schema, whose weights are the first ones where they fit."""
        self.spec = spec
        self.algorithm = settings.algorithm
        self.marks = Marks()
        self._start = start
        self.started_from = ""
        """The model whose weights were the first ones."""
        self._keeps_play = False
        """Whether a policy with these weights plays as that model does."""
        self._is_prepared = False
        self.settings = settings
        self._varies_weight = (
            settings.algorithm == "iql"
            and "advantage_weight" not in context.config.settings.get("iql", {})
            and settings.knobs.advantage_weight == IqlKnobs().advantage_weight
        )
        self._context = context
        self._on_guarded = on_guarded
        self._metrics: Mapping[str, float] = {}
        # Another schema, setting or seed is another training, in another folder; one of an earlier
        # version, which had no centre, mirror images or shares of people and of the best episodes,
        # is continued.
        config = context.config
        text = settings.to_toml()
        new = ('centre = ""\n', 'symmetry = ""\n', "best_share = 1.0\n", "best_steps = 0\n")
        for default in new:
            text = text.replace(default, "")
        identity = f"{spec.schema} {text} {config.learn_from} {config.seed}"
        people_share = config.schedule.people_share
        if self.algorithm != "bc" and people_share != LearningSchedule().people_share:
            identity += f" {people_share}"
        name = f"{settings.algorithm}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self._folder = context.data.root / "learner" / spec.game / name
        self._before = self._folder.with_name(f"{name}.before")
        """The checkpoints of the last training, until there is one of the next."""
        self._end_restart()
        checkpoint = None
        try:
            checkpoint = Checkpoints(self._folder).latest()
        except Corrupt as error:
            self._set_aside(error)
        has_network = getattr(settings.config, "network", None) is not None
        self._finds_centre = getattr(settings.config, "centre", None) == "" and not has_network
        self._finds_symmetry = getattr(settings.config, "symmetry", None) == "" and not has_network
        self._choice: tuple[str, Choice] | None = None
        """The player's cell that was found, and the choice among mirror images that goes on."""
        if checkpoint is not None and not checkpoint.facts.get("started_from"):
            self._start = None  # a later training, or one of an earlier version
        self._create_engine()
        try:
            if checkpoint is not None:
                self.marks = Marks(**checkpoint.facts["marks"])
                view = [checkpoint.facts.get(name, "") for name in ("centre", "symmetry")]
                if any(view) or self.marks.n_released:
                    self._show(*view)
                self._job.restore(checkpoint)
                self.started_from = checkpoint.facts.get("started_from", "")
                # The champion may be another one by now.
                is_start = self._start is not None and self._start[0] == self.started_from
                self._keeps_play = self._keeps_play and is_start
        except (ConfigError, KeyError, TypeError) as error:  # written by another version
            self.engine.close()
            self._set_aside(error)
            self.marks = Marks()
            self.settings = settings
            self._create_engine()
        except BaseException:  # includes a damaged store: the checkpoint is good and is kept
            self.engine.close()
            raise
        self.saved_s = context.clock.monotonic()

    @property
    def folders(self) -> tuple[Path, Path]:
        """Where its checkpoints are, and those of the training before it during a restart."""
        return self._folder, self._before

    def _set_aside(self, error: Exception) -> None:
        """Rename the folder of unusable checkpoints; only time is lost, the store has the steps."""
        aside = self._folder.with_name(f"{self._folder.name}.unusable-{secrets.token_hex(4)}")
        self._folder.rename(aside)
        what = f"{error}; the training restarts, the old checkpoints are in {aside}"
        self._on_guarded(Guarded(env_steps=0, what=what))

    def _create_engine(self) -> None:
        context = self._context
        if self._varies_weight:
            weight = _ADVANTAGE_WEIGHTS[self.marks.n_released % len(_ADVANTAGE_WEIGHTS)]
            knobs = replace(self.settings.knobs, advantage_weight=weight)
            self.settings = replace(self.settings, knobs=knobs)
        settings = self.settings
        algorithm = settings.algorithm_type(self.spec, settings.config)
        config = replace(settings.learner_config(), limiter=None)
        weights: Mapping[str, Array] = {}
        self.started_from = ""
        self._keeps_play = False
        if self._start is not None:
            name, old = self._start
            network = algorithm.network
            weights = warm_start(old, self.spec, network=network, head=algorithm.head)
            self.started_from = name if weights else ""
            self._keeps_play = keeps_play(old, self.spec, network=network, head=algorithm.head)
        self.engine = FromStore(
            Learner(
                algorithm,
                settings.knobs,
                root_seed=context.config.seed,
                config=config,
                start=weights,
            ),
            context.follower,
            steps=settings.run.steps,
            horizon=settings.run.horizon,
            clock=context.clock,
            on_event=self._handle_event,
            learn_from=context.config.learn_from,
            only_people=bool(algorithm.needs.is_cloning),
            people_share=context.config.schedule.people_share,
        )
        self._job = TrainingJob(self.engine, self._folder, on_event=self._handle_event)

    @property
    def updates(self) -> int:
        return self.engine.steps

    @property
    def steps(self) -> int:
        """Steps inserted into the replay so far, including those that have left it."""
        return self.engine.learner.counts.inserted_steps

    def lineage(
        self, *, temperature: float | None = None, ranking: Sequence[Mapping[str, Any]] = ()
    ) -> Lineage:
        """How the current policy was trained, for its manifest.

        `temperature`: at which it is released, if not the schedule's. `ranking`: the estimates by
        which it was chosen.
        """
        config = self._context.config
        if temperature is None:
            temperature = 1.0 if self.algorithm == "dqn" else config.schedule.temperature
        metrics = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        return Lineage(
            algorithm=self.algorithm,
            seed=config.seed,
            parent=self.marks.model_no,
            code_version=understudy.__version__,
            cursor_to=self.engine.position.cursor or "",
            steps=self.steps,
            config={
                "settings": self.settings.to_toml(),
                "learn_from": list(config.learn_from),
                "temperature": temperature,
                "people_share": 1.0 if self.algorithm == "bc" else config.schedule.people_share,
                "read_no": self.marks.read_no,
            }
            | ({"ranking": list(ranking)} if ranking else {})
            | ({"started_from": self.started_from} if self.started_from else {}),
            metrics=metrics | {"updates": float(self.updates)},
        )

    def prepare(self, *, is_first: bool) -> bool:
        """Do what comes before a training's first update; bc and iql first restart after a release.

        False while clones are trained to choose among mirror images, a compiled call at a time.
        `is_first`: some steps are held out, to compare the first bot of a schema with.
        """
        if self.marks.updates and self.algorithm != "dqn":
            self._restart()
        if not self.updates and not self._is_prepared:
            self.marks = replace(self.marks, read_no=self._read_no())
            if (self._finds_centre or self._finds_symmetry) and not self._find_view():
                return False
            if is_first and not self.engine.has_held_out:
                self.engine.hold_out()
                self._save()
            self._is_prepared = True
        return True

    def _read_no(self) -> int:
        """The highest arrival number that was read when the first weights were new.

        A player who was forgotten since the model was trained that they are from may be in them.
        """
        # Either may be behind the other.
        read_no = min(self._context.store_stats.read_no, self.engine.position.seen_no)
        if not self.started_from:
            return read_no
        models = self._context.registry.catalogue(self.spec.game).models
        start = models.get(number_of(self.started_from))
        if start is None:
            return 0  # lost, so it is not known
        if not start.lineage.cursor_to:
            return read_no  # it did not learn from the store
        return min(read_no, int(start.lineage.config.get("read_no", 0)))

    def step(self) -> None:
        """Run one compiled call of updates; call `prepare` before."""
        if self._job.saved_steps < 0:
            self._save()  # so that there is a checkpoint to restore
        self._job.step()

    @property
    def carries_over(self) -> bool:
        """Whether it would release what an earlier schema's champion does, and has not yet."""
        return self._keeps_play and not self.updates and not self.marks.n_released

    @property
    def choosing(self) -> str:
        """What the training tries before its first update, as text; empty: nothing."""
        if self._choice is None:
            return ""
        return f"trying whether mirror images of the steps help: {self._choice[1].progress}"

    def _find_view(self) -> bool:
        """Find the player's cell on the game's grid and the mirror images that help, in the steps.

        False while clones are trained to choose among images, a compiled call at a time.
        """
        config = self.settings.config
        if self._choice is not None:
            centre, choice = self._choice
            if choice.step():
                return False
            symmetry = choice.best().symmetry
            self._choice = None
        elif not may_have_centre(self.spec) or not self.engine.learner.may_step:
            return True
        else:
            steps = self.engine.learned_sample()
            centre = find_centre(self.spec, steps) if self._finds_centre else config.centre
            symmetry = config.symmetry
            if self._finds_symmetry:
                symmetry = find_symmetry(self.spec, centre, steps)
                choice_of = self._symmetry_choice(centre, symmetry) if symmetry else None
                if choice_of is not None:
                    self._choice = (centre, choice_of)
                    return False
                symmetry = ""
        if (centre, symmetry) != (config.centre, config.symmetry):
            self._show(centre, symmetry)
            self.engine.follow()
        return True

    def _symmetry_choice(self, centre: str, symmetry: str) -> Choice | None:
        """The choice among mirror images by clones of people; None if their steps are too few.

        Bots' steps do not count: those of a bot that learned from images would speak for them.
        """
        context = self._context
        stack = self.settings.config.stack
        clone = Bc(self.spec, BcConfig(centre=centre, stack=stack))
        config = replace(self.settings.learner_config(), limiter=None)
        people = FromStore(
            Learner(clone, BcKnobs(), root_seed=context.config.seed, config=config),
            context.follower,
            steps=1,
            clock=context.clock,
            on_event=lambda event: None,
            learn_from=context.config.learn_from,
            only_people=True,
        )
        try:
            people.follow()
            people.hold_out()
            held_out = people.held_out()
            if not held_out or not people.learner.may_step:
                return None
            return symmetry_choice(
                self.spec,
                centre=centre,
                symmetry=symmetry,
                learned=people.learned_sample(_CHOICE_STEPS),
                held_out=_some_of(held_out, _CHOICE_STEPS // 4),
                temperature=context.config.schedule.temperature,
                stack=stack,
            )
        finally:
            people.close()

    def _show(self, centre: str, symmetry: str) -> None:
        """Replace the engine, which has not trained yet, by one with this centre and these images.

        It stays as it is if the network would be larger than a bot may be.
        """
        view = {"centre": centre} if self._finds_centre else {}
        view |= {"symmetry": symmetry} if self._finds_symmetry else {}
        settings = replace(self.settings, config=replace(self.settings.config, **view))
        if network_bytes(settings, self.spec) <= self._context.config.budget.max_bytes:
            self.settings = settings
        self.engine.close()
        self._create_engine()

    def check_with_people(self, policy: Policy) -> ModelCheck | None:
        """How a policy compares with the held-out steps; None if they are too few."""
        held_out = self.engine.held_out()
        if not held_out or not self.engine.learner.may_step:  # others may have been erased since
            return None
        return check_with_people(policy, learned=self.engine.learned_sample(), held_out=held_out)

    def renew(self) -> None:
        """Train the next candidate from new weights at once, without waiting for more steps."""
        self.marks = replace(self.marks, steps=0)
        self._restart()

    def _restart(self) -> None:
        """Train from new weights, on the newest steps that the store holds now."""
        self.engine.close()
        if self._folder.exists():
            self._folder.rename(self._before)
        self._start = None
        self._choice = None
        self._is_prepared = False
        self._create_engine()
        self.marks = replace(self.marks, updates=0)
        self._save()
        self._end_restart()
        self.engine.follow()

    def _end_restart(self) -> None:
        """Remove the checkpoints of the last training; keep them if the next one has none yet."""
        if not self._before.exists():
            return
        if any(self._folder.glob("*.safetensors")):
            shutil.rmtree(self._before)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._before.rename(self._folder)

    @property
    def candidate(self) -> Policy:
        """The current policy as it is released."""
        if self.algorithm == "dqn":
            return self.engine.policy
        return self.engine.policy.at_temperature(self._context.config.schedule.temperature)

    def released(self, model_no: int) -> None:
        """Record that the current policy was released, but not yet judged by the gate."""
        self.marks = replace(
            self.marks,
            model_no=model_no,
            updates=self.updates,
            steps=self.steps,
            is_admitted=False,
            n_released=self.marks.n_released + 1,
        )
        self._job.restores = 0
        self._save()

    def ranked(self) -> None:
        """Record that the current policy was ranked, so that the next one starts anew."""
        self.marks = replace(self.marks, updates=self.updates)
        self._save()

    def admitted(self) -> None:
        """Record that the gate has decided about the last release.

        After a champion that was carried over, the training begins, from new weights.
        """
        self.marks = replace(self.marks, is_admitted=True)
        if self.updates:
            self._save()
        else:
            self.renew()

    def save_if_moved(self) -> None:
        """Save a checkpoint if there were updates since the last one."""
        if self.updates != self._job.saved_steps and self.updates:
            self._save()

    def _save(self) -> None:
        config = self.settings.config
        self._job.save(
            facts={
                "schema": self.spec.schema,
                "marks": asdict(self.marks),
                "centre": getattr(config, "centre", ""),
                "symmetry": getattr(config, "symmetry", ""),
                "started_from": self.started_from,
            }
        )
        self.saved_s = self._context.clock.monotonic()

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Update):
            self._metrics = dict(event.metrics)
        elif isinstance(event, Guarded):
            self._on_guarded(event)


def _some_of(batches: Sequence[Batch], max_steps: int) -> Batch:
    """Steps of several batches as one, evenly spread if there are more than these."""
    batch: Batch = jax.tree.map(lambda *columns: np.concatenate(columns), *batches)
    n_steps = len(batch.action)
    rows = np.linspace(0, n_steps - 1, min(n_steps, max_steps)).astype(np.intp)
    some: Batch = jax.tree.map(lambda column: column[rows], batch)
    return some


def network_bytes(settings: RunSettings, spec: GameSpec) -> int:
    """The size of the weights that these settings give a game's policy."""
    network = settings.algorithm_type(spec, settings.config).network
    return 4 * sum(map(math.prod, network.shapes().values()))
