"""Runs that go on, and runs that are made again: what is taken from a run's folder, and what may
be asked anew."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.nn.network import NetworkSpec
from understudy.nn.policy import Policy
from understudy.training.env_info import GameChoice, choice_of
from understudy.training.folder import RunFolder
from understudy.training.settings import (
    Resolver,
    RunSettings,
    TrainRequest,
    algorithm_name,
    check_until,
    filled,
    read_preset,
    wanted_algorithm,
)

# --- Whether what is asked of a run that goes on is what it was begun with ------------------------


def check_agrees(
    root: Path,
    facts: Mapping[str, Any],
    settings: RunSettings,
    *,
    choice: GameChoice | None,
    wanted: TrainRequest,
) -> None:
    """ConfigError names the first thing that was given and differs; what was left out is as it
    was."""
    for name, has, asked in _differences(facts, settings, choice, wanted):
        raise ConfigError(
            f"{root} was begun with {name} {has!r}, and {asked!r} was given; leave it out to go on "
            "with that run, or "
            "give another folder for a new one"
        )


def _differences(
    facts: Mapping[str, Any], settings: RunSettings, choice: GameChoice | None, wanted: TrainRequest
) -> Iterator[tuple[str, Any, Any]]:
    """A name, what the run has, and what was asked."""
    if choice is not None:
        if choice.is_named and choice.game != facts["game"]:
            yield "game", facts["game"] or facts["name"], choice.game
        plain = GameChoice(game=None).to_json()
        given = choice.to_json()
        for name in ("env_kwargs", "wrappers", "frame_skip"):
            if given[name] not in (plain[name], facts[name]):
                yield name, facts[name], given[name]
    named = {
        "algorithm": None if wanted.algorithm is None else algorithm_name(wanted.algorithm),
        "seed": wanted.seed,
        "init_from": wanted.init_from and str(wanted.init_from.resolve()),
    }
    for name, value in named.items():
        if value is not None and value != facts[name]:
            yield name, facts[name], value
    if wanted.until is not None and wanted.until != (
        math.inf if facts["until"] is None else facts["until"]
    ):
        yield "until", facts["until"], wanted.until
    if wanted.from_store is not None:
        folder = wanted.from_store.resolve()
        if facts["from_store"] not in (str(folder), str(folder / "store")):
            yield "from_store", facts["from_store"], str(folder)
    if isinstance(wanted.network, NetworkSpec) and settings.config.network != wanted.network:
        yield "network", "another one", "this one"
    resolver = filled(Resolver(settings.algorithm, settings.algorithm_type), wanted, wanted.preset)
    for section, values in resolver.values().items():
        for name, asked in values.items():
            if (has := getattr(getattr(settings, section), name)) != asked:
                yield name, has, asked


# --- A run that has ended goes on, with more steps or a higher goal -------------------------------


def asked_more(
    facts: Mapping[str, Any], settings: RunSettings, wanted: TrainRequest
) -> dict[str, Any]:
    """What is asked of a run beyond what it was begun with: more steps, a higher goal, both or
    nothing."""
    steps = wanted.settings.get("steps")
    until = wanted.settings.get("until") if wanted.until is None else wanted.until
    check_until(until)
    more: dict[str, Any] = {}
    if isinstance(steps, int) and steps > settings.run.steps:
        more["steps"] = steps
    if until is not None and until > (math.inf if facts["until"] is None else facts["until"]):
        more["until"] = float(until)
    return more


def extended(
    folder: RunFolder, facts: Mapping[str, Any], settings: RunSettings, result: Mapping[str, Any]
) -> Any:
    """The facts of a run that has ended, changed so that it goes on; ConfigError where it would
    end at once."""
    root = folder.root
    goal = settings.run.until
    until = None if goal is None or goal == math.inf else goal
    at, what = (
        (result["env_steps"], "env steps")
        if facts["from_store"] is None
        else (result["updates"], "updates")
    )
    if result["solved"] and until == facts["until"]:
        raise ConfigError(
            f"{root} is solved: its goal was {until:g}; give a higher one, or inf for none: "
            "--until inf"
        )
    if at >= settings.run.steps:
        raise ConfigError(f"{root} has had its {at} {what}; give more of them: --steps {2 * at}")
    if not (folder.checkpoints / f"{at:012d}.safetensors").exists():
        # The preset in the run's folder brings its network, wrappers, env's keywords and frame skip
        # along.
        words = [
            facts["game"] or "GAME",
            "--preset",
            str(root / "preset.toml"),
            "--init-from",
            str(root),
        ]
        raise ConfigError(
            f"{root} has no checkpoint of its end, at {at} {what}, so it cannot go on; begin a new "
            "run like it with "
            f"what it has learned: understudy train {shlex.join(words)} --steps "
            f"{settings.run.steps}"
        )
    facts = {**facts, "until": until, "extensions": facts.get("extensions", 0) + 1}
    folder.extend(facts, settings.to_toml())
    return facts


# --- What a run's preset file does not hold, read from the files beside it ------------------------


def begun_with(
    choice: GameChoice, wanted: TrainRequest
) -> tuple[GameChoice, TrainRequest, Policy | None]:
    """What a run begins with: as asked; where the preset lies in a run's folder, what was left out
    is that run's.

    That is the network of its algorithm, the store it learned from, the policy it started from (as
    it was then), and, where the game is the same, how its envs are made.
    """
    start = None if wanted.init_from is None else RunFolder(wanted.init_from).policy()
    folder = RunFolder(Path(wanted.preset or "").parent)
    if wanted.preset is None or Path(wanted.preset).name != "preset.toml" or not folder.exists:
        return choice, wanted, start
    facts = folder.facts()
    settings_of(folder, facts)
    if facts["game"] is None and choice.is_named:
        raise ConfigError(
            f"{folder.root} was trained on an env object or function ({facts['name']}), which no "
            "folder holds; give it "
            f"again in Python, or copy {wanted.preset} elsewhere to take only its settings"
        )
    if facts["game"] is None or choice.game == facts["game"]:
        choice = choice_of(facts, choice)
    is_same = algorithm_name(wanted_algorithm(wanted)) == facts["algorithm"]
    if wanted.network is None and "widths" not in wanted.settings and is_same:
        wanted = replace(wanted, network=folder.network())
    if wanted.init_from is None and facts["init_from"] is not None:
        wanted = replace(wanted, init_from=Path(facts["init_from"]))
        start = folder.start()
    if wanted.from_store is None and facts["from_store"] is not None:
        wanted = replace(wanted, from_store=Path(facts["from_store"]))
    return choice, wanted, start


def settings_of(folder: RunFolder, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of a run; ConfigError where it is not for the algorithm that the run's facts
    name."""
    path = folder.root / "preset.toml"
    fields = read_preset(str(path))
    if (algorithm := fields.get("algorithm")) != facts["algorithm"]:
        raise ConfigError(
            f"{path} is for {algorithm or 'no algorithm'}, and run.json beside it for "
            f"{facts['algorithm']}; take the "
            "two files from one copy, or copy the preset elsewhere to take only its settings"
        )
    return fields
