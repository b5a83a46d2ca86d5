"""write_report: a study as one HTML page with its charts and trials, and as PNG files.

The page needs no network and no other file. Names and errors are the user's own texts: they are
escaped, and the page's policy allows no script but the one that sorts the table.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.log import make_folder, storage_error, write_file
from understudy.core.plural import plural
from understudy.tuning.charts import charts
from understudy.tuning.export import check_replaceable
from understudy.tuning.journal import Row
from understudy.tuning.pictures import INK, PAPER, Drawn, draw
from understudy.tuning.result import StudyResult, interval_text

MAX_TABLE_ROWS = 10_000
"""A browser shows so many without delay."""

_CSS = """
:root { color-scheme: light dark; --ink: #1f2430; --paper: #fefefd; --dim: #626a78; --line: #d9dce2;
  --best: #fdebd9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --paper: #14171c; --dim: #98a1b0;
  --line: #343a45; --best: #4a2f14; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; } h2 { margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; } .caption { color: var(--dim); max-width: 50rem; }
.chart { overflow-x: auto; } svg { width: 100%; min-width: 48rem; height: auto; }
@media print { svg { min-width: 0; } }
.scroll { overflow: auto; max-height: 40rem; border: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid var(--line); }
td.int, td.float { text-align: right; } td.error { min-width: 20rem; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: var(--paper); }
thead button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap; }
thead button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
tr.best { background: var(--best); }
"""
_SCRIPT = """
for (const head of document.querySelectorAll("thead th")) {
  head.querySelector("button").addEventListener("click", () => {
    const down = head.ariaSort === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0];
    const keyed = Array.from(body.rows, (row) => {
      const text = row.cells[head.cellIndex].textContent;
      return [row, text, text === "" ? NaN : Number(text)];
    });
    keyed.sort(([, a, x], [, b, y]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
      return down ? -order : order;
    });
    body.append(...keyed.map(([row]) => row));
  });
}
"""


def write_report(
    result: StudyResult, *, html: Path | None = None, png: Path | None = None
) -> list[Path]:
    """Write the page, and a PNG file of each chart into the folder; return what was written.

    Pages and pictures of these names are replaced, other files never.
    """
    if html is not None:
        check_replaceable(html, (".html", ".htm"), flag="--html")
    if png is not None and png.exists() and not png.is_dir():
        raise ConfigError(f"--png is {png}, which is a file; give a folder for the pictures")
    drawn = [draw(picture) for picture in charts(result)]
    files: list[tuple[Path, bytes]] = []
    if html is not None:
        files.append((html, page(result, drawn).encode()))
    if png is not None:
        files += [(png / f"{each.picture.name}.png", each.png) for each in drawn]
    for path, raw in files:
        try:
            make_folder(path.parent.resolve())
            write_file(path, raw, mode=0o644)
        except OSError as error:
            raise storage_error(
                error, f"writing {path}", then="give another --html file or --png folder"
            ) from error
    return [path for path, _ in files]


def page(result: StudyResult, drawn: Sequence[Drawn]) -> str:
    """The study as one HTML page."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:"
    )
    name = escape(result.config.name)
    sections = [
        f"<h2>{escape(each.picture.title)}</h2>\n"
        f'<p class="caption">{escape(each.picture.caption)}</p>\n'
        f'<div class="chart" tabindex="0">{_themed(each)}</div>'
        for each in drawn
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title><style>{_CSS}</style></head><body>",
        f"<h1>{name}</h1>",
        *_summary(result),
        *sections,
        *_table(result),
        f"<script>{_SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _themed(drawn: Drawn) -> str:
    """The SVG with the colours of the page, and its title for screen readers."""
    svg = drawn.svg.replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(drawn.picture.title)}"', 1)


def _summary(result: StudyResult) -> list[str]:
    config = result.config
    metric = config.metric.name
    best = result.best
    lines = [] if result.test is None else [*result.test.summary]
    if best is not None:
        values = ", ".join(f"{name} {_cell(value)}" for name, value in best.trial.values.items())
        lines.append(
            f"trial {best.trial.trial_no}: {values}; {metric} {best.result.metrics[metric]:.4g} in "
            "the search"
        )
        if result.test is not None:
            estimate = result.tested.estimate
            lines[-1] += f", {interval_text(estimate)} on held-out seeds" if estimate else ""
    elif why := result.why_no_best:
        lines.append(why)
    states = [row.result.state for row in result.trials]
    counts = [f"{states.count(state)} {state}" for state in ("stopped", "failed")]
    planned = len(states) if result.ended else result.max_trials
    trials = f"{planned} {plural(planned, 'trial')}, {', '.join(counts)}"
    if not result.ended:
        trials = f"{len(states)} of {trials}"
    search = f"search {config.search.method}, stopping rule {config.stopping.rule}"
    lines += result.warnings
    lines.append(f"{trials}; {result.ended or 'not finished'}")
    lines.append(f"{config.metric.criteria} {metric}; {search}, seed {config.seed}")
    lines += config.notes
    return [f"<p>{escape(line)}</p>" for line in lines]


def _table(result: StudyResult) -> list[str]:
    rows = result.trials[:MAX_TABLE_ROWS]
    if not rows:
        return []
    best = result.best
    others = {name for row in rows for name in row.result.metrics} - {result.config.metric.name}
    metrics = [result.config.metric.name, *sorted(others)]
    settings = list(result.config.space.dimensions)
    heads = ["trial", "state", metrics[0], *settings, *metrics[1:]]
    heads += ["reports", "seconds", "seed", "error"]
    n_more = len(result.trials) - len(rows)
    more = f" The first {len(rows)}; understudy tune export has all." if n_more else ""
    return [
        f'<h2>Trials</h2>\n<p class="caption">Click on a name to sort.{more}</p>',
        '<div class="scroll" tabindex="0"><table><thead><tr>',
        *(f'<th><button type="button">{escape(head)}</button></th>' for head in heads),
        "</tr></thead><tbody>",
        *(_row(row, metrics, settings, is_best=row is best) for row in rows),
        "</tbody></table></div>",
    ]


def _row(row: Row, metrics: Sequence[str], settings: Sequence[str], *, is_best: bool) -> str:
    trial = row.trial
    result = row.result
    values = [
        trial.trial_no,
        result.state,
        result.metrics.get(metrics[0], ""),
        *(trial.values[name] for name in settings),
        *(result.metrics.get(name, "") for name in metrics[1:]),
        len(result.reports),
        round(result.seconds, 3),
        trial.seed,
    ]
    cells = [f'<td class="{type(value).__name__}">{escape(_cell(value))}</td>' for value in values]
    error = f'<td class="error">{escape(result.error)}</td>'
    text = "".join(cells)
    kind = "best" if is_best else result.state
    return f'<tr class="{kind}">{text}{error}</tr>'


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
