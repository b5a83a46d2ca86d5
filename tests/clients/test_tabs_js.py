"""Two tabs of a real browser: what one of them keeps is sent by the other only once it is gone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import browser  # noqa: F401 (a fixture, for this module too)
from tests.serve.gateways import CART, running
from understudy.core.chunk import chunk_of
from understudy.core.frame import FrameKind

pytestmark = pytest.mark.xdist_group("browser")

CONNECT = """async ([key, spec]) => {
  const { connect } = await import("/static/understudy.js");
  window.game = await connect("cart", { url: location.origin, key, spec, consent: "granted", lingerS: 0.01 });
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
  for (let at = 0; at < 200 && !game.stats().adopted; at++) await new Promise((resolve) => setTimeout(resolve, 100));
  return game.stats().adopted;
}"""


def test_a_tab_takes_up_what_another_left_and_only_when_it_is_gone(tmp_path: Path, browser: Any):  # noqa: F811
    with running(tmp_path) as gateway:
        spec = gateway.register(CART)
        tabs = browser.new_context()
        try:
            facts = [gateway.key("play", origins=(gateway.url,)), json.loads(spec.to_json())]
            first, second = tabs.new_page(), tabs.new_page()
            for tab in (first, second):
                tab.goto(f"{gateway.url}/play")
            assert first.evaluate(CONNECT, facts) == 0
            first.route("**/frames", lambda route: route.abort())
            assert first.evaluate(PLAY) == 7
            assert second.evaluate(CONNECT, facts) == 0
            second.wait_for_timeout(1500)  # it looks again after a second
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
