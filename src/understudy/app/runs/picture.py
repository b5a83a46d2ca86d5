"""A run's curve as a picture."""

import io

from understudy.app.runs.folder import RunFolder
from understudy.core.log import write_file


def draw_curve(folder: RunFolder, *, title: str, goal: float | None) -> None:
    """curve.png: evaluated returns over steps, with their interval; nothing when there is no point to draw."""
    rows = folder.curve_rows()
    if not rows:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: it takes a while
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [row["env_steps"] for row in rows]
    axes.fill_between(
        steps, [row["return_low"] for row in rows], [row["return_high"] for row in rows], alpha=0.2, color="tab:blue"
    )
    axes.plot(steps, [row["return_mean"] for row in rows], marker=".", color="tab:blue", label="greedy, held-out seeds")
    axes.plot(steps, [row["train_return"] for row in rows], color="tab:gray", lw=1, label="while training")
    if goal is not None:
        axes.axhline(goal, color="tab:green", lw=1, ls="--", label=f"goal {goal:g}")
    axes.set(title=title, xlabel="steps", ylabel="return")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    write_file(folder.picture, drawn.getvalue(), mode=0o644)
