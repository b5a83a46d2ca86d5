"""Status: the state of roles from the data folder, and advice for the operator."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.backends.test_deployment import GAME, a_run
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.cli.root import run as run_command
from understudy.cli.status import platform_status as status
from understudy.core.log import FileLock
from understudy.models.catalogue import Control
from understudy.release.gatekeeper import release_run
from understudy.testing.clock import START_S, ManualClock

ADVICE = "12 steps are not learned from: consent unknown; next: ask players"
LEARNT = {
    "phase": "bc",
    "doing": "wait",
    "why": "12 of 1000 steps",
    "missing_steps": 988,
    "gave_up": "iql failed 3 times",
    "error": "",
    "schedule": ["from 1000 steps: bc"],
    "consent_unknown_steps": 12,
    "best_episodes": 4,
    "known_episodes": 20,
    "people": {"players": 3, "episodes": 20, "mean": 4.5, "best": 12.25},
    "returns": {"pong/1": {"episodes": 7, "mean": 6.5}},
    "next": ADVICE,
}


@pytest.fixture
def held() -> Iterator[ExitStack]:
    before = signal.getsignal(signal.SIGTERM)
    with ExitStack() as opened:
        yield opened
    signal.signal(signal.SIGTERM, before)


def leave(data: Path, role: str, held: ExitStack | None, **more: Any) -> None:
    """Write what a supervisor writes for a role; its lock is held while the role is alive."""
    folder = data / "roles"
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "role": role,
        "state": "running",
        "pid": 1,
        "since_s": START_S,
        "restarts": 0,
        "last_error": "",
        "at_s": START_S,
        "report": {},
        "rates": {},
    }
    (folder / f"{role}.json").write_text(json.dumps(fields | more))
    lock = FileLock(folder / f"{role}.lock", what=role)
    held.enter_context(lock) if held is not None else lock.close()


def look(data: Path, *, later_s: float = 0.0) -> dict[str, Any]:
    return status(DataFolder(data), clock=ManualClock(START_S + later_s))


def test_roles_games_schedule_and_advice_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    release_run(open_deployment(DataFolder(data)), a_run(tmp_path / "one"))
    leave(data, "gateway", held, report={"url": "http://here"}, rates={"frames": 2.5})
    leave(data, "ingest", held, report={"lag_s": 0.25})
    leave(data, "learner", held, report={"games": {GAME.game: LEARNT}})
    found = look(data)
    assert (found["ok"], found["url"], found["lag_s"]) == (True, "http://here", 0.25)
    assert {role["role"]: role["rates"] for role in found["roles"]}["gateway"] == {"frames": 2.5}
    (game,) = found["games"]
    assert (game["models"], game["champion"], game["phase"]) == (1, 1, "bc")
    run_command(["status", "--data", str(data)])
    assert "\n  clones the best 4 of 20 whole episodes\n" in capsys.readouterr().out
    assert found["next"] == [f"pong: {ADVICE}"]


def test_the_control_of_a_trial_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "D"
    deployment = open_deployment(DataFolder(data))
    for at, name in enumerate(("one", "two", "three")):
        release_run(deployment, a_run(tmp_path / name, seed=at))
    deployment.registry.set_alias(GAME.game, "champion", 2, why="better")
    deployment.registry.set_alias(
        GAME.game, "canary", 3, why="test", share=0.5, control=Control(1, 0.05)
    )
    assert look(data)["games"][0]["control"] == 1
    run_command(["status", "--data", str(data)])
    assert ", control pong/1" in capsys.readouterr().out
    assert run_command(["models", "list", "--data", str(data), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["aliases"] for row in rows["models"]] == [["control"], ["champion"], ["canary"]]


def test_a_canary_that_replaces_a_champion_after_a_forget_is_not_said_to_be_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    deployment = open_deployment(DataFolder(data))
    for at, name in enumerate(("one", "two")):
        release_run(deployment, a_run(tmp_path / name, seed=at))
    deployment.registry.set_alias(GAME.game, "canary", 2, why="test", share=0.5)
    for margin, claim in (
        (0.0, "a proof that it is better)"),
        (0.1, "a proof that this replacement is at most 0.1 of the range worse)"),
    ):
        learned = LEARNT | {"canary_evidence": 0.5, "canary_margin": margin}
        leave(data, "learner", held, report={"games": {GAME.game: learned}}, at_s=4e9)
        held.close()
        run_command(["status", "--data", str(data)])
        assert claim in " ".join(capsys.readouterr().out.split())


def test_status_says_why_a_canary_cannot_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    release_run(open_deployment(DataFolder(data)), a_run(tmp_path / "one", seed=0))
    learned = LEARNT | {"canary_waits": "no episode has ended so far"}
    leave(data, "learner", held, report={"games": {GAME.game: learned}}, at_s=4e9)
    run_command(["status", "--data", str(data)])
    assert "\n  no episode has ended so far\n" in capsys.readouterr().out


def test_status_counts_episodes_whose_draw_was_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    release_run(open_deployment(DataFolder(data)), a_run(tmp_path / "one", seed=0))
    learned = LEARNT | {"not_compared": {"reused": 3, "forged_ticket": 1}}
    leave(data, "learner", held, report={"games": {GAME.game: learned}}, at_s=4e9)
    run_command(["status", "--data", str(data)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "episodes that the gate does not compare: 1 forged_ticket, 3 reused" in shown


def test_a_waiting_silent_or_ended_role_is_unhealthy(tmp_path: Path, held: ExitStack):
    leave(tmp_path, "gateway", held, state="waiting", last_error="ended with exit code 7: no luck")
    leave(tmp_path, "ingest", None, state="ended")
    found = look(tmp_path)
    assert [(role["state"], role["alive"]) for role in found["roles"]] == [
        ("waiting", False),
        ("not running", False),
    ]
    assert found["next"][0] == "gateway waiting: ended with exit code 7: no luck"
    assert not found["ok"]
    leave(tmp_path, "learner", held)
    assert look(tmp_path)["roles"][2]["alive"]
    silent = look(tmp_path, later_s=60)["roles"][2]
    assert (silent["state"], silent["alive"], silent["rates"]) == ("silent", False, {})


def test_a_role_whose_supervisor_was_killed_has_ended(tmp_path: Path):
    leave(tmp_path, "ingest", None)
    found = look(tmp_path)
    assert [role["state"] for role in found["roles"]] == ["ended"]
    assert found["next"][0].startswith("ingest ended: its supervisor was killed; start it again")


def test_damaged_keys_are_unhealthy_and_the_next_step_is_shown(tmp_path: Path, held: ExitStack):
    data = tmp_path / "D"
    keys = open_deployment(DataFolder(data)).keys
    keys.create(["admin"])
    _, key = keys.create(["play"])
    keys.revoke(key.id)
    leave(data, "gateway", held)
    assert look(data)["ok"]
    (*_, last) = sorted((data / "models" / "keys").iterdir())
    last.write_bytes(last.read_bytes()[:-3])
    found = look(data)
    assert not found["ok"]
    assert "understudy keys repair" in found["next"][0]


def test_a_role_that_stopped_reporting_is_unhealthy_and_its_lag_grows(
    tmp_path: Path, held: ExitStack
):
    leave(tmp_path, "ingest", held, state="silent", report={"lag_s": 0.25}, report_age_s=7.0)
    found = look(tmp_path, later_s=1.0)
    assert (found["ok"], found["lag_s"]) == (False, 8.25)
    (role,) = found["roles"]
    assert (role["state"], role["alive"], role["report_age_s"]) == ("silent", False, 8.0)
    assert found["next"][0] == (
        "ingest silent: it has reported nothing for 8 s, and will be restarted if it stays silent"
    )


def test_a_supervisor_that_stopped_is_named(tmp_path: Path, held: ExitStack):
    leave(tmp_path, "ingest", held, report={"lag_s": 0.25})
    found = look(tmp_path, later_s=60.0)
    assert found["lag_s"] is None
    assert found["next"][0] == "ingest silent: its supervisor has written no status for 60 s"


def test_a_learner_with_an_unreachable_store_is_unhealthy(tmp_path: Path, held: ExitStack):
    leave(
        tmp_path,
        "learner",
        held,
        report={"window": {"items": 7, "error": "db:9042 does not answer; is it up?"}},
    )
    found = look(tmp_path)
    assert not found["ok"]
    assert (
        found["next"][0]
        == "learner receives no new steps and learns from those it has: db:9042 does not answer; "
        "is it up?"
    )
    leave(tmp_path / "two", "learner", held, report={"window": {"items": 7, "error": ""}})
    assert look(tmp_path / "two")["ok"]


@pytest.mark.parametrize("field", ["error", "failing"])
def test_a_training_that_fails_is_unhealthy_and_named_in_one_line(
    tmp_path: Path, held: ExitStack, capsys: pytest.CaptureFixture[str], field: str
):
    """A learner of an earlier version reports only `error`."""
    failing = LEARNT | {field: "steps is -1; pass a number above 0", "next": ""}
    leave(tmp_path, "learner", held, report={"games": {GAME.game: failing}}, at_s=4e9)
    (line,) = look(tmp_path)["next"]
    assert line == (
        "pong: training fails and is repeated: steps is -1; pass a number above 0; if the reason "
        f"is not clear, next: understudy doctor --data {tmp_path}"
    )
    assert run_command(["status", "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("steps is -1") == 1


def test_a_gateway_that_cannot_store_is_unhealthy(
    tmp_path: Path, held: ExitStack, capsys: pytest.CaptureFixture[str]
):
    leave(tmp_path, "gateway", held, report={"storage_error": ""}, at_s=4e9)
    assert look(tmp_path)["ok"]
    held.close()
    leave(
        tmp_path,
        "gateway",
        held,
        report={"storage_error": "no room for it; free some space"},
        at_s=4e9,
    )
    found = look(tmp_path)
    assert not found["ok"]
    assert found["next"] == [
        "gateway accepts nothing, clients keep their steps: no room for it; free some space"
    ]
    assert run_command(["status", "--data", str(tmp_path)]) == 1
    assert "no room for it" in capsys.readouterr().out


def test_an_unreadable_role_status_is_reported_as_silent(tmp_path: Path, held: ExitStack):
    leave(tmp_path, "gateway", held)
    (tmp_path / "roles" / "gateway.json").write_text('{"role": "gat')
    assert look(tmp_path)["roles"][0]["state"] == "silent"


def test_status_without_running_roles_names_the_command_that_starts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    assert run_command(["status", "--data", str(tmp_path), "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["roles"], fields["games"], fields["steps"]) == ([], [], 0)
    assert fields["next"][0].startswith("nothing is running; next: understudy up")


def test_a_folder_that_does_not_exist_is_rejected_instead_of_reported_as_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "typo"
    assert run_command(["status", "--data", str(data)]) == 2
    assert f"{data} does not exist; pass the data folder" in capsys.readouterr().err
    assert run_command(["doctor", "--data", str(data), "--json"]) == 0
    *_, check = json.loads(capsys.readouterr().out)["checks"]
    assert (check["name"], check["colour"]) == ("data folder", "yellow")
    assert check["result"] == f"{data} does not exist"
    assert not data.exists()


def test_a_damaged_champion_is_unhealthy_and_the_rollback_is_shown(tmp_path: Path, held: ExitStack):
    data = tmp_path / "D"
    deployment = open_deployment(DataFolder(data))
    release_run(deployment, a_run(tmp_path / "one"))
    leave(data, "gateway", held)
    assert look(data)["ok"]
    (blob,) = (data / "models" / "blobs").iterdir()
    blob.write_bytes(blob.read_bytes()[:-1])
    found = look(data)
    assert not found["ok"]
    assert "champion" in found["games"][0]["damage"]
    assert "restore the models from a backup" in found["next"][0]
    release_run(deployment, a_run(tmp_path / "two", seed=1))
    deployment.registry.set_alias(GAME.game, "champion", 2, why="newer")
    assert look(data)["ok"]
    for one in (data / "models" / "blobs").iterdir():
        one.write_bytes(one.read_bytes()[:-1])
    assert f"models rollback {GAME.game}" in look(data)["next"][0]


def test_a_damaged_spec_is_unhealthy_and_named(tmp_path: Path, held: ExitStack):
    data = tmp_path / "D"
    open_deployment(DataFolder(data)).registry.register(GAME)
    leave(data, "gateway", held)
    assert look(data)["ok"]
    (spec,) = (data / "models" / "games" / GAME.game).iterdir()
    spec.write_bytes(spec.read_bytes().replace(b"pong", b"gong"))
    found = look(data)
    assert not found["ok"]
    (line,) = found["next"]
    assert f"pong: its spec is damaged: the contents of games/pong/{spec.name} do not match" in line
    assert "restore it from a backup" in line


def test_lost_fingerprints_and_keys_are_unhealthy_and_not_created_again(
    tmp_path: Path, held: ExitStack
):
    open_deployment(DataFolder(tmp_path)).keys.create(["play"])
    leave(tmp_path, "gateway", held)
    assert look(tmp_path)["ok"]
    fingerprints = tmp_path / "models" / "deployment.json"
    fingerprints.unlink()
    found = look(tmp_path)
    assert not found["ok"]
    assert "deployment.json beside the models is missing" in found["next"][0]
    assert not fingerprints.exists()
    open_deployment(DataFolder(tmp_path))
    assert look(tmp_path)["ok"]
    (tmp_path / "signing.key").unlink()
    assert "missing" in look(tmp_path)["next"][0]
    assert "signing.key" in look(tmp_path)["next"][0]


def test_an_unfinished_restore_and_a_backup_are_named_instead_of_a_start(tmp_path: Path):
    restoring = tmp_path / "D" / "restoring"
    restoring.mkdir(parents=True)
    (line,) = look(tmp_path / "D")["next"]
    assert "is running or did not finish; run 'understudy restore'" in line
    (tmp_path / "B").mkdir()
    (tmp_path / "B" / "backup.json").write_text("{}")
    (line,) = look(tmp_path / "B")["next"]
    assert "is a backup" in line


def test_the_rest_is_shown_while_models_are_unreachable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    keys = tmp_path / "keys"
    open_deployment(DataFolder(data))
    keys.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    place = f"s3://bots/here?endpoint=http://127.0.0.1:1&region=here&credentials={keys}"
    (data / "understudy.toml").write_text(f'[models]\nurl = "{place}"\n')
    leave(data, "learner", held, report={"games": {GAME.game: LEARNT}}, at_s=4e9)
    assert run_command(["status", "--data", str(data)]) == 1
    said = capsys.readouterr().out
    for words in (
        "running",
        "pong: 0 steps, models unknown",
        "cannot read models: ",
        "127.0.0.1:1",
    ):
        assert words in said


def test_steps_and_bots_are_shown_by_schema_if_a_game_has_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    release_run(open_deployment(DataFolder(data)), a_run(tmp_path / "one"))
    first = GAME.schema
    second = "ab" * 32
    learned = LEARNT | {"schema": first, "schema_steps": {first: 1_000, second: 120}}
    leave(data, "learner", held, report={"games": {GAME.game: learned}}, at_s=4e9)
    assert look(data)["games"][0]["schema_steps"] == {first: 1_000, second: 120}
    assert run_command(["status", "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert f"  schema {first[:12]}: 1 000 steps, champion pong/1, trained now\n" in said
    assert "  schema abababababab: 120 steps, no bot yet\n" in said
    held.close()
    learned["schema_steps"] = {first: 1_000}
    leave(data, "learner", held, report={"games": {GAME.game: learned}}, at_s=4e9)
    assert run_command(["status", "--data", str(data)]) == 0
    assert "schema " not in capsys.readouterr().out.replace("of its schema", "")


def test_equal_schedules_are_shown_once_and_long_lines_are_wrapped(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    held: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "80")
    line = "from 20000 steps of people and bots on: iql instead, in the same way, " * 2
    other = LEARNT | {"schedule": ["another one"]}
    why = " ".join(["[/b]"] * 30)
    learned = LEARNT | {"schedule": [line.strip()], "why": why}
    games = {"hexagon": learned, "maze": other, "pong": learned}
    leave(tmp_path, "learner", held, report={"games": games}, at_s=4e9)
    run_command(["status", "--data", str(tmp_path)])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.split())
    assert (words.count(line.strip()), words.count("another one")) == (1, 1)
    assert "\n  schedule: the same as that of hexagon\n" in said
    assert why in words


def test_the_text_output_shows_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: ExitStack
):
    data = tmp_path / "D"
    for name in ("one", "two"):
        release_run(open_deployment(DataFolder(data)), a_run(tmp_path / name))
    registry = open_deployment(DataFolder(data)).registry
    epoch = registry.catalogue(GAME.game).epoch
    registry.reject(GAME.game, 2, why="loads: it is damaged", epoch=epoch)
    leave(
        data,
        "learner",
        held,
        report={"games": {GAME.game: LEARNT}},
        at_s=4e9,
        restarts=3,
        last_error="[oops]",
    )
    assert run_command(["status", "--data", str(data)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "learner",
        "[oops]",
        "champion pong/1",
        "people 4.5 on average and 12.25 for the best of 3 (first 20 episodes), champion 6.5 ",
        "bc, wait: 12 of 1000 steps",
        "next candidate: after 988 more steps",
        "pong/1: promoted: the first bot of its schema",
        "pong/2: reject: loads: it is damaged",
        "iql failed 3 times",
        "from 1000 steps: bc",
        ADVICE,
    ):
        assert words in said
    assert run_command(["models", "list", "--data", str(data)]) == 0
    listed = capsys.readouterr().out
    assert "6.5 (7)" in listed
    assert "pong/1: promoted: " in listed
    assert "pong/2: reject: loads: it is damaged" in listed
    assert run_command(["status", "--help"]) == 0
    assert capsys.readouterr().out.count("understudy ") >= 3
