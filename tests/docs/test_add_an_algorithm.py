"""The page on adding an algorithm is followed to the letter, and what it asks a newcomer to read
is counted."""

import json
import re
import sys
from pathlib import Path

from tests.docs.one_process import OneProcess

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-algorithm.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
MAX_LINES = 600


def test_a_newcomer_reads_at_most_600_lines_before_writing_an_algorithm():
    named = re.findall(r"^\* `([\w/.]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert len(named) == 3
    assert sum(len((ROOT / path).read_text().splitlines()) for path in named) <= MAX_LINES


def test_the_example_is_short():
    (code,) = [text for _, text in BLOCK.findall(PAGE.read_text()) if text.startswith("# softq.py")]
    assert len(code.splitlines()) <= 120


def test_the_page_works_as_it_stands(tmp_path: Path):
    """May take more than 20 seconds: its commands train the example from random weights until it
    balances."""
    results: dict[str, str] = {}
    with OneProcess() as process:
        for language, text in BLOCK.findall(PAGE.read_text()):
            assert language in ("python", "console")
            if (name := FILE.match(text)) is not None:
                (tmp_path / name[1]).write_text(text)
            elif language == "python":
                process.run([sys.executable, "-c", text], tmp_path)
            else:
                for line in text.splitlines():
                    results[line] = process.run(line.split(), tmp_path)
    (listed,) = [output for line, output in results.items() if "--list" in line]
    assert "temperature" in listed
    (trained,) = [output for line, output in results.items() if "--until" in line]
    assert json.loads(trained.splitlines()[-1])["solved"]
