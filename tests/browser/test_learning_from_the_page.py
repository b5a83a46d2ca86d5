"""The promise of the page: what a person plays there becomes the next bot, which appears there
and plays them."""

from pathlib import Path
from typing import Any

from tests.browser.browsers import Player, episodes_of, play_on, stage, tab
from tests.cli.platforms import wait_for

SOON = {"UNDERSTUDY_LEARNER_FIRST_STEPS": "150", "UNDERSTUDY_LEARNER_BC_UPDATES": "200"}


def test_the_first_bot_learns_from_the_person_on_the_page_and_plays_them_without_a_reload(
    browser: Any, tmp_path: Path
):
    with stage(tmp_path, with_bot=False, roles="gateway,ingest,learner", **SOON) as rally:
        with tab(browser, rally.address) as seen:
            seen.page.click("#start")
            player = Player(seen)
            wait_for(lambda: player.look() == "playing" and len(player.seen) > 3)
            assert seen.text("#them") == "casual script"
            for _ in range(100):
                play_on(player)
                if seen.fact("phase") == "over":
                    seen.page.click("#start")
                if seen.fact("bot"):
                    break
            assert seen.fact("bot") == "rally/1"
            wait_for(lambda: player.look() != "playing" or seen.text("#them") == "rally/1")
            seen.shoot("rally-first-bot")
            assert seen.errors == []
        episodes = episodes_of(rally.chunks(steps=150))
        assert {by for one in episodes if one.seat == 0 for by in one.by} == {"person"}
        assert {by for one in episodes if one.seat == 1 for by in one.by} <= {"script", "bot"}
