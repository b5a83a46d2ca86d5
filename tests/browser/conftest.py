import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's own Chromium, without a window; skipped by name where it or its driver is
    missing.

    For a module and no longer: its driver keeps an event loop running in this thread, and other
    tests want their own.
    """
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(
            "no Chromium on this machine; install the system's package (Debian: apt-get install "
            "chromium)"
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip(
            "no playwright in this environment; python3 scripts/setup.py platform dev browser "
            "installs it"
        )
    # It loads our page and nothing else, so it needs no sandbox, which root and many containers
    # lack.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=arguments)
        yield running
        running.close()
