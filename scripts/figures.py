"""Writes the figures of bench/results into the README, so that no number is typed by hand.

Run as `python scripts/figures.py`; with `--check` it only reports whether the README is up to date.
For the learner, the README has goals, losses and total times; all rows are in
bench/results/learner.md.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.experience import MEASUREMENTS  # noqa: E402
from bench.measures import MEASURES, WHOLE  # noqa: E402

BEGIN = "<!-- made by scripts/figures.py -->"
END = "<!-- end of figures -->"
NOT_LEARNED = (
    "Learning over ten seeds (`bench/learning.py`) has no result file yet; `make test` "
    "learns two seeds a task."
)
_ORIGIN = (("date", 10), ("commit", 7))
RESULTS = ROOT / "bench" / "results"
LEARNER = RESULTS / "learner.md"
PEERS = (
    "codec, encode",
    "codec, decode",
    "stream, 16",
    "store, commits of 16 chunks, per core",
    "store, 60-step chunks from 1,000 sessions, 64 a commit, per core",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if the README differs from the results"
    )
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    pages = {LEARNER: _page(_results("learner-*.json"))}
    pages[readme] = with_figures(readme.read_text())
    if arguments.check:
        is_current = all(path.exists() and path.read_text() == text for path, text in pages.items())
        return 0 if is_current else 1
    for path, text in pages.items():
        path.write_text(text)
    return 0


def with_figures(readme: str) -> str:
    """The README with a new block between its marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{block()}\n{END}{after}"


def block() -> str:
    """Goals, peers and faults, from the newest result files."""
    (bench,), learner, learning = (
        _results(name) for name in ("experience.json", "learner-*.json", "learning.json")
    )
    parts = [_about(bench), _goals(bench), _peers(bench)]
    shared = "gateway, ingest, learner and the players share two cores"
    parts += [
        _measured_with(result, "gateway", f"The gateway (`bench/gateway.py`, {{about}}; {shared}):")
        for result in _results("gateway.json")
    ]
    shared = "one local server each, on the same two cores"
    parts += [
        _measured_with(result, "backends", f"Backends (`bench/backends.py`, {{about}}; {shared}):")
        for result in _results("backends.json")
    ]
    parts += [_learning(learning[0]) if learning else NOT_LEARNED]
    parts += [_learner(learner)] if learner else []
    newest = [_results(f"card-*-{profile}.json")[-1:] for profile in ("ci", "full")]
    return "\n\n".join([*parts, *(_card(card) for cards in newest for card in cards)])


def _results(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def _about(bench: dict[str, Any]) -> str:
    machine = bench["machine"]
    return (
        f"`make bench` ({bench['date'][:10]}, {machine['cores']} cores of a shared "
        f"{machine['cpu']}, load {bench['load_average_before'][0]:.1f}; medians with the lowest "
        "and highest round, per core in processor time; all of it, with what bounds each miss: "
        "[bench/results/experience.md](bench/results/experience.md)):"
    )


def _goals(bench: dict[str, Any]) -> str:
    native, slow = (_figures(bench, name) for name in ("native", "slow_sync"))
    rows = [
        "| figure | goal | measured | with 10 ms added to each sync |",
        "| --- | --- | --- | --- |",
    ]
    for name, figure in native.items():
        if figure["goal"] is not None:
            sign = "≥" if figure["more_is_better"] else "≤"
            goal = f"{sign} {_short(figure['goal'])} {figure['unit']}"
            rows.append(f"| {name} | {goal} | {_measured(figure)} | {_measured(slow.get(name))} |")
    return "\n".join(rows)


def _figures(bench: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {
        figure["name"]: figure
        for measurement in _measurements(bench, name)
        for figure in measurement["figures"]
    }


def _measurements(bench: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The measurements of a pass, without those that no longer exist."""
    results = bench["passes"][name]["measurements"]
    return [results[measurement] for measurement in MEASUREMENTS if measurement in results]


def _measured(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    missed = " **missed**" if figure["verdict"] == "missed" else ""
    spread = (
        ""
        if figure["low"] == figure["high"]
        else f" ({_short(figure['low'])} to {_short(figure['high'])})"
    )
    return f"{_short(figure['median'])}{spread}{missed}"


def _peers(bench: dict[str, Any]) -> str:
    rows = [
        "| beside a peer, in the same run | peer | ratio (above 1: ours is better) |",
        "| --- | --- | --- |",
    ]
    for measurement in _measurements(bench, "native"):
        for ratio in measurement["ratios"]:
            if ratio["name"].startswith(PEERS):
                spread = f"{_short(ratio['low'])} to {_short(ratio['high'])}"
                rows.append(
                    f"| {ratio['name']} | {ratio['peer']} | {_short(ratio['median'])}x ({spread}) |"
                )
    rows += [
        "",
        (
            "Where the ratio is below 1 we lose: a bare key-value store of whole chunks is cheaper "
            "than one that"
        ),
        "deduplicates, keeps the stream's position and knows every session's gaps.",
    ]
    return "\n".join(rows)


def _measured_with(bench: dict[str, Any], name: str, title: str) -> str:
    """Figures and ratios of one measurement, with its notes."""
    measurement = bench["passes"]["native"]["measurements"][name]
    about = (
        f"{bench['date'][:10]}, commit {bench['commit'][:7]}, load "
        f"{bench['load_average_before'][0]:.1f}"
    )
    rows = [title.format(about=about), "", "| figure | goal | measured |", "| --- | --- | --- |"]
    for figure in measurement["figures"]:
        sign = "≥" if figure["more_is_better"] else "≤"
        goal = "" if figure["goal"] is None else f"{sign} {_short(figure['goal'])} {figure['unit']}"
        unit = "" if goal else f" {figure['unit']}"
        rows.append(f"| {figure['name']} | {goal} | {_measured(figure)}{unit} |")
    rows += [
        "",
        "| beside a peer, in the same run | peer | ratio (above 1: ours is better) |",
        "| --- | --- | --- |",
    ]
    for ratio in measurement["ratios"]:
        spread = f"{_short(ratio['low'])} to {_short(ratio['high'])}"
        rows.append(
            f"| {ratio['name']} | {ratio['peer']} | {_short(ratio['median'])}x ({spread}) |"
        )
    return "\n".join([*rows, "", *(f"* {note}" for note in measurement["notes"])])


def _learning(result: dict[str, Any]) -> str:
    rows = [
        (
            f"Learning (`bench/learning.py`, {result['date']}; greedy return over 100 held-out "
            "episodes, IQM over seeds"
        ),
        (
            "with its 95 % interval; *solved*: an evaluation while training reached the goal, "
            "and so did 100 episodes on"
        ),
        "env seeds that no evaluation before had used):",
        "",
        "| task | goal | solved | return, IQM | env steps, median | updates, median |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["tasks"]:
        goal = (
            f"{row['goal']:.0%} of the player" if row["is_share_of_player"] else f"{row['goal']:g}"
        )
        interval = "" if row["low"] is None else f" ({row['low']:.1f} to {row['high']:.1f})"
        steps = f"{row['median_env_steps']:,.0f}"
        updates = f"{row['median_updates']:,.0f}"
        solved = f"{row['solved']} of {row['seeds']}"
        middle = "none judged" if row["iqm"] is None else f"{row['iqm']:.1f}{interval}"
        rows.append(f"| {row['task']} | {goal} | {solved} | {middle} | {steps} | {updates} |")
    return "\n".join(rows)


def _learner(results: list[dict[str, Any]]) -> str:
    days, commits = (
        ", ".join(sorted({result[key][:size] for result in results})) for key, size in _ORIGIN
    )
    rows = [
        f"The learner beside its peers (`bench/run.py`, {days}, commits {commits}; medians of",
        (
            "alternating rounds, ratio of medians with its 95 % interval; "
            "a goal is met by the lower end; here are the"
        ),
        (
            "goals, the whole times, and where we lose; every row: "
            "[bench/results/learner.md](bench/results/learner.md);"
        ),
        "what bounds the misses and what was tried: [docs/performance.md](docs/performance.md)):",
        "",
        *_ratios(results, is_short=True),
    ]
    remarks = [
        f"* {result['title']}: {line}"
        for result in results
        for line in [*_left_out(result), *result["remarks"]]
    ]
    return "\n".join([*rows, "", *remarks]).rstrip()


def _page(results: list[dict[str, Any]]) -> str:
    """Every row of every measure."""
    lines = [
        "# The learner beside its peers",
        "",
        "Made by `scripts/figures.py` from `learner-*.json` beside it.",
    ]
    for result in results:
        origin = f"{result['date'][:10]}, commit {result['commit'][:7]}, {result['seconds']:.0f} s"
        lines += ["", f"## {result['title']}", "", f"{origin}. Gate: {result['gate']['says']}.", ""]
        lines += [*_ratios([result], is_short=False), ""]
        lines += [
            f"* {line}" for line in [*_left_out(result), *result["remarks"], *result["notes"]]
        ]
    return "\n".join(lines).rstrip() + "\n"


def _ratios(results: list[dict[str, Any]], *, is_short: bool) -> list[str]:
    rows = [
        "| measure | peer | ours | theirs | times better | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for row in result["rows"]:
            shown = [ratio for ratio in row["ratios"] if not is_short or _matters(row, ratio)]
            rows += [_ratio_line(result, row, ratio) for ratio in shown]
    return rows


def _matters(row: dict[str, Any], ratio: dict[str, Any]) -> bool:
    is_loss = ratio["ratio"] is not None and ratio["ratio"] < 1 and "p99" not in row["name"]
    return bool(ratio["goal"]) or is_loss or row["name"] == WHOLE


def _left_out(result: dict[str, Any]) -> list[str]:
    """Every contestant of the measure that did not run to the end, grouped by reason."""
    ran = {name for row in result["rows"] for name in row["values"]} - result["skipped"].keys()
    names_by_reason: dict[str, list[str]] = {}
    for contestant in MEASURES[result["measure"]].contestants:
        if contestant.name not in ran:
            reason = result["skipped"].get(contestant.name, "not asked for")
            names_by_reason.setdefault(reason, []).append(contestant.name)
    return [
        f"**left out**: {'; '.join(names)} ({reason})" for reason, names in names_by_reason.items()
    ]


def _ratio_line(result: dict[str, Any], row: dict[str, Any], ratio: dict[str, Any]) -> str:
    ours, theirs = (_middle(row["values"][ratio[side]], row["unit"]) for side in ("ours", "peer"))
    name = row["name"] if ratio["ours"] == "ours" else f"{row['name']} ({ratio['ours']})"
    goal = f"≥ {ratio['goal']:g}x" if ratio["goal"] else ""
    missed = {"missed": " **missed**", "void": " **void**"}.get(ratio["verdict"], "")
    times = f"{_times(ratio['ratio'])} ({_times(ratio['low'])} to {_times(ratio['high'])}){missed}"
    return f"| {result['title']}: {name} | {ratio['peer']} | {ours} | {theirs} | {times} | {goal} |"


def _middle(values: list[float | None], unit: str) -> str:
    median = statistics.median(math.inf if value is None else value for value in values)
    return "never" if math.isinf(median) else f"{_short(median)} {unit}"


def _times(value: float | None) -> str:
    return "∞" if value is None else f"{_short(value)}x"


def _card(card: dict[str, Any]) -> str:
    rows = [
        (
            f"`make card PROFILE={card['profile']}` ({card['date'][:10]}, seed {card['seed']}, "
            f"{card['seconds']:.0f} s):"
        ),
        "",
        "| fault or control | tried | held |",
        "| --- | --- | --- |",
    ]
    for line in card["lines"]:
        held = f"skipped: {line['note']}" if line["outcome"] == "skipped" else f"{line['held']:,}"
        rows.append(f"| {line['what']} | {line['tried']:,} | {held} |")
    return "\n".join(rows)


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return (
        f"{value / 1e3:.3g} k"
        if value >= 1e4
        else f"{value:,.3g}"
        if value < 100
        else f"{value:,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
