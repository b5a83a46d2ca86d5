"""docs/seeds.md lists every feature of the seed systems, and each command in it passes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "UNDERSTUDY_PROVING_A_SEED"
NOT_YET = "*not yet*"
TIMEOUT_S = 280.0


class Seed(NamedTuple):
    id: str
    feature: str
    seed: str
    proof: str

    @property
    def command(self) -> str | None:
        quoted = re.fullmatch(r"`([^`]+)`", self.proof)
        return quoted.group(1) if quoted else None


def read_table() -> list[Seed]:
    rows = (
        line
        for line in (ROOT / "docs" / "seeds.md").read_text().splitlines()
        if re.match(r"\| S\d", line)
    )
    return [Seed(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows]


SEEDS = read_table()


def test_the_table_holds_every_feature_in_order():
    assert [seed.id for seed in SEEDS] == [f"S{number}" for number in range(1, 42)]


def test_each_feature_has_one_command_or_says_not_yet():
    assert [seed for seed in SEEDS if seed.proof != NOT_YET and seed.command is None] == []


def test_the_readme_counts_those_that_are_proved():
    proved = sum(seed.command is not None for seed in SEEDS)
    assert f"Today {proved} of the {len(SEEDS)} are proved" in (ROOT / "README.md").read_text()


def needs_servers(seed: Seed) -> bool:
    return "-m backends" in (seed.command or "")


PROVED_HERE = [seed for seed in SEEDS if seed.command and not needs_servers(seed)]


def test_proofs_on_servers_are_files_of_make_test_backends():
    named = [
        path
        for seed in SEEDS
        if needs_servers(seed)
        for path in (seed.command or "").split()
        if "/" in path[1:]
    ]
    paths = [ROOT / path for path in named if path.startswith("tests/")]
    assert paths
    assert all(path.is_file() and path.parent.name == "integration" for path in paths)


COUNT_TESTS = """
import json, sys, pytest

class Counter:
    def pytest_collection_finish(self, session):
        self.collected = len(session.items)

counts = {}
for id, arguments in json.loads(sys.argv[1]).items():
    counter = Counter()
    pytest.main([*arguments, "--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[counter])
    counts[id] = counter.collected
print("\\n" + json.dumps(counts))
"""


def test_every_proof_is_made_of_tests_that_make_test_runs():
    """All of them are collected in one process: starting one for each would take minutes."""
    proofs = {seed.id: shlex.split(seed.command or "") for seed in PROVED_HERE}
    assert {words[0] for words in proofs.values()} == {".venv/bin/pytest"}
    assert not [name for name, words in proofs.items() if "-m" in words], (
        "those of make test, neither more nor less"
    )
    arguments = json.dumps({name: words[1:] for name, words in proofs.items()})
    done = subprocess.run(
        [sys.executable, "-c", COUNT_TESTS, arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts.keys() == proofs.keys()
    assert [name for name, count in counts.items() if count == 0] == []


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        INSIDE: "1"
    }


@pytest.mark.slow
@pytest.mark.skipif(INSIDE in os.environ, reason="this run is itself the proof of a seed")
@pytest.mark.parametrize("seed", PROVED_HERE, ids=lambda seed: seed.id)
def test_the_proof_of_a_feature_passes(seed):
    """Runs the command itself; `make test` runs the same tests, each once."""
    tool, *arguments = shlex.split(seed.command)
    assert tool.startswith(".venv/bin/"), "a proof runs from a checkout after make test"
    here = (
        Path(sys.executable).parent / Path(tool).name
    )  # the environment of this run, wherever it is
    finished = subprocess.run(
        [here, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    output = f"{seed.command}\n{finished.stdout}\n{finished.stderr}"
    assert finished.returncode == 0, output
    assert re.search(r"\b[1-9]\d* passed\b", finished.stdout), output
