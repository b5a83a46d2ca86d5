"""Picture: a chart of a study, drawn once by matplotlib, as SVG for its report and as PNG.

`charts.py` has the charts, `report.py` the files.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from understudy.tuning.importance import Floats
from understudy.tuning.journal import Row
from understudy.tuning.result import StudyResult, score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LINES = 300
"""Lines of trials in one chart; of more trials, some are drawn, and the chart says so."""
MAX_SETTINGS = 30
MAX_SVG_POINTS = 1_000
"""More are an image inside the SVG, which stays small."""
LARGEST = 1e100
"""Larger metrics are drawn as this; squares of them must be finite."""
_WIDTH_IN = 9.0

INK = "#1f2430"
"""Text and axes; the report replaces it by the colour of its text, which is light in the dark."""
PAPER = "#fefefd"
"""Behind text and between boxes; the report replaces it by the colour of its background."""
COLOURS = {
    "done": "#3b82d6",
    "stopped": "#9a9fa8",
    "failed": "#d64545",
    "lost": "#c08a2e",
    "running": "#7fb77e",
}
"""Readable on white and on black."""
BEST = "#e8710a"
_STYLE: Any = {
    "text.usetex": False,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": PAPER,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.dpi": 100,
    "svg.fonttype": "none",
}
_NO_METADATA: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One chart, to be drawn."""

    name: str
    """Of its PNG file."""
    title: str
    caption: str
    """How to read it, and what it leaves out."""
    draw: "Callable[[Figure], None]"
    height_in: float = 3.2


class Drawn(NamedTuple):
    """A chart as files have it."""

    picture: Picture
    svg: str
    png: bytes


def draw(picture: Picture) -> Drawn:
    """Draw a chart once; the SVG has no background, and INK as the colour of its text."""
    import matplotlib  # imported late: it is slow
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    svg = io.StringIO()
    png = io.BytesIO()
    # The salt makes the ids of an SVG differ from those of others on the page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": picture.name}), _quiet():
        figure = Figure(figsize=(_WIDTH_IN, picture.height_in), layout="constrained")
        FigureCanvasAgg(figure)
        picture.draw(figure)
        figure.savefig(png, format="png", dpi=130, facecolor=PAPER)
        figure.set_layout_engine("none")
        figure.savefig(svg, format="svg", transparent=True, metadata=_NO_METADATA)
    text = svg.getvalue()
    return Drawn(picture, text[text.index("<svg") :], png.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of glyphs that the font lacks: the SVG has the text, for the browser's fonts."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


class StudyArrays:
    """A study as arrays, one entry per trial that has ended."""

    def __init__(self, result: StudyResult) -> None:
        self.result = result
        self.metric = result.config.metric
        self.label = label(self.metric.name)
        self.sign = 1.0 if self.metric.criteria == "max" else -1.0
        self.better = "above" if self.sign > 0 else "below"
        self.dimensions = dict(list(result.config.space.dimensions.items())[:MAX_SETTINGS])
        rows = result.trials
        self.rows: Sequence[Row] = rows
        self.trial_nos = np.array([row.trial.trial_no for row in rows], np.int64)
        self.states = np.array([row.result.state for row in rows], "U8")
        values = [row.result.metrics.get(self.metric.name, np.nan) for row in rows]
        self.values = np.clip(np.array(values, np.float64), -LARGEST, LARGEST)
        scores = [score(result.config, row.result) for row in rows]
        numbers = [np.nan if each is None else each for each in scores]
        self.scores = np.clip(np.array(numbers, np.float64), -LARGEST, LARGEST)
        """The metric, larger is better; NaN if a trial cannot be the best."""
        self.is_done = (self.states == "done") & np.isfinite(self.values)

    @property
    def best(self) -> int | None:
        """The index of the best trial."""
        best = self.result.best
        return None if best is None else self.trial_nos.tolist().index(best.trial.trial_no)

    @property
    def left_out(self) -> str:
        n_more = len(self.result.config.space.dimensions) - len(self.dimensions)
        return f" The first {MAX_SETTINGS} settings; {n_more} more are not drawn." if n_more else ""

    def column(self, name: str) -> list[Any]:
        return [row.trial.values[name] for row in self.rows]

    def limits(self, values: Floats) -> tuple[float, float, int]:
        """The ends of an axis that shows the good values, and how many it leaves out.

        A few that are much worse than the others are left out.
        """
        signed = np.sort(self.sign * values[np.isfinite(values)])
        low = signed[0]
        high = signed[-1]
        usual = high - np.quantile(signed, 0.1)
        if usual > 0 and high - low > 4 * usual:
            low = signed[signed >= high - 2 * usual][0]
        margin = 0.05 * (high - low) or max(1e-3, 0.05 * abs(high))
        ends = sorted((self.sign * (low - margin), self.sign * (high + margin)))
        return float(ends[0]), float(ends[1]), int((signed < low - margin).sum())

    def some(self, indices: Sequence[int]) -> list[int]:
        """Up to MAX_LINES of these trials, worst first: the best ones, and others evenly."""
        by_score = sorted(indices, key=lambda index: self.sign * self.values[index])
        if len(by_score) <= MAX_LINES:
            return by_score
        n_best = MAX_LINES // 6
        others = np.linspace(0, len(by_score) - n_best - 1, MAX_LINES - n_best).astype(int)
        return [by_score[place] for place in others] + by_score[-n_best:]

    @cached_property
    def spans(self) -> "list[TrialSpan]":
        """When slots ran trials, by start."""
        return ended_spans(self.result)

    @cached_property
    def elapsed_s(self) -> Callable[[float], float]:
        """From a time since 1970 to the seconds in which trials ran before it."""
        edges: list[float] = []
        for span in self.spans:
            if edges and span.start_s <= edges[-1]:
                edges[-1] = max(edges[-1], span.end_s)
            else:
                edges += [span.start_s, span.end_s]
        lengths = np.diff(edges)
        lengths[1::2] = 0.0  # nothing ran
        at = np.concatenate([[0.0], np.cumsum(lengths)])
        return lambda time_s: float(np.interp(time_s, edges, at))


class TrialSpan(NamedTuple):
    """A lease with an end."""

    trial_no: int
    slot: int
    start_s: float
    end_s: float


def ended_spans(result: StudyResult) -> list[TrialSpan]:
    """The leases with an end; a trial that runs now has the last time that is known as its end."""
    last_s = max((lease.end_s or lease.start_s for lease in result.leases), default=0.0)
    ended = {row.trial.trial_no for row in result.trials}
    is_last = {lease.trial_no: lease for lease in result.leases}
    spans = []
    for lease in result.leases:
        end_s = lease.end_s
        if end_s is None and lease.trial_no not in ended and is_last[lease.trial_no] is lease:
            end_s = last_s
        if end_s is not None:  # the clock of a machine may be set back
            spans.append(
                TrialSpan(lease.trial_no, lease.slot, lease.start_s, max(lease.start_s, end_s))
            )
    return sorted(spans, key=lambda span: span.start_s)


def label(text: object, limit: int = 22) -> str:
    """A text of the user's for a chart: one line of printable characters, shortened."""
    line = " ".join(str(text).split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
