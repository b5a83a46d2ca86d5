"""docs/tuning.md: its files, commands and Python run as they stand, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"


def test_the_page_works_as_it_stands(tmp_path: Path):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks].count("console") == 2
    for language, text in blocks:
        if language == "toml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
            continue
        lines = [text] if language == "python" else text.splitlines()
        for line in lines:
            words = [sys.executable, "-c", line] if language == "python" else line.split()
            done = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            assert "failed" not in done.stdout, done.stdout
    assert len(list((tmp_path / "S" / "trials").iterdir())) == 8
    best = (tmp_path / "S" / "best.toml").read_text()
    preset = (tmp_path / "R" / "preset.toml").read_text()
    found = re.findall("^(?:batch|target_period|steps) = .*", best, re.MULTILINE)
    assert len(found) == 3
    assert {*found} <= {*preset.splitlines()}
