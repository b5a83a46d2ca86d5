"""Settings of a run: preset, file, environment, flags, in that order, into one value that can be
written down again.

A variable is named after the setting: UNDERSTUDY_TRAIN_LEARNING_RATE, or
UNDERSTUDY_TRAIN_LEARNING_RATE_FILE.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from understudy.core.errors import ConfigError
from understudy.core.settings import (
    PREFIX,
    Leaf,
    Schedule,
    check_value,
    find,
    load,
    parse_text,
    setting,
    toml_text,
)
from understudy.experience.game import GameSpec
from understudy.nn.network import NetworkSpec

if TYPE_CHECKING:
    from understudy.learn.learner import LearnerConfig

# --- Algorithms by name ---------------------------------------------------------------------------


ALGORITHMS: Mapping[str, str] = {
    "bc": "understudy.learn.algorithms.bc:Bc",
    "dqn": "understudy.learn.algorithms.dqn:Dqn",
    "ppo": "understudy.learn.algorithms.ppo:Ppo",
}
"""Short names; any other algorithm is named by its import path, `module:Class`."""


def algorithm_class(name: str | type) -> Any:
    """The class behind a short name or an import path; ConfigError names the nearest."""
    found = (
        load(ALGORITHMS.get(name, name), what="algorithm", known=ALGORITHMS)
        if isinstance(name, str)
        else name
    )
    for part in ("Config", "Knobs"):
        if not dataclasses.is_dataclass(getattr(found, part, None)):
            raise ConfigError(
                f"algorithm {name!r} has no dataclass {part}; give a class that keeps to "
                "understudy.algorithm"
            )
    return found


def described(name: str) -> Any:
    """What `algorithm_class` gives for a short name, as far as settings go, read from the source.

    Importing an algorithm brings JAX, which takes seconds; a wrong setting is refused, and a list
    is shown, without.
    """
    module, _, title = ALGORITHMS[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    body = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")).body
    classes = {one.name: one for one in body if isinstance(one, ast.ClassDef)}
    parts = {part: _fields_only(classes[title + part]) for part in ("Config", "Knobs")}
    return SimpleNamespace(**parts, __doc__=ast.get_docstring(classes[title]))


def _fields_only(written: ast.ClassDef) -> type:
    fields = [
        (one.target.id, Any, _value(one.value))
        for one in written.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and one.value is not None
    ]
    return dataclasses.make_dataclass(written.name, fields)


def _value(written: ast.expr) -> Any:
    """What a default means: a literal, or one of the two calls that settings are written with;
    nothing else is run."""
    if isinstance(written, ast.Call) and isinstance(written.func, ast.Name):
        call: Any = {"setting": setting, "Schedule": Schedule}[written.func.id]
        return call(*map(_value, written.args))
    return ast.literal_eval(written)


def algorithm_name(algorithm: str | type) -> str:
    """What a run's folder calls an algorithm: its short name, or its import path."""
    path = (
        algorithm
        if isinstance(algorithm, str)
        else f"{algorithm.__module__}:{algorithm.__qualname__}"
    )
    return next((short for short, known in ALGORITHMS.items() if known == path), path)


# --- Settings -------------------------------------------------------------------------------------


SECTIONS = ("run", "learner", "config", "knobs")
_PREFIX = f"{PREFIX}TRAIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """How long, how wide and how often; what every algorithm shares."""

    steps: int = setting(
        100_000, 1, 10**12, "env steps of the whole run, or updates when training from a store"
    )
    envs: int = setting(
        8, 1, 4_096, "envs side by side; on-policy algorithms have a setting of their own"
    )
    collect: int = setting(32, 1, 65_536, "steps per env and round")
    eval_every: int = setting(10_000, 1, 10**12, "env steps between two evaluations")
    eval_episodes: int = setting(100, 1, 100_000, "episodes per evaluation")
    checkpoint_every: int = setting(10_000, 1, 10**12, "env steps between two checkpoints")
    asynchronous: bool = setting(
        False, 0, 1, "act ahead while learning; faster on idle cores, not exactly repeatable"
    )
    ladder: bool = setting(
        False, 0, 1, "each env keeps its own share of random actions, as Ape-X does"
    )
    until: float | None = None
    """The return at which the run is solved; infinity for no goal, None where the game is to
    say."""

    def __post_init__(self) -> None:
        check_until(self.until)


def check_until(until: Any) -> None:
    """ConfigError unless this is a return to reach, infinity or None."""
    if until is None:
        return
    if isinstance(until, bool) or not isinstance(until, int | float) or not until > -math.inf:
        raise ConfigError(
            f"until is {until!r}; give the return to reach, such as 475, or inf for no goal"
        )


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
class RunSettings:
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
        from understudy.learn.learner import (
            LearnerConfig,
        )  # late: JAX takes seconds, and settings are shown without
        from understudy.learn.replay import LimiterConfig, ReplayConfig

        part = self.learner
        # Room for two compiled calls, counted in the steps that pay for them.
        slack = math.ceil(
            2 * part.updates_per_call * getattr(self.config, "batch", 1) / part.samples_per_insert
        )
        limiter = LimiterConfig(
            samples_per_insert=part.samples_per_insert,
            min_inserts=part.min_inserts,
            slack=max(2_048, slack),
        )
        return LearnerConfig(
            updates_per_call=part.updates_per_call,
            limiter=limiter,
            max_lag_versions=part.max_lag_versions,
            replay=ReplayConfig(capacity=part.capacity, alpha=part.alpha),
        )

    def to_toml(self) -> str:
        """A preset that gives these settings again."""
        lines = [f"algorithm = {toml_text(self.algorithm)}"]
        for name in SECTIONS:
            part = getattr(self, name)
            lines += ["", f"[{name}]"]
            values = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
            # A network has a file of its own.
            plain = {
                key: one
                for key, one in values.items()
                if one is not None and not isinstance(one, NetworkSpec)
            }
            lines += [f"{key} = {toml_text(value)}" for key, value in plain.items()]
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Resolver:
    """Collects values by section; later ones win."""

    algorithm: str
    algorithm_type: Any = None
    """The class itself, where no import path leads to it."""
    given: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {name: {} for name in SECTIONS}
    )

    def add(self, fields: Mapping[str, Any]) -> None:
        """Take the sections of a preset or file; a preset of another algorithm shares only run
        and learner."""
        same = fields.get("algorithm", self.algorithm) == self.algorithm
        for section in SECTIONS if same else ("run", "learner"):
            part = fields.get(section, {})
            types = self._types()[section]
            for name, value in part.items():
                if name not in {one.name for one in dataclasses.fields(types)}:
                    raise self._unknown(name)
                self.given[section][name] = value

    def set(self, name: str, value: Any) -> None:
        """One setting by its bare name, in whatever section it lives; the algorithm's own come
        first."""
        for section in ("config", "knobs", "learner", "run"):
            if name in {one.name for one in dataclasses.fields(self._types()[section])}:
                self.given[section][name] = value
                return
        raise self._unknown(name)

    def add_environment(self, environ: Mapping[str, str] | None = None) -> None:
        """Take what variables say, or the files that they name; what they are is known by their
        names."""
        environ = os.environ if environ is None else environ
        for section, part in self._types().items():
            for one in dataclasses.fields(part):
                leaf = _leaf(one)
                if found := find(leaf, {}, environ):
                    value, origin = found
                    self.given[section][one.name] = self._checked(
                        section, leaf, parse_text(leaf, value), origin=origin
                    )

    def _types(self) -> dict[str, Any]:
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return {
            "run": RunPart,
            "learner": LearnerPart,
            "config": chosen.Config,
            "knobs": chosen.Knobs,
        }

    def _unknown(self, name: str) -> ConfigError:
        names = sorted(
            {one.name for part in self._types().values() for one in dataclasses.fields(part)}
        )
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
                f"{self.algorithm} cannot be set up: {error}; give every setting a default"
            ) from error
        chosen = algorithm_class(self.algorithm_type or self.algorithm)
        return RunSettings(algorithm=self.algorithm, algorithm_type=chosen, **parts)

    def values(self) -> dict[str, dict[str, Any]]:
        """What was given so far, by section, checked."""
        leaves = {
            name: {one.name: _leaf(one) for one in dataclasses.fields(part)}
            for name, part in self._types().items()
        }
        return {
            section: {
                name: self._checked(section, leaves[section][name], value)
                for name, value in given.items()
            }
            for section, given in self.given.items()
        }

    def _checked(self, section: str, leaf: Leaf, value: Any, *, origin: str = "") -> Any:
        if leaf.name == "network" and not isinstance(value, NetworkSpec):
            raise ConfigError(
                f"network is {value!r}; give widths as --network 64,64, or a NetworkSpec in Python"
            )
        return check_value(leaf, value, origin=origin, may_move=section == "knobs")


def _leaf(one: "dataclasses.Field[Any]") -> Leaf:
    return Leaf(one.name, one.default, one.metadata.get("range"), _PREFIX)


# --- Presets: settings for a kind of game, as files; those in the box, and the user's own ---------


def preset_names() -> list[str]:
    """The presets in the box."""
    folder = resources.files("understudy") / "presets"
    return sorted(
        one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml")
    )


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name, or by the path of its file."""
    if name.endswith(".toml") or "/" in name:
        if not (fields := read_toml(Path(name))):
            raise ConfigError(
                f"{name} holds no settings; a preset says at least which algorithm; take the file "
                "from a copy, or "
                "leave it out for the preset of the game's kind"
            )
        return fields
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(preset_names())}"
        )
        raise ConfigError(f"there is no preset {name!r}{hint}")
    return _parsed((resources.files("understudy") / "presets" / f"{name}.toml").read_text(), name)


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file; ConfigError says what is wrong with it."""
    try:
        return _parsed(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    if unknown := fields.keys() - {"algorithm", *SECTIONS}:
        raise ConfigError(
            f"{name} has a section {sorted(unknown)[0]!r}; known are algorithm, "
            f"{', '.join(SECTIONS)}"
        )
    if not isinstance(fields.get("algorithm", ""), str):
        raise ConfigError(
            f'{name} has algorithm = {fields["algorithm"]!r}; give a name such as "dqn"'
        )
    for section in fields.keys() & SECTIONS:
        if not isinstance(fields[section], dict):
            raise ConfigError(
                f"{name} has {section} = {fields[section]!r}; write a section [{section}] with its "
                "settings"
            )
    return fields


def default_preset(algorithm: str, game: GameSpec) -> str:
    """The preset for a kind of game: pixels, continuous actions, or small observations."""
    from understudy.learn.architecture import (
        image_channels,
    )  # brings JAX, which `--list` and others can do without

    is_pixels = any(image_channels(one) is not None for one in game.obs.values())
    kind = "pixels" if is_pixels else "vector" if game.discrete is not None else "continuous"
    for name in (f"{algorithm}-{kind}", f"{algorithm}-vector"):
        if name in preset_names():
            return name
    return ""


# --- What the user asked for ----------------------------------------------------------------------


MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the user asked for; what is None comes from the preset, or from the run that goes on."""

    algorithm: Any = None
    """A short name, an import path, or a class."""
    preset: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Single settings by name."""
    network: NetworkSpec | Sequence[int] | None = None
    """A network of one's own, or the widths of its layers."""
    seed: int | None = None
    until: float | None = None
    init_from: Path | None = None
    """A run whose best policy is where this one starts."""
    from_store: Path | None = None
    """A data folder to learn from, instead of playing."""

    def __post_init__(self) -> None:
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED):
            raise ConfigError(f"seed is {self.seed!r}; give a whole number from 0 to {MAX_SEED}")
        check_until(self.until)


def wanted_algorithm(wanted: TrainRequest) -> Any:
    """The algorithm that was asked for, in words, in a file or by a preset; else the one for the
    kind of training."""
    named = {
        "--algorithm": wanted.algorithm,
        f"--config {wanted.config_file}": wanted.config_file
        and read_toml(wanted.config_file).get("algorithm"),
        f"--preset {wanted.preset}": wanted.preset and read_preset(wanted.preset).get("algorithm"),
    }
    named = {source: one for source, one in named.items() if one is not None}
    names = {source: algorithm_name(one) for source, one in named.items()}
    first = next(iter(names), None)
    for source, name in names.items():
        # An algorithm of one's own may borrow what a preset says about the run and the learner.
        if first is not None and name != names[first] and names[first] in ALGORITHMS:
            raise ConfigError(
                f"{first} is for {names[first]}, and {source} for {name}; leave out one of the two"
            )
    return named[first] if first is not None else "ppo" if wanted.from_store is None else "bc"


def check_words(wanted: TrainRequest) -> None:
    """ConfigError for what is wrong whatever the game; without JAX, unless the algorithm is the
    user's own."""
    algorithm = wanted_algorithm(wanted)
    name = algorithm_name(algorithm)
    chosen = (
        described(name) if name in ALGORITHMS else None if isinstance(algorithm, str) else algorithm
    )
    filled(Resolver(name, chosen), wanted, wanted.preset, with_environment=True).values()


def resolve(wanted: TrainRequest, game: GameSpec) -> RunSettings:
    """Preset, file, environment and single settings, checked; in this order, the later wins."""
    algorithm = wanted_algorithm(wanted)
    name = algorithm_name(algorithm)
    resolver = Resolver(name, None if isinstance(algorithm, str) else algorithm)
    preset = wanted.preset or default_preset(name, game)
    settings = filled(resolver, wanted, preset, with_environment=True).settings()
    return (
        settings
        if not isinstance(wanted.network, NetworkSpec)
        else with_network(settings, wanted.network)
    )


def filled(
    resolver: Resolver, wanted: TrainRequest, preset: str | None, *, with_environment: bool = False
) -> Resolver:
    """The resolver with a preset, the user's file, the environment and single settings, of which
    the later wins."""
    if preset:
        resolver.add(read_preset(preset))
    if wanted.config_file is not None:
        resolver.add(read_toml(wanted.config_file))
    if with_environment:
        resolver.add_environment()
    for key, value in wanted.settings.items():
        resolver.set(key, value)
    if wanted.network is not None and not isinstance(wanted.network, NetworkSpec):
        resolver.set("widths", list(wanted.network))
    return resolver


def with_network(settings: RunSettings, network: NetworkSpec | None) -> RunSettings:
    """The same settings with a network of one's own."""
    if network is None:
        return settings
    if not hasattr(settings.config, "network"):
        raise ConfigError(f"{settings.algorithm} takes no network of one's own; leave it out")
    return replace(settings, config=replace(settings.config, network=network))
