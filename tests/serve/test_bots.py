"""Bots over HTTP: signed, newest at once, and never worse than the last good one."""

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.serve.gateways import SIGNER, TRUSTED, Running, running
from understudy.core.signed import open_signed, public_key_text
from understudy.core.tensors import DTYPES
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.models.catalogue import Control
from understudy.models.manifest import manifest_from_json, open_policy
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.serve.bots import ServedBots
from understudy.serve.state import GatewayConfig
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A busy machine may be late, and then chance decides; only one test here is about that.
    with running(tmp_path_factory.mktemp("bots"), GatewayConfig(decide_within_s=10.0)) as found:
        yield found


@pytest.fixture(scope="module")
def key(gateway: Running) -> str:
    return gateway.key("play", "work")


def blob(gateway: Running, sha256: str) -> Path:
    return gateway.folder / "models" / "blobs" / f"{sha256}.safetensors"


def model_of(bot: dict[str, Any], alias: str = "champion") -> int:
    """Checked as a client would check it."""
    pointer = open_signed(bot[alias].encode(), TRUSTED)
    assert (pointer["kind"], pointer["alias"]) == ("point", alias)
    if not pointer["model_no"]:
        return 0
    release = open_signed(bot[f"{alias}_release"].encode(), TRUSTED)
    assert manifest_from_json(release["manifest"]).model_no == pointer["model_no"]
    return int(pointer["model_no"])


# --- Registering ----------------------------------------------------------------------------------


def test_only_some_keys_register_a_game(gateway: Running, key: str):
    spec = cart_spec("newcomer")
    path = "/v1/games/newcomer"
    body = spec.to_json()
    reply = gateway.ask("PUT", path, key, body)
    assert (reply.status, reply.code) == (404, "not_registered")
    assert "development key" in reply.json["error"]["detail"]
    assert gateway.ask("GET", path, key).code == "not_registered"
    developing = gateway.key("play", registers=True)
    for caller in (developing, developing, key):
        reply = gateway.ask("PUT", path, caller, body)
        assert reply.json == {"game": "newcomer", "schema": spec.schema}, (
            "a known spec gets the same answer"
        )
    assert gateway.ask("GET", path, key).json == {
        "game": "newcomer",
        "schemas": [spec.schema],
        "champion": 0,
        "canary": 0,
        "champions": {},
        "missing_steps": None,
        "trained_schema": None,
        "steps": {},
    }
    assert gateway.ask("GET", f"{path}/specs/{spec.schema}", key).raw == body
    assert gateway.ask("GET", f"{path}/specs/{'0' * 64}", key).status == 404
    other = game_spec("newcomer", obs=5, actions=2)
    assert gateway.ask("PUT", path, key, other.to_json()).code == "not_registered"
    assert gateway.ask("PUT", path, gateway.key("admin"), other.to_json()).status == 200
    assert len(gateway.ask("GET", path, key).json["schemas"]) == 2
    assert gateway.ask("PUT", "/v1/games/elsewhere", developing, body).code == "wrong_game"
    for raw in (
        b"",
        b"{}",
        b"[]",
        b'{"format":1}',
        body[:-1],
        body.replace(b"discrete", b"x"),
        b"[" * 9999,
    ):
        assert gateway.ask("PUT", path, developing, raw).code == "bad_spec"


def test_a_key_lists_only_the_games_it_is_valid_for(gateway: Running):
    for name in ("seen", "unseen"):
        gateway.register(cart_spec(name))
    assert gateway.ask("GET", "/v1/games", gateway.key("play", game="seen")).json == {
        "games": ["seen"]
    }
    assert {"seen", "unseen"} <= set(
        gateway.ask("GET", "/v1/games", gateway.key("read", "play")).json["games"]
    )


# --- Following ------------------------------------------------------------------------------------


def test_live_models_are_signed_and_the_policy_matches_the_signature(gateway: Running, key: str):
    spec = gateway.register(cart_spec("signed"))
    nobody = gateway.ask("GET", "/v1/games/signed/bot", key).json
    assert (nobody["number"], nobody["champion"], nobody["trust"]) == (
        0,
        None,
        [public_key_text(SIGNER.public)],
    )
    manifest = gateway.release(spec, seed=7)
    bot = gateway.ask("GET", "/v1/games/signed/bot?after=0&wait_s=30", key).json
    while bot["champion"] is None:
        bot = gateway.ask("GET", f"/v1/games/signed/bot?after={bot['number']}&wait_s=30", key).json
    assert model_of(bot) == 1
    reply = gateway.ask("GET", "/v1/games/signed/models/1/policy", key)
    assert open_policy(manifest, reply.raw) == random_policy(spec, "argmax", seed=7)
    assert "immutable" in reply.headers["cache-control"]
    facts = gateway.ask("GET", "/v1/games/signed/models/1", key).json
    assert facts["verdict"].startswith("promoted: ")
    assert (
        manifest_from_json(open_signed(facts["signed"].encode(), TRUSTED)["manifest"]) == manifest
    )
    for wrong in (
        "models/2",
        "models/2/policy",
        "models/0",
        f"models/{'9' * 400}",
        "models/x",
        "models/-1",
    ):
        assert gateway.ask("GET", f"/v1/games/signed/{wrong}", key).status == 404


def test_a_long_poll_ends_with_204_or_within_200_ms_of_a_promotion(
    gateway: Running, key: str, bar: Callable[[float], float]
):
    spec = gateway.register(cart_spec("polled"))
    gateway.release(spec, seed=0)
    gateway.release(spec, seed=1, promote=False)
    time.sleep(0.2)
    bot = gateway.ask("GET", "/v1/games/polled/bot", key).json
    assert model_of(bot) == 1
    began_s = time.monotonic()
    reply = gateway.ask("GET", f"/v1/games/polled/bot?after={bot['number']}&wait_s=0.3", key)
    assert (reply.status, reply.raw) == (204, b"")
    assert 0.25 < time.monotonic() - began_s < 8
    took_s = min(woken_after_s(gateway, key, model_no) for model_no in (2, 1, 2))
    assert took_s < bar(0.2)


def woken_after_s(gateway: Running, key: str, model_no: int) -> float:
    """How long after a promotion the last of 16 who wait for it has its answer."""
    number = gateway.ask("GET", "/v1/games/polled/bot", key).json["number"]

    def wait() -> tuple[int, float]:
        reply = gateway.ask("GET", f"/v1/games/polled/bot?after={number}&wait_s=30", key)
        return model_of(reply.json), time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(wait) for _ in range(16)]
        time.sleep(0.3)
        gateway.registry.set_alias("polled", "champion", model_no, why="better")
        at_s = time.monotonic()
        told = [one.result() for one in waiting]
    assert {number for number, _ in told} == {model_no}
    return max(woken_s for _, woken_s in told) - at_s


def test_a_canary_is_served_with_its_share(gateway: Running, key: str):
    spec = gateway.register(cart_spec("tried"))
    gateway.release(spec, seed=0)
    gateway.release(spec, seed=1, promote=False)
    gateway.registry.set_alias("tried", "canary", 2, why="try it")
    bot = gateway.ask("GET", "/v1/games/tried/bot", key).json
    assert (model_of(bot), model_of(bot, "canary"), bot["canary_share"]) == (1, 2, 0.2)
    gateway.registry.withdraw("tried", why="enough")
    bot = gateway.ask("GET", f"/v1/games/tried/bot?after={bot['number']}&wait_s=30", key).json
    assert (model_of(bot), bot["canary"], bot["canary_share"]) == (1, None, 0.0)


def test_the_control_of_a_trial_is_served_unless_it_is_damaged(gateway: Running, key: str):
    spec = gateway.register(cart_spec("controlled"))
    for seed in range(3):
        gateway.release(spec, seed=seed, promote=seed < 2)
    registry = gateway.registry
    path = "/v1/games/controlled/bot?wait_s=30&after="
    number = 0
    for share in (0.1, 0.2):
        registry.set_alias(
            "controlled", "canary", 3, why="try it", share=share, control=Control(1, 0.05)
        )
        for _ in range(10):  # the gateway may not have read the last entries yet
            bot = gateway.ask("GET", f"{path}{number}", key).json
            number = bot["number"]
            if bot["canary_share"] == share:
                break
        assert (model_of(bot), model_of(bot, "canary"), bot["canary_share"]) == (2, 3, share)
        release = registry.catalogue("controlled").signed["controlled/1"].decode()
        assert bot["control_release"] == release
        assert json.loads(bot["canary"])["entry"]["control"] == {"model_no": 1, "share": 0.05}
    registry.withdraw("controlled", why="enough")
    bot = gateway.ask("GET", f"{path}{bot['number']}", key).json
    assert (bot["canary"], bot["control_release"]) == (None, None)
    blob(gateway, registry.manifest("controlled", 1).policy_sha256).write_bytes(b"")
    registry.set_alias("controlled", "canary", 3, why="try it", control=Control(1, 0.05))
    bot = gateway.ask("GET", f"{path}{bot['number']}", key).json
    assert (model_of(bot, "canary"), bot["control_release"]) == (3, None)


def test_workers_wait_for_weights(gateway: Running, key: str):
    spec = gateway.register(cart_spec("worked"))
    began_s = time.monotonic()
    gateway.registry.takeover("worked", owner="a learner")
    assert gateway.ask("GET", "/v1/games/worked/weights?after=0&wait_s=0.3", key).status == 204
    assert time.monotonic() - began_s > 0.25, "without a bot it waits, though something was written"
    manifest = gateway.release(spec, seed=3)
    reply = gateway.ask("GET", "/v1/games/worked/weights?after=0&wait_s=30", key)
    assert open_policy(manifest, reply.raw) == random_policy(spec, "argmax", seed=3)
    assert reply.headers["x-understudy-model"] == "1"
    after = int(reply.headers["x-understudy-number"])
    assert gateway.ask("GET", f"/v1/games/worked/weights?after={after}", key).status == 204
    assert gateway.ask("GET", "/v1/games/worked/weights", gateway.key("play")).code == "wrong_scope"


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "after=1&wait_s=-1", "after=1&wait_s=nan", "wait_s=inf"]
)
def test_invalid_queries_are_rejected(gateway: Running, key: str, query: str):
    gateway.register(cart_spec("asked"))
    assert gateway.ask("GET", f"/v1/games/asked/bot?{query}", key).code == "bad_query"


def test_promote_and_roll_back(gateway: Running):
    spec = gateway.register(cart_spec("steered"))
    admin = gateway.key("admin")
    assert gateway.ask("POST", "/v1/games/steered/rollback", admin).code == "bad_request", (
        "there is nothing yet"
    )
    for seed in (0, 1):
        gateway.release(spec, seed=seed, promote=False)
    promoted = gateway.ask("POST", "/v1/games/steered/promote", admin, {"model_no": 1})
    assert promoted.json == {"alias": "champion", "model_no": 1}
    gateway.ask("POST", "/v1/games/steered/promote", admin, {"model_no": 2, "why": "better"})
    assert gateway.ask("GET", "/v1/games/steered", admin).json["champion"] == 2
    assert gateway.ask("POST", "/v1/games/steered/rollback", admin).json["model_no"] == 1
    assert [old.model_no for old in gateway.registry.catalogue("steered").history] == [1, 2, 1]
    for wrong in (
        {"model_no": 9},
        {"model_no": 0},
        {"model_no": -1},
        {"model_no": 1 << 70},
        {},
        {"model_no": "1"},
    ):
        assert gateway.ask("POST", "/v1/games/steered/promote", admin, wrong).status in (400, 404)


# --- Damage ---------------------------------------------------------------------------------------


def test_a_damaged_model_does_not_replace_the_last_good_bot(gateway: Running, key: str):
    spec = gateway.register(cart_spec("damaged"))
    good = gateway.release(spec, seed=0)
    time.sleep(0.2)
    before = gateway.ask("GET", "/v1/games/damaged/bot", key).json
    bad = gateway.release(spec, seed=1, promote=False)
    whole = blob(gateway, bad.policy_sha256).read_bytes()
    blob(gateway, bad.policy_sha256).chmod(0o600)
    blob(gateway, bad.policy_sha256).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    time.sleep(0.2)
    between = gateway.ask("GET", "/v1/games/damaged/bot", key).json
    gateway.registry.set_alias("damaged", "champion", 2, why="looks good")
    gateway.registry.set_alias("damaged", "canary", 2, why="no better idea")
    reply = gateway.ask("GET", f"/v1/games/damaged/bot?after={between['number']}&wait_s=0.5", key)
    assert reply.status == 204, "nothing newer that is good"
    after = gateway.ask("GET", "/v1/games/damaged/bot", key).json
    assert after["champion"] == before["champion"]
    assert after["champion_release"] == before["champion_release"]
    assert after["canary"] is None
    raw = gateway.ask("GET", f"/v1/games/damaged/weights?after={before['number'] - 1}", key).raw
    assert open_policy(good, raw)
    assert (
        gateway.ask("POST", "/v1/games/damaged/act", key, {"obs": [0, 0, 0, 0]}).json["model_no"]
        == 1
    )
    reply = gateway.ask("GET", "/v1/games/damaged/models/2/policy", key)
    assert (reply.status, reply.code) == (503, "not_available")
    assert str(gateway.folder) not in reply.raw.decode()


def test_a_gateway_that_starts_with_a_damaged_champion_serves_the_previous_one(
    tmp_path: Path,
):
    with running(tmp_path) as first:
        spec = first.register()
        good, bad = (first.release(spec, seed=seed) for seed in (0, 1))
        first.registry.set_alias("cart", "canary", 2, why="both")
    path = tmp_path / "models" / "blobs" / f"{bad.policy_sha256}.safetensors"
    whole = path.read_bytes()
    path.unlink()
    with running(tmp_path, GatewayConfig(decide_within_s=10.0)) as second:
        key = second.key("play")
        bot = second.ask("GET", "/v1/games/cart/bot", key).json
        assert model_of(bot) == 1
        assert bot["canary"] is None
        reply = second.ask("POST", "/v1/games/cart/act", key, {"obs": [0, 0, 0, 0]}).json
        assert (reply["model_no"], reply["is_fallback"]) == (1, False)
        path.write_bytes(whole)
        bot = second.ask("GET", f"/v1/games/cart/bot?after={bot['number']}&wait_s=30", key).json
        assert model_of(bot) == 2, "restored, it comes by itself"
    assert good.model_no == 1


def test_a_game_whose_every_model_is_damaged_still_gets_actions(tmp_path: Path):
    with running(tmp_path) as gateway:
        spec = gateway.register()
        key = gateway.key("play")
        blob(gateway, gateway.release(spec).policy_sha256).unlink()
        assert gateway.ask("GET", "/v1/games/cart/bot", key).json["champion"] is None
        reply = gateway.ask("POST", "/v1/games/cart/act", key, {"obs": [0, 0, 0, 0]}).json
        assert reply["is_fallback"]
        assert reply["action"] in (0, 1)
        assert reply["why"] == "cart/1 is damaged, and no earlier champion is intact"


def test_concurrent_first_requests_all_get_the_bot(tmp_path: Path):
    with running(tmp_path) as gateway:
        gateway.release(gateway.register())
        key = gateway.key("play")
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            bots = list(
                pool.map(lambda _: gateway.ask("GET", "/v1/games/cart/bot", key).json, range(24))
            )
        assert {model_of(bot) for bot in bots} == {1}


# --- Deciding -------------------------------------------------------------------------------------

DUEL = game_spec("duel", obs=6, actions=["left", "stay", "right", "jump"], has_action_mask=True)


@pytest.fixture(scope="module")
def duel(gateway: Running) -> Policy:
    gateway.register(DUEL)
    gateway.release(DUEL, seed=11)
    return random_policy(DUEL, "argmax", seed=11)


def obs_of(seed: int, spec: GameSpec = DUEL) -> list[float]:
    n = int(np.prod(spec.obs[""].shape))
    return [float(x) for x in np.random.default_rng(seed).normal(size=n).astype(np.float32)]


def test_concurrent_decisions_equal_those_of_the_policy(gateway: Running, key: str, duel: Policy):
    gateway.ask("POST", "/v1/games/duel/act", key, {"obs": obs_of(0)})

    def one(seed: int) -> None:
        obs = obs_of(seed)
        mask = [bool(x) for x in np.random.default_rng(seed).random(4) < 0.5]
        mask[seed % 4] = True
        reply = gateway.ask(
            "POST", "/v1/games/duel/act", key, {"obs": obs, "action_mask": mask}
        ).json
        assert reply == {
            "action": duel.act(np.array(obs, np.float32), action_mask=mask),
            "model_no": 1,
            "is_fallback": False,
            "why": "",
        }

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))


def test_stochastic_decisions_are_always_valid_actions(gateway: Running, key: str):
    spec = game_spec("dice", obs=6, actions=4)
    gateway.register(spec)
    gateway.release(spec, "categorical", seed=2)
    asked = {"obs": obs_of(1), "action_mask": [True, False, True, False], "deterministic": False}
    seen = {gateway.ask("POST", "/v1/games/dice/act", key, asked).json["action"] for _ in range(60)}
    assert seen == {0, 2}


def test_without_a_bot_the_answer_is_a_random_valid_action_and_the_reason(
    gateway: Running, key: str
):
    spec = game_spec(
        "partly",
        obs=2,
        actions={"move": Box((2,), DTYPES["F32"], -1, 1), "say": Box((), DTYPES["U8"], 0, 3)},
    )
    gateway.register(spec)
    for _ in range(20):
        reply = gateway.ask("POST", "/v1/games/partly/act", key, {"obs": [0.5, 1]}).json
        assert (reply["model_no"], reply["is_fallback"], reply["why"]) == (
            0,
            True,
            "partly has no bot yet",
        )
        assert all(-1 <= x <= 1 for x in reply["action"]["move"])
        assert reply["action"]["say"] in range(4)
    gateway.register(game_spec("masked", obs=1, actions=3, has_action_mask=True))
    asked = {"obs": [0], "action_mask": [False, False, True]}
    assert {
        gateway.ask("POST", "/v1/games/masked/act", key, asked).json["action"] for _ in range(20)
    } == {2}
    assert gateway.ask("POST", "/v1/games/masked/advise", key, asked).code == "no_bot"


def test_a_bot_that_needs_several_observations_is_not_served(gateway: Running, key: str):
    spec = gateway.register(game_spec("remembers", obs=3, actions=2))
    gateway.release(spec, stack=4)
    reply = gateway.ask("POST", "/v1/games/remembers/act", key, {"obs": [0, 0, 0]}).json
    assert reply["is_fallback"]
    assert "needs the last 4 observations" in reply["why"]


def test_continuous_actions_equal_those_of_the_policy(gateway: Running, key: str):
    spec = gateway.register(game_spec("steer", obs=3, actions=Box((2,), DTYPES["F32"], -2, 2)))
    gateway.release(spec, "gaussian_tanh", seed=4)
    obs = obs_of(3, spec)
    reply = gateway.ask("POST", "/v1/games/steer/act", key, {"obs": obs}).json
    wanted = random_policy(spec, "gaussian_tanh", seed=4).act(np.array(obs, np.float32))
    np.testing.assert_allclose(reply["action"], wanted, rtol=1e-5)
    assert gateway.ask("POST", "/v1/games/steer/advise", key, {"obs": obs}).code == "not_discrete"


def test_advice_ranks_every_valid_action_with_its_name(gateway: Running, key: str, duel: Policy):
    obs = obs_of(5)
    mask = [True, True, False, True]
    reply = gateway.ask(
        "POST", "/v1/games/duel/advise", key, {"obs": obs, "action_mask": mask}
    ).json
    q = duel.outputs({"obs": np.array([obs], np.float32)})["q"][0]
    ranked = sorted((0, 1, 3), key=lambda at: -q[at])
    assert [one["action"] for one in reply["actions"]] == ranked
    assert [one["name"] for one in reply["actions"]] == [DUEL.action_names[at] for at in ranked]
    np.testing.assert_allclose([one["value"] for one in reply["actions"]], q[ranked], rtol=1e-5)
    assert all(one["probability"] is None for one in reply["actions"])
    assert (
        gateway.ask("POST", "/v1/games/duel/act", key, {"obs": obs, "action_mask": mask}).json[
            "action"
        ]
        == ranked[0]
    )


def test_advice_of_a_stochastic_bot_has_probabilities(gateway: Running, key: str):
    spec = gateway.register(game_spec("odds", obs=6, actions=3))
    gateway.release(spec, "categorical", seed=2)
    reply = gateway.ask(
        "POST", "/v1/games/odds/advise", key, {"obs": obs_of(1), "action_mask": [True, False, True]}
    ).json
    shares = [one["probability"] for one in reply["actions"]]
    assert {one["action"] for one in reply["actions"]} == {0, 2}
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert reply["model_no"] == 1


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"obs": None},
        {"obs": "x"},
        {"obs": [1, 2]},
        {"obs": [[0] * 6]},
        {"obs": {"a": 1}},
        {"obs": [1e39] * 6},
        {"obs": [None] * 6},
        {"obs": [0] * 6, "action_mask": []},
        {"obs": [0] * 6, "action_mask": [False] * 4},
        {"obs": [0] * 6, "action_mask": [True] * 5},
        {"obs": [0] * 6, "action_mask": [1] * 4},
        {"obs": [10**400] * 6},
        {"obs": [0] * 6, "schema": "0" * 64},
        {"obs": [0] * 6, "action_mask": "yes"},
        {"obs": [0] * 6, "deterministic": 1},
        {"obs": [0] * 6, "skill": "medium"},
        {"obs": [0] * 6, "skill": 1},
        {"obs": [0] * 6, "temperature": 0},
        {"obs": [0] * 6, "temperature": "hot"},
        {"obs": [0] * 6, "temperature": 1e9},
        {"obs": [0] * 6, "temperature": 2, "skill": "hard"},
        {"obs": [0] * 6, "temperature": 2, "deterministic": True},
        {"obs": ["0"] * 6},
        {"obs": [True, [0], 0, 0, 0, 0]},
        [],
        1,
    ],
)
def test_invalid_requests_for_decisions_are_rejected(
    gateway: Running, key: str, duel: Policy, asked: Any
):
    for route in ("act", "advise"):
        assert gateway.ask("POST", f"/v1/games/duel/{route}", key, asked).status == 400


def test_the_registrys_own_interval_limits_how_often_it_is_read(tmp_path: Path):
    near = FolderObjects(tmp_path / "near")
    far = FolderObjects(tmp_path / "far")
    far.poll_every_s = 0.5
    for objects, every_s in ((near, 0.03), (far, 0.5)):
        registry = Registry(objects, trusted=TRUSTED)
        with concurrent.futures.ThreadPoolExecutor() as executor:
            bots = ServedBots(
                registry,
                executor,
                trust=[],
                follow_every_s=GatewayConfig().follow_every_s,
            )
        assert bots.every_s == every_s


def test_a_bot_that_times_out_is_replaced_by_a_random_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = GatewayConfig(follow_every_s=0.02, decide_within_s=1.0)
    with running(tmp_path, config) as gateway:
        spec = gateway.register()
        key = gateway.key("play")
        gateway.release(spec)
        gateway.ask("GET", "/v1/games/cart/bot", key)
        decide = Policy.decide
        answered = threading.Event()

        def slow(*given: Any, **more: Any) -> Any:
            answered.wait(60)
            return decide(*given, **more)

        monkeypatch.setattr(Policy, "decide", slow)
        reply = gateway.ask("POST", "/v1/games/cart/act", key, {"obs": [0, 0, 0, 0]}).json
        answered.set()
        assert (reply["is_fallback"], reply["why"]) == (True, "the bot took longer than 1 s")

        def failing(*given: Any, **more: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(Policy, "decide", failing)
        reply = gateway.ask("POST", "/v1/games/cart/act", key, {"obs": [0, 0, 0, 0]}).json
        assert (reply["is_fallback"], reply["why"]) == (True, "the bot failed")


def test_without_a_schema_an_action_does_not_wait_for_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = ManualClock()
    with running(tmp_path, GatewayConfig(follow_every_s=3600.0), clock=clock) as gateway:
        gateway.register(cart_spec("two"))
        new = gateway.register(game_spec("two", obs=3, actions=2))
        gateway.release(new)
        key = gateway.key("play")
        gateway.ask("GET", "/v1/games/two", key)  # its specs are known now
        ask = {"obs": [0, 0, 0]}
        is_back = threading.Event()
        for name in ("catalogue", "specs"):
            real = getattr(Registry, name)

            def slow(*given: Any, real: Any = real) -> Any:
                assert is_back.wait(60)
                return real(*given)

            monkeypatch.setattr(Registry, name, slow)
        clock.advance(60)  # the specs are due to be read again
        try:
            for _ in range(2):
                reply = gateway.ask("POST", "/v1/games/two/act", key, ask).json
                assert (reply["is_fallback"], reply["why"]) == (
                    True,
                    "the bot took longer than 0.05 s",
                )
        finally:
            is_back.set()
        until_s = time.monotonic() + 20
        while gateway.ask("POST", "/v1/games/two/act", key, ask).json["model_no"] != 1:
            assert time.monotonic() < until_s


def test_decisions_that_timed_out_in_the_queue_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with running(tmp_path, GatewayConfig(follow_every_s=0.02)) as gateway:
        spec = gateway.register()
        key = gateway.key("play")
        gateway.release(spec)
        gateway.ask("GET", "/v1/games/cart/bot", key)
        decide = Policy.decide
        go_on = threading.Event()
        decided = []

        def waiting(*given: Any, **more: Any) -> Any:
            decided.append(1)
            assert go_on.wait(20)
            return decide(*given, **more)

        monkeypatch.setattr(Policy, "decide", waiting)
        asked = {"obs": [0, 0, 0, 0]}
        for _ in range(5):
            assert gateway.ask("POST", "/v1/games/cart/act", key, asked).json["is_fallback"]
        assert len(decided) == 1
        go_on.set()
        until_s = time.monotonic() + 20
        while gateway.ask("POST", "/v1/games/cart/act", key, asked).json["is_fallback"]:
            assert time.monotonic() < until_s
        assert len(decided) < 5, "four waited behind the first, and nobody waited for them"


def test_each_schema_of_a_game_is_served_its_own_bot(gateway: Running, key: str):
    old = gateway.register(cart_spec("updated"))
    new = gateway.register(game_spec("updated", obs=3, actions=2))
    unplayed = gateway.register(game_spec("updated", obs=5, actions=2))
    gateway.release(old, seed=0)
    gateway.release(new, seed=1)
    gateway.release(old, seed=2, promote=False)
    gateway.registry.set_alias("updated", "canary", 3, why="try", share=0.1)

    def served(schema: str) -> dict[str, Any]:
        path = f"/v1/games/updated/bot?schema={schema}"
        return dict(gateway.ask("GET", f"{path}&after=0&wait_s=5", key).json)

    assert (model_of(served(old.schema)), model_of(served(new.schema))) == (1, 2)
    assert served(old.schema)["canary_share"] == 0.1
    assert (served(new.schema)["canary"], served(unplayed.schema)["champion"]) == (None, None)
    assert model_of(gateway.ask("GET", "/v1/games/updated/bot", key).json) == 2, "the newest"
    stranger = gateway.ask("GET", f"/v1/games/updated/bot?schema={'0' * 64}", key)
    assert stranger.code == "not_registered"
    info = gateway.ask("GET", "/v1/games/updated", key).json
    assert (info["champion"], info["canary"]) == (2, 3)
    assert info["champions"] == {old.schema: 1, new.schema: 2}
    for spec, model_no in ((old, 1), (new, 2), (unplayed, 0)):
        (space,) = spec.obs.values()
        ask = {"obs": [0.0] * space.shape[0], "schema": spec.schema}
        acted = gateway.ask("POST", "/v1/games/updated/act", key, ask).json
        assert (acted["model_no"], acted["is_fallback"]) == (model_no, model_no == 0)
    ask = {"obs": [0.0] * 5, "schema": unplayed.schema}
    assert gateway.ask("POST", "/v1/games/updated/advise", key, ask).code == "no_bot"
    weights = gateway.ask("GET", f"/v1/games/updated/weights?after=0&schema={old.schema}", key)
    assert weights.headers["x-understudy-model"] == "1"
    admin = gateway.key("admin")
    gateway.ask("POST", "/v1/games/updated/promote", admin, {"model_no": 3})
    rolled = gateway.ask("POST", f"/v1/games/updated/rollback?schema={old.schema}", admin)
    assert rolled.json["model_no"] == 1
    assert model_of(served(new.schema)) == 2
