"""Workers of pytest-xdist get whole units: files, and groups of files that share a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.schedule import LONGEST_FIRST, TOGETHER, rank, unit

ROOT = Path(__file__).resolve().parents[2]

NOTES_ITS_WORKER = """
import os, pathlib, pytest

@pytest.mark.parametrize("at", range(8))
def test_it(at):
    here = pathlib.Path(__file__)
    (here.parent / f"{os.environ['PYTEST_XDIST_WORKER']}-{here.stem}").touch()
"""


@pytest.mark.parametrize("prefix", [*TOGETHER, *LONGEST_FIRST])
def test_every_prefix_names_something(prefix: str):
    folder, _, beginning = prefix.rpartition("/")
    assert list((ROOT / folder).glob(f"{beginning}*"))


def test_files_that_share_something_are_one_unit_and_any_other_file_is_its_own():
    assert unit("tests/integration/test_kafka.py::test_x") == unit(
        "tests/integration/test_kafka_init.py::test_y[z]"
    )
    assert unit("tests/experience/test_chunk.py::test_x[::]") == "tests/experience/test_chunk.py"


def test_long_units_start_first():
    assert rank(f"{LONGEST_FIRST[0]}test_x.py::test_y") < rank(
        "tests/experience/test_chunk.py::test_x"
    )


def test_no_file_is_split_between_workers(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        "from tests import schedule\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return schedule.by_work_unit(config, log)\n"
    )
    for at in range(3):
        (tmp_path / f"test_{at}.py").write_text(NOTES_ITS_WORKER)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-p",
        "xdist.plugin",
        "-o",
        f"pythonpath={ROOT}",
        tmp_path,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    noted = [path.name for path in tmp_path.glob("gw*-test_*")]
    assert sorted(name.partition("-")[2] for name in noted) == ["test_0", "test_1", "test_2"]
    assert {name.partition("-")[0] for name in noted} == {"gw0", "gw1"}
