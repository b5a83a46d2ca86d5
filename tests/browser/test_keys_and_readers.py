"""Whoever plays by keyboard alone, or hears the page read out: where the focus goes, what is
said and what is not."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.browsers import Stage, Tab, stage, tab
from tests.cli.platforms import wait_for

LISTEN = """() => {
  window.heard = [];
  const regions = document.querySelectorAll("[role=status], [aria-live=polite]");
  for (const region of regions) {
    new MutationObserver(() => window.heard.push([region.id, region.textContent.trim()]))
      .observe(region, { childList: true, characterData: true, subtree: true });
  }
}"""
"""What a reader would say: every change of a region that is read out."""

IS_THERE = """(id) => {
  for (let one = document.getElementById(id); one; one = one.parentElement) {
    const { display, visibility } = getComputedStyle(one);
    if (display === "none" || visibility === "hidden" || one.ariaHidden === "true") return false;
  }
  return true;
}"""


@pytest.fixture(scope="module")
def rally(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("rally")) as found:
        yield found


@pytest.fixture(scope="module")
def cartpole(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An attempt is over in a second or two, however it is played."""
    with stage(tmp_path_factory.mktemp("cartpole"), "CartPole-v1") as found:
        yield found


def focus(seen: Tab) -> str:
    return str(seen.page.evaluate("document.activeElement.id"))


def heard(seen: Tab, region: str) -> list[str]:
    return [text for name, text in seen.page.evaluate("window.heard") if name == region and text]


def tab_to(seen: Tab, wanted: str) -> None:
    for _ in range(12):
        seen.page.keyboard.press("Tab")
        if focus(seen) == wanted:
            return
    raise AssertionError(f"{wanted} is not reached by the tab key")


def test_by_keyboard_alone_a_match_is_begun_paused_and_gone_on_with(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        # The space key alone gives no consent: it only leads to the button that says what it means.
        seen.page.keyboard.press("Space")
        assert (seen.fact("phase"), focus(seen)) == ("ready", "start")
        assert not seen.page.is_checked("#consent")
        seen.page.keyboard.press("Tab")
        assert focus(seen) == "quietly"
        seen.page.keyboard.press("Enter")
        assert (seen.fact("phase"), focus(seen)) == ("playing", "court")
        seen.page.keyboard.press("Escape")
        assert (seen.fact("phase"), focus(seen)) == ("paused", "court")
        tab_to(seen, "start")
        seen.page.keyboard.press("Enter")
        assert (seen.fact("phase"), focus(seen)) == ("playing", "court")
        # Whoever is at a switch stays there, and its keys are its own.
        tab_to(seen, "thinks")
        seen.page.keyboard.press("Space")
        assert (seen.fact("phase"), focus(seen)) == ("playing", "thinks")
        assert seen.page.is_checked("#thinks")
        seen.page.keyboard.press("Escape")
        assert (seen.fact("phase"), focus(seen)) == ("playing", "thinks")
        assert seen.errors == []


def test_the_focus_is_never_lost_and_goes_to_the_button_only_from_the_court(
    browser: Any, cartpole: Stage
):
    with tab(browser, cartpole.address) as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.page.focus("#start")
        seen.page.keyboard.press("Enter")
        assert focus(seen) == "court"
        wait_for(lambda: seen.fact("phase") == "over")
        assert focus(seen) == "start"
        seen.page.keyboard.press("Enter")
        assert (seen.fact("phase"), focus(seen)) == ("playing", "court")
        seen.page.focus("#opponent")
        wait_for(lambda: seen.fact("phase") == "over")
        assert focus(seen) == "opponent"


def test_what_happens_is_said_once_and_counts_are_not(browser: Any, cartpole: Stage):
    with tab(browser, cartpole.address) as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.page.evaluate(LISTEN)
        seen.page.click("#start")
        seen.page.keyboard.press("Escape")
        assert heard(seen, "said") == ["Paused"]
        seen.page.keyboard.press("Escape")
        seen.page.keyboard.press("Escape")
        assert heard(seen, "said") == ["Paused", "Paused"]
        seen.page.keyboard.press("Escape")
        wait_for(lambda: seen.fact("phase") == "over")
        over = heard(seen, "said")[-1]
        assert "kept the pole" in over.lower()
        assert ".." not in over
        assert len(heard(seen, "said")) == 3
        wait_for(lambda: seen.count("acked") > 0)
        assert heard(seen, "score") == [], "hundreds of steps are not counted aloud"
        for counted in ("recorded", "acked", "waiting", "held", "thinker"):
            region = (
                f"document.getElementById('{counted}').closest('[role=status], [aria-live=polite]')"
            )
            assert seen.page.evaluate(f"{region} === null"), counted


def test_a_new_champion_a_model_that_comes_and_a_lost_platform_are_said(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("body[data-bot^='rally/']")
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.page.evaluate(LISTEN)
        name = rally.release(seed=5)
        wait_for(lambda: seen.fact("bot") == name)
        assert [text for text in heard(seen, "said") if name in text] == [
            f"{name} is the new champion; it plays from the next serve"
        ]
        seen.page.select_option("#opponent", "model 1")
        wait_for(lambda: any("rally/1 is ready" in text for text in heard(seen, "opponent-note")))
        seen.page.context.set_offline(True)
        wait_for(lambda: "offline" in heard(seen, "stand"))
        seen.page.context.set_offline(False)
        wait_for(lambda: heard(seen, "stand")[-1] == "connected")
        assert heard(seen, "stand") == ["offline", "connected"]


def test_why_no_bot_can_play_is_said_once_and_stands(browser: Any, rally: Stage):
    with tab(browser, f"{rally.url}/play") as seen:
        seen.page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined })")
        seen.page.goto("about:blank")
        seen.page.goto(rally.address)
        wait_for(lambda: seen.text("#opponent-note").startswith("No bot can play here: no_crypto"))
        seen.page.evaluate(LISTEN)
        seen.page.click("#quietly")
        wait_for(lambda: bool(seen.page.get_attribute("#court", "data-place")))
        seen.page.wait_for_timeout(600)  # the page looks four times a second
        assert seen.text("#opponent-note").startswith("No bot can play here: no_crypto")
        assert heard(seen, "opponent-note") == []
        seen.page.select_option("#opponent", "script strong")
        seen.page.wait_for_timeout(600)
        assert heard(seen, "opponent-note") == ["From the next serve on."]


def test_a_region_that_is_read_out_is_there_before_it_says_anything(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        for region in ("said", "stand", "score", "opponent-note"):
            assert seen.page.evaluate(IS_THERE, region), region
        seen.page.click("#quietly")
        for region in ("said", "stand", "score", "opponent-note"):
            assert seen.page.evaluate(IS_THERE, region), region
        box = seen.page.locator("#said").bounding_box()
        assert box is not None
        assert max(box["width"], box["height"]) <= 1, "read out, not shown"


def test_every_control_says_what_it_is(browser: Any, rally: Stage):
    phone = {"has_touch": True, "is_mobile": True, "viewport": {"width": 400, "height": 800}}
    with tab(browser, rally.address, **phone) as seen:
        for role, name in (
            ("switch", "My games teach the bot"),
            ("switch", "Show what the bot thinks"),
            ("combobox", "Play against"),
            ("button", "Play and teach the bot"),
            ("button", "Play, and record nothing"),
            ("button", "Pause"),
            ("button", "up"),
            ("button", "down"),
            ("heading", "understudy rally"),
            ("main", ""),
            ("complementary", "Settings"),
            ("region", "The game"),
        ):
            found = (
                seen.page.get_by_role(role, name=name, exact=True)
                if name
                else seen.page.get_by_role(role)
            )
            assert found.count() == 1, (role, name)
        court = seen.page.get_by_role("application")
        assert "the first to 7 points wins" in str(court.get_attribute("aria-label"))
        assert "left paddle" in str(seen.page.text_content("#keys"))
