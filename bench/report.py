"""Prints a result, and writes it as JSON and as the page that docs/figures.md links to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PASS_NAMES = {"native": "as the machine is", "slow_sync": "10 ms added to each sync"}
_FILE_WIDTH = 150
_STYLES = {"met": "green", "missed": "yellow", "void": "red", "reported": ""}


def figures(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure with the name of its pass."""
    for name, pass_ in result["passes"].items():
        for measurement in pass_["measurements"].values():
            for figure in measurement["figures"]:
                yield name, figure


def is_sound(result: dict[str, Any]) -> bool:
    """Whether every measurement finished and every gate passed; a missed goal is no failure."""
    measurements = [
        measurement
        for pass_ in result["passes"].values()
        for measurement in pass_["measurements"].values()
    ]
    gates = [figure["gate"]["passed"] for _, figure in figures(result)]
    gates += [
        ratio["gate"]["passed"] for measurement in measurements for ratio in measurement["ratios"]
    ]
    return all(gates) and not any("error" in measurement for measurement in measurements)


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for name, pass_ in result["passes"].items():
        table = Table(title=f"Figures, {_PASS_NAMES[name]}", title_justify="left")
        for heading in ("figure", "measured", "lowest - highest", "goal", "verdict"):
            table.add_column(
                heading, justify="left" if heading in ("figure", "verdict") else "right"
            )
        for figure in _all(pass_, "figures"):
            style = _STYLES[figure["verdict"]]
            table.add_row(
                figure["name"],
                _value(figure),
                _spread(figure),
                _goal(figure),
                _verdict(figure),
                style=style,
            )
        console.print(table)
        table = Table(
            title=f"Peers, {_PASS_NAMES[name]} (above 1: we are better)", title_justify="left"
        )
        for heading in ("what", "peer", "ours", "theirs", "times better", "lowest - highest"):
            table.add_column(heading, justify="left" if heading in ("what", "peer") else "right")
        for ratio in _all(pass_, "ratios"):
            style = "" if ratio["gate"]["passed"] else _STYLES["void"]
            table.add_row(
                ratio["name"],
                ratio["peer"],
                *_pair(ratio),
                _times(ratio),
                _spread(ratio, "x"),
                style=style,
            )
        console.print(table)
        for line in _remarks(pass_):
            console.print(line, style="dim")


def save(result: dict[str, Any], folder: Path) -> None:
    """Write experience.json and experience.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experience.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (folder / "experience.md").write_text(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The tables as Markdown, with machine and date."""
    facts = result["machine"]
    lines = [
        "# Experience: measured",
        "",
        f"By `bench/experience.py` on {result['date'][:10]}, commit {result['commit']}, "
        f"{result['scale']} run of {result['seconds']:.0f} s. "
        f"{facts['cores']} cores of {facts['cpu']} ({facts['architecture']}), "
        f"{facts['memory_gib']} GiB, {facts['kernel']}, Python {facts['python']}; "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
        + f". Load average {result['load_average_before'][0]} before, "
        f"{result['load_average_after'][0]} after. "
        "A shared machine: figures per core are processor time, "
        "medians with the lowest and highest round.",
    ]
    for name, pass_ in result["passes"].items():
        lines += [
            "",
            f"## {_PASS_NAMES[name].capitalize()}",
            "",
            "| figure | measured | spread | goal | verdict |",
        ]
        lines += ["| --- | ---: | ---: | ---: | --- |"]
        for figure in _all(pass_, "figures"):
            cells = [
                figure["name"],
                _value(figure),
                _spread(figure),
                _goal(figure),
                _verdict(figure),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "| beside a peer | peer | ours | theirs | times better | spread |"]
        lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
        for ratio in _all(pass_, "ratios"):
            cells = [
                ratio["name"],
                ratio["peer"],
                *_pair(ratio),
                _times(ratio),
                _spread(ratio, "x"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"* {line}" for line in _remarks(pass_))]
    return "\n".join(lines) + "\n"


def _all(pass_: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [
        result for measurement in pass_["measurements"].values() for result in measurement[kind]
    ]


def _remarks(pass_: dict[str, Any]) -> Iterator[str]:
    if pass_["delayed"]:
        yield f"delayed: {pass_['delayed']}"
    if syncs := pass_["syncs_ms"]:
        yield "fastest sync on this machine: " + ", ".join(
            f"{name} {value:.2f} ms" for name, value in syncs.items()
        )
    for name, measurement in pass_["measurements"].items():
        if "error" in measurement:
            yield f"{name} failed: {measurement['error']}"
        yield from (f"skipped: {reason}" for reason in measurement["skipped"])
        yield from measurement["notes"]
    for figure in _all(pass_, "figures"):
        if figure["verdict"] == "missed":
            yield f"missed: {figure['name']}: bound by {figure['bound_by']}"
        if figure["verdict"] == "void":
            yield f"void: {figure['name']}: {figure['gate']['says']}"


def _value(figure: dict[str, Any]) -> str:
    return f"{number(figure['median'])} {figure['unit']}"


def _goal(figure: dict[str, Any]) -> str:
    if figure["goal"] is None:
        return ""
    return f"{'≥' if figure['more_is_better'] else '≤'} {number(figure['goal'])}"


def _verdict(figure: dict[str, Any]) -> str:
    verdict = figure["verdict"]
    goal = figure["goal"]
    median = figure["median"]
    if verdict not in ("met", "missed"):
        return "" if verdict == "reported" else "void: gate failed"
    if not figure["more_is_better"] and not median:
        return "met: none at all"
    times = median / goal if figure["more_is_better"] else goal / median
    return f"met, {times:.1f}x" if verdict == "met" else f"missed by {1 / times:.2f}x"


def _pair(ratio: dict[str, Any]) -> tuple[str, str]:
    middle = [sorted(ratio[side])[len(ratio[side]) // 2] for side in ("ours", "theirs")]
    return f"{number(middle[0])} {ratio['unit']}", number(middle[1])


def _times(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.2f}x" if ratio["gate"]["passed"] else "void: gate failed"


def _spread(result: dict[str, Any], unit: str = "") -> str:
    return f"{number(result['low'])}{unit} - {number(result['high'])}{unit}"


def number(value: float) -> str:
    """Three significant digits, with thousands separators."""
    if abs(value) >= 1000:
        digits = max(0, len(str(int(abs(value)))) - 3)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"
