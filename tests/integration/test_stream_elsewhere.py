"""Commands on a data folder whose steps are still in a real topic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.kafka import Topic
from tests.integration.keyspaces import Keyspace
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_link, register
from understudy.cli.root import run as run_command
from understudy.client.connect import ClientConfig, connect
from understudy.core.clock import SystemClock
from understudy.platform.config import Config, StoreSection, StreamSection, save_last_start
from understudy.simulation.ledger import LedgerLink
from understudy.testing.samples import cart_spec


def record(folder: Path, topic: Topic, *, store: str = "") -> None:
    """Record 50 steps that the topic acknowledged and the ledger lists; none is stored."""
    data = DataFolder(folder)
    spec = cart_spec()
    config = Config(
        data=str(folder),
        stream=StreamSection(url=topic.location().url),
        store=StoreSection(url=store),
    )
    save_last_start(config)
    link = open_link(data, spec, stream=config.stream.url, clock=SystemClock())
    register(data, spec, link, models=config.models.url)
    client_config = ClientConfig(link=LedgerLink(link, data.ledger), spool=data.spool)
    with connect(spec, consent="granted", config=client_config) as game:
        episode = game.episode("ada")
        for _ in range(50):
            episode.acted(np.zeros(4, np.float32), 1)
            episode.reward(1.0)
        episode.end(np.zeros(4, np.float32))
    link.close()


def test_verify_counts_acknowledged_steps_in_the_topic(
    kafka_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record(tmp_path, Topic(kafka_server))
    capsys.readouterr()
    assert run_command(["data", "verify", "--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["ledger_steps"], found["lost_steps"]) == (50, 50, 0)


def test_verify_of_a_remote_store_names_ingest_while_steps_may_be_in_the_topic(
    kafka_server: Any, keyspace: Keyspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record(tmp_path, Topic(kafka_server), store=keyspace.url)
    assert run_command(["data", "verify", "--data", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "lost 50" in said
    assert "store them with 'understudy ingest --until-empty', then verify again" in said
    assert run_command(["ingest", "--data", str(tmp_path), "--until-empty"]) == 0
    assert run_command(["data", "verify", "--data", str(tmp_path)]) == 0
