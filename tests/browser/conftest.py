import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, headless; skips the test with a reason if it or its driver is missing.

    Module scope: the driver runs an event loop in this thread, and other tests need their own.
    """
    executable = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if executable is None:
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
    # The sandbox is not available to root and in many containers; only our own page is loaded.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=executable, args=arguments)
        yield running
        running.close()
