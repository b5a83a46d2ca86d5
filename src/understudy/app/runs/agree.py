"""agree: whether what is asked of a run that goes on is what it was begun with."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.app.runs.algorithms import algorithm_name
from understudy.app.runs.choice import GameChoice
from understudy.app.runs.presets import read_preset, read_toml
from understudy.app.runs.settings import Resolver, Settings
from understudy.app.runs.wanted import Wanted
from understudy.core.errors import ConfigError
from understudy.core.network import NetworkSpec

Difference = tuple[str, Any, Any]
"""A name, what the run has, and what was asked."""


def check_agrees(
    root: Path, facts: Mapping[str, Any], settings: Settings, *, choice: GameChoice | None, wanted: Wanted
) -> None:
    """ConfigError names the first thing that was given and differs; what was left out is as it was."""
    for name, has, asked in (*_of_choice(facts, choice), *_of_facts(facts, wanted), *_of_settings(settings, wanted)):
        raise ConfigError(
            f"{root} was begun with {name} {has!r}, and {asked!r} was given; leave it out to go on with that run, or "
            "give another folder for a new one"
        )


def _of_choice(facts: Mapping[str, Any], choice: GameChoice | None) -> Iterator[Difference]:
    if choice is None:
        return
    if choice.is_named and choice.game != facts["game"]:
        yield "game", facts["game"] or facts["name"], choice.game
    plain = GameChoice(game=None).to_json()
    for name in ("env_kwargs", "wrappers", "frame_skip"):
        asked = choice.to_json()[name]
        if asked not in (plain[name], facts[name]):
            yield name, facts[name], asked


def _of_facts(facts: Mapping[str, Any], wanted: Wanted) -> Iterator[Difference]:
    asked = {
        "algorithm": None if wanted.algorithm is None else algorithm_name(wanted.algorithm), "seed": wanted.seed,
        "init_from": wanted.init_from and str(wanted.init_from.resolve()),
    }  # fmt: skip
    for name, value in asked.items():
        if value is not None and value != facts[name]:
            yield name, facts[name], value
    if wanted.until is not None and wanted.until != (math.inf if facts["until"] is None else facts["until"]):
        yield "until", facts["until"], wanted.until
    if wanted.from_store is not None:
        folder = str(wanted.from_store.resolve())
        if facts["from_store"] not in (folder, str(Path(folder) / "store")):
            yield "from_store", facts["from_store"], folder


def _of_settings(settings: Settings, wanted: Wanted) -> Iterator[Difference]:
    resolver = Resolver(settings.algorithm, settings.algorithm_type)
    if wanted.preset:
        resolver.add(read_preset(wanted.preset))
    if wanted.config_file is not None:
        resolver.add(read_toml(wanted.config_file))
    for key, value in wanted.settings.items():
        resolver.set(key, value)
    if isinstance(wanted.network, NetworkSpec):
        if settings.config.network != wanted.network:
            yield "network", "another one", "this one"
    elif wanted.network is not None:
        resolver.set("widths", list(wanted.network))
    for section, values in resolver.values().items():
        for name, asked in values.items():
            if (has := getattr(getattr(settings, section), name)) != asked:
                yield name, has, asked
