"""The gateway's process: its end, and the roles of its data folder in its metrics."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from understudy.backends.data import DataFolder
from understudy.core.log import FileLock
from understudy.platform.children import python_module
from understudy.platform.config import Config, GatewaySection, write_config
from understudy.platform.gateway_process import RoleMetrics, learner_progress, role_states
from understudy.platform.platform import Role, RoleStatus, read_roles
from understudy.serve.state import GameProgress
from understudy.testing.clock import START_S, ManualClock

NATIVE = {
    "stored": 512,
    "lag_s": 0.25,
    "fates": {"new": 3, "duplicate": 1},
    "refusals": {"bad_action": 2},
}
SPARK = {
    **NATIVE,
    "engine": "spark",
    "batch": 7,
    "batch_rows": 4,
    "batch_s": 0.5,
    "spark_ui": "http://127.0.0.1:4040",
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def metrics(
    tmp_path: Path,
    clock: ManualClock,
    report: dict[str, Any],
    *,
    state: str = "running",
    silent_s: float = 0.0,
    name: str = "ingest",
) -> str:
    """The gateway's metrics for a role with this status."""
    role = Role(name=name, command=lambda _: (), drain_s=1.0)
    status = RoleStatus(role, state=state, restarts=2, last_report=report, silent_s=silent_s)
    folder = tmp_path / "roles"
    with FileLock(folder / f"{name}.lock", what=name):
        (folder / f"{name}.json").write_text(json.dumps(status.to_json(START_S)))
        registry = CollectorRegistry()
        registry.register(RoleMetrics(DataFolder(tmp_path), clock))
        return generate_latest(registry).decode()


def test_native_and_spark_have_the_same_metrics(tmp_path: Path, clock: ManualClock):
    for engine, report in (("native", NATIVE), ("spark", SPARK)):
        told = metrics(tmp_path, clock, report)
        for line in (
            f'understudy_ingest_running{{engine="{engine}"}} 1.0',
            f'understudy_ingest_restarts_total{{engine="{engine}"}} 2.0',
            f'understudy_ingest_steps_total{{engine="{engine}"}} 512.0',
            f'understudy_ingest_frames_total{{engine="{engine}",fate="new"}} 3.0',
            f'understudy_ingest_frames_total{{engine="{engine}",fate="duplicate"}} 1.0',
            f'understudy_ingest_refusals_total{{engine="{engine}",reason="bad_action"}} 2.0',
            f'understudy_ingest_lag_seconds{{engine="{engine}"}} 0.25',
        ):
            assert line in told.splitlines()
        assert ("understudy_ingest_batch_seconds" in told) == (engine == "spark")


def test_spark_reports_its_last_batch(tmp_path: Path, clock: ManualClock):
    told = metrics(tmp_path, clock, SPARK).splitlines()
    assert 'understudy_ingest_batch{engine="spark"} 7.0' in told
    assert 'understudy_ingest_batch_rows{engine="spark"} 4.0' in told
    assert 'understudy_ingest_batch_seconds{engine="spark"} 0.5' in told


@pytest.mark.parametrize(
    ("state", "later_s"), [("waiting", 0.0), ("ended", 0.0), ("running", 11.0)]
)
def test_a_stopped_role_reports_no_outdated_lag(
    state: str, later_s: float, tmp_path: Path, clock: ManualClock
):
    clock.advance(later_s)
    told = metrics(tmp_path, clock, SPARK, state=state)
    assert 'understudy_ingest_running{engine="spark"} 0.0' in told
    assert "lag_seconds" not in told
    assert "batch_seconds" not in told
    assert 'understudy_ingest_steps_total{engine="spark"} 512.0' in told


def test_a_silent_role_is_not_running_and_its_lag_grows(tmp_path: Path, clock: ManualClock):
    clock.advance(1.0)
    told = metrics(tmp_path, clock, NATIVE, state="silent", silent_s=6.0).splitlines()
    for line in (
        'understudy_role_running{role="ingest"} 0.0',
        'understudy_role_report_age_seconds{role="ingest"} 7.0',
        'understudy_role_restarts_total{role="ingest"} 2.0',
        'understudy_ingest_running{engine="native"} 0.0',
        'understudy_ingest_lag_seconds{engine="native"} 7.25',
    ):
        assert line in told


def test_a_role_that_has_reported_nothing_yet_has_no_counts(tmp_path: Path, clock: ManualClock):
    told = metrics(tmp_path, clock, {}, state="starting")
    assert 'understudy_ingest_running{engine="native"} 0.0' in told
    assert "understudy_ingest_steps" not in told


@pytest.mark.parametrize("text", [None, "", "{"])
def test_without_an_ingest_role_there_are_no_ingest_metrics(
    text: str | None, tmp_path: Path, clock: ManualClock
):
    if text is not None:
        (tmp_path / "roles").mkdir()
        (tmp_path / "roles" / "ingest.json").write_text(text)
    registry = CollectorRegistry()
    registry.register(RoleMetrics(DataFolder(tmp_path), clock))
    assert generate_latest(registry) == b""


def test_episodes_whose_draw_was_not_believed_are_counted_by_game_and_reason(
    tmp_path: Path, clock: ManualClock
):
    games = {"cart": {"not_compared": {"reused": 3, "forged_ticket": 1}}, "old": {}}
    told = metrics(tmp_path, clock, {"games": games}, name="learner")
    name = "understudy_learner_episodes_not_compared"
    assert f'{name}{{game="cart",reason="reused"}} 3.0' in told
    assert f'{name}{{game="cart",reason="forged_ticket"}} 1.0' in told
    assert told.count(f"{name}{{") == 2


def test_the_progress_of_a_game_is_that_of_the_learner_beside_it():
    cart = GameProgress(missing_steps=880, schema="b", schema_steps={"a": 1_000, "b": 120})
    games = {"cart": asdict(cart), "slide": {"missing_steps": None}, "old": {}}
    roles = [{"role": "ingest", "report": {}}, {"role": "learner", "report": {"games": games}}]
    assert learner_progress(roles) == {
        "cart": cart,
        "slide": GameProgress(),
        "old": GameProgress(),
    }
    assert learner_progress(roles[:1]) == {}


def test_a_role_that_starts_again_is_restarting(tmp_path: Path):
    for restarts, state in ((0, "starting"), (1, "restarting")):
        role = Role(name="ingest", command=lambda _: (), drain_s=1.0)
        status = RoleStatus(role, restarts=restarts)
        with FileLock(tmp_path / "roles" / "ingest.lock", what="ingest"):
            (tmp_path / "roles" / "ingest.json").write_text(json.dumps(status.to_json(START_S)))
            assert role_states(read_roles(DataFolder(tmp_path), START_S)) == {"ingest": state}


def test_a_status_file_of_another_type_does_not_end_the_gateway(tmp_path: Path):
    config = Config(data=str(tmp_path / "D"), gateway=GatewaySection(port=0))
    write_config(config, tmp_path / "config.json")
    roles = tmp_path / "D" / "roles"
    roles.mkdir(parents=True)
    (roles / "ingest.lock").touch()
    (roles / "ingest.json").write_text('{"at_s": "yesterday", "report": []}')
    command = python_module(
        "understudy.platform.gateway_process", config.data, str(tmp_path / "config.json")
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reports = 0
        while reports < 3:
            reports += bool(json.loads(process.stdout.readline()).get("is_ready"))
        assert process.poll() is None
        process.kill()


def test_a_gateway_whose_killed_parent_reads_no_reports_ends_too(tmp_path: Path):
    config = Config(data=str(tmp_path / "D"), gateway=GatewaySection(port=0))
    write_config(config, tmp_path / "config.json")
    command = python_module(
        "understudy.platform.gateway_process", config.data, str(tmp_path / "config.json")
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while not json.loads(process.stdout.readline()).get("is_ready"):
            pass
        # As when its parent is killed: a report may fail before the end of its input is noticed.
        process.stdout.close()
        try:
            process.wait(60)
        finally:
            process.kill()
