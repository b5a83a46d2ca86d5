"""charts: what a study's pictures show.

winner       the best trial and the runner-up on held-out seeds: intervals and profiles
history      every trial, and the best value so far: over trials, and over time
importance   how much of the metric each setting explains
slices       the metric against each setting
parallel     the settings of trials, side by side
rungs        the reports of trials, and where trials were stopped
slots        which slot ran a trial when
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from understudy.arena.statistics import profile
from understudy.core.plural import plural
from understudy.core.statistics import MIN_FOR_INTERVAL
from understudy.tuning.importance import MIN_TRIALS, Floats, importances
from understudy.tuning.pictures import (
    BEST,
    COLOURS,
    INK,
    LARGEST,
    MAX_LINES,
    MAX_SVG_POINTS,
    PAPER,
    Picture,
    StudyArrays,
    TrialSpan,
    label,
)
from understudy.tuning.result import Finalist, StudyResult
from understudy.tuning.space import Choice, Dimension

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 64
"""Of the chart of slots."""
_MAX_TICKS = 8


def charts(result: StudyResult) -> list[Picture]:
    """The charts that have something to show."""
    study = StudyArrays(result)
    kinds = (_winner, _history, _importance, _slices, _parallel, _rungs, _slots)
    return [picture for kind in kinds if (picture := kind(study)) is not None]


def _winner(study: StudyArrays) -> Picture | None:
    test = study.result.test
    if test is None or not any(finalist.scores for finalist in test.finalists):
        return None

    def draw(figure: "Figure") -> None:
        axes, shares = figure.subplots(1, 2, width_ratios=[3, 2])
        rng = np.random.default_rng(0)
        for place, finalist in enumerate(test.finalists):
            axes.plot(
                finalist.scores,
                place + 0.25 + rng.uniform(-0.08, 0.08, len(finalist.scores)),
                "o",
                color=COLOURS["done"],
                ms=5,
                mew=0,
                alpha=0.7,
                label="a held-out seed",
            )
            estimate = finalist.estimate
            if estimate is not None:
                if estimate.low is not None and estimate.high is not None:
                    axes.plot([estimate.low, estimate.high], [place] * 2, color=BEST, lw=2.5)
                axes.plot(
                    estimate.value,
                    place,
                    "D",
                    color=BEST,
                    ms=7,
                    label="their mean, with its interval",
                )
            axes.plot(
                finalist.tuned,
                place,
                "|",
                color=INK,
                ms=18,
                mew=2,
                label="in the search",
            )
        names = [f"trial {finalist.trial.trial_no}" for finalist in test.finalists]
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=study.label, ylim=(len(names) - 0.5, -0.5))
        axes.grid(axis="x")
        handles, kinds = axes.get_legend_handles_labels()
        legend = dict(zip(kinds, handles, strict=True))  # each kind once
        figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=3)
        _profiles(shares, study, test.finalists)

    text = (
        f"{'; '.join(test.summary)}. Right, the performance profiles: the share of the seeds "
        f"{study.better} each value, with 95 % intervals from {MIN_FOR_INTERVAL} seeds on."
    )
    if n_failed := sum(finalist.n_failed for finalist in test.finalists):
        text += f" {n_failed} failed, which counts as the worst."
    return Picture(
        name="winner",
        title="The best trials on held-out seeds",
        caption=text[0].upper() + text[1:],
        draw=draw,
        height_in=1.3 + 0.55 * len(test.finalists),
    )


def _profiles(axes: "Axes", study: StudyArrays, finalists: Sequence[Finalist]) -> None:
    """Which share of each finalist's seeds is better than each value; failed ones never are."""
    scores = [np.clip(finalist.scores, -LARGEST, LARGEST) for finalist in finalists]
    values = np.linspace(*study.limits(np.concatenate(scores))[:2], 101)
    for finalist, of_seeds, line in zip(finalists, scores, ("-", "--"), strict=False):
        shares = profile(
            np.append(study.sign * of_seeds, [-2 * LARGEST] * finalist.n_failed),
            study.sign * values,
            np.random.default_rng(0),
        )
        name = f"trial {finalist.trial.trial_no}"
        axes.plot(values, 100 * shares.shares, line, color=INK, lw=1.5, label=name)
        if shares.low is not None and shares.high is not None:
            axes.fill_between(
                values, 100 * shares.low, 100 * shares.high, color=INK, alpha=0.12, lw=0
            )
    axes.set(xlabel=study.label, ylabel=f"% of seeds {study.better} it", ylim=(-3, 103))
    axes.grid()
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _history(study: StudyArrays) -> Picture | None:
    if not np.isfinite(study.values).any():
        return None
    low, high, n_outside = study.limits(study.values)
    n_failed = int((~np.isfinite(study.values)).sum())
    by_trial = np.arange(len(study.rows))
    ends = {span.trial_no: study.elapsed_s(span.end_s) for span in study.spans}
    times_s = np.array([ends.get(trial_no, np.nan) for trial_no in study.trial_nos.tolist()])
    panels: list[tuple[str, Floats, npt.NDArray[np.intp]]] = [
        ("trial", study.trial_nos.astype(np.float64), by_trial)
    ]
    if np.isfinite(times_s).any():
        unit, divisor = _unit(float(np.nanmax(times_s)))
        panels.append((f"{unit} in which trials ran", times_s / divisor, np.argsort(times_s)))

    def draw(figure: "Figure") -> None:
        for axes, (x_label, x, order) in zip(
            figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
        ):
            _scatter(axes, study, x, study.values)
            best = np.fmax.accumulate(study.scores[order])
            is_known = np.isfinite(best) & np.isfinite(x[order])
            axes.step(
                x[order][is_known],
                study.sign * best[is_known],
                where="post",
                color=BEST,
                lw=1.8,
                label="best so far",
            )
            failed_x = x[~np.isfinite(study.values)]
            if len(failed_x):
                axes.plot(
                    failed_x,
                    np.full(len(failed_x), low),
                    "|",
                    color=COLOURS["failed"],
                    ms=8,
                    clip_on=False,
                    label="failed",
                    rasterized=len(failed_x) > MAX_SVG_POINTS,
                )
            axes.set(xlabel=x_label, ylim=(low, high), xlim=(0, max(1.0, 1.02 * np.nanmax(x))))
            axes.grid()
        figure.axes[0].set(ylabel=study.label)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=5
        )

    caption = (
        "The line is the best value so far; only trials that were trained to their end and are "
        "within the constraints can be the best."
    )
    if len(panels) > 1:
        caption += " Times in which no trial ran are cut out."
    if n_outside:
        caption += f" {_trials(n_outside)} much worse than the others {_are(n_outside)} outside."
    if n_failed:
        caption += f" {_trials(n_failed)} failed: the marks at the lower edge."
    return Picture(name="history", title="History", caption=caption, draw=draw)


def _importance(study: StudyArrays) -> Picture | None:
    indices = np.flatnonzero(study.is_done)
    columns = {name: study.column(name) for name in study.dimensions}
    ranking = importances(
        {name: [column[index] for index in indices] for name, column in columns.items()},
        study.values[indices].tolist(),
        rng=np.random.default_rng(0),
    )
    if not ranking:
        return None

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        shown = ranking[::-1]
        places = np.arange(len(shown))
        shares = 100 * np.array([each.share for each in shown])
        chances = 100 * np.array([each.chance for each in shown])
        is_clear = shares > chances
        axes.barh(
            places,
            shares,
            height=0.6,
            color=[COLOURS["done" if clear else "stopped"] for clear in is_clear],
        )
        axes.vlines(
            chances, places - 0.4, places + 0.4, color=INK, lw=1.5, label="reached by chance"
        )
        for place, share in zip(places, shares, strict=True):
            axes.annotate(
                f"{share:.0f} %", (max(share, chances[place]), place), (5, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.set_yticks(places, [label(each.name) for each in shown])
        axes.set(xlabel=f"% of the variance of {study.label}", xlim=(0, 106))
        axes.margins(y=0.02)
        axes.grid(axis="x")
        axes.legend(loc="lower right")

    return Picture(
        name="importance",
        title="Importance of settings",
        caption="How much of the differences between the trials that were trained to their end "
        f"({len(indices)}) each setting explains alone: the share of the variance of the metric's "
        f"ranks between up to 8 bins of its values, corrected for their number; {MIN_TRIALS} "
        "trials at least. The mark is what a setting without any effect stays below in 19 of 20 "
        "studies: a grey bar means nothing. What settings do only together is not counted. A "
        "search that tries good values more often shows less of what poor ones do."
        + study.left_out,
        draw=draw,
        height_in=1.1 + 0.3 * len(ranking),
    )


def _slices(study: StudyArrays) -> Picture | None:
    if not np.isfinite(study.values).any():
        return None
    low, high, n_outside = study.limits(study.values)
    n_columns = min(3, len(study.dimensions))
    n_rows = -(-len(study.dimensions) // n_columns)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False)
        for axes in grid.flat[len(study.dimensions) :]:
            axes.remove()
        rng = np.random.default_rng(0)
        for axes, (name, dimension) in zip(grid.flat, study.dimensions.items(), strict=False):
            column = study.column(name)
            if isinstance(dimension, Choice):
                x = _positions(dimension, column) * (dimension.size - 1)
                x += rng.uniform(-0.18, 0.18, len(x))
                axes.set_xticks(*_choice_ticks(dimension), rotation=30 if dimension.size > 4 else 0)
                axes.set_xlim(-0.5, dimension.size - 0.5)
            else:
                x = np.array(column, np.float64)
                if dimension.scale == "log":
                    axes.set_xscale("log")
                    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    axes.xaxis.set_minor_formatter(lambda value, _: "")
                    margin = (dimension.high / dimension.low) ** 0.04
                    axes.set_xlim(dimension.low / margin, dimension.high * margin)
                else:
                    margin = 0.04 * (dimension.high - dimension.low) or 1.0
                    axes.set_xlim(dimension.low - margin, dimension.high + margin)
                    if dimension.is_integer:
                        axes.xaxis.get_major_locator().set_params(integer=True)
            _scatter(axes, study, x, study.values)
            if study.best is not None:
                axes.plot(x[study.best], study.values[study.best], "*", color=BEST, ms=12)
            axes.set(xlabel=label(name, 30), ylim=(low, high))
            axes.grid()
        for row in grid:
            row[0].set(ylabel=study.label)

    outside = f" {_trials(n_outside)} much worse {_are(n_outside)} outside." if n_outside else ""
    return Picture(
        name="slices",
        title="Slices",
        caption="Every trial by each of its settings. The star is the best trial; grey trials were "
        "stopped early, and show their last report. Trials with the same choice are side by side."
        + outside
        + study.left_out,
        draw=draw,
        height_in=0.3 + 2.3 * n_rows,
    )


def _parallel(study: StudyArrays) -> Picture | None:
    done = np.flatnonzero(study.is_done)
    if not len(done):
        return None
    chosen = study.some(done.tolist())
    low, high, _ = study.limits(study.values[done])
    low = max(low, float(study.values[done].min()))
    high = max(min(high, float(study.values[done].max())), low + 1e-9)
    n_axes = len(study.dimensions) + 1

    def draw(figure: "Figure") -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        heights = np.empty((len(chosen), n_axes))
        for place, (name, dimension) in enumerate(study.dimensions.items()):
            column = study.column(name)
            heights[:, place] = _positions(dimension, [column[index] for index in chosen])
            _parallel_axis(axes, place, *_axis_ticks(dimension))
        metric = (np.clip(study.values[chosen], low, high) - low) / (high - low)
        heights[:, -1] = metric
        ticks = np.linspace(0, 1, 5)
        _parallel_axis(
            axes, n_axes - 1, ticks, [f"{low + tick * (high - low):.3g}" for tick in ticks]
        )
        # Ranks, so that the colours differ also if most trials are alike.
        ranks = np.arange(1, len(chosen) + 1) / len(chosen)
        colours = LinearSegmentedColormap.from_list(
            "rank", [COLOURS["stopped"], COLOURS["done"], BEST]
        )
        lines = np.stack([np.broadcast_to(np.arange(n_axes), heights.shape), heights], axis=2)
        axes.add_collection(
            LineCollection(
                list(lines),
                colors=colours(ranks),
                linewidths=0.7 + 1.3 * ranks**4,
                alpha=0.75,
            )
        )
        axes.set_xticks(
            range(n_axes),
            [*(label(name, 18) for name in study.dimensions), study.label],
            rotation=20 if n_axes > 7 else 0,
            ha="right" if n_axes > 7 else "center",
        )
        axes.set(xlim=(-0.1, n_axes - 0.4), ylim=(-0.03, 1.03), yticks=[])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)

    n_left_out = len(done) - len(chosen)
    some = (
        f" {_trials(len(chosen))} of {len(done)}: the best {MAX_LINES // 6}, and others evenly by "
        "their rank."
        if n_left_out
        else ""
    )
    return Picture(
        name="parallel",
        title="Parallel coordinates",
        caption="Each line is a trial that was trained to its end: grey are the worst, blue the "
        "middle, orange the best." + some + study.left_out,
        draw=draw,
        height_in=3.6,
    )


def _rungs(study: StudyArrays) -> Picture | None:
    reported = [index for index, row in enumerate(study.rows) if row.result.reports]
    if max((len(row.result.reports) for row in study.rows), default=0) < 2:
        return None
    chosen = study.some([index for index in reported if np.isfinite(study.values[index])])
    shown = np.array(
        [value for index in chosen for _, value in study.rows[index].result.reports] or [0.0]
    )
    low, high, _ = study.limits(np.clip(shown, -LARGEST, LARGEST))
    counts = np.array([len(study.rows[index].result.reports) for index in reported])
    was_stopped = study.states[reported] == "stopped"
    numbers = np.arange(1, counts.max() + 1)
    reached = len(counts) - np.searchsorted(np.sort(counts), numbers)
    stopped = np.bincount(counts[was_stopped], minlength=len(numbers) + 1)[1:]

    def draw(figure: "Figure") -> None:
        from matplotlib.collections import LineCollection

        lines, bars = figure.subplots(1, 2, width_ratios=[3, 2])
        paths = [np.array(study.rows[index].result.reports, np.float64) for index in chosen]
        states = study.states[chosen]
        lines.add_collection(
            LineCollection(
                paths, colors=[COLOURS[str(state)] for state in states], linewidths=0.8, alpha=0.6
            )
        )
        ends = np.array([path[-1] for path in paths]).reshape(-1, 2)
        for state, marker in (("stopped", "x"), ("done", ".")):
            of_state = ends[states == state]
            lines.plot(*of_state.T, marker, color=COLOURS[state], ms=5, label=state)
        if study.best in chosen:
            best = paths[chosen.index(study.best)]
            lines.plot(*best.T, color=BEST, lw=2, label="best")
        lines.autoscale(axis="x")
        lines.set(xlabel="step", ylabel=study.label, ylim=(low, high))
        lines.grid()
        figure.legend(*lines.get_legend_handles_labels(), loc="outside upper left", ncols=3)
        bars.bar(numbers, reached, width=0.9, color=COLOURS["done"], label="reached it")
        bars.bar(numbers, stopped, width=0.9, color=COLOURS["stopped"], label="stopped there")
        bars.set(xlabel="report", ylabel="trials")
        for axis in (bars.xaxis, bars.yaxis):
            axis.get_major_locator().set_params(integer=True)
        bars.grid(axis="y")
        bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)

    some = (
        f" Lines: {len(chosen)} of {_trials(len(reported))}." if len(chosen) < len(reported) else ""
    )
    return Picture(
        name="rungs",
        title="Reports and rungs",
        caption="Left, what trials measured while they trained; a cross is where the stopping rule "
        "ended one. Right, how many trials reached each report, and how many ended there early."
        + some,
        draw=draw,
    )


def _slots(study: StudyArrays) -> Picture | None:
    spans = study.spans
    if not spans:
        return None
    states = {row.trial.trial_no: row.result.state for row in study.rows}
    last = {span.trial_no: span for span in spans}
    starts_s = [study.elapsed_s(span.start_s) for span in spans]
    ends_s = [study.elapsed_s(span.end_s) for span in spans]
    end_s = max(ends_s)
    unit, divisor = _unit(end_s)
    places = _places(spans)
    names = sorted(set(places))
    n_rows = len(names) if len(names) <= _MAX_ROWS else 0
    boxes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    row_of = {place: row for row, place in enumerate(names)}
    for span, place, start_s, stop_s in zip(spans, places, starts_s, ends_s, strict=True):
        kind = states.get(span.trial_no, "running") if last[span.trial_no] is span else "lost"
        box = (start_s / divisor, (stop_s - start_s) / divisor)
        boxes.setdefault((kind, row_of[place]), []).append(box)
    is_large = len(spans) > MAX_SVG_POINTS

    def draw_rows(axes: "Axes") -> None:
        for (kind, row), of_row in sorted(boxes.items()):
            axes.broken_barh(
                of_row,
                (row - 0.4, 0.8),
                facecolor=COLOURS[kind],
                edgecolor=COLOURS[kind] if is_large else PAPER,
                linewidth=0.4,
                rasterized=is_large,
                label=kind,
            )
        has_lanes = any(lane for _, lane in names)
        axes.set_yticks(
            range(n_rows),
            [f"slot {slot}, lane {lane}" if has_lanes else f"slot {slot}" for slot, lane in names],
        )
        axes.set(ylim=(n_rows - 0.4, -0.6))
        axes.grid(axis="x")

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(
            2 if n_rows else 1,
            1,
            sharex=True,
            squeeze=False,
            height_ratios=[0.6 + 0.25 * n_rows, 1] if n_rows else None,
        )[:, 0]
        if n_rows:
            draw_rows(panels[0])
            handles, kinds = panels[0].get_legend_handles_labels()
            legend = dict(zip(kinds, handles, strict=True))
            figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=5)
        times = np.array(starts_s + ends_s) / divisor
        changes = np.repeat([1, -1], len(spans))
        order = np.lexsort((changes, times))
        running = np.cumsum(changes[order])
        counts = panels[-1]
        counts.fill_between(
            times[order],
            running,
            step="post",
            color=COLOURS["done"],
            alpha=0.5,
            lw=0,
            rasterized=is_large,
        )
        counts.set(xlabel=f"{unit} in which trials ran", ylabel="trials at once", xlim=(0, None))
        counts.set_ylim(0, running.max() * 1.08)
        counts.yaxis.get_major_locator().set_params(integer=True)
        counts.grid(axis="y")

    busy = (sum(ends_s) - sum(starts_s)) / (end_s * len(names)) if end_s else 1.0
    return Picture(
        name="slots",
        title="Slots",
        caption="Which slot ran a trial when; a thin line separates trials. "
        f"{len(names)} {plural(len(names), 'place was', 'places were')} in use "
        f"{100 * busy:.0f} % of the time. Times in which no trial ran are cut out, also those in "
        "which slots started; a slot's first trial includes imports and compilation. Work that "
        "ended with a kill of the study is not drawn.",
        draw=draw,
        height_in=2.2 + min(4.0, 0.22 * n_rows),
    )


# --- Parts of charts ------------------------------------------------------------------------------


def _scatter(axes: "Axes", study: StudyArrays, x: Floats, y: Floats) -> None:
    """The trials, coloured by how they ended."""
    for state, marker in (("stopped", "o"), ("done", "o")):
        of_state = (study.states == state) & np.isfinite(y)
        if of_state.any():
            axes.plot(
                x[of_state],
                y[of_state],
                marker,
                color=COLOURS[state],
                ms=4 if len(x) <= MAX_SVG_POINTS else 2,
                mew=0,
                alpha=0.7,
                label=state,
                rasterized=len(x) > MAX_SVG_POINTS,
            )


def _positions(dimension: Dimension, column: Sequence[Any]) -> Floats:
    """Where values are on an axis of length 1."""
    if isinstance(dimension, Choice):
        texts = [repr(value) for value in dimension.values]
        index = {text: place / max(1, len(texts) - 1) for place, text in enumerate(texts)}
        return np.array([index.get(repr(value), 0.0) for value in column])
    numbers = np.array([dimension.low, dimension.high, *column], np.float64)
    if dimension.scale == "log":
        numbers = np.log(numbers)
    length = numbers[1] - numbers[0]
    return (numbers[2:] - numbers[0]) / length if length > 0 else np.full(len(column), 0.5)


def _choice_ticks(dimension: Choice) -> tuple[list[int], list[str]]:
    places = range(0, dimension.size, -(-dimension.size // _MAX_TICKS))
    return list(places), [label(dimension.values[place], 14) for place in places]


def _axis_ticks(dimension: Dimension) -> tuple[Floats, list[str]]:
    """Where the ticks of a parallel axis are, and their texts."""
    if isinstance(dimension, Choice):
        places, texts = _choice_ticks(dimension)
        return np.array(places) / max(1, dimension.size - 1), texts
    values = dimension.axis(5)
    if len(values) > _MAX_TICKS:
        values = [dimension.at(unit) for unit in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _positions(dimension, values), [f"{value:.3g}" for value in values]


def _parallel_axis(axes: "Axes", place: int, ticks: Floats, texts: Sequence[str]) -> None:
    axes.plot([place, place], [0, 1], color=INK, lw=1)
    axes.plot([place] * len(ticks), ticks, "_", color=INK, ms=6)
    for tick, text in zip(ticks, texts, strict=True):
        axes.annotate(
            text,
            (place, tick),
            (6, 0),
            textcoords="offset points",
            va="center",
            size="small",
            bbox={"boxstyle": "square,pad=0.15", "facecolor": PAPER, "linewidth": 0, "alpha": 0.8},
        )


def _places(spans: Sequence[TrialSpan]) -> list[tuple[int, int]]:
    """The slot of each span, and its lane there: the first that is free when it starts."""
    free_s: dict[int, list[float]] = {}
    places = []
    for span in spans:
        lanes = free_s.setdefault(span.slot, [])
        free = (lane for lane, until_s in enumerate(lanes) if until_s <= span.start_s)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        places.append((span.slot, lane))
    return places


def _unit(longest_s: float) -> tuple[str, float]:
    if longest_s < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 4 * 3600 else ("hours", 3600.0)


def _trials(count: int) -> str:
    return f"{count} {plural(count, 'trial')}"


def _are(count: int) -> str:
    return plural(count, "is", "are")
