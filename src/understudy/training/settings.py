"""Settings of a run, resolved from preset, file, environment and flags; later sources win.

An environment variable is named after its setting: UNDERSTUDY_TRAIN_LEARNING_RATE, or
UNDERSTUDY_TRAIN_LEARNING_RATE_FILE for a file with the value.
"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from understudy.algorithm import Rollouts
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
from understudy.core.wording import joined
from understudy.experience.game import GameSpec
from understudy.nn.heads import Head
from understudy.nn.network import NetworkSpec
from understudy.nn.policy import Policy
from understudy.replay import REPLAYS, ReplayConfig, replay_class

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
        10_000, 1, 10**9, "steps after which evaluations cut an episode, if the game has no limit"
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
        knobs = {name: getattr(self.knobs, name) for name in _field_names(self.knobs)}
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
            section: {name: getattr(part, name) for name in _field_names(part)}
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


def _field_names(part: Any) -> list[str]:
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
        names = {section: _field_names(part) for section, part in self._types().items()}
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
            if name in _field_names(self._types()[section]):
                self.collected[section][name] = value
                return
        raise self._unknown(name)

    def add_environment(self, environ: Mapping[str, str] | None = None) -> None:
        """Add the values of environment variables, or of the files they name."""
        environ = os.environ if environ is None else environ
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

    def _unknown(self, name: str) -> ConfigError:
        names = sorted({name for part in self._types().values() for name in _field_names(part)})
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


# --- Presets: files of settings for one kind of game, built in or the user's own ------------------


def preset_names() -> list[str]:
    """The names of the built-in presets."""
    folder = resources.files("understudy") / "presets"
    return sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )


def preset_families() -> list[str]:
    """The names that presets for several kinds of games share, such as apex."""
    return sorted({name.rpartition("-")[0] for name in preset_names() if "-" in name})


def is_family(name: str) -> bool:
    """Whether presets for several kinds of games have this name, such as apex."""
    return name in preset_families()


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name, or by the path of its file; of a family, one of its presets."""
    if name.endswith(".toml") or "/" in name:
        if not (fields := read_toml(Path(name))):
            raise ConfigError(
                f"{name} contains no settings; a preset names at least its algorithm; restore the "
                "file from a copy, or omit it to use the preset for the kind of game"
            )
        return fields
    if is_family(name):
        name = next(preset for preset in preset_names() if preset.startswith(f"{name}-"))
    if name not in preset_names():
        near = difflib.get_close_matches(name, (*preset_families(), *preset_names()), n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(preset_names())}"
        )
        raise ConfigError(f"there is no preset {name!r}{hint}")
    return _parsed((resources.files("understudy") / "presets" / f"{name}.toml").read_text(), name)


BEST = "best.toml"
"""In the folder of a study of `understudy tune`: the settings of its best trial."""


def with_study(preset: str | None, config_file: Path | None) -> tuple[str | None, Path | None]:
    """Preset and settings file, where the preset may be the folder of a study.

    That is the settings of its best trial, over the preset that its trials had.
    """
    if preset is None or preset in (*preset_names(), *preset_families()):
        return preset, config_file
    folder = Path(preset)
    if not folder.is_dir():
        return preset, config_file
    if not (folder / BEST).exists():
        raise ConfigError(
            f"preset is {preset}, a folder without {BEST}; give a preset's name or file, or the "
            "folder of a study whose best trial trains an algorithm of understudy"
        )
    if config_file is not None:
        raise ConfigError(
            f"preset is the study {preset}, whose settings are the file {folder / BEST}, and "
            f"config is {config_file}; omit one of the two"
        )
    try:
        study = json.loads((folder / "study.json").read_bytes())["study"]
        of_trials: str | None = study["trainable"]["config"]["preset"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'study.json'} cannot be read: {error!r}; write it again: understudy tune "
            f"resume {preset}"
        ) from None
    return of_trials, folder / BEST


def read_toml(path: Path) -> dict[str, Any]:
    """The fields of a settings file; ConfigError if it is unreadable or malformed."""
    try:
        return _parsed(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error}; pass a readable TOML file"
        ) from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}; correct it there") from None
    if unknown := fields.keys() - {"algorithm", *SECTIONS}:
        raise ConfigError(
            f"{name} has a section {sorted(unknown)[0]!r}, which is unknown; use algorithm, "
            f"{', '.join(SECTIONS)}"
        )
    if not isinstance(fields.get("algorithm", ""), str):
        raise ConfigError(
            f'{name} has algorithm = {value_text(fields["algorithm"])}; give a name such as "dqn"'
        )
    for section in fields.keys() & SECTIONS:
        if not isinstance(fields[section], dict):
            raise ConfigError(
                f"{name} has {section} = {value_text(fields[section])}; write a section "
                f"[{section}] with its settings"
            )
    return fields


def default_preset(family: str, game: GameSpec) -> str:
    """The preset of an algorithm or family for a kind of game: pixels, continuous or vector.

    "" if there is none.
    """
    # Imported late: it imports JAX, which `--list` does not need.
    from understudy.learn.architecture import image_channels

    is_pixels = any(image_channels(space) is not None for space in game.obs.values())
    kind = "pixels" if is_pixels else "vector" if game.discrete is not None else "continuous"
    for name in (f"{family}-{kind}", f"{family}-vector"):
        if name in preset_names():
            return name
    return ""


# --- The user's request ---------------------------------------------------------------------------


MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the user requested; None means the preset's value, or that of the resumed run."""

    algorithm: Any = None
    """A short name, an import path, or a class."""
    preset: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Single settings by name."""
    network: NetworkSpec | Sequence[int] | None = None
    """A custom network, or the widths of its layers."""
    seed: int | None = None
    until: float | None = None
    init_from: Path | None = None
    """A run whose best policy provides the initial weights."""
    from_store: Path | None = None
    """A data folder to learn from instead of playing."""
    engine: str | None = None
    """Where actors play, of ENGINES."""
    address: str | None = None
    """The Ray cluster; None: the run starts Ray."""
    listen: Mapping[str, Any] | None = None
    """Where workers join: those fields of WorkersConfig that were given."""

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {joined(ENGINES)}")
        if self.listen is not None and self.engine not in (None, "workers"):
            raise ConfigError(
                "an address, a certificate or a key for workers is set, but engine is "
                f"{self.engine!r}; use engine='workers', or omit it"
            )
        if self.address is not None and self.engine != "ray":
            raise ConfigError(
                f"address is {self.address!r}, which is that of a Ray cluster; use it with "
                "engine='ray', or omit it"
            )
        if self.engine not in (None, ENGINES[0]) and self.from_store is not None:
            raise ConfigError(
                f"engine is {self.engine!r}, but a run from a store plays no game; omit engine or "
                "from_store"
            )
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED):
            raise ConfigError(f"seed is {self.seed!r}; give a whole number from 0 to {MAX_SEED}")
        check_until(self.until)


def requested_algorithm(request: TrainRequest) -> Any:
    """The algorithm named by flag, file or preset; by default ppo, or bc to train from a store."""
    named = {
        "algorithm": request.algorithm,
        f"config {request.config_file}": request.config_file
        and read_toml(request.config_file).get("algorithm"),
        f"preset {request.preset}": request.preset and read_preset(request.preset).get("algorithm"),
    }
    named = {source: algorithm for source, algorithm in named.items() if algorithm is not None}
    names = {source: algorithm_name(algorithm) for source, algorithm in named.items()}
    first = next(iter(names), None)
    for source, name in names.items():
        # A custom algorithm may reuse the run and learner sections of any preset.
        if first is not None and name != names[first] and names[first] in ALGORITHMS:
            raise ConfigError(
                f"{first} is for {names[first]}, and {source} for {name}; omit one of the two"
            )
    return named[first] if first is not None else "ppo" if request.from_store is None else "bc"


def check_request(request: TrainRequest) -> None:
    """ConfigError for settings invalid in any game.

    Imports JAX only for a custom algorithm, or if a custom replay does.
    """
    algorithm = requested_algorithm(request)
    name = algorithm_name(algorithm)
    chosen = (
        describe_algorithm(name)
        if name in ALGORITHMS
        else None
        if isinstance(algorithm, str)
        else algorithm
    )
    resolver = fill_resolver(Resolver(name, chosen), request, request.preset, with_environment=True)
    replay = resolver.values()["learner"].get("replay", LearnerPart().replay)
    if replay not in REPLAYS:
        replay_class(replay)


def resolve(request: TrainRequest, game: GameSpec) -> RunSettings:
    """The checked settings from preset, file, environment and flags; later sources win."""
    algorithm = requested_algorithm(request)
    name = algorithm_name(algorithm)
    resolver = Resolver(name, None if isinstance(algorithm, str) else algorithm)
    preset = _preset_for(request, name, game)
    settings = fill_resolver(resolver, request, preset, with_environment=True).settings()
    if request.engine == "workers":  # they come and go
        settings = replace(settings, run=replace(settings.run, asynchronous=True))
    if "horizon" not in without_preset(request, settings)["run"]:
        plan = Resolver(name, settings.algorithm_type)
        if preset:
            plan.add(read_preset(preset))
        settings = settings.with_horizon(plan.values()["run"].get("steps", RunPart().steps))
    return (
        settings
        if not isinstance(request.network, NetworkSpec)
        else with_network(settings, request.network)
    )


def _preset_for(request: TrainRequest, algorithm: str, game: GameSpec) -> str:
    """The preset, requested or of the algorithm, for this kind of game; "" if there is none."""
    preset = request.preset or default_preset(algorithm, game)
    return default_preset(preset, game) if is_family(preset) else preset


_OF_ACTORS = {
    "envs",
    "actors",
    "collect",
    "asynchronous",
    "ladder",
    "keep_history",
    "samples_per_insert",
    "min_inserts",
    "max_lag_versions",
}
"""Settings without an effect in a run from a store."""
_OF_WORKERS = {"evaluate_share", "lease_s"}
"""Settings without an effect with other engines than workers."""
_OFF_POLICY = {"collect", "ladder", "keep_history", *_field_names(LearnerPart)}
"""Settings without an effect in a run of an on-policy algorithm."""


def check_effects(request: TrainRequest, settings: RunSettings, game: GameSpec) -> None:
    """ConfigError if file, environment or flags set what has no effect in this run.

    The values of presets and defaults are not checked, since they are for many runs.
    """
    algorithm = settings.algorithm_type(game, settings.config)
    needs = algorithm.needs
    head = getattr(algorithm, "head", None)  # custom algorithms may lack it
    kind = head.kind if isinstance(head, Head) else None
    has_epsilon = kind == "epsilon_greedy"
    requested = without_preset(request, settings)
    why: dict[str, str] = {}
    if request.engine != "workers":
        why |= dict.fromkeys(_OF_WORKERS, "it is for engine='workers'")
    elif requested["run"].get("asynchronous") is False:
        raise ConfigError(
            "asynchronous is false, but workers come and go, so their runs are always "
            "asynchronous; omit the setting, or use engine='process'"
        )
    if request.from_store is not None:
        reason = "a run from a store plays no game and reads everything in the store"
        why |= dict.fromkeys(_OF_ACTORS | ({"epsilon"} if has_epsilon else set()), reason)
    elif isinstance(needs, Rollouts):
        if settings.run.asynchronous:
            raise ConfigError(
                f"{settings.algorithm} is on-policy and learns only from its newest weights, which "
                "workers and other asynchronous actors do not wait for; use dqn, or "
                "asynchronous=false and engine='process'"
            )
        has_own_envs = hasattr(settings.config, "envs") and "envs" not in requested["config"]
        reason = f"{settings.algorithm} is on-policy and has no replay"
        why |= dict.fromkeys(_OFF_POLICY | ({"envs"} if has_own_envs else set()), reason)
    elif not needs.prioritised:
        why["alpha"] = f"{settings.algorithm} does not draw by priority here"
    if has_epsilon and settings.run.ladder:
        why.setdefault("epsilon", "each env has its own with ladder")
    if kind is not None and not has_epsilon:
        why.setdefault("ladder", f"{settings.algorithm} does not explore by epsilon")
    resolver = Resolver(settings.algorithm, settings.algorithm_type)
    if preset := _preset_for(request, settings.algorithm, game):
        resolver.add(read_preset(preset))
    usual = resolver.settings()
    # A knob of a custom algorithm may have the name of a setting.
    names = {"run": why.keys(), "learner": why.keys(), "knobs": why.keys() & {"epsilon"}}
    for section, unused in names.items():
        for name in sorted(requested[section].keys() & unused):
            value = getattr(getattr(settings, section), name)
            if value != getattr(getattr(usual, section), name):
                raise ConfigError(
                    f"{name} is {value!r}, but {why[name]}, so it has no effect; omit it"
                )


def without_preset(request: TrainRequest, settings: RunSettings) -> dict[str, dict[str, Any]]:
    """The values that file, environment and flags set, by section."""
    resolver = Resolver(settings.algorithm, settings.algorithm_type)
    return fill_resolver(resolver, request, None, with_environment=True).collected


def fill_resolver(
    resolver: Resolver, request: TrainRequest, preset: str | None, *, with_environment: bool = False
) -> Resolver:
    """Add preset, file, environment and single settings to the resolver; later sources win."""
    if preset:
        resolver.add(read_preset(preset))
    if request.config_file is not None:
        resolver.add(read_toml(request.config_file))
    if with_environment:
        resolver.add_environment()
    for key, value in request.settings.items():
        resolver.set(key, value)
    if request.network is not None and not isinstance(request.network, NetworkSpec):
        resolver.set("widths", list(request.network))
    return resolver


def with_network(settings: RunSettings, network: NetworkSpec | None) -> RunSettings:
    """The settings with a custom network."""
    if network is None:
        return settings
    if not hasattr(settings.config, "network"):
        raise ConfigError(f"{settings.algorithm} does not support a custom network; omit it")
    return replace(settings, config=replace(settings.config, network=network))


_OF_NETWORKS = {"widths", "activation", "observation_norm", "centre", "stack"}
"""Settings that shape the default network."""


def with_network_of(
    start: Policy, settings: RunSettings, request: TrainRequest, game: GameSpec
) -> RunSettings:
    """The settings with the input and trunk layers of the policy that the run starts from.

    Its weights compute something else in other layers. The settings stay as they are if the request
    itself describes a network, or if the policy reads other observations.
    """
    requested = without_preset(request, settings)["config"]
    own = getattr(settings.algorithm_type(game, settings.config), "network", None)
    if request.network is not None or requested.keys() & _OF_NETWORKS or own is None:
        return settings
    columns, start_columns = (
        {name: (column.shape, column.dtype) for name, column in network.inputs.items()}
        for network in (own, start.network)
    )
    network = NetworkSpec(start.network.inputs, start.network.trunk, own.heads)
    if columns != start_columns or network == own or not hasattr(settings.config, "network"):
        return settings
    return with_network(settings, network)
