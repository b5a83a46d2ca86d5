"""A sender that sleeps while no game is played wakes up with the first episode."""

import pytest

from tests.client.fakes import MemoryLink, client
from understudy.client import SenderConfig


@pytest.mark.parametrize("how", ["episode", "recorder"])
def test_a_sleeping_sender_wakes_up_when_an_episode_starts(tmp_path, how):
    with client(MemoryLink(), tmp_path, sender=SenderConfig(linger_s=0.02)) as game:
        assert game.pump() > 1.0  # without a session it only looks for killed games, which is rare
        wake = game._sender.wake
        wake.clear()
        playing = getattr(game, how)("p-1")
        assert wake.is_set()
        assert game.pump() <= 0.02
        del playing
