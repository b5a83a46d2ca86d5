"""Settings of a run: preset, file, environment, flags, in that order, into one value that can be written down again.

A variable is named after the setting: UNDERSTUDY_TRAIN_LEARNING_RATE, or UNDERSTUDY_TRAIN_LEARNING_RATE_FILE.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.app.runs.algorithms import algorithm_class
from understudy.core.errors import ConfigError
from understudy.core.network import NetworkSpec
from understudy.core.settings import PREFIX, Leaf, check_value, find, parse_text, setting, toml_text
from understudy.core.settings import parse_value as parse_value

SECTIONS = ("run", "learner", "config", "knobs")
_PREFIX = f"{PREFIX}TRAIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """How long, how wide and how often; what every algorithm shares."""

    steps: int = setting(100_000, 1, 10**12, "env steps of the whole run, or updates when training from a store")
    envs: int = setting(8, 1, 4_096, "envs side by side; on-policy algorithms have a setting of their own")
    collect: int = setting(32, 1, 65_536, "steps per env and round")
    eval_every: int = setting(10_000, 1, 10**12, "env steps between two evaluations")
    eval_episodes: int = setting(100, 1, 100_000, "episodes per evaluation")
    checkpoint_every: int = setting(10_000, 1, 10**12, "env steps between two checkpoints")
    asynchronous: bool = setting(False, 0, 1, "act ahead while learning; faster on idle cores, not exactly repeatable")
    ladder: bool = setting(False, 0, 1, "each env keeps its own share of random actions, as Ape-X does")
    until: float | None = None
    """The return at which the run is solved; infinity for no goal, None where the game is to say."""

    def __post_init__(self) -> None:
        check_until(self.until)


def check_until(until: Any) -> None:
    """ConfigError unless this is a return to reach, infinity or None."""
    if until is None:
        return
    if isinstance(until, bool) or not isinstance(until, int | float) or not until > -math.inf:
        raise ConfigError(f"until is {until!r}; give the return to reach, such as 475, or inf for no goal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPart:
    """The learner's own settings, flat."""

    updates_per_call: int = setting(16, 1, 4_096, "updates in one compiled call")
    samples_per_insert: float = setting(8.0, 1e-3, 1e6, "rows sampled for each step inserted")
    min_inserts: int = setting(1_000, 0, 10**9, "steps before the first update")
    capacity: int = setting(131_072, 64, 10**9, "rows the replay holds")
    alpha: float = setting(0.6, 0.0, 1.0, "how strongly priorities count")
    max_lag_versions: int = setting(1_000, 0, 10**9, "versions an actor's chunk may be behind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that, with a game and a seed, makes a run."""

    algorithm: str
    run: RunPart
    learner: LearnerPart
    config: Any
    knobs: Any
    algorithm_type: Any
    """The class behind the algorithm's name."""

    def to_toml(self) -> str:
        """A preset that gives these settings again."""
        lines = [f"algorithm = {toml_text(self.algorithm)}"]
        for name in SECTIONS:
            part = getattr(self, name)
            lines += ["", f"[{name}]"]
            values = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
            # A network has a file of its own.
            plain = {key: one for key, one in values.items() if one is not None and not isinstance(one, NetworkSpec)}
            lines += [f"{key} = {toml_text(value)}" for key, value in plain.items()]
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Resolver:
    """Collects values by section; later ones win."""

    algorithm: str
    algorithm_type: Any = None
    """The class itself, where no import path leads to it."""
    given: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in SECTIONS})

    def add(self, fields: Mapping[str, Any]) -> None:
        """Take the sections of a preset or file; a preset of another algorithm shares only run and learner."""
        same = fields.get("algorithm", self.algorithm) == self.algorithm
        for section in SECTIONS if same else ("run", "learner"):
            part = fields.get(section, {})
            types = self._types()[section]
            for name, value in part.items():
                if name not in {one.name for one in dataclasses.fields(types)}:
                    raise self._unknown(name)
                self.given[section][name] = value

    def set(self, name: str, value: Any) -> None:
        """One setting by its bare name, in whatever section it lives; the algorithm's own come first."""
        for section in ("config", "knobs", "learner", "run"):
            if name in {one.name for one in dataclasses.fields(self._types()[section])}:
                self.given[section][name] = value
                return
        raise self._unknown(name)

    def add_environment(self, environ: Mapping[str, str] | None = None) -> None:
        """Take what variables say, or the files that they name; what they are is known by their names."""
        environ = os.environ if environ is None else environ
        for section, part in self._types().items():
            for one in dataclasses.fields(part):
                leaf = _leaf(one)
                if found := find(leaf, {}, environ):
                    value, origin = found
                    self.given[section][one.name] = self._checked(section, leaf, parse_text(leaf, value), origin=origin)

    def _types(self) -> dict[str, Any]:
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return {"run": RunPart, "learner": LearnerPart, "config": chosen.Config, "knobs": chosen.Knobs}

    def _unknown(self, name: str) -> ConfigError:
        names = sorted({one.name for part in self._types().values() for one in dataclasses.fields(part)})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ConfigError(f"{self.algorithm} has no setting {name!r}{hint} (see: understudy train --list)")

    def settings(self) -> Settings:
        """The checked settings."""
        types, values = self._types(), self.values()
        try:
            parts = {name: types[name](**values[name]) for name in SECTIONS}
        except TypeError as error:
            raise ConfigError(f"{self.algorithm} cannot be set up: {error}; give every setting a default") from error
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return Settings(algorithm=self.algorithm, algorithm_type=chosen, **parts)

    def values(self) -> dict[str, dict[str, Any]]:
        """What was given so far, by section, checked."""
        leaves = {
            name: {one.name: _leaf(one) for one in dataclasses.fields(part)} for name, part in self._types().items()
        }
        return {
            section: {name: self._checked(section, leaves[section][name], value) for name, value in given.items()}
            for section, given in self.given.items()
        }

    def _checked(self, section: str, leaf: Leaf, value: Any, *, origin: str = "") -> Any:
        if leaf.name == "network" and not isinstance(value, NetworkSpec):
            raise ConfigError(f"network is {value!r}; give widths as --network 64,64, or a NetworkSpec in Python")
        return check_value(leaf, value, origin=origin, may_move=section == "knobs")


def _leaf(one: "dataclasses.Field[Any]") -> Leaf:
    return Leaf(one.name, one.default, one.metadata.get("range"), _PREFIX)
