"""The gateway is killed in the middle of a match, under two browsers at once: play goes on,
nothing acked is lost."""

from pathlib import Path
from typing import Any

from tests.browser.browsers import Player, episodes_of, look, play_on, stage, tab
from tests.cli.platforms import wait_for

ALL_ACKED = """() => {
  const count = (id) => document.getElementById(id).textContent;
  return count("recorded") === count("acked") && count("waiting") === "0";
}"""
SMALL = {"viewport": {"width": 480, "height": 640}}
"""Two courts at once must keep up with the clock."""


def test_two_browsers_play_on_while_the_gateway_is_killed_and_nothing_acked_is_lost(
    browser: Any, tmp_path: Path
):
    with (
        stage(tmp_path) as rally,
        tab(browser, rally.address, **SMALL) as one,
        tab(browser, rally.address, **SMALL) as other,
    ):
        tabs = (one, other)
        for seen in tabs:
            seen.page.wait_for_selector("body[data-bot='rally/1']")
            seen.page.click("#start")
        players = [Player(seen) for seen in tabs]
        wait_for(
            lambda: look(*players) == {"playing"} and min(seen.count("acked") for seen in tabs) > 20
        )
        before = [len(player.seen) for player in players]
        rally.up.kill("gateway")
        # Nobody has to wait: both courts move on while there is no gateway, and after it is back.
        wait_for(lambda: look(*players) <= {"playing", "over"} and rally.up.is_back("gateway"))
        moved = [len(player.seen) - looked for player, looked in zip(players, before, strict=True)]
        assert min(moved) > 0, moved
        play_on(*players, points_more=2)
        for seen in tabs:
            if seen.fact("phase") == "playing":
                seen.page.keyboard.press("Escape")
        for seen in tabs:
            seen.page.wait_for_function(ALL_ACKED)
            # Whoever gets acknowledgements is not offline, however long its question for bots would
            # wait.
            seen.page.wait_for_selector("#state[data-state=connected]", timeout=10_000)
        acked = [seen.count("acked") for seen in tabs]
        chunks = rally.chunks(steps=sum(acked))
        episodes = episodes_of(chunks)
        assert sum(episode.steps for episode in episodes) == sum(acked), "every step is stored once"
        for seen in tabs:
            promised = seen.promised()
            assert len(promised) > 2
            assert promised <= {chunk.meta.id for chunk in chunks}, (
                "what was promised on the wire is stored"
            )
        assert len({episode.match for episode in episodes}) == 2
        for seen in tabs:
            # What the browser itself says about a gateway that is gone; the page adds nothing.
            assert all("ERR_" in error or "Failed to load" in error for error in seen.errors), (
                seen.errors
            )


def test_a_gateway_that_stays_away_is_shown_and_steps_wait_for_it(browser: Any, tmp_path: Path):
    with stage(tmp_path) as rally, tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.page.click("#start")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and seen.count("acked") > 0)
        seen.page.context.set_offline(True)
        wait_for(
            lambda: (
                player.look() != "" and seen.page.get_attribute("#state", "data-state") == "offline"
            )
        )
        wait_for(lambda: player.look() != "" and seen.count("waiting") > 20)
        seen.shoot("rally-offline")
        play_on(player)
        seen.page.context.set_offline(False)
        seen.page.keyboard.press("Escape")
        seen.page.wait_for_function(ALL_ACKED)
        seen.page.wait_for_selector("#state[data-state=connected]")
        episodes = episodes_of(rally.chunks(steps=seen.count("acked")))
        assert sum(episode.steps for episode in episodes) == seen.count("acked")


def test_steps_of_a_page_that_was_left_offline_are_sent_by_the_next_visit(
    browser: Any, tmp_path: Path
):
    with stage(tmp_path) as rally, tab(browser, rally.address) as seen:
        seen.page.wait_for_selector("body[data-bot='rally/1']")
        seen.page.click("#start")
        player = Player(seen)
        wait_for(lambda: player.look() == "playing" and seen.count("acked") > 0)
        seen.page.context.set_offline(True)
        play_on(player)
        seen.page.keyboard.press("Escape")
        wait_for(lambda: seen.page.get_attribute("#state", "data-state") == "offline")
        seen.page.wait_for_timeout(600)  # the page shows its counts four times a second
        recorded = seen.count("recorded")
        assert seen.count("waiting") > 0
        seen.page.goto("about:blank")
        seen.page.context.set_offline(False)
        seen.page.goto(rally.address)
        episodes = episodes_of(rally.chunks(steps=recorded))
        assert sum(episode.steps for episode in episodes) == recorded
        assert {by for episode in episodes if episode.seat == 0 for by in episode.by} == {"person"}
