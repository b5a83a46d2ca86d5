"""The gateway draws the bots of episodes: in advance as tickets, and for its own decisions."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serve.gateways import CART, Running, running
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key
from understudy.experience.ticket import Ticket, TicketSeal
from understudy.models.catalogue import Control
from understudy.nn.policy import Policy
from understudy.serve.state import GatewayConfig

PATH = "/v1/games/cart/tickets"
ACT = "/v1/games/cart/act"
OBS = [0.0] * 4


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, GatewayConfig(decide_within_s=10.0)) as found:
        found.register()
        yield found


def until(is_reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)


def until_entry(gateway: Running, key: str, entry: int) -> None:
    """Wait until tickets are drawn by this entry; 0: until none are drawn."""
    asked = {"schema": CART.schema}
    until(lambda: gateway.ask("POST", PATH, key, asked).json["entry"] == entry)


def trial(gateway: Running, **facts: Any) -> int:
    """A control, a champion and a canary; returns the canary's entry."""
    for seed in range(3):
        gateway.release(CART, seed=seed, promote=seed < 2, **facts)
    gateway.registry.set_alias("cart", "canary", 3, why="", share=0.25, control=Control(1, 0.1))
    canary = gateway.registry.catalogue("cart").pointer("canary")
    assert canary is not None
    return canary.number


def opened(gateway: Running, text: str) -> Ticket:
    return TicketSeal(deployment_key(gateway.folder)).open(text, game="cart", schema=CART.schema)


def test_tickets_are_drawn_between_the_bots_of_the_trial(gateway: Running):
    key = gateway.key("play", game="cart")
    none = gateway.ask("POST", PATH, key, {"schema": CART.schema})
    assert none.json == {"entry": 0, "models": [], "valid_s": 0.0, "tickets": []}
    entry = trial(gateway)
    asked = {"schema": CART.schema, "n": 128}
    until_entry(gateway, key, entry)
    batch = gateway.ask("POST", PATH, key, asked).json
    assert (batch["entry"], batch["models"], batch["valid_s"]) == (entry, [2, 3, 1], 86_400)
    drawn: Counter[tuple[int, float]] = Counter()
    ids = set()
    for _ in range(40):
        batch = gateway.ask("POST", PATH, key, asked).json
        for each in batch["tickets"]:
            ticket = opened(gateway, each["ticket"])
            assert (ticket.entry, ticket.model_no) == (entry, each["model_no"])
            drawn[ticket.model_no, ticket.propensity] += 1
            ids.add(ticket.id)
    assert len(ids) == drawn.total() == 40 * 128
    # A quarter of the draws is beside the control. Bounds: at least five standard deviations.
    assert drawn[3, 0.6] == pytest.approx(768, abs=130)
    assert drawn[1, 0.4] == pytest.approx(512, abs=110)
    assert drawn[3, 0.25] == pytest.approx(960, abs=140)
    assert drawn[2, 0.75] == pytest.approx(2880, abs=180)
    batch = gateway.ask("POST", PATH, key, asked | {"control": False}).json
    assert batch["models"] == [2, 3]
    draws = [opened(gateway, each["ticket"]) for each in batch["tickets"]]
    assert {(ticket.model_no, ticket.propensity) for ticket in draws} == {(3, 0.25), (2, 0.75)}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"n": 0}, "bad_body"),
        ({"n": 129}, "bad_body"),
        ({"n": "9"}, "bad_body"),
        ({"schema": "x"}, "bad_body"),
        ({"schema": "0" * 64}, "not_registered"),
        ({"more": 1}, "bad_body"),
        (b"\xff", "bad_body"),
        (b"", "bad_body"),
        (b" " * 16_385, "too_large"),
    ],
)
def test_an_invalid_request_for_tickets_is_refused_by_name(gateway: Running, body: Any, code: str):
    assert gateway.ask("POST", PATH, gateway.key("play"), body).code == code


def test_tickets_count_as_requests_of_their_key(gateway: Running):
    key = gateway.key("play", requests_s=1.0)
    replies = [gateway.ask("POST", PATH, key, {}) for _ in range(9)]
    assert {reply.status for reply in replies} == {200, 429}


def test_act_draws_the_bot_of_an_episode_and_its_ticket_keeps_it(gateway: Running):
    key = gateway.key("play")
    entry = trial(gateway)
    until_entry(gateway, key, entry)

    def act(**more: Any) -> Any:
        reply = gateway.ask("POST", ACT, key, {"obs": OBS, **more}).json
        assert not reply["is_fallback"], reply["why"]
        return reply

    assert "ticket" not in act()
    assert act()["model_no"] == 2
    played: set[int] = set()
    deadline_s = time.monotonic() + 60
    while len(played) < 3:
        assert time.monotonic() < deadline_s, "a bot of the trial was never drawn"
        first = act(draw=True)
        ticket = opened(gateway, first["ticket"])
        assert (ticket.entry, ticket.model_no) == (entry, first["model_no"])
        played.add(ticket.model_no)
        for _ in range(2):
            again = act(ticket=first["ticket"])
            assert (again["model_no"], again["ticket"]) == (ticket.model_no, first["ticket"])
        skilled = act(ticket=first["ticket"], skill="easy")
        assert (skilled["model_no"], "ticket" in skilled) == (2, False)
    gateway.registry.withdraw("cart", why="enough")
    until_entry(gateway, key, 0)
    assert "ticket" not in act(draw=True)
    canary = TicketSeal(deployment_key(gateway.folder)).seal(
        Ticket(entry=entry, model_no=3, propensity=0.25, expires_s=1 << 33, id="A" * 16),
        game="cart",
        schema=CART.schema,
    )
    over = act(ticket=canary)
    assert (over["model_no"], "ticket" in over) == (2, False), "the champion plays on"


def test_act_refuses_a_ticket_that_it_did_not_seal(gateway: Running):
    key = gateway.key("play")
    trial(gateway)
    until(lambda: not gateway.ask("POST", ACT, key, {"obs": OBS}).json["is_fallback"])
    other = TicketSeal(bytes(32)).seal(
        Ticket(entry=1, model_no=3, propensity=0.25, expires_s=1 << 33, id="A" * 16),
        game="cart",
        schema=CART.schema,
    )
    for text, code in (
        (other, "forged_ticket"),
        ("", "malformed_ticket"),
        ("é", "malformed_ticket"),
    ):
        assert gateway.ask("POST", ACT, key, {"obs": OBS, "ticket": text}).code == code
    assert gateway.ask("POST", ACT, key, {"obs": OBS, "ticket": "t" * 129}).code == "bad_body"


def test_a_canary_that_stacks_observations_is_not_drawn_for_act(gateway: Running):
    key = gateway.key("play")
    gateway.release(CART)
    gateway.release(CART, promote=False, stack=2)
    gateway.registry.set_alias("cart", "canary", 2, why="", share=0.5)
    canary = gateway.registry.catalogue("cart").pointer("canary")
    assert canary is not None
    until_entry(gateway, key, canary.number)
    for _ in range(20):
        reply = gateway.ask("POST", ACT, key, {"obs": OBS, "draw": True}).json
        assert reply["model_no"] == 1
        assert "ticket" not in reply


def test_a_drawn_bot_that_is_too_slow_or_fails_keeps_its_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with running(tmp_path, GatewayConfig(decide_within_s=1.0)) as gateway:
        gateway.register()
        key = gateway.key("play")
        until_entry(gateway, key, trial(gateway))
        decide = Policy.decide
        answered = threading.Event()

        def slow(*given: Any, **more: Any) -> Any:
            answered.wait(60)
            return decide(*given, **more)

        def failing(*given: Any, **more: Any) -> Any:
            raise RuntimeError("broken")

        def act(**more: Any) -> Any:
            return gateway.ask("POST", ACT, key, {"obs": OBS, **more}).json

        texts = []
        for wrong, why in ((slow, "the bot took longer than 1 s"), (failing, "the bot failed")):
            monkeypatch.setattr(Policy, "decide", wrong)
            first = act(draw=True)
            later = act(ticket=first["ticket"])
            for reply in (first, later):
                assert (reply["model_no"], reply["why"]) == (0, why)
                assert reply["ticket"] == first["ticket"]
            assert "ticket" not in act(), "nothing was drawn"
            answered.set()
            texts.append(first["ticket"])
        monkeypatch.setattr(Policy, "decide", decide)

        def is_played(text: str) -> bool:
            return bool(act(ticket=text)["model_no"] == opened(gateway, text).model_no)

        for text in texts:
            until(partial(is_played, text))


def test_without_a_schema_the_ticket_names_it_also_when_a_newer_one_gets_its_champion(
    gateway: Running,
):
    key = gateway.key("play")
    until_entry(gateway, key, trial(gateway))
    ask = {"obs": OBS}
    first = gateway.ask("POST", ACT, key, ask | {"draw": True}).json
    # The observations fit both.
    new = gateway.register(game_spec("cart", obs=4, actions=3))
    newest = gateway.release(new).model_no
    until(lambda: gateway.ask("POST", ACT, key, ask).json["model_no"] == newest)
    later = gateway.ask("POST", ACT, key, ask | {"ticket": first["ticket"]}).json
    assert later["ticket"] == first["ticket"]
    assert later["model_no"] == first["model_no"] != newest
    named = ask | {"schema": new.schema, "ticket": first["ticket"]}
    assert gateway.ask("POST", ACT, key, named).code == "forged_ticket"
    forged = ask | {"ticket": first["ticket"][:-1] + "!"}
    assert gateway.ask("POST", ACT, key, forged).code == "malformed_ticket"
