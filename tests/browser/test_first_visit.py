"""The first visit: the welcome fits a phone, and an address that asks for what there is not is
answered in words."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.browsers import Stage, stage, tab
from tests.cli.platforms import wait_for

PHONES = [(390, 844), (320, 568), (568, 320)]
CUT = """() => {
  const inside = (inner, outer) => inner.left >= outer.left && inner.right <= outer.right
    && inner.top >= outer.top && inner.bottom <= outer.bottom;
  const box = (id) => document.getElementById(id).getBoundingClientRect();
  return ["message", "detail", "start", "quietly"].filter((id) => !inside(box(id), box("stage")));
}"""
"""Which parts of the welcome reach over the edge of the court."""
ROOM = """() => {
  const list = document.getElementById("opponent");
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = getComputedStyle(list).font;
  return list.clientWidth - pen.measureText(list.selectedOptions[0].text).width;
}"""
"""What a select has beyond its text, for its paddings and the arrow."""


@pytest.fixture(scope="module", params=["rally", "CartPole-v1"])
def game(
    browser: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("game"), str(request.param)) as found:
        yield found


@pytest.mark.parametrize(("width", "height"), PHONES)
def test_the_welcome_lies_inside_the_court_and_nothing_scrolls_sideways(
    browser: Any, game: Stage, width: int, height: int
):
    phone = {"viewport": {"width": width, "height": height}, "has_touch": True, "is_mobile": True}
    with tab(browser, game.address, **phone) as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.shoot(f"{game.game}-welcome-{width}")
        assert seen.page.evaluate(CUT) == []
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if height > width:
            for button in ("#start", "#quietly"):
                assert seen.page.locator(button).bounding_box()["y"] < height, (
                    "seen without scrolling"
                )
        seen.page.tap("#quietly")
        seen.page.wait_for_selector("body[data-phase=playing]")
        seen.shoot(f"{game.game}-playing-{width}")
        # While it is played the court has its own shape, and its stage is no higher.
        court, around = (seen.page.locator(one).bounding_box() for one in ("#court", "#stage"))
        assert abs(court["width"] / court["height"] - (4 / 3 if game.game == "rally" else 2)) < 0.03
        assert around["height"] <= court["height"] + 3


def test_a_key_that_is_no_good_scrolls_nothing_sideways(browser: Any, game: Stage):
    phone = {"viewport": {"width": 320, "height": 568}, "has_touch": True, "is_mobile": True}
    with tab(browser, game.address[:-4] + "AAAA", **phone) as seen:
        seen.page.wait_for_selector("#state[data-state=refused]")
        seen.shoot(f"{game.game}-refused-320")
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_key_that_is_no_good_is_said_and_nobody_is_asked_for_consent(browser: Any, game: Stage):
    with tab(browser, game.address[:-4] + "AAAA", viewport={"width": 1000, "height": 700}) as seen:
        seen.page.wait_for_selector("#state[data-state=refused]")
        assert seen.text("#sending") == (
            "Nothing is recorded: this is not a key of this deployment. Next: understudy play "
            f"{game.game} --web --data D"
        )
        assert (seen.text("#start"), seen.page.is_hidden("#quietly"), seen.text("#detail")) == (
            "Play",
            True,
            "",
        )
        assert seen.page.evaluate(ROOM) >= 40, "the choice is read to its end"
        seen.page.click("#start")
        seen.page.wait_for_selector("body[data-phase=playing]")
        assert (seen.page.is_checked("#consent"), seen.page.is_disabled("#consent")) == (
            False,
            True,
        )


@pytest.mark.parametrize("asked", ["abc", "99"])
def test_a_bot_that_there_is_not_is_said_and_stands(browser: Any, game: Stage, asked: str):
    said = {
        "abc": "The address names bot abc, which is not a model number: choose one here.",
        "99": f"{game.game}/99 cannot play: {game.game} has no model 99.",
    }[asked]
    with tab(browser, f"{game.address}&bot={asked}") as seen:
        wait_for(lambda: seen.text("#opponent-note") == said)
        assert seen.page.locator("#opponent").input_value() == (
            "champion" if game.game == "rally" else "you"
        )
        seen.page.click("#quietly")
        seen.page.wait_for_selector("#court[data-place]")
        assert seen.text("#opponent-note") == said
