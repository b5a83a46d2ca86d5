"""A visit without the platform: the page comes from the browser, a match is played with the last
bot and sent later."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.browsers import Player, Tab, play_on, tab
from tests.browser.test_gateway_away import ALL_ACKED
from tests.cli.platforms import wait_for
from tests.clients.test_docs_js import RALLY
from tests.serve.gateways import running
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind
from understudy.platform.play_page import page_address
from understudy.serve import pages
from understudy.serve.server import Listen

KEEPS = {"service_workers": "allow"}
KEPT = "async () => (await navigator.serviceWorker.ready) && (await caches.keys()).join()"


def kept_page(seen: Tab) -> str:
    """The name of what the browser keeps, once it keeps it."""
    return str(seen.page.evaluate(KEPT))


def test_a_reload_without_the_gateway_shows_the_page_and_a_match_with_the_last_bot_is_sent_later(
    browser: Any, tmp_path: Path
):
    with ExitStack() as open_tab:
        with running(tmp_path) as gateway:
            gateway.register(RALLY)
            gateway.release(RALLY, "categorical")
            address = page_address(gateway.url, "rally", key=gateway.key("play"))
            seen = open_tab.enter_context(tab(browser, address, **KEEPS))
            seen.page.wait_for_selector("body[data-bot='rally/1']")
            assert kept_page(seen).startswith("understudy-page-")
        seen.page.reload()
        seen.page.wait_for_selector("body[data-phase=ready]")
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.page.wait_for_selector("#state[data-state=offline]")
        seen.page.click("#start")
        play_on(Player(seen), points_more=2)
        assert seen.text("#them") == "rally/1"
        seen.shoot("rally-without-gateway")
        seen.page.keyboard.press("Escape")
        seen.page.wait_for_timeout(600)  # the page shows its counts four times a second
        recorded = seen.count("recorded")
        assert seen.count("waiting") == recorded > 10
        with running(tmp_path, listen=Listen(port=int(urlsplit(gateway.url).port or 0))) as again:
            seen.page.wait_for_function(ALL_ACKED, timeout=60_000)
            sent = [chunk_of(frame) for frame in again.streamed() if frame.kind is FrameKind.DATA]
    assert sum(chunk.meta.n_steps for chunk in sent) == recorded
    assert {note.model for chunk in sent for note in chunk.meta.episodes if note.seat == 1} == {
        "rally/1"
    }


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the gateway serve a newer page; the real one is back afterwards."""
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


def test_a_new_page_is_shown_at_once_and_takes_the_place_of_the_one_that_was_kept(
    browser: Any, tmp_path: Path, newer: Any
):
    title = "async () => (await (await fetch('/play')).text()).match(/<title>(newer)?/)[1] ?? ''"
    with running(tmp_path) as gateway, tab(browser, f"{gateway.url}/play", **KEEPS) as seen:
        first = kept_page(seen)
        seen.page.reload()
        assert seen.page.evaluate(title) == ""
        newer()
        seen.page.reload()
        assert seen.page.evaluate(title) == "newer", "with a gateway nothing old is shown"
        # The browser looks for a newer keeper at every visit; the old page goes with the old one.
        wait_for(lambda: kept_page(seen) not in ("", first) and "," not in kept_page(seen))
        gateway.stop()
        seen.page.reload()
        seen.page.wait_for_selector("body[data-phase=ready]")
        assert seen.page.evaluate(title) == "newer"


def test_only_the_keeper_may_answer_for_the_page_and_its_name_changes_with_any_file(newer: Any):
    before = pages.load_pages()
    allowed = [
        name
        for name, page in before.items()
        if "service-worker-allowed" in (page.answer({}).headers or {})
    ]
    assert allowed == ["offline.js"]
    keeper = before["offline.js"].raw
    for address, name in pages.FILES.items():
        assert (f'"{address}"'.encode() in keeper) == (name != "offline.js")
    newer()
    assert pages.load_pages()["offline.js"].raw != keeper
