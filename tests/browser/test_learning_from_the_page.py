"""A bot learns from a person's games on the page, appears there and plays against them."""

import re
from pathlib import Path

from tests.browser.browsers import (
    Browser,
    Player,
    episodes_of,
    open_tab,
    play_points,
    run_platform,
)
from tests.cli.platforms import wait_for

SOON = {"UNDERSTUDY_LEARNER_FIRST_STEPS": "150", "UNDERSTUDY_LEARNER_BC_UPDATES": "200"}


def test_the_first_bot_learns_from_the_person_and_plays_without_a_reload(
    browser: Browser, tmp_path: Path
):
    """May take over 20 seconds: a learner starts, compiles and trains until a clone passes."""
    with run_platform(tmp_path, with_bot=False, roles="gateway,ingest,learner", **SOON) as rally:
        with open_tab(browser, rally.address) as tab:
            tab.page.click("#start")
            player = Player(tab)
            wait_for(lambda: player.look() == "playing" and len(player.positions) > 3)
            assert tab.text("#them") == "casual script"
            for _ in range(100):
                play_points(player)
                if tab.data("phase") == "over":
                    tab.page.click("#start")
                if tab.data("bot"):
                    break
            # Clones that are not yet better than a constant policy on held-out steps are rejected.
            name = tab.data("bot") or ""
            assert re.fullmatch(r"rally/[1-9]\d*", name)
            wait_for(lambda: player.look() != "playing" or tab.text("#them") == name)
            tab.screenshot("rally-first-bot")
            assert tab.errors == []
        episodes = episodes_of(rally.chunks(since_s=0.0, steps=150))
        assert {by for episode in episodes if episode.seat == 0 for by in episode.by} == {"person"}
        assert {by for episode in episodes if episode.seat == 1 for by in episode.by} <= {
            "script",
            "bot",
        }
