"""Draws from the gateway to the gate: each way to play has tickets that the learner believes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.gateways import CART, SIGNER, Running, running
from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, Game, connect
from understudy.core.names import new_session
from understudy.experience.chunk import By
from understudy.experience.intake import deployment_key, key_file
from understudy.experience.ticket import TicketSeal
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.models.gate import Played
from understudy.release.store_stats import StoreStats
from understudy.serve.bots import PolicyServer
from understudy.serve.state import GatewayConfig
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.training.follower import StoreFollower

N_EPISODES = 100
OBS = np.zeros(4, np.float32)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "D", GatewayConfig(decide_within_s=10.0)) as found:
        found.register()
        found.release(CART)
        found.release(CART, promote=False, seed=1)
        found.registry.set_alias("cart", "canary", 2, why="", share=0.5)
        yield found


def until_tickets(game: Game) -> None:
    assert game.wait_for_bot(60)
    deadline_s = time.monotonic() + 60
    while not game._bots._tickets.left:
        assert time.monotonic() < deadline_s, "no ticket arrived"
        time.sleep(0.01)


def play(game: Game, n_episodes: int = N_EPISODES) -> None:
    for number in range(n_episodes):
        with game.episode(f"player-{number % 3}") as episode:
            for _ in range(3):
                episode.act(OBS)
                episode.reward(1.0)
            episode.end(OBS)


def counted(folder: Path) -> tuple[list[list[Played]], dict[str, int]]:
    """Ingest the stream; the episodes of champion and canary, and why others are not compared."""
    data = DataFolder(folder)
    with LocalStore(data.store, specs=SpecFolder(data.games)) as store:
        stream = FileStream(data.stream)
        service = IngestService(stream, store, SpecFolder(data.games), owner="test")
        while service.step():
            pass
        assert service.stats.refusals == {}
        stream.close()
    stats = StoreStats(StoreFollower(data.store), TicketSeal(deployment_key(folder)))
    while stats.follow():
        pass
    played = [list(stats.returns(f"cart/{number}", since_s=0.0)) for number in (1, 2)]
    reasons = stats.not_compared("cart")
    stats.close()
    return played, reasons


@pytest.mark.parametrize("how", ["over HTTP", "in the data folder"])
def test_episodes_of_a_client_are_compared(gateway: Running, tmp_path: Path, how: str):
    where: dict[str, Any] = {"url": gateway.url, "key": gateway.key("play")}
    if how == "in the data folder":
        (gateway.folder / "signing.key").write_bytes(key_file(SIGNER._private))
        where = {"data": gateway.folder}
    config = ClientConfig(spool=tmp_path / "spool")
    with connect(CART, config=config, **where) as game:
        until_tickets(game)
        play(game)
        assert game.flush(60)
    played, reasons = counted(gateway.folder)
    drawn = [episode.propensity for episodes in played for episode in episodes]
    assert len(drawn) == N_EPISODES
    # If the machine is slow, a few are played before more tickets arrive.
    assert drawn.count(0.5) >= 64
    assert set(drawn) <= {0.5, None}
    assert all(sum(each.propensity is not None for each in each_bots) > 10 for each_bots in played)
    assert reasons == {}


async def failing(*_: Any, **__: Any) -> None:
    """No action, as from a bot that fails."""


def test_episodes_that_the_gateway_decides_are_compared_unless_the_drawn_bot_failed(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    key = gateway.key("play")
    asked = {"schema": CART.schema}
    deadline_s = time.monotonic() + 60
    while not gateway.ask("POST", "/v1/games/cart/tickets", key, asked).json["entry"]:
        assert time.monotonic() < deadline_s, "the trial did not begin"
        time.sleep(0.01)
    session = str(new_session())
    drawn = []
    decide = PolicyServer._ask
    for chunk_no in range(20):
        bot: dict[str, Any] = {"draw": True}
        note: dict[str, Any] = {"row": 0}
        actions: list[int] = []
        by: list[int] = []
        for step in range(3):
            # In some episodes the drawn bot fails, once or always.
            is_failing = (chunk_no % 5 == 1 and step == 0) or chunk_no % 5 == 3
            monkeypatch.setattr(PolicyServer, "_ask", failing if is_failing else decide)
            body = {"obs": OBS.tolist(), "schema": CART.schema, **bot}
            reply = gateway.ask("POST", "/v1/games/cart/act", key, body).json
            assert reply["is_fallback"] or not is_failing
            actions.append(reply["action"])
            by.append(By.SCRIPT if reply["is_fallback"] else By.BOT)
            bot = {"ticket": reply.get("ticket", bot.get("ticket"))}
            if not reply["is_fallback"]:
                note["model"] = f"cart/{reply['model_no']}"
        sent = {
            "player": "ada",
            "session": session,
            "chunk_no": chunk_no,
            "first_step": 3 * chunk_no,
            "columns": {
                "obs": [OBS.tolist()] * 4,
                "action": [*actions, 0],
                "reward": [1, 1, 1, 0],
                "by": [*by, 0],
                "row": [0, 0, 0, 1],
                "is_first": [True, False, False, False],
                "terminated": [False, False, True, False],
                "truncated": [False] * 4,
            },
            "episodes": [note | bot],
        }
        reply = gateway.ask("POST", "/v1/games/cart/columns", key, sent).json
        assert reply["acks"][0]["accepted"]
        if By.SCRIPT not in by:
            drawn.append(note["model"])
    assert len(drawn) == 12, "the others are not compared: the model did not decide alone"
    played, reasons = counted(gateway.folder)
    assert [len(episodes) for episodes in played] == [drawn.count("cart/1"), drawn.count("cart/2")]
    assert {each.propensity for episodes in played for each in episodes} == {0.5}
    assert reasons == {}
