"""Keys, games and models from the command line, as an operator types them."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.backends.test_deployment import GAME, a_run
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment, signing_key
from understudy.cli.root import run as run_command
from understudy.client.connect import connect
from understudy.core.errors import ConfigError, StorageFailed
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key
from understudy.experience.spaces import Box
from understudy.learn.architecture import network_for, policy_outputs
from understudy.models.manifest import Lineage
from understudy.models.registry import Registry
from understudy.nn.heads import head_for
from understudy.nn.policy import Policy, decode_policy
from understudy.release.store_stats import StoreStats
from understudy.stores.view import StoreView
from understudy.training.follower import StoreFollower


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Asked:
    """Runs commands in this process with one data folder."""

    def __init__(self, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._data = str(data)
        self._capsys = capsys

    def __call__(self, line: str, *, code: int = 0) -> tuple[str, str]:
        got = run_command([*line.split(), "--data", self._data])
        out, errors = self._capsys.readouterr()
        assert got == code, (line, out, errors)
        assert "Traceback" not in errors
        return out, errors

    def json(self, line: str, *, code: int = 0) -> dict[str, Any]:
        fields = json.loads(self(line + " --json", code=code)[0].splitlines()[-1])
        assert isinstance(fields, dict)
        return fields


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(tmp_path / "D", capsys)


def test_a_key_is_shown_once_and_kept_as_a_hash(ask: Asked, tmp_path: Path):
    made = ask.json("keys create --scopes read,play --game pong --label table --expires-days 1")
    keys = open_deployment(DataFolder(tmp_path / "D")).keys
    keys.follow()
    key = keys.check(made["key"])
    assert (key.scopes, key.game, key.label, made["id"]) == (
        ("play", "read"),
        "pong",
        "table",
        key.id,
    )
    secret = made["key"].split("_", 2)[2]
    kept = b"".join(path.read_bytes() for path in (tmp_path / "D").rglob("*") if path.is_file())
    assert secret.encode() not in kept
    listed = ask.json("keys list")["keys"]
    assert [one["id"] for one in listed] == [key.id]
    assert "hash" not in listed[0]
    assert key.id in ask("keys list")[0]


def test_names_that_look_like_markup_are_shown_unchanged(ask: Asked):
    assert ask.json("keys create --label [/x]")["label"] == "[/x]"
    assert "[/x]" in ask("keys create --label [/x]")[0]
    assert ask("keys list")[0].count("[/x]") == 2
    ask("games add pong --obs 2 --actions 2")
    ask("ingest --until-empty")
    assert "no steps of [/x] exist in pong, so none were erased" in ask("data forget [/x]")[0]
    assert ask.json("data forget [/x]")["chunks"] == 0


def test_a_new_key_is_printed_even_if_the_registry_does_not_respond(
    ask: Asked, monkeypatch: pytest.MonkeyPatch
):
    def away(_: Registry) -> list[str]:
        raise StorageFailed("the models cannot be read")

    monkeypatch.setattr(Registry, "games", away)
    assert ask.json("keys create --game pong")["key"].startswith("uk_")


def test_a_key_can_be_revoked_by_a_prefix_of_its_id_or_by_the_full_key(ask: Asked):
    first = ask.json("keys create")
    second = ask.json("keys create")
    assert ask.json(f"keys revoke {first['id'][:10]}") == {"revoked": first["id"]}
    said, _ = ask(f"keys revoke {second['key']}")
    assert second["key"] not in said
    assert ask.json("keys list") == {"keys": [], "damage": ""}
    assert "no keys yet" in ask("keys list")[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("keys create --scopes fly", "play,work,read,admin"),
        ("keys create --scopes ,", "play,work,read,admin"),
        ("keys create --game ../x", "not allowed"),
        ("keys create --expires-days -1", "above 0"),
        ("keys create --origin ftp://x", "https://game.example"),
        ("keys create --expires-days 1e308", "below 100000"),
        ("keys create --origin null", "https://game.example"),
        ("keys create --requests-s 0", "above 0"),
        ("keys create --requests-s inf", "below 1000000000"),
        ("keys create --requests-s 1e300", "below 1000000000"),
        ("games add nothing.json", "cannot read nothing.json"),
        ("games add Nope-v1", "Nope"),
        ("games add x --obs 2 --actions up,", "--actions is 'up,'"),
        ("models add nowhere", "is not a run"),
    ],
)
def test_wrong_use_is_reported_in_one_message(ask: Asked, line: str, said: str):
    _, errors = ask(line, code=2)
    assert said in errors


@pytest.mark.parametrize(
    "line",
    [
        "keys list",
        "keys revoke abc",
        "games list",
        "models list",
        "models show g/1",
        "models promote g/1",
        "models rollback g",
    ],
)
def test_the_error_without_a_deployment_names_the_command_that_creates_one(
    ask: Asked, tmp_path: Path, line: str
):
    _, errors = ask(line, code=2)
    assert "understudy up --data" in errors
    assert not (tmp_path / "D").exists()


def test_games_are_added_from_gymnasium_or_a_file_listed_and_checked(ask: Asked, tmp_path: Path):
    (tmp_path / "pong.json").write_bytes(GAME.to_json())
    assert ask.json("games add CartPole-v1")["is_new"]
    assert not ask.json("games add CartPole-v1")["is_new"]
    assert ask.json(f"games check {tmp_path / 'pong.json'}", code=1)["is_registered"] is False
    assert ask.json(f"games add {tmp_path / 'pong.json'}")["game"] == "pong"
    assert ask.json(f"games check {tmp_path / 'pong.json'}")["is_registered"]
    assert [row["game"] for row in ask.json("games list")["games"]] == ["CartPole-v1", "pong"]
    assert "2 choices" in ask("games list")[0]
    (tmp_path / "bad.json").write_text("{}")
    assert "spec" in ask(f"games add {tmp_path / 'bad.json'}", code=2)[1]
    (tmp_path / "bad.json").write_text("[1, 2]")
    assert "JSON object with action" in (
        said := ask(f"games add {tmp_path / 'bad.json'}", code=2)[1]
    )
    assert "Error" not in said


def test_own_games_are_added_by_sizes_and_action_names(ask: Asked):
    added = ask.json("games add my-game --obs 6 --actions up,stay,down")
    assert added["schema"] == game_spec("my-game", obs=6, actions=["up", "stay", "down"]).schema
    assert ask.json("games add other --obs 2 --actions 4")["actions"] == "4 choices"
    assert ask.json("games check my-game")["is_registered"]
    assert not ask.json("games check my-game --obs 7 --actions 3", code=1)["is_registered"]
    assert "both --obs and --actions" in ask("games add third --obs 6", code=2)[1]
    assert (
        "differs from the registered game my-game only in case"
        in ask("games add MY-game --obs 6 --actions 3", code=2)[1]
    )
    assert "games add nobody" in ask("keys create --game nobody")[0]
    assert "not registered" not in ask("keys create --game my-game")[0]


def test_games_are_checked_in_the_folder_that_the_environment_names(
    ask: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ask("games add CartPole-v1")
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    assert run_command(["games", "check", "CartPole-v1", "--json"]) == 0
    assert "is_registered" not in json.loads(capsys.readouterr().out)
    monkeypatch.setenv("UNDERSTUDY_DATA", str(tmp_path / "D"))
    assert run_command(["games", "check", "CartPole-v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_registered"]
    assert run_command(["games", "check", "Acrobot-v1", "--json"]) == 1


def test_models_are_added_listed_shown_promoted_and_rolled_back(ask: Asked, tmp_path: Path):
    first = a_run(tmp_path / "one")
    second = a_run(tmp_path / "two", seed=1)
    assert ask.json(f"models add {first}")["is_champion"]
    assert "models promote pong/2" in ask(f"models add {second}")[0]
    assert "no previous champion" in ask("models rollback pong", code=2)[1]
    assert ask.json("models promote pong/2 --why better") == {
        "game": "pong",
        "champion": 2,
        "before": 1,
    }
    rows = ask.json("models list pong")["models"]
    assert [(row["model"], row["aliases"]) for row in rows] == [
        ("pong/1", []),
        ("pong/2", ["champion"]),
    ]
    shown = ask.json("models show pong/2")
    assert [one["why"] for one in shown["champion_since"]] == ["better"]
    assert "bytes and signature are valid" in ask("models show pong/1")[0]
    assert ask.json("models rollback pong")["champion"] == 1
    game = connect("pong", obs=2, actions=["up", "down"], data=tmp_path / "D", consent="granted")
    with game:
        episode = game.episode(player="ada")
        episode.acted(obs=[0.0, 1.0], action="up")
        episode.end(result="win")
    typo = ask("data forget adda")[0]
    assert typo.startswith("no steps of adda exist in pong, so none were erased; check the name\n")
    for words in ("of the stream", "keep what they learned"):
        assert words not in typo
    erased = ask("data forget ada")[0]
    assert erased.startswith("erased 1 chunk and 0 spooled sessions of ada; deleted ")
    assert "keep what they learned" not in erased, "both are of runs on the game"
    assert "does not exist" in ask("models promote pong/9", code=2)[1]
    assert "the newest are pong/1, pong/2" in ask("models show pong/9", code=2)[1]
    assert "'pinball' is not registered; known are pong" in ask("models show pinball/1", code=2)[1]
    assert "'pnog' is not registered; did you mean pong?" in ask("models show pnog/1", code=2)[1]
    assert "the registered game is 'pong'" in ask("games check pnog", code=2)[1]
    assert "pong/1: restored by a rollback: by hand" in ask("models list pong")[0]
    for line in ("list pinball", "withdraw pinball", "rollback pinball", "repair pinball"):
        assert "'pinball' is not registered; known are pong" in ask(f"models {line}", code=2)[1]


def test_a_player_who_was_forgotten_before_is_not_taken_for_a_typo(ask: Asked, tmp_path: Path):
    data = tmp_path / "D"
    game = connect("pong", obs=2, actions=["up", "down"], data=data, consent="granted")
    with game:
        episode = game.episode(player="ada")
        episode.acted(obs=[0.0, 1.0], action="up")
        episode.end(result="win")
    registry = open_deployment(DataFolder(data)).registry
    epoch = registry.takeover("pong", owner="test")
    policy = random_policy(registry.specs("pong")[0], "argmax", seed=0)

    def release(read_no: int) -> None:
        lineage = Lineage(algorithm="bc", cursor_to="9", config={"read_no": read_no})
        number = registry.release(policy, lineage, epoch=epoch).model_no
        registry.set_alias("pong", "champion", number, why="test")

    release(read_no=1)
    first = ask.json("data forget ada")
    assert (first["chunks"], first["forgotten_before_s"], first["unreplaced"]) == (1, None, [])
    again = ask("data forget ada")[0]
    assert again.startswith("no steps of ada exist in pong, so none were erased; the same name")
    assert "not replaced yet: pong/1; understudy status" in again
    assert "check the name" in ask("data forget ida")[0]
    release(read_no=100)
    replaced = ask.json("data forget ada")
    assert (replaced["forgotten_before_s"] is not None, replaced["unreplaced"]) == (True, [])
    assert (first["models"], replaced["models"]) == (["pong/1"], ["pong/1"]), "not pong/2"


def test_a_missing_spec_is_named_in_a_folder_without_a_deployment(ask: Asked, tmp_path: Path):
    data = tmp_path / "D"
    for name in ("pong", "cart"):
        with connect(name, obs=2, actions=2, data=data, consent="granted") as game:
            episode = game.episode(player="ada")
            episode.acted(obs=[0.0, 1.0], action=0)
            episode.end()
        if name == "pong":
            ask("ingest --until-empty")
    assert [row["game"] for row in ask.json("games list")["games"]] == ["cart", "pong"]
    shutil.rmtree(data / "models")
    lacking = "frames of cart lack their spec, so they are not stored"
    missing = "is missing, although recorded steps need it"

    def look() -> None:
        checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
        assert (checks["specs"]["colour"], checks["specs"]["result"]) == ("yellow", lacking)
        assert "games add GAME" in checks["specs"]["next"]
        assert missing in checks["models"]["result"]
        listed = ask("games list", code=1)[0]
        assert "! pong: its spec is damaged: games/pong/" in listed
        assert f"! {lacking}; next: start the game" in listed

    look()
    ask("ingest --until-empty")  # registers pong again
    assert ask.json("games list")["without_spec"] == ["cart"]
    assert not signing_key(DataFolder(data)).exists()


def test_only_models_that_have_read_steps_of_a_forgotten_player_are_named(
    ask: Asked, tmp_path: Path
):
    data = tmp_path / "D"
    registry = open_deployment(DataFolder(data)).registry
    specs = {name: game_spec(name, obs=2, actions=2) for name in ("pong", "cart")}
    for spec in specs.values():
        registry.register(spec)
    epochs = {name: registry.takeover(name, owner="test") for name in specs}

    def play(player: str) -> None:
        with connect("pong", obs=2, actions=2, data=data, consent="granted") as game:
            episode = game.episode(player=player)
            episode.acted(obs=[0.0, 1.0], action=0)
            episode.end()
        ask("ingest --until-empty")

    def release(name: str, **config: Any) -> None:
        with StoreView(DataFolder(data).store) as view:
            cursor = "" if config else str(view.next_arrival - 1)
        lineage = Lineage(algorithm="bc", cursor_to=cursor, config={"read_no": 1} | config)
        policy = random_policy(specs[name], "argmax", seed=0)
        registry.release(policy, lineage, epoch=epochs[name])

    play("ada")
    release("pong")
    play("bob")
    release("pong")
    release("cart")
    release("pong", from_store="D/store")
    erased = ask("data forget bob")[0]
    assert (
        "that may have learned from the player keep what they learned: pong/2, pong/3\n" in erased
    )
    assert ask.json("data forget ada")["models"] == ["pong/1", "pong/2", "pong/3"]
    assert ask.json("data forget ida")["models"] == []


def test_only_champions_of_games_that_a_forgotten_player_played_are_named(
    ask: Asked, tmp_path: Path
):
    data = tmp_path / "D"
    for name, player in (("pong", "ada"), ("cart", "bob")):
        with connect(name, obs=2, actions=["up", "down"], data=data, consent="granted") as game:
            episode = game.episode(player=player)
            episode.acted(obs=[0.0, 1.0], action="up")
            episode.end(result="win")
    registry = open_deployment(DataFolder(data)).registry
    for name in ("pong", "cart"):
        epoch = registry.takeover(name, owner="test")
        policy = random_policy(registry.specs(name)[0], "argmax", seed=0)
        lineage = Lineage(algorithm="bc", cursor_to="9", config={"read_no": 1})
        number = registry.release(policy, lineage, epoch=epoch).model_no
        registry.set_alias(name, "champion", number, why="test")
    statistics = data / "learner" / "store_stats.json"
    statistics.parent.mkdir()

    def learner_reads() -> None:
        with closing(StoreStats(StoreFollower(DataFolder(data).store))) as stats:
            if statistics.exists():
                stats.restore(json.loads(statistics.read_bytes()))
            while stats.follow():
                pass
            statistics.write_text(json.dumps(stats.state()))

    ask("data forget eve")  # stores what was recorded
    learner_reads()
    ask("data forget ada")
    assert ask.json("data forget ada")["unreplaced"] == ["cart/1", "pong/1"], "not read yet"
    learner_reads()
    assert ask.json("data forget ada --game pong")["unreplaced"] == ["pong/1"]
    assert ask.json("data forget ada --game cart")["unreplaced"] == []


def test_the_cell_from_which_a_model_sees_a_grid_is_shown(ask: Asked, tmp_path: Path):
    grid = Box((5, 5, 2), np.dtype(np.uint8), 0, 1)
    place = Box((2,), np.dtype(np.float32), 0, 4)
    game = game_spec("walk", obs={"grid": grid, "place": place}, actions=4)
    registry = open_deployment(DataFolder(tmp_path / "D")).registry
    registry.register(game)
    epoch = registry.takeover("walk", owner="test")
    head = head_for(game)
    for centre in ("obs.grid 1", "obs.grid obs.place[0],obs.place[1]", "none"):
        network = network_for(game, heads=policy_outputs(head), centre=centre)
        weights = {name: np.zeros(shape, np.float32) for name, shape in network.shapes().items()}
        registry.release(Policy(game, network, weights, head), Lineage(algorithm="bc"), epoch=epoch)
    assert (
        "  sees obs.grid from the cell of channel 1, up to 4 cells away\n"
        in ask("models show walk/1")[0]
    )
    assert ask.json("models show walk/2")["centre"] == [
        "obs.grid from the cell in row obs.place[0], column obs.place[1], up to 4 cells away"
    ]
    assert "sees" not in ask("models show walk/3")[0]


def test_long_names_are_shown_whole_at_80_columns(
    ask: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    game = "a-game-with-a-name-of-forty-four-characters-x"
    ask(f"games add {game} --obs 4 --actions left,right")
    registry = open_deployment(DataFolder(tmp_path / "D")).registry
    epoch = registry.takeover(game, owner="test")
    policy = random_policy(registry.specs(game)[0], "argmax", seed=0)
    manifest = registry.release(policy, Lineage(algorithm="iql", steps=20_000), epoch=epoch)
    why = f"{'[/better] ' * 12}than {'the others ' * 12}".strip()
    registry.set_alias(game, "champion", 1, why=why)
    listed = ask("models list")[0]
    assert listed.startswith(f"{game}/1: alias champion")
    assert "…" not in listed
    assert {manifest.schema[:12], "iql,"} <= set(listed.split())
    games = ask("games list")[0]
    shown = ask(f"models show {game}/1")[0]
    assert games.startswith(f"{game}: observations float32[4]")
    for lines in (listed, games, shown):
        assert max(map(len, lines.splitlines())) <= 80
    for words in (listed, shown):
        assert f": {why}" in " ".join(words.split())
    monkeypatch.setenv("COLUMNS", "140")
    table = ask("models list")[0].splitlines()
    (row,) = (line.split() for line in table if line.startswith(f"  {game}/1 "))
    assert row[1:5] == ["champion", "iql", "20", "000"]
    assert row[-1] == manifest.schema[:12]


def test_a_damaged_model_is_neither_shown_nor_promoted(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    (blob,) = (tmp_path / "D" / "models" / "blobs").iterdir()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    for line in ("models show pong/1", "models promote pong/1"):
        assert "bad_hash" in ask(line, code=3)[1]
    (row,) = ask.json("models list", code=1)["models"]
    assert "bad_hash" in row["damage"]
    assert "(damaged)" in ask("models list", code=1)[0]
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert (checks["models"]["colour"], "pong (champion)" in checks["models"]["result"]) == (
        "red",
        True,
    )
    assert "restore the models" in checks["models"]["result"]


def test_damaged_keys_and_specs_are_reported(ask: Asked, tmp_path: Path):
    key = ask.json("keys create")
    ask(f"keys revoke {key['id']}")
    ask("games add pong --obs 2 --actions up,down")
    models = tmp_path / "D" / "models"
    (models / "keys" / "0000000002.json").write_bytes(b"x")  # the revocation
    listed = ask.json("keys list", code=1)
    assert [row["id"] for row in listed["keys"]] == [key["id"]]
    assert "1 invalid entry, ignored" in listed["damage"]
    assert "the journal of keys is damaged" in ask("keys list", code=1)[0]
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert "keys: 1 invalid entry, ignored" in checks["models"]["result"]
    assert "understudy keys repair" in checks["models"]["result"]
    assert "understudy keys repair" in ask("keys create", code=1)[1]
    misplaced = models / "keys" / "0999999999.json"
    misplaced.write_bytes(b"x")
    assert "move it away" in ask("keys list", code=1)[1]
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert "0999999999.json exists" in checks["models"]["result"]
    misplaced.unlink()
    assert ask.json("keys repair --keys revoke") == {"repaired": True, "keys": []}
    (spec,) = (models / "games" / "pong").iterdir()
    spec.write_bytes(b"x")
    ask("games add rally --obs 4 --actions up,down")
    table = ask("games list", code=1)[0]
    assert "  rally " in table
    assert f"! pong: its spec is damaged: the contents of games/pong/{spec.name} do" in table
    first, second = ask.json("games list", code=1)["games"]
    assert (first["schemas"], list(first["damage"]), second["damage"]) == ([], ["spec"], {})
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert (
        f"pong (spec): the contents of games/pong/{spec.name} do not match"
        in checks["models"]["result"]
    )
    assert ask.json("games add pong --obs 2 --actions up,down")["is_new"]
    assert ask.json("games list")["games"][0]["damage"] == {}


def test_a_damaged_journal_of_one_game_does_not_hide_the_others(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    ask("games add rally --obs 4 --actions up,down")
    for entry in (tmp_path / "D" / "models" / "registry" / "pong").iterdir():
        entry.unlink()
    listed = ask("games list", code=1)[0]
    assert "  rally " in listed
    assert "! pong: its journal is damaged: " in listed


def test_damage_in_the_middle_of_a_journal_is_named_until_an_operator_accepts_it(
    ask: Asked, tmp_path: Path
):
    ask(f"models add {a_run(tmp_path / 'one')}")
    ask(f"models add {a_run(tmp_path / 'two')}")
    for _ in range(2):
        ask("keys create")
    models = tmp_path / "D" / "models"
    for folder, number in (("keys", 1), ("registry/pong", 2)):
        (models / folder / f"{number:010d}.json").write_bytes(b"x")
    assert "1 invalid entry" in ask.json("keys list", code=1)["damage"]
    assert list(ask.json("models list", code=1)["journals"]) == ["pong"]
    assert "understudy models repair pong" in ask("models list", code=1)[0]
    ask("doctor", code=1)
    assert ask.json("keys repair --keys keep")["repaired"]
    assert ask.json("models repair pong")["repaired"]
    assert len(ask.json("keys list")["keys"]) == 1
    assert ask.json("models list")["journals"] == {}
    ask("doctor")


@pytest.mark.parametrize("fate", ["keep", "revoke"])
def test_lost_revocations_are_noticed_and_an_operator_decides_about_the_keys(
    ask: Asked, tmp_path: Path, fate: str
):
    play = ask.json("keys create")["id"]
    admin = ask.json("keys create --scopes admin")["id"]
    assert ask.json(f"keys repair --keys {fate}") == {"repaired": False, "keys": [play, admin]}
    assert "needs no repair" in ask(f"keys repair --keys {fate}")[0]
    ask(f"keys revoke {admin}")
    assert "keep" in ask("keys repair", code=2)[1]
    (tmp_path / "D" / "models" / "keys" / "0000000003.json").unlink()
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert "keys: the journal keys ends at entry 2" in checks["models"]["result"]
    assert "understudy keys repair" in ask(f"keys revoke {admin}", code=1)[1]
    assert [row["id"] for row in ask.json("keys list", code=1)["keys"]] == [play, admin]
    left = [play, admin] if fate == "keep" else []
    assert ask.json(f"keys repair --keys {fate}") == {"repaired": True, "keys": left}
    assert ask.json("keys list") == {"keys": ask.json("keys list")["keys"], "damage": ""}
    ask("doctor")


def test_the_doctor_names_damaged_and_lost_key_files(ask: Asked, tmp_path: Path):
    ask("keys create")
    deployment_key(tmp_path / "D")

    def red() -> dict[str, str]:
        checks = ask.json("doctor", code=1)["checks"]
        return {one["name"]: one["result"] for one in checks if one["colour"] == "red"}

    for name in ("key", "signing.key"):
        path = tmp_path / "D" / name
        raw = path.read_bytes()
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
        assert f"{name} is damaged" in red()[name]
        path.write_bytes(raw)
        ask("doctor")
    fingerprints = tmp_path / "D" / "models" / "deployment.json"
    fingerprints.unlink()
    assert "deployment.json beside the models is missing" in red()["models"]
    assert not fingerprints.exists()
    ask("keys list")
    ask("doctor")
    signing_key(DataFolder(tmp_path / "D")).unlink()
    assert "signing.key" in red()["models"]
    assert "restore it from a backup" in ask("keys list", code=2)[1]
    assert not signing_key(DataFolder(tmp_path / "D")).exists()


def test_the_doctor_names_an_unfinished_restore(ask: Asked, tmp_path: Path):
    (tmp_path / "D" / "restoring").mkdir(parents=True)
    last = ask.json("doctor", code=1)["checks"][-1]
    assert (last["name"], last["colour"]) == ("data folder", "red")
    assert "run 'understudy restore' with the same backup again" in last["result"]


def test_a_flipped_key_is_an_error_of_forget_instead_of_nothing_found(ask: Asked, tmp_path: Path):
    ask("games add pong --obs 2 --actions 2")
    ask("ingest --until-empty")
    path = tmp_path / "D" / "key"
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    assert "key is damaged" in ask("data forget ada", code=2)[1]
    deployment_key(tmp_path / "other")
    path.write_bytes((tmp_path / "other" / "key").read_bytes())
    assert "differs from the key" in ask("data forget ada", code=2)[1]
    checks = {one["name"]: one for one in ask.json("doctor", code=1)["checks"]}
    assert "differs from the key" in checks["key"]["result"]
    with pytest.raises(ConfigError, match="differs from the key"):
        connect("pong", obs=2, actions=2, data=tmp_path / "D")


def test_a_canary_is_withdrawn_and_a_cut_journal_of_models_is_accepted(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    ask(f"models add {a_run(tmp_path / 'two', seed=1)}")
    assert "has no canary to withdraw" in ask("models withdraw pong", code=2)[1]
    registry = open_deployment(DataFolder(tmp_path / "D")).registry
    registry.set_alias("pong", "canary", 2, why="test")
    assert ask.json("models withdraw pong --why test") == {"game": "pong", "withdrawn": 2}
    assert registry.catalogue("pong").model_of("canary") == 0
    assert not ask.json("models repair pong")["repaired"]
    max((tmp_path / "D" / "models" / "registry" / "pong").iterdir()).unlink()
    assert "understudy models repair pong" in ask("models list", code=1)[1]
    assert "understudy models repair pong" in ask("status", code=1)[0] + ask("status", code=1)[1]
    repaired = ask.json("models repair pong")
    assert repaired == {"game": "pong", "repaired": True, "models": 2, "champion": 1}
    ask("models list")
    ask("doctor")


def test_models_are_exported_with_a_checksum_that_other_tools_check(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    (blob,) = (tmp_path / "D" / "models" / "blobs").iterdir()
    assert (
        "SHA-256"
        in ask(f"models export pong/champion --safetensors --out {tmp_path / 'p.safetensors'}")[0]
    )
    assert (tmp_path / "p.safetensors").read_bytes() == blob.read_bytes()
    facts = json.loads(
        ask(f"models export pong/1 --json --out {tmp_path / 'p.json'}")[0].splitlines()[-1]
    )
    assert (facts["model"], facts["policy_sha256"]) == (
        "pong/1",
        hashlib.sha256(blob.read_bytes()).hexdigest(),
    )
    for name in ("p.safetensors", "p.json"):
        digest, named = (tmp_path / f"{name}.sha256").read_text().split()
        assert (digest, named) == (hashlib.sha256((tmp_path / name).read_bytes()).hexdigest(), name)
    told = json.loads((tmp_path / "p.json").read_text())
    policy = decode_policy(blob.read_bytes())
    assert told["game"] == json.loads(policy.game.to_json())
    for name, weights in policy.weights.items():
        assert np.asarray(told["weights"][name], np.float32).tobytes() == weights.tobytes()
    both = f"models export pong/1 --json --safetensors --out {tmp_path / 'q'}"
    assert "export once with each" in ask(both, code=2)[1]
    assert not (tmp_path / "q").exists()
    assert "has no canary" in ask("models export pong/canary", code=2)[1]
    assert "is a folder" in ask(f"models export pong/1 --out {tmp_path}", code=2)[1]


def test_a_failed_export_leaves_every_file_unchanged(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "p.json").write_text("old")
    (folder / "p.json.sha256").mkdir()
    assert (
        "p.json.sha256 is a folder"
        in ask(f"models export pong/1 --json --out {folder / 'p.json'}", code=2)[1]
    )
    assert (folder / "p.json").read_text() == "old"
    errors = ask(f"models export pong/1 --out {folder / 'p.json' / 'q'}", code=2)[1]
    assert "p.json does not exist; create it first" in errors
    assert "too long" in ask(f"models export pong/1 --out {folder / ('x' * 300)}", code=3)[1]
    assert sorted(path.name for path in folder.iterdir()) == ["p.json", "p.json.sha256"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes on Windows")
def test_an_export_replaces_no_device_and_no_link(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        assert (
            "is a device or a pipe"
            in ask(f"models export pong/1 --out {tmp_path / name}", code=2)[1]
        )
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "there.safetensors")
    ask(f"models export pong/1 --out {tmp_path / 'link'}")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there.safetensors.sha256").is_file()


def test_an_export_to_a_full_disk_leaves_nothing(ask: Asked, tmp_path: Path):
    ask(f"models add {a_run(tmp_path / 'one')}")
    disk = tmp_path / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("no full disk: mounting a tmpfs needs Linux and root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no full disk: a tmpfs cannot be mounted here ({done.stderr.strip()})")
    try:
        # There is room for the one file and not for its checksum.
        assert "free some space" in ask(f"models export pong/1 --out {disk / 'p'}", code=3)[1]
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    "command",
    [
        "keys",
        "keys create",
        "keys list",
        "keys revoke",
        "keys repair",
        "games",
        "games add",
        "games list",
        "games check",
        "models",
        "models list",
        "models show",
        "models add",
        "models promote",
        "models rollback",
        "models withdraw",
        "models repair",
        "models export",
        "arena",
        "arena duel",
    ],
)
def test_every_command_has_help_with_two_examples(command: str, capsys: pytest.CaptureFixture[str]):
    assert run_command([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.count("understudy ") >= 3
