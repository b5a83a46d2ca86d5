"""The first visit: the welcome fits a phone, and invalid keys and bots are reported in words."""

import pytest

from tests.browser.browsers import Browser, PagePlatform, open_tab
from tests.cli.platforms import wait_for

PHONES = [
    {"width": width, "height": height} for width, height in ((390, 844), (320, 568), (568, 320))
]
CUT = """() => {
  const inside = (inner, outer) => inner.left >= outer.left && inner.right <= outer.right
    && inner.top >= outer.top && inner.bottom <= outer.bottom;
  const box = (id) => document.getElementById(id).getBoundingClientRect();
  return ["message", "detail", "start", "quietly"].filter((id) => !inside(box(id), box("stage")));
}"""
"""Ids of the parts of the welcome that extend beyond the court."""
SPARE_WIDTH = """() => {
  const list = document.getElementById("opponent");
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = getComputedStyle(list).font;
  return list.clientWidth - pen.measureText(list.selectedOptions[0].text).width;
}"""
"""Width of the select beyond its text, for its padding and arrow."""


def test_the_welcome_fits_the_court_and_the_page_does_not_scroll_sideways(
    browser: Browser, game: PagePlatform
):
    """One visit at the size of three phones, since a page is expensive to open."""
    phone = {"has_touch": True, "is_mobile": True}
    with open_tab(browser, game.address, viewport=PHONES[0], **phone) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        for viewport in PHONES:
            tab.resize(viewport)
            tab.screenshot(f"{game.game}-welcome-{viewport['width']}")
            assert tab.page.evaluate(CUT) == []
            assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if viewport["height"] > viewport["width"]:
                for button in ("#start", "#quietly"):
                    assert tab.page.locator(button).bounding_box()["y"] < viewport["height"], (
                        "visible without scrolling"
                    )
        tab.page.tap("#quietly")
        tab.page.wait_for_selector("body:not([data-phase=ready])")
        for viewport in PHONES:
            tab.resize(viewport)
            tab.screenshot(f"{game.game}-playing-{viewport['width']}")
            # During play the court keeps its aspect ratio, and its container is no higher.
            court, around = (
                tab.page.locator(selector).bounding_box() for selector in ("#court", "#stage")
            )
            ratio = 4 / 3 if game.game == "rally" else 2
            assert abs(court["width"] / court["height"] - ratio) < 0.03
            assert around["height"] <= court["height"] + 3
        tab.resize({"width": 320, "height": 568})
        tab.visit(game.address[:-4] + "AAAA")
        tab.page.wait_for_selector("#state[data-state=refused]")
        tab.screenshot(f"{game.game}-refused-320")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_invalid_key_is_reported_and_consent_is_not_requested(
    browser: Browser, game: PagePlatform
):
    with open_tab(
        browser, game.address[:-4] + "AAAA", viewport={"width": 1000, "height": 700}
    ) as tab:
        tab.page.wait_for_selector("#state[data-state=refused]")
        assert tab.text("#sending") == (
            "Nothing is recorded: this is not a key of this deployment. Next: understudy play "
            f"{game.game} --web --data D"
        )
        assert (tab.text("#start"), tab.page.is_hidden("#quietly"), tab.text("#detail")) == (
            "Play",
            True,
            "",
        )
        assert tab.page.evaluate(SPARE_WIDTH) >= 40, "the selected text is fully visible"
        tab.page.click("#start")
        # A slow machine may compute a whole attempt in one frame; then it is over at once.
        tab.page.wait_for_selector("body:not([data-phase=ready])")
        assert (tab.page.is_checked("#consent"), tab.page.is_disabled("#consent")) == (
            False,
            True,
        )
        # The browser itself logs the rejected request; the page logs no other error.
        assert all("401" in error for error in tab.errors)


@pytest.mark.parametrize("bot", ["abc", "99"])
def test_an_unknown_bot_in_the_address_is_reported_and_the_note_stays(
    browser: Browser, game: PagePlatform, bot: str
):
    note = {
        "abc": "The address names bot abc, which is not a model number: choose one here.",
        "99": f"{game.game}/99 cannot play: {game.game} has no model 99.",
    }[bot]
    with open_tab(browser, f"{game.address}&bot={bot}") as tab:
        wait_for(lambda: tab.text("#opponent-note") == note)
        assert tab.page.locator("#opponent").input_value() == (
            "champion" if game.game == "rally" else "you"
        )
        tab.page.click("#quietly")
        tab.page.wait_for_selector("#court[data-place]")
        assert tab.text("#opponent-note") == note
