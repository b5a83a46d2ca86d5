"""People play on the page: a whole match by keyboard, what is stored of it, new bots, consent,
and how it looks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.browsers import (
    Player,
    Stage,
    Tab,
    episodes_of,
    play_on,
    play_out,
    points,
    stage,
    stored,
    tab,
)
from tests.cli.platforms import wait_for


@pytest.fixture(scope="module")
def rally(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("rally")) as found:
        yield found


def is_sound(seen: Tab, rally: Stage) -> bool:
    """Nothing went wrong in the page, and nothing was asked of anybody but the gateway."""
    assert seen.errors == []
    assert seen.hosts == {urlsplit(rally.url).netloc}
    return True


def test_a_match_by_keyboard_is_stored_with_the_person_in_one_seat_and_the_bot_in_the_other(
    browser: Any, rally: Stage
):
    with tab(browser, rally.address) as seen:
        assert "key" not in seen.page.url
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.shoot("rally-welcome")
        seen.page.click("#start")
        player = Player(seen)
        seen.page.check("#thinks")
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 15)
        seen.shoot("rally-playing")
        assert len(seen.page.query_selector_all("#thoughts tbody tr")) == 3
        play_out(player)
        seen.shoot("rally-over")
        mine, theirs = points(seen)
        assert max(mine, theirs) == 7
        assert f"You {mine}" in (seen.page.get_attribute("#court", "aria-label") or "")
        wait_for(lambda: seen.count("waiting") == 0)
        recorded = seen.count("recorded")
        acked = seen.count("acked")
        assert recorded == acked > 100
        assert is_sound(seen, rally)
    episodes = episodes_of(rally.chunks(steps=acked))
    assert sum(one.steps for one in episodes) == acked
    person, bot = ([one for one in episodes if one.seat == seat] for seat in (0, 1))
    assert len({one.match for one in episodes}) == 1
    assert len(person) == len(bot) == mine + theirs
    assert {one.by for one in person} == {frozenset({"person"})}
    assert {one.by for one in bot} == {frozenset({"bot"})}
    assert {one.model for one in bot} == {"rally/1"}
    assert {one.opponents for one in person} == {("rally/1",)}
    assert {one.opponents for one in bot} == {("person",)}
    assert [one.result for one in person].count("win") == mine
    assert [one.result for one in bot].count("win") == theirs


def test_a_new_champion_appears_without_a_reload_and_plays_the_next_serve(
    browser: Any, rally: Stage
):
    with tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.page.click("#start")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 3)
        assert seen.text("#them") == "rally/1"
        name = rally.release(seed=3)
        wait_for(lambda: player.look() == "playing" and seen.fact("bot") == name)
        assert name in seen.text("#notice")
        seen.shoot("rally-new-champion")
        wait_for(lambda: player.look() != "playing" or seen.text("#them") == name)
        assert seen.text("#them") == name
        assert [
            one.get_attribute("value") for one in seen.page.query_selector_all("#opponent option")
        ][:2] == ["champion", "model 1"]
        assert is_sound(seen, rally)


def test_a_canary_that_plays_a_serve_says_that_it_is_on_trial(browser: Any, tmp_path: Path):
    small = {"viewport": {"width": 320, "height": 568}}
    with stage(tmp_path) as found, tab(browser, f"{found.url}/play", **small) as seen:
        registry = found.deployment.registry
        (spec,) = found.specs()
        found.release(seed=1)
        registry.set_alias(spec.game, "champion", 1, why="test")
        registry.set_alias(spec.game, "canary", 2, why="test")
        seen.page.add_init_script(
            "Math.random = () => 0.1"
        )  # every serve is among those that the canary gets
        seen.page.goto("about:blank")
        seen.page.goto(found.address)
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.page.wait_for_selector("#state[data-state=connected]")
        height = seen.page.locator(".score").bounding_box()["height"]
        seen.page.click("#quietly")
        wait_for(lambda: seen.text("#them") == "rally/2 (on trial)")
        seen.shoot("rally-canary-320")
        assert seen.page.locator("#opponent option:checked").text_content() == "champion rally/1"
        assert seen.page.locator(".score").bounding_box()["height"] == height, (
            "the court does not jump"
        )
        assert seen.page.evaluate(
            "(one => one.scrollHeight <= one.clientHeight + 1)(document.getElementById('them'))"
        )


def test_an_older_model_and_a_script_can_be_chosen(browser: Any, rally: Stage):
    rally.release(seed=4)
    with tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("#opponent option[value='model 1']", state="attached")
        seen.page.select_option("#opponent", "model 1")
        seen.page.wait_for_function(
            "document.getElementById('opponent-note').textContent.includes('is ready')"
        )
        seen.page.click("#quietly")
        wait_for(lambda: seen.text("#them") == "rally/1")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 3)
        seen.page.select_option("#opponent", "script strong")
        wait_for(lambda: player.look() != "playing" or seen.text("#them") == "strong script")
        assert seen.text("#them") == "strong script"
        assert is_sound(seen, rally)


def test_without_consent_nothing_is_recorded_at_all(browser: Any, rally: Stage):
    before = len(stored(rally.up.data))
    with tab(browser, rally.address) as seen:
        sent: list[str] = []
        seen.page.on(
            "request",
            lambda request: sent.append(request.url) if request.method == "POST" else None,
        )
        seen.page.click("#quietly")
        play_on(Player(seen), points_more=2)
        assert (seen.count("recorded"), seen.count("acked"), seen.count("waiting")) == (0, 0, 0)
        assert seen.fact("recording") == "false"
        assert sent == []
        # The choice is kept for the next visit of this browser.
        seen.page.reload()
        seen.page.wait_for_selector("body[data-phase=ready]")
        assert not seen.page.is_checked("#consent")
        assert seen.page.is_hidden("#quietly")
        assert is_sound(seen, rally)
    assert len(stored(rally.up.data)) == before


def test_switching_consent_off_in_a_serve_stops_at_once(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        seen.page.click("#start")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 3)
        assert seen.fact("recording") == "true"
        seen.page.uncheck("#consent")
        assert seen.fact("recording") == "false"
        recorded = seen.count("recorded")
        looked = len(player.seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > looked + 10)
        assert seen.count("recorded") <= recorded
        assert is_sound(seen, rally)


def test_consent_that_another_tab_switches_off_is_obeyed_at_once(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.page.click("#start")
        wait_for(lambda: seen.fact("recording") == "true")
        other = seen.page.context.new_page()
        other.goto(rally.address)
        other.wait_for_selector("body[data-phase=ready]")
        assert other.is_checked("#consent")
        other.uncheck("#consent")
        wait_for(lambda: seen.fact("recording") == "false")
        assert not seen.page.is_checked("#consent")
        # Where the answer itself is gone, going on is no new one: only the button that asks gives
        # it.
        seen.page.keyboard.press("Escape")
        other.evaluate("localStorage.clear()")
        seen.page.click("#start")
        wait_for(lambda: seen.fact("phase") == "playing")
        assert not seen.page.is_checked("#consent")
        assert is_sound(seen, rally)


def test_a_bot_that_fails_is_said_and_a_script_plays_the_serve(browser: Any, rally: Stage):
    with tab(browser, f"{rally.url}/play") as seen:

        def break_it(route: Any) -> None:
            body = (
                route.fetch()
                .text()
                .replace("seen = [...seen", 'throw new Error("broken"); seen = [...seen')
            )
            route.fulfill(body=body, content_type="text/javascript")

        seen.page.route("**/static/opponents.js", break_it)
        seen.page.goto("about:blank")
        seen.page.goto(rally.address)
        seen.page.wait_for_selector("body[data-bot^='rally/']")
        seen.page.click("#start")
        seen.page.wait_for_selector("#notice:not([hidden])")
        assert "broken" in seen.text("#notice")
        assert "casual script plays this serve" in seen.text("#notice")
        assert (seen.text("#them"), seen.fact("recording")) == ("casual script", "false")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 5)


def test_a_page_without_a_key_plays_and_says_what_to_do(browser: Any, rally: Stage):
    with tab(browser, f"{rally.url}/play") as seen:
        assert seen.fact("phase") == "ready"
        assert "understudy play rally --web" in seen.text("#sending")
        seen.page.keyboard.press("Space")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 3)
        seen.page.keyboard.press("Escape")
        assert seen.fact("phase") == "paused"
        assert is_sound(seen, rally)


def test_a_game_without_a_page_is_said_in_words(browser: Any, rally: Stage):
    with tab(browser, f"{rally.url}/play#game=chess&key={rally.key}") as seen:
        assert seen.text("#message") == "There is no page for chess"
        seen.page.keyboard.press("Space")
        assert seen.fact("phase") == "ready"
        assert is_sound(seen, rally)


def test_a_key_that_was_revoked_is_said_in_words(browser: Any, rally: Stage):
    with tab(browser, rally.address[:-4] + "AAAA") as seen:
        wait_for(lambda: seen.page.get_attribute("#state", "data-state") == "refused")
        assert "not a key of this deployment" in seen.text("#sending")
        # The browser itself writes a line for the refused request; the page adds none.
        assert all("401" in error for error in seen.errors)


def hold(seen: Tab, selector: str, down: float, is_there: Callable[[int], bool]) -> None:
    """Press on something, so far down on it, until one's own paddle is there."""
    seen.page.locator(selector).scroll_into_view_if_needed()
    box = seen.page.locator(selector).bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] * down)
    seen.page.mouse.down()
    wait_for(lambda: is_there(int(str(seen.page.get_attribute("#court", "data-place")).split()[2])))
    seen.page.mouse.up()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_phone_and_is_played_by_touch(browser: Any, rally: Stage, scheme: str):
    phone = {
        "viewport": {"width": 360, "height": 740},
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    with tab(browser, rally.address, **phone) as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
        seen.shoot(f"rally-phone-{scheme}-welcome")
        seen.page.tap("#start")
        seen.page.check("#thinks")
        assert seen.page.is_visible("#minus")
        wait_for(lambda: bool(seen.page.get_attribute("#court", "data-place")))
        hold(seen, "#court", 0.05, lambda own: own < 1000)
        seen.shoot(f"rally-phone-{scheme}")
        hold(seen, "#plus", 0.5, lambda own: own > 1800)
        hold(seen, "#minus", 0.5, lambda own: own < 1200)
        seen.page.evaluate("scrollTo(0, 9999)")
        seen.shoot(f"rally-phone-{scheme}-below")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert is_sound(seen, rally)


def test_it_fits_a_phone_that_lies_on_its_side(browser: Any, rally: Stage):
    phone = {"viewport": {"width": 740, "height": 360}, "has_touch": True, "is_mobile": True}
    with tab(browser, rally.address, **phone) as seen:
        seen.shoot("rally-landscape")
        stage_box, court, quietly = (
            seen.page.locator(one).bounding_box() for one in ("#stage", "#court", "#quietly")
        )
        assert court["height"] <= 360 - 8 * 16 + 1
        assert abs(court["width"] / court["height"] - 4 / 3) < 0.02
        assert abs(2 * court["x"] + court["width"] - 740) < 4, "in the middle"
        assert quietly["y"] + quietly["height"] <= stage_box["y"] + stage_box["height"], (
            "nothing is cut off"
        )
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 740


def test_it_looks_as_good_in_the_dark_on_a_desk(browser: Any, rally: Stage):
    with tab(browser, rally.address, color_scheme="dark") as seen:
        seen.page.wait_for_selector("#state[data-state=connected]")
        seen.page.click("#start")
        seen.page.check("#thinks")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and len(player.seen) > 15)
        seen.shoot("rally-dark")
        assert is_sound(seen, rally)


def test_every_control_is_reached_by_keyboard_with_a_visible_focus(browser: Any, rally: Stage):
    with tab(browser, rally.address) as seen:
        reached = []
        for _ in range(12):
            seen.page.keyboard.press("Tab")
            name, width = seen.page.evaluate(
                "() => [document.activeElement.id, "
                "getComputedStyle(document.activeElement).outlineWidth]"
            )
            reached.append(name)
            if name:
                assert width == "3px", name
        assert {"court", "start", "quietly", "opponent", "consent", "thinks"} <= set(reached)
        assert is_sound(seen, rally)


def test_cartpole_is_played_by_the_person_and_recorded(browser: Any, tmp_path: Path):
    with stage(tmp_path, "CartPole-v1") as found, tab(browser, found.address) as seen:
        seen.page.wait_for_selector("body[data-bot='CartPole-v1/1']")
        seen.page.click("#start")
        seen.page.keyboard.press("ArrowLeft")
        wait_for(lambda: seen.fact("phase") == "over")
        seen.shoot("cartpole-over")
        steps = int(seen.text("#score"))
        assert steps >= 5
        seen.page.select_option("#opponent", "champion")
        seen.page.check("#thinks")
        seen.page.click("#start")
        wait_for(lambda: seen.fact("phase") == "over")
        seen.shoot("cartpole-bot")
        wait_for(
            lambda: (
                seen.count("acked") == seen.count("recorded") == steps + int(seen.text("#score"))
            )
        )
        episodes = episodes_of(found.chunks(steps=seen.count("acked")))
        assert [(one.by, one.model) for one in episodes] == [
            (frozenset({"person"}), None),
            (frozenset({"bot"}), "CartPole-v1/1"),
        ]
        assert episodes[0].result == steps
        assert is_sound(seen, found)
