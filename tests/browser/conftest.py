import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser.browsers import Browser, PagePlatform, run_platform
from understudy.platform.play_page import play_key

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class _Shared:
    """What is open until the last test of this folder has run."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.browser: Browser | None = None
        self.rally: PagePlatform | None = None
        self.cartpole: PagePlatform | None = None

    def close(self) -> None:
        self.browser = self.rally = self.cartpole = None
        self.stack.close()


_shared = _Shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close what the tests of this folder share after the last of them.

    The driver runs an event loop in this thread, and other tests need their own.
    """
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _shared.close()


@pytest.fixture
def browser() -> Browser:
    """The system's Chromium, headless; skips the test with a reason if something is missing."""
    if _shared.browser is not None:
        return _shared.browser
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
    driver = _shared.stack.enter_context(sync_playwright())
    chromium = driver.chromium.launch(executable_path=executable, args=arguments)
    _shared.stack.callback(chromium.close)
    _shared.browser = Browser(chromium)
    return _shared.browser


@pytest.fixture
def rally(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> PagePlatform:
    """A platform in its own processes, with a champion; one for all tests of this folder."""
    if _shared.rally is None:
        platform = run_platform(tmp_path_factory.mktemp("platform"))
        _shared.rally = _shared.stack.enter_context(platform)
    return _shared.rally


@pytest.fixture
def cartpole(rally: PagePlatform) -> PagePlatform:
    """The other game of the same platform."""
    if _shared.cartpole is None:
        key = play_key(rally.deployment, "CartPole-v1")
        _shared.cartpole = replace(rally, key=key, game="CartPole-v1")
        _shared.cartpole.release()
    return _shared.cartpole


@pytest.fixture(params=["rally", "CartPole-v1"])
def game(
    rally: PagePlatform, cartpole: PagePlatform, request: pytest.FixtureRequest
) -> PagePlatform:
    return rally if request.param == "rally" else cartpole
