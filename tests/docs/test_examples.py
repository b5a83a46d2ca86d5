"""Runs every command and example of the README and the guides, in the order of the page."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.one_process import OneProcess
from understudy.platform.config import resolve

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/game-developer.md", "docs/rl-engineer.md", "docs/operator.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text())


def commands(text: str) -> list[str]:
    return [line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]


@pytest.fixture(scope="module")
def process() -> Iterator[OneProcess]:
    with OneProcess() as process:
        yield process


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_as_they_stand(page: str, process: OneProcess, tmp_path: Path) -> None:
    """May take more than 20 seconds: the guide for RL engineers trains four times."""
    found = blocks(page)
    assert found, f"{page} shows no example"
    for language, text in found:
        if language == "toml":
            (tmp_path / "understudy.toml").write_text(text)
            resolve({"data": str(tmp_path)}, environ={}).config.check()
            (tmp_path / "understudy.toml").unlink()
            continue
        assert language in ("python", "console"), (
            f"{page} has a block of {language}, which no test runs"
        )
        runs = (
            [[sys.executable, "-c", text]]
            if language == "python"
            else [line.split() for line in commands(text)]
        )
        for run in runs:
            if run[0] == "make":
                continue
            process.run(run, tmp_path)


def test_the_guide_for_games_describes_one_version_of_its_game() -> None:
    """Another length or other names would be another schema, which the bot of the first has not."""
    calls = [
        ast.unparse(call)
        for language, text in blocks("docs/game-developer.md")
        if language == "python"
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "understudy.connect"
    ]
    assert len(calls) == 3
    assert len(set(calls)) == 1


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(text for _, text in blocks(page))))
        assert named <= targets, page


def test_links_between_pages_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_first_screen_of_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split("\n## ")[0].strip().splitlines()) <= 30


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_figures_of_the_pages_are_those_of_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "figures.py"), "--check"], timeout=60
    )
    assert done.returncode == 0, "run scripts/figures.py: a page differs from bench/results"


def test_paths_that_proofs_name_exist() -> None:
    for page in ("docs/claims.md", "SECURITY.md"):
        named = re.findall(r"(tests/[\w/.]+)", (ROOT / page).read_text())
        assert named, page
        for path in named:
            assert (ROOT / path.rstrip(".")).exists(), f"{page} names {path}"
