"""The gateway dies during matches in two browsers: play continues, and no acked step is lost."""

import time

from tests.browser.browsers import (
    Browser,
    PagePlatform,
    Player,
    episodes_of,
    look,
    open_tab,
    play_points,
)
from tests.cli.platforms import wait_for

ALL_ACKED = """() => {
  const count = (id) => document.getElementById(id).textContent;
  return count("recorded") === count("acked") && count("waiting") === "0";
}"""
SMALL = {"width": 480, "height": 640}
"""Small enough for two courts to be drawn in real time."""


def test_two_browsers_keep_playing_when_the_gateway_is_killed_and_no_acked_step_is_lost(
    browser: Browser, rally: PagePlatform
):
    began_s = time.time()
    with (
        open_tab(browser, rally.address, viewport=SMALL) as first,
        open_tab(browser, rally.address, viewport=SMALL, own_context=True) as second,
    ):
        tabs = (first, second)
        for tab in tabs:
            tab.page.wait_for_selector(f"body[data-bot='{rally.champion}']")
            tab.page.click("#start")
        players = [Player(tab) for tab in tabs]
        wait_for(
            lambda: look(*players) == {"playing"} and min(tab.count("acked") for tab in tabs) > 20
        )
        before = [len(player.positions) for player in players]
        rally.up.kill("gateway")
        # Both courts keep moving while the gateway is down, and after it is back.
        wait_for(lambda: look(*players) <= {"playing", "over"} and rally.up.is_back("gateway"))
        wait_for(
            lambda: (
                look(*players) <= {"playing", "over"}
                and all(
                    len(player.positions) > count
                    for player, count in zip(players, before, strict=True)
                )
            )
        )
        play_points(*players, points_more=2)
        for tab in tabs:
            if tab.data("phase") == "playing":
                tab.page.keyboard.press("Escape")
        for tab in tabs:
            tab.page.wait_for_function(ALL_ACKED)
            # A page that gets acknowledgements is not offline, even while its poll for bots waits.
            tab.page.wait_for_selector("#state[data-state=connected]", timeout=60_000)
        acked = [tab.count("acked") for tab in tabs]
        chunks = rally.chunks(since_s=began_s, steps=sum(acked))
        episodes = episodes_of(chunks)
        assert sum(episode.steps for episode in episodes) == sum(acked), "every step is stored once"
        for tab in tabs:
            acked_chunks = tab.acked_chunks()
            assert len(acked_chunks) > 2
            assert acked_chunks <= {chunk.meta.id for chunk in chunks}, (
                "every chunk acknowledged on the wire is stored"
            )
        assert len({episode.match for episode in episodes}) == 2
        for tab in tabs:
            # The browser itself logs failed requests; the page logs no other errors.
            assert all("ERR_" in error or "Failed to load" in error for error in tab.errors), (
                tab.errors
            )


def test_an_unreachable_gateway_is_shown_and_steps_wait_for_it_or_for_the_next_visit(
    browser: Browser, rally: PagePlatform
):
    began_s = time.time()
    with open_tab(browser, rally.address) as tab:
        tab.page.wait_for_selector(f"body[data-bot='{rally.champion}']")
        tab.page.click("#start")
        player = Player(tab)
        wait_for(lambda: player.look() == "playing" and tab.count("acked") > 0)
        tab.page.context.set_offline(True)
        wait_for(
            lambda: (
                player.look() != "" and tab.page.get_attribute("#state", "data-state") == "offline"
            )
        )
        play_points(player)
        wait_for(lambda: player.look() != "" and tab.count("waiting") > 20)
        tab.screenshot("rally-offline")
        tab.page.context.set_offline(False)
        tab.page.keyboard.press("Escape")
        tab.page.wait_for_function(ALL_ACKED)
        tab.page.wait_for_selector("#state[data-state=connected]")
        acked = tab.count("acked")
        episodes = episodes_of(rally.chunks(since_s=began_s, steps=acked))
        assert sum(episode.steps for episode in episodes) == acked

        # The page is closed while offline: the next visit sends its steps.
        tab.page.context.set_offline(True)
        tab.page.click("#start")
        play_points(player)
        tab.page.keyboard.press("Escape")
        wait_for(lambda: tab.page.get_attribute("#state", "data-state") == "offline")
        tab.page.wait_for_timeout(600)  # the page updates its counts four times a second
        recorded = tab.count("recorded")
        assert tab.count("waiting") == recorded - acked > 0
        tab.page.goto("about:blank")
        tab.page.context.set_offline(False)
        tab.visit(rally.address)
        episodes = episodes_of(rally.chunks(since_s=began_s, steps=recorded))
        assert sum(episode.steps for episode in episodes) == recorded
        assert {by for episode in episodes if episode.seat == 0 for by in episode.by} == {"person"}
