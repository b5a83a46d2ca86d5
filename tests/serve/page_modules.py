"""The play page's modules for node, as a browser gets them."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from understudy.serve.pages import FILES, load_pages, source_of


def page_modules(folder: Path, *, as_served: bool = True) -> Path:
    """The folder, with every file of the page in it; skips where there is no node."""
    if shutil.which("node") is None:
        pytest.skip(
            "no node on this machine; install the system's package (Debian: apt-get install nodejs)"
        )
    (folder / "package.json").write_text('{"type": "module"}')
    for name in FILES.values():
        (folder / name).write_bytes(load_pages()[name].raw if as_served else source_of(name) or b"")
    return folder


def run(modules: Path, script: str) -> Any:
    """What a script prints as JSON."""
    (modules / "script.js").write_text(script)
    command = ["node", str(modules / "script.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
