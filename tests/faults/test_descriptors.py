"""Thousands of players in a process that may open few files: no step is lost."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.card import Card
from understudy.backends.data import DataFolder
from understudy.client.receipts import read_receipts
from understudy.simulation.verify import verify

PLAYERS = 2_500
STEPS = 3
MAX_OPEN_FILES = 64
MAX_OPENED = 24

GAME = """
    import json, os, resource, sys
    import understudy

    folder, receipts, players, steps, most = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), int(most)))
    game = understudy.connect(
        "crowd", obs=6, actions=4, data=folder, receipts=receipts, consent="granted"
    )
    episodes = [game.episode(player=f"p-{number}") for number in range(int(players))]
    opened = 0
    for at in range(int(steps)):
        for episode in episodes:
            episode.acted(obs=[at / 10] * 6, action=at)
        opened = max(opened, len(os.listdir("/proc/self/fd")))
    for episode in episodes:
        episode.end()
    is_sent = game.close(timeout_s=120.0)
    stats = game.stats()
    print(json.dumps([is_sent, opened, stats.acked_steps, stats.dropped_steps]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_thousands_of_players_need_few_descriptors(tmp_path: Path, card: Card) -> None:
    data = DataFolder(tmp_path / "D")
    receipts = tmp_path / "receipts.jsonl"
    arguments = (data.root, receipts, PLAYERS, STEPS, MAX_OPEN_FILES)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GAME), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300.0,
    )
    assert (done.returncode, done.stderr) == (0, "")
    is_sent, opened, acked, dropped = json.loads(done.stdout)
    assert (is_sent, acked, dropped) == (True, PLAYERS * STEPS, 0)
    assert opened <= MAX_OPENED
    verification = verify(data, receipts=read_receipts(receipts))
    assert verification.exit_code == 0
    assert verification.receipt_fates["stored"] == len(verification.receipts) >= PLAYERS
    card.line("descriptors: steps of 2,500 players", tried=PLAYERS * STEPS, held=verification.steps)
