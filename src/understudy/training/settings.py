"""Settings of a run, resolved from preset, file, environment and flags; later sources win.

An environment variable is named after its setting: UNDERSTUDY_TRAIN_LEARNING_RATE, or
UNDERSTUDY_TRAIN_LEARNING_RATE_FILE for a file with the value.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from understudy.core.errors import ConfigError
from understudy.core.settings import (
    PREFIX,
    Leaf,
    Schedule,
    check_value,
    find_value,
    load_object,
    parse_text,
    setting,
    toml_text,
    value_text,
)
from understudy.nn.network import NetworkSpec
from understudy.replay import ReplayConfig

if TYPE_CHECKING:
    from understudy.learn.learner import LearnerConfig

# --- Algorithms by name ---------------------------------------------------------------------------


ALGORITHMS: Mapping[str, str] = {
    "bc": "understudy.learn.algorithms.bc:Bc",
    "dqn": "understudy.learn.algorithms.dqn:Dqn",
    "iql": "understudy.learn.algorithms.iql:Iql",
    "ppo": "understudy.learn.algorithms.ppo:Ppo",
}
"""Short names; any other algorithm is named by its import path, `module:Class`."""


def algorithm_class(name: str | type) -> Any:
    """The class for a short name or an import path; ConfigError suggests the closest name."""
    algorithm = (
        load_object(ALGORITHMS.get(name, name), what="algorithm", known=ALGORITHMS)
        if isinstance(name, str)
        else name
    )
    for part in ("Config", "Knobs"):
        if not dataclasses.is_dataclass(getattr(algorithm, part, None)):
            raise ConfigError(
                f"algorithm {name!r} has no dataclass `{part}`; see the protocol "
                "understudy.algorithm.Algorithm"
            )
    return algorithm


def describe_algorithm(name: str) -> Any:
    """The settings of `algorithm_class(name)` for a short name, read from the source code.

    Importing an algorithm imports JAX, which takes seconds; checking and listing settings does
    not need it.
    """
    module, _, title = ALGORITHMS[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    body = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    parts = {part: _fields_only(classes[title + part]) for part in ("Config", "Knobs")}
    return SimpleNamespace(**parts, __doc__=ast.get_docstring(classes[title]))


def _fields_only(source: ast.ClassDef) -> type:
    fields = [
        (node.target.id, Any, _value(node.value))
        for node in source.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.value is not None
    ]
    return dataclasses.make_dataclass(source.name, fields)


def _value(source: ast.expr) -> Any:
    """The value of a default: a literal, `setting(...)` or `Schedule(...)`; runs nothing else."""
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        call: Any = {"setting": setting, "Schedule": Schedule}[source.func.id]
        return call(*map(_value, source.args))
    return ast.literal_eval(source)


def algorithm_name(algorithm: str | type) -> str:
    """The name of an algorithm in a run's folder: its short name, or its import path."""
    if not isinstance(algorithm, str | type):
        raise ConfigError(
            f"algorithm is {str(algorithm)[:80]!r}; give a name such as 'dqn', module:Class, or a "
            "class"
        )
    path = (
        algorithm
        if isinstance(algorithm, str)
        else f"{algorithm.__module__}:{algorithm.__qualname__}"
    )
    return next((short for short, import_path in ALGORITHMS.items() if import_path == path), path)


# --- Settings -------------------------------------------------------------------------------------


ENGINES = ("inline", "process", "ray", "workers")
"""Where actors play: in the learner's process, each in its own, on Ray, or as workers over HTTP."""
SECTIONS = ("run", "learner", "config", "knobs")
MAX_EVAL_STEPS = 10**9
_PREFIX = f"{PREFIX}TRAIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """The schedule and size of a run, for every algorithm."""

    steps: int = setting(
        100_000, 1, 10**12, "env steps of the whole run, or updates when training from a store"
    )
    envs: int = setting(8, 1, 4_096, "parallel envs; on-policy algorithms have their own setting")
    actors: int = setting(1, 1, 1_024, "actors that the envs are divided among")
    collect: int = setting(32, 1, 65_536, "steps per env and round")
    eval_every: int = setting(
        10_000, 1, 10**12, "env steps (from a store: updates) between two evaluations"
    )
    horizon: int = setting(
        0,
        0,
        10**12,
        "env steps (from a store: updates) that schedules span; 0: the preset's steps, or those of "
        "a longer run",
    )
    eval_episodes: int = setting(100, 1, 100_000, "episodes per evaluation")
    test_episodes: int = setting(
        100, 1, 100_000, "episodes of the final test, and of the test that confirms a reached goal"
    )
    eval_max_steps: int = setting(
        10_000,
        1,
        MAX_EVAL_STEPS,
        "steps after which evaluations cut an episode, if the game has no limit",
    )
    checkpoint_every: int = setting(
        10_000, 1, 10**12, "env steps (from a store: updates) between two checkpoints"
    )
    asynchronous: bool = setting(
        False, 0, 1, "act while learning; faster on idle cores, not exactly repeatable"
    )
    ladder: bool = setting(False, 0, 1, "each env has its own fixed epsilon, as in Ape-X")
    keep_history: bool = setting(
        False, 0, 1, "keep everything that was played, not only what a resume may need"
    )
    evaluate_share: float = setting(
        0.0, 0.0, 0.9, "probability that a worker's next task is to evaluate instead of to train"
    )
    lease_s: float = setting(30.0, 0.5, 3_600.0, "seconds after which a silent worker is replaced")
    until: float | None = None
    """The return that solves the run, or infinity for no goal.

    None means the game's own threshold, or no goal if `steps` is given."""

    def __post_init__(self) -> None:
        check_until(self.until)


def check_until(until: Any) -> None:
    """ConfigError unless `until` is a return, infinity or None."""
    if until is None:
        return
    if isinstance(until, bool) or not isinstance(until, int | float) or not until > -math.inf:
        raise ConfigError(
            f"until is {until!r}; give the return to reach, such as 475, or inf for no goal"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPart:
    """The settings of the learner and its replay."""

    updates_per_call: int = setting(16, 1, 4_096, "updates in one compiled call")
    samples_per_insert: float = setting(8.0, 1e-3, 1e6, "rows sampled per inserted step")
    min_inserts: int = setting(1_000, 0, 10**9, "steps before the first update")
    capacity: int = setting(131_072, 64, 10**9, "rows in the replay")
    alpha: float = setting(0.6, 0.0, 1.0, "priority exponent; 0 samples uniformly")
    max_lag_versions: int = setting(1_000, 0, 10**9, "largest lag of an actor's chunk, in versions")
    replay: str = "host"
    """A short name of `understudy.replay.REPLAYS`, or the import path of a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of a run; together with a game and a seed they reproduce it."""

    algorithm: str
    run: RunPart
    learner: LearnerPart
    config: Any
    knobs: Any
    algorithm_type: Any
    """The algorithm's class."""

    def learner_config(self) -> "LearnerConfig":
        """The learner's configuration from these settings."""
        # Imported late: JAX takes seconds, and showing settings does not need it.
        from understudy.learn.learner import LearnerConfig
        from understudy.learn.replay_source import LimiterConfig

        part = self.learner
        limiter = LimiterConfig(
            samples_per_insert=part.samples_per_insert, min_inserts=part.min_inserts
        )
        return LearnerConfig(
            updates_per_call=part.updates_per_call,
            limiter=limiter,
            max_lag_versions=part.max_lag_versions,
            replay=ReplayConfig(capacity=part.capacity, alpha=part.alpha),
            replay_name=part.replay,
        )

    def with_horizon(self, planned_steps: int) -> "RunSettings":
        """These settings with schedules that span the planned steps, or all of a longer run.

        A horizon that is shorter than the planned steps was set on purpose and stays.
        """
        run = self.run
        horizon = run.horizon or planned_steps
        if horizon >= planned_steps:
            horizon = max(horizon, run.steps)
        return replace(self, run=replace(run, horizon=horizon))

    def cut_schedules(self) -> dict[str, tuple[float, float]]:
        """Knobs whose schedule the run cuts: the value at its last step, and the schedule's end."""
        share = self.run.steps / (self.run.horizon or self.run.steps)
        knobs = {name: getattr(self.knobs, name) for name in field_names(self.knobs)}
        if self.run.ladder:
            knobs.pop("epsilon", None)  # each env has a fixed one instead
        return {
            name: (knob.at(share), knob.end)
            for name, knob in knobs.items()
            if isinstance(knob, Schedule) and share < knob.until and knob.start != knob.end
        }

    def to_toml(self) -> str:
        """These settings as a preset."""
        parts = {section: getattr(self, section) for section in SECTIONS}
        sections = {
            section: {name: getattr(part, name) for name in field_names(part)}
            for section, part in parts.items()
        }
        return preset_text(self.algorithm, sections)


def preset_text(algorithm: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A preset with these values by section."""
    lines = [f"algorithm = {toml_text(algorithm)}"]
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        for name, value in values.items():
            # A network is stored in its own file.
            if value is not None and not isinstance(value, NetworkSpec):
                lines.append(f"{name} = {toml_text(value)}")
    return "\n".join(lines) + "\n"


def field_names(part: Any) -> list[str]:
    """The names of a dataclass's fields, in order."""
    return [field.name for field in dataclasses.fields(part)]


@dataclass(slots=True)
class Resolver:
    """Collects values by section; later values win."""

    algorithm: str
    algorithm_type: Any = None
    """The class itself, if it was passed instead of a name."""
    collected: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {name: {} for name in SECTIONS}
    )

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add the settings of a preset or file.

        If it is for another algorithm, only its sections `run` and `learner` are used. A knob may
        stand in section `config`, where some were in earlier versions.
        """
        same = fields.get("algorithm", self.algorithm) == self.algorithm
        names = {section: field_names(part) for section, part in self._types().items()}
        for section in SECTIONS if same else ("run", "learner"):
            for name, value in fields.get(section, {}).items():
                is_moved = section == "config" and name in names["knobs"]
                own = "knobs" if is_moved else section
                if name not in names[own]:
                    raise self._unknown(name)
                self.collected[own][name] = value

    def set(self, name: str, value: Any) -> None:
        """Set one setting by name, in its section; the algorithm's own sections come first."""
        for section in ("config", "knobs", "learner", "run"):
            if name in field_names(self._types()[section]):
                self.collected[section][name] = value
                return
        raise self._unknown(name)

    def add_environment(self, environ: Mapping[str, str] | None = None) -> None:
        """Add the values of environment variables, or of the files they name.

        Those of other algorithms are left out; ConfigError if no algorithm has the setting.
        """
        environ = os.environ if environ is None else environ
        for key in environ:
            name = key.removeprefix(_PREFIX).removesuffix("_FILE").lower()
            if key.startswith(_PREFIX) and not self._is_known(name):
                raise ConfigError(f"{key} is set in the environment, but {self._unknown(name)}")
        for section, part in self._types().items():
            for setting_field in dataclasses.fields(part):
                leaf = _leaf(setting_field)
                if variable := find_value(leaf, {}, environ):
                    text, origin = variable
                    self.collected[section][leaf.name] = self._checked(
                        section, leaf, parse_text(leaf, text), origin=origin
                    )

    def _types(self) -> dict[str, Any]:
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return {
            "run": RunPart,
            "learner": LearnerPart,
            "config": chosen.Config,
            "knobs": chosen.Knobs,
        }

    def _is_known(self, name: str) -> bool:
        """Whether the algorithm, or one of those with a short name, has the setting."""
        parts = [*self._types().values()]
        for other in map(describe_algorithm, ALGORITHMS):
            parts += [other.Config, other.Knobs]
        return any(name in field_names(part) for part in parts)

    def _unknown(self, name: str) -> ConfigError:
        names = sorted({name for part in self._types().values() for name in field_names(part)})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ConfigError(
            f"{self.algorithm} has no setting {name!r}{hint} (see: understudy train --list)"
        )

    def settings(self) -> RunSettings:
        """The checked settings."""
        types = self._types()
        values = self.values()
        try:
            parts = {name: types[name](**values[name]) for name in SECTIONS}
        except TypeError as error:
            raise ConfigError(
                f"{self.algorithm} cannot be configured: {error}; give every setting a default"
            ) from error
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return RunSettings(algorithm=self.algorithm, algorithm_type=chosen, **parts)

    def values(self) -> dict[str, dict[str, Any]]:
        """The checked values collected so far, by section."""
        leaves = {
            section: {field.name: _leaf(field) for field in dataclasses.fields(part)}
            for section, part in self._types().items()
        }
        return {
            section: {
                name: self._checked(section, leaves[section][name], value)
                for name, value in values.items()
            }
            for section, values in self.collected.items()
        }

    def _checked(self, section: str, leaf: Leaf, value: Any, *, origin: str = "") -> Any:
        if leaf.name == "network" and not isinstance(value, NetworkSpec):
            raise ConfigError(
                f"network is {value_text(value)}; give the widths of its layers, such as 64,64, or "
                "a NetworkSpec in Python"
            )
        return check_value(leaf, value, origin=origin, may_move=section == "knobs")


def _leaf(setting_field: "dataclasses.Field[Any]") -> Leaf:
    limits = setting_field.metadata.get("range")
    return Leaf(setting_field.name, setting_field.default, limits, _PREFIX)
