"""Commands on a data folder whose store is its own, while its stream is a real topic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.kafka import Topic
from understudy.app.config import Config, StreamSection
from understudy.app.crowd.ledger import LedgerLink
from understudy.app.data import DataFolder
from understudy.app.links import open_link, register
from understudy.app.used import keep_used
from understudy.cli.root import run as run_command
from understudy.client.connect import connect
from understudy.core.clock import SystemClock
from understudy.testing.samples import cart_spec


def test_verify_finds_what_was_acknowledged_and_waits_in_the_topic(
    kafka_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    topic, data, spec = Topic(kafka_server), DataFolder(tmp_path), cart_spec()
    config = Config(data=str(tmp_path), stream=StreamSection(url=topic.location().url))
    keep_used(config)
    link = open_link(data, config, spec, SystemClock())
    register(data, config, spec, link)
    with connect(spec=spec, link=LedgerLink(link, data.ledger), spool=data.spool, consent="granted") as game:
        episode = game.episode("ada")
        for _ in range(50):
            episode.acted(np.zeros(4, np.float32), 1)
            episode.reward(1.0)
        episode.end(np.zeros(4, np.float32))
    link.close()
    capsys.readouterr()
    assert run_command(["data", "verify", "--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["ledger_steps"], found["lost_steps"]) == (50, 50, 0)
