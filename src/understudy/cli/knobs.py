"""What `understudy train --list` shows: algorithms, their settings, defaults and ranges."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from understudy.app.runs.settings import ALGORITHMS, LearnerPart, RunPart, algorithm_class, described, preset_names
from understudy.core.algorithm import Range, Schedule
from understudy.core.network import ACTIVATIONS


def listed(algorithm: str | None) -> dict[str, Any]:
    """Every algorithm (or the one that was named) with its settings, and the presets."""
    names = [algorithm] if algorithm else sorted(ALGORITHMS)
    found = {name: described(name) if name in ALGORITHMS else algorithm_class(name) for name in names}
    return {
        "algorithms": {
            name: {"says": _first_line(one), "config": settings_of(one.Config), "knobs": settings_of(one.Knobs)}
            for name, one in found.items()
        },
        "run": settings_of(RunPart),
        "learner": settings_of(LearnerPart),
        "presets": preset_names(),
    }


def settings_of(part: Any) -> list[dict[str, Any]]:
    """The fields of a settings dataclass: name, default, range, help."""
    rows = []
    for one in dataclasses.fields(part):
        limits: Range | None = one.metadata.get("range")
        default = None if one.default is dataclasses.MISSING else one.default
        is_switch = isinstance(default, bool)
        rows.append({
            "name": one.name, "default": _plain(default), "is_switch": is_switch,
            "low": None if is_switch else limits and limits.low, "high": None if is_switch else limits and limits.high,
            "says": limits.says if limits else _OTHERS.get(one.name, ""),
        })  # fmt: skip
    return rows


_OTHERS = {
    "widths": "widths of the layers (--network 64,64)",
    "network": "a network of one's own (in Python)",
    "activation": f"what follows each layer: {', '.join(ACTIVATIONS)}",
    "until": "the return at which a run is solved (--until)",
}


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return {"start": value.start, "end": value.end, "until": value.until}
    return list(value) if isinstance(value, tuple) else value


def _first_line(one: Any) -> str:
    return (one.__doc__ or "").strip().partition("\n")[0]


def show(out: Console, fields: Mapping[str, Any]) -> None:
    """Print the list for people."""
    for name, one in fields["algorithms"].items():
        out.print(f"[bold]{escape(name)}[/]  {escape(one['says'])}", soft_wrap=True)
        _show(out, one["knobs"], note="may be schedules: --set 'NAME={start=1.0,end=0.1,until=0.5}'")
        _show(out, one["config"], note="fixed for a run")
    out.print("[bold]every algorithm[/]")
    _show(out, fields["run"], note="the run")
    _show(out, fields["learner"], note="the learner; only for algorithms with a replay")
    out.print(f"presets: {', '.join(fields['presets'])}", soft_wrap=True)
    out.print("set one with --set NAME=VALUE, a file of them with --config FILE", soft_wrap=True)
    out.print("a preset changes some of these; RUN/preset.toml holds what a run has used", soft_wrap=True)


def _show(out: Console, rows: Sequence[Mapping[str, Any]], *, note: str) -> None:
    out.print(f"  [dim]{escape(note)}[/]", soft_wrap=True)
    cells = [(row["name"], _short(row["default"]), _range(row)) for row in rows]
    wide = [max((len(row[at]) for row in cells), default=0) for at in range(3)]
    for row, (name, default, limits) in zip(rows, cells, strict=True):
        line = f"    {name:{wide[0]}}  {default:{wide[1]}}  {limits:{wide[2]}}  {row['says']}".rstrip()
        out.print(escape(line), soft_wrap=True)


def _range(row: Mapping[str, Any]) -> str:
    if row["is_switch"]:
        return "true or false"
    return "" if row["low"] is None else f"{row['low']:g} to {row['high']:g}"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        until = "" if value["until"] == 1.0 else f" by {value['until']:g}"
        return f"{value['start']:g} → {value['end']:g}{until}"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
