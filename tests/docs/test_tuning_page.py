"""docs/tuning.md: its files, commands and Python run as they stand, in the order of the page."""

import re
import sys
from pathlib import Path

from tests.docs.one_process import OneProcess

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"


def test_the_page_works_as_it_stands(tmp_path: Path):
    """May take more than 20 seconds: three studies, each trained by a process of its own."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks].count("console") == 2
    with OneProcess() as process:
        for language, text in blocks:
            if language == "toml":
                (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
                continue
            lines = [text] if language == "python" else text.splitlines()
            for line in lines:
                words = [sys.executable, "-c", line] if language == "python" else line.split()
                assert "failed" not in process.run(words, tmp_path)
    assert len(list((tmp_path / "S" / "trials").iterdir())) == 6
    best = (tmp_path / "S" / "best.toml").read_text()
    preset = (tmp_path / "R" / "preset.toml").read_text()
    found = re.findall("^(?:batch|target_period|steps) = .*", best, re.MULTILINE)
    assert len(found) == 3
    assert {*found} <= {*preset.splitlines()}
