"""reproduce: what a run's preset file does not hold, read from the files beside it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.app.runs.algorithms import algorithm_name
from understudy.app.runs.choice import GameChoice, choice_of
from understudy.app.runs.folder import RunFolder
from understudy.app.runs.presets import read_preset
from understudy.app.runs.wanted import Wanted, wanted_algorithm
from understudy.core.errors import ConfigError
from understudy.core.policy import Policy


def begun_with(choice: GameChoice, wanted: Wanted) -> tuple[GameChoice, Wanted, Policy | None]:
    """What a run begins with: as asked; where the preset lies in a run's folder, what was left out is that run's.

    That is the network of its algorithm, the store it learned from, the policy it started from (as it was then), and,
    where the game is the same, how its envs are made.
    """
    start = None if wanted.init_from is None else RunFolder(wanted.init_from).policy()
    folder = RunFolder(Path(wanted.preset or "").parent)
    if wanted.preset is None or Path(wanted.preset).name != "preset.toml" or not folder.exists:
        return choice, wanted, start
    facts = folder.facts()
    settings_of(folder, facts)
    if facts["game"] is None and choice.is_named:
        raise ConfigError(
            f"{folder.root} was trained on an env object or function ({facts['name']}), which no folder holds; give it "
            f"again in Python, or copy {wanted.preset} elsewhere to take only its settings"
        )
    if facts["game"] is None or choice.game == facts["game"]:
        choice = choice_of(facts, choice)
    is_same = algorithm_name(wanted_algorithm(wanted)) == facts["algorithm"]
    if wanted.network is None and "widths" not in wanted.settings and is_same:
        wanted = replace(wanted, network=folder.network())
    if wanted.init_from is None and facts["init_from"] is not None:
        wanted, start = replace(wanted, init_from=Path(facts["init_from"])), folder.start()
    if wanted.from_store is None and facts["from_store"] is not None:
        wanted = replace(wanted, from_store=Path(facts["from_store"]))
    return choice, wanted, start


def settings_of(folder: RunFolder, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of a run; ConfigError where it is not for the algorithm that the run's facts name."""
    path = folder.root / "preset.toml"
    fields = read_preset(str(path))
    if (algorithm := fields.get("algorithm")) != facts["algorithm"]:
        raise ConfigError(
            f"{path} is for {algorithm or 'no algorithm'}, and run.json beside it for {facts['algorithm']}; take the "
            "two files from one copy, or copy the preset elsewhere to take only its settings"
        )
    return fields
