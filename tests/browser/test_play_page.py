"""Playing on the page: matches by keyboard, stored episodes, new bots, consent and layout."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.browser.browsers import (
    Browser,
    PagePlatform,
    Player,
    Tab,
    episodes_of,
    finish_matches,
    open_tab,
    play_points,
    points,
    stored,
)
from tests.cli.platforms import wait_for
from tests.clients.test_docs_js import RALLY
from tests.serve.gateways import running
from understudy.platform.play_page import page_address
from understudy.ports import MAX_CANARY_SHARE


def assert_no_errors(tab: Tab, platform: PagePlatform) -> None:
    """Assert that the page logged no error and sent requests only to the gateway."""
    assert tab.errors == []
    assert tab.hosts == {urlsplit(platform.url).netloc}


def test_a_match_by_keyboard_is_stored_with_the_person_in_one_seat_and_the_bot_in_the_other(
    browser: Browser, rally: PagePlatform
):
    began_s = time.time()
    bot_name = rally.champion
    with open_tab(browser, rally.address) as tab:
        assert "key" not in tab.page.url
        tab.page.wait_for_selector(f"body[data-bot='{bot_name}']")
        tab.screenshot("rally-welcome")
        tab.page.click("#start")
        player = Player(tab)
        tab.page.check("#thinks")
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 15)
        tab.screenshot("rally-playing")
        assert len(tab.page.query_selector_all("#thoughts tbody tr")) == 3
        finish_matches(player)
        tab.screenshot("rally-over")
        mine, theirs = points(tab)
        assert max(mine, theirs) == 7
        assert f"You {mine}" in (tab.page.get_attribute("#court", "aria-label") or "")
        wait_for(lambda: tab.count("waiting") == 0)
        recorded = tab.count("recorded")
        acked = tab.count("acked")
        assert recorded == acked > 100
        assert_no_errors(tab, rally)
    episodes = episodes_of(rally.chunks(since_s=began_s, steps=acked))
    assert sum(episode.steps for episode in episodes) == acked
    person, bot = ([episode for episode in episodes if episode.seat == seat] for seat in (0, 1))
    assert len({episode.match for episode in episodes}) == 1
    assert len(person) == len(bot) == mine + theirs
    assert {episode.by for episode in person} == {frozenset({"person"})}
    assert {episode.by for episode in bot} == {frozenset({"bot"})}
    assert {episode.model for episode in bot} == {bot_name}
    assert {episode.opponents for episode in person} == {(bot_name,)}
    assert {episode.opponents for episode in bot} == {("person",)}
    assert [episode.result for episode in person].count("win") == mine
    assert [episode.result for episode in bot].count("win") == theirs


def test_a_new_champion_appears_without_a_reload_and_plays_the_next_serve(
    browser: Browser, rally: PagePlatform
):
    before = rally.champion
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector(f"body[data-bot='{before}']")
        tab.page.click("#start")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        assert tab.text("#them") == before
        name = rally.release(seed=3)
        wait_for(lambda: player.look() == "playing" and tab.data("bot") == name)
        assert name in tab.text("#notice")
        tab.screenshot("rally-new-champion")
        wait_for(lambda: player.look() != "playing" or tab.text("#them") == name)
        assert tab.text("#them") == name
        options = tab.page.query_selector_all("#opponent option")
        assert [option.get_attribute("value") for option in options[:2]] == [
            "champion",
            before.replace("rally/", "model "),
        ]
        assert_no_errors(tab, rally)


def test_a_canary_that_plays_a_serve_is_labelled_as_on_trial(browser: Browser, tmp_path: Path):
    """On a gateway of its own: the others' tabs would get the canary, too."""
    small = {"width": 320, "height": 568}
    with running(tmp_path) as gateway:
        gateway.register(RALLY)
        gateway.release(RALLY, "argmax")
        gateway.release(RALLY, "argmax", seed=1, promote=False)
        gateway.registry.set_alias("rally", "canary", 2, why="test", share=MAX_CANARY_SHARE)
        address = page_address(gateway.url, "rally", key=gateway.key("play"))
        with open_tab(browser, address, viewport=small) as tab:
            see_a_canary(tab)


def see_a_canary(tab: Tab) -> None:
    """Play until the canary has a serve."""
    tab.page.wait_for_selector("body[data-bot='rally/1']")
    tab.page.wait_for_selector("#state[data-state=connected]")
    height = tab.page.locator(".score").bounding_box()["height"]
    tab.page.click("#quietly")

    def is_labelled() -> bool:
        if tab.page.get_attribute("body", "data-phase") == "over":
            tab.page.click("#start")
        return tab.text("#them") == "rally/2 (on trial)"

    # The gateway draws the bot of each serve, so a whole match may be the champion's.
    wait_for(is_labelled, timeout_s=200)
    tab.screenshot("rally-canary-320")
    assert tab.page.locator("#opponent option:checked").text_content() == "champion rally/1"
    assert tab.page.locator(".score").bounding_box()["height"] == height, "the court does not move"
    assert tab.page.evaluate(
        "(node => node.scrollHeight <= node.clientHeight + 1)(document.getElementById('them'))"
    )


def test_an_older_model_and_a_script_can_be_chosen(browser: Browser, rally: PagePlatform):
    rally.release(seed=4)
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector("#opponent option[value='model 1']", state="attached")
        tab.page.select_option("#opponent", "model 1")
        tab.page.wait_for_function(
            "document.getElementById('opponent-note').textContent.includes('is ready')"
        )
        tab.page.click("#quietly")
        wait_for(lambda: tab.text("#them") == "rally/1")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        tab.page.select_option("#opponent", "script strong")
        wait_for(lambda: player.look() != "playing" or tab.text("#them") == "strong script")
        assert tab.text("#them") == "strong script"
        assert_no_errors(tab, rally)


def test_without_consent_nothing_is_recorded(browser: Browser, rally: PagePlatform):
    began_s = time.time()
    with open_tab(browser, rally.address) as tab:
        sent: list[str] = []
        tab.page.on(
            "request",
            lambda request: sent.append(request.url) if request.method == "POST" else None,
        )
        tab.page.click("#quietly")
        play_points(Player(tab))
        assert (tab.count("recorded"), tab.count("acked"), tab.count("waiting")) == (0, 0, 0)
        assert tab.data("recording") == "false"
        assert sent == []
        # The choice is stored for the next visit of this browser.
        tab.page.reload()
        tab.page.wait_for_selector("body[data-phase=ready]")
        assert not tab.page.is_checked("#consent")
        assert tab.page.is_hidden("#quietly")
        assert_no_errors(tab, rally)
    assert stored(rally.up.data, since_s=began_s) == []


def test_withdrawing_consent_during_a_serve_stops_recording_at_once(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        tab.page.click("#start")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        assert tab.data("recording") == "true"
        tab.page.uncheck("#consent")
        assert tab.data("recording") == "false"
        recorded = tab.count("recorded")
        before = len(player.positions)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > before + 10)
        assert tab.count("recorded") <= recorded
        assert_no_errors(tab, rally)


def test_consent_withdrawn_in_another_tab_takes_effect_at_once(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, rally.address, own_context=True) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.click("#start")
        wait_for(lambda: tab.data("recording") == "true")
        other = tab.page.context.new_page()
        other.goto(rally.address)
        other.wait_for_selector("body[data-phase=ready]")
        assert other.is_checked("#consent")
        other.uncheck("#consent")
        wait_for(lambda: tab.data("recording") == "false")
        assert not tab.page.is_checked("#consent")
        # Without a stored answer, resuming does not give consent: only the consent button does.
        tab.page.keyboard.press("Escape")
        other.evaluate("localStorage.clear()")
        tab.page.click("#start")
        wait_for(lambda: tab.data("phase") == "playing")
        assert not tab.page.is_checked("#consent")
        assert_no_errors(tab, rally)


def test_a_failing_bot_is_reported_and_a_script_plays_the_serve(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, f"{rally.url}/play") as tab:

        def break_bot(route: Any) -> None:
            body = (
                route.fetch()
                .text()
                .replace("seen = [...seen", 'throw new Error("broken"); seen = [...seen')
            )
            route.fulfill(body=body, content_type="text/javascript")

        tab.page.route("**/static/opponents.js", break_bot)
        tab.visit(rally.address)
        tab.page.wait_for_selector("body[data-bot^='rally/']")
        tab.page.click("#start")
        tab.page.wait_for_selector("#notice:not([hidden])")
        assert "broken" in tab.text("#notice")
        assert "casual script plays this serve" in tab.text("#notice")
        assert (tab.text("#them"), tab.data("recording")) == ("casual script", "false")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 5)


def test_a_page_without_a_key_plays_and_shows_the_next_step(browser: Browser, rally: PagePlatform):
    with open_tab(browser, f"{rally.url}/play") as tab:
        assert tab.data("phase") == "ready"
        assert "understudy play rally --web" in tab.text("#sending")
        tab.page.keyboard.press("Space")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        tab.page.keyboard.press("Escape")
        assert tab.data("phase") == "paused"
        assert_no_errors(tab, rally)


def test_a_game_without_a_page_is_reported_in_words(browser: Browser, rally: PagePlatform):
    with open_tab(browser, f"{rally.url}/play#game=chess&key={rally.key}") as tab:
        assert tab.text("#message") == "There is no page for chess"
        tab.page.keyboard.press("Space")
        assert tab.data("phase") == "ready"
        assert_no_errors(tab, rally)


def hold(tab: Tab, selector: str, height: float, is_reached: Callable[[int], bool]) -> None:
    """Press an element at this relative height until the person's paddle is in position."""
    tab.page.locator(selector).scroll_into_view_if_needed()
    box = tab.page.locator(selector).bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] * height)
    tab.page.mouse.down()
    wait_for(
        lambda: is_reached(int(str(tab.page.get_attribute("#court", "data-place")).split()[2]))
    )
    tab.page.mouse.up()


def background(tab: Tab) -> str:
    return str(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_page_fits_a_small_phone_in_light_and_dark_and_is_played_by_touch(
    browser: Browser, rally: PagePlatform
):
    phone: dict[str, Any] = {
        "viewport": {"width": 360, "height": 740},
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
        "reduced_motion": "reduce",
    }
    with open_tab(browser, rally.address, **phone) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        backgrounds = set()
        for scheme in ("light", "dark"):
            tab.page.emulate_media(color_scheme=scheme)
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
            tab.screenshot(f"rally-phone-{scheme}-welcome")
            backgrounds.add(background(tab))
        assert len(backgrounds) == 2
        tab.page.tap("#start")
        tab.page.check("#thinks")
        assert tab.page.is_visible("#minus")
        wait_for(lambda: bool(tab.page.get_attribute("#court", "data-place")))
        hold(tab, "#court", 0.05, lambda own: own < 1000)
        for scheme in ("light", "dark"):
            tab.page.emulate_media(color_scheme=scheme)
            tab.screenshot(f"rally-phone-{scheme}")
        hold(tab, "#plus", 0.5, lambda own: own > 1800)
        hold(tab, "#minus", 0.5, lambda own: own < 1200)
        tab.page.evaluate("scrollTo(0, 9999)")
        tab.screenshot("rally-phone-below")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert_no_errors(tab, rally)


def test_the_page_fits_a_phone_in_landscape_orientation(browser: Browser, rally: PagePlatform):
    phone = {"has_touch": True, "is_mobile": True}
    viewport = {"width": 740, "height": 360}
    with open_tab(browser, rally.address, viewport=viewport, **phone) as tab:
        tab.screenshot("rally-landscape")
        stage_box, court, quietly = (
            tab.page.locator(selector).bounding_box()
            for selector in ("#stage", "#court", "#quietly")
        )
        assert court["height"] <= 360 - 8 * 16 + 1
        assert abs(court["width"] / court["height"] - 4 / 3) < 0.02
        assert abs(2 * court["x"] + court["width"] - 740) < 4, "centred"
        assert quietly["y"] + quietly["height"] <= stage_box["y"] + stage_box["height"], (
            "nothing is cut off"
        )
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 740


def test_the_page_works_in_dark_mode_on_a_desktop(browser: Browser, rally: PagePlatform):
    with open_tab(browser, rally.address) as tab:
        light = background(tab)
        tab.page.emulate_media(color_scheme="dark")
        assert background(tab) != light
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.click("#start")
        tab.page.check("#thinks")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 15)
        tab.screenshot("rally-dark")
        assert_no_errors(tab, rally)


def test_every_control_is_reached_by_keyboard_with_a_visible_focus(
    browser: Browser, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        reached = []
        for _ in range(12):
            tab.page.keyboard.press("Tab")
            name, width = tab.page.evaluate(
                "() => [document.activeElement.id, "
                "getComputedStyle(document.activeElement).outlineWidth]"
            )
            reached.append(name)
            if name:
                assert width == "3px", name
        assert {"court", "start", "quietly", "opponent", "consent", "thinks"} <= set(reached)
        assert_no_errors(tab, rally)


def test_cartpole_is_played_by_the_person_and_recorded(browser: Browser, cartpole: PagePlatform):
    began_s = time.time()
    with open_tab(browser, cartpole.address) as tab:
        tab.page.wait_for_selector("body[data-bot='CartPole-v1/1']")
        tab.page.click("#start")
        tab.page.keyboard.press("ArrowLeft")
        wait_for(lambda: tab.data("phase") == "over")
        tab.screenshot("cartpole-over")
        steps = int(tab.text("#score"))
        assert steps >= 5
        tab.page.select_option("#opponent", "champion")
        tab.page.check("#thinks")
        tab.page.click("#start")
        wait_for(lambda: tab.data("phase") == "over")
        tab.screenshot("cartpole-bot")
        wait_for(
            lambda: tab.count("acked") == tab.count("recorded") == steps + int(tab.text("#score"))
        )
        episodes = episodes_of(cartpole.chunks(since_s=began_s, steps=tab.count("acked")))
        assert [(episode.by, episode.model) for episode in episodes] == [
            (frozenset({"person"}), None),
            (frozenset({"bot"}), "CartPole-v1/1"),
        ]
        assert episodes[0].result == steps
        assert_no_errors(tab, cartpole)
