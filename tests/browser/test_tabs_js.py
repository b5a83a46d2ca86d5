"""Several tabs of a real browser: one sends a closed tab's frames, and none blocks another."""

import json
import time
from pathlib import Path
from typing import Any

from tests.browser.browsers import Browser
from tests.cli.platforms import wait_for
from tests.serve.gateways import CART, running
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind

CONNECT = """async ([key, spec]) => {
  const { connect } = await import("/static/understudy.js");
  window.game = await connect("cart", {
    url: location.origin, key, spec, consent: "granted", lingerS: 0.01,
  });
  return window.game.stats().adopted;
}"""
PLAY = """async () => {
  const episode = game.episode();
  for (let at = 0; at < 7; at++) episode.acted([at, 0, 0, 0], at % 2);
  episode.end([0, 0, 0, 0]);
  await game.flush(0.2);
  return game.stats().waiting;
}"""

ADOPTED = """async () => {
  for (let at = 0; at < 200 && !game.stats().adopted; at++)
    await new Promise((resolve) => setTimeout(resolve, 100));
  return game.stats().adopted;
}"""


def test_a_tab_adopts_the_frames_of_another_only_once_that_is_closed(
    tmp_path: Path, browser: Browser
):
    with running(tmp_path) as gateway:
        spec = gateway.register(CART)
        tabs = browser.driver.new_context()
        try:
            facts = [gateway.key("play", origins=(gateway.url,)), json.loads(spec.to_json())]
            first = tabs.new_page()
            second = tabs.new_page()
            for tab in (first, second):
                tab.goto(f"{gateway.url}/play")
            assert first.evaluate(CONNECT, facts) == 0
            first.route("**/frames", lambda route: route.abort())
            assert first.evaluate(PLAY) == 7
            assert second.evaluate(CONNECT, facts) == 0
            second.wait_for_timeout(1500)  # it checks again after a second
            assert second.evaluate("game.stats().adopted") == 0
            first.close()
            assert second.evaluate(ADOPTED) == 7
            assert second.evaluate("game.flush(10)")
            left = "Object.keys(localStorage).filter((key) => /frame|gap|held/.test(key)).length"
            assert second.evaluate(left) == 0
        finally:
            tabs.close()
        sent = [frame for frame in gateway.streamed() if frame.kind is FrameKind.DATA]
    assert [chunk_of(frame).meta.n_steps for frame in sent] == [7]


MANY = 8
"""More than the six connections that a browser opens to a host."""


class Polls:
    """Long polls for bots that wait at the gateway now, by tab."""

    def __init__(self, tabs: list[Any]) -> None:
        self.open: dict[Any, int] = {}
        self.most = 0
        for at, tab in enumerate(tabs):
            tab.on("request", lambda request, at=at: self._on_request(request, at))
            tab.on("requestfinished", lambda request: self.open.pop(request, None))
            tab.on("requestfailed", lambda request: self.open.pop(request, None))

    def _on_request(self, request: Any, at: int) -> None:
        if "wait_s=" in request.url and not request.url.endswith("wait_s=0"):
            self.open[request] = at
            self.most = max(self.most, len(self.open))


def test_many_tabs_send_at_once_and_get_a_new_bot_through_one_long_poll(
    tmp_path: Path,
    browser: Browser,
):
    with running(tmp_path) as gateway:
        spec = gateway.register(CART)
        context = browser.driver.new_context()
        try:
            facts = [gateway.key("play", origins=(gateway.url,)), json.loads(spec.to_json())]
            tabs = [context.new_page() for _ in range(MANY)]
            polls = Polls(tabs)
            for tab in tabs:
                tab.goto(f"{gateway.url}/static/icon.svg")
                tab.evaluate(CONNECT, facts)
            for tab in tabs:
                started_s = time.monotonic()
                assert tab.evaluate(PLAY.replace("flush(0.2)", "flush(8)")) == 0, (
                    "every step is acknowledged"
                )
                assert time.monotonic() - started_s < 8
            (watching,) = polls.open.values()
            gateway.release(spec, "categorical")
            for tab in tabs:
                tab.wait_for_function("() => game.bot === 'cart/1'", timeout=60_000)
            # When the polling page is closed, another one polls.
            tabs[watching].close()
            rest = [tab for at, tab in enumerate(tabs) if at != watching]
            wait_for(
                lambda: (
                    rest[0].wait_for_timeout(100) is None
                    and any(at != watching for at in polls.open.values())
                )
            )
            assert polls.most <= 2
        finally:
            context.close()
        sent = [frame for frame in gateway.streamed() if frame.kind is FrameKind.DATA]
    assert sum(chunk_of(frame).meta.n_steps for frame in sent) == 7 * MANY
