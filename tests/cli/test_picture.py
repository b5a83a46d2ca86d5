"""Pictures of output: what is in them may be shown to anybody."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from understudy.cli.picture import check_picture, write_picture
from understudy.cli.root import run as run_command
from understudy.core.errors import ConfigError

ADDRESS = "http://127.0.0.1:39141/play#game=rally&key=uk_3fA9-secret_of.somebody"
DOCS = Path(__file__).parents[2] / "docs" / "images"


def outside(svg: str) -> list[str]:
    """Addresses in it that are neither the format's own name nor this machine's."""
    found = re.findall(r"https?://[^\s\"'<>)]*", svg)
    return [one for one in found if one != "http://www.w3.org/2000/svg" and not one.startswith("http://127.0.0.1:")]


@pytest.mark.parametrize("width", [60, 112, 200])
def test_a_picture_asks_nobody_for_fonts_and_tells_no_key(width: int, tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    out.print(f"[dim]  1.2 s[/]  play along in a browser: {ADDRESS}", soft_wrap=True)
    out.print("[bold]and[/] more")
    write_picture(tmp_path / "p.svg", out, title="t")
    svg = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert outside(svg) == []
    assert "@font-face" not in svg
    assert "monospace" in svg
    assert "uk_" not in svg
    assert "secret" not in svg
    assert "more" in svg


def test_the_pictures_of_the_documentation_are_such() -> None:
    pictures = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.svg")]
    assert pictures
    for svg in pictures:
        assert outside(svg) == []
        assert set(re.findall(r"key=([^\s<&]+)", svg)) <= {"…"}


def test_where_no_picture_can_be_written_is_said_before_anybody_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.svg").write_text("kept")
    check_picture(tmp_path / "kept.svg")
    check_picture(tmp_path / "new.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.svg"]
    assert (tmp_path / "kept.svg").read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot be written"):
        check_picture(tmp_path / ("x" * 300))
    assert run_command(["demo", "--svg", str(tmp_path / "no" / "p.svg")]) == 2
    said = capsys.readouterr()
    assert "there is no folder" in said.err
    assert "people play" not in said.out
