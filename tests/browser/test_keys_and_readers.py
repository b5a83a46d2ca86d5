"""Keyboard-only play and screen readers: where the focus is, and what is announced."""

from tests.browser.browsers import Browser, PagePlatform, Tab, open_tab
from tests.cli.platforms import wait_for

LISTEN = """() => {
  window.announced = [];
  const regions = document.querySelectorAll("[role=status], [aria-live=polite]");
  for (const region of regions) {
    new MutationObserver(() => window.announced.push([region.id, region.textContent.trim()]))
      .observe(region, { childList: true, characterData: true, subtree: true });
  }
}"""
"""Records what a screen reader would announce: every change of a live region."""

FOLLOW_FOCUS = """() => {
  window.focused = [];
  document.addEventListener("focusin", (event) => window.focused.push(event.target.id));
}"""

LEAVE_THE_COURT = """() => {
  const leave = () => setTimeout(() => document.getElementById("opponent").focus());
  document.getElementById("court").addEventListener("focus", leave, { once: true });
}"""
"""Runs in the page: an attempt may be over before the test's next command arrives."""

IS_EXPOSED = """(id) => {
  for (let node = document.getElementById(id); node; node = node.parentElement) {
    const { display, visibility } = getComputedStyle(node);
    if (display === "none" || visibility === "hidden" || node.ariaHidden === "true") return false;
  }
  return true;
}"""


def focus(tab: Tab) -> str:
    return str(tab.page.evaluate("document.activeElement.id"))


def announced(tab: Tab, region: str) -> list[str]:
    return [text for name, text in tab.page.evaluate("window.announced") if name == region and text]


def tab_to(tab: Tab, control: str) -> None:
    for _ in range(12):
        tab.page.keyboard.press("Tab")
        if focus(tab) == control:
            return
    raise AssertionError(f"{control} is not reached by the tab key")


def test_a_match_is_started_paused_and_resumed_by_keyboard_alone(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        # The space key does not give consent: it only focuses the button that explains it.
        tab.page.keyboard.press("Space")
        assert (tab.data("phase"), focus(tab)) == ("ready", "start")
        assert not tab.page.is_checked("#consent")
        tab.page.keyboard.press("Tab")
        assert focus(tab) == "quietly"
        tab.page.keyboard.press("Enter")
        assert (tab.data("phase"), focus(tab)) == ("playing", "court")
        tab.page.keyboard.press("Escape")
        assert (tab.data("phase"), focus(tab)) == ("paused", "court")
        tab_to(tab, "start")
        tab.page.keyboard.press("Enter")
        assert (tab.data("phase"), focus(tab)) == ("playing", "court")
        # A focused switch keeps the focus, and its keys do not control the game.
        tab_to(tab, "thinks")
        tab.page.keyboard.press("Space")
        assert (tab.data("phase"), focus(tab)) == ("playing", "thinks")
        assert tab.page.is_checked("#thinks")
        tab.page.keyboard.press("Escape")
        assert (tab.data("phase"), focus(tab)) == ("playing", "thinks")
        assert tab.errors == []


def test_the_focus_is_never_lost_and_moves_to_the_button_only_from_the_court(
    browser: Browser, cartpole: PagePlatform
):
    with open_tab(browser, cartpole.address) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.focus("#start")
        tab.page.evaluate(FOLLOW_FOCUS)
        tab.page.keyboard.press("Enter")
        wait_for(lambda: tab.data("phase") == "over")
        assert tab.page.evaluate("window.focused") == ["court", "start"]
        tab.page.evaluate(LEAVE_THE_COURT)
        tab.page.keyboard.press("Enter")
        wait_for(lambda: tab.page.evaluate("window.focused.length") == 4)
        wait_for(lambda: tab.data("phase") == "over")
        assert tab.page.evaluate("window.focused") == ["court", "start", "court", "opponent"]
        assert focus(tab) == "opponent"


def test_each_pause_is_announced_once(browser: Browser, rally: PagePlatform):
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.evaluate(LISTEN)
        tab.page.click("#start")
        tab.page.keyboard.press("Escape")
        assert announced(tab, "said") == ["Paused"]
        tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("Escape")
        assert announced(tab, "said") == ["Paused", "Paused"]


def test_the_end_of_an_attempt_is_announced_once_and_counts_are_not(
    browser: Browser, cartpole: PagePlatform
):
    with open_tab(browser, cartpole.address) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.evaluate(LISTEN)
        tab.page.click("#start")
        wait_for(lambda: tab.data("phase") == "over")
        (over,) = announced(tab, "said")
        assert "kept the pole" in over.lower()
        assert ".." not in over
        wait_for(lambda: tab.count("acked") > 0)
        assert announced(tab, "said") == [over]
        assert announced(tab, "score") == [], "steps are not announced"
        for counted in ("recorded", "acked", "waiting", "held", "thinker"):
            region = (
                f"document.getElementById('{counted}').closest('[role=status], [aria-live=polite]')"
            )
            assert tab.page.evaluate(f"{region} === null"), counted


def test_a_new_champion_a_loaded_model_and_a_lost_platform_are_announced(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector("body[data-bot^='rally/']")
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.evaluate(LISTEN)
        name = rally.release(seed=5)
        wait_for(lambda: tab.data("bot") == name)
        assert [text for text in announced(tab, "said") if name in text] == [
            f"{name} is the new champion; it plays from the next serve"
        ]
        tab.page.select_option("#opponent", "model 1")
        wait_for(
            lambda: any("rally/1 is ready" in text for text in announced(tab, "opponent-note"))
        )
        tab.page.context.set_offline(True)
        wait_for(lambda: "offline" in announced(tab, "stand"))
        tab.page.context.set_offline(False)
        wait_for(lambda: announced(tab, "stand")[-1] == "connected")
        assert announced(tab, "stand") == ["offline", "connected"]


def test_the_reason_why_no_bot_can_play_is_announced_once_and_stays(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, f"{rally.url}/play", own_context=True) as tab:
        tab.page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined })")
        tab.visit(rally.address)
        wait_for(lambda: tab.text("#opponent-note").startswith("No bot can play here: no_crypto"))
        tab.page.evaluate(LISTEN)
        tab.page.click("#quietly")
        wait_for(lambda: bool(tab.page.get_attribute("#court", "data-place")))
        tab.page.wait_for_timeout(600)  # the page updates four times a second
        assert tab.text("#opponent-note").startswith("No bot can play here: no_crypto")
        assert announced(tab, "opponent-note") == []
        tab.page.select_option("#opponent", "script strong")
        tab.page.wait_for_timeout(600)
        assert announced(tab, "opponent-note") == ["From the next serve on."]


def test_live_regions_exist_before_they_have_text(browser: Browser, rally: PagePlatform):
    with open_tab(browser, rally.address) as tab:
        for region in ("said", "stand", "score", "opponent-note"):
            assert tab.page.evaluate(IS_EXPOSED, region), region
        tab.page.click("#quietly")
        for region in ("said", "stand", "score", "opponent-note"):
            assert tab.page.evaluate(IS_EXPOSED, region), region
        box = tab.page.locator("#said").bounding_box()
        assert box is not None
        assert max(box["width"], box["height"]) <= 1, "announced, not shown"


def test_every_control_has_a_role_and_a_name(browser: Browser, rally: PagePlatform):
    phone = {"has_touch": True, "is_mobile": True}
    viewport = {"width": 400, "height": 800}
    with open_tab(browser, rally.address, viewport=viewport, **phone) as tab:
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
            controls = (
                tab.page.get_by_role(role, name=name, exact=True)
                if name
                else tab.page.get_by_role(role)
            )
            assert controls.count() == 1, (role, name)
        court = tab.page.get_by_role("application")
        assert "the first to 7 points wins" in str(court.get_attribute("aria-label"))
        assert "left paddle" in str(tab.page.text_content("#keys"))
