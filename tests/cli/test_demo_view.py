"""What the demo shows while it runs, in terminals of every kind."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from understudy.app.crowd.loop import Look, LoopConfig
from understudy.cli.demo_view import watching
from understudy.games import rally

COURT = {"court": list(rally.serve(3)), "seat": 0, "score": [3, 5]}
LOOK = Look(
    elapsed_s=12.0, recorded_steps=2100, acked_steps=2000, stored_steps=1900, phase="dqn: learning", champion=2,
    canary=3, updates=70, lag_s=0.014, points={"rally/10": (3, 4), "rally/2": (1, 4)}, view=COURT,
)  # fmt: skip
EARLIER = Look(
    elapsed_s=10.0, recorded_steps=1600, acked_steps=1500, stored_steps=1400, phase="", champion=0, canary=0
)  # fmt: skip


def shown(*looks: Look, width: int = 80, height: int = 24, term: str = "xterm", is_terminal: bool = True) -> str:
    """What is written for these looks."""
    written = io.StringIO()
    out = Console(
        file=written, width=width, height=height, force_terminal=is_terminal, color_system=None, highlight=False,
        _environ={"TERM": term},
    )  # fmt: skip
    with watching(out, LoopConfig()) as show:
        for look in looks:
            show(look)
    return written.getvalue()


def test_a_usual_terminal_has_room_for_all_of_the_picture():
    said = shown(EARLIER, LOOK)
    for part in ("8 players", "2 000", "250/s", "14 ms", "person 3 : 5 bot", "rally/2 25%, rally/10 75%"):
        assert part in said
    assert "\n..." not in said, "cut by the terminal's end"
    assert "0 lost, 0 twice so far, by counts" in said


def test_what_is_not_stored_after_some_seconds_is_said():
    late = shown(EARLIER, replace(LOOK, stored_steps=1400))
    assert "100 steps acknowledged and not yet stored" in late
    assert "0 twice so far" not in late
    assert "100 steps of others are stored as well" in shown(EARLIER, replace(LOOK, stored_steps=2200))


def test_a_low_terminal_goes_without_the_court():
    said = shown(EARLIER, LOOK, height=16)
    assert "by counts" in said
    assert "person 3" not in said


@pytest.mark.parametrize(
    "kind", [{"width": 20, "height": 5}, {"width": 60}, {"height": 8}, {"term": "dumb"}, {"is_terminal": False}]
)
def test_where_a_picture_cannot_be_drawn_there_are_lines(kind: dict[str, object]):
    said = shown(EARLIER, LOOK, replace(LOOK, said="rally/3 is champion"), **kind)  # type: ignore[arg-type]
    assert "\x1b" not in said
    assert "acknowledged 1 500, stored 1 400 steps" in said
    assert " 12.0 s  rally/3 is champion\n" in said
