"""Logs of others: what they get, and that none of them can hold up a run."""

import contextlib
import importlib
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.platform.switches import GAME, QUICK
from understudy.core.errors import ConfigError, MissingExtra
from understudy.training import sinks
from understudy.training.events import EpisodeEnded, Evaluation, Event, Started, Stop, Update
from understudy.training.sinks import Feed, Feeds, call_all, numbers_of, sinks_named

STARTED = Started(env_steps=0, run="R", game="g", algorithm="dqn", seed=0, steps=100, until=None)


def episode(env_steps: int) -> Event:
    return EpisodeEnded(env_steps=env_steps, env=0, return_=1.5, length=7)


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


class Hung(Kept):
    """A sink that waits for a server that never answers."""

    def __init__(self, entered: threading.Event | None = None) -> None:
        super().__init__()
        self.entered = entered or threading.Event()
        self.released = threading.Event()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.entered.set()
        self.released.wait(60.0)


def fed(sink: Any, events: list[Event], **settings: Any) -> Feed:
    feed = Feed("kept", lambda started: sink, **settings)
    for event in [STARTED, *events]:
        feed.handle_event(event)
    return feed


def test_a_sink_gets_every_number_in_order_and_is_closed():
    sink = Kept()
    feed = fed(sink, [episode(step) for step in range(500)])
    feed.close()
    feed.close()
    assert sink.steps == list(range(500))
    assert sink.is_closed
    assert feed.warning == ""


def test_numbers_have_speaking_names():
    assert numbers_of(episode(3)) == {"train/return": 1.5, "train/length": 7.0}
    update = Update(
        env_steps=1, updates=2, version=3, replay_ratio=4.0, lag_versions=5, metrics={"loss": 6.0}
    )
    assert numbers_of(update) == {
        "learner/updates": 2.0,
        "learner/replay_ratio": 4.0,
        "learner/lag_versions": 5.0,
        "learner/loss": 6.0,
    }
    evaluation = Evaluation(env_steps=1, returns=[1.0], mean=1.0, low=0.5, high=1.5, is_best=True)
    assert numbers_of(evaluation) == {
        "evaluation/return": 1.0,
        "evaluation/low": 0.5,
        "evaluation/high": 1.5,
    }
    assert numbers_of(STARTED) == {}


def test_a_hanging_sink_loses_its_oldest_entries_and_blocks_nothing():
    sink = Hung()
    feed = fed(sink, [episode(0)], queue=10)
    assert sink.entered.wait(30.0)
    for step in range(1, 101):
        feed.handle_event(episode(step))
    feed.close(timeout_s=0.01)
    assert feed.is_hanging
    assert feed.dropped == 90
    assert feed.warning == "log kept is hanging; 100 entries were not written"
    assert feed._waiting[0][0] == 91
    sink.released.set()


def test_a_sink_that_fails_to_open_or_write_is_disabled():
    def refuse(started: Started) -> Any:
        raise OSError("no route to the server")

    feed = Feed("kept", refuse)
    feed.handle_event(STARTED)
    feed.close()
    feed.handle_event(episode(1))
    assert feed.warning == "log kept failed and was disabled: OSError: no route to the server"


def test_a_slow_sink_reports_what_it_missed():
    feed = fed(Kept(), [])
    feed.dropped = 3
    feed.close()
    assert feed.warning == "log kept was too slow; 3 entries were not written"


def test_a_run_with_a_hung_and_a_failing_sink_ends_as_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hung = Hung()

    def fails(started: Started) -> Any:
        raise RuntimeError("not signed in")

    opened = {"tensorboard": ("json", lambda started: hung), "wandb": ("json", fails)}
    monkeypatch.setattr(sinks, "SINKS", opened)
    monkeypatch.setattr(Feeds.close, "__defaults__", (0.1,))
    said: list[str] = []
    run = understudy.train(
        GAME,
        steps=1_024,
        settings=QUICK,
        out=tmp_path / "R",
        options=understudy.TrainOptions(log="tensorboard,wandb", on_warning=said.append),
    )
    hung.released.set()
    assert run.result["env_steps"] == 1_024
    assert "log tensorboard is hanging" in said[0]
    assert "log wandb failed and was disabled: RuntimeError: not signed in" in said[1]


def test_an_unknown_log_and_a_missing_package_are_rejected(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="give one or more of mlflow, tensorboard, wandb"):
        sinks_named("tensorboard2")
    monkeypatch.setattr(sinks, "SINKS", {"wandb": ("no_such_package", Kept)})
    with pytest.raises(MissingExtra, match=r"pip install 'understudy\[wandb\]'"):
        sinks_named(["wandb"])


STAND_INS = {
    "tensorboardX": """
class SummaryWriter:
    def __init__(self, logdir, purge_step): log("open", logdir, purge_step)
    def add_scalar(self, name, value, step): log(name, value, step)
    def close(self): log("close")
""",
    "wandb": """
class Run:
    def log(self, numbers, step): log(numbers, step)
    def finish(self): log("close")
def init(project, group, name, dir, config):
    log("open", project, group, name, config["seed"])
    return Run()
""",
    "mlflow": """
def set_tracking_uri(uri): log("open", uri)
def set_experiment(name): log(name)
def start_run(run_name): log(run_name)
def log_params(facts): log(facts["game"])
def log_metrics(numbers, step): log(numbers, step)
def end_run(): log("close")
""",
}


@pytest.mark.parametrize("package", STAND_INS)
def test_each_adapter_speaks_its_packages_language(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = (
        f"def log(*words):\n    with open({str(tmp_path / 'log')!r}, 'a') as file: print(*words, "
        "file=file)\n"
    )
    (tmp_path / f"{package}.py").write_text(log + STAND_INS[package])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    name = package.removesuffix("X").lower()
    feed = Feed(name, sinks_named(name)[name])
    feed.handle_event(STARTED)
    feed.handle_event(episode(5))
    feed.close()
    sys.modules.pop(package)
    assert feed.warning == ""
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].startswith("open")
    assert lines[-1] == "close"
    assert any("train/return" in line and "1.5" in line and "5" in line for line in lines)


def test_the_real_tensorboard_writer_writes_a_file(tmp_path: Path):
    started = Started(
        env_steps=10, run=str(tmp_path), game="g", algorithm="dqn", seed=0, steps=100, until=None
    )
    feed = Feed("tensorboard", sinks_named("tensorboard")["tensorboard"])
    feed.handle_event(started)
    feed.handle_event(episode(11))
    feed.close()
    assert feed.warning == ""
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/return" in file.read_bytes()


FED = """
import sys
from understudy.training.sinks import Feed, sinks_named
from understudy.training.events import EpisodeEnded, Started
run, name = sys.argv[1:]
feed = Feed(name, sinks_named(name)[name])
started = Started(
    env_steps=0, run=run, game="g", algorithm="dqn", seed=7, steps=100, until=None
)
feed.handle_event(started)
for step in (5, 6):
    feed.handle_event(EpisodeEnded(env_steps=step, env=0, return_=step / 4, length=7))
feed.close(timeout_s=200.0)
sys.exit(feed.warning or 0)
"""
"""In a process of its own: they start threads and services, and have much to warn of."""


def fed_for_real(name: str, run: Path) -> None:
    run.mkdir()
    alone = {
        "WANDB_MODE": "offline",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(run.parent),
    }
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_"))
    }
    command = [sys.executable, "-c", FED, str(run), name]
    told = subprocess.run(
        command, capture_output=True, text=True, env=kept | alone, cwd=run.parent, timeout=280
    )
    assert told.returncode == 0, told.stderr


def test_what_the_real_mlflow_wrote_can_be_read_back(tmp_path: Path):
    fed_for_real("mlflow", tmp_path / "R")
    with contextlib.closing(sqlite3.connect(tmp_path / "R" / "mlflow.db")) as database:
        returns = database.execute(
            "select step, value from metrics where key = 'train/return' order by step"
        )
        assert returns.fetchall() == [(5, 1.25), (6, 1.5)]
        assert dict(database.execute("select key, value from params"))["seed"] == "7"
        assert database.execute("select name, status from runs").fetchall() == [("R", "FINISHED")]


def test_what_the_real_wandb_wrote_can_be_read_back(tmp_path: Path):
    fed_for_real("wandb", tmp_path / "R")
    (file,) = (tmp_path / "R" / "wandb").glob("offline-run-*/run-*.wandb")
    told = list(wandb_records(file.read_bytes()))
    rows = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in one.history.item}
        for one in told
    ]
    assert [row["train/return"] for row in rows if row] == ["1.25", "1.5"]
    assert [row["_step"] for row in rows if row] == ["5", "6"]
    (started,) = [one.run for one in told if one.HasField("run")]
    assert (started.project, started.display_name, started.run_group) == ("understudy", "R", "g")
    assert {item.key: item.value_json for item in started.config.update}["seed"] == "7"


def wandb_records(raw: bytes) -> Iterator[Any]:
    """A log of blocks: 4 bytes of checksum, 2 of length, 1 that says whether the entry is whole;
    7 before them all."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    assert raw[:4] == b":W&B"
    assert len(raw) < 32_768, "more than one block"
    at = 7
    while at < len(raw):
        size_bytes, kind = struct.unpack_from("<HB", raw, at + 4)
        assert kind == 1
        yield messages.Record.FromString(raw[at + 7 : at + 7 + size_bytes])
        at += 7 + size_bytes


def test_several_listeners_hear_everything_and_any_may_stop():
    heard: list[Event] = []
    assert call_all(heard.append, None)(STARTED) is None
    assert call_all(heard.append, lambda event: Stop, heard.append)(STARTED) is Stop
    assert heard == [STARTED] * 3
