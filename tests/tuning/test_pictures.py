"""The charts of studies, and the page that has them."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from understudy.core.errors import ConfigError, StorageFailed
from understudy.tuning.charts import _places, charts
from understudy.tuning.journal import Row, SlotTime
from understudy.tuning.pictures import INK, MAX_LINES, MAX_SETTINGS, Picture, StudyArrays, draw
from understudy.tuning.report import page, write_report
from understudy.tuning.result import StudyResult, ranked, winner_test
from understudy.tuning.space import read_space
from understudy.tuning.study_config import Constraint, StudyConfig
from understudy.tuning.trial import Metric, TrainableSpec, Trial, TrialResult

EVIL = "<script>alert('x')</script> & $\\frac{1}$ \"q\" 名"
SPACE = {
    "rate": {"min": 1e-5, "max": 1e-1, "scale": "log"},
    "steps": {"min": 1, "max": 4},
    "share": {"min": 0.0, "max": 1.0, "step": 0.25},
    "kind": ["small", [64, 64], None, True, 1],
    "fixed": [3],
}


def result_of(
    n_trials: int,
    *,
    space: Any = None,
    name: str = "study",
    criteria: Any = "max",
    states: Sequence[Any] = ("done",),
    reports: int = 0,
    leases: bool = True,
    value: Any = None,
    error: str = "it broke",
) -> StudyResult:
    """A study whose trials end in these states, in turn."""
    rng = np.random.default_rng(0)
    config = StudyConfig(
        name=name,
        space=read_space(space or SPACE),
        trainable=TrainableSpec(path="x:Y", config={"folder": "S"}),
        metric=Metric(name="reward", criteria=criteria),
        constraints=(Constraint(metric="cost", high=5.0),),
        notes=(name,),
    )
    rows = []
    for trial_no in range(n_trials):
        state = states[trial_no % len(states)]
        reward = float(rng.normal()) if value is None else value
        failed = state == "failed"
        rows.append(
            Row(
                Trial(trial_no=trial_no, values=config.space.sample(rng), seed=trial_no),
                TrialResult(
                    trial_no=trial_no,
                    state=state,
                    metrics={} if failed else {"reward": reward, "cost": float(trial_no % 7)},
                    reports=[(10 * (each + 1), reward - 1 / (each + 1)) for each in range(reports)],
                    seconds=1.0,
                    error=error if failed else "",
                ),
            )
        )
    times = [
        SlotTime(each, each % 2, 1e9 + each // 2, 1e9 + each // 2 + 1) for each in range(n_trials)
    ]
    return StudyResult(Path("S"), config, rows, "", leases=times if leases else ())


def names_of(pictures: Sequence[Picture]) -> list[str]:
    return [picture.name for picture in pictures]


class Tags(HTMLParser):
    """The elements of a page, its visible text, and errors of nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


# --- The page -------------------------------------------------------------------------------------


def test_the_page_has_every_chart_and_trial_escapes_names_and_needs_no_network(tmp_path: Path):
    space = {EVIL: {"min": 0.1, "max": 0.9}, "kind": [EVIL, "b"]}
    result = result_of(
        24, space=space, name=EVIL, states=("done", "stopped", "failed"), reports=3, error=EVIL
    )
    written = write_report(result, html=tmp_path / "new" / "report.html", png=tmp_path / "png")
    names = ["history", "slices", "parallel", "rungs", "slots"]
    assert written == [
        tmp_path / "new" / "report.html",
        *(tmp_path / "png" / f"{name}.png" for name in names),
    ]
    for path in written[1:]:
        assert path.read_bytes().startswith(b"\x89PNG")
    text = written[0].read_text()
    tags = Tags(text)
    assert tags.names.count("svg") == len(names)
    assert tags.names.count("script") == 1
    assert tags.names.count("tr") == 25
    assert "alert('x')</script>" not in text
    assert EVIL in tags.text
    links = {value for _, value in tags.attributes if "://" in value}
    assert {link for link in links if "www.w3.org" not in link} == set()
    assert "url(http" not in text
    assert INK not in text[text.index("<body>") :]
    assert "var(--ink)" in text
    assert "prefers-color-scheme: dark" in text


def test_on_a_narrow_screen_charts_scroll_and_their_texts_stay_readable():
    result = result_of(12, reports=2)
    text = page(result, [draw(picture) for picture in charts(result)])
    widths = re.findall(r'<div class="chart" tabindex="0"><svg [^>]*viewBox="0 0 ([\d.]+)', text)
    assert len(widths) == text.count("<svg ")
    assert ".chart { overflow-x: auto; }" in text
    shortest = re.search(r"svg {[^}]* min-width: (\d+)rem", text)
    assert shortest is not None
    font = min(float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text))
    assert font * 16 * float(shortest[1]) / float(widths[0]) > 8


def test_a_page_without_trials_says_so_and_has_no_charts():
    result = result_of(0)
    assert charts(result) == []
    text = Tags(page(result, [])).text
    assert "0 trials" in text
    assert "not finished" in text


def test_a_page_that_cannot_be_written_says_what_to_give(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match="give another --html file or --png folder"):
        write_report(result_of(0), html=tmp_path / "file" / "report.html")
    with pytest.raises(ConfigError, match="which is a file; give a folder"):
        write_report(result_of(0), png=tmp_path / "file")


# --- Charts ---------------------------------------------------------------------------------------


def test_a_chart_has_text_that_can_be_selected_and_ids_of_its_own():
    history, _, parallel = charts(result_of(2, leases=False))
    drawn = [draw(history), draw(parallel)]
    ids = [set(re.findall(r'id="([mp][0-9a-f]{10})"', each.svg)) for each in drawn]
    assert all(ids)
    assert not ids[0] & ids[1]
    assert ">reward</text>" in drawn[0].svg
    again = draw(charts(result_of(2, leases=False))[0])
    assert again == drawn[0]._replace(picture=again.picture)  # nothing depends on time or chance


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"states": ("failed",)}, ["slots"]),
        ({"states": ("stopped",), "reports": 2}, ["history", "slices", "rungs", "slots"]),
        ({"value": 1e308, "criteria": "min"}, ["history", "slices", "parallel", "slots"]),
        ({"value": 0.0}, ["history", "slices", "parallel", "slots"]),
    ],
)
def test_a_study_with_one_trial_is_drawn(changes: dict[str, Any], expected: list[str]):
    pictures = charts(result_of(1, **changes))
    assert names_of(pictures) == expected
    assert draw(pictures[0]).png


def test_of_ten_thousand_trials_some_lines_are_drawn_and_the_charts_say_so():
    pictures = {each.name: each for each in charts(result_of(10_000, reports=2))}
    assert f"{MAX_LINES} trials of" in pictures["parallel"].caption
    assert f"Lines: {MAX_LINES} of 10000 trials" in pictures["rungs"].caption
    for name in ("history", "slots"):
        assert len(draw(pictures[name]).svg) < 1_000_000


def test_many_settings_are_left_out_and_the_chart_says_so():
    space = {f"s{number}": [1, 2] for number in range(MAX_SETTINGS + 2)}
    pictures = charts(result_of(12, space=space))
    for picture in pictures[1:4]:
        assert picture.caption.endswith(" The first 30 settings; 2 more are not drawn.")


@pytest.mark.parametrize("n_seeds", [3, 10])
def test_the_finalists_are_drawn_with_their_verdict(n_seeds: int):
    found = result_of(12)
    rows = ranked(found.config, found.trials)[:2]
    results = [
        [replace(row.result, metrics={"reward": shift + seed / 10}) for seed in range(n_seeds)]
        for row, shift in zip(rows, (5.0, 1.0), strict=True)
    ]
    results[0][0] = TrialResult(trial_no=0, state="failed", error="it diverged")
    found = replace(found, test=winner_test(found.config.metric, rows, results))
    assert found.test is not None
    winner = charts(found)[0]
    assert winner.name == "winner"
    verdict = found.test.verdict
    assert winner.caption.lower().startswith(f"{verdict}; ")
    assert winner.caption.endswith("1 failed, which counts as the worst.")
    drawn = draw(winner)
    assert f"trial {rows[1].trial.trial_no}" in drawn.svg
    assert verdict in page(found, [drawn])
    figure = Figure()
    winner.draw(figure)
    profiles = figure.axes[1]
    shares = [np.asarray(line.get_ydata()).tolist() for line in profiles.lines]
    assert [max(each) for each in shares] == pytest.approx([100 * (1 - 1 / n_seeds), 100])
    assert all(each == sorted(each, reverse=True) and each[-1] == 0 for each in shares)
    assert len(profiles.collections) == (2 if n_seeds >= 5 else 0)


def test_a_runner_up_that_is_proven_better_has_the_star():
    found = result_of(12)
    rows = ranked(found.config, found.trials)[:2]
    results = [
        [replace(row.result, metrics={"reward": value}) for value in np.arange(10) + shift]
        for row, shift in zip(rows, (0.0, 50.0), strict=True)
    ]
    found = replace(found, test=winner_test(found.config.metric, rows, results))
    best = StudyArrays(found).best
    assert best is not None
    assert found.trials[best] == rows[1]


# --- What the charts are computed from ------------------------------------------------------------


def test_trials_much_worse_than_the_others_are_outside_of_the_axis():
    for criteria, sign in (("max", 1.0), ("min", -1.0)):
        study = StudyArrays(result_of(1, criteria=criteria))
        values = sign * np.array([1.0, 2.0, 3.0, 4.0, 5.0, 4.5, 3.5, 2.5, 1.5, 1.2, 1.1, -1e9])
        low, high, n_outside = study.limits(values)
        assert n_outside == 1
        assert min(low * sign, high * sign) == pytest.approx(0.8)
        assert max(low * sign, high * sign) == pytest.approx(5.2)
        assert study.limits(np.array([2.0, math.nan, 2.0]))[2] == 0


def test_of_many_trials_the_best_are_chosen_and_others_evenly():
    study = StudyArrays(result_of(1000))
    chosen = study.some(range(1000))
    assert len(chosen) == len(set(chosen)) == MAX_LINES
    by_value = np.argsort(study.values).tolist()
    assert chosen[-50:] == by_value[-50:]
    assert chosen[0] == by_value[0]
    assert study.some([3, 1]) == sorted([3, 1], key=lambda index: study.values[index])


def test_the_best_is_within_the_constraints():
    study = StudyArrays(result_of(50))
    assert study.best == max(
        (index for index in range(50) if index % 7 <= 5), key=lambda index: study.values[index]
    )


def with_leases(*leases: SlotTime) -> StudyArrays:
    result = result_of(2)
    return StudyArrays(StudyResult(result.folder, result.config, result.trials, "", leases=leases))


def test_times_without_trials_are_cut_out():
    study = with_leases(
        SlotTime(0, 0, 100.0, 110.0), SlotTime(1, 1, 105.0, 120.0), SlotTime(2, 0, 500.0)
    )
    at = [study.elapsed_s(time_s) for time_s in (90.0, 100.0, 110.0, 120.0, 300.0, 500.0)]
    assert at == [0.0, 0.0, 10.0, 20.0, 20.0, 20.0]
    study = with_leases(SlotTime(0, 0, 100.0, 110.0), SlotTime(1, 0, 200.0, 205.0))
    assert [study.elapsed_s(time_s) for time_s in (200.0, 205.0)] == [10.0, 15.0]


def test_a_running_trial_ends_at_the_last_known_time_and_killed_work_is_left_out():
    study = with_leases(
        SlotTime(3, 0, 10.0),  # the study was killed
        SlotTime(2, 1, 12.0),  # runs
        SlotTime(0, 0, 20.0, 30.0),
        SlotTime(3, 0, 32.0, 31.0),  # the clock was set back
    )
    assert [tuple(span) for span in study.spans] == [
        (2, 1, 12.0, 31.0),
        (0, 0, 20.0, 30.0),
        (3, 0, 32.0, 32.0),
    ]


def test_trials_that_share_a_slot_have_lanes():
    study = with_leases(
        SlotTime(0, 0, 0.0, 5.0),
        SlotTime(1, 0, 0.0, 3.0),
        SlotTime(2, 0, 3.0, 6.0),
        SlotTime(3, 1, 5.0, 6.0),
    )
    assert _places(study.spans) == [(0, 0), (0, 1), (0, 1), (1, 0)]
