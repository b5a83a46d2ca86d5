"""Prints a result file of the learner as one table."""

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import number

_STYLES = {"met": "green", "missed": "yellow", "void": "red", "reported": ""}
_FILE_WIDTH = 150


def show(result: dict[str, Any]) -> None:
    """Print medians, and how many times better we are with the 95 % interval."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    title = (
        f"{result['title']}, {result['scale']} run, cores {result['cores']} (a goal is met if "
        "the lower end of the interval reaches it)"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("row", "ours", "peer", "", "times better", "95 % interval", "goal", "verdict"):
        table.add_column(
            heading, justify="left" if heading in ("row", "peer", "verdict") else "right"
        )
    for row in result["rows"]:
        for ratio in row["ratios"]:
            cells = [
                f"{_middle(row['values'][ratio[side]])} {row['unit']}" for side in ("ours", "peer")
            ]
            spread = f"{_times(ratio['low'])} - {_times(ratio['high'])}"
            goal = f"≥ {ratio['goal']:g}x" if ratio["goal"] else ""
            name = row["name"] if ratio["ours"] == "ours" else f"{row['name']} ({ratio['ours']})"
            verdict = ratio["verdict"]
            columns = (
                name,
                cells[0],
                ratio["peer"],
                cells[1],
                _times(ratio["ratio"]),
                spread,
                goal,
                verdict,
            )
            table.add_row(*columns, style=_STYLES[verdict])
        if not row["ratios"]:
            for contestant, values in row["values"].items():
                table.add_row(row["name"], "", contestant, f"{_middle(values)} {row['unit']}")
    console.print(table)
    for line in remarks(result):
        console.print(line, style="dim", highlight=False)


def remarks(result: dict[str, Any]) -> list[str]:
    """Remarks that accompany the numbers."""
    solved = {
        contestant: f"{sum(run['solved'] for run in runs)} of {len(runs)} solved"
        for contestant, runs in result["runs"].items()
    }
    return [
        (
            f"learning gate {'passed' if result['gate']['passed'] else 'FAILED'}: "
            f"{result['gate']['says']}"
        ),
        *(f"{contestant}: {text}" for contestant, text in solved.items()),
        *(f"skipped: {contestant}: {reason}" for contestant, reason in result["skipped"].items()),
        *(f"wrong: {line}" for line in result["failed"]),
        *(f"remark: {line}" for line in result["remarks"]),
        *result["notes"],
    ]


def _middle(values: list[float | None]) -> str:
    middle = median(float("inf") if value is None else value for value in values)
    return number(middle) if middle != float("inf") else "never"


def _times(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2f}x"
