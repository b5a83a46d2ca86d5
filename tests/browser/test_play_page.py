"""Playing on the page: matches by keyboard, stored episodes, new bots, consent and layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.browsers import (
    PagePlatform,
    Player,
    Tab,
    episodes_of,
    finish_matches,
    open_tab,
    play_points,
    points,
    run_platform,
    stored,
)
from tests.cli.platforms import wait_for
from understudy.ports import MAX_CANARY_SHARE


@pytest.fixture(scope="module")
def rally(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagePlatform]:
    with run_platform(tmp_path_factory.mktemp("rally")) as platform:
        yield platform


def assert_no_errors(tab: Tab, platform: PagePlatform) -> None:
    """Assert that the page logged no error and sent requests only to the gateway."""
    assert tab.errors == []
    assert tab.hosts == {urlsplit(platform.url).netloc}


def test_a_match_by_keyboard_is_stored_with_the_person_in_one_seat_and_the_bot_in_the_other(
    browser: Any, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        assert "key" not in tab.page.url
        tab.page.wait_for_selector("body[data-bot='rally/1']")
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
    episodes = episodes_of(rally.chunks(steps=acked))
    assert sum(episode.steps for episode in episodes) == acked
    person, bot = ([episode for episode in episodes if episode.seat == seat] for seat in (0, 1))
    assert len({episode.match for episode in episodes}) == 1
    assert len(person) == len(bot) == mine + theirs
    assert {episode.by for episode in person} == {frozenset({"person"})}
    assert {episode.by for episode in bot} == {frozenset({"bot"})}
    assert {episode.model for episode in bot} == {"rally/1"}
    assert {episode.opponents for episode in person} == {("rally/1",)}
    assert {episode.opponents for episode in bot} == {("person",)}
    assert [episode.result for episode in person].count("win") == mine
    assert [episode.result for episode in bot].count("win") == theirs


def test_a_new_champion_appears_without_a_reload_and_plays_the_next_serve(
    browser: Any, rally: PagePlatform
):
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector("body[data-bot='rally/1']")
        tab.page.click("#start")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        assert tab.text("#them") == "rally/1"
        name = rally.release(seed=3)
        wait_for(lambda: player.look() == "playing" and tab.data("bot") == name)
        assert name in tab.text("#notice")
        tab.screenshot("rally-new-champion")
        wait_for(lambda: player.look() != "playing" or tab.text("#them") == name)
        assert tab.text("#them") == name
        options = tab.page.query_selector_all("#opponent option")
        assert [option.get_attribute("value") for option in options[:2]] == ["champion", "model 1"]
        assert_no_errors(tab, rally)


def test_a_canary_that_plays_a_serve_is_labelled_as_on_trial(browser: Any, tmp_path: Path):
    small = {"viewport": {"width": 320, "height": 568}}
    with run_platform(tmp_path) as rally, open_tab(browser, f"{rally.url}/play", **small) as tab:
        registry = rally.deployment.registry
        (spec,) = rally.specs()
        rally.release(seed=1)
        registry.set_alias(spec.game, "champion", 1, why="test")
        registry.set_alias(spec.game, "canary", 2, why="test", share=MAX_CANARY_SHARE)
        tab.page.goto("about:blank")
        tab.page.goto(rally.address)
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
        assert tab.page.locator(".score").bounding_box()["height"] == height, (
            "the court does not move"
        )
        assert tab.page.evaluate(
            "(node => node.scrollHeight <= node.clientHeight + 1)(document.getElementById('them'))"
        )


def test_an_older_model_and_a_script_can_be_chosen(browser: Any, rally: PagePlatform):
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


def test_without_consent_nothing_is_recorded(browser: Any, rally: PagePlatform):
    before = len(stored(rally.up.data))
    with open_tab(browser, rally.address) as tab:
        sent: list[str] = []
        tab.page.on(
            "request",
            lambda request: sent.append(request.url) if request.method == "POST" else None,
        )
        tab.page.click("#quietly")
        play_points(Player(tab), points_more=2)
        assert (tab.count("recorded"), tab.count("acked"), tab.count("waiting")) == (0, 0, 0)
        assert tab.data("recording") == "false"
        assert sent == []
        # The choice is stored for the next visit of this browser.
        tab.page.reload()
        tab.page.wait_for_selector("body[data-phase=ready]")
        assert not tab.page.is_checked("#consent")
        assert tab.page.is_hidden("#quietly")
        assert_no_errors(tab, rally)
    assert len(stored(rally.up.data)) == before


def test_withdrawing_consent_during_a_serve_stops_recording_at_once(
    browser: Any, rally: PagePlatform
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


def test_consent_withdrawn_in_another_tab_takes_effect_at_once(browser: Any, rally: PagePlatform):
    with open_tab(browser, rally.address) as tab:
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


def test_a_failing_bot_is_reported_and_a_script_plays_the_serve(browser: Any, rally: PagePlatform):
    with open_tab(browser, f"{rally.url}/play") as tab:

        def break_bot(route: Any) -> None:
            body = (
                route.fetch()
                .text()
                .replace("seen = [...seen", 'throw new Error("broken"); seen = [...seen')
            )
            route.fulfill(body=body, content_type="text/javascript")

        tab.page.route("**/static/opponents.js", break_bot)
        tab.page.goto("about:blank")
        tab.page.goto(rally.address)
        tab.page.wait_for_selector("body[data-bot^='rally/']")
        tab.page.click("#start")
        tab.page.wait_for_selector("#notice:not([hidden])")
        assert "broken" in tab.text("#notice")
        assert "casual script plays this serve" in tab.text("#notice")
        assert (tab.text("#them"), tab.data("recording")) == ("casual script", "false")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 5)


def test_a_page_without_a_key_plays_and_shows_the_next_step(browser: Any, rally: PagePlatform):
    with open_tab(browser, f"{rally.url}/play") as tab:
        assert tab.data("phase") == "ready"
        assert "understudy play rally --web" in tab.text("#sending")
        tab.page.keyboard.press("Space")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
        tab.page.keyboard.press("Escape")
        assert tab.data("phase") == "paused"
        assert_no_errors(tab, rally)


def test_a_game_without_a_page_is_reported_in_words(browser: Any, rally: PagePlatform):
    with open_tab(browser, f"{rally.url}/play#game=chess&key={rally.key}") as tab:
        assert tab.text("#message") == "There is no page for chess"
        tab.page.keyboard.press("Space")
        assert tab.data("phase") == "ready"
        assert_no_errors(tab, rally)


def test_an_unknown_key_is_reported_in_words(browser: Any, rally: PagePlatform):
    with open_tab(browser, rally.address[:-4] + "AAAA") as tab:
        wait_for(lambda: tab.page.get_attribute("#state", "data-state") == "refused")
        assert "not a key of this deployment" in tab.text("#sending")
        # The browser itself logs the rejected request; the page logs no other error.
        assert all("401" in error for error in tab.errors)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_small_phone_and_is_played_by_touch(
    browser: Any, rally: PagePlatform, scheme: str
):
    phone = {
        "viewport": {"width": 360, "height": 740},
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    with open_tab(browser, rally.address, **phone) as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        tab.screenshot(f"rally-phone-{scheme}-welcome")
        tab.page.tap("#start")
        tab.page.check("#thinks")
        assert tab.page.is_visible("#minus")
        wait_for(lambda: bool(tab.page.get_attribute("#court", "data-place")))
        hold(tab, "#court", 0.05, lambda own: own < 1000)
        tab.screenshot(f"rally-phone-{scheme}")
        hold(tab, "#plus", 0.5, lambda own: own > 1800)
        hold(tab, "#minus", 0.5, lambda own: own < 1200)
        tab.page.evaluate("scrollTo(0, 9999)")
        tab.screenshot(f"rally-phone-{scheme}-below")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert_no_errors(tab, rally)


def test_the_page_fits_a_phone_in_landscape_orientation(browser: Any, rally: PagePlatform):
    phone = {"viewport": {"width": 740, "height": 360}, "has_touch": True, "is_mobile": True}
    with open_tab(browser, rally.address, **phone) as tab:
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


def test_the_page_works_in_dark_mode_on_a_desktop(browser: Any, rally: PagePlatform):
    with open_tab(browser, rally.address, color_scheme="dark") as tab:
        tab.page.wait_for_selector("#state[data-state=connected]")
        tab.page.click("#start")
        tab.page.check("#thinks")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and len(player.positions) > 15)
        tab.screenshot("rally-dark")
        assert_no_errors(tab, rally)


def test_every_control_is_reached_by_keyboard_with_a_visible_focus(
    browser: Any, rally: PagePlatform
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


def test_cartpole_is_played_by_the_person_and_recorded(browser: Any, tmp_path: Path):
    with (
        run_platform(tmp_path, "CartPole-v1") as cartpole,
        open_tab(browser, cartpole.address) as tab,
    ):
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
        episodes = episodes_of(cartpole.chunks(steps=tab.count("acked")))
        assert [(episode.by, episode.model) for episode in episodes] == [
            (frozenset({"person"}), None),
            (frozenset({"bot"}), "CartPole-v1/1"),
        ]
        assert episodes[0].result == steps
        assert_no_errors(tab, cartpole)
