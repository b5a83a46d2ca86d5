"""extend: a run that has ended goes on, with more steps or a higher goal."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from understudy.app.runs.folder import RunFolder
from understudy.app.runs.settings import Settings, check_until
from understudy.app.runs.wanted import Wanted
from understudy.core.errors import ConfigError


def asked_more(facts: Mapping[str, Any], settings: Settings, wanted: Wanted) -> dict[str, Any]:
    """What is asked of a run beyond what it was begun with: more steps, a higher goal, both or nothing."""
    steps = wanted.settings.get("steps")
    until = wanted.settings.get("until") if wanted.until is None else wanted.until
    check_until(until)
    more: dict[str, Any] = {}
    if isinstance(steps, int) and steps > settings.run.steps:
        more["steps"] = steps
    if until is not None and until > (math.inf if facts["until"] is None else facts["until"]):
        more["until"] = float(until)
    return more


def without(wanted: Wanted, more: Mapping[str, Any]) -> Wanted:
    """The rest of what is asked, which must be as it was."""
    rest = {name: value for name, value in wanted.settings.items() if name not in more}
    return replace(wanted, settings=rest, until=None if "until" in more else wanted.until)


def extended(folder: RunFolder, facts: Mapping[str, Any], settings: Settings, result: Mapping[str, Any]) -> Any:
    """The facts of a run that has ended, changed so that it goes on; ConfigError where it would end at once."""
    root, goal = folder.root, settings.run.until
    until = None if goal is None or goal == math.inf else goal
    at, what = (result["env_steps"], "env steps") if facts["from_store"] is None else (result["updates"], "updates")
    if result["solved"] and until == facts["until"]:
        raise ConfigError(f"{root} is solved: its goal was {until:g}; give a higher one, or inf for none: --until inf")
    if at >= settings.run.steps:
        raise ConfigError(f"{root} has had its {at} {what}; give more of them: --steps {2 * at}")
    if not (folder.checkpoints / f"{at:012d}.safetensors").exists():
        # The preset in the run's folder brings its network, wrappers, env's keywords and frame skip along.
        words = [facts["game"] or "GAME", "--preset", str(root / "preset.toml"), "--init-from", str(root)]
        raise ConfigError(
            f"{root} has no checkpoint of its end, at {at} {what}, so it cannot go on; begin a new run like it with "
            f"what it has learned: understudy train {shlex.join(words)} --steps {settings.run.steps}"
        )
    facts = {**facts, "until": until, "extensions": facts.get("extensions", 0) + 1}
    folder.extend(facts, settings.to_toml())
    return facts
