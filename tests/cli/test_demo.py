"""The demo as a user types it: errors before it starts, its live view, and its SVG output."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from understudy.cli.demo import check_svg, loop_view, no_bot_error, write_svg
from understudy.cli.root import run as run_command
from understudy.core.errors import ConfigError
from understudy.games import rally
from understudy.simulation.loop import LoopConfig, LoopProgress

COURT = {"court": list(rally.serve(3)), "seat": 0, "score": [3, 5]}
LOOK = LoopProgress(
    elapsed_s=12.0,
    recorded_steps=2100,
    acked_steps=2000,
    stored_steps=1900,
    phase="dqn: learning",
    champion=2,
    canary=3,
    updates=70,
    lag_s=0.014,
    points={"rally/10": (3, 4), "rally/2": (1, 4)},
    view=COURT,
)
EARLIER = LoopProgress(
    elapsed_s=10.0,
    recorded_steps=1600,
    acked_steps=1500,
    stored_steps=1400,
    phase="",
    champion=0,
    canary=0,
)
ADDRESS = "http://127.0.0.1:39141/play#game=rally&key=uk_3fA9-secret_of.somebody"
DOCS = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (["--stream", "kinesis://x"], 2, "no AWS region"),
        (["--stream", "nosuch://x"], 2, "is not a supported stream"),
        (["--models", "nosuch://x"], 2, "cannot store models"),
        (["--game", "nosuch"], 2, "game 'nosuch' is unknown"),
        (["--players", "0"], 2, "--players is 0"),
        (["--seconds", "1"], 2, "--seconds is 1"),
        (["--kill", "store"], 2, "'store' is not one of"),
        (["--seed", "-1"], 2, "--seed is -1; pass a number from 0"),
    ],
)
def test_bad_options_are_rejected_before_anything_is_created(
    wrong: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert run_command(["demo", "--keep", str(tmp_path / "kept"), *wrong]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert "people play" not in out
    assert not (tmp_path / "kept").exists()


def test_a_missing_package_is_named_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert (
        run_command(
            ["demo", "--keep", str(tmp_path / "kept"), "--stream", "kinesis://x?region=eu-west-1"]
        )
        == 2
    )
    out, err = capsys.readouterr()
    assert "pip install 'understudy[aws]'" in err
    assert "people play" not in out
    assert not (tmp_path / "kept").exists()


def test_the_error_without_a_bot_names_the_limit_and_the_next_step() -> None:
    config = LoopConfig(max_seconds=75.0)
    error = no_bot_error(config, 134.2, None)
    assert "within 75 s of play (134 s including startup and shutdown);" in error
    assert "give --keep DIR and inspect" in error
    with_folder = no_bot_error(config, 134.2, "K")
    assert "--keep" not in with_folder
    assert with_folder.endswith("`understudy status --data K`")
    assert "so the learner was never killed" in no_bot_error(
        LoopConfig(max_seconds=5, kill="learner"), 9.0, None
    )


# --- While it runs --------------------------------------------------------------------------------


def shown(
    *looks: LoopProgress,
    width: int = 80,
    height: int = 24,
    term: str = "xterm",
    is_terminal: bool = True,
) -> str:
    """The output for these looks."""
    written = io.StringIO()
    out = Console(
        file=written,
        width=width,
        height=height,
        force_terminal=is_terminal,
        color_system=None,
        highlight=False,
        _environ={"TERM": term},
    )
    with loop_view(out, LoopConfig()) as show:
        for look in looks:
            show(look)
    return written.getvalue()


def test_a_terminal_of_80_by_24_fits_the_whole_view():
    said = shown(EARLIER, LOOK)
    for part in (
        "8 players",
        "2 000",
        "250/s",
        "14 ms",
        "person 3 : 5 bot",
        "rally/2 25%, rally/10 75%",
    ):
        assert part in said
    assert "\n..." not in said, "cut by the terminal's end"
    assert "0 lost, 0 stored twice so far, by counts" in said


def test_steps_not_stored_after_some_seconds_are_reported():
    late = shown(EARLIER, replace(LOOK, stored_steps=1400))
    assert "100 steps acknowledged and not yet stored" in late
    assert "0 stored twice so far" not in late
    assert "100 steps of other players are stored as well" in shown(
        EARLIER, replace(LOOK, stored_steps=2200)
    )


def test_a_low_terminal_omits_the_court():
    said = shown(EARLIER, LOOK, height=16)
    assert "by counts" in said
    assert "person 3" not in said


@pytest.mark.parametrize(
    "kind",
    [
        {"width": 20, "height": 5},
        {"width": 60},
        {"height": 8},
        {"term": "dumb"},
        {"is_terminal": False},
    ],
)
def test_a_terminal_without_room_for_the_view_gets_lines(kind: dict[str, object]):
    said = shown(EARLIER, LOOK, replace(LOOK, message="rally/3 is champion"), **kind)  # type: ignore[arg-type]
    assert "\x1b" not in said
    assert "acknowledged 1 500, stored 1 400 steps" in said
    assert " 12.0 s  rally/3 is champion\n" in said


# --- SVG files: they may be published -------------------------------------------------------------


def outside(svg: str) -> list[str]:
    """URLs in it that are neither the namespace of SVG nor on this machine."""
    urls = re.findall(r"https?://[^\s\"'<>)]*", svg)
    return [
        url
        for url in urls
        if url != "http://www.w3.org/2000/svg" and not url.startswith("http://127.0.0.1:")
    ]


@pytest.mark.parametrize("width", [60, 112, 200])
def test_an_svg_file_has_no_web_fonts_and_no_keys(width: int, tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    out.print(f"[dim]  1.2 s[/]  play along in a browser: {ADDRESS}", soft_wrap=True)
    out.print("[bold]and[/] more")
    write_svg(tmp_path / "p.svg", out, title="t")
    svg = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert outside(svg) == []
    assert "@font-face" not in svg
    assert "monospace" in svg
    assert "uk_" not in svg
    assert "secret" not in svg
    assert "more" in svg


def test_the_svg_files_of_the_documentation_have_no_web_fonts_and_no_keys() -> None:
    pictures = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.svg")]
    assert pictures
    for svg in pictures:
        assert outside(svg) == []
        assert set(re.findall(r"key=([^\s<&]+)", svg)) <= {"…"}


def test_an_unwritable_svg_path_is_rejected_before_the_demo_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.svg").write_text("kept")
    check_svg(tmp_path / "kept.svg")
    check_svg(tmp_path / "new.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.svg"]
    assert (tmp_path / "kept.svg").read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot be written"):
        check_svg(tmp_path / ("x" * 300))
    assert run_command(["demo", "--svg", str(tmp_path / "no" / "p.svg")]) == 2
    said = capsys.readouterr()
    assert "no does not exist; create it first" in said.err
    assert "people play" not in said.out
