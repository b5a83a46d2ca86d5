"""Settings of a run: preset, file, flags, in that order, into one checked value that can be written down again."""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.app.runs.algorithms import algorithm_class
from understudy.core.algorithm import Range, Schedule, setting
from understudy.core.errors import ConfigError
from understudy.core.network import NetworkSpec

if TYPE_CHECKING:
    from understudy.learn.learner import LearnerConfig

SECTIONS = ("run", "learner", "config", "knobs")


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

    def learner_config(self) -> "LearnerConfig":
        """What these settings say about the learner; needs no game."""
        from understudy.learn.learner import LearnerConfig  # late: JAX takes seconds, and settings are shown without
        from understudy.learn.limiter import LimiterConfig
        from understudy.learn.replay import ReplayConfig

        part = self.learner
        # Room for two compiled calls, counted in the steps that pay for them.
        slack = math.ceil(2 * part.updates_per_call * getattr(self.config, "batch", 1) / part.samples_per_insert)
        limiter = LimiterConfig(
            samples_per_insert=part.samples_per_insert, min_inserts=part.min_inserts, slack=max(2_048, slack)
        )
        return LearnerConfig(
            updates_per_call=part.updates_per_call, limiter=limiter, max_lag_versions=part.max_lag_versions,
            replay=ReplayConfig(capacity=part.capacity, alpha=part.alpha),
        )  # fmt: skip

    def to_toml(self) -> str:
        """A preset that gives these settings again."""
        lines = [f"algorithm = {_toml(self.algorithm)}"]
        for name in SECTIONS:
            part = getattr(self, name)
            lines += ["", f"[{name}]"]
            values = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
            lines += [f"{key} = {_toml(value)}" for key, value in values.items() if _is_plain(value)]
        return "\n".join(lines) + "\n"


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, NetworkSpec)  # that one has a file of its own


def _toml(value: Any) -> str:
    if isinstance(value, Schedule):
        return f"{{ start = {value.start!r}, end = {value.end!r}, until = {value.until!r} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


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
        fields = {name: {one.name: one for one in dataclasses.fields(part)} for name, part in self._types().items()}
        return {
            section: {
                name: _checked(name, value, fields[section][name], may_move=section == "knobs")
                for name, value in given.items()
            }
            for section, given in self.given.items()
        }


def parse_value(text: str) -> Any:
    """What `--set name=TEXT` means: a TOML value, or plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _checked(name: str, value: Any, one: "dataclasses.Field[Any]", *, may_move: bool) -> Any:
    limits: Range | None = one.metadata.get("range")
    default = one.default
    if name == "network" and not isinstance(value, NetworkSpec):
        raise ConfigError(f"network is {value!r}; give widths as --network 64,64, or a NetworkSpec in Python")
    value = value.item() if isinstance(value, np.generic) else tuple(value) if isinstance(value, list) else value
    if may_move and isinstance(value, Mapping):
        try:
            value = Schedule(**{key: float(number) for key, number in value.items()})
        except (TypeError, ValueError):
            raise ConfigError(f"{name} is {dict(value)}; a schedule has start, end and until") from None
    if isinstance(value, Schedule) and not may_move:
        raise ConfigError(f"{name} is a schedule; it is fixed for a run, so give one value")
    wanted = _wanted(default, may_move=may_move)
    if wanted is not None and not _fits(value, default):
        raise ConfigError(f"{name} is {value!r}; give {wanted}")
    if limits is not None:
        for number in (value.start, value.end) if isinstance(value, Schedule) else (value,):
            if not limits.low <= number <= limits.high:
                raise ConfigError(f"{name} is {number}; give {limits.low:g} to {limits.high:g}: {limits.says}")
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _wanted(default: Any, *, may_move: bool) -> str | None:
    match default:
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float() | Schedule():
            return "a number, or a schedule {start=, end=, until=}" if may_move else "a number"
        case tuple():
            return "a list, such as [64, 64]"
        case str():
            return "a text"
    return None


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int)
    if isinstance(default, float | Schedule):
        return isinstance(value, int | float | Schedule)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(isinstance(one, int) and one > 0 for one in value)
    return isinstance(value, type(default))
