"""Resuming, extending and reproducing runs: what a run's folder fixes, and what may change."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.settings import value_text
from understudy.nn.network import NetworkSpec
from understudy.nn.policy import Policy
from understudy.training.env_info import GameChoice, choice_of
from understudy.training.folder import RunFolder
from understudy.training.preset import read_preset
from understudy.training.settings import Resolver, RunSettings, algorithm_name, check_until
from understudy.training.train_request import TrainRequest, fill_resolver, requested_algorithm

# --- Resuming: the request must match the run -----------------------------------------------------


def check_agrees(
    root: Path,
    facts: Mapping[str, Any],
    settings: RunSettings,
    *,
    choice: GameChoice | None,
    request: TrainRequest,
) -> None:
    """ConfigError for the first argument that differs from the run; omitted ones always match."""
    for name, current, requested in _differences(facts, settings, choice, request):
        how = f"without {name}" if current is None else f"with {name} {value_text(current)}"
        raise ConfigError(
            f"{root} was started {how}, not {value_text(requested)}; omit it to resume that run, "
            "or give another folder for a new one"
        )


def _differences(
    facts: Mapping[str, Any],
    settings: RunSettings,
    choice: GameChoice | None,
    request: TrainRequest,
) -> Iterator[tuple[str, Any, Any]]:
    """Each difference as a name, the run's value and the requested value."""
    if choice is not None:
        if choice.is_named and choice.game != facts["game"]:
            yield "game", facts["game"] or facts["name"], choice.game
        defaults = GameChoice(game=None).to_json()
        requested = choice.to_json()
        for name in ("env_kwargs", "wrappers", "frame_skip"):
            if requested[name] not in (defaults[name], facts[name]):
                yield name, facts[name], requested[name]
    named = {
        "algorithm": None if request.algorithm is None else algorithm_name(request.algorithm),
        "seed": request.seed,
        "init_from": request.init_from and str(request.init_from.resolve()),
    }
    for name, value in named.items():
        if value is not None and value != facts[name]:
            yield name, facts[name], value
    if request.until is not None and request.until != (
        math.inf if facts["until"] is None else facts["until"]
    ):
        yield "until", facts["until"], request.until
    if request.from_store is not None:
        folder = request.from_store.resolve()
        if facts["from_store"] not in (str(folder), str(folder / "store")):
            yield "from_store", facts["from_store"], str(folder)
    if isinstance(request.network, NetworkSpec) and settings.config.network != request.network:
        yield "network", "a different spec", "the given spec"
    resolver = fill_resolver(
        Resolver(settings.algorithm, settings.algorithm_type), request, request.preset
    )
    for section, values in resolver.values().items():
        for name, value in values.items():
            if (current := getattr(getattr(settings, section), name)) != value:
                yield name, current, value


# --- Extending a finished run with more steps or a higher goal ------------------------------------


def requested_extension(
    facts: Mapping[str, Any], settings: RunSettings, request: TrainRequest
) -> dict[str, Any]:
    """The requested steps and goal (`until`) that exceed those of the run, if any."""
    steps = request.settings.get("steps")
    until = request.settings.get("until") if request.until is None else request.until
    check_until(until)
    extension: dict[str, Any] = {}
    if isinstance(steps, int) and steps > settings.run.steps:
        extension["steps"] = steps
    if until is not None and until > (math.inf if facts["until"] is None else facts["until"]):
        extension["until"] = float(until)
    return extension


def extend_run(
    folder: RunFolder, facts: Mapping[str, Any], settings: RunSettings, result: Mapping[str, Any]
) -> Any:
    """Reopen a finished run and return its new facts; ConfigError if it cannot be extended."""
    root = folder.root
    goal = settings.run.until
    until = None if goal is None or goal == math.inf else goal
    unit = "env steps" if facts["from_store"] is None else "updates"
    done = result["env_steps"] if facts["from_store"] is None else result["updates"]
    if result["solved"] and until == facts["until"]:
        raise ConfigError(
            f"{root} is solved: its goal was {until:g}; give a higher one, or inf for none: "
            "until=inf"
        )
    if done >= settings.run.steps:
        raise ConfigError(
            f"{root} has already done {done} {unit}; give a larger number: steps={2 * done}"
        )
    if not (folder.checkpoints / f"{done:012d}.safetensors").exists():
        # The preset in the run's folder also restores its network, wrappers, env_kwargs and frame
        # skip.
        words = [
            facts["game"] or "GAME",
            "--preset",
            str(root / "preset.toml"),
            "--init-from",
            str(root),
        ]
        raise ConfigError(
            f"{root} cannot be extended: it has no final checkpoint, at {done} {unit}; start a new "
            f"run with the same settings and its policy: understudy train {shlex.join(words)} "
            f"--steps {settings.run.steps}"
        )
    facts = {**facts, "until": until, "extensions": facts.get("extensions", 0) + 1}
    folder.extend(facts, settings.to_toml())
    return facts


# --- Reproducing: what a run's preset cannot hold is read from the files beside it ----------------


def with_run_of_preset(
    choice: GameChoice, request: TrainRequest
) -> tuple[GameChoice, TrainRequest, Policy | None]:
    """The request, completed from the run whose folder contains the preset, and its initial policy.

    Omitted values come from that run: the network (for the same algorithm), the store it learned
    from, the initial policy (as it was then), and, for the same game, how its envs are created.
    """
    start = None if request.init_from is None else RunFolder(request.init_from).policy()
    folder = RunFolder(Path(request.preset or "").parent)
    if request.preset is None or Path(request.preset).name != "preset.toml" or not folder.exists:
        return choice, request, start
    facts = folder.facts()
    settings_of(folder, facts)
    if facts["game"] is None and choice.is_named:
        raise ConfigError(
            f"{folder.root} was trained on an env object or function ({facts['name']}), which "
            "cannot be stored; pass it again in Python, or copy "
            f"{request.preset} elsewhere to use only its settings"
        )
    if facts["game"] is None or choice.game == facts["game"]:
        choice = choice_of(facts, choice)
    is_same = algorithm_name(requested_algorithm(request)) == facts["algorithm"]
    if request.network is None and "widths" not in request.settings and is_same:
        request = replace(request, network=folder.network())
    if request.init_from is None and facts["init_from"] is not None:
        request = replace(request, init_from=Path(facts["init_from"]))
        start = folder.start()
    if request.from_store is None and facts["from_store"] is not None:
        request = replace(request, from_store=Path(facts["from_store"]))
    return choice, request, start


def settings_of(folder: RunFolder, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of a run; ConfigError if its algorithm is not the one in run.json."""
    path = folder.root / "preset.toml"
    fields = read_preset(str(path))
    if (algorithm := fields.get("algorithm")) != facts["algorithm"]:
        raise ConfigError(
            f"{path} is for {algorithm or 'no algorithm'}, and run.json beside it for "
            f"{facts['algorithm']}; restore both files from the same copy, or copy the preset "
            "elsewhere to use only its settings"
        )
    return fields
