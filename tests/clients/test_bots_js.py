"""Bots in JavaScript: signed ones play, forgeries are rejected, older numbers never return."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.platforms import SIGNER, Platform, constant_policy
from tests.clients.nodes import NodeServer, needs_node
from tests.clients.test_policies_js import CASES, policy_of
from understudy.core.signed import Signer, public_key_text
from understudy.core.tensors import DTYPES
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.models.catalogue import Control
from understudy.models.manifest import Lineage, make_manifest
from understudy.nn.heads import head_for
from understudy.nn.network import Dense, Input, NetworkSpec
from understudy.nn.policy import Policy

pytestmark = needs_node
OTHER = Signer(bytes(range(1, 33)))
SPEC = game_spec("my-game", obs=2, actions=["up", "stay", "down"])
TRUST = [public_key_text(SIGNER.public)]
_servers: list[NodeServer] = []


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One Node for all tests."""
    with NodeServer("bots.mjs") as server:
        _servers.append(server)
        yield
    _servers.clear()


def ask_node(request: Any) -> Any:
    return _servers[0].ask(request)


class Scenario:
    """A platform whose states are the steps of a scenario."""

    def __init__(self, folder: Path, spec: GameSpec = SPEC, signer: Signer = SIGNER) -> None:
        self.platform = Platform(folder, signer)
        self.spec = spec

    def release(
        self, policy: Policy | int, alias: str = "champion", **facts: Any
    ) -> dict[str, Any]:
        policy = constant_policy(policy, self.spec) if isinstance(policy, int) else policy
        self.platform.release(policy, alias, **facts)
        return self.now()

    def now(self, **changed: Any) -> dict[str, Any]:
        link = self.platform.link
        assert link.live_models is not None
        live_models = dataclasses.asdict(link.live_models) | changed
        catalogue = self.platform.registry.catalogue(self.spec.game)
        models = {no: catalogue.signed[f"{self.spec.game}/{no}"].decode() for no in link.policies}
        return {
            "liveModels": live_models,
            "policies": {no: raw.hex() for no, raw in link.policies.items()},
            "models": models,
        }


def played(*steps: dict[str, Any], spec: GameSpec = SPEC) -> Any:
    first: dict[str, Any] = {"start": {}} if "start" not in steps[0] else {}
    request = {"spec": json.loads(spec.to_json()), "steps": [first | steps[0], *steps[1:]]}
    return ask_node({"scenarios": [request]})["scenarios"][0]


def test_a_document_signed_by_a_trusted_key_is_accepted():
    entries: list[Any] = [
        {},
        {"a": 1},
        {"text": 'ä"\\ ,"key_id":"0123456789abcdef"', "n": [1.5, None, {"b": "}"}]},
    ]
    signed = [[SIGNER.sign(entry).decode(), TRUST] for entry in entries]
    assert ask_node({"signed": signed})["checked"] == [{"entry": entry} for entry in entries]


def test_every_kind_of_forged_document_is_rejected():
    text = SIGNER.sign({"kind": "point", "number": 7}).decode()
    document = json.loads(text)
    other = json.loads(OTHER.sign(document["entry"]))
    signature = document["signature"]
    loose = next(letter for letter in "ABCDEFGH" if letter != signature[-3])
    forged = {
        "bad_signature": [
            text.replace('"number":7', '"number":8'),
            text.replace('"number":7', '"number":7 '),
            json.dumps(document | {"signature": other["signature"]}, separators=(",", ":")),
            text.replace(signature, signature[:-3] + loose + "=="),
            text.replace('"kind"', '"Kind"'),
        ],
        "unknown_key": [
            OTHER.sign(document["entry"]).decode(),
            text.replace(document["key_id"], "0" * 16),
        ],
        "bad_entry": [
            "",
            "{",
            "[]",
            json.dumps(document),
            text + " ",
            text[:-1],
            text.replace('{"entry":', '{"entry": '),
            json.dumps({**document, "more": 1}, separators=(",", ":")),
            text.replace(signature, signature[:-2]),
            json.dumps({**document, "entry": [1]}, separators=(",", ":")),
            text.replace(document["key_id"], document["key_id"].upper() + "A"),
        ],
        "too_large": ["x" * 300_000],
    }
    cases = [(code, document) for code, documents in forged.items() for document in documents]
    found = ask_node({"signed": [[document, TRUST] for _, document in cases]})["checked"]
    assert found == [{"code": code} for code, _ in cases]
    (found,) = ask_node({"signed": [[text, []]]})["checked"]
    assert found == {"code": "unknown_key"}


def test_a_bot_that_passes_every_check_plays_until_a_newer_one_replaces_it(tmp_path):
    scenario = Scenario(tmp_path)
    found = played({}, scenario.release(1), scenario.release(2))
    assert [step["bot"] for step in found["seen"]] == ["", "my-game/1", "my-game/2"]
    assert [step["models"] for step in found["seen"]] == [
        [["", 0]],
        [["my-game/1", 1]],
        [["my-game/2", 2]],
    ]
    assert found["names"] == ["my-game/1", "my-game/2"]
    assert [(step["refused"], step["error"]) for step in found["seen"]] == [(0, "")] * 3


def test_the_last_good_bot_plays_at_once_and_offline(tmp_path):
    scenario = Scenario(tmp_path)
    found = played(scenario.release(1), scenario.release(2), {"start": {"isOffline": True}})["seen"]
    assert (found[2]["bot"], found[2]["models"]) == ("my-game/2", [["my-game/2", 2]])
    assert len([name for name in found[2]["storage"] if name.startswith("policy/")]) == 1


def changed(text: str, **facts: Any) -> str:
    document = json.loads(text)
    document["entry"].update(facts)
    return json.dumps(document, separators=(",", ":"))


def wrong_golden(scenario: Scenario) -> dict[str, Any]:
    """A correctly signed release whose golden outputs are not those of its policy."""
    now = scenario.now()
    document = json.loads(now["liveModels"]["champion_release"])
    golden = document["entry"]["manifest"]["golden"]
    golden["q"] = (np.array(golden["q"]) + 0.01).tolist()
    return scenario.now(champion_release=SIGNER.sign(document["entry"]).decode())


SABOTAGES: dict[str, Any] = {
    "wrong hash": (
        "bad_hash",
        lambda scenario: scenario.now() | {"policies": {2: scenario.now()["policies"][1]}},
    ),
    "truncated": (
        "bad_hash",
        lambda scenario: scenario.now() | {"policies": {2: scenario.now()["policies"][2][:-2]}},
    ),
    "not a policy": ("bad_hash", lambda scenario: scenario.now() | {"policies": {2: "00"}}),
    "changed pointer": (
        "bad_signature",
        lambda scenario: scenario.now(
            champion=changed(scenario.now()["liveModels"]["champion"], number=999)
        ),
    ),
    "changed release": (
        "bad_signature",
        lambda scenario: scenario.now(
            champion_release=changed(scenario.now()["liveModels"]["champion_release"], epoch=77)
        ),
    ),
    "another's key": (
        "unknown_key",
        lambda scenario: scenario.now(
            champion=OTHER.sign(
                json.loads(scenario.now()["liveModels"]["champion"])["entry"]
            ).decode()
        ),
    ),
    "release missing": ("bad_entry", lambda scenario: scenario.now(champion_release=None)),
    "pointer missing": ("old_bot", lambda scenario: scenario.now(champion=None)),
    "release as pointer": (
        "bad_entry",
        lambda scenario: scenario.now(champion=scenario.now()["liveModels"]["champion_release"]),
    ),
    "no document": ("bad_entry", lambda scenario: scenario.now(champion="{")),
    "another's golden outputs": ("bad_golden", wrong_golden),
}


@pytest.mark.parametrize("how", SABOTAGES)
def test_a_bad_bot_is_rejected_and_the_last_good_one_stays(tmp_path, how):
    code, sabotage = SABOTAGES[how]
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    scenario.release(2)
    bad = sabotage(scenario)
    found = played(first, bad, {"start": {"isOffline": True}}, {"start": {}} | scenario.release(0))[
        "seen"
    ]
    assert [step["bot"] for step in found] == ["my-game/1", "my-game/1", "my-game/1", "my-game/3"]
    assert found[1]["refused"] == 1
    assert found[1]["error"].startswith(code)
    assert found[3]["error"] == ""


def test_a_bot_damaged_in_transit_is_fetched_again(tmp_path):
    scenario = Scenario(tmp_path)
    good = scenario.release(1)
    bad = good | {"policies": {1: "00"}}
    found = played(bad | {"isHasty": True}, good | {"afterS": 20, "untilBot": "my-game/1"})["seen"]
    assert (found[0]["bot"], found[0]["refused"]) == ("", 1)
    assert (found[1]["bot"], found[1]["error"]) == ("my-game/1", "")


def test_an_older_entry_is_rejected_and_a_rollback_is_accepted(tmp_path):
    scenario = Scenario(tmp_path)
    old = scenario.release(1)
    new = scenario.release(2)
    old["liveModels"]["number"] = 1000
    again = {"start": {}} | old | {"liveModels": old["liveModels"] | {"number": 1001}}
    scenario.platform.registry.rollback("my-game", why="test")
    scenario.platform.announce()
    back = scenario.now(number=1002)
    found = played(new, old, again, back)["seen"]
    assert [step["bot"] for step in found] == ["my-game/2", "my-game/2", "my-game/2", "my-game/1"]
    assert [step["error"].partition(":")[0] for step in found] == ["", "old_bot", "old_bot", ""]


def test_the_keys_of_a_deployment_are_pinned_at_first_use(tmp_path):
    scenario = Scenario(tmp_path)
    stranger = Scenario(tmp_path / "stranger", signer=OTHER)
    first = scenario.release(1)
    for _ in range(5):
        strange = stranger.release(2)
    found = played(
        first,
        strange,
        {"start": {}} | strange | {"liveModels": strange["liveModels"] | {"number": 999}},
    )["seen"]
    assert [step["bot"] for step in found] == ["my-game/1"] * 3
    assert found[2]["error"].startswith("unknown_key")


def test_a_new_deployment_at_the_same_address_is_pinned_separately_by_its_key(tmp_path):
    old = Scenario(tmp_path)
    new = Scenario(tmp_path / "new", signer=OTHER)
    first = old.release(1)
    second = new.release(1)
    found = played(first, {"start": {"key": "uk_new"}} | second, {"start": {"isOffline": True}})[
        "seen"
    ]
    assert [(step["bot"], step["error"].partition(":")[0]) for step in found[:2]] == [
        ("my-game/1", "")
    ] * 2
    assert found[1]["models"][0][0] == "my-game/1"
    assert found[2]["bot"] == "my-game/1", "the old key still has its own bot"


def test_trusted_keys_passed_to_connect_take_precedence(tmp_path):
    scenario = Scenario(tmp_path)
    release = scenario.release(1)
    found = played({"start": {"trust": [public_key_text(OTHER.public)]}} | release)["seen"]
    assert (found[0]["bot"], found[0]["error"].partition(":")[0]) == ("", "unknown_key")
    assert played({"start": {"trust": TRUST}} | release)["seen"][0]["bot"] == "my-game/1"


def test_a_bot_of_another_schema_does_not_play(tmp_path):
    (found,) = played(Scenario(tmp_path).release(1), spec=game_spec("my-game", obs=2, actions=3))[
        "seen"
    ]
    assert (found["bot"], found["error"].partition(":")[0]) == ("", "wrong_schema")


@pytest.mark.parametrize("what", ["/bot", "/policy/"])
def test_a_damaged_storage_means_fetching_again(tmp_path, what):
    release = Scenario(tmp_path).release(1)
    found = played(release, {"spoil": what, "start": {"isOffline": True}}, {"start": {}} | release)[
        "seen"
    ]
    assert [step["bot"] for step in found] == ["my-game/1", "", "my-game/1"]


def tickets(scenario: Scenario, *models: int, **changed: Any) -> dict[str, Any]:
    """Tickets for these models, in this order, as the gateway would draw them now."""
    trial = scenario.platform.link.trial
    assert trial is not None
    drawn = [
        {"model_no": model_no, "ticket": f"t1:{number}:{model_no}"}
        for number, model_no in enumerate(models)
    ]
    batch = {
        "entry": trial.entry,
        "models": trial.models(with_control=trial.control in models),
        "valid_s": 60.0,
        "tickets": drawn,
    }
    return {"tickets": batch | changed}


def test_tickets_decide_which_bot_plays_and_are_fetched_in_advance(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    canary = scenario.release(2, "canary", share=0.2)
    models = [1, 2, 1, 1, 2] * 60
    drawn = tickets(scenario, *models)
    found = played(first, canary | drawn | {"episodes": 400, "refills": True})["seen"]
    expected = [*models, *[1] * 100]  # the champion plays without a ticket
    assert found[1]["models"] == [[f"my-game/{number}", number] for number in expected]
    texts = [each["ticket"] for each in drawn["tickets"]["tickets"]]
    assert found[1]["tickets"] == [*texts, *[None] * 100]
    assert (found[0]["tickets"], found[0]["ticketRequests"]) == ([None], [])
    assert len(found[1]["ticketRequests"]) >= 5
    assert found[1]["ticketRequests"][0] == {"schema": SPEC.schema, "n": 64, "control": False}
    assert {step["schema"] for step in found} == {SPEC.schema}


def test_without_tickets_the_champion_plays_at_once(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    canary = scenario.release(2, "canary", share=0.5)
    drawn = tickets(scenario, *[2] * 64)
    offline = {"start": {"isOffline": True}, "untilBot": "my-game/1", "episodes": 50}
    for steps in (
        (first, canary | {"episodes": 50}),  # a gateway of an earlier version
        (first, canary | {"tickets": "stalls", "untilBot": "my-game/1", "episodes": 50}),
        (first, canary | drawn, offline),
    ):
        found = played(*steps)["seen"][-1]
        assert found["models"] == [["my-game/1", 1]] * 50
        assert found["tickets"] == [None] * 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"entry": 999},
        {"entry": "4"},
        {"models": None},
        {"models": ["1", "2"]},
        {"models": [2]},
        {"models": [1, 2, 7]},  # 7 is not drawn, but could have been
        {"tickets": [{"model_no": 7, "ticket": "t1"}]},
        {"tickets": [{"model_no": 2, "ticket": "t" * 129}]},
        {"tickets": [{"model_no": 2}]},
        {"tickets": None},
    ],
)
def test_tickets_that_do_not_fit_are_not_used(tmp_path, wrong):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    canary = scenario.release(2, "canary", share=0.5)
    batch = tickets(scenario, 2, 2, 2, **wrong)["tickets"]
    if batch["tickets"] is None:
        batch["tickets"] = [None]
    found = played(first, canary | {"tickets": batch, "episodes": 9})["seen"]
    assert found[1]["models"] == [["my-game/1", 1]] * 9
    assert found[1]["refused"] == 0


def test_tickets_of_earlier_models_are_not_used_until_they_are_dropped(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    canary = scenario.release(2, "canary", share=0.5) | tickets(scenario, *[2] * 999)
    found = played(first, canary, {"promotesCanary": True, "episodes": 9})["seen"]
    assert found[1]["tickets"][0] is not None
    assert found[2]["models"] == [["my-game/2", 2]] * 9
    assert found[2]["tickets"] == [None] * 9


def test_a_canary_that_fails_a_check_plays_nowhere(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    bad = scenario.release(0, "canary", share=0.2)
    bad["policies"][2] = "00"
    found = played(first, bad | tickets(scenario, *[2] * 64) | {"episodes": 50})["seen"]
    assert (found[1]["bot"], found[1]["refused"]) == ("my-game/1", 1)
    assert found[1]["models"] == [["my-game/1", 1]] * 50
    assert found[1]["ticketRequests"] == []


def test_beside_a_canary_the_control_plays_unless_it_fails_a_check(tmp_path):
    scenario = Scenario(tmp_path)
    scenario.release(0)
    first = scenario.release(1)
    trial = scenario.release(2, "canary", share=0.25, control=Control(1, 0.05))
    models = [1, 2, 3] * 20
    drawn = tickets(scenario, *models)
    found = played(first, trial | drawn | {"episodes": 60})["seen"]
    assert found[1]["models"] == [[f"my-game/{number}", number - 1] for number in models]
    assert found[1]["ticketRequests"][0]["control"] is True
    for broken in ("00", None):  # None: the gateway does not respond
        trial["policies"][1] = broken
        two = tickets(scenario, *[2, 3] * 30)
        damaged = played(first, trial | two | {"episodes": 60})["seen"]
        assert damaged[1]["ticketRequests"][0]["control"] is False
        assert damaged[1]["models"] == [["my-game/2", 1], ["my-game/3", 2]] * 30
        assert damaged[1]["refused"] == 1


@pytest.mark.parametrize(("temperature", "at"), [(0.25, (4.0, None)), (None, (None, 0.1))])
def test_a_champion_explores_in_its_share_of_episodes(tmp_path, temperature, at):
    scenario = Scenario(tmp_path)
    first = scenario.release(1, temperature=temperature)
    assert played(first)["seen"][0]["explored"] == []
    scenario.release(2, "canary", share=0.5)
    registry = scenario.platform.registry
    noise = {"easy": 0.8, "even": 0.4}
    epoch = registry.catalogue("my-game").epoch
    registry.set_noise("my-game", 1, noise, episodes=0, epoch=epoch, explore_share=0.2)
    scenario.platform.announce()
    for found in played(scenario.now(), {"start": {"isOffline": True}})["seen"]:
        assert len(found["explored"]) == pytest.approx(100, abs=40)
        assert {tuple(bot) for bot in found["explored"]} == {("my-game/1", *at, None)}


def test_the_noise_of_skills_is_verified_and_the_last_valid_one_stays_also_offline(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    registry = scenario.platform.registry
    noise = {"easy": 0.8, "even": 0.4}
    registry.set_noise("my-game", 1, noise, episodes=20, epoch=registry.catalogue("my-game").epoch)
    scenario.platform.announce()
    published = scenario.now()
    number = published["liveModels"]["number"]
    entry = {"kind": "noise", "journal": "registry/my-game", "schema": SPEC.schema}
    forged = [
        OTHER.sign(entry | {"noise": {"easy": 0, "even": 0}}),
        SIGNER.sign(entry | {"kind": "point", "noise": {"easy": 0, "even": 0}}),
        SIGNER.sign(entry | {"schema": "0" * 64, "noise": {"easy": 0, "even": 0}}),
        SIGNER.sign(entry | {"noise": {"easy": 0, "even": 2}}),
        b"{}",
    ]
    bad = [
        scenario.now(number=number + at, noise=text.decode()) for at, text in enumerate(forged, 1)
    ]
    offline = {"start": {"isOffline": True}, "untilBot": "my-game/1"}
    found = played(first, published, *bad, offline)["seen"]
    assert [step["even"] for step in found] == [0.25] + [0.4] * 7
    assert [step["refused"] for step in found] == [0, 0, 1, 2, 3, 4, 5, 0]
    assert {step["bot"] for step in found} == {"my-game/1"}


def test_two_versions_of_a_game_keep_their_bots_apart_in_one_storage(tmp_path):
    scenario = Scenario(tmp_path)
    found = played(scenario.release(1))["seen"]
    names = found[0]["storage"]
    assert f"bot/{SPEC.schema[:16]}" in names
    assert [name.rpartition("/")[0] for name in names if name.startswith("policy/")] == [
        f"policy/{SPEC.schema[:16]}"
    ]


def test_while_there_is_no_bot_none_is_picked():
    assert played({})["seen"][0]["picked"] == [None]


def test_a_canary_that_cannot_be_fetched_blocks_nothing_and_plays_once_it_can(tmp_path):
    scenario = Scenario(tmp_path)
    scenario.release(1)
    both = scenario.release(2, "canary", share=0.5)
    away = both | {
        "policies": both["policies"] | {2: None},
        "untilBot": "my-game/1",
        "episodes": 50,
    }
    offline = {"start": {"isOffline": True}, "untilBot": "my-game/1", "episodes": 50}
    later = {"start": {}, "episodes": 50} | both | tickets(scenario, *[1, 2] * 30)
    found = played(away, offline, later)["seen"]
    assert [step["bot"] for step in found] == ["my-game/1"] * 3
    assert [{name for name, _ in step["models"]} for step in found] == [
        {"my-game/1"},
        {"my-game/1"},
        {"my-game/1", "my-game/2"},
    ]


def test_keys_are_pinned_only_when_one_of_them_has_signed(tmp_path):
    scenario = Scenario(tmp_path)
    forged = scenario.release(1)
    forged["liveModels"]["trust"] = [public_key_text(OTHER.public)]
    found = played(forged, scenario.release(2))["seen"]
    assert [step["error"].partition(":")[0] for step in found] == ["unknown_key", ""]
    assert (found[1]["bot"], "trust" in found[0]["storage"], "trust" in found[1]["storage"]) == (
        "my-game/2",
        False,
        True,
    )


def test_a_number_that_another_page_saw_is_never_written_back(tmp_path):
    scenario = Scenario(tmp_path)
    found = played(
        scenario.release(1), {"otherPageSaw": {"champion": 999, "canary": 7}} | scenario.release(2)
    )["seen"]
    assert found[1]["bot"] == "my-game/2"
    assert json.loads(found[1]["record"])["seen"] == {"champion": 999, "canary": 7}


def test_a_cleared_champion_means_no_bot(tmp_path):
    scenario = Scenario(tmp_path)
    first = scenario.release(1)
    scenario.platform.registry.clear_alias(
        "my-game", "champion", schema=SPEC.schema, why="withdrawn"
    )
    scenario.platform.announce()
    found = played(first, scenario.now(), {"start": {"isOffline": True}})["seen"]
    assert [step["bot"] for step in found] == ["my-game/1", "", ""]


def test_an_older_model_can_be_requested_and_is_verified_too(tmp_path):
    scenario = Scenario(tmp_path)
    scenario.release(1)
    both = scenario.release(2)
    found = played(both | {"model": 1}, both | {"model": 2, "policies": {2: "00"}})["seen"]
    assert [step["model"] for step in found] == ["my-game/1", "bad_hash"]


def test_golden_outputs_are_computed_and_checked_alike_for_every_policy(tmp_path):
    """Every kind of input, and one of 30,000 numbers."""
    spec = game_spec("net", obs=Box((30_000,), DTYPES["F32"]), actions=3)
    network = NetworkSpec({"obs": Input((30_000,), DTYPES["F32"])}, (), {"q": (Dense(3),)})
    weights = {
        name: np.random.default_rng(5).normal(size=shape).astype(np.float32)
        for name, shape in network.shapes().items()
    }
    policies = [policy_of(case, seed) for seed, case in enumerate(CASES.values())]
    policies.append(Policy(spec, network, weights, head_for(spec, "argmax")))
    scenarios = []
    for policy in policies:
        raw = policy.encode()
        manifest = make_manifest(policy, raw, model_no=1, lineage=Lineage(algorithm="bc")).to_json()
        facts = {"journal": f"registry/{policy.game.game}", "number": 1}
        point = SIGNER.sign({**facts, "kind": "point", "alias": "champion", "model_no": 1}).decode()
        release = SIGNER.sign({**facts, "kind": "release", "manifest": manifest}).decode()
        live_models = {"number": 1, "champion": point, "champion_release": release, "trust": TRUST}
        step = {"start": {}, "liveModels": live_models, "policies": {1: raw.hex()}, "episodes": 0}
        scenarios.append({"spec": json.loads(policy.game.to_json()), "steps": [step]})
    found = ask_node({"scenarios": scenarios})["scenarios"]
    assert [(result["seen"][0]["bot"], result["seen"][0]["error"]) for result in found] == [
        ("net/1", "")
    ] * len(policies)
