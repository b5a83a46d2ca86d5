"""RLiable's base file: a class, its environment and its settings; train and evaluate it once."""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from understudy.core.errors import ConfigError, GameFailed
from understudy.core.settings import load_object, nearest, value_text
from understudy.core.wording import CONTROL, joined
from understudy.training.settings import Resolver, describe_algorithm
from understudy.tuning.rows import is_rows_file, read_rows
from understudy.tuning.trainables import (
    RLIABLE_SETTINGS,
    AlgorithmTrainable,
    CustomTrainable,
    old_envs_allowed,
    rliable_settings,
)
from understudy.tuning.trial import TrainableSpec, Trial

ALGORITHM = "understudy.tuning.trainables:AlgorithmTrainable"
CUSTOM = "understudy.tuning.trainables:CustomTrainable"
CLASSES = {"CountModel": "understudy.tuning.models:CountModel"}
"""RLiable's short names of classes, besides DQN, which is an algorithm of ours."""
KEYS = ("class", "environment", "mdl_file", "hp_params")
_VERSION = re.compile(r"(?P<stem>.+)-[vV](?P<version>\d+)")


class BaseFile(NamedTuple):
    """What a base file says."""

    trainable: TrainableSpec
    """Its folder is that of the models."""
    mdl_file: Path
    notes: Sequence[str]


def read_base(path: str | Path) -> BaseFile:
    """A base file, checked; ConfigError names the file, the key, and what to write there."""
    path = Path(path)
    try:
        return _read(read_json(path), path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(fields: Any, path: Path) -> BaseFile:
    given = fields if isinstance(fields, dict) else {}
    if missing := [key for key in KEYS if key not in given]:
        raise ConfigError(f"{joined(missing)} is missing; a base file has {joined(KEYS)}")
    notes = [f"{path}: {key} has no meaning here" for key in fields if key not in KEYS]
    for key in ("class", "environment", "mdl_file"):
        text(fields[key], key)
    if not isinstance(fields["hp_params"], dict):
        raise ConfigError(
            f"hp_params is {value_text(fields['hp_params'])}; give an object of settings by name"
        )
    name = fields["class"]
    environment, hints = resolve_environment(fields["environment"], path.parent, name)
    mdl_file = Path(fields["mdl_file"])
    config = {
        "class": name,
        "environment": environment,
        "mdl_file": str(mdl_file),
        "settings": fields["hp_params"],
        "folder": str(mdl_file.parent),
        "rollout_workers": 0,
        "is_rliable": True,
    }
    if name == "DQN":
        if is_rows_file(environment):
            raise ConfigError(
                f"class DQN cannot train on the rows of {environment}; give the id of an env, such "
                "as CartPole-v1"
            )
        try:
            for key, value in fields["hp_params"].items():
                check_rliable_setting(key, value)
        except ConfigError as error:
            raise ConfigError(f"hp_params: {error}") from None
        config |= {"game": environment, "algorithm": "dqn", "preset": "rliable"}
        spec = TrainableSpec(path=ALGORITHM, config=config)
    else:
        spec = TrainableSpec(path=CUSTOM, config={**config, **custom_class(name)})
    return BaseFile(spec, mdl_file, [*notes, *hints])


def custom_class(name: str) -> dict[str, str]:
    """The path of a custom class, for a trainable's config; ConfigError if it has no methods."""
    if name == "BaseModel":
        raise ConfigError(
            "class BaseModel trains nothing, it is what RLiable's classes inherit from; give "
            "DQN, CountModel, or your own class as module:Class"
        )
    path = CLASSES.get(name, name)
    kind = load_object(path, what="class", known=(*CLASSES, "DQN"))
    if missing := [method for method in ("train", "evaluate") if not hasattr(kind, method)]:
        raise ConfigError(
            f"class {name} has no method {joined(missing)}; define train(data) and evaluate(data)"
        )
    try:
        inspect.signature(kind).bind(None, {})
    except TypeError as error:
        raise ConfigError(
            f"class {name} cannot be created with (sc, cfg): {error}; define __init__(self, sc, "
            "cfg), of which cfg has the settings in hp_params"
        ) from None
    return {"path": path, "metric": "reward"}


def resolve_environment(environment: str, folder: Path, class_name: str) -> tuple[str, list[str]]:
    """A file of rows that exists, or the id of an env that can be created; and hints.

    A file is relative to `folder`, or to the working folder. An id may differ from that of an
    installed env in case and version. The class is empty if an algorithm is trained.
    """
    places = [folder / environment, Path(environment)]
    if rows := next((place for place in places if place.is_file()), None):
        if class_name not in ("", "DQN"):
            read_rows(rows)
        return str(rows.resolve()), []
    if is_rows_file(environment):
        if class_name == "CountModel":
            path = resources.files("understudy") / "tuning" / "count.json"
            hint = f"there are no rows at {environment}; CountModel uses those of understudy"
            return str(path), [hint]
        raise ConfigError(
            f"environment {environment} does not exist in {folder} or in the working folder; "
            "correct the path of its rows, or give the id of an env"
        )
    # Imported late: reading rows needs no Gymnasium.
    import gymnasium

    from understudy.training.env_info import GameChoice, inspect_env

    hints = []
    parts = _VERSION.fullmatch(environment)
    versions = {
        int(other["version"]): id_
        for id_ in gymnasium.registry
        if parts
        and (other := _VERSION.fullmatch(id_))
        and other["stem"].lower() == parts["stem"].lower()
    }
    if versions and environment not in versions.values():
        assert parts is not None
        installed = versions.get(int(parts["version"]), versions[max(versions)])
        hints = [f"there is no environment {environment}; {installed} is used"]
        environment = installed
    elif versions and environment != versions[max(versions)]:
        hints = [f"{environment} is an old version of {versions[max(versions)]}; it is used as is"]
    try:
        with old_envs_allowed():
            inspect_env(GameChoice(game=environment))
    except (ConfigError, GameFailed) as error:
        raise ConfigError(f"environment: {error}") from None
    return environment, hints


def check_rliable_setting(name: str, value: Any) -> None:
    """ConfigError unless RLiable's DQN, and ours, has this setting and accepts the value."""
    if name not in RLIABLE_SETTINGS:
        raise ConfigError(
            f"class DQN has no setting {name}; {nearest(name, list(RLIABLE_SETTINGS))}"
        )
    kind = RLIABLE_SETTINGS[name].kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and value != int(value)):
        raise ConfigError(
            f"{name} is {value_text(value)}; give a {'whole number' if kind is int else 'number'}"
        )
    if value < 0 or (kind is int and value < 1 and name != "num_test_episodes"):
        raise ConfigError(f"{name} is {value_text(value)}; give a number above 0")
    resolver = Resolver("dqn", describe_algorithm("dqn"))
    try:
        for key, ours in rliable_settings({"train_iterations": 1, name: value}).items():
            resolver.set(key, ours)
        resolver.values()
    except ConfigError as error:
        raise ConfigError(f"{name} is {value_text(value)}: {error}") from None


def text(value: Any, what: str) -> str:
    """The value, if it is a text that is not empty and has no control characters."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{what} is {value_text(value)}; give a text")
    if control := CONTROL.search(value):
        raise ConfigError(
            f"{what} is {value_text(value)}, which has the control character {control[0]!a}; give "
            "printable text"
        )
    return value


def read_json(path: Path) -> Any:
    """The value of a JSON file; ConfigError if it is not valid, unique and finite."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise ValueError(f"the key {key} appears twice in the same object")
            fields[key] = value
        return fields

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"the number {number[:40]} is not finite")
        return value

    try:
        content = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}; give a JSON file") from None
    try:
        return json.loads(
            content, object_pairs_hook=unique, parse_float=finite, parse_constant=finite
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not valid JSON: {error}; correct it there") from None


# --- A single training ----------------------------------------------------------------------------


def train_base(path: str | Path, *, seed: int = 0) -> Mapping[str, float]:
    """Train what a base file describes, and save it at its `mdl_file`; return its metrics."""
    base, mdl_file, _ = read_base(path)
    trial = Trial(trial_no=0, values={}, seed=seed)
    if base.path == CUSTOM:
        return CustomTrainable(base.config).run_in(mdl_file, trial)
    return AlgorithmTrainable(base.config).run_in(mdl_file, trial, lambda step, value: False)


def evaluate_base(
    path: str | Path, *, environment: str | None = None, seed: int = 0
) -> Mapping[str, float]:
    """Evaluate what `train_base` saved, in the base file's environment or another one."""
    base, mdl_file, _ = read_base(path)
    config = dict(base.config)
    if environment is not None:
        config["environment"], _ = resolve_environment(environment, Path(), config["class"])
    if base.path == CUSTOM:
        trial = Trial(trial_no=0, values={}, seed=seed)
        return CustomTrainable(config).evaluate(mdl_file, trial)
    # Imported late: it needs Gymnasium.
    from understudy.training.evaluation import evaluate_run

    settings = AlgorithmTrainable(config).settings({})
    with old_envs_allowed():
        result = evaluate_run(
            mdl_file,
            episodes=settings["test_episodes"],
            seeds=1,
            game=environment and config["environment"],
        )
    return {"reward": result.mean, "iqm": result.iqm, "episodes": float(result.played)}
