"""A visit without the platform: a cached page plays the last bot and sends the match later."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.browsers import Browser, Player, Tab, open_tab, play_points
from tests.browser.test_gateway_away import ALL_ACKED
from tests.cli.platforms import wait_for
from tests.clients.test_docs_js import RALLY
from tests.serve.gateways import running
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind
from understudy.platform.play_page import page_address
from understudy.serve import pages
from understudy.serve.server import Listen

WITH_WORKER: dict[str, Any] = {"service_workers": "allow", "own_context": True}
CACHE_NAMES = "async () => (await navigator.serviceWorker.ready) && (await caches.keys()).join()"


def cached_page(tab: Tab) -> str:
    """The names of the browser's caches, once the service worker is ready."""
    return str(tab.page.evaluate(CACHE_NAMES))


def test_a_reload_without_the_gateway_plays_the_last_bot_and_sends_the_match_later(
    browser: Browser, tmp_path: Path
):
    with ExitStack() as stack:
        with running(tmp_path) as gateway:
            gateway.register(RALLY)
            gateway.release(RALLY, "categorical")
            address = page_address(gateway.url, "rally", key=gateway.key("play"))
            tab = stack.enter_context(open_tab(browser, address, **WITH_WORKER))
            tab.page.wait_for_selector("body[data-bot='rally/1']")
            assert cached_page(tab).startswith("understudy-page-")
        tab.page.reload()
        tab.page.wait_for_selector("body[data-phase=ready]")
        tab.page.wait_for_selector("body[data-bot='rally/1']")
        tab.page.wait_for_selector("#state[data-state=offline]")
        tab.page.click("#start")
        play_points(Player(tab), points_more=2)
        assert tab.text("#them") == "rally/1"
        tab.screenshot("rally-without-gateway")
        tab.page.keyboard.press("Escape")
        tab.page.wait_for_timeout(600)  # the page updates its counts four times a second
        recorded = tab.count("recorded")
        assert tab.count("waiting") == recorded > 10
        with running(tmp_path, listen=Listen(port=int(urlsplit(gateway.url).port or 0))) as again:
            tab.page.wait_for_function(ALL_ACKED, timeout=60_000)
            sent = [chunk_of(frame) for frame in again.streamed() if frame.kind is FrameKind.DATA]
    assert sum(chunk.meta.n_steps for chunk in sent) == recorded
    assert {note.model for chunk in sent for note in chunk.meta.episodes if note.seat == 1} == {
        "rally/1"
    }


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the gateway serve a newer page; undone after the test."""
    source = pages.source_of

    def change() -> None:
        def changed(name: str) -> bytes | None:
            raw = source(name)
            return raw.replace(b"<title>", b"<title>newer ") if raw and name == "play.html" else raw

        monkeypatch.setattr(pages, "source_of", changed)
        pages.load_pages.cache_clear()

    yield change
    monkeypatch.undo()
    pages.load_pages.cache_clear()


def test_a_new_page_is_shown_at_once_and_replaces_the_cached_one(
    browser: Browser, tmp_path: Path, newer: Any
):
    title = "async () => (await (await fetch('/play')).text()).match(/<title>(newer)?/)[1] ?? ''"
    with (
        running(tmp_path) as gateway,
        open_tab(browser, f"{gateway.url}/play", **WITH_WORKER) as tab,
    ):
        first = cached_page(tab)
        tab.page.reload()
        assert tab.page.evaluate(title) == ""
        newer()
        tab.page.reload()
        assert tab.page.evaluate(title) == "newer", "with a gateway the cached page is not shown"
        # The browser checks for a newer worker at every visit; a new one deletes the old cache.
        wait_for(lambda: cached_page(tab) not in ("", first) and "," not in cached_page(tab))
        gateway.stop()
        tab.page.reload()
        tab.page.wait_for_selector("body[data-phase=ready]")
        assert tab.page.evaluate(title) == "newer"


def test_only_the_worker_may_serve_the_page_and_it_changes_with_any_file(newer: Any):
    before = pages.load_pages()
    allowed = [
        name
        for name, page in before.items()
        if "service-worker-allowed" in (page.answer({}).headers or {})
    ]
    assert allowed == ["offline.js"]
    worker = before["offline.js"].raw
    for address, name in pages.FILES.items():
        assert (f'"{address}"'.encode() in worker) == (name != "offline.js")
    newer()
    assert pages.load_pages()["offline.js"].raw != worker
