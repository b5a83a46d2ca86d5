"""read_study: the files that a StudyConfig is read from, RLiable's JSON unchanged or TOML.

    read_study(FILE.json)   grid file ─► base file ─► class, environment, hp_params
    read_study(FILE.toml)   [study], [space], [settings] and one section per part of a study

Everything that can be wrong in a file is reported before anything starts.
"""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from understudy.core.errors import ConfigError
from understudy.core.settings import Leaf, Schedule, check_value, leaves, nearest, value_text
from understudy.core.wording import joined
from understudy.training.settings import (
    ALGORITHMS,
    LearnerPart,
    RunPart,
    algorithm_class,
    algorithm_name,
    describe_algorithm,
)
from understudy.training.train_request import TrainRequest, check_request, requested_algorithm
from understudy.tuning.base_file import (
    ALGORITHM,
    CUSTOM,
    check_rliable_setting,
    custom_class,
    read_base,
    read_json,
    resolve_environment,
    text,
)
from understudy.tuning.rows import is_rows_file
from understudy.tuning.space import Choice, Dimension, read_space
from understudy.tuning.study_config import (
    MAX_TRIALS,
    PARTS,
    Constraint,
    ConvergenceConfig,
    SearchConfig,
    SlotsConfig,
    StudyConfig,
)
from understudy.tuning.trainables import (
    DIFFERENCES,
    LANE_METRICS,
    METRICS,
    RLIABLE_SETTINGS,
    model_path,
)
from understudy.tuning.trial import Metric, TrainableSpec, Trial, TrialResult

LANES = "understudy.tuning.lanes:Lanes"
LOG_RATIO = 100
"""An interval of a TOML file without a scale is logarithmic if its ends differ by more."""

T = TypeVar("T")


def read_study(path: str | Path, *, level: int = 0, **overrides: Any) -> StudyConfig:
    """The study of a file: RLiable's JSON, or TOML if its name ends so.

    `level` applies to RLiable's files, whose `num_workers` are slots at level 1 and the rollout
    workers of one slot at level 2; at level 0, trials run one after the other. `overrides` are
    settings by name: those of the parts, such as `slots` or `lag`, and name, folder, seed,
    max_trials, max_seconds, metric, criteria and rdd; None changes nothing. ConfigError names the
    file, the key, and what to write there.
    """
    path = Path(path)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if level not in (0, 1, 2):
        raise ConfigError(
            f"the level of parallelization is {value_text(level)}; give 1 (trials in parallel) or "
            "2 (the rollouts of a trial in parallel)"
        )
    try:
        study = _from_toml(path) if path.suffix == ".toml" else _from_rliable(path, level)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return with_settings(study, overrides)


def rliable_results(
    study: StudyConfig, trials: Iterable[tuple[Trial, TrialResult]]
) -> dict[str, dict[str, Any]]:
    """The results in RLiable's format: by number, each trial's settings and metric.

    The metric of a failed trial is None.
    """
    config = study.trainable.config
    return {
        str(trial.trial_no): {
            "class": config["class"],
            "environment": config["environment"],
            "mdl_file": str(model_path(config, trial.trial_no)),
            "hp_params": {**config["settings"], **trial.values},
            "metric": result.metrics.get(study.metric.name),
        }
        for trial, result in trials
    }


# --- Overrides ------------------------------------------------------------------------------------


_ALIASES = {"return": "reward"}
_NUMBERS = ("max_trials", "max_seconds", "seed")
"""The settings of the study itself that are numbers."""
_NAMES = ("name", "folder", "metric", "criteria", *_NUMBERS, "rdd")


def with_settings(study: StudyConfig, overrides: Mapping[str, Any]) -> StudyConfig:
    """The study with these settings by name, as `read_study` describes them."""
    known = _setting_parts()
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    own: dict[str, Any] = {}
    for name, value in overrides.items():
        if name in known:
            parts[known[name]][name] = value
        elif name in _NAMES:
            own[name] = value
        else:
            raise ConfigError(
                f"a study has no setting {name}; {nearest(name, [*known, *_NAMES])} Settings of "
                "every trial, such as steps, are under [settings] of its file"
            )
    study = replace(
        study,
        **{
            part: _part(kind, parts[part], getattr(study, part), where=part)
            for part, kind in PARTS.items()
        },
        **_own_settings({name: own.get(name, getattr(study, name)) for name in _NUMBERS}),
        name=text(own.get("name", study.name), "name"),
    )
    if "folder" in own:
        config = {**study.trainable.config, "folder": text(str(own["folder"]), "folder")}
        study = replace(study, trainable=replace(study.trainable, config=config))
    if "rdd" in own:
        study = replace(study, trainable=_with_rdd(study.trainable, own["rdd"]))
    metric = dataclasses.asdict(study.metric)
    metric |= {"name": own["metric"]} if "metric" in own else {}
    metric |= {"criteria": own["criteria"]} if "criteria" in own else {}
    return _with_trainable(_with_metric(study, metric))


def _setting_parts() -> dict[str, str]:
    """The part of each setting that belongs to one."""
    return {leaf.name: part for part, kind in PARTS.items() for leaf in leaves(kind)}


def _with_rdd(trainable: TrainableSpec, value: Any) -> TrainableSpec:
    """The trainable, which gets its rows as an RDD of Spark if the value is True."""
    if not isinstance(value, bool):
        raise ConfigError(f"rdd is {value_text(value)}; give true or false")
    config = trainable.config
    if value and not (trainable.path == CUSTOM and is_rows_file(config["environment"])):
        raise ConfigError(
            "rdd is true, but only classes of your own that train on a file of rows get them as an "
            "RDD; omit it"
        )
    return replace(trainable, config={**config, "rdd": value})


def _with_trainable(study: StudyConfig) -> StudyConfig:
    """The study with the trainable that its slots run: in lanes, or with rollout workers."""
    slots = study.slots
    path = study.trainable.path
    if path not in (ALGORITHM, CUSTOM, LANES):
        return study
    if slots.lanes and path == CUSTOM:
        raise ConfigError(
            f"lanes is {slots.lanes}, but a class of your own trains one trial at a time; set it "
            "to 0, and slots to run several at once"
        )
    if slots.lanes and slots.rollout_workers:
        raise ConfigError(
            f"lanes is {slots.lanes} and rollout_workers {slots.rollout_workers}, but trials in "
            "lanes play their own episodes; set one of them to 0"
        )
    for name in (study.metric.name, *(constraint.metric for constraint in study.constraints)):
        if slots.lanes and name not in LANE_METRICS:
            raise ConfigError(
                f"trials in lanes do not measure {name}; name one of {joined(LANE_METRICS)}, or "
                "set lanes to 0"
            )
    if path != CUSTOM:
        path = LANES if slots.lanes else ALGORITHM
    own = {"rollout_workers": slots.rollout_workers, "lanes": slots.lanes}
    config = {**study.trainable.config, **own}
    return replace(study, trainable=replace(study.trainable, path=path, config=config))


def _part(kind: type[T], values: Any, start: T, *, where: str) -> T:
    """The part of a study with these values, checked."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {value_text(values)}; write a section [{where}] with its settings"
        )
    known = {leaf.name: leaf for leaf in leaves(kind)}
    for name in values:
        if name not in known:
            raise ConfigError(f"{where} has no setting {name}; {nearest(name, list(known))}")
    return replace(start, **{name: _checked(known[name], values[name]) for name in values})  # type: ignore[type-var]


def _checked(leaf: Leaf, value: Any) -> Any:
    if leaf.default is None:  # the threshold
        leaf = replace(leaf, default=0.0)
    return check_value(leaf, value)


def _own_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values of settings in `_NUMBERS`."""
    fields = {field.name: field for field in dataclasses.fields(StudyConfig)}
    return {
        name: check_value(Leaf(name, fields[name].default, fields[name].metadata["range"]), value)
        for name, value in values.items()
    }


def _with_metric(study: StudyConfig, fields: Mapping[str, Any]) -> StudyConfig:
    """The study with this metric; classes of the user's may have any, and ours those of METRICS."""
    criteria = fields.get("criteria", "max")
    if criteria not in ("max", "min"):
        raise ConfigError(f"the metric's criteria is {value_text(criteria)}; give max or min")
    name = text(fields.get("name", "reward"), "the metric's name")
    if study.trainable.path == CUSTOM:
        config = {**study.trainable.config, "metric": name}
        study = replace(study, trainable=replace(study.trainable, config=config))
    elif study.trainable.path in (ALGORITHM, LANES):
        name = _ALIASES.get(name, name)
        for each in (name, *(constraint.metric for constraint in study.constraints)):
            if each not in METRICS:
                raise ConfigError(f"there is no metric {each}; {nearest(each, METRICS)}")
    return replace(study, metric=Metric(name=name, criteria=criteria))


# --- RLiable's JSON -------------------------------------------------------------------------------


_GRID_KEYS = ("config", "optim_name", "num_workers", "grid", "metric", "max_iters", "convergence")


def _from_rliable(path: Path, level: int) -> StudyConfig:
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise ConfigError(f"it has {value_text(fields)}; give an object with {joined(_GRID_KEYS)}")
    for key in fields:
        if key in (*_setting_parts(), *_NUMBERS):
            raise ConfigError(
                f"there is no key {key} in RLiable's files; omit it, and give the setting with the "
                f"command: --set {key}={value_text(fields[key])}"
            )
        if key not in _GRID_KEYS:
            raise ConfigError(f"there is no key {key}; {nearest(key, _GRID_KEYS)}")
    if missing := [key for key in ("config", "grid") if key not in fields]:
        raise ConfigError(f"{joined(missing)} is missing; a study file has {joined(_GRID_KEYS)}")
    metric = fields.get("metric", {})
    if not isinstance(metric, dict):
        raise ConfigError(
            f'metric is {value_text(metric)}; give {{"name": "reward", "criteria": "max"}}'
        )
    for key in metric:
        if key not in ("name", "criteria"):
            raise ConfigError(f"metric has a key {key}; {nearest(key, ('name', 'criteria'))}")
    name = text(fields.get("optim_name", path.stem), "optim_name")
    num_workers = _count(fields.get("num_workers", 1), "num_workers")
    max_trials = _count(fields.get("max_iters", 20), "max_iters")
    threshold = fields.get("convergence")
    convergence = ConvergenceConfig(
        threshold=None if threshold is None else _number(threshold, "convergence"),
        patience=max(10, 2 * num_workers),
        legacy_batch=num_workers if level else 1,
    )
    config = text(fields["config"], "config")
    places = [path.parent / config, Path(config)]
    base_path = next((place for place in places if place.is_file()), None)
    if base_path is None:
        raise ConfigError(
            f"config is {config}, which does not exist in {path.parent} or in the working folder; "
            "correct the path of the base file"
        )
    trainable, mdl_file, notes = read_base(base_path)
    is_dqn = trainable.path == ALGORITHM
    types = {key: setting.kind for key, setting in RLIABLE_SETTINGS.items()} if is_dqn else {}
    try:
        space = read_space(fields["grid"], types=types)
        if is_dqn:
            for key, dimension in space.dimensions.items():
                for value in _candidates(dimension):
                    check_rliable_setting(key, value)
            if "train_iterations" not in {*space.dimensions, *trainable.config["settings"]}:
                raise ConfigError(
                    f"train_iterations is missing; give it here, or in hp_params of {base_path}"
                )
            notes = [*notes, *_differences({*space.dimensions, *trainable.config["settings"]})]
    except ConfigError as error:
        raise ConfigError(f"grid: {error}") from None
    folder = {"folder": str(mdl_file.parent / name)}
    study = StudyConfig(
        name=name,
        space=space,
        trainable=replace(trainable, config={**trainable.config, **folder}),
        max_trials=max_trials,
        search=SearchConfig(test_seeds=0),  # exactly `max_iters` trainings
        convergence=convergence,
        slots=SlotsConfig(
            slots=num_workers if level == 1 else 1,
            rollout_workers=num_workers if level == 2 else 0,
        ),
        notes=notes,
    )
    return _with_metric(study, metric)


def _differences(named: Set[str]) -> list[str]:
    """How trials differ from RLiable's; `named` settings are as the file says."""
    return [
        *(
            f"{name} is {setting.default:g} by default; {setting.difference}"
            for name, setting in RLIABLE_SETTINGS.items()
            if setting.difference and name not in named
        ),
        *DIFFERENCES,
    ]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        raise ConfigError(f"{what} is {value_text(value)}; give a number from 0")
    return float(value)


def _count(value: Any, what: str) -> int:
    number = _number(value, what)
    if number != int(number) or not 1 <= number <= MAX_TRIALS:
        raise ConfigError(
            f"{what} is {value_text(value)}; give a whole number from 1 to {MAX_TRIALS}"
        )
    return int(number)


def _candidates(dimension: Dimension) -> Sequence[Any]:
    """The values to check: all of a list, the ends of an interval."""
    return dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)


# --- TOML -----------------------------------------------------------------------------------------


_STUDY_KEYS = {
    "name": "", "game": "", "algorithm": "", "preset": "", "class": "", "environment": "",
    "mdl_file": "model", "metric": "reward", "criteria": "max", "folder": "", "max_trials": 20,
    "max_seconds": 0.0, "seed": 0, "rdd": False,
}  # fmt: skip
_SECTIONS = ("study", "space", "settings", "constraints", *PARTS)


def _from_toml(path: Path) -> StudyConfig:
    try:
        fields = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}; give a TOML file") from None
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits
        raise ConfigError(f"it is not TOML: {error}; correct it there") from None
    for section, value in fields.items():
        if section not in _SECTIONS:
            raise ConfigError(f"there is no section {section}; {nearest(section, _SECTIONS)}")
        if not isinstance(value, dict):
            raise ConfigError(
                f"{section} is {value_text(value)}; write a section [{section}] with its settings"
            )
    if missing := [section for section in ("study", "space") if section not in fields]:
        raise ConfigError(
            f"section {joined(missing)} is missing; give [study] with a game, and [space] with the "
            "settings to vary"
        )
    own = fields["study"]
    for key, value in own.items():
        if key not in _STUDY_KEYS:
            raise ConfigError(f"study has no setting {key}; {nearest(key, list(_STUDY_KEYS))}")
        if isinstance(_STUDY_KEYS[key], str):
            text(value, key)
    name = own.get("name", path.stem)
    settings = fields.get("settings", {})
    if repeated := fields["space"].keys() & settings.keys():
        raise ConfigError(f"{joined(repeated)} is in space and in settings; omit it in one of them")
    trainable, notes, known = _own_trainable(own, settings, path)
    space = read_space(
        {key: _with_range(key, entry, known) for key, entry in fields["space"].items()},
        types={
            key: float if isinstance(leaf.default, Schedule) else type(leaf.default)
            for key, leaf in known.items()
        },
    )
    if trainable.path == ALGORITHM:
        for key, dimension in space.dimensions.items():
            for value in _candidates(dimension):
                _check_request(trainable.config, {**settings, key: value})
    folder = {"folder": own.get("folder", f"runs/{name}")}
    study = StudyConfig(
        name=name,
        space=space,
        trainable=replace(trainable, config={**trainable.config, **folder}),
        constraints=tuple(
            _constraint(metric, bounds) for metric, bounds in fields.get("constraints", {}).items()
        ),
        **_own_settings({key: own[key] for key in _NUMBERS if key in own}),
        **{
            part: _part(kind, fields.get(part, {}), kind(), where=part)
            for part, kind in PARTS.items()
        },
        notes=notes,
    )
    return _with_metric(
        study, {"name": own.get("metric", "reward"), "criteria": own.get("criteria", "max")}
    )


def _own_trainable(
    own: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> tuple[TrainableSpec, Sequence[str], Mapping[str, Leaf]]:
    """What [study] names, hints, and the settings that have ranges."""
    key = "environment" if "class" in own else "game"
    if key not in own:
        raise ConfigError(f'study has no {key}; give one, such as {key} = "CartPole-v1"')
    for other in ("algorithm", "preset") if "class" in own else ("environment", "mdl_file", "rdd"):
        if other in own:
            raise ConfigError(
                f"study has {other}, which belongs to a {'game' if 'class' in own else 'class'}; "
                "omit it"
            )
    environment, hints = resolve_environment(own[key], path.parent, own.get("class", ""))
    if not is_rows_file(environment) and environment != own[key]:
        raise ConfigError(f"there is no environment {own[key]}; did you mean {environment}?")
    config: dict[str, Any] = {
        "environment": environment,
        "mdl_file": own.get("mdl_file", "model"),
        "settings": dict(settings),
        "rollout_workers": 0,
        "is_rliable": False,
    }
    if "class" in own:
        config |= {"class": own["class"], **custom_class(own["class"])}
        trainable = TrainableSpec(path=CUSTOM, config=config)
        return _with_rdd(trainable, own["rdd"]) if "rdd" in own else trainable, hints, {}
    if is_rows_file(environment):
        raise ConfigError(
            f"game is {environment}, a file of rows; give the id of an env, or a class that trains "
            "on rows"
        )
    config |= {
        "game": environment,
        "algorithm": own.get("algorithm"),
        "preset": own.get("preset"),
    }
    algorithm = _check_request(config, settings)
    config["class"] = algorithm
    chosen = (
        describe_algorithm(algorithm) if algorithm in ALGORITHMS else algorithm_class(algorithm)
    )
    kinds = (RunPart, LearnerPart, chosen.Knobs, chosen.Config)  # the last one wins, as in a run
    known = {leaf.name: leaf for kind in kinds for leaf in leaves(kind)}
    return TrainableSpec(path=ALGORITHM, config=config), hints, known


def _check_request(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The algorithm's name; ConfigError for settings that no run of it accepts."""
    request = TrainRequest(
        algorithm=config["algorithm"], preset=config["preset"], settings=settings
    )
    check_request(request)
    return algorithm_name(requested_algorithm(request))


def _with_range(name: str, entry: Any, known: Mapping[str, Leaf]) -> Any:
    """The entry, with what it omits from the range of the algorithm's setting."""
    if not isinstance(entry, dict) or "values" in entry:
        return entry
    if not {"min", "max"} <= entry.keys():
        leaf = known.get(name)
        limits = None if leaf is None else leaf.range
        if leaf is not None and isinstance(leaf.default, bool):
            return [False, True]
        if limits is not None and limits.choices:
            return list(limits.choices)
        if limits is None or not math.isfinite(limits.high - limits.low):
            raise ConfigError(f"{name} has no range; give min and max, or a list of values")
        entry = {"min": limits.low, "max": limits.high, **entry}
    low, high = entry["min"], entry["max"]
    are_numbers = all(isinstance(end, int | float) for end in (low, high))
    if are_numbers and not {"scale", "step"} & entry.keys() and 0 < low * LOG_RATIO < high:
        return {**entry, "scale": "log"}
    return entry


def _constraint(metric: str, bounds: Any) -> Constraint:
    if not isinstance(bounds, dict) or not bounds or not bounds.keys() <= {"min", "max"}:
        raise ConfigError(
            f"the constraint {metric} is {value_text(bounds)}; give {{ min = 0, max = 100 }}, or "
            "one of the two"
        )
    for value in bounds.values():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(
                f"a bound of the constraint {metric} is {value_text(value)}; give a finite number"
            )
    low = bounds.get("min")
    high = bounds.get("max")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"the constraint {metric} has min {low} above max {high}; exchange them")
    return Constraint(metric=metric, low=low, high=high)
