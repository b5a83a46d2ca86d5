"""The play page is in the wheel, with the client and the game from elsewhere in the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from understudy.serve.pages import FILES, source_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    script = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_a_wheel_holds_every_file_of_the_page_once(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        for name in FILES.values():
            assert opened.read(f"understudy/serve/static/{name}") == source_of(name)
    assert len(names) == len(set(names))
    assert [
        name for name in names if "clients/" in name or name.endswith((".mjs", "package.json"))
    ] == []


def test_the_page_is_read_from_where_the_wheel_was_unpacked(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    asked = (
        "import understudy.serve.pages as pages; print(pages.__file__); "
        "print(sorted(pages.load_pages()))"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {asked}",
        ],
        cwd=tmp_path,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    where, files = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert files == str(sorted(FILES.values()))
